"""Rows of the portable backend: its kernels at every head dim that has tiles."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.suites import Shape
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.core.decode import describe as describe_decode
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import EXTRA_GRADS, AttentionSpec, Operands, describe
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments

from ..cases import Case
from ..portable_cases import WIDE
from .device import A100, B200, H200, RTX_5090, Target
from .rows import (
    BATCH,
    CASES,
    KV_HEADS,
    LENGTH,
    MODIFIERS,
    Q_HEADS,
    WIDE_DECODES,
    Call,
    Row,
    cotangents,
    decode_call,
    ready,
)

# Of q and k, and of v. 72 is padded to 80; 192 with 128 is that of multi-head latent attention.
SQUARE = (16, 32, 64, 72, 96, 128, 256)
HEAD_DIMS = (*((width, width) for width in SQUARE), (192, 128))
# Above 256 two warpgroups have half of the columns each; there is no fused backward.
WIDE_HEAD_DIMS = ((320, 320), (384, 64), (512, 512))

# As in rows.MASKS, and a band with two edges: three loops over key blocks.
MASKS = {
    "full": (Mask(), LENGTH),
    "causal": (Mask(right=0), LENGTH),
    "ragged": (Mask(), LENGTH - 40),
    "window": (Mask(left=500, right=0), LENGTH),
}
FLOAT16 = ((64, 64), (128, 128))
PATHS = ("forward", "backward", "deterministic")
# Of rows.DECODES, at head dim 128: what hides keys, and what a cache of pages changes.
DECODES = ("contiguous", "pages_64", "modifiers", "starts", "starts_pages", "starts_windows")
DECODES += ("drafts_pages", "drafts_window")
DECODES += ("int8", "int8_pages", "float8_e4m3fn_pages", "float8_e4m3fn_starts")

# Of tests/hopper_cases.py, besides rows.MODIFIERS: a bias or mask that meets another modifier, head
# dim 256, whose backward has the fewest registers left, and biases whose gradient is another sum.
MORE_MODIFIERS = (
    "mask_bias",
    "bias_padded",
    "everything",
    "padded_256",
    "bias_256",
    "long_bias_128",
    "bias_1N1S",
    "softcap_256",
    "alibi_256",
    "dropout_256",
)

# Bytes of spill stores per thread that ship knowingly, by (kernel, head dim, mask); 0 for all
# others. ptxas 13.5. At head dim 256 dQ or dK alone takes 128 registers of 255, and no tile is
# smaller than 64 x 16. The fused backward takes all registers there are: dK or dV 128, P and dP 64
# or at head dim 256 dQ as many, and ptxas fetches fragments ahead with the rest.
ALLOWED_SPILLS = {
    ("flash_pallas_portable_fused", 64, "packed_causal"): 4,
    ("flash_pallas_portable_fused", 128, "long_score_mod"): 8,
    ("flash_pallas_portable_dq", 128, "long_score_mod"): 4,
    ("flash_pallas_portable_dq", 64, "positions_mods"): 4,
    ("flash_pallas_portable_fused", 192, "ragged"): 12,
    ("flash_pallas_portable_fused", 256, "ragged"): 4,
    ("flash_pallas_portable_fused", 256, "window"): 12,
    ("flash_pallas_portable_fused", 256, "alibi_256"): 4,
    ("flash_pallas_portable_fused", 256, "blocks_dense_256"): 8,
    ("flash_pallas_portable_dkv", 128, "blocks_listed_causal_128"): 4,
    ("flash_pallas_portable_dq", 128, "blocks_listed_causal_128"): 8,
    ("flash_pallas_portable_dkv", 64, "q_lengths"): 8,
    ("flash_pallas_portable_dq", 256, "ragged"): 8,
    ("flash_pallas_portable_dq", 256, "bias_256"): 24,
    ("flash_pallas_portable_dk", 256, "softcap_256"): 8,
    ("flash_pallas_portable_dq", 256, "softcap_256"): 8,
    ("flash_pallas_portable_dq", 256, "alibi_256"): 8,
    ("flash_pallas_portable_dq", 256, "dropout_256"): 8,
}

# The same where it is more. On 9.0 the fused backward adds four floats at a time. From 10.0 on
# additions and products of two neighbours are one instruction, whose operands are pairs of
# registers: a kernel takes 5 to 30 more.
ALLOWED_BY_TARGET = {
    A100: {("flash_pallas_portable_dq", 128, "full"): 4},
    H200: {
        ("flash_pallas_portable_fused", 128, "full"): 4,
        ("flash_pallas_portable_forward", 64, "many_entries"): 4,
        ("flash_pallas_portable_scores_tile", 64, "long_bias"): 20,
        ("flash_pallas_portable_fused", 128, "packed_128"): 4,
        ("flash_pallas_portable_fused", 128, "bias_BNTS_128"): 8,
        ("flash_pallas_portable_fused", 256, "padded_256"): 8,
        ("flash_pallas_portable_fused", 256, "bias_256"): 12,
        ("flash_pallas_portable_fused", 256, "softcap_256"): 12,
        ("flash_pallas_portable_fused", 256, "alibi_256"): 12,
        ("flash_pallas_portable_fused", 256, "dropout_256"): 8,
        ("flash_pallas_portable_dk", 512, "512_with_64"): 8,
    },
    RTX_5090: {
        ("flash_pallas_portable_fused", 128, "everything_128"): 12,
        ("flash_pallas_portable_scores_tile", 64, "long_bias"): 16,
        ("flash_pallas_portable_dq", 256, "ragged"): 44,
        ("flash_pallas_portable_dq", 256, "bias_256"): 64,
        ("flash_pallas_portable_dq", 256, "softcap_256"): 48,
        ("flash_pallas_portable_dq", 256, "alibi_256"): 48,
        ("flash_pallas_portable_dq", 256, "dropout_256"): 40,
    },
    # A forward of 64 x 64 spills nowhere at head dim 128, but reads K and V twice as often, and the
    # other targets do without. Decoding with 16 keys per step, not 32, spills more: 28 to 284.
    B200: {
        ("flash_pallas_portable_decode", 512, "modifiers, 512 32/4"): 16,
        ("flash_pallas_portable_decode", 512, "starts_windows, 512 32/4"): 32,
        ("flash_pallas_portable_decode", 576, "contiguous, 512 128/1"): 8,
        ("flash_pallas_portable_decode", 576, "pages_64, 512 128/1"): 4,
        ("flash_pallas_portable_decode", 576, "modifiers, 512 128/1"): 104,
        ("flash_pallas_portable_decode", 320, "modifiers, 256 32/8"): 92,
        ("flash_pallas_portable_fused", 64, "bias_1NTS"): 80,
        ("flash_pallas_portable_fused", 64, "long_bias"): 80,
        ("flash_pallas_portable_fused", 64, "bias_padded"): 72,
        ("flash_pallas_portable_fused", 128, "bias_BNTS_128"): 8,
        ("flash_pallas_portable_fused", 256, "padded_256"): 44,
        ("flash_pallas_portable_fused", 256, "bias_256"): 12,
        ("flash_pallas_portable_fused", 256, "softcap_256"): 12,
        ("flash_pallas_portable_fused", 256, "alibi_256"): 8,
        ("flash_pallas_portable_fused", 256, "dropout_256"): 8,
        ("flash_pallas_portable_scores_tile", 64, "long_bias"): 48,
        ("flash_pallas_portable_forward", 128, "window"): 8,
        ("flash_pallas_portable_forward", 128, "window_causal_128"): 52,
        ("flash_pallas_portable_forward", 128, "document_128"): 192,
        ("flash_pallas_portable_forward", 128, "document_window_128"): 192,
        ("flash_pallas_portable_forward", 128, "long_window_128"): 128,
        ("flash_pallas_portable_forward", 128, "kv_lengths_zero_128"): 128,
        ("flash_pallas_portable_forward", 128, "bias_BNTS_128"): 12,
        ("flash_pallas_portable_forward", 128, "dropout_causal_128"): 124,
        ("flash_pallas_portable_forward", 128, "mask_mod_prefix_128"): 8,
        ("flash_pallas_portable_forward", 128, "long_score_mod"): 12,
        ("flash_pallas_portable_forward", 128, "blocks_listed_causal_128"): 20,
        ("flash_pallas_portable_dkv", 128, "blocks_prefix"): 72,
        ("flash_pallas_portable_fused", 256, "blocks_dense_256"): 12,
        ("flash_pallas_portable_dq", 256, "blocks_dense_256"): 40,
        ("flash_pallas_portable_dkv", 128, "window"): 44,
        ("flash_pallas_portable_dkv", 128, "window_causal_128"): 12,
        ("flash_pallas_portable_dkv", 128, "long_window_128"): 4,
        ("flash_pallas_portable_dkv", 128, "dropout_causal_128"): 24,
        ("flash_pallas_portable_dq", 192, "window"): 32,
        ("flash_pallas_portable_dk", 256, "window"): 28,
        ("flash_pallas_portable_dv", 256, "window"): 84,
        ("flash_pallas_portable_dq", 256, "window"): 44,
        ("flash_pallas_portable_dq", 256, "ragged"): 100,
        ("flash_pallas_portable_dq", 256, "bias_256"): 120,
        ("flash_pallas_portable_dq", 256, "softcap_256"): 72,
        ("flash_pallas_portable_dq", 256, "alibi_256"): 88,
        ("flash_pallas_portable_dq", 256, "dropout_256"): 64,
        # At 512 columns O, dQ, dK or dV of a warpgroup takes 128 registers, as at 256.
        ("flash_pallas_portable_dkv", 384, "window"): 4,
        ("flash_pallas_portable_forward", 512, "causal"): 48,
        ("flash_pallas_portable_dk", 512, "causal"): 8,
        ("flash_pallas_portable_forward", 512, "window"): 84,
        ("flash_pallas_portable_dk", 512, "window"): 12,
        ("flash_pallas_portable_dv", 512, "window"): 180,
        ("flash_pallas_portable_forward", 512, "512_lengths"): 52,
        ("flash_pallas_portable_dk", 512, "512_lengths"): 4,
        ("flash_pallas_portable_dq", 512, "512_lengths"): 20,
        ("flash_pallas_portable_dv", 512, "512_lengths"): 20,
        ("flash_pallas_portable_dk", 512, "512_with_64"): 112,
        ("flash_pallas_portable_forward", 512, "512_blocks"): 12,
        ("flash_pallas_portable_dv", 512, "512_blocks"): 8,
    },
}


def portable_rows(target: Target) -> Iterator[Row]:
    """Yields the backend's forward and backward rows on this GPU, with every gradient of a call."""
    backend = PortableBackend(capability=f"{target.major}.{target.minor}")
    allowed = ALLOWED_SPILLS | ALLOWED_BY_TARGET.get(target, {})
    for row in _rows(backend):
        yield dataclasses.replace(row, allowed=allowed)


def _rows(backend: PortableBackend) -> Iterator[Row]:
    for (head_dims, mask), path in itertools.product(itertools.product(HEAD_DIMS, MASKS), PATHS):
        yield _plain(backend, path, head_dims, "bfloat16", mask)
        if head_dims in FLOAT16:
            yield _plain(backend, path, head_dims, "float16", mask)
    split = ("forward", "deterministic")
    for (head_dims, mask), path in itertools.product(
        itertools.product(WIDE_HEAD_DIMS, MASKS), split
    ):
        yield _plain(backend, path, head_dims, "bfloat16", mask)
    for case in (CASES[name] for name in (*MODIFIERS, *MORE_MODIFIERS)):
        if case.dtype != "float32":
            yield from _modified(backend, case, PATHS)
    for case in WIDE:
        yield from _modified(backend, case, ("forward", "backward"))
    yield from (_decode(backend, 128, name) for name in DECODES)
    for (head_dim, *others), names in WIDE_DECODES.items():
        spec, operands = decode_call(head_dim, "contiguous", *others)
        if backend.decode.refusal(describe_decode(operands, spec)) is None:
            yield from (_decode(backend, head_dim, name, *others) for name in names)


def _decode(backend, head_dim: int, name: str, *others: int) -> Row:
    spec, operands = decode_call(head_dim, name, *others)
    blocks = backend.decode.plan(describe_decode(operands, spec))
    run = lambda o: backend.decode.run(spec, blocks, o)
    said = f"{name}, {others[0]} {others[1]}/{others[2]}" if others else name
    return Row("portable decode", head_dim, "bfloat16", said, ready(run, operands))


def _plain(backend, path: str, head_dims: tuple[int, int], dtype: str, name: str) -> Row:
    (width, v_width), (mask, length) = head_dims, MASKS[name]
    shape = Shape(BATCH, length, Q_HEADS, KV_HEADS, width)
    of = lambda heads, columns: jax.ShapeDtypeStruct((BATCH, length, heads, columns), dtype)
    q, k, v = of(Q_HEADS, width), of(KV_HEADS, width), of(KV_HEADS, v_width)
    spec = AttentionSpec(shape.head_dim**-0.5, mask, deterministic=path == "deterministic")
    given = backend, path, spec, Operands(q, k, v, None), of(Q_HEADS, v_width)
    return Row("portable " + path, width, dtype, name, functools.partial(_call, *given))


def _modified(backend, case: Case, paths: tuple[str, ...]) -> Iterator[Row]:
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)

    @functools.cache
    def canonical() -> tuple[AttentionSpec, Operands, Any]:
        x = case.inputs()
        call = validate.canonicalize(x.q, x.k, x.v, Arguments(**case.arguments(x)))
        return call.spec, jax.tree.map(shape, call.operands), shape(x.do)

    def call(path: str) -> Call:
        spec, operands, do = canonical()
        spec = dataclasses.replace(spec, deterministic=path == "deterministic")
        return _call(backend, path, spec, operands, do)

    for path in paths:
        named = "portable " + path, case.H, case.dtype, case.name
        yield Row(*named, functools.partial(call, path))


def _call(backend, path: str, spec: AttentionSpec, operands: Operands, do) -> Call:
    problem = describe(operands, spec)
    blocks = backend.attention.plan(problem)
    if path == "forward":
        run, arguments = (lambda o: backend.attention.run(spec, blocks, o)), (operands,)
    else:
        per_row = jax.ShapeDtypeStruct((do.shape[0], do.shape[2], do.shape[1]), jnp.float32)
        # What the scores' modifiers want is the same with either backward.
        extra = frozenset(EXTRA_GRADS) & problem.features if path == "backward" else frozenset()
        run = lambda *a: backend.vjp.run(spec, blocks, *a, wanted=extra)
        arguments = (operands, cotangents(spec, do, per_row))
    return run, arguments
