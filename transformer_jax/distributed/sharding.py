"""The table of parameter rules (axes, weight decay, Muon) and the shardings that follow from it.

Rules go by a parameter's name, never by its rank: stacked blocks give every leaf a leading `layers` axis, which
breaks rules such as "everything with two axes is a matrix".
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from optax.contrib import MuonDimensionNumbers

from transformer_jax.parameter_names import map_names, named_leaves


@dataclasses.dataclass(frozen=True)
class Rule:
    """Rule for the parameters whose name matches a pattern.

    Attributes:
      pattern: Regular expression for the complete name.
      axes: Logical name of each axis.
      decays: Whether weight decay applies.
      inputs, outputs: Axes of the matrix that Muon orthogonalizes; empty for parameters that Adam updates
        (embeddings, biases, normalization scales).
    """

    pattern: str
    axes: tuple[str, ...]
    decays: bool = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def _matrix(pattern: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Rule:
    return Rule(pattern, ("layers", *inputs, *outputs), True, inputs, outputs)


def _unstacked(pattern: str) -> Rule:
    return Rule(pattern, ("inputs", "outputs"), True, ("inputs",), ("outputs",))


def _recurrent(cells: str) -> tuple[Rule, ...]:
    """Return the rules for recurrent cells, which concatenate the weights of all gates."""
    return (_unstacked(rf"({cells})/dense_[ih]/kernel"), Rule(rf"({cells})/dense_[ih]/bias", ("outputs",)))


_STACK = r"(encoder|decoder|blocks)/"
_ATTENTION = r"((encoder|decoder)/(self|cross)_attention|blocks/((self|cross)_)?attention)/"


def _block_rules(attention: str, stack: str) -> tuple[Rule, ...]:
    """Return the rules of stacked blocks for patterns of their attention and of the blocks."""
    return (
        _matrix(attention + r"(global_)?query/kernel", ("width",), ("heads", "head_width")),
        _matrix(attention + r"(global_)?(key|value)/kernel", ("width",), ("kv_heads", "head_width")),
        _matrix(attention + r"output/kernel", ("heads", "head_width"), ("width",)),
        Rule(attention + r"(global_)?query/bias", ("layers", "heads", "head_width")),
        Rule(attention + r"(global_)?(key|value)/bias", ("layers", "kv_heads", "head_width")),
        Rule(attention + r"output/bias", ("layers", "width")),
        _matrix(stack + r"feed_forward/(expand|gate)/kernel", ("width",), ("feed_forward",)),
        _matrix(stack + r"feed_forward/contract/kernel", ("feed_forward",), ("width",)),
        Rule(stack + r"feed_forward/(expand|gate)/bias", ("layers", "feed_forward")),
        Rule(stack + r"feed_forward/contract/bias", ("layers", "width")),
    )


RULES = (
    Rule(r"((source|target)_)?embedding/table/embedding", ("vocab", "width")),
    Rule(r"embeddings/tokens/table/embedding", ("vocab", "width")),
    Rule(r"embeddings/positions/table/embedding", ("positions", "width")),
    Rule(r"embeddings/types/embedding", ("types", "width")),
    Rule(r"(embeddings/|transform_)norm/(scale|bias)", ("width",)),
    Rule(r"vocab_bias", ("vocab",)),
    Rule(r"unembedding/table/embedding", ("vocab", "width"), decays=True),
    Rule(r"((source|target)_positions|positions(/table)?)/embedding", ("positions", "width")),
    Rule(r"smear", ("width",)),
    Rule(r"action_table/embedding", ("actions", "width")),
    Rule(r"steps_table/embedding", ("positions", "width")),
    Rule(r"unknown_return", ("tokens", "width")),
    Rule(r"(node|degree)_table", ("values", "width")),
    Rule(r"(distance|edge)_table|virtual_bias", ("values", "heads")),
    Rule(r"hop_table", ("hops", "inputs", "heads")),
    Rule(r"positions/bias_table/embedding", ("buckets", "heads")),
    Rule(r"unembedding/kernel", ("width", "vocab"), decays=True),
    *_block_rules(_ATTENTION, _STACK),
    Rule(_ATTENTION + r"(query|key)_norm/scale", ("layers", "head_width")),
    Rule(_ATTENTION + r"relative_(keys|values)/embedding", ("layers", "positions", "head_width")),
    Rule(_STACK + r"\w+_norm/(scale|bias)", ("layers", "width")),
    Rule(_STACK + r"(attention|feed_forward)_scale", ("layers", "width")),
    Rule(r"patches/projection/kernel", ("pixels", "width"), True, ("pixels",), ("width",)),
    Rule(r"patches/projection/bias", ("width",)),
    Rule(r"patches/convolutions/\d+/kernel", ("height", "breadth", "inputs", "outputs"), decays=True),
    Rule(r"convolutions/\d+/kernel", ("taps", "inputs", "outputs"), decays=True),
    Rule(r"convolutions/\d+/bias", ("outputs",)),
    Rule(r"(class|mask|distillation)_token|registers|virtual_node", ("tokens", "width")),
    Rule(r"((encoder|decoder|input)_|pooling/)?norm/(scale|bias)", ("width",)),
    Rule(r"pooling/query", ("tokens", "width")),
    *(
        dataclasses.replace(rule, axes=rule.axes[1:])
        for rule in _block_rules(r"pooling/attention/", "pooling/")
    ),
    Rule(r"logit_(scale|bias)", ("scalars",)),
    *_recurrent(r"(encoder|decoder)/cells/\d+|cell|forward|backward"),
    _unstacked(
        r"(first_state|key|query|readout|baseline|((distillation|ctc)_)?head|((image|text|return|state|action)_)?projection|pooler|pooling|transform"
        r"|next_sentence|projector/\d+|bottleneck)/kernel"
    ),
    Rule(
        r"(first_state|key|readout|baseline|((distillation|ctc)_)?head|((image|text|return|state|action)_)?projection|pooler|pooling|transform"
        r"|next_sentence|projector/\d+|bottleneck)/bias",
        ("outputs",),
    ),
    # Prototypes are normalized to length 1, so they do not decay.
    Rule(r"prototypes/kernel", ("inputs", "outputs")),
    Rule(r"direction", ("alignment",)),
    Rule(r"log_width", ("coordinates",)),
)


def _innermost_name(name: str, model: Any) -> str:
    """Strip the prefixes of submodels, which a composite model declares as `children = ("encoder", ...)`."""
    first, _, rest = name.partition("/")
    if first in getattr(model, "children", ()):
        return _innermost_name(rest, getattr(model, first))
    return name


def rule_of(name: str, model: Any = None) -> Rule:
    """Return the one rule that a parameter's name matches.

    Args:
      name: Canonical name of the parameter.
      model: The parameter's model; None for a model without `children`.

    Raises:
      ValueError: No rule matches, or more than one; correct the table.
    """
    name = _innermost_name(name, model)
    matching = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
    if len(matching) != 1:
        raise ValueError(f"parameter {name} matches {len(matching)} rules of the table, not 1")
    return matching[0]


# The mesh axis that each logical axis may be sharded over.
_MESH_AXES = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "feed_forward": "tensor",
    "width": "fsdp",
    "inputs": "fsdp",
    "outputs": "tensor",
}


def parameter_sharding(
    name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh | None, model: Any = None
) -> jax.sharding.Sharding:
    """Return the sharding of a parameter, over "tensor" and "fsdp" if they divide its axes.

    Args:
      name: Canonical name of the parameter.
      shape: Shape of the parameter.
      mesh: The run's mesh; None means the default device.
      model: The parameter's model, see `rule_of`.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    parts: list[str | None] = []
    for axis, size in zip(rule_of(name, model).axes, shape, strict=True):
        target = _MESH_AXES.get(axis)
        if axis == "outputs" and mesh.shape.get("fsdp", 1) > 1:
            # XLA of jax 0.10 computes wrong gradients for matrices in a loop over time that are sharded on
            # both axes when rows are sharded over `data`.
            target = None
        fits = target in mesh.shape and target not in parts and size % mesh.shape[target] == 0
        parts.append(target if fits else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def matrix_stages(
    name: str,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    model: Any = None,
    *,
    shard_optimizer: bool = False,
) -> tuple[list[tuple[Any, ...]], int]:
    """Plan the shardings that bring the complete matrices of a parameter to the devices, stage by stage.

    Each stage moves one mesh axis from the matrices to their layers, because XLA gathers everything when two
    axes move at once. A matrix without layers is gathered.

    Args:
      name: See `parameter_sharding`.
      shape: See `parameter_sharding`.
      mesh: See `parameter_sharding`.
      model: See `parameter_sharding`.
      shard_optimizer: Shard the layers over `data` too, from the first stage.

    Returns:
      (the mesh axes of each dimension at every stage, first as the parameter is stored; the divisor that the
      number of layers must have).
    """
    has_axes = set(_MESH_AXES.values()) <= set(mesh.shape)
    sharding = parameter_sharding(name, shape, mesh, model) if has_axes else None
    parts: list[Any] = [*sharding.spec] if isinstance(sharding, NamedSharding) else [None] * len(shape)
    stacked = rule_of(name, model).axes[0] == "layers"
    layers = ("data",) if has_axes and stacked and shard_optimizer else ()
    stages: list[tuple[Any, ...]] = [(layers or parts[0], *parts[1:])]
    for axis, part in enumerate(parts):
        if part is not None:
            parts[axis] = None
            layers = (*layers, part) if stacked else layers
            stages.append((layers or parts[0], *parts[1:]))
    return stages, math.prod(mesh.shape[axis] for axis in layers)


def shard_over_data(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> NamedSharding:
    """Shard an axis over `data` too (ZeRO, Rajbhandari et al. 2020), preferably an unsharded one."""
    assert isinstance(sharding, NamedSharding), "a mesh is set"
    mesh = sharding.mesh
    parts: list[Any] = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]

    def axes_of(part: Any) -> tuple[str, ...]:
        names = (part,) if isinstance(part, str) else part or ()
        return tuple(name for name in names if mesh.shape[name] > 1)

    size = mesh.shape.get("data", 1)
    for axis in sorted(range(len(shape)), key=lambda axis: len(axes_of(parts[axis]))):
        names = axes_of(parts[axis])
        if size > 1 and shape[axis] % (size * math.prod(mesh.shape[name] for name in names)) == 0:
            parts[axis] = (*names, "data") if names else "data"
            break
    return NamedSharding(mesh, PartitionSpec(*parts))


def gradient_shardings(state: Any, mesh: Mesh | AbstractMesh) -> dict[str, NamedSharding]:
    """Return the shardings of gradients by name, if the optimizer's state is sharded over `data` too."""
    model = state.model
    return {
        name: shard_over_data(parameter_sharding(name, leaf.shape, mesh, model), leaf.shape)
        for name, leaf in state.trained.items()
    }


def state_shardings(state: Any, mesh: Mesh | AbstractMesh, *, shard_optimizer: bool = False) -> Any:
    """Return the sharding of each leaf of a training state, in a tree like the state.

    A leaf is sharded like the parameter whose name its own name ends with, if they have the same shape (models,
    moments, averages). All other leaves, such as counters and keys, are replicated.

    Args:
      state: A `TrainState` or its abstract shape.
      mesh: The run's mesh.
      shard_optimizer: Shard the optimizer's moments and the moving average over `data` too.
    """
    model = state.model
    parameters = {name: leaf.shape for name, leaf in named_leaves(model).items()}

    def sharding(name: str, leaf: Any) -> NamedSharding:
        parts = name.split("/")
        for first in range(len(parts)):
            parameter = "/".join(parts[first:])
            if parameters.get(parameter) == leaf.shape:
                placement = parameter_sharding(parameter, leaf.shape, mesh, model)
                assert isinstance(placement, NamedSharding), "a mesh is set"
                over_data = shard_optimizer and parts[0] in ("optimizer_state", "ema")
                return shard_over_data(placement, leaf.shape) if over_data else placement
        return NamedSharding(mesh, PartitionSpec())

    return map_names(sharding, state)


def model_shardings(model: Any, mesh: Mesh) -> Any:
    """Return `parameter_sharding` of each leaf of a model or of its abstract shape."""
    return map_names(lambda name, leaf: parameter_sharding(name, leaf.shape, mesh, model), model)


def decoding_shardings(model: Any, mesh: Mesh) -> Any:
    """Return the shardings of a model prepared by `for_decoding`: blocks are sharded as in their stack.

    On one device, where `for_decoding` joins projections, everything is replicated.
    """

    def sharding(name: str, leaf: Any) -> jax.sharding.Sharding:
        if mesh.size == 1:
            return NamedSharding(mesh, PartitionSpec())
        in_stack = re.sub(r"^blocks/\d+/", "blocks/", name)
        if in_stack == name:
            return parameter_sharding(name, leaf.shape, mesh, model)
        stacked = parameter_sharding(in_stack, (1, *leaf.shape), mesh, model)
        assert isinstance(stacked, NamedSharding), "a mesh is set"
        return NamedSharding(mesh, PartitionSpec(*stacked.spec[1:]))

    return map_names(sharding, model)


def placed_shapes(tree: Any, shardings: Any) -> Any:
    """Return the abstract tree with shardings, as the target of restoring a checkpoint."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


def describe_sharding(state: Any, mesh: Mesh | AbstractMesh | None) -> Iterator[str]:
    """Yield lines on the sharding of a training state, with the bytes on each device.

    Args:
      state: A state, or its abstract shape with shardings.
      mesh: The run's mesh; None yields nothing.
    """
    if mesh is None:
        return
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    yield f"mesh of {mesh.size} device(s): {sizes}"
    totals: dict[str, list[int]] = {}
    for name, leaf in named_leaves(state).items():
        sharded = [
            (number, axis)
            for number, axes in enumerate(leaf.sharding.spec)
            for axis in ((axes,) if isinstance(axes, str) else axes or ())
            if mesh.shape[axis] > 1
        ]
        layout = " x ".join(f"{number} {axis}" for number, axis in sharded)
        part = "parameters" if name.startswith(("trained/", "frozen/")) else "optimizer and others"
        total = totals.setdefault(f"{part}, {'axis ' + layout if layout else 'replicated'}", [0, 0, 0])
        total[0] += 1
        total[1] += leaf.size * leaf.dtype.itemsize
        total[2] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for group, (count, size, shard) in sorted(totals.items()):
        yield f"  {group}: {count} arrays, {size / 1e6:,.2f} MB, {shard / 1e6:,.2f} MB on each device"
    yield f"  state: {sum(shard for *_, shard in totals.values()) / 1e6:,.2f} MB on each device"


def decay_mask(model: Any) -> dict[str, bool]:
    """Return by parameter name whether weight decay applies."""
    return {name: rule_of(name, model).decays for name in named_leaves(model)}


def muon_dimensions(model: Any) -> dict[str, MuonDimensionNumbers | None]:
    """Return by parameter name the matrix axes for Muon; None for parameters that Adam updates."""

    def dimensions(rule: Rule) -> MuonDimensionNumbers | None:
        if not rule.inputs:
            return None
        return MuonDimensionNumbers(
            tuple(rule.axes.index(axis) for axis in rule.inputs),
            tuple(rule.axes.index(axis) for axis in rule.outputs),
        )

    return {name: dimensions(rule_of(name, model)) for name in named_leaves(model)}
