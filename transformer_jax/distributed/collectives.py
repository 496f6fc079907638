"""What a compiled program sends between devices: its collectives, and the bytes that they cost."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (?P<result>.*?) (?P<kind>{'|'.join(_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
# `{{0,1},{2,3}}`, `[4,2]<=[8]` or `mesh['x'=2,'y'=4] {'y'}`, with the axes of a group in braces.
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,]*\}|\[\d+,\d+\]|mesh\[[^\]]*\] ?\{[^}]*\})")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation between devices.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
      bytes: of its result on one device.
      group: devices that take part with each other.
      times: how often a run of the program comes to it.
    """

    kind: str
    bytes: int
    group: int
    times: int

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


def collectives(program: str) -> list[Collective]:
    """The collectives of a compiled program, those in loops as often as the loops turn.

    Args:
      program: `compiled.as_text()`.

    Raises:
      ValueError: a loop of unknown length around a collective, or a text of another form.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in program.splitlines():
        found = _COMPUTATION.match(line)
        if found:
            lines = computations.setdefault(found[1], [])
            entry = found[1] if line.startswith("ENTRY") else entry
        else:
            lines.append(line)
    return list(_within(entry, computations, 1))


def _within(name: str, computations: dict[str, list[str]], times: int) -> Iterator[Collective]:
    for line in computations[name]:
        if found := _COLLECTIVE.search(line):
            yield Collective(found["kind"], _size(found["result"]), _group(line), times)
        for callee, factor in _called(line):
            inside = list(_within(callee, computations, times * max(1, factor)))
            if inside and not factor:
                raise ValueError(f"a loop of unknown length around a collective: {line.strip()[:200]}")
            yield from inside


def _called(line: str) -> Iterator[tuple[str, int]]:
    """The computations that a line runs, and how often; 0 where that is unknown."""
    if " while(" in line:
        trips = _TRIPS.search(line)
        yield re.findall(r"body=%?([\w.\-]+)", line)[0], int(trips[1]) if trips else 0
    elif " call(" in line:
        yield re.findall(r"to_apply=%?([\w.\-]+)", line)[0], 1
    elif " conditional(" in line:
        # One of the branches runs; those of this package hold the same work.
        branches = re.findall(r"(?:branch_computations=\{|true_computation=)%?([\w.\-]+)", line)
        yield branches[0], 1


def _size(result: str) -> int:
    arrays = [(kind, sizes) for kind, sizes in _ARRAY.findall(result) if kind in _BYTES]
    return sum(_BYTES[kind] * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in arrays)


def _group(line: str) -> int:
    found = _GROUPS.search(line)
    if found is None:
        return 2  # a permutation: each device sends to one other
    text = found[1]
    if text.startswith("{{"):
        return text.count(",") + 1
    if text.startswith("["):
        return int(text[1:-1].split(",")[1])
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", text))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", text[text.index("{") :]))
