"""Runs attention of MaxText on flash_pallas (MaxText 0.2.5).

Example:
    >>> from flash_pallas.integrations import maxtext
    >>> maxtext.install()  # doctest: +SKIP
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from ..api import flash_attention_with_max_logit
from ..frontend.words import LONG_NAMES, Words
from ..typing import Differentiable
from ._hooks import Client, Hook, Patch

_CLIENT = Client("maxtext", "maxtext", "0.2.5")
# What it calls the arguments of `flash_attention`.
WORDS = Words(
    {
        **LONG_NAMES,
        "softcap": "attn_logits_soft_cap",
        "q_segment_ids": "decoder_segment_ids",
        "kv_segment_ids": "decoder_segment_ids_kv",
    }
)
_ARGUMENTS = (
    "self", "query", "key", "value", "decoder_segment_ids", "segment_positions", "lengths",
    "model_mode", "use_ragged_attention", "previous_chunk", "bidirectional_mask", "sinks",
    "indexer_mask", "compressed_mask", "record_max_logits", "decoder_segment_ids_kv",
    "pad_kv_total", "compress_ratio", "qk_product_einsum", "wv_product_einsum",
)  # fmt: skip
_KERNELS = ("autoselected", "flash")


def install(*, differentiable: Differentiable = "reverse") -> None:
    """Makes MaxText compute attention by `flash_attention`.

    It replaces `AttentionOp.apply_attention` (https://github.com/AI-Hypercomputer/maxtext, 0.2.5)
    in training and prefill, if the configuration has attention: "autoselected" (the default) or
    "flash". Other settings still run MaxText's own code. So do decoding steps, for which MaxText
    itself uses dot_product.

    Causal, sliding, chunked and block-diffusion masks and segment ids become arguments. Sinks, the
    soft cap and `record_max_logits` are honored, whereas MaxText's own kernels for GPUs refuse or
    drop them. An `indexer_mask` is passed on as a mask. Context parallelism, `bidirectional_mask`,
    `previous_chunk`, compressed attention, MoBA and dropout are refused.

    JAX's caches are cleared, so that compiled functions are traced again.

    Args:
        differentiable: "reverse", or "any" for forward mode and derivatives of every order, as in
            `flash_attention`.

    Raises:
        ImportError: maxtext is not installed, or its method has other parameters.

    Example:
        >>> from flash_pallas.integrations import maxtext
        >>> maxtext.install()  # doctest: +SKIP
        >>> maxtext.uninstall()
    """
    _PATCH.install(differentiable=differentiable)


def uninstall() -> None:
    """Restores MaxText's own attention. Without `install` nothing happens."""
    _PATCH.uninstall()


def installed(*, differentiable: Differentiable = "reverse") -> AbstractContextManager[None]:
    """Returns a context manager that runs `install` for the body of a `with` statement."""
    return _PATCH.installed(differentiable=differentiable)


def _hooks() -> list[Hook]:
    op = _CLIENT.imported("maxtext.layers.attention_op")
    owner = _CLIENT.named(op, "AttentionOp")
    theirs = _CLIENT.named(owner, "apply_attention", *_ARGUMENTS)
    return [Hook(owner, "apply_attention", _apply(theirs, op))]


_PATCH = Patch(_hooks)


def _apply(theirs: Callable, op: Any) -> Callable:
    """Returns the new `AttentionOp.apply_attention`."""

    def apply_attention(
        self, query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode, **rest
    ):
        decoding = model_mode == op.MODEL_MODE_AUTOREGRESSIVE
        if self.attention_kernel not in _KERNELS or decoding:
            return theirs(
                self, query, key, value, decoder_segment_ids, segment_positions, lengths,
                model_mode, **rest,
            )  # fmt: skip
        _refuse(self, op.AttentionType, rest)
        arrays = (query, *(x.dequant() if hasattr(x, "dequant") else x for x in (key, value)))
        o, _, largest = _attend(self, op, arrays, decoder_segment_ids, rest)
        if rest.get("record_max_logits"):
            self.max_logits = op.nnx.Intermediate(largest.max(-1))
        return o, None, None

    return apply_attention


_TO_DO = {
    "previous_chunk": "prefill in one chunk",
    "bidirectional_mask": "set attention: dot_product for models with images",
    "compressed_mask": "set attention: dot_product",
}


def _refuse(layer: Any, kinds: Any, rest: dict[str, Any]) -> None:
    """Raises NotImplementedError for what is not among the arguments of `flash_attention`."""
    refused = [f"{name}: {do}" for name, do in _TO_DO.items() if rest.get(name) is not None]
    if layer.attention_type == kinds.COMPRESSED:
        refused.append("attention_type compressed: set attention: dot_product")
    if layer.config.moba:
        refused.append("moba: set attention: dot_product")
    if layer.dropout_rate:
        refused.append(f"dropout_rate {layer.dropout_rate}: MaxText passes no key; set it to 0")
    if (size := layer._context_parallel_size()) > 1:
        refused.append(
            f"context parallelism over {size} devices: set it to 1, or call "
            "flash_pallas.parallel.context_parallel_attention in a model of your own"
        )
    if refused:
        raise NotImplementedError(f"flash_pallas in MaxText cannot do {'; '.join(refused)}")


@WORDS
def _attend(layer: Any, op: Any, arrays: Any, q_ids: Any, rest: dict[str, Any]) -> Any:
    """Computes attention of [B, T, N, H], whose queries MaxText has scaled."""
    q, k, v = arrays
    keywords = _structured(layer, op.AttentionType)
    if q_ids is not None:
        kv_ids = rest.get("decoder_segment_ids_kv")
        keywords |= {"q_segment_ids": q_ids, "kv_segment_ids": q_ids if kv_ids is None else kv_ids}
    if (chosen := rest.get("indexer_mask")) is not None:
        # 0 is visible. MaxText itself compares with this number.
        keywords["mask"] = (chosen >= op.DEFAULT_MASK_VALUE * 0.5)[:, None]
    return flash_attention_with_max_logit(
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        scale=1.0,
        q_offset=0,
        softcap=layer.attn_logits_soft_cap or None,
        sinks=rest.get("sinks"),
        empty_rows="mean",
        differentiable=_PATCH.differentiable,
        **keywords,
    )


def _structured(layer: Any, kinds: Any) -> dict[str, Any]:
    """Returns the keywords of `flash_attention` for the layer's kind of mask."""
    kind = layer.attention_type
    if kind == kinds.FULL:
        return {}
    if kind == kinds.LOCAL_SLIDING:
        if layer.sliding_window_size is None:
            raise ValueError("sliding_window_size is None: local_sliding attention needs a number")
        return {"causal": True, "window": (layer.sliding_window_size - 1, 0)}
    if kind == kinds.CHUNK:
        size = layer.chunk_attn_window_size
        return {"causal": True, "window": (size - 1, 0), "mask_mod": _same_chunk(size)}
    if kind == kinds.BLOCK_DIFFUSION:
        size = layer.causal_block_size
        return {"window": (None, size - 1), "mask_mod": _up_to_chunk(size)}
    return {"causal": True}  # global and mla


@functools.cache
def _same_chunk(size: int) -> Callable:
    """Returns a mask_mod: True where both positions are in one chunk of `size` tokens.

    It is made once for a size: `flash_attention` is traced again for each new function.
    """
    return lambda b, n, i, j: _div(i, size) == _div(j, size)


@functools.cache
def _up_to_chunk(size: int) -> Callable:
    """Returns a mask_mod: True where the key's chunk is the query's or an earlier one."""
    return lambda b, n, i, j: _div(j, size) <= _div(i, size)


def _div(position: Any, size: int) -> Any:
    return jax.lax.div(position, jnp.int32(size))
