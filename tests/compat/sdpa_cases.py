"""Calls of PyTorch's SDPA, and the formula that its documentation gives, in jnp."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import formulas


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shapes, the kind of mask, options.

    Attributes:
        q: shape of query.
        kv: shape of key and value.
        mask: shape of attn_mask, None without.
        floats: attn_mask is float, a tenth of it -inf; else bool.
        options: other arguments.
        empty: a query that the mask hides everything from, or None.
    """

    q: tuple[int, ...]
    kv: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    floats: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    empty: int | None = None

    def drawn(self, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Draws (arrays by argument, float64 and bool, other arguments)."""
        rng = np.random.default_rng(seed)
        arrays = {"query": rng.normal(size=self.q), "key": rng.normal(size=self.kv)}
        arrays["value"] = rng.normal(size=self.kv)
        if self.mask is not None:
            shown = rng.uniform(size=self.mask) > 0.1
            shown[..., 0] = True
            if self.empty is not None:
                shown[..., self.empty, :] = False
            floats = np.where(shown, rng.normal(size=self.mask), -np.inf)
            arrays["attn_mask"] = floats if self.floats else shown
        return arrays, self.options


CASES = {
    "plain": Case((2, 3, 20, 8), (2, 3, 31, 8)),
    "causal, more keys": Case((2, 3, 20, 8), (2, 3, 31, 8), options={"is_causal": True}),
    "causal, more queries": Case((1, 2, 31, 8), (1, 2, 20, 8), options={"is_causal": True}),
    "one query": Case((1, 2, 1, 8), (1, 2, 20, 8), options={"is_causal": True}),
    "bool mask": Case((2, 3, 20, 8), (2, 3, 31, 8), (20, 31)),
    "bool mask of heads": Case((2, 3, 20, 8), (2, 3, 31, 8), (3, 20, 31), empty=2),
    "padding mask": Case((2, 3, 20, 8), (2, 3, 31, 8), (2, 1, 1, 31)),
    "float mask": Case((2, 3, 20, 8), (2, 3, 31, 8), (2, 1, 20, 31), floats=True),
    "float mask, empty row": Case((2, 3, 20, 8), (2, 3, 31, 8), (20, 31), floats=True, empty=4),
    "GQA and scale": Case(
        (2, 6, 20, 8), (2, 2, 31, 8), options={"enable_gqa": True, "scale": 0.7, "is_causal": True}
    ),
    "no heads": Case((3, 20, 8), (3, 31, 8), (3, 20, 31)),
    "two batch axes": Case((2, 2, 3, 9, 8), (2, 2, 3, 12, 8), (3, 9, 12)),
}


def random_case(seed) -> Case:
    """Draws a call that torch takes too."""
    rng = np.random.default_rng(seed)
    kv_heads, group, batch = (int(rng.integers(1, 4)) for _ in range(3))
    lengths = tuple(int(rng.integers(1, 70)) for _ in range(2))
    head_dim = int(rng.choice([8, 16, 40]))
    sizes = (batch, kv_heads * group, *lengths)
    options: dict[str, Any] = {"enable_gqa": group > 1}
    mask, kind = None, rng.integers(4)
    if kind == 0:
        options["is_causal"] = True
    elif kind < 3:
        mask = tuple(size if rng.integers(2) or i == 3 else 1 for i, size in enumerate(sizes))
        mask = mask[int(rng.integers(3)) :] if rng.integers(2) else mask
    if rng.integers(2):
        options["scale"] = float(rng.uniform(0.05, 1.0))
    q, kv = (batch, kv_heads * group, lengths[0], head_dim), (batch, kv_heads, lengths[1], head_dim)
    return Case(q, kv, mask, bool(kind == 2), options)


def formula(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Computes softmax(query @ key^T * scale + mask) @ value of [*B, heads, length, E]."""
    del enable_gqa  # the formula repeats key heads in any case
    if query.ndim == 3:
        attn_mask = None if attn_mask is None else attn_mask[:, None]
        query, key, value = (x[:, None] for x in (query, key, value))
        return formula(query, key, value, attn_mask, is_causal, scale)[:, 0]
    lead = query.shape[:-3]
    shape = (*lead, query.shape[-3], query.shape[-2], key.shape[-2])
    bias = jnp.zeros(shape)
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (len(shape) - attn_mask.ndim) + attn_mask.shape)
        floats = jnp.where(attn_mask, 0.0, -jnp.inf) if attn_mask.dtype == bool else attn_mask
        bias = bias + floats
    if is_causal:
        rows, columns = (np.arange(size) for size in shape[-2:])
        bias = jnp.where(jnp.asarray(columns[None] <= rows[:, None]).reshape(
            (1,) * len(shape[:-2]) + shape[-2:]), bias, -jnp.inf)  # fmt: skip
    flat = lambda x: jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2)
    bias = bias.reshape(-1, *shape[-3:])
    # -inf - -inf has no number, so what is hidden is hidden, not added.
    change = lambda score: score + jnp.where(bias > -jnp.inf, bias, 0.0)
    o, _ = formulas.attention(
        flat(query), flat(key), flat(value), visible=bias > -jnp.inf, scale=scale, change=change
    )
    return jnp.swapaxes(o, 1, 2).reshape(*lead, *query.shape[-3:-1], value.shape[-1])
