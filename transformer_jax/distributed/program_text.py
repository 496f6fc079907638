"""The text of a compiled program: its computations, instructions, sizes and loops."""

from __future__ import annotations

import dataclasses
import math
import re

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
# An array outside the device's main memory, such as in a TPU's VMEM, S(1), or the host's memory, S(5).
_ELSEWHERE = re.compile(r"\b[a-z]+\d*\w*\[[\d,]*\]\{[^}]*S\(\d+\)[^}]*\}")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_CHAIN = re.compile(r'chain_id="(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = result opcode(arguments), attributes`."""

    name: str
    result: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def bytes(self) -> int:
        """The size of the result."""
        return size_of(self.result)

    @property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def attribute(self, name: str) -> str:
        """Return the first computation in an attribute, as in `body=%name` or `calls={%name}`."""
        match = re.search(rf"\b{name}=\{{?%?([\w.\-]+)", self.attributes)
        if match is None:
            raise ValueError(f"{self.opcode} without {name}: {self.name}")
        return match[1]

    @property
    def chain(self) -> str | None:
        """The id that the parts of one asynchronous collective share in a TPU program."""
        match = _CHAIN.search(self.attributes)
        return match[1] if match else None


@dataclasses.dataclass
class Computation:
    """A computation: its instructions by name, and the name of its result."""

    instructions: dict[str, Instruction]
    root: str = ""

    def source(self, name: str) -> Instruction | None:
        """Return the instruction that computes a value, ignoring copies."""
        instruction = self.instructions.get(name)
        while instruction is not None and instruction.opcode in ("copy", "bitcast"):
            instruction = self.instructions.get(instruction.operands[0])
        return instruction

    def constant(self, name: str) -> int | None:
        """Return a value if it is an integer constant, else None."""
        source = self.source(name)
        if source is None or source.opcode != "constant":
            return None
        return int(source.arguments) if re.fullmatch(r"-?\d+", source.arguments) else None

    def element(self, name: str) -> int | None:
        """Return the index of a value in the tuple that is the computation's parameter, or None."""
        source = self.source(name)
        if source is None or source.opcode != "get-tuple-element":
            return None
        origin, index = self.source(source.operands[0]), re.search(r"\bindex=(\d+)", source.attributes)
        return int(index[1]) if index and origin is not None and origin.opcode == "parameter" else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: All computations by name.
      entry: Name of the first.
      devices: Number of devices that run the program.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int

    def trips(self, loop: Instruction, computation: Computation) -> int | None:
        """Return a loop's number of trips, or None if it is unknown.

        A GPU's compiler notes it. For a TPU it is computed from the counter, because `lax.scan` counts from one
        constant to another.
        """
        if match := _TRIPS.search(loop.attributes):
            return int(match[1])
        condition = self.computations.get(loop.attribute("condition"), Computation({}))
        body = self.computations[loop.attribute("body")]
        test, carried = condition.source(condition.root), computation.source(loop.operands[0])
        result = body.source(body.root)
        if test is None or test.opcode != "compare" or carried is None or result is None:
            return None
        counter, limit = test.operands
        direction = test.attributes.partition("direction=")[2][:2]
        if condition.element(counter) is None:
            counter, limit = limit, counter
            direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
        index, last = condition.element(counter), condition.constant(limit)
        if index is None or last is None or carried.opcode != "tuple" or result.opcode != "tuple":
            return None
        first, step = computation.constant(carried.operands[index]), _step(body, result.operands[index], index)
        if first is None or not step:
            return None
        if direction == "NE" and (last - first) % step == 0 and (last - first) // step >= 0:
            return (last - first) // step
        if direction in ("LT", "LE") and step > 0:
            return len(range(first, last + (direction == "LE"), step))
        if direction in ("GT", "GE") and step < 0:
            return len(range(first, last - (direction == "GE"), step))
        return None


def parse_program(text: str) -> Program:
    """Parse a compiled program for CPUs, GPUs or TPUs.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: The text is no compiled program.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", Computation({})
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], Computation({}))
            entry = match[1] if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            arguments, attributes = _split_at_closing(match[5])
            current.instructions[match[2]] = Instruction(match[2], match[3], match[4], arguments, attributes)
            current.root = match[2] if match[1] else current.root
    if not entry:
        raise ValueError("the text has no ENTRY computation: pass compiled.as_text()")
    header = text.partition("\n")[0]
    devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))
    return Program(computations, entry, devices)


def branches(conditional: Instruction) -> list[str]:
    """Return the computations of a `conditional`."""
    match = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    if match:
        return re.findall(r"[\w.\-]+", match[1])
    return [conditional.attribute("true_computation"), conditional.attribute("false_computation")]


def _step(body: Computation, name: str, index: int) -> int | None:
    """Return what each trip of a loop adds to an element of its state; None if it is no constant."""
    source = body.source(name)
    if source is None or source.opcode not in ("add", "subtract"):
        return None
    left, right = source.operands
    if body.element(left) == index:
        step = body.constant(right)
        return step if step is None or source.opcode == "add" else -step
    return body.constant(left) if source.opcode == "add" and body.element(right) == index else None


def _split_at_closing(text: str) -> tuple[str, str]:
    """Return the text before its closing bracket, and the text after it."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ""


def elements(result: str) -> list[str]:
    """Return the elements of a tuple type."""
    parts, depth = [""], 0
    for character in result[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def size_of(result: str) -> int:
    """Return the bytes of a type, including all elements of a tuple."""
    arrays = [(kind, sizes) for kind, sizes in _ARRAY.findall(result) if kind in _BYTES]
    return sum(_BYTES[kind] * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in arrays)


def memory_bytes(result: str) -> int:
    """Return the bytes of a type's arrays that are in a device's memory."""
    return size_of(_ELSEWHERE.sub("", result))
