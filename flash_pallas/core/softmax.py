"""Constants and the two ends of the base-2 online softmax (FlashAttention-2, arXiv:2307.08691).

Weights are exp2((x - shift) * log2_scale - lse_log2), where x are the logits of `core.scores` and
`shift` and `lse_log2` are the log-sum-exp of a row in two parts. Kernels leave a shift of 0 to rows
whose logits are small: exp2(x * log2_scale - lse_log2) is one fused multiply-add and one MUFU.EX2
per element. A float32 that holds the log-sum-exp of large logits alone has no digits left for the
logarithm of the sum, and 2**(its rounding error) is anything: such rows have a shift, which is the
largest logit of the row, exactly.
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

# Rows whose largest logit is beyond this in base 2 have a shift. The weights of others are wrong by
# a rounding of lse_log2: at most 2**-12.5 where products are of 16 bits, 2**-16.5 in float32.
FAR_16_BITS, FAR_FLOAT32 = 2.0**12, 2.0**8


def far(dtype) -> float:
    """Returns the magnitude of logits, in base 2, beyond which rows of q's dtype have a shift."""
    return FAR_16_BITS if jnp.dtype(dtype).itemsize == 2 else FAR_FLOAT32


def sum_dtype(dtype):
    """Returns the dtype in which numbers of this dtype are summed, whatever the promotion rules."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def parted(m, unit: float, far: float):
    """Returns (m in base 2, shift) for `finish`, of rows with weights exp2((x - m) * log2_scale).

    Args:
        m: the largest x of each row; -inf for a row with no key.
        unit: as in `finish`.
        far: as returned by the function `far`.
    """
    m_log2 = m * (unit * LOG2E)
    is_far = (jnp.abs(m_log2) > far) & (m > -jnp.inf)
    zero = jnp.zeros_like(m)
    return jnp.where(is_far, zero, m_log2), jnp.where(is_far, m, zero)


def finish(m, l, shift, sink=None, unit: float = 1.0):
    """Returns (1 / l, lse_log2, shift) of finished rows; a row with no key gets (0, EMPTY_ROW, 0).

    Args:
        m: what the weights of each row are relative to, base 2; -inf for a row with no key.
        l: sum of exp2((x - shift) * log2_scale - m).
        shift: shift of each row, in units of x.
        sink: a further natural logit without a value, of the shape of m: it joins the sum alone. A
            row with no key then gets the sink for its log-sum-exp; a sink of -inf is none.
        unit: factor that turns x into a natural logit.
    """
    shrink = None
    if sink is not None:
        m, shift, sink_log2 = _with_sink(m, shift, sink, unit)
        most = jnp.maximum(m, sink_log2)
        # Neither a key nor a sink: -inf is not to be subtracted from -inf.
        most = jnp.where(most == -jnp.inf, jnp.zeros_like(most), most)
        shrink = jnp.exp2(m - most)
        m, l = most, l * shrink + jnp.exp2(sink_log2 - most)
    empty = l == 0.0
    l = jnp.where(empty, jnp.ones_like(l), l)
    inverse = jnp.where(empty, jnp.zeros_like(l), 1.0 / l)
    lse_log2 = jnp.where(empty, jnp.full_like(l, EMPTY_ROW), m + jnp.log(l) * LOG2E)
    shift = jnp.where(empty, jnp.zeros_like(l), shift)
    return inverse if shrink is None else shrink * inverse, lse_log2, shift


def _with_sink(m, shift, sink, unit: float):
    """Returns (m, shift, sink in base 2), relative to the sink's own shift where it is largest."""
    wins = (sink - shift * unit) * LOG2E > m
    is_far = jnp.abs(sink) > FAR_FLOAT32 * LN2
    own = jnp.where(is_far, sink * (1.0 / unit), jnp.zeros_like(sink))
    moved = jnp.where(wins, own, shift)
    m = m + (shift - moved) * (unit * LOG2E)
    return m, moved, (sink - moved * unit) * LOG2E


def merge(o, lse_log2, shift, sink=None, unit: float = 1.0):
    """Merges (o, lse_log2, shift) of attention to disjoint parts of the keys.

    Args:
        o: [parts, ..., H] in the dtype of lse_log2, anything finite in a row without keys.
        lse_log2: [parts, ...], EMPTY_ROW for a row without keys in that part.
        shift: [parts, ...].
        sink: [...], as in `finish`; the parts must be without it.
        unit: as in `finish`.

    Returns:
        o [..., H], lse_log2 and shift [...] of attention to all keys. The sums always run in the
        order of the parts.
    """
    seen = lse_log2 < EMPTY_ROW / 2
    largest = jnp.max(jnp.where(seen, shift, -jnp.inf), axis=0)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    # Differences of shifts are exact where they are small, which is where they matter.
    relative = (shift - largest[None]) * (unit * LOG2E) + lse_log2
    logits = jnp.where(seen, relative, -jnp.inf)
    most = jnp.max(logits, axis=0)
    weights = jnp.exp2(logits - jnp.where(most == -jnp.inf, 0.0, most)[None])
    finished = finish(most, jnp.sum(weights, axis=0), largest, sink, unit)
    return jnp.sum(o * weights[..., None], axis=0) * finished[0][..., None], *finished[1:]


def natural(lse_log2, shift=None, unit: float = 1.0):
    """Computes the public LSE: natural logarithm, -inf for rows that see no key.

    Args:
        lse_log2: base 2, relative to the shift.
        shift: the shift of each row; None is 0.
        unit: factor that turns the shift into a natural logit.
    """
    empty = lse_log2 >= EMPTY_ROW / 2
    lse = jnp.where(empty, 0.0, lse_log2) * LN2
    lse = lse if shift is None else shift * unit + lse
    return jnp.where(empty, -jnp.inf, lse)
