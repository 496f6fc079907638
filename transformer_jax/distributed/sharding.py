"""The one table of what each parameter is: its axes, whether it decays, whether Muon may take it.

What a parameter is follows from its name, never from its rank: stacked blocks give every leaf a leading
`layers` axis, which fools rules such as "everything with two axes is a matrix".
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
    """What the parameters of a name pattern are.

    Attributes:
      pattern: regular expression that the complete name matches.
      axes: logical name of each axis.
      decays: weight decay applies.
      inputs, outputs: names of the axes of the matrix that Muon orthogonalises; empty where Muon does
        not apply (embeddings, biases, normalisation scales).
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
    """Of recurrent cells: matrices and biases of all gates side by side."""
    return (
        _unstacked(rf"({cells})/dense_[ih]/kernel"),
        Rule(rf"({cells})/dense_[ih]/bias", ("outputs",)),
    )


_STACK = r"(encoder|decoder|blocks)/"
_ATTENTION = r"((encoder|decoder)/(self|cross)_attention|blocks/(self_)?attention)/"

RULES = (
    Rule(r"((source|target)_)?embedding/table/embedding", ("vocab", "width")),
    Rule(r"embeddings/tokens/table/embedding", ("vocab", "width")),
    Rule(r"embeddings/positions/table/embedding", ("positions", "width")),
    Rule(r"embeddings/types/embedding", ("types", "width")),
    Rule(r"(embeddings/|transform_)norm/(scale|bias)", ("width",)),
    Rule(r"vocab_bias", ("vocab",)),
    Rule(r"unembedding/table/embedding", ("vocab", "width"), decays=True),
    Rule(r"((source|target)_positions|positions/table)/embedding", ("positions", "width")),
    Rule(r"smear", ("width",)),
    Rule(r"positions/bias_table/embedding", ("buckets", "heads")),
    Rule(r"unembedding/kernel", ("width", "vocab"), decays=True),
    _matrix(_ATTENTION + r"query/kernel", ("width",), ("heads", "head_width")),
    _matrix(_ATTENTION + r"(key|value)/kernel", ("width",), ("kv_heads", "head_width")),
    _matrix(_ATTENTION + r"output/kernel", ("heads", "head_width"), ("width",)),
    Rule(_ATTENTION + r"query/bias", ("layers", "heads", "head_width")),
    Rule(_ATTENTION + r"(key|value)/bias", ("layers", "kv_heads", "head_width")),
    Rule(_ATTENTION + r"output/bias", ("layers", "width")),
    Rule(_ATTENTION + r"(query|key)_norm/scale", ("layers", "head_width")),
    Rule(_ATTENTION + r"relative_(keys|values)/embedding", ("layers", "positions", "head_width")),
    _matrix(_STACK + r"feed_forward/(expand|gate)/kernel", ("width",), ("feed_forward",)),
    _matrix(_STACK + r"feed_forward/contract/kernel", ("feed_forward",), ("width",)),
    Rule(_STACK + r"feed_forward/(expand|gate)/bias", ("layers", "feed_forward")),
    Rule(_STACK + r"feed_forward/contract/bias", ("layers", "width")),
    Rule(_STACK + r"\w+_norm/(scale|bias)", ("layers", "width")),
    Rule(_STACK + r"(attention|feed_forward)_scale", ("layers", "width")),
    Rule(r"patches/projection/kernel", ("pixels", "width"), True, ("pixels",), ("width",)),
    Rule(r"patches/projection/bias", ("width",)),
    Rule(r"patches/convolutions/\d+/kernel", ("height", "breadth", "inputs", "outputs"), decays=True),
    Rule(r"(class|mask|distillation)_token|registers", ("tokens", "width")),
    Rule(r"((encoder|decoder)_)?norm/(scale|bias)", ("width",)),
    *_recurrent(r"(encoder|decoder)/cells/\d+|cell|forward|backward"),
    _unstacked(
        r"(first_state|key|query|readout|baseline|(distillation_)?head|projection|pooler|pooling|transform"
        r"|next_sentence|projector/\d+|bottleneck)/kernel"
    ),
    Rule(
        r"(first_state|key|readout|baseline|(distillation_)?head|projection|pooler|pooling|transform"
        r"|next_sentence|projector/\d+|bottleneck)/bias",
        ("outputs",),
    ),
    # Rows of the last layer keep length 1: they do not decay.
    Rule(r"prototypes/kernel", ("inputs", "outputs")),
    Rule(r"direction", ("alignment",)),
    Rule(r"log_width", ("coordinates",)),
)


def own_name(name: str, model: Any) -> str:
    """The name of a parameter in the innermost model that it is part of.

    A model made of models declares them as `children = ("encoder", ...)`, names of attributes; exactly these
    prefixes are taken off.
    """
    first, _, rest = name.partition("/")
    if first in getattr(model, "children", ()):
        return own_name(rest, getattr(model, first))
    return name


def rule_of(name: str, model: Any = None) -> Rule:
    """The one rule that a parameter's name matches.

    Args:
      name: canonical name of the parameter.
      model: that the name is of, see `own_name`; None for a model that has no children.

    Raises:
      ValueError: no rule, or more than one: correct the table.
    """
    name = own_name(name, model)
    matching = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
    if len(matching) != 1:
        raise ValueError(f"parameter {name} matches {len(matching)} rules of the table, not 1")
    return matching[0]


# Which axis of a mesh each logical axis may be sharded over.
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
    """The sharding of a parameter: over the mesh's axes "tensor" and "fsdp" if they divide it.

    Args:
      name: canonical name of the parameter.
      shape: of the parameter.
      mesh: None is the default device.
      model: see `rule_of`.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    parts: list[str | None] = []
    for axis, size in zip(rule_of(name, model).axes, shape, strict=True):
        target = _MESH_AXES.get(axis)
        if axis == "outputs" and mesh.shape.get("fsdp", 1) > 1:
            # Cut both ways, matrices of a loop over time have gradients that are wrong by their own size on a
            # mesh of `data` as well: XLA of jax 0.10.
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
    """How a parameter comes to have complete matrices on each device: in stages, each a sharding of its axes.

    One axis of the mesh after the other goes from the matrices to their layers, by an exchange between its
    devices each (a compiler that is to move two at once gathers everything). A matrix without layers is
    gathered.

    Args:
      name, shape, mesh, model: see `parameter_sharding`.
      shard_optimizer: the layers are sharded over `data` too, from the first stage.

    Returns:
      The stages, the first as the parameter lies; and what the number of layers must be a multiple of.
    """
    ours = set(_MESH_AXES.values()) <= set(mesh.shape)
    own = parameter_sharding(name, shape, mesh, model) if ours else None
    parts: list[Any] = [*own.spec] if isinstance(own, NamedSharding) else [None] * len(shape)
    stacked = rule_of(name, model).axes[0] == "layers"
    layers = ("data",) if ours and stacked and shard_optimizer else ()
    stages: list[tuple[Any, ...]] = [(layers or parts[0], *parts[1:])]
    for axis, part in enumerate(parts):
        if part is not None:
            parts[axis] = None
            layers = (*layers, part) if stacked else layers
            stages.append((layers or parts[0], *parts[1:]))
    return stages, math.prod(mesh.shape[axis] for axis in layers)


def over_data(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> NamedSharding:
    """The same with one axis sharded over `data` as well (Rajbhandari et al. 2020, ZeRO).

    The first that is whole and that `data` divides; else one that is sharded already.
    """
    assert isinstance(sharding, NamedSharding), "there is a mesh"
    mesh = sharding.mesh
    parts: list[Any] = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]

    def cut(part: Any) -> tuple[str, ...]:
        names = (part,) if isinstance(part, str) else part or ()
        return tuple(name for name in names if mesh.shape[name] > 1)

    size = mesh.shape.get("data", 1)
    for axis in sorted(range(len(shape)), key=lambda axis: len(cut(parts[axis]))):
        own = cut(parts[axis])
        if size > 1 and shape[axis] % (size * math.prod(mesh.shape[name] for name in own)) == 0:
            parts[axis] = (*own, "data") if own else "data"
            break
    return NamedSharding(mesh, PartitionSpec(*parts))


def gradient_shardings(state: Any, mesh: Mesh | AbstractMesh) -> dict[str, NamedSharding]:
    """By name, the shardings of gradients where optimizer state is sharded over `data` too."""
    model = state.model
    return {
        name: over_data(parameter_sharding(name, leaf.shape, mesh, model), leaf.shape)
        for name, leaf in state.trained.items()
    }


def state_shardings(state: Any, mesh: Mesh | AbstractMesh, *, shard_optimizer: bool = False) -> Any:
    """The sharding of each leaf of a training state: what belongs to a parameter is sharded like it.

    Args:
      state: a `TrainState`, or its abstract shape.
      mesh: of the run.
      shard_optimizer: the optimizer's moments and a moving average are sharded over `data` too.

    Returns:
      A tree of shardings like `state`. A leaf belongs to the parameter whose name its own ends with, if it
      has the shape (a model, an optimizer's moments, an average); others, such as counters and keys, are on
      every device.
    """

    model = state.model
    parameters = {name: leaf.shape for name, leaf in named_leaves(model).items()}

    def sharding(name: str, leaf: Any) -> NamedSharding:
        parts = name.split("/")
        for first in range(len(parts)):
            own = "/".join(parts[first:])
            if parameters.get(own) == leaf.shape:
                found = parameter_sharding(own, leaf.shape, mesh, model)
                assert isinstance(found, NamedSharding), "there is a mesh"
                beside = shard_optimizer and parts[0] in ("optimizer_state", "ema")
                return over_data(found, leaf.shape) if beside else found
        return NamedSharding(mesh, PartitionSpec())

    return map_names(sharding, state)


def model_shardings(model: Any, mesh: Mesh) -> Any:
    """`parameter_sharding` of each leaf, in a tree like the model or its abstract shape."""
    return map_names(lambda name, leaf: parameter_sharding(name, leaf.shape, mesh, model), model)


def decoding_shardings(model: Any, mesh: Mesh) -> Any:
    """`model_shardings` of a model as its `for_decoding` gives it: a block has what its part of the stack had.

    On one device, where projections are joined, all is replicated.
    """

    def sharding(name: str, leaf: Any) -> jax.sharding.Sharding:
        if mesh.size == 1:
            return NamedSharding(mesh, PartitionSpec())
        in_stack = re.sub(r"^blocks/\d+/", "blocks/", name)
        if in_stack == name:
            return parameter_sharding(name, leaf.shape, mesh, model)
        own = parameter_sharding(in_stack, (1, *leaf.shape), mesh, model)
        assert isinstance(own, NamedSharding), "there is a mesh"
        return NamedSharding(mesh, PartitionSpec(*own.spec[1:]))

    return map_names(sharding, model)


def placed_shapes(tree: Any, shardings: Any) -> Any:
    """The abstract tree with its shardings: what a checkpoint is restored into."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, shardings
    )


def describe_sharding(state: Any, mesh: Mesh | AbstractMesh | None) -> Iterator[str]:
    """Lines on the sharding of a training state: kinds of leaves, and bytes per device.

    Args:
      state: a state, or its abstract shape with shardings.
      mesh: None yields nothing.
    """
    if mesh is None:
        return
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    yield f"mesh of {mesh.size} device(s): {sizes}"
    kinds: dict[str, list[int]] = {}
    for name, leaf in named_leaves(state).items():
        cuts = [
            (number, axis)
            for number, axes in enumerate(leaf.sharding.spec)
            for axis in ((axes,) if isinstance(axes, str) else axes or ())
            if mesh.shape[axis] > 1
        ]
        cut = " x ".join(f"{number} {axis}" for number, axis in cuts)
        part = "parameters" if name.startswith(("trained/", "frozen/")) else "optimizer and others"
        own = kinds.setdefault(f"{part}, {'axis ' + cut if cut else 'replicated'}", [0, 0, 0])
        whole = leaf.size * leaf.dtype.itemsize
        own[0] += 1
        own[1] += whole
        own[2] += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for kind, (count, whole, shard) in sorted(kinds.items()):
        yield f"  {kind}: {count} arrays, {whole / 1e6:,.2f} MB, {shard / 1e6:,.2f} MB on each device"
    total = sum(shard for _, _, shard in kinds.values())
    yield f"  state: {total / 1e6:,.2f} MB on each device"


def decay_mask(model: Any) -> dict[str, bool]:
    """By canonical name, True for parameters that weight decay applies to."""
    return {name: rule_of(name, model).decays for name in named_leaves(model)}


def muon_dimensions(model: Any) -> dict[str, MuonDimensionNumbers | None]:
    """By canonical name, the matrix axes that Muon orthogonalises; None for parameters that Adam updates."""

    def dimensions(rule: Rule) -> MuonDimensionNumbers | None:
        if not rule.inputs:
            return None
        return MuonDimensionNumbers(
            tuple(rule.axes.index(axis) for axis in rule.inputs),
            tuple(rule.axes.index(axis) for axis in rule.outputs),
        )

    return {name: dimensions(rule_of(name, model)) for name in named_leaves(model)}
