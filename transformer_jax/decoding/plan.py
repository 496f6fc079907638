"""The programs of decoding with abstract arguments, for ahead-of-time compilation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.tokenizers.byte_pairs import PAD
from transformer_jax.decoding.generation import for_decoding
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
    int8: bool = False,
) -> dict[str, Program]:
    """Return the jitted function and the abstract arguments of "prefill" or "encode", and of "decoding".

    The programs are those of generation: the model is prepared by `for_decoding` and prompts differ in length.

    Args:
      config: Config of a decoder or a translator.
      rows: B.
      prompt: Number of tokens of a prompt, or of a source sentence.
      length: Length of the cache in tokens.
      mesh: Mesh for all arguments: parameters are sharded by their rules, rows over `data` and `fsdp`, heads
        over `tensor`.
      dtype: Dtype of the computation.
      parameters: Dtype of all parameters except vectors, which are float32; None uses `dtype`, as published
        weights do. A run stores its parameters in float32.
      compute: Compute options of the model.
      module: Class of the model; None takes it from the registry.
      beams: Number of beams per row.
      new_tokens: Tokens per step; more than one when the model verifies the proposals of a draft.
      int8: Store the weights of a decoder in 8 bits; see `with_int8_weights`.
    """
    config, parameter_dtype = dataclasses.replace(config, dtype=dtype), parameters or dtype
    model_class = module_of(config) if module is None else module

    def create(key: jax.Array) -> Any:
        model = model_class(config, rngs=nnx.Rngs(key), compute=compute)
        return map_names(
            lambda name, x: x.astype(x.dtype if is_vector(name, x.shape) else parameter_dtype), model
        )

    model = jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))
    model = placed_shapes(model, model_shardings(model, mesh))
    tokens = jax.ShapeDtypeStruct((rows, prompt), jnp.int32)
    if hasattr(model, "encode") or hasattr(model, "source_embedding"):

        @jax.jit
        def start(model: Any, source: jax.Array) -> Any:
            return model.start(source, source_mask=(source != PAD).sum(axis=1), max_length=length)

        cache = jax.eval_shape(start, model, tokens)
        first: Program = start, (model, _with_sharding(tokens, mesh))
        name = "encode"
    else:
        model = jax.eval_shape(functools.partial(for_decoding, int8=int8), model)
        model = placed_shapes(model, decoding_shardings(model, mesh))

        def prefill(model: Any, tokens: jax.Array, first_token: jax.Array) -> Any:
            cache = model.start(rows, max_length=length, first=first_token)
            output, cache = model.step_function()(cache, tokens, prompt=True)
            return output.logits, cache

        first_token = jax.ShapeDtypeStruct((rows,), jnp.int32)
        cache = jax.eval_shape(prefill, model, tokens, first_token)[1]
        first = jax.jit(prefill), (model, _with_sharding(tokens, mesh), _with_sharding(first_token, mesh))
        name = "prefill"

    if beams > 1:
        cache = jax.eval_shape(lambda cache: cache.repeat(beams), cache)
    cache = jax.tree.map(lambda x: _with_sharding(x, mesh), cache)
    shardings = jax.tree.map(lambda x: x.sharding, cache)

    def decode(model: Any, cache: Any, tokens: jax.Array) -> Any:
        output, cache = model.step_function()(cache, tokens)
        # The carry of the decoding loop keeps its shardings.
        return output.logits, jax.lax.with_sharding_constraint(cache, shardings)

    last = _with_sharding(jax.ShapeDtypeStruct((rows * beams, new_tokens), jnp.int32), mesh)
    # The cache is donated, because the loop of a search updates it in place.
    return {name: first, "decoding": (jax.jit(decode, donate_argnums=1), (model, cache, last))}


def _with_sharding(x: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shard the rows, and the heads of keys and values (B, G, K, S)."""
    axes: list[Any] = [None] * len(x.shape)
    if x.shape and x.shape[0] % row_shards(mesh) == 0:
        axes[0] = ROWS
    if len(x.shape) == 4 and x.shape[1] % mesh.shape[TENSOR] == 0:
        axes[1] = TENSOR
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
