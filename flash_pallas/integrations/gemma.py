"""Runs Gemma 2, 3 and 4 of google-deepmind's `gemma` on flash_pallas (gemma 4.0.1).

Example:
    >>> from flash_pallas.integrations import gemma
    >>> gemma.install()  # doctest: +SKIP
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..api import flash_attention
from ..frontend.words import Words
from ..typing import Differentiable
from ._hooks import Client, Hook, Patch

_CLIENT = Client("gemma", "gemma", "4.0.1")
# What its layers call the arguments of `flash_attention`.
WORDS = Words({"softcap": "attn_logits_soft_cap", "mask": "attn_mask"})
_CALL = ("self", "x", "segment_pos", "cache", "attn_mask")


def install(*, differentiable: Differentiable = "reverse") -> None:
    """Makes the transformers of `gemma` compute attention by `flash_attention`.

    It replaces `Attention.__call__` of Gemma 2 and 3 and of Gemma 4
    (https://github.com/google-deepmind/gemma, 4.0.1), which forms all weights on every device. Keys
    and values keep their own number of heads. In a text-only call without a cache, where the model
    itself makes the mask and the positions, causality, padding and the window become arguments.
    Other masks, such as those of a sampler, are passed on as arrays. The soft cap and the scale are
    honored. A query that sees no key returns the mean of the values, as in gemma.

    There are no `attention_weights` among captured intermediates. Gemma 3n is not changed. JAX's
    caches are cleared, so that compiled functions are traced again.

    Args:
        differentiable: "reverse", or "any" for forward mode and derivatives of every order, as in
            `flash_attention`.

    Raises:
        ImportError: gemma is not installed, or its functions have other parameters.

    Example:
        >>> from flash_pallas.integrations import gemma
        >>> gemma.install()  # doctest: +SKIP
        >>> gemma.uninstall()
    """
    _PATCH.install(differentiable=differentiable)


def uninstall() -> None:
    """Restores the models' own attention. Without `install` nothing happens."""
    _PATCH.uninstall()


def installed(*, differentiable: Differentiable = "reverse") -> AbstractContextManager[None]:
    """Returns a context manager that runs `install` for the body of a `with` statement."""
    return _PATCH.installed(differentiable=differentiable)


def _hooks() -> list[Hook]:
    linen = _CLIENT.imported("flax.linen")
    masks = _CLIENT.imported("gemma.gm.utils._attention_mask")
    positions = _CLIENT.imported("gemma.gm.math._pos_utils")
    inputs = _CLIENT.named(_CLIENT.imported("gemma.gm.utils._types"), "Input")
    make, build = "make_causal_bidirectional_attention_mask", "build_positions_from_mask"
    known = _Known()
    hooks = [
        # Gemma 4 calls the functions; Gemma 2 and 3 ask for the properties, which are jitted.
        Hook(
            masks, make, known.mask(_CLIENT.named(masks, make, "causal_mask", "bidirectional_mask"))
        ),
        Hook(positions, build, known.positions(_CLIENT.named(positions, build, "input_mask"))),
        *(
            Hook(inputs, name, known.of_inputs(_CLIENT.named(inputs, name)))
            for name in ("attention_mask", "positions")
        ),
    ]
    for name, arguments, call in (
        ("gemma.gm.nn._modules", _CALL, _call_3),
        ("gemma.gm.nn.gemma4._modules", (*_CALL, "kv_shared_cache"), _call_4),
    ):
        module = _CLIENT.imported(name)
        owner = _CLIENT.named(module, "Attention")
        _CLIENT.named(owner, "__call__", *arguments)
        # Linen wraps the methods that it finds when the class is made, not this later one.
        hooks.append(Hook(owner, "__call__", linen.module.wrap_method_once(call(module, known))))
    return hooks


_PATCH = Patch(_hooks)


class _Known:
    """The masks and positions that models made of their tokens, recognized as objects."""

    def __init__(self):
        self._made: dict[int, tuple[Any, Any, Any]] = {}

    def _note(self, array: Any, source: Any, valid: Any) -> None:
        number = id(array)
        gone = weakref.ref(array, lambda _: self._made.pop(number, None))
        self._made[number] = (gone, source, valid)

    def source(self, array: Any) -> tuple[Any, Any]:
        """Returns what an array was made of and its tokens that are no padding, or None twice.

        The tokens are [B, L]; what two arrays were made of is one object or another.
        """
        made, source, valid = self._made.get(id(array), (None, None, None))
        return (source, valid) if made is not None and made() is array else (None, None)

    def mask(self, theirs: Callable) -> Callable:
        """Returns `make_causal_bidirectional_attention_mask` that notes what it made."""

        def make(causal_mask, *, bidirectional_mask=None):
            mask = theirs(causal_mask, bidirectional_mask=bidirectional_mask)
            if bidirectional_mask is None:
                self._note(mask, causal_mask, causal_mask)
            return mask

        return make

    def positions(self, theirs: Callable) -> Callable:
        """Returns `build_positions_from_mask` that notes what it made."""

        def build(input_mask):
            positions = theirs(input_mask)
            self._note(positions, input_mask, input_mask)
            return positions

        return build

    def of_inputs(self, theirs: property) -> property:
        """Returns a property of a model's inputs, mask or positions, that notes what it made."""

        def noted(inputs):
            array = theirs.__get__(inputs)
            if inputs.images is None:
                self._note(array, inputs, inputs.inputs_mask)
            return array

        return property(noted)


class _Seen(NamedTuple):
    """A layer's knowledge of which keys a query sees.

    Attributes:
        known: masks and positions by object.
        mask: [B, L, S], True is visible.
        positions: [B, L], of the queries.
        cache_positions: [B, S], of the keys in a cache; None without one.
    """

    known: _Known
    mask: Any
    positions: Any
    cache_positions: Any

    def keywords(self, window: int | None) -> dict[str, Any]:
        """Returns the keywords of `flash_attention`; the window counts the query itself."""
        sides = None if window is None else (window - 1, window - 1)
        cached = self.cache_positions is not None
        source, valid = (None, None) if cached else self.known.source(self.mask)
        if valid is None:
            keywords = {"mask": self.mask[:, None].astype(bool), "window": sides}
            if window is not None:
                keys = self.cache_positions if cached else self.positions
                keywords |= {"q_positions": self.positions, "kv_positions": keys}
            return keywords
        padding = valid[:, None, None].astype(bool)
        if window is None:
            return {"causal": True, "mask": padding}
        if self.known.source(self.positions)[0] is not source:
            # The caller's positions may be in any order.
            both = {"q_positions": self.positions, "kv_positions": self.positions}
            return {"mask": self.mask[:, None].astype(bool), "window": sides, **both}
        # Positions ascend by one from token to token and stand still in padding, so that causal
        # means the same for positions as for indices, but in padding before the first token.
        begun = jnp.cumsum(valid, axis=-1) > 0
        first = jnp.where(begun, self.positions, -1)
        return {
            "causal": True,
            "window": sides,
            "mask": padding,
            "q_positions": first,
            "kv_positions": self.positions,
        }


@WORDS
def _attend(layer: Any, kinds: Any, arrays: tuple, seen: _Seen, scale: float) -> Any:
    """Computes attention of [B, L, N, H] and [B, S, K, H] arrays, and the output projection."""
    q, k, v = arrays
    local = layer.attn_type == kinds.LOCAL_SLIDING
    if local and layer.sliding_window_size is None:
        raise ValueError("sliding_window_size is None: a layer of LOCAL_SLIDING needs a number")
    o = flash_attention(
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        q_offset=None if local else 0,
        scale=scale,
        softcap=layer.attn_logits_soft_cap,
        empty_rows="mean",
        differentiable=_PATCH.differentiable,
        **seen.keywords(layer.sliding_window_size if local else None),
    )
    return layer.attn_vec_einsum("BTNH,NHD->BTD", o)


def _call_3(module: Any, known: _Known) -> Callable:
    """Returns the new `__call__` of the layers of Gemma 2 and 3."""

    def __call__(self, x, segment_pos, cache, attn_mask):
        if self.use_qkv_einsum:
            q, k, v = self.qkv_einsum("BTD,SNDH->SBTNH", x)
        else:
            q = self.q_einsum("BTD,NDH->BTNH", x)
            k, v = self.kv_einsum("BSD,CKDH->CBSKH", x)
        if self.use_qk_norm:
            q, k = self._query_norm(q), self._key_norm(k)
        rope = {
            "base_frequency": self.rope_base_frequency,
            "scale_factor": self.rope_scale_factor,
        }
        rotate = module._positional_embeddings.apply_rope
        q, k = rotate(q, segment_pos, **rope), rotate(k, segment_pos, **rope)
        new = None
        if cache is not None:
            # The cache is a ring; one row of a batch ends where the others do.
            start = cache["end_index"][0] % cache["v"].shape[1]
            update = jax.lax.dynamic_update_slice
            k, v = (update(cache[name], y, (0, start, 0, 0)) for name, y in (("k", k), ("v", v)))
            positions = update(cache["positions"], segment_pos, (0, start))
            end = cache["end_index"] + x.shape[1]
            new = {"v": v, "k": k, "end_index": end, "positions": positions}
        seen = _Seen(known, attn_mask, segment_pos, None if new is None else new["positions"])
        scale = float(self.query_pre_attn_scalar)
        return new, _attend(self, module.AttentionType, (q, k, v), seen, scale)

    return __call__


def _call_4(module: Any, known: _Known) -> Callable:
    """Returns the new `__call__` of the layers of Gemma 4."""

    def __call__(self, x, segment_pos, cache, attn_mask, kv_shared_cache=None):
        rope = {
            "base_frequency": self.rope_base_frequency,
            "scale_factor": self.rope_scale_factor,
            "rope_proportion": self.rope_proportion,
        }
        rotate = module._positional_embeddings.apply_rope
        q = rotate(self.query_norm(self.q_einsum("BTD,NDH->BTNH", x)), segment_pos, **rope)
        if self.k_eq_v:
            k = v = self.k_einsum("BSD,KDH->BSKH", x)
        else:
            k, v = self.kv_einsum("BSD,CKDH->CBSKH", x)
        k, v = self.key_norm(k), self.value_norm(v)
        positions = None
        if kv_shared_cache is not None:
            k, v = kv_shared_cache["k"], kv_shared_cache["v"]
            positions = kv_shared_cache.get("positions")
        else:
            k = rotate(k, segment_pos, **rope)
            if cache is not None:
                k, v, positions = _in_ring(cache, k, v, segment_pos)
        seen = _Seen(known, attn_mask, segment_pos, positions)
        o = _attend(self, module.AttentionType, (q, k, v), seen, 1.0)
        new = {"v": v, "k": k}
        if cache is not None:
            new |= {"end_index": cache["end_index"] + x.shape[1], "positions": positions}
        return new, o

    return __call__


def _in_ring(cache: dict[str, Any], k: Any, v: Any, segment_pos: Any) -> tuple[Any, Any, Any]:
    """Puts new tokens into a ring, each row of the batch where it ends: k, v and positions."""
    rows = jnp.arange(k.shape[0])[:, None]
    slots = (cache["end_index"][:, None] + jnp.arange(k.shape[1])) % cache["v"].shape[1]
    written = lambda name, y: cache[name].at[rows, slots].set(y)
    return written("k", k), written("v", v), written("positions", segment_pos)
