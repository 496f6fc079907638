"""The collectives of a compiled program and the bytes that they send between devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
# `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['x'=2,'y'=4], device_ids=(...) {'y'}`: group axes in braces.
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d,]*\},?)+\}|\[\d+,\d+\]|mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? ?\{[^}]*\})"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_CHAIN = re.compile(r'chain_id="(\d+)"')
# A TPU's program sends to other slices through a host: to slices, numbered from 1, and the devices of each.
_TO_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
      bytes: Size of its result on one device.
      group: Number of devices in a group.
      times: Number of executions in one run of the program.
      groups: Device numbers of each group, or of each pair of a permutation; empty if the program lists none.
    """

    kind: str
    bytes: int
    group: int
    times: int
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), compare=False)

    def crosses(self, size: int) -> bool:
        """Return whether any group spans several slices or hosts of `size` devices each."""
        groups = self.groups or (range(self.group),)
        return any(len({device // size for device in members}) > 1 for members in groups)

    @property
    def sent(self) -> float:
        """Bytes that each device sends in all executions, by the ring algorithm (Thakur et al. 2005)."""
        peers = self.group - 1
        share = {
            "all-reduce": 2 * peers / self.group,
            "all-gather": peers / self.group,
            "reduce-scatter": peers,  # the result is already divided by the group
            "all-to-all": peers / self.group,
            "collective-permute": 1,
        }[self.kind]
        return self.times * self.bytes * share


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One line of a computation: `name = result opcode(arguments), attributes`."""

    name: str
    result: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
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
class _Computation:
    instructions: dict[str, _Instruction]
    root: str = ""

    def source(self, name: str) -> _Instruction | None:
        """Return the instruction that computes a value, ignoring copies."""
        instruction = self.instructions.get(name)
        while instruction is not None and instruction.opcode in ("copy", "bitcast"):
            instruction = self.instructions.get(instruction.operands[0])
        return instruction

    def constant(self, name: str) -> int | None:
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


def collectives(program: str) -> list[Collective]:
    """Return the collectives of a compiled program for CPUs, GPUs or TPUs, of one slice or several.

    A collective in a loop counts once per trip, an asynchronous collective at its start, and a `conditional`
    as the branch that sends the most.

    Args:
      program: `compiled.as_text()`.

    Raises:
      ValueError: A collective is in a loop of unknown length, or the text is no compiled program.
    """
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation({})
    for line in program.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], _Computation({}))
            entry = match[1] if line.startswith("ENTRY") else entry
        elif match := _INSTRUCTION.match(line):
            arguments, attributes = _split_at_closing(match[5])
            current.instructions[match[2]] = _Instruction(match[2], match[3], match[4], arguments, attributes)
            current.root = match[2] if match[1] else current.root
    if not entry:
        raise ValueError("the text has no ENTRY computation: pass compiled.as_text()")
    header = program.partition("\n")[0]
    devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))
    return list(_Reader(computations, devices).collectives(entry, 1))


class _Reader:
    """Reader of a program's computations; a collective without groups includes all devices."""

    def __init__(self, computations: dict[str, _Computation], devices: int):
        self._computations, self._devices = computations, devices
        self._slices = 1
        # A TPU's compiler repeats an asynchronous collective in several fusions: one that starts it, those that
        # compute meanwhile, and one that waits for it.
        self._started: set[str] = set()
        self._chains: set[str] = set()
        for computation in computations.values():
            for instruction in computation.instructions.values():
                self._slices = max([self._slices, *_slices(instruction)])
                if instruction.opcode == "custom-call" and '"AsyncCollectiveStart"' in instruction.attributes:
                    for name in instruction.operands:
                        source = computation.source(name)
                        if source is not None and source.chain is not None:
                            self._started.add(source.name)
                            self._chains.add(source.chain)

    def collectives(self, name: str, times: int) -> Iterator[Collective]:
        """Yield the collectives of a computation that runs `times` times."""
        if name not in self._computations:
            raise ValueError(f"the text has no computation {name}")
        for instruction in self._computations[name].instructions.values():
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in _KINDS:
                if instruction.chain not in self._chains or instruction.name in self._started:
                    yield self._collective(
                        instruction, scattered=name.startswith("all-reduce-scatter"), times=times
                    )
            elif opcode == "send" and (match := _TO_SLICES.search(instruction.attributes)):
                yield self._between_slices(instruction, match[1].lower().replace("_", "-"), times)
            elif opcode in ("fusion", "async"):
                yield from self.collectives(instruction.attribute("calls"), times)
            elif opcode == "call":
                yield from self.collectives(instruction.attribute("to_apply"), times)
            elif opcode == "conditional":
                yield from max(
                    (list(self.collectives(branch, times)) for branch in _branches(instruction)),
                    key=lambda operations: sum(operation.sent for operation in operations),
                )
            elif opcode == "while":
                trips = self._trips(instruction, self._computations[name])
                body = list(
                    self.collectives(instruction.attribute("body"), times * (1 if trips is None else trips))
                )
                if body and trips is None:
                    raise ValueError(f"a loop of unknown length around a collective: {instruction.name}")
                yield from body

    def _collective(self, instruction: _Instruction, *, scattered: bool, times: int) -> Collective:
        kind, result = instruction.opcode.removesuffix("-start"), instruction.result
        if instruction.opcode != kind and kind != "all-reduce":
            # A start returns (operands, results, ...), but that of an all-reduce returns only the results.
            result = _elements(result)[1]
        size, groups = _size(result), self._groups(instruction)
        group = 2 if kind == "collective-permute" else len(groups[0])  # each device sends to one peer
        if scattered and kind == "all-reduce":
            # A TPU's reduce-scatter is a fusion of an all-reduce and the slice that each device keeps.
            kind, size = "reduce-scatter", size // group
        return Collective(kind, size, group, times, groups)

    def _between_slices(self, instruction: _Instruction, kind: str, times: int) -> Collective:
        """Return the collective between the devices at the same position of each slice, from its `send`."""
        kind = kind if kind in _KINDS else "collective-permute"
        slices = _slices(instruction) or range(1, self._slices + 1)
        group, size = len(slices), _size(_elements(instruction.result)[0])
        if kind == "all-gather":
            size *= group
        elif kind == "reduce-scatter":
            size //= group
        # The program and its device numbers describe one slice.
        members = tuple((number - 1) * self._devices for number in slices)
        return Collective(kind, size, group, times, (members,))

    def _groups(self, instruction: _Instruction) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each group, or the pairs of a permutation."""
        if instruction.opcode.startswith("collective-permute"):
            match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.attributes)
            return _listed(match[1] if match else "")
        match = _GROUPS.search(instruction.attributes)
        if match is None:
            return (tuple(range(self._devices)),)
        text = match[1]
        if text.startswith("{{"):
            return _listed(text[1:-1])
        if text.startswith("["):
            return _iota_groups(instruction.attributes[match.start(1) :])
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", text)}
        axes, group = list(sizes), re.findall(r"'([^']+)'", text[text.rindex("{") :])
        order = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        order = np.moveaxis(order, [axes.index(axis) for axis in group], range(len(group)))
        return _rows(order.reshape(math.prod(sizes[axis] for axis in group), -1).T)

    def _trips(self, loop: _Instruction, computation: _Computation) -> int | None:
        """Return a loop's trips: noted by the compiler, or computed from its counter; None if unknown.

        A TPU's compiler notes none. `lax.scan` counts from one constant to another.
        """
        if match := _TRIPS.search(loop.attributes):
            return int(match[1])
        condition = self._computations.get(loop.attribute("condition"), _Computation({}))
        body = self._computations[loop.attribute("body")]
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


def _slices(instruction: _Instruction) -> list[int]:
    """Return the slices that a transfer names, `{1,2}` or `{1:4}`."""
    match = _SLICES.search(instruction.attributes)
    if match is None:
        return []
    ends = [[int(n) for n in part.split(":")] for part in match[1].split(",")]
    return [number for part in ends for number in range(part[0], part[-1] + 1)]


def _rows(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in numbers.tolist())


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse the groups of `{0,1},{2,3}`."""
    return tuple(tuple(int(n) for n in re.findall(r"\d+", group)) for group in re.findall(r"\{[\d,]*\}", text))


def _iota_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse `[groups,size]<=[dimensions]T(permutation)`: the rows of a transposed range of numbers."""
    match = re.match(r"\[(\d+),(\d+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?", text)
    assert match is not None, text
    size = int(match[2])
    if match[3] is None:
        return _rows(np.arange(int(match[1]) * size).reshape(-1, size))
    order = np.arange(int(match[1]) * size).reshape([int(n) for n in match[3].split(",")])
    if match[4]:
        order = order.transpose([int(n) for n in match[4].split(",")])
    return _rows(order.reshape(-1, size))


def _step(body: _Computation, name: str, index: int) -> int | None:
    """Return what each trip of a loop adds to an element of its state; None if it is no constant."""
    source = body.source(name)
    if source is None or source.opcode not in ("add", "subtract"):
        return None
    left, right = source.operands
    if body.element(left) == index:
        step = body.constant(right)
        return step if step is None or source.opcode == "add" else -step
    return body.constant(left) if source.opcode == "add" and body.element(right) == index else None


def _branches(conditional: _Instruction) -> list[str]:
    match = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    if match:
        return re.findall(r"[\w.\-]+", match[1])
    return [conditional.attribute("true_computation"), conditional.attribute("false_computation")]


def _split_at_closing(text: str) -> tuple[str, str]:
    """Return the text before its closing bracket, and the text after it."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ""


def _elements(result: str) -> list[str]:
    """Return the elements of a tuple type."""
    elements, depth = [""], 0
    for character in result[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _size(result: str) -> int:
    arrays = [(kind, sizes) for kind, sizes in _ARRAY.findall(result) if kind in _BYTES]
    return sum(_BYTES[kind] * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in arrays)
