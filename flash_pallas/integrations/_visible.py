"""Masks that keep their meaning: clients combine them like arrays, but no array is formed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ..core.mask import Mask

Window = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class Visible:
    """The keys that each query sees, in terms of arguments of `flash_attention`.

    Attributes:
        causal: query i sees keys 0 to q_offset + i.
        window: (left, right), both included; None is unbounded.
        q_offset: position of query 0: an int, an int32 scalar or [B].
        kv_valid: bool [B, S]; False marks a key that no query sees.
        mask: bool [B, N, T, S], each axis full or 1, for masks without structure.
    """

    causal: bool = False
    window: Window | None = None
    q_offset: Any = None
    kv_valid: Any = None
    mask: Any = None

    def __and__(self, other: Visible) -> Visible:
        """Returns the keys that both show."""
        if not isinstance(other, Visible):
            return NotImplemented
        offsets = [x for x in (self.q_offset, other.q_offset) if x is not None]
        if len(offsets) == 2:
            raise ValueError("two masks have a q_offset: which of them counts is not said")
        return Visible(
            causal=self.causal or other.causal,
            window=_narrower(self.window, other.window),
            q_offset=offsets[0] if offsets else None,
            kv_valid=both(self.kv_valid, other.kv_valid),
            mask=both(self.mask, other.mask),
        )

    @property
    def hides_nothing(self) -> bool:
        """True if each query sees every key."""
        limits = self.window, self.kv_valid, self.mask
        return not self.causal and all(x is None for x in limits)

    def options(self, batch: int, q_len: int, kv_len: int) -> dict[str, Any]:
        """Returns keywords of `flash_attention` for q of [B, T, ...] and k of [B, S, ...]."""
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "mask": self.mask}
        options["q_offset"] = 0 if self.q_offset is None else self.q_offset
        if self.kv_valid is None:
            return options
        # One document; negative ids are padding.
        ids = jnp.where(self.kv_valid, 0, -1).astype(jnp.int32)
        options["q_segment_ids"] = jnp.zeros((batch, q_len), jnp.int32)
        options["kv_segment_ids"] = jnp.broadcast_to(ids, (batch, kv_len))
        return options

    def dense(self, q_len: int, kv_len: int) -> Any:
        """Returns the mask as bool [B, N, T, S] for the client's own code; B and N may be 1."""
        offset = jnp.asarray(0 if self.q_offset is None else self.q_offset, jnp.int32)
        i, j = (jnp.arange(length, dtype=jnp.int32) for length in (q_len, kv_len))
        i = offset.reshape(-1, 1, 1, 1) + i.reshape(1, 1, -1, 1)
        j = j.reshape(1, 1, 1, -1)
        left, right = _narrower(self.window, (None, 0) if self.causal else None) or (None, None)
        visible = Mask(left, right).visible(i, j)
        visible = (
            jnp.ones(jnp.broadcast_shapes(i.shape, j.shape), bool) if visible is None else visible
        )
        if self.kv_valid is not None:
            visible = visible & self.kv_valid[:, None, None, :]
        return visible if self.mask is None else visible & self.mask


def both(one: Any, other: Any) -> Any:
    """Returns the conjunction of two arrays of bool. Either may be None, which hides nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _narrower(one: Window | None, other: Window | None) -> Window | None:
    if one is None or other is None:
        return other if one is None else one
    sides = zip(one, other, strict=True)
    left, right = (min((x for x in side if x is not None), default=None) for side in sides)
    return left, right
