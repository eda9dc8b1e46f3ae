"""Runs `equinox.nn.MultiheadAttention` of an existing model on flash_pallas (equinox 0.13.8).

Example:
    >>> from flash_pallas.integrations import equinox
    >>> model = equinox.to_flash(model, causal=True)  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax

from ..api import flash_attention
from ..frontend.words import Words
from ..typing import Differentiable
from ._hooks import Client

_CLIENT = Client("equinox", "equinox", "0.13.8")
# What it calls the arguments of `flash_attention`.
WORDS = Words(
    {
        "q": "query",
        "k": "key_",
        "v": "value",
        "dropout_seed": "key",
        "dropout_rate": "dropout.p",
    }
)
_FIELDS = (
    "query_proj", "key_proj", "value_proj", "output_proj", "dropout", "num_heads", "query_size",
    "key_size", "value_size", "output_size", "qk_size", "vo_size", "use_query_bias",
    "use_key_bias", "use_value_bias", "use_output_bias",
)  # fmt: skip


def to_flash[Model](
    model: Model,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    differentiable: Differentiable = "reverse",
) -> Model:
    """Replaces every `equinox.nn.MultiheadAttention` of a model by a layer on `flash_attention`.

    Parameters, their order and the arguments of a call do not change, so weights, optimizer states
    and files of `tree_serialise_leaves` fit. equinox (https://github.com/patrick-kidger/equinox,
    0.13.8) has no argument for causal attention. With `causal` or `window`, omit the mask that says
    the same. A mask of a call is honored too, but no tile is skipped for it.

    A query that sees no key returns the mean of the values, as in equinox. For the same key,
    dropout drops different weights than in equinox, at the same rate.

    Args:
        model: any pytree, such as a module.
        causal: in every layer, a query sees no key after its own position.
        window: window of every layer, as in `flash_attention`: an int, (left, right), or None.
        differentiable: "reverse", or "any" for forward mode and derivatives of every order, as in
            `flash_attention`.

    Returns:
        The model with other layers. Its arrays are shared with the old model.

    Raises:
        ImportError: equinox is not installed or its layer has other fields.

    Example:
        >>> import equinox as eqx, jax  # doctest: +SKIP
        >>> from flash_pallas.integrations.equinox import to_flash
        >>> layer = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))  # doctest: +SKIP
        >>> x = jax.numpy.ones((16, 64))  # doctest: +SKIP
        >>> to_flash(layer, causal=True)(x, x, x).shape  # doctest: +SKIP
        (16, 64)
    """
    layer = _layer()

    def replaced(x: Any) -> Any:
        return layer(x, causal, window, differentiable) if is_layer(x) else x

    is_layer = lambda x: isinstance(x, _CLIENT.imported("equinox").nn.MultiheadAttention)
    return jax.tree.map(replaced, model, is_leaf=is_layer)


@functools.cache
def _layer() -> Any:
    """Returns the class of the new layers, which needs equinox to exist."""
    eqx = _CLIENT.imported("equinox")
    theirs = _CLIENT.named(eqx.nn, "MultiheadAttention")
    _CLIENT.named(
        theirs, "__call__", "self", "query", "key_", "value", "mask", "key", "inference",
        "deterministic", "process_heads",
    )  # fmt: skip
    if tuple(theirs.__dataclass_fields__) != _FIELDS:
        raise _CLIENT.differs(f"has a layer with the fields {tuple(theirs.__dataclass_fields__)}")

    class FlashMultiheadAttention(theirs):
        """`equinox.nn.MultiheadAttention` that never forms the attention weights."""

        causal: bool = eqx.field(static=True)
        window: Any = eqx.field(static=True)
        differentiable: str = eqx.field(static=True)

        def __init__(self, layer, causal, window, differentiable):
            for name in _FIELDS:
                setattr(self, name, getattr(layer, name))
            self.causal = causal
            self.window = window
            self.differentiable = differentiable

        def __call__(self, query, key_, value, mask=None, **options):
            return _attend(self, (query, key_, value), mask, **options)

    return FlashMultiheadAttention


@WORDS
def _attend(
    layer: Any,
    inputs: tuple[Any, Any, Any],
    mask: Any,
    *,
    key: Any = None,
    inference: bool | None = None,
    deterministic: bool | None = None,
    process_heads: Any = None,
) -> Any:
    """Computes a call of the layer: [T, query_size] and keys of S tokens to [T, output_size]."""
    if deterministic is not None:
        inference = deterministic
        warnings.warn("deterministic is deprecated: pass inference", stacklevel=3)
    projections = layer.query_proj, layer.key_proj, layer.value_proj
    heads = tuple(
        jax.vmap(projection)(x).reshape(len(x), layer.num_heads, -1)
        for projection, x in zip(projections, inputs, strict=True)
    )
    if process_heads is not None:
        processed = process_heads(*heads)
        if (now := [x.shape for x in processed]) != (had := [x.shape for x in heads]):
            raise ValueError(
                f"process_heads changed the shapes of the heads from {had} to {now}; it must "
                "return arrays of the shapes that it gets"
            )
        heads = processed
    dropped = not (layer.dropout.inference if inference is None else inference)
    rate = float(layer.dropout.p) if dropped else 0.0
    if rate and key is None:
        raise ValueError(
            f"key is None, and dropout of {rate} needs one: pass key=, or inference=True"
        )
    o = flash_attention(
        *heads,
        causal=layer.causal,
        window=layer.window,
        q_offset=0,  # as in equinox, where a mask alone says which position a query has
        mask=mask[None] if mask is not None and mask.ndim == 2 else mask,
        empty_rows="mean",
        differentiable=layer.differentiable,
        **({"dropout_rate": rate, "dropout_seed": key} if rate else {}),
    )
    return jax.vmap(layer.output_proj)(o.reshape(len(o), -1))
