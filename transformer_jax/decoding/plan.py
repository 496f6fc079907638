"""The programs of decoding for shapes alone, to be compiled for devices that are not here."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.tokenizers.byte_pairs import PAD
from transformer_jax.distributed.mesh import ROWS, TENSOR, row_shards
from transformer_jax.distributed.sharding import decoding_shardings, model_shardings, placed_shapes
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import module_of
from transformer_jax.parameter_names import is_vector, map_names

Program = tuple[Any, tuple[Any, ...]]


def abstract_programs(
    config: Any,
    *,
    rows: int,
    prompt: int,
    length: int,
    mesh: Mesh,
    dtype: str,
    parameters: str | None = None,
    compute: ComputeOptions,
    module: Any = None,
    beams: int = 1,
    new_tokens: int = 1,
) -> dict[str, Program]:
    """(jitted function, shapes of its arguments) of "prefill" or "encode", and of "decoding".

    Those of generation: of a model as `for_decoding` makes it, with prompts of unequal length.

    Args:
      config: of a decoder or a translator.
      rows: B.
      prompt: tokens of a prompt, or of a source.
      length: places of the cache.
      mesh: over which they are sharded: parameters by the table, rows over `data` and `fsdp`, heads over
        `tensor`.
      dtype: of the computation.
      parameters: dtype of the parameters but for vectors, which are float32; None: that of the computation, as
        published weights have it. A run keeps its own in float32.
      compute: how the model is computed.
      module: of the model; None: the registry's.
      beams: of each row.
      new_tokens: of each step, more than one where the model judges what a draft proposes.
    """
    config, kept = dataclasses.replace(config, dtype=dtype), parameters or dtype
    made = module_of(config) if module is None else module

    def create(key: jax.Array) -> Any:
        model = made(config, rngs=nnx.Rngs(key), compute=compute)
        return map_names(lambda name, x: x.astype(x.dtype if is_vector(name, x.shape) else kept), model)

    model = jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))
    model = placed_shapes(model, model_shardings(model, mesh))
    tokens = jax.ShapeDtypeStruct((rows, prompt), jnp.int32)
    if hasattr(model, "encode") or hasattr(model, "source_embedding"):

        @jax.jit
        def start(model: Any, source: jax.Array) -> Any:
            return model.start(source, source_mask=(source != PAD).sum(axis=1), max_length=length)

        cache = jax.eval_shape(start, model, tokens)
        first: Program = start, (model, _placed(tokens, mesh))
        name = "encode"
    else:
        model = jax.eval_shape(lambda model: model.for_decoding(), model)
        model = placed_shapes(model, decoding_shardings(model, mesh))

        def prefill(model: Any, tokens: jax.Array, place: jax.Array) -> Any:
            cache = model.start(rows, max_length=length, first=place)
            output, cache = model.step_function()(cache, tokens, prompt=True)
            return output.logits, cache

        place = jax.ShapeDtypeStruct((rows,), jnp.int32)
        cache = jax.eval_shape(prefill, model, tokens, place)[1]
        first = jax.jit(prefill), (model, _placed(tokens, mesh), _placed(place, mesh))
        name = "prefill"

    if beams > 1:
        cache = jax.eval_shape(lambda cache: cache.repeat(beams), cache)
    cache = jax.tree.map(lambda x: _placed(x, mesh), cache)
    places = jax.tree.map(lambda x: x.sharding, cache)

    def decode(model: Any, cache: Any, tokens: jax.Array) -> Any:
        output, cache = model.step_function()(cache, tokens)
        # What a loop carries stays where it is.
        return output.logits, jax.lax.with_sharding_constraint(cache, places)

    last = _placed(jax.ShapeDtypeStruct((rows * beams, new_tokens), jnp.int32), mesh)
    # The cache is updated in place, as in the loop of a search.
    return {name: first, "decoding": (jax.jit(decode, donate_argnums=1), (model, cache, last))}


def _placed(x: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shards the rows, and the heads of keys and values (B, G, K, S)."""
    axes: list[Any] = [None] * len(x.shape)
    if x.shape and x.shape[0] % row_shards(mesh) == 0:
        axes[0] = ROWS
    if len(x.shape) == 4 and x.shape[1] % mesh.shape[TENSOR] == 0:
        axes[1] = TENSOR
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
