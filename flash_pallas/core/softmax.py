"""Constants of the base-2 online softmax (FlashAttention-2, arXiv:2307.08691, Algorithm 1).

Logits are kept in base 2 inside the package, so that exp2(x * log2_scale - m) is one fused
multiply-add and one MUFU.EX2 per element. `lse_log2` is what passes from forward to backward.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# The log-sum-exp of a row that sees no key. Mathematically -inf; stored as a large finite positive
# number, so that exp2(x - lse_log2) is 0 in the backward without a special case, and so that no
# infinity trips jax_debug_infs. The public functions turn it into -inf.
EMPTY_ROW = 1e30


def sum_dtype(dtype):
    """In which numbers of this dtype are summed, whatever the rules of promotion."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def finish(m, l, sink_log2=None):
    """(1 / l, lse_log2) of finished rows; a row with no key gets (0, EMPTY_ROW).

    Args:
        m: running maximum of each row, base 2; -inf for a row with no key.
        l: sum of exp2(logit - m).
        sink_log2: a further logit, base 2, of the shape of m, that has no value: it joins the sum
            alone. A row with no key then gets (0, sink); a sink of -inf is none.
    """
    shrink = None
    if sink_log2 is not None:
        most = jnp.maximum(m, sink_log2)
        # Neither a key nor a sink: -inf is not to be subtracted from -inf.
        most = jnp.where(most == -jnp.inf, jnp.zeros_like(most), most)
        shrink = jnp.exp2(m - most)
        m, l = most, l * shrink + jnp.exp2(sink_log2 - most)
    empty = l == 0.0
    l = jnp.where(empty, jnp.ones_like(l), l)
    inverse = jnp.where(empty, jnp.zeros_like(l), 1.0 / l)
    lse_log2 = jnp.where(empty, jnp.full_like(l, EMPTY_ROW), m + jnp.log(l) * LOG2E)
    return inverse if shrink is None else shrink * inverse, lse_log2


def merge(o, lse_log2, sink_log2=None):
    """(o, lse_log2) of attention to all keys, from those to disjoint parts of them.

    Args:
        o: [parts, ..., H] in the dtype of lse_log2, anything finite in a row without keys.
        lse_log2: [parts, ...], EMPTY_ROW for a row without keys in that part.
        sink_log2: as of `finish`, [...]; the parts must be without it.

    Returns:
        o [..., H] and lse_log2 [...]. The sums run in the order of the parts, always.
    """
    logits = jnp.where(lse_log2 >= EMPTY_ROW / 2, -jnp.inf, lse_log2)
    most = jnp.max(logits, axis=0)
    weights = jnp.exp2(logits - jnp.where(most == -jnp.inf, 0.0, most)[None])
    inverse, merged = finish(most, jnp.sum(weights, axis=0), sink_log2)
    return jnp.sum(o * weights[..., None], axis=0) * inverse[..., None], merged


def natural(lse_log2):
    """The public LSE: natural logarithm, -inf for rows that see no key."""
    empty = lse_log2 >= EMPTY_ROW / 2
    return jnp.where(empty, -jnp.inf, jnp.where(empty, 0.0, lse_log2) * LN2)
