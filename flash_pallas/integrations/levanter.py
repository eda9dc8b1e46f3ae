"""Runs attention of Levanter on flash_pallas (marin-levanter 0.2.227).

Example:
    >>> from flash_pallas.integrations import levanter
    >>> levanter.install()  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp

from ..api import flash_attention
from ..frontend.words import LONG_NAMES, Words
from ..typing import Differentiable
from ._hooks import Client, Hook, Patch

_CLIENT = Client("marin-levanter", "levanter", "0.2.227.dev40316220070")
# What it calls the arguments of `flash_attention`.
WORDS = Words(
    {
        **LONG_NAMES,
        "softcap": "logits_soft_cap",
        "scale": "scaling_factor",
        "sinks": "attn_sink",
        "dropout_rate": "dropout",
        "dropout_seed": "prng",
    }
)
_ARGUMENTS = (
    "QPos", "KPos", "Key", "query", "key", "value", "mask", "bias", "attention_dtype", "precision",
    "use_flash", "attn_backend", "flash_block_size", "dropout", "logits_soft_cap",
    "scaling_factor", "inference", "prng", "attn_sink",
)  # fmt: skip


def install(*, differentiable: Differentiable = "reverse") -> None:
    """Makes Levanter compute attention by `flash_attention`.

    It replaces two functions of Levanter (https://github.com/marin-community/marin, marin-levanter
    0.2.227), wherever they were imported:

    - `levanter.layers.attention.dot_product_attention`, which Levanter's models call, if
      `attn_backend` is None or DEFAULT and `use_flash` is not False. `flash_block_size` has no
      effect;
    - `levanter.grug.attention.attention`, if `implementation` is None or "flash_pallas".

    If a configuration names another implementation, that one still runs. Causal masks and their
    offsets, windows, segment ids, sinks and the soft cap become arguments, so no mask of [T, S] is
    formed. A query that sees no key returns the mean of the values, as in Levanter. Tokens with a
    negative segment id are an exception: here they are padding and see nothing, while in Levanter
    they see each other.

    JAX's caches are cleared, so that compiled functions are traced again.

    Args:
        differentiable: "reverse", or "any" for forward mode and derivatives of every order, as in
            `flash_attention`.

    Raises:
        ImportError: levanter is not installed, or its functions have other parameters.

    Example:
        >>> from flash_pallas.integrations import levanter
        >>> levanter.install()  # doctest: +SKIP
        >>> levanter.uninstall()
    """
    _PATCH.install(differentiable=differentiable)


def uninstall() -> None:
    """Restores Levanter's own attention. Without `install` nothing happens."""
    _PATCH.uninstall()


def installed(*, differentiable: Differentiable = "reverse") -> AbstractContextManager[None]:
    """Returns a context manager that runs `install` for the body of a `with` statement."""
    return _PATCH.installed(differentiable=differentiable)


def _hooks() -> list[Hook]:
    layers = _CLIENT.imported("levanter.layers.attention")
    core = _CLIENT.imported("levanter.grug.attention._core")
    theirs = _CLIENT.named(layers, "dot_product_attention", *_ARGUMENTS)
    grug = _CLIENT.named(core, "attention", "q", "k", "v", "mask", "implementation")
    _CLIENT.named(layers, "_bin_and_group_axes_by_function", "q", "k", "v", "QPos", "KPos", "Key")
    return [
        Hook(layers, "dot_product_attention", _of_names(theirs, layers), everywhere=True),
        Hook(core, "attention", _of_arrays(grug, core), everywhere=True),
    ]


_PATCH = Patch(_hooks)


def _of_arrays(theirs: Callable, core: Any) -> Callable:
    """Returns the new `attention` of levanter.grug: arrays [B, T, N, H]."""

    def attention(q, k, v, mask, *, implementation=None):
        if implementation not in (None, "flash_pallas"):
            return theirs(q, k, v, mask, implementation=implementation)
        if mask is None:
            keywords = {}
        elif isinstance(mask, core.AttentionMask):
            keywords = _structured(mask, q.shape[0])
        else:
            dense = mask[None, None] if mask.ndim == 2 else mask[:, None]
            keywords = {"mask" if mask.dtype == bool else "bias": dense}
        keywords |= {"empty_rows": "mean", "differentiable": _PATCH.differentiable}
        return flash_attention(q, k, v, q_offset=0, **keywords).astype(v.dtype)

    return attention


def _structured(mask: Any, batch: int) -> dict[str, Any]:
    """Returns the keywords of `flash_attention` for a mask of levanter.grug."""
    if mask.fa4_bounds is not None:
        raise NotImplementedError(
            "fa4_bounds is metadata of Levanter's FA4 kernels: pass segment_ids and "
            "sliding_window instead, or name implementation='gpu_fa4_cute'"
        )
    keywords: dict[str, Any] = {"causal": mask.is_causal}
    if mask.sliding_window is not None:
        keywords["window"] = (_tokens(mask.sliding_window), None)
    if mask.segment_ids is not None:
        for name, ids in zip(("q_segment_ids", "kv_segment_ids"), mask.segment_ids, strict=True):
            keywords[name] = jnp.broadcast_to(ids, (batch, ids.shape[-1]))
    return keywords


def _tokens(sliding_window: int) -> int:
    """Returns the tokens before a query in a window that counts the query itself."""
    if sliding_window < 1:
        raise ValueError(
            f"sliding_window is {sliding_window}; it counts the query itself, so it must be 1 or "
            "more, and None for no window"
        )
    return sliding_window - 1


def _of_names(theirs: Callable, layers: Any) -> Callable:
    """Returns the new `dot_product_attention` of levanter.layers: arrays with named axes."""

    signature = inspect.signature(theirs)

    def dot_product_attention(*args, **options):
        options = signature.bind(*args, **options).arguments
        backend = options.get("attn_backend")
        ours = backend is None or backend == layers.AttentionBackend.DEFAULT
        if not ours or options.get("use_flash") is False:
            return theirs(**options)
        axes, arrays = (
            [options.pop(name) for name in names]
            for names in (("QPos", "KPos", "Key"), ("query", "key", "value"))
        )
        return _attend(axes, arrays, options.pop("mask", None), options, layers)

    return dot_product_attention


@WORDS
def _attend(axes, arrays, mask, options: dict[str, Any], layers: Any) -> Any:
    """Computes attention of arrays with named axes; `options` are those of Levanter's function."""
    hax = _CLIENT.imported("haliax")
    q, k, v = arrays
    scale = options.get("scaling_factor")
    if options.get("dropout", 0.0) and not options.get("inference", True):
        dropout = {"dropout_rate": options["dropout"], "dropout_seed": options.get("prng")}
    else:
        dropout = {}
    of_q, of_k, of_v = layers._bin_and_group_axes_by_function(q, k, v, *axes)
    batch, length, heads = of_q["B"], of_q["S"], of_q["H"]
    keywords = {} if mask is None else _keywords(mask, (batch, length, heads, of_k["S"]), layers)
    if (bias := options.get("bias")) is not None:
        keywords["bias"] = _laid_out(bias, (batch, heads, length, of_k["S"]))
    if (sinks := options.get("attn_sink")) is not None:
        keywords["sinks"] = _laid_out(sinks, (batch, heads)).astype(jnp.float32)
        if keywords["sinks"].shape[0] == 1:
            keywords["sinks"] = keywords["sinks"][0]
    dtype = options.get("attention_dtype") or q.dtype
    o = flash_attention(
        *(
            _laid_out(x, (kind["B"], kind["S"], kind["H"], kind["D"])).astype(dtype)
            for x, kind in ((q, of_q), (k, of_k), (v, of_v))
        ),
        q_offset=keywords.pop("q_offset", 0),
        scale=1 / math.sqrt(of_q["D"][0].size) if scale is None else float(scale),
        softcap=options.get("logits_soft_cap"),
        precision=options.get("precision"),
        empty_rows="mean",
        differentiable=_PATCH.differentiable,
        **dropout,
        **keywords,
    )
    axes_of_o = (*batch, *length, *heads, *of_v["D"])
    return hax.named(o.reshape([axis.size for axis in axes_of_o]).astype(q.dtype), axes_of_o)


def _keywords(mask: Any, groups: tuple, layers: Any) -> dict[str, Any]:
    """Returns the keywords of `flash_attention` for a mask with named axes.

    Args:
        mask: an `AttentionMask` or a boolean array.
        groups: axes of the batch, of the queries' positions, of heads, of the keys' positions.
        layers: module levanter.layers.attention.
    """
    batch, length, heads, kv_length = groups
    order = batch, heads, length, kv_length
    if not isinstance(mask, layers.AttentionMask):
        return {"mask": _laid_out(mask, order)}
    offset = mask.causal_offset if mask.is_causal else None
    left = right = None
    if mask.sliding_window is not None:
        left, right = _tokens(mask.sliding_window), 0
    if (radius := mask.bidirectional_window) is not None:
        left, right = (radius if side is None else min(side, radius) for side in (left, right))
    if offset is not None and left is not None:
        raise NotImplementedError(
            "a causal_offset together with a window: Levanter counts the window from a query's "
            "index and the causal mask from its position. Shift the queries, so that both count "
            "from one, or name attn_backend='vanilla'"
        )
    keywords: dict[str, Any] = {"causal": mask.is_causal}
    if left is not None:
        keywords["window"] = (left, right)
    if offset is not None:
        keywords["q_offset"] = _laid_out(offset, (batch,)).astype(jnp.int32)
        if keywords["q_offset"].shape == (1,):
            keywords["q_offset"] = keywords["q_offset"][0]
    if mask.explicit_mask is not None:
        keywords["mask"] = _laid_out(mask.explicit_mask, order)
    if mask.segment_ids is not None:
        q_ids, kv_ids = mask.segment_ids
        (q_axis,), (kv_axis,) = length, kv_length
        # Levanter gives the keys' ids the name of either axis.
        if all(axis.name != kv_axis.name for axis in kv_ids.axes):
            kv_ids = kv_ids.rename({q_axis.name: kv_axis.name})
        rows = math.prod(axis.size for axis in batch)
        for name, ids, axis in (("q", q_ids, q_axis), ("kv", kv_ids, kv_axis)):
            ids = _laid_out(ids, (batch, (axis,)))
            keywords[f"{name}_segment_ids"] = jnp.broadcast_to(ids, (rows, axis.size))
    return keywords


def _laid_out(x: Any, groups: Sequence[Sequence[Any]]) -> Any:
    """Returns the array of a NamedArray with one dimension for each group of axes.

    A group of which it has no axis becomes a dimension of 1.
    """
    names = {axis.name for axis in x.axes}
    order, shape = [], []
    for group in groups:
        present = any(axis.name in names for axis in group)
        for axis in group if present else ():
            x = x if axis.name in names else x.broadcast_axis(axis)
            order.append(axis.name)
        shape.append(math.prod(axis.size for axis in group) if present else 1)
    if extra := names - set(order):
        raise NotImplementedError(
            f"an array with the axes {', '.join(sorted(names))}: {', '.join(sorted(extra))} is no "
            "axis of queries, keys or values. Name attn_backend='vanilla' for this layer"
        )
    return (x.rearrange(order) if order else x).array.reshape(shape)
