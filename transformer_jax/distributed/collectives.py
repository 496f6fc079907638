"""What a compiled program sends between devices: its collectives, and the bytes that they cost."""

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
# `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['x'=2,'y'=4], device_ids=(...) {'y'}`: the axes of a group in
# braces.
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d,]*\},?)+\}|\[\d+,\d+\]|mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? ?\{[^}]*\})"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_CHAIN = re.compile(r'chain_id="(\d+)"')
# What a TPU's program sends to other slices leaves by a host: slices, numbered from 1, and devices in each.
_TO_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation between devices.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
      bytes: of its result on one device.
      group: devices that take part with each other.
      times: how often a run of the program comes to it.
      groups: the numbers of each group's devices, of a permutation's those of each pair; none if the program
        does not list them.
    """

    kind: str
    bytes: int
    group: int
    times: int
    groups: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), compare=False)

    def crosses(self, size: int) -> bool:
        """Whether any group has devices of several slices or hosts of this many devices each."""
        groups = self.groups or (range(self.group),)
        return any(len({device // size for device in members}) > 1 for members in groups)

    @property
    def sent(self) -> float:
        """Bytes that each device sends in all of its times, by the ring algorithm (Thakur et al. 2005)."""
        others = self.group - 1
        share = {
            "all-reduce": 2 * others / self.group,
            "all-gather": others / self.group,
            "reduce-scatter": others,  # of the result, a part of what goes in
            "all-to-all": others / self.group,
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
        """The first computation in an attribute, as `body=%name` or `calls={%name}`."""
        found = re.search(rf"\b{name}=\{{?%?([\w.\-]+)", self.attributes)
        if found is None:
            raise ValueError(f"{self.opcode} without {name}: {self.name}")
        return found[1]

    @property
    def chain(self) -> str | None:
        """The number that the parts of one asynchronous collective share in a program for a TPU."""
        found = _CHAIN.search(self.attributes)
        return found[1] if found else None


@dataclasses.dataclass
class _Computation:
    instructions: dict[str, _Instruction]
    root: str = ""

    def source(self, name: str) -> _Instruction | None:
        """The instruction that makes a value, behind its copies."""
        found = self.instructions.get(name)
        while found is not None and found.opcode in ("copy", "bitcast"):
            found = self.instructions.get(found.operands[0])
        return found

    def constant(self, name: str) -> int | None:
        found = self.source(name)
        if found is None or found.opcode != "constant":
            return None
        return int(found.arguments) if re.fullmatch(r"-?\d+", found.arguments) else None

    def element(self, name: str) -> int | None:
        """Which element of the computation's parameter, a tuple, a value is."""
        found = self.source(name)
        if found is None or found.opcode != "get-tuple-element":
            return None
        origin, index = self.source(found.operands[0]), re.search(r"\bindex=(\d+)", found.attributes)
        return int(index[1]) if index and origin is not None and origin.opcode == "parameter" else None


def collectives(program: str) -> list[Collective]:
    """The collectives of a compiled program, those in loops as often as the loops turn.

    Reads programs for CPUs, GPUs and TPUs, of one slice and of several. Of an asynchronous collective its start
    counts. Of a `conditional` the branch that sends the most counts.

    Args:
      program: `compiled.as_text()`.

    Raises:
      ValueError: a loop of unknown length around a collective, or a text of another form.
    """
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation({})
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], _Computation({}))
            entry = found[1] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            arguments, attributes = _closed(found[5])
            current.instructions[found[2]] = _Instruction(found[2], found[3], found[4], arguments, attributes)
            current.root = found[2] if found[1] else current.root
    if not entry:
        raise ValueError("the text has no ENTRY computation: give that of a compiled program")
    header = program.partition("\n")[0]
    devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))
    return list(_Reader(computations, devices).within(entry, 1))


class _Reader:
    """Walks through the computations of a program.

    Args:
      computations: by name.
      devices: that run the program; a collective without groups is of all of them.
    """

    def __init__(self, computations: dict[str, _Computation], devices: int):
        self._computations, self._devices = computations, devices
        every = (one for computation in computations.values() for one in computation.instructions.values())
        self._slices = max((slice_ for one in every for slice_ in _slices(one)), default=1)
        # A TPU's compiler writes an asynchronous collective into several fusions, of which each holds the same
        # operation: one that starts it, those that compute meanwhile, and one that waits for it.
        self._started: set[str] = set()
        self._chains: set[str] = set()
        for computation in computations.values():
            for one in computation.instructions.values():
                if one.opcode == "custom-call" and '"AsyncCollectiveStart"' in one.attributes:
                    for name in one.operands:
                        source = computation.source(name)
                        if source is not None and source.chain is not None:
                            self._started.add(source.name)
                            self._chains.add(source.chain)

    def within(self, name: str, times: int) -> Iterator[Collective]:
        """The collectives of a computation that runs so often.

        Raises:
          ValueError: see `collectives`.
        """
        if name not in self._computations:
            raise ValueError(f"the text has no computation {name}")
        for one in self._computations[name].instructions.values():
            opcode = one.opcode.removesuffix("-start")
            if opcode in _KINDS:
                if one.chain not in self._chains or one.name in self._started:
                    yield self._collective(one, scattered=name.startswith("all-reduce-scatter"), times=times)
            elif opcode == "send" and (found := _TO_SLICES.search(one.attributes)):
                yield self._between_slices(one, found[1].lower().replace("_", "-"), times)
            elif opcode in ("fusion", "async"):
                yield from self.within(one.attribute("calls"), times)
            elif opcode == "call":
                yield from self.within(one.attribute("to_apply"), times)
            elif opcode == "conditional":
                yield from max(
                    (list(self.within(branch, times)) for branch in _branches(one)),
                    key=lambda found: sum(each.sent for each in found),
                )
            elif opcode == "while":
                trips = self._trips(one, self._computations[name])
                inside = list(self.within(one.attribute("body"), times * (1 if trips is None else trips)))
                if inside and trips is None:
                    raise ValueError(f"a loop of unknown length around a collective: {one.name}")
                yield from inside

    def _collective(self, one: _Instruction, *, scattered: bool, times: int) -> Collective:
        kind, result = one.opcode.removesuffix("-start"), one.result
        if one.opcode != kind and kind != "all-reduce":
            # (operands, results, what the compiler adds); an all-reduce starts with its results alone.
            result = _elements(result)[1]
        size, groups = _size(result), self._groups(one)
        group = 2 if kind == "collective-permute" else len(groups[0])  # each device sends to one other
        if scattered and kind == "all-reduce":
            # A TPU's reduce-scatter: a fusion of an all-reduce and of the slices that each device keeps.
            kind, size = "reduce-scatter", size // group
        return Collective(kind, size, group, times, groups)

    def _between_slices(self, one: _Instruction, kind: str, times: int) -> Collective:
        """Of the devices at the same place of each slice; what is sent is what one of them gives."""
        kind = kind if kind in _KINDS else "collective-permute"
        slices = _slices(one) or range(1, self._slices + 1)
        group, size = len(slices), _size(_elements(one.result)[0])
        if kind == "all-gather":
            size *= group
        elif kind == "reduce-scatter":
            size //= group
        # The program is that of one slice, and so are its devices.
        members = tuple((slice_ - 1) * self._devices for slice_ in slices)
        return Collective(kind, size, group, times, (members,))

    def _groups(self, one: _Instruction) -> tuple[tuple[int, ...], ...]:
        """The devices of each group; of a permutation its pairs."""
        if one.opcode.startswith("collective-permute"):
            found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", one.attributes)
            return _listed(found[1] if found else "")
        found = _GROUPS.search(one.attributes)
        if found is None:
            return (tuple(range(self._devices)),)
        text = found[1]
        if text.startswith("{{"):
            return _listed(text[1:-1])
        if text.startswith("["):
            return _iota_groups(one.attributes[found.start(1) :])
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", text)}
        axes, own = list(sizes), re.findall(r"'([^']+)'", text[text.rindex("{") :])
        order = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        order = np.moveaxis(order, [axes.index(axis) for axis in own], range(len(own)))
        return _rows(order.reshape(math.prod(sizes[axis] for axis in own), -1).T)

    def _trips(self, loop: _Instruction, around: _Computation) -> int | None:
        """How often a loop turns: as the compiler notes it, or of a loop with a counter; None if unknown.

        A TPU's compiler notes nothing. `lax.scan` counts from one constant to another.
        """
        if noted := _TRIPS.search(loop.attributes):
            return int(noted[1])
        condition = self._computations.get(loop.attribute("condition"), _Computation({}))
        body = self._computations[loop.attribute("body")]
        test, carried = condition.source(condition.root), around.source(loop.operands[0])
        following = body.source(body.root)
        if test is None or test.opcode != "compare" or carried is None or following is None:
            return None
        counter, limit = test.operands
        direction = test.attributes.partition("direction=")[2][:2]
        if condition.element(counter) is None:
            counter, limit = limit, counter
            direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
        index, last = condition.element(counter), condition.constant(limit)
        if index is None or last is None or carried.opcode != "tuple" or following.opcode != "tuple":
            return None
        first, step = around.constant(carried.operands[index]), _step(body, following.operands[index], index)
        if first is None or not step:
            return None
        if direction == "NE" and (last - first) % step == 0 and (last - first) // step >= 0:
            return (last - first) // step
        if direction in ("LT", "LE") and step > 0:
            return len(range(first, last + (direction == "LE"), step))
        if direction in ("GT", "GE") and step < 0:
            return len(range(first, last - (direction == "GE"), step))
        return None


def _slices(one: _Instruction) -> list[int]:
    """The slices that a transfer names, `{1,2}` or `{1:4}`."""
    found = _SLICES.search(one.attributes)
    if found is None:
        return []
    ends = [[int(n) for n in part.split(":")] for part in found[1].split(",")]
    return [slice_ for part in ends for slice_ in range(part[0], part[-1] + 1)]


def _rows(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in numbers.tolist())


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    """The groups of `{0,1},{2,3}`."""
    return tuple(tuple(int(n) for n in re.findall(r"\d+", one)) for one in re.findall(r"\{[\d,]*\}", text))


def _iota_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """The groups of `[groups,size]<=[dimensions]T(permutation)`: rows of a transposed range of numbers."""
    found = re.match(r"\[(\d+),(\d+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?", text)
    assert found is not None, text
    size = int(found[2])
    if found[3] is None:
        return _rows(np.arange(int(found[1]) * size).reshape(-1, size))
    order = np.arange(int(found[1]) * size).reshape([int(n) for n in found[3].split(",")])
    if found[4]:
        order = order.transpose([int(n) for n in found[4].split(",")])
    return _rows(order.reshape(-1, size))


def _step(body: _Computation, name: str, index: int) -> int | None:
    """What a turn of a loop adds to an element of what it carries."""
    found = body.source(name)
    if found is None or found.opcode not in ("add", "subtract"):
        return None
    left, right = found.operands
    if body.element(left) == index:
        step = body.constant(right)
        return step if step is None or found.opcode == "add" else -step
    return body.constant(left) if found.opcode == "add" and body.element(right) == index else None


def _branches(conditional: _Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    if listed:
        return re.findall(r"[\w.\-]+", listed[1])
    return [conditional.attribute("true_computation"), conditional.attribute("false_computation")]


def _closed(text: str) -> tuple[str, str]:
    """The text before the closing bracket, and the text after it."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _elements(result: str) -> list[str]:
    """The elements of a tuple's type."""
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
