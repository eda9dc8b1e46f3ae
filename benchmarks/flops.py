"""The one formula that turns a time into TFLOP/s."""

from __future__ import annotations

# Matrix products per direction: Q K^T and P V forward; S, dP, dV, dK and dQ backward. A backward
# that recomputes more than once (split kernels: seven products) is still credited with five.
_PRODUCTS = {"forward": 2, "backward": 5}

# The card's own limit, timed next to everybody: bfloat16, 8192 x 8192 x 8192.
GEMM_SIZE = 8192
GEMM_FLOPS = 2 * GEMM_SIZE**3


def visible_pairs(q_len: int, kv_len: int, causal: bool) -> int:
    """Counts the (query, key) pairs that attend; causal keeps key j <= i (top-left)."""
    if not causal:
        return q_len * kv_len
    triangle = min(q_len, kv_len)
    return triangle * (triangle + 1) // 2 + max(q_len - kv_len, 0) * kv_len


def attention_flops(shape, causal: bool, direction: str) -> int:
    """Returns the floating-point operations of the matmuls that attention needs.

    Args:
        shape: has batch, q_len, kv_len, q_heads and head_dim.
        causal: count only visible pairs.
        direction: "forward" or "backward".

    Raises:
        KeyError: for another direction.
    """
    pairs = visible_pairs(shape.q_len, shape.kv_len, causal)
    per_product = 2 * shape.batch * shape.q_heads * shape.head_dim * pairs
    return _PRODUCTS[direction] * per_product


def tflops(shape, causal: bool, direction: str, ms: float) -> float:
    """Returns the TFLOP/s that one pass of `ms` milliseconds achieved."""
    return attention_flops(shape, causal, direction) / ms / 1e9


def training_flops(parameters: int, layers: int, shape) -> int:
    """Returns the floating-point operations of a causal model's training step, without remat.

    6 for each token and parameter that it is multiplied with, and the six matmuls of attention over
    visible pairs: two forward and four backward, as recomputing the scores does not count.

    Args:
        parameters: those in matmuls.
        layers: number of layers.
        shape: of attention: batch, q_len, kv_len, q_heads and head_dim.
    """
    pairs = visible_pairs(shape.q_len, shape.kv_len, True)
    attention = 6 * 2 * shape.batch * shape.q_heads * shape.head_dim * pairs
    return 6 * parameters * shape.batch * shape.q_len + layers * attention
