"""Rematerialization of blocks in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from transformer_jax.layers.compute_options import Remat
from transformer_jax.layers.named_points import BLOCK_INPUT, KERNEL_RESULTS

# Primitives that cost a product of matrices.
_DENSE = ("dot_general", "conv_general_dilated")
_CUDNN = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")


def _is_attention(primitive: Any, params: Any) -> bool:
    # Splash attention names its residuals, because its results hold each row's sum 128 times.
    if primitive.name == "name":
        return params["name"] == KERNEL_RESULTS
    if primitive.name == "dot_general":
        return bool(params["dimension_numbers"][1][0])
    return primitive.name in _CUDNN


def _products(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name in _DENSE or _is_attention(primitive, params)


def _products_but_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name in _DENSE and not _is_attention(primitive, params)


def rematerialize(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Return a block's function with the rematerialization policy of `ComputeOptions.remat`.

    Args:
      function: Function of a block, which names its input `BLOCK_INPUT`.
      remat: The policy.
    """
    if remat == "none":
        return function
    policies: dict[str, Any] = {
        "elementwise": _products,
        "attention": _products_but_attention,
        "blocks": None,
        "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    # A scan stores the inputs of its iterations, so that common subexpressions need no protection.
    return jax.checkpoint(function, policy=policies[remat], prevent_cse=False)
