"""The oracle: attention in plain jnp, with the whole matrix of scores in memory.

It defines what every backend must compute, and shares no code with them except the dropout mask
(`core.dropout.keep`). It is not meant for training, because memory grows with T * S.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .core import dropout
from .typing import Array, Float


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    full_precision: bool = False,
    max_logit: bool = False,
    rounded_logits: bool = False,
    **arguments: Any,
) -> tuple[Array, ...]:
    """Computes softmax(modified(scale * q @ k^T)) @ v and the log-sum-exp of its rows.

    It is differentiable to any order by ordinary autodiff. Everything is computed in float32, or in
    float64 for float64 inputs.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, S, K, H]; N is a multiple of K.
        v: values [B, S, K, Hv].
        full_precision: return o in the dtype in which it was computed instead of in q's dtype.
        max_logit: also return the largest visible score of every row, which has no gradient.
        rounded_logits: round the sums with the bias and with ALiBi to float32, as happens anyway
            for float32 inputs. With a bias of -1e9, rounding leaves nothing of a score, so a row in
            which that bias hides all keys attends equally to all of them.
        **arguments: the other arguments of `flash_attention` that affect the result: the fields of
            `Modifiers`.

    Returns:
        o [B, T, N, Hv] and lse [B, N, T] (natural logarithm); with max_logit, also the largest
        scores [B, N, T]. A row that sees no key has o = 0 (or the mean of v with
        `empty_rows="mean"`), lse = -inf (or its sink, if there are sinks), max_logit = -inf and
        gradients of zero. A row beyond its length always has lse = -inf.
    """
    m = Modifiers(**arguments)
    dtype, exact = q.dtype, jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    mean = jnp.where(jnp.isfinite(v), v, m.cleared_keys(v)).astype(exact)
    mean = mean.mean(axis=1, keepdims=True)
    mean = jnp.repeat(mean, q.shape[2] // v.shape[2], axis=2)
    q = m.cleared_queries(q.astype(exact))
    k, v = (m.cleared_keys(x.astype(exact)) for x in (k, v))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scale = 1.0 / math.sqrt(q.shape[-1]) if m.scale is None else m.scale
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision=lax.Precision.HIGHEST)
    keep = m.visible(scores.shape)
    weights, lse, largest = m.softmax(m.logits(scores, keep, rounded=rounded_logits), keep)
    if m.dropout_rate:
        weights = jnp.where(m.kept(scores.shape), weights * dropout.gain(m.dropout_rate), 0.0)
    o = jnp.einsum("bnts,bsnh->btnh", weights, v, precision=lax.Precision.HIGHEST)
    if m.empty_rows == "mean" and m.sinks is None:
        empty = (lse == -jnp.inf).swapaxes(1, 2)[..., None]
        o = jnp.where(empty, mean, o)
    o = m.cleared_queries(o)
    o = o if full_precision else o.astype(dtype)
    return (o, lse, largest) if max_logit else (o, lse)


@dataclasses.dataclass(frozen=True)
class Modifiers:
    """Modifiers of attention, with the names and meanings of the arguments of `flash_attention`.

    Scores always have shape [B, N, T, S].
    """

    causal: bool = False
    window: Any = None
    scale: float | None = None
    q_offset: Any = 0
    q_positions: Any = None
    kv_positions: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    bias: Any = None
    mask: Any = None
    softcap: float | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_rate: float = 0.0
    dropout_seed: Any = None
    broadcast_dropout: bool = False
    score_mod: Any = None
    mask_mod: Any = None
    block_mask: Any = None
    empty_rows: str = "zero"

    def cleared_queries(self, x):
        """Returns x [B, T, N, H] with padding set to 0, because 0 times a NaN would be a NaN."""
        return _cleared(x, self.q_lengths, self.q_segment_ids)

    def cleared_keys(self, x):
        """Returns x [B, S, K, H] with padding set to 0."""
        return _cleared(x, self.kv_lengths, self.kv_segment_ids)

    def visible(self, shape):
        """Returns bool[B, N, T, S]: the keys that each query sees; none beyond its length."""
        _, _, q_len, kv_len = shape
        i, j = self._positions(shape)
        sides = self.window if isinstance(self.window, tuple) else (self.window,) * 2
        of_entries = lambda x: x.reshape(-1, 1, 1, 1) if isinstance(x, jax.Array) else x
        left, right = map(of_entries, (sides[0], 0 if self.causal else sides[1]))
        band = jnp.ones((), bool)
        if left is not None:
            band &= j - i >= -left
        if right is not None:
            band &= j - i <= right
        keep = jnp.broadcast_to(band, shape)
        if self.q_segment_ids is not None:
            q_ids, kv_ids = self.q_segment_ids[:, None, :, None], self.kv_segment_ids[:, None, None]
            keep &= (q_ids == kv_ids) & (q_ids >= 0)
        if self.q_lengths is not None:
            keep &= _within(self.q_lengths, q_len)[:, None, :, None]
        if self.kv_lengths is not None:
            keep &= _within(self.kv_lengths, kv_len)[:, None, None, :]
        if self.mask is not None:
            keep &= self.mask
        if self.bias is not None:
            keep &= self.bias != -jnp.inf
        if self.mask_mod is not None:
            keep &= self._everywhere(lambda _, *place: self.mask_mod(*place), keep)
        if self.block_mask is not None:
            seen = self.block_mask.to_dense()
            keep &= jnp.repeat(seen, -(-shape[1] // seen.shape[1]), axis=1)[:, : shape[1]]
        return keep

    def logits(self, scores, keep, *, rounded: bool = False):
        """Computes the modified scores where `keep` is True; elsewhere they are any finite number.

        The order is bias, ALiBi, softcap, score_mod. `rounded` is `rounded_logits` of `attention`.
        """
        i, j = self._positions(scores.shape)
        sum_of = _rounded if rounded else lambda x: x
        if self.bias is not None:
            # Hidden scores may be NaN, and a NaN would reach the gradients.
            scores = sum_of(scores + jnp.where(keep, self.bias.astype(scores.dtype), 0.0))
        if self.alibi_slopes is not None:
            distance = jnp.abs(i - j).astype(scores.dtype)
            scores = sum_of(scores - self._per_head(self.alibi_slopes, scores) * distance)
        if self.softcap is not None:
            capped = self.softcap * jnp.tanh(scores / self.softcap)
            scores = jnp.where(jnp.isposinf(scores), scores, capped)
        if self.score_mod is not None:
            scores = self._everywhere(self.score_mod, jnp.where(keep, scores, 0.0))
        return scores

    def softmax(self, scores, keep):
        """Computes (weights, log-sum-exp, row max) of scores; sinks count in the first two."""
        keep = keep & (scores > -jnp.inf)
        largest = jnp.max(jnp.where(keep, scores, -jnp.inf), axis=-1, initial=-jnp.inf)
        largest = lax.stop_gradient(largest)
        shift = largest
        if self.sinks is not None:
            sinks = self._per_head(self.sinks, scores)[..., 0]
            shift = jnp.maximum(shift, lax.stop_gradient(sinks))
        shift = jnp.where(jnp.isfinite(shift), shift, 0.0)
        # Two wheres: the outer one cuts the gradient of hidden scores, the inner one keeps what is
        # hidden from making a NaN that the outer one could not cut.
        shifted = jnp.where(keep, scores, 0.0) - shift[..., None]
        weights = jnp.where(keep, jnp.exp(shifted), 0.0)
        total = jnp.sum(weights, axis=-1)
        if self.sinks is not None:
            total = total + jnp.exp(sinks - shift)
        divisor = jnp.where(total > 0.0, total, 1.0)
        lse = jnp.where(total > 0.0, jnp.log(divisor) + shift, -jnp.inf)
        if self.q_lengths is not None:
            rows = _within(self.q_lengths, scores.shape[2])[:, None]
            lse = jnp.where(rows, lse, -jnp.inf)
        return weights / divisor[..., None], lse, largest

    def kept(self, shape):
        """Returns the dropout mask, bool[B, N, T, S], True for weights that are kept."""
        batch, heads = (1, 1) if self.broadcast_dropout else shape[:2]
        keys = dropout.call_keys(dropout.seed_words(self.dropout_seed), batch, heads)
        places = dataclasses.replace(self, q_positions=None, kv_positions=None)._positions(shape)
        keep = dropout.keep(keys[..., None, None], *places, self.dropout_rate)
        return jnp.broadcast_to(keep, shape)

    def _positions(self, shape):
        """Returns the positions of queries and of keys, int32[B, 1, T, 1] and [B or 1, 1, 1, S]."""
        batch, _, q_len, kv_len = shape
        offset = jnp.broadcast_to(jnp.asarray(self.q_offset, jnp.int32), (batch,))
        i = offset[:, None] + jnp.arange(q_len, dtype=jnp.int32)[None]
        i = i if self.q_positions is None else self.q_positions
        j = jnp.arange(kv_len, dtype=jnp.int32)[None]
        j = j if self.kv_positions is None else self.kv_positions
        return i[:, None, :, None], j[:, None, None]

    def _everywhere(self, function, scores):
        """Maps function(score, b, n, i, j) of scalars over every element of scores."""
        i, j = (x.reshape(x.shape[0], -1) for x in self._positions(scores.shape))
        j = jnp.broadcast_to(j, (len(i), j.shape[1]))
        b, n = (jnp.arange(size, dtype=jnp.int32) for size in scores.shape[:2])
        for axes in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
            function = jax.vmap(function, axes)
        return jax.vmap(function, (0, 0, None, 0, 0))(scores, b, n, i, j)

    def _per_head(self, x, scores):
        """Broadcasts x [N] or [B, N] to [B, N, 1, 1]."""
        return jnp.broadcast_to(x.astype(scores.dtype), scores.shape[:2])[..., None, None]


def _rounded(x):
    """Rounds x to float32, with the gradient of x."""
    # Not by a conversion there and back, which XLA removes on a GPU.
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)
    return x + lax.stop_gradient(jnp.where(jnp.isfinite(x), rounded - x, 0.0))


def _cleared(x, lengths, segments):
    if segments is not None:
        x = jnp.where((segments >= 0)[..., None, None], x, 0.0)
    if lengths is not None:
        x = jnp.where(_within(lengths, x.shape[1])[..., None, None], x, 0.0)
    return x


def _within(lengths, longest: int):
    """Returns bool[B, longest]: True before the length."""
    return jnp.arange(longest, dtype=jnp.int32)[None] < lengths[:, None]
