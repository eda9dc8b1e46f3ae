"""Calls of FlexAttention. Mods are texts, which torch and jnp both run under the name `xp`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import formulas


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: the texts of its functions, and what they and the mask are given.

    Attributes:
        mask: mask_mod's result as text, None without a mask.
        score: score_mod's.
        q: shape of query.
        kv: shape of key and value.
        dense: the mask indexes arrays by positions.
        window: the window that is found in it.
        options: other arguments of `flex_attention`.
    """

    mask: str | None = None
    score: str | None = None
    q: tuple[int, ...] = (2, 4, 40, 16)
    kv: tuple[int, ...] = (2, 4, 40, 16)
    dense: bool = False
    window: tuple[int | None, int | None] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def drawn(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Draws query, key, value and the arrays that functions capture, float64 and int64."""
        rng = np.random.default_rng(seed)
        arrays = {"query": rng.normal(size=self.q), "key": rng.normal(size=self.kv)}
        arrays["value"] = rng.normal(size=self.kv)
        arrays["slopes"] = rng.uniform(0.1, 1.0, self.q[1])
        arrays["ids"] = np.arange(max(self.q[2], self.kv[2])) // 13
        arrays["lengths"] = np.arange(1, self.q[0] + 1) * 15
        return arrays

    def mods(self, arrays: dict[str, Any], xp) -> tuple[Any, Any]:
        """Returns (score_mod, mask_mod), which compute with the library `xp`."""
        names = {**arrays, "xp": xp}
        head = "lambda {}b, h, q_idx, kv_idx: "
        score = self.score and eval(head.format("score, ") + self.score, names)
        return score, self.mask and eval(head.format("") + self.mask, names)


LONG = (1, 2, 23, 16)
CASES = {
    "plain": Case(),
    "causal": Case("q_idx >= kv_idx", window=(None, 0)),
    "causal, written otherwise": Case("kv_idx < q_idx + 1", window=(None, 0)),
    "causal, lengths differ": Case("kv_idx <= q_idx", kv=(2, 4, 57, 16), window=(None, 0)),
    "sliding window": Case("(q_idx >= kv_idx) & (q_idx - kv_idx <= 7)", window=(7, 0)),
    "two-sided window": Case("(q_idx - kv_idx < 4) & (kv_idx - q_idx < 9)", window=(3, 8)),
    "prefix": Case("(kv_idx < 7) | (kv_idx <= q_idx)"),
    "union of windows": Case(
        "((q_idx >= kv_idx) & (q_idx - kv_idx <= 3)) | ((kv_idx >= q_idx) & (kv_idx - q_idx <= 5))",
        window=(3, 5),
    ),
    "causal and lengths": Case("(q_idx >= kv_idx) & (kv_idx < lengths[b])", window=(None, 0)),
    "a row without keys": Case("(q_idx >= kv_idx) & (q_idx != 4)", window=(None, 0)),
    "keys after the query": Case("kv_idx > q_idx"),
    "heads differ": Case("kv_idx <= q_idx + 3 * h"),
    "dilated": Case("(q_idx - kv_idx) % 3 == 0"),
    "documents": Case("(ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)", dense=True),
    "alibi": Case("q_idx >= kv_idx", "score - slopes[h] * (q_idx - kv_idx)", window=(None, 0)),
    "softcap": Case(None, "3.0 * xp.tanh(score / 3.0)"),
    "relative bias, GQA": Case(
        None, "score + slopes[h] * (kv_idx - q_idx)", q=(2, 6, 21, 16), kv=(2, 2, 33, 16),
        options={"enable_gqa": True, "scale": 0.2},
    ),
}  # fmt: skip


def formula(case: Case, query, key, value, **captured):
    """Computes (o, lse): scale, score_mod, then mask_mod, for every query and key."""
    shape = (*query.shape[:3], key.shape[2])
    where = [jnp.asarray(x) for x in np.indices(shape)]
    score_mod, mask_mod = case.mods(captured, jnp)
    visible = jnp.ones(shape, bool) if mask_mod is None else mask_mod(*where)
    change = (lambda x: x) if score_mod is None else lambda x: score_mod(x, *where)
    swap = lambda x: jnp.swapaxes(x, 1, 2)
    scale = case.options.get("scale")
    arrays = swap(query), swap(key), swap(value)
    o, lse = formulas.attention(*arrays, visible=visible, scale=scale, change=change)
    return swap(o), lse
