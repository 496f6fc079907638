"""The memory traffic of a compiled program: what its instructions read from and write to a device's memory.

The compiler's own count takes a loop's body once, and GPU compilers report none. This one reads the program's
text: an instruction reads its operands and writes its result once per trip of the loops around it. A fused
slice of a stack reads the slice, and a fused update in place writes the update. Caches are ignored. Arrays in a
TPU's VMEM, which the compiler manages, do not count.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from transformer_jax.distributed.program_text import (
    Computation,
    Instruction,
    Program,
    branches,
    elements,
    memory_bytes,
    parse_program,
    size_of,
)

# Instructions without traffic, and collectives, whose time is that of the links.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "copy-done", "async-done", "slice-done", "opt-barrier", "add-dependency", "domain", "send", "recv",
    "send-done", "recv-done", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "all-reduce-start", "all-gather-start", "collective-permute-start", "all-reduce-done", "all-gather-done",
    "collective-permute-done", "infeed", "outfeed", "rng-get-and-update-state",
}  # fmt: skip
_PRODUCTS = ("dot", "convolution", "ragged-dot")
_PRODUCT_CALL = re.compile(r'custom_call_target="(?:__cublas|__triton_gemm|__cudnn\$conv)')
# Fused instructions that change neither the values nor the size that is read.
_VIEWS = ("bitcast", "reshape", "transpose", "copy", "convert")


class Traffic(NamedTuple):
    """Bytes that a device reads and writes in one run of a program.

    Attributes:
      products: Bytes of instructions with a matrix product.
      elementwise: Bytes of all other instructions.
    """

    products: float
    elementwise: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.products + self.elementwise

    def __add__(self, other: tuple[float, ...]) -> Traffic:  # type: ignore[override]
        return Traffic(self.products + other[0], self.elementwise + other[1])


def program_traffic(text: str) -> Traffic:
    """Count a program's traffic; a loop of unknown length counts once, a `conditional` as its largest branch.

    Args:
      text: `compiled.as_text()`.
    """
    program = parse_program(text)
    return _traffic(program, program.entry, 1)


def _traffic(program: Program, name: str, times: int) -> Traffic:
    computation = program.computations[name]
    total = Traffic(0.0, 0.0)
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode in _FREE:
            continue
        if opcode == "while":
            trips = program.trips(instruction, computation)
            total += _traffic(program, instruction.attribute("body"), times * (1 if trips is None else trips))
        elif opcode == "conditional":
            total += max((_traffic(program, branch, times) for branch in branches(instruction)), key=sum)
        elif opcode == "call":
            total += _traffic(program, instruction.attribute("to_apply"), times)
        elif opcode == "async-start":
            total += _traffic(program, instruction.attribute("calls"), times)
        else:
            size = float(times * _bytes(program, computation, instruction))
            total += (size, 0.0) if _is_product(program, instruction) else (0.0, size)
    return total


def _bytes(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that one execution of an instruction reads and writes."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in ("dynamic-slice", "slice", "gather", "pad", "concatenate"):
        return 2 * memory_bytes(instruction.result)
    if opcode in ("dynamic-update-slice", "scatter"):
        update = computation.instructions[operands[1 if opcode == "dynamic-update-slice" else 2]]
        return 2 * memory_bytes(update.result)
    if opcode == "copy-start":
        target, source, *_ = elements(instruction.result)
        return memory_bytes(target) + memory_bytes(source)
    if opcode == "slice-start":
        # A slice of an array in the device's memory, copied to VMEM.
        return size_of(elements(instruction.result)[1])
    if opcode != "fusion":
        read = sum(memory_bytes(computation.instructions[name].result) for name in operands)
        return read + memory_bytes(instruction.result)
    fused = program.computations[instruction.attribute("calls")]
    total = _written(fused, fused.root, memory_bytes(instruction.result))
    parameters = {
        int(item.arguments): item.name for item in fused.instructions.values() if item.opcode == "parameter"
    }
    for index, name in enumerate(operands):
        size = memory_bytes(computation.instructions[name].result)
        total += min(size, _read(program, fused, parameters[index], size))
    return total


def _read(program: Program, fused: Computation, name: str, size: int) -> int:
    """Return the bytes that a fused computation reads of a value of `size` bytes, at most `size` per user."""
    if name == fused.root:
        return size
    total = 0
    for user in fused.instructions.values():
        if name not in user.operands:
            continue
        if user.opcode in _VIEWS:
            total += _read(program, fused, user.name, size)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += memory_bytes(user.result)
        elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
            continue
        elif user.opcode == "fusion":
            inner = program.computations[user.attribute("calls")]
            parameters = {
                int(item.arguments): item.name
                for item in inner.instructions.values()
                if item.opcode == "parameter"
            }
            index = user.operands.index(name)
            total += _read(program, inner, parameters[index], size)
        else:
            return size
    return total


def _written(fused: Computation, name: str, size: int) -> int:
    """Return the bytes that a fused computation writes for a result of `size` bytes."""
    root = fused.instructions[name]
    if root.opcode == "tuple":
        parts = [(operand, memory_bytes(fused.instructions[operand].result)) for operand in root.operands]
        return min(size, sum(_written(fused, operand, part) for operand, part in parts))
    while root.opcode in _VIEWS:
        root = fused.instructions[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return min(size, memory_bytes(fused.instructions[root.operands[1]].result))
    return size


def _is_product(program: Program, instruction: Instruction) -> bool:
    if instruction.opcode in _PRODUCTS:
        return True
    if instruction.opcode == "custom-call":
        return _PRODUCT_CALL.search(instruction.attributes) is not None
    if instruction.opcode != "fusion":
        return False
    fused = program.computations[instruction.attribute("calls")]
    return any(_is_product(program, item) for item in fused.instructions.values())
