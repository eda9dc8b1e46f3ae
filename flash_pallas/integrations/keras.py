"""Runs attention of Keras 3 with the JAX backend on flash_pallas (keras 3.15.1).

Example:
    >>> from flash_pallas.integrations import keras
    >>> keras.install()  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..api import flash_attention
from ..frontend.words import LONG_NAMES, Words
from ..typing import Differentiable
from ._hooks import Client, Hook, Patch

_CLIENT = Client("keras", "keras", "3.15.1")
# What it calls the arguments of `flash_attention`.
WORDS = Words(
    {
        **LONG_NAMES,
        "causal": "is_causal",
        "softcap": "attn_logits_soft_cap",
        "window": "sliding_window",
        "dropout_rate": "dropout",
    }
)
_MASK_ARGUMENTS = (
    "self", "query", "value", "query_mask", "value_mask", "key_mask", "attention_mask",
    "use_causal_mask",
)  # fmt: skip


def install(*, differentiable: Differentiable = "reverse") -> None:
    """Makes Keras compute attention by `flash_attention`.

    It replaces `keras.ops.dot_product_attention` and the attention of the layers
    `MultiHeadAttention` and `GroupedQueryAttention` (https://github.com/keras-team/keras, 3.15.1),
    including dropout. Causal masks, `sliding_window` and the masks of padded inputs become
    arguments, so no mask of [B, T, S] is formed. A query that sees no key returns the mean of the
    values, as in Keras. Keras itself still runs calls that ask for the weights
    (`return_attention_scores`), layers over several axes, and layers and calls with
    `flash_attention=False`.

    JAX's caches are cleared, so that compiled functions are traced again.

    Args:
        differentiable: "reverse", or "any" for forward mode and derivatives of every order, as in
            `flash_attention`.

    Raises:
        ImportError: keras is not installed, or its functions have other parameters.
        RuntimeError: Keras runs on another backend than JAX.

    Example:
        >>> from flash_pallas.integrations import keras
        >>> keras.install()  # doctest: +SKIP
        >>> keras.uninstall()
    """
    _PATCH.install(differentiable=differentiable)


def uninstall() -> None:
    """Restores Keras's own attention. Without `install` nothing happens."""
    _PATCH.uninstall()


def installed(*, differentiable: Differentiable = "reverse") -> AbstractContextManager[None]:
    """Returns a context manager that runs `install` for the body of a `with` statement."""
    return _PATCH.installed(differentiable=differentiable)


class _Masks(NamedTuple):
    """The masks of a layer's call, each by itself, in place of one array [B, T, S].

    Attributes:
        causal: key positions up to the query's.
        window: `sliding_window` of the layer: |i - j| < window; None is unbounded.
        queries: [B, T], False is padding; None is all True.
        keys: [B, S], the same.
        attention_mask: the caller's own mask, of up to rank 4.
        dense: returns what Keras would have made of them.
    """

    causal: bool
    window: int | None
    queries: Any
    keys: Any
    attention_mask: Any
    dense: Callable[[], Any]

    def keywords(self, q: Any, k: Any) -> dict[str, Any]:
        """Returns the keywords of `flash_attention` that express these masks."""
        keywords: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            keywords["window"] = int(self.window) - 1
        if self.queries is not None or self.keys is not None:
            keywords["q_segment_ids"] = _ids(self.queries, q.shape[:2], hidden=1)
            keywords["kv_segment_ids"] = _ids(self.keys, k.shape[:2], hidden=-1)
        if self.attention_mask is not None:
            mask = jnp.asarray(self.attention_mask).astype(bool)
            # [B, T, S] has no axis of heads; [T, S] has no batch either.
            keywords["mask"] = mask[:, None] if mask.ndim == 3 else _of_rank_4(mask)
        return keywords


def _ids(valid: Any, shape: tuple[int, int], hidden: int) -> Any:
    """Returns segment ids: 0 for tokens, `hidden` for padding.

    Queries that are padding get an id of their own, not a negative one: they see no key, and what
    Keras returns there is the mean of the values, not zeros.
    """
    if valid is None:
        return jnp.zeros(shape, jnp.int32)
    valid = jnp.broadcast_to(valid, shape).astype(bool)
    return jnp.where(valid, 0, hidden).astype(jnp.int32)


def _hooks() -> list[Hook]:
    backend = _CLIENT.imported("keras.src.backend")
    layers = _CLIENT.imported("keras.src.layers.attention.multi_head_attention")
    grouped = _CLIENT.imported("keras.src.layers.attention.grouped_query_attention")
    if backend.backend() != "jax":
        raise RuntimeError(
            f"Keras runs on {backend.backend()!r}; flash_pallas is for JAX. Set the environment "
            "variable KERAS_BACKEND=jax before keras is imported"
        )
    theirs = _CLIENT.named(
        backend.nn, "dot_product_attention", "query", "key", "value", "bias", "mask", "scale",
        "is_causal", "flash_attention", "attn_logits_soft_cap",
    )  # fmt: skip
    hooks = [Hook(backend.nn, "dot_product_attention", _function(theirs))]
    inputs = ("self", "query", "key", "value", "attention_mask", "training")
    for layer, arguments in (
        (layers.MultiHeadAttention, (*inputs, "return_attention_scores", "use_causal_mask")),
        (grouped.GroupedQueryAttention, (*inputs, "use_causal_mask")),
    ):
        compute = _CLIENT.named(layer, "_compute_attention", *arguments)
        masks = _CLIENT.named(layer, "_compute_attention_mask", *_MASK_ARGUMENTS)
        ours = _compute(compute)
        hooks += [
            Hook(layer, "_compute_attention", ours),
            Hook(layer, "_compute_attention_mask", _compute_mask(masks, ours)),
        ]
    return hooks


_PATCH = Patch(_hooks)


def _function(theirs: Callable) -> Callable:
    """Returns the new `dot_product_attention` of Keras's backend."""

    signature = inspect.signature(theirs)

    def dot_product_attention(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        softcap = arguments.get("attn_logits_soft_cap")
        if arguments.get("flash_attention") is False:
            if softcap is not None:
                raise NotImplementedError(
                    "attn_logits_soft_cap is dropped by Keras's own attention on CPU and GPU: "
                    "leave out flash_attention=False"
                )
            return theirs(*args, **kwargs)
        mask = arguments.get("mask")
        masks = _Masks(arguments.get("is_causal", False), None, None, None, mask, lambda: mask)
        arrays = arguments["query"], arguments["key"], arguments["value"]
        bias, scale = arguments.get("bias"), arguments.get("scale")
        return _attend(arrays, masks, bias=bias, scale=scale, softcap=softcap)

    return dot_product_attention


def _compute_mask(theirs: Callable, compute: Callable) -> Callable:
    """Returns the new `_compute_attention_mask` of a layer, for the new `_compute_attention`."""

    def compute_attention_mask(
        self, query, value, query_mask=None, value_mask=None, key_mask=None, attention_mask=None,
        use_causal_mask=False,
    ):  # fmt: skip
        dense = lambda: theirs(
            self, query, value, query_mask, value_mask, key_mask, attention_mask, use_causal_mask
        )
        # A subclass with attention of its own expects the array.
        if type(self)._compute_attention is not compute or len(query.shape) != 3:
            return dense()
        window = getattr(self, "_sliding_window", getattr(self, "sliding_window", None))
        both = [jnp.asarray(x).astype(bool) for x in (value_mask, key_mask) if x is not None]
        keys = both[0] & both[-1] if both else None
        return _Masks(use_causal_mask, window, query_mask, keys, attention_mask, dense)

    return compute_attention_mask


def _compute(theirs: Callable) -> Callable:
    """Returns the new `_compute_attention` of a layer."""

    def compute_attention(
        self, query, key, value, attention_mask=None, training=None, *rest, **options
    ):
        # MultiHeadAttention gets return_attention_scores; the other layer keeps it.
        scores = rest[0] if rest else options.get("return_attention_scores")
        scores = scores or getattr(self, "_return_attention_scores", False)
        if scores or self._flash_attention is False or len(query.shape) != 4:
            if isinstance(attention_mask, _Masks):
                attention_mask = attention_mask.dense()
            return theirs(self, query, key, value, attention_mask, training, *rest, **options)
        masks = attention_mask
        if not isinstance(masks, _Masks):
            causal = options.get("use_causal_mask", False)
            masks = _Masks(causal, None, None, None, attention_mask, lambda: attention_mask)
        scale = getattr(self, "_inverse_sqrt_key_dim", None)
        if scale is None:
            scale = self._inverse_sqrt_head_dim
        return _attend((query, key, value), masks, scale=scale, **_dropout(self, training)), None

    return compute_attention


def _dropout(layer: Any, training: bool | None) -> dict[str, Any]:
    """Returns the keywords of `flash_attention` for a layer's dropout."""
    rate = getattr(layer, "_dropout", None)
    rate = layer.dropout if rate is None else rate
    if not rate or not training:
        return {}
    return {"dropout_rate": float(rate), "dropout_seed": layer._dropout_layer.seed_generator.next()}


@WORDS
def _attend(arrays: tuple[Any, Any, Any], masks: _Masks, *, bias=None, scale=None, **options):
    """Computes attention of [B, T, N, H] arrays in the dtype that Keras would compute in."""
    backend = _CLIENT.imported("keras.src.backend")
    q, k, v = (backend.convert_to_tensor(x) for x in arrays)
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(
            "query, key and value must be [batch, length, heads, head_dim], but have shapes "
            f"{q.shape}, {k.shape} and {v.shape}"
        )
    dtype = backend.result_type(q.dtype, k.dtype, v.dtype)
    q, k, v = (backend.cast(x, dtype) for x in (q, k, v))
    return flash_attention(
        q,
        k,
        v,
        q_offset=0,
        bias=None if bias is None else _of_rank_4(backend.convert_to_tensor(bias, dtype=dtype)),
        scale=None if scale is None else float(scale),
        empty_rows="mean",
        differentiable=_PATCH.differentiable,
        **masks.keywords(q, k),
        **options,
    )


def _of_rank_4(x: Any) -> Any:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)
