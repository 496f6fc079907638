"""The collectives of a compiled program and the bytes that they send between devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from transformer_jax.distributed.program_text import (
    Instruction,
    Program,
    branches,
    elements,
    parse_program,
    size_of,
)

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` or `mesh['x'=2,'y'=4], device_ids=(...) {'y'}`: group axes in braces.
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d,]*\},?)+\}|\[\d+,\d+\]|mesh\[[^\]]*\](?:, device_ids=\([^{]*\))? ?\{[^}]*\})"
)
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


def collectives(program: str) -> list[Collective]:
    """Return the collectives of a compiled program for CPUs, GPUs or TPUs, of one slice or several.

    A collective in a loop counts once per trip, an asynchronous collective at its start, and a `conditional`
    as the branch that sends the most.

    Args:
      program: `compiled.as_text()`.

    Raises:
      ValueError: A collective is in a loop of unknown length, or the text is no compiled program.
    """
    parsed = parse_program(program)
    return list(_Reader(parsed).collectives(parsed.entry, 1))


class _Reader:
    """Reader of a program's computations; a collective without groups includes all devices."""

    def __init__(self, program: Program):
        self._program = program
        self._computations, self._devices = program.computations, program.devices
        self._slices = 1
        # A TPU's compiler repeats an asynchronous collective in several fusions: one that starts it, those that
        # compute meanwhile, and one that waits for it.
        self._started: set[str] = set()
        self._chains: set[str] = set()
        for computation in self._computations.values():
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
                    (list(self.collectives(branch, times)) for branch in branches(instruction)),
                    key=lambda operations: sum(operation.sent for operation in operations),
                )
            elif opcode == "while":
                trips = self._program.trips(instruction, self._computations[name])
                body = list(
                    self.collectives(instruction.attribute("body"), times * (1 if trips is None else trips))
                )
                if body and trips is None:
                    raise ValueError(f"a loop of unknown length around a collective: {instruction.name}")
                yield from body

    def _collective(self, instruction: Instruction, *, scattered: bool, times: int) -> Collective:
        kind, result = instruction.opcode.removesuffix("-start"), instruction.result
        if instruction.opcode != kind and kind != "all-reduce":
            # A start returns (operands, results, ...), but that of an all-reduce returns only the results.
            result = elements(result)[1]
        size, groups = size_of(result), self._groups(instruction)
        group = 2 if kind == "collective-permute" else len(groups[0])  # each device sends to one peer
        if scattered and kind == "all-reduce":
            # A TPU's reduce-scatter is a fusion of an all-reduce and the slice that each device keeps.
            kind, size = "reduce-scatter", size // group
        return Collective(kind, size, group, times, groups)

    def _between_slices(self, instruction: Instruction, kind: str, times: int) -> Collective:
        """Return the collective between the devices at the same position of each slice, from its `send`."""
        kind = kind if kind in _KINDS else "collective-permute"
        slices = _slices(instruction) or range(1, self._slices + 1)
        group, size = len(slices), size_of(elements(instruction.result)[0])
        if kind == "all-gather":
            size *= group
        elif kind == "reduce-scatter":
            size //= group
        # The program and its device numbers describe one slice.
        members = tuple((number - 1) * self._devices for number in slices)
        return Collective(kind, size, group, times, (members,))

    def _groups(self, instruction: Instruction) -> tuple[tuple[int, ...], ...]:
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


def _slices(instruction: Instruction) -> list[int]:
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
