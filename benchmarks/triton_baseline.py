"""The classical baseline: FlashAttention-2 in Triton, forward and split backward.

These are our own kernels, structured as in Triton's FlashAttention-2 guide: a forward with one
program per Q tile, then delta = rowsum(o * do), then one kernel for dK and dV and one for dQ. They
use plain pointers and one fixed tile per head dim, and are not autotuned: what a good afternoon
with Triton gives, and the bar that a Hopper kernel has to clear. They need triton, and jax-triton
to be called from jax.
"""

# A Triton kernel's sizes are parameters: it can read no enclosing scope.
# ruff: noqa: PLR0913

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

LN2 = math.log(2.0)


class Tiles(NamedTuple):
    """Tile sizes and launch options of the three kernels."""

    forward: tuple[int, int, int, int]  # queries, keys, warps, stages
    dkv: tuple[int, int, int, int]
    dq: tuple[int, int, int, int]


# Compiled for sm_90: no spills (8 bytes of stack in the causal forward at 64), 64 to 192 KiB of
# shared memory.
TILES = {
    64: Tiles((128, 128, 4, 3), (64, 128, 8, 2), (128, 64, 8, 2)),
    128: Tiles((128, 128, 8, 2), (64, 128, 8, 2), (128, 64, 8, 2)),
    256: Tiles((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
}


@triton.jit
def _place(pair, N: tl.constexpr, K: tl.constexpr):
    """Returns (batch as int64, query head, KV head) of program `pair` of B * N."""
    head = pair % N
    return (pair // N).to(tl.int64), head, head // (N // K)


@triton.jit
def _rows(base, first, BLOCK: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr):
    """Returns pointers [BLOCK, H] to consecutive rows of one head of a [B, T, HEADS, H] array."""
    row = first + tl.arange(0, BLOCK)
    return base + row[:, None] * (HEADS * H) + tl.arange(0, H)[None, :]


@triton.jit
def _columns(base, first, BLOCK: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr):
    """Returns the transpose of _rows: pointers [H, BLOCK]."""
    row = first + tl.arange(0, BLOCK)
    return base + row[None, :] * (HEADS * H) + tl.arange(0, H)[:, None]


@triton.jit
def _forward_span(
    acc, total, peak, q, k, v, query, low, high, MASKED: tl.constexpr,
    LOG2_SCALE: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Updates acc, row sum and row max by an online softmax over the keys [low, high)."""
    for start in tl.range(low, high, BLOCK_KV):
        k_t = tl.load(_columns(k, start, BLOCK_KV, K, H))
        scores = tl.dot(q, k_t) * LOG2_SCALE
        if MASKED:
            key = start + tl.arange(0, BLOCK_KV)
            scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_peak[:, None])
        correction = tl.math.exp2(peak - new_peak)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        acc = tl.dot(p.to(q.dtype), tl.load(_rows(v, start, BLOCK_KV, K, H)), acc)
        peak = new_peak
    return acc, total, peak


@triton.jit
def forward_kernel(
    q, k, v, o, lse, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    LOG2_SCALE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Computes o and the base-2 LSE f32[B, N, T] of one Q tile; BLOCK_KV divides BLOCK_Q."""
    first = tl.program_id(0) * BLOCK_Q
    batch, head, kv_head = _place(tl.program_id(1), N, K)
    q += (batch * T * N + head) * H
    o += (batch * T * N + head) * H
    k += (batch * T * K + kv_head) * H
    v += (batch * T * K + kv_head) * H
    query = first + tl.arange(0, BLOCK_Q)
    q_tile = tl.load(_rows(q, first, BLOCK_Q, N, H))
    acc = tl.zeros([BLOCK_Q, H], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    unmasked = first if CAUSAL else T
    acc, total, peak = _forward_span(
        acc, total, peak, q_tile, k, v, query, 0, unmasked, False, LOG2_SCALE, K, H, BLOCK_KV
    )
    if CAUSAL:
        acc, total, peak = _forward_span(
            acc, total, peak, q_tile, k, v, query, first, first + BLOCK_Q, True,
            LOG2_SCALE, K, H, BLOCK_KV,
        )  # fmt: skip
    tl.store(_rows(o, first, BLOCK_Q, N, H), (acc / total[:, None]).to(q_tile.dtype))
    tl.store(lse + (batch * N + head) * T + query, peak + tl.math.log2(total))


@triton.jit
def _dkv_span(
    dk, dv, k, v, q, do, lse, delta, key, low, high, MASKED: tl.constexpr,
    LOG2_SCALE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Adds the queries [low, high) to dK and dV, with scores transposed: [keys, queries]."""
    for start in tl.range(low, high, BLOCK_Q):
        query = start + tl.arange(0, BLOCK_Q)
        q_t = tl.load(_columns(q, start, BLOCK_Q, N, H))
        p = tl.math.exp2(tl.dot(k, q_t) * LOG2_SCALE - tl.load(lse + query)[None, :])
        if MASKED:
            p = tl.where(key[:, None] <= query[None, :], p, 0.0)
        do_tile = tl.load(_rows(do, start, BLOCK_Q, N, H))
        dv = tl.dot(p.to(k.dtype), do_tile, dv)
        dp = tl.dot(v, tl.trans(do_tile))
        ds = p * (dp - tl.load(delta + query)[None, :])
        dk = tl.dot(ds.to(k.dtype), tl.trans(q_t), dk)
    return dk, dv


@triton.jit
def dkv_kernel(
    q, k, v, do, lse, delta, dk_out, dv_out, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV of one KV tile, summed over the query heads that read it."""
    first = tl.program_id(0) * BLOCK_KV
    kv_head = tl.program_id(1) % K
    batch = (tl.program_id(1) // K).to(tl.int64)
    kv_base = (batch * T * K + kv_head) * H
    key = first + tl.arange(0, BLOCK_KV)
    k_tile = tl.load(_rows(k + kv_base, first, BLOCK_KV, K, H))
    v_tile = tl.load(_rows(v + kv_base, first, BLOCK_KV, K, H))
    dk = tl.zeros([BLOCK_KV, H], tl.float32)
    dv = tl.zeros([BLOCK_KV, H], tl.float32)
    for member in range(N // K):
        head = kv_head * (N // K) + member
        q_base = (batch * T * N + head) * H
        row_base = (batch * N + head) * T
        unmasked = 0
        if CAUSAL:
            unmasked = first + BLOCK_KV
            dk, dv = _dkv_span(
                dk, dv, k_tile, v_tile, q + q_base, do + q_base, lse + row_base, delta + row_base,
                key, first, unmasked, True, LOG2_SCALE, N, H, BLOCK_Q,
            )  # fmt: skip
        dk, dv = _dkv_span(
            dk, dv, k_tile, v_tile, q + q_base, do + q_base, lse + row_base, delta + row_base,
            key, unmasked, T, False, LOG2_SCALE, N, H, BLOCK_Q,
        )  # fmt: skip
    tl.store(_rows(dk_out + kv_base, first, BLOCK_KV, K, H), (dk * SCALE).to(k_tile.dtype))
    tl.store(_rows(dv_out + kv_base, first, BLOCK_KV, K, H), dv.to(k_tile.dtype))


@triton.jit
def _dq_span(
    dq, q, do, row_lse, row_delta, k, v, query, low, high, MASKED: tl.constexpr,
    LOG2_SCALE: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Adds the keys [low, high) to dQ."""
    for start in tl.range(low, high, BLOCK_KV):
        k_t = tl.load(_columns(k, start, BLOCK_KV, K, H))
        p = tl.math.exp2(tl.dot(q, k_t) * LOG2_SCALE - row_lse[:, None])
        if MASKED:
            key = start + tl.arange(0, BLOCK_KV)
            p = tl.where(key[None, :] <= query[:, None], p, 0.0)
        dp = tl.dot(do, tl.load(_columns(v, start, BLOCK_KV, K, H)))
        ds = p * (dp - row_delta[:, None])
        dq = tl.dot(ds.to(q.dtype), tl.trans(k_t), dq)
    return dq


@triton.jit
def dq_kernel(
    q, k, v, do, lse, delta, dq_out, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, SCALE: tl.constexpr, LOG2_SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Computes dQ of one Q tile."""
    first = tl.program_id(0) * BLOCK_Q
    batch, head, kv_head = _place(tl.program_id(1), N, K)
    q_base = (batch * T * N + head) * H
    k += (batch * T * K + kv_head) * H
    v += (batch * T * K + kv_head) * H
    query = first + tl.arange(0, BLOCK_Q)
    q_tile = tl.load(_rows(q + q_base, first, BLOCK_Q, N, H))
    do_tile = tl.load(_rows(do + q_base, first, BLOCK_Q, N, H))
    row_lse = tl.load(lse + (batch * N + head) * T + query)
    row_delta = tl.load(delta + (batch * N + head) * T + query)
    dq = tl.zeros([BLOCK_Q, H], tl.float32)
    unmasked = first if CAUSAL else T
    dq = _dq_span(
        dq, q_tile, do_tile, row_lse, row_delta, k, v, query, 0, unmasked, False,
        LOG2_SCALE, K, H, BLOCK_KV,
    )  # fmt: skip
    if CAUSAL:
        dq = _dq_span(
            dq, q_tile, do_tile, row_lse, row_delta, k, v, query, first, first + BLOCK_Q, True,
            LOG2_SCALE, K, H, BLOCK_KV,
        )  # fmt: skip
    tl.store(_rows(dq_out + q_base, first, BLOCK_Q, N, H), (dq * SCALE).to(q_tile.dtype))


def constants(shape, causal: bool) -> dict[str, object]:
    """Returns the compile-time arguments that all three kernels share."""
    scale = shape.head_dim**-0.5
    return {
        "T": shape.q_len,
        "N": shape.q_heads,
        "K": shape.kv_heads,
        "H": shape.head_dim,
        "LOG2_SCALE": scale / LN2,
        "CAUSAL": causal,
    }


def launch_options(tile: tuple[int, int, int, int]) -> dict[str, int]:
    """Returns a tile as keyword arguments of a launch."""
    return dict(zip(("BLOCK_Q", "BLOCK_KV", "num_warps", "num_stages"), tile, strict=True))


def unsupported(shape) -> str | None:
    """Returns why this shape cannot be run, or None."""
    if shape.head_dim not in TILES:
        return f"head dim {shape.head_dim} has no tile; there are {sorted(TILES)}"
    if shape.q_len != shape.kv_len or shape.q_len % 128:
        return "sequence lengths must be equal and multiples of 128"
    return None


def make_attention(shape, causal: bool):
    """Returns (q, k, v) -> (o, natural LSE), differentiable in o, through jax-triton.

    Raises:
        ImportError: jax-triton is not installed or does not fit the installed triton.
    """
    import jax_triton

    tiles, common = TILES[shape.head_dim], constants(shape, causal)
    scale = shape.head_dim**-0.5
    rows = jax.ShapeDtypeStruct((shape.batch, shape.q_heads, shape.q_len), jnp.float32)

    # jax-triton 0.3, the last for the Triton 3.6 that comes with PyTorch 2.11, calls it out_shape.
    signature = inspect.signature(jax_triton.triton_call)
    outputs_keyword = "out_type" if "out_type" in signature.parameters else "out_shape"

    def call(kernel, tile, grid, like, *arrays, **more):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        arguments = {"kernel": kernel, "grid": grid, outputs_keyword: shapes}
        return jax_triton.triton_call(
            *arrays, **arguments, **common, **launch_options(tile), **more
        )

    q_pairs, kv_pairs = shape.batch * shape.q_heads, shape.batch * shape.kv_heads

    def run(q, k, v):
        grid = (shape.q_len // tiles.forward[0], q_pairs)
        return call(forward_kernel, tiles.forward, grid, (q, rows), q, k, v)

    @jax.custom_vjp
    def attention(q, k, v):
        o, lse = run(q, k, v)
        return o, lse * LN2

    def forward(q, k, v):
        o, lse = run(q, k, v)
        return (o, lse * LN2), (q, k, v, o, lse)

    def backward(residuals, cotangents):
        q, k, v, o, lse = residuals
        do = cotangents[0]
        delta = jnp.einsum("btnh,btnh->bnt", o, do, preferred_element_type=jnp.float32)
        arrays = (q, k, v, do, lse, delta)
        grid = (shape.kv_len // tiles.dkv[1], kv_pairs)
        dk, dv = call(dkv_kernel, tiles.dkv, grid, (k, v), *arrays, SCALE=scale)
        grid = (shape.q_len // tiles.dq[0], q_pairs)
        dq = call(dq_kernel, tiles.dq, grid, q, *arrays, SCALE=scale)
        return dq, dk, dv

    attention.defvjp(forward, backward)
    return attention
