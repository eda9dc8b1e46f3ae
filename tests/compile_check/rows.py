"""Rows to compile: every kernel that a user's call can reach, as that call reaches it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.suites import SUITES, Shape
from flash_pallas.backends.gpu.jax_compat import trades_registers
from flash_pallas.backends.gpu.ptx.online_softmax import far_of
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backend import H200_SMS
from flash_pallas.backends.hopper.backward.fused.tiles import FusedBlocks
from flash_pallas.backends.hopper.decode.tiles import DecodeBlocks
from flash_pallas.backends.hopper.ragged.kernel import ragged_chunks
from flash_pallas.backends.hopper.ragged.tiles import choose_chunk_blocks
from flash_pallas.core import decode, ragged
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import EXTRA_GRADS, AttentionSpec, Cotangents, Operands, describe
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments

from ..cases import Case
from ..hopper_cases import FAR_ON_DEVICE, ON_DEVICE
from .report import MOST_REGISTERS
from .tangent_rows import tangent_rows

BATCH, LENGTH, Q_HEADS, KV_HEADS = 3, 2048, 8, 4  # a GPU's SMs are all busy

# How a call masks: (causal, length of q and k, q_offset traced).
MASKS = {
    "full": (False, LENGTH, False),
    "causal": (True, LENGTH, False),
    "ragged": (False, LENGTH - 40, False),  # the last block of keys is masked
    "offset": (True, LENGTH - 40, True),  # causal from an offset that is an array, and ragged
}

# Likewise: from these lengths on, forwards of head dims 96 and 128 have tiles of their own.
LONG_MASKS = {"long": (False, 4096, False), "long_causal": (True, 8192, False)}

# One sequence, for which there are more SMs than tiles and key blocks.
SMALL_MASKS = {"small": (False, 512, False), "small_causal": (True, 512, False)}

# So many entries that rows with large logits have a launch of their own: fused/launches.py.
MANY, MANY_MASKS = 24, {"many": (False, LENGTH, False), "many_causal": (True, LENGTH, False)}

# Causal training steps of real programs. The pairs of an entry and a KV head are no power of two.
PROGRAMS = {
    "gpt2_xl": Shape(6, 1024, 25, 25, 64),
    "phi3_mini": Shape(6, 1024, 32, 32, 96),
    "vicuna_13b": Shape(6, 1024, 40, 40, 128),
    "qwen2_7b": Shape(3, 2048, 28, 4, 128),
    "latent_training": Shape(6, 2048, 16, 16, 192),  # keys of multi-head latent attention
    "gemma_7b": Shape(6, 2048, 16, 16, 256),
}

# Steps of encoders, without a mask. In a trial of the backward at head dim 128 ptxas serialised
# wgmma (C7512) at the size of the second one, but not at that of MASKS.
ENCODERS = {
    "bert_large": Shape(64, 512, 16, 16, 64),
    "long_encoder": Shape(4, 4096, 16, 16, 128),
}

# Of tests/hopper_cases.py: modifiers where registers are tightest.
MODIFIERS = (
    "window_causal_128",
    "packed_128",
    "positions_causal",
    "positions_window_128",
    "positions_mods",
    "window_array_256",
    "document_128",
    "document_window_128",
    "long_window_128",
    "kv_lengths_zero_128",
    "q_lengths",
    "packed_causal",
    "bias_BNTS_128",
    "softcap_causal_128",
    "many_far_sinks",
    "many_far_lengths",
    "many_far_alibi",
    "many_far_alibi_128",
    "many_far_dropout",
    "many_far_score_mod",
    "many_far_score_mod_128",
    "alibi_causal_128",
    "dropout_causal_128",
    "mask_mod_prefix_128",
    "blocks_window_128",
    "blocks_prefix",
    "blocks_documents_128",
    "blocks_dense_256",
    "blocks_listed",
    "blocks_listed_causal_128",
    "blocks_listed_64",
    "blocks_tall",
    "blocks_tall_128",
    "long_blocks_64",
    "long_blocks_128",
    "bias_1NTS",
    "bias_shared_32",
    "bias_shared_16",
    "long_bias",
    "long_bias_pairs",
    "d16_bias",
    "d24_padded",
    "d80_causal",
    "d96_group",
    "d96_window_group",
    "d96_softcap_dropout",
    "d96_bias",
    "d96_blocks",
    "whole_tiles_96",
    "long_score_mod",
    "many_entries",
    "few_queries",
    "d192_128",
    "everything_128",
    "float32_bias",
    "float32_bias_columns_128",
    "float32_everything",
    "float32_everything_128",
)
# Head dims above 256.
WIDE_HEAD_DIMS, WIDE_MASKS = (384, 512), ("full", "causal", "offset")
WIDE_MODIFIERS = (
    "wide_448_window_causal",
    "wide_512_padded",
    "wide_512_alibi",
    "wide_512_bias",
    "wide_512_bias_of_keys",
    "wide_512_score_mod",
    "wide_512_blocks",
    "wide_512_everything",
)
# (length, head dim) of backwards that sum the gradient of a pair bias, with and without a launch
# for large logits.
PAIR_BIASES = ((512, 16), (2048, 16), (1024, 32), (512, 64), (2048, 64))
# Decoding: fields of DecodeSpec. One query, or as many as TOKENS says: 4 of a group of 4 are
# columns of the products, 16 are rows. All of them at head dim 128; at 64 and 256 the plainest and
# the fullest. Caches of eight bits are named by their dtype.
DECODE_BATCH, DECODE_LENGTH = 2, 8192
DECODES = {
    "contiguous": {},
    "one_split": {"num_splits": 1},
    "pages_16": {"page_size": 16},
    "pages_64": {"page_size": 64},
    "window": {"window_left": 1000},
    "modifiers": {"page_size": 64, "window_left": 1000, "softcap": 30.0},
    "int8": {"num_splits": 1},
    "int8_modifiers": {"num_splits": 1, "window_left": 1000, "softcap": 30.0},
    "int8_pages": {"page_size": 64},  # with scales of their own
    "float8_e4m3fn_pages": {"page_size": 64},
    "starts": {},
    "starts_pages": {"page_size": 64},
    "starts_windows": {"page_size": 64},
    "float8_e4m3fn_starts": {},
    "float8_e4m3fn_starts_pages": {"page_size": 64},
    "int8_starts_pages": {"page_size": 64},
    "float8_e4m3fn_shared_pages": {"page_size": 64},  # see below
    "prefix_pages": {"page_size": 64, "shares_prefix": True},
    "float8_e4m3fn_prefix_pages": {"page_size": 64, "shares_prefix": True},
    "drafts": {"num_splits": 1},  # a draft mask, here and below
    "drafts_pages": {"page_size": 64},
    "drafts_rows": {"page_size": 64},
    "drafts_window": {"window_left": 1000},
    "shared": {},  # values are columns of the keys, here and below
    "shared_one_split": {"num_splits": 1},
    "shared_pages_16": {"page_size": 16},
    "shared_pages": {"page_size": 64},
    "shared_modifiers": {"page_size": 64, "window_left": 1000, "softcap": 30.0},
    "shared_starts_windows": {"page_size": 64},
}
SHARED = tuple(name for name in DECODES if name.startswith("shared"))
# Above head dim 256: (head dims of q and k, of v, query heads, KV heads). The second is multi-head
# latent attention; the others have a narrow swizzle, one compute warpgroup, a narrow K.
WIDE_DECODES = {
    (512, 512, 32, 4): (
        *("contiguous", "one_split", "pages_64", "modifiers", "starts_windows", "int8"),
        "float8_e4m3fn_pages",
    ),
    (512, 512, 128, 4): ("int8", "float8_e4m3fn_starts_pages"),
    (384, 384, 128, 4): ("float8_e4m3fn_pages",),
    (576, 512, 128, 1): ("contiguous", "one_split", "pages_16", "pages_64", "modifiers"),
    (304, 272, 32, 8): ("contiguous", "modifiers"),
    (320, 256, 32, 8): ("contiguous", "modifiers"),
    (128, 512, 32, 8): ("contiguous",),
    (576, 512, 16, 1): ("contiguous", "float8_e4m3fn_shared_pages", *SHARED),
    (576, 512, 64, 1): ("float8_e4m3fn_shared_pages", *SHARED),
    (320, 304, 32, 8): ("shared",),
    (304, 208, 64, 1): ("shared_modifiers",),
}
# Prompts over pages: (keys of a page, what else there is).
RAGGED_SEQS, RAGGED_TOKENS, RAGGED_KEYS = 16, 4096, 8192
RAGGED = {
    "pages_16": (16, ()),
    "pages_128": (128, ()),
    "prefix_pages_64": (64, ()),
    "window_64": (64, ("window",)),
    "softcap_16": (16, ("softcap", "sinks")),
    "starts_windows_16": (16, ("kv_starts", "window_left")),
    "modifiers_32": (32, ("window", "softcap", "sinks", "alibi_slopes", "kv_starts")),
}
TOKENS = {"window": 16, "modifiers": 16, "int8_modifiers": 4, "int8_pages": 16}
TOKENS |= {"starts_windows": 16, "int8_starts_pages": 16}
TOKENS |= {"drafts": 4, "drafts_pages": 4, "drafts_rows": 64, "drafts_window": 64}
CASES = {case.name: case for case in (*ON_DEVICE, *FAR_ON_DEVICE)}

# Bytes of spill stores per thread that ship knowingly, by (kernel, head dim, mask); 0 for all
# others. Figures of ptxas 13.5. They are addresses, not accumulators, and wgmma is serialised in
# none but where a head dim of 16 has a bias (C7517). Many are of the second loop of the backward,
# that of heads with far rows: what both loops use is spilled for its sake. See NOTES.md.
ALLOWED_SPILLS = {
    ("flash_pallas_backward_fused", 64, "causal"): 4,
    ("flash_pallas_backward_fused", 64, "small_causal"): 20,
    # Runs where some row of the call has large logits, and ends at once elsewhere.
    ("flash_pallas_backward_fused_far", 64, "pair bias 512"): 56,
    ("flash_pallas_backward_fused_far", 64, "pair bias 2048"): 48,
    ("flash_pallas_forward", 64, "many_far_alibi"): 8,
    ("flash_pallas_backward_fused", 64, "many_far_lengths"): 20,
    # 4, 0, 4 and 28 where dQ was cleared. Loops read up to 11 more words in a step; what the zeros
    # took is in diagonal.json.
    ("flash_pallas_backward_fused", 64, "many_far_alibi"): 12,
    ("flash_pallas_backward_fused", 64, "many_far_dropout"): 4,
    ("flash_pallas_backward_fused", 128, "many_far_score_mod_128"): 12,
    ("flash_pallas_backward_fused", 64, "many_entries"): 44,
    ("flash_pallas_forward", 128, "document_128"): 4,
    ("flash_pallas_forward", 128, "document_window_128"): 4,
    ("flash_pallas_forward", 128, "alibi_causal_128"): 8,
    ("flash_pallas_forward", 96, "long_causal"): 4,  # three warpgroups: 1.08 of two with 128 keys
    ("flash_pallas_forward", 64, "packed_causal"): 16,
    ("flash_pallas_forward", 64, "positions_causal"): 4,
    ("flash_pallas_forward", 128, "varlen"): 4,
    ("flash_pallas_forward", 128, "varlen_padded"): 12,
    ("flash_pallas_backward_fused", 64, "positions_causal"): 28,
    ("flash_pallas_backward_fused", 128, "varlen"): 12,
    ("flash_pallas_backward_fused", 128, "varlen_padded"): 32,
    ("flash_pallas_backward_dkv", 256, "window_array_256"): 12,
    ("flash_pallas_backward_fused", 64, "q_lengths"): 40,
    # 28 with a quarter of the exponentials in the multiply-add units; not timed without.
    ("flash_pallas_backward_fused", 64, "blocks_listed"): 48,
    # As a tile's place is read from the order of the lists, not from the CTA's number.
    ("flash_pallas_forward", 128, "blocks_documents_128"): 8,
    ("flash_pallas_forward", 128, "blocks_tall_128"): 8,  # three warpgroups
    ("flash_pallas_backward_fused", 128, "blocks_listed_causal_128"): 4,
    ("flash_pallas_backward_fused", 64, "packed_causal"): 52,
    # Sums of two results of 64 columns, or of one of 256, and four tiles of scores.
    ("flash_pallas_backward_push_kv", 64, "causal"): 20,
    ("flash_pallas_backward_push_kv", 256, "full"): 80,
    ("flash_pallas_backward_push_kv", 256, "causal"): 32,
    # Where a bias with -inf is read again is kept past softcap and score_mod; with comparisons in
    # place of the branch 16. Not timed.
    ("flash_pallas_forward", 64, "float32_everything"): 20,
    ("flash_pallas_backward_fused", 128, "softcap_causal_128"): 8,
    ("flash_pallas_backward_fused", 128, "dropout_causal_128"): 4,
    # The number of the warp, stored once and read once, between the two loops.
    ("flash_pallas_backward_fused", 128, "vicuna_13b"): 4,
    ("flash_pallas_backward_fused", 128, "long_score_mod"): 56,
    ("flash_pallas_backward_scores_tile", 32, "long_bias_pairs"): 28,
    ("flash_pallas_backward_dkv", 128, "causal"): 4,
    ("flash_pallas_backward_dkv", 128, "offset"): 12,
    ("flash_pallas_backward_dkv", 256, "offset"): 20,
    ("flash_pallas_backward_fused", 16, "bias_shared_16"): 4,
    ("flash_pallas_backward_fused", 24, "d24_padded"): 44,
    ("flash_pallas_backward_fused", 32, "bias_shared_32"): 80,
    ("flash_pallas_backward_fused", 32, "pair bias 1024"): 8,
    ("flash_pallas_backward_fused", 64, "full"): 8,
    ("flash_pallas_backward_fused", 64, "bias_1NTS"): 4,
    ("flash_pallas_backward_fused", 64, "offset"): 12,
    ("flash_pallas_backward_fused", 64, "small"): 4,
    ("flash_pallas_backward_fused", 64, "bert_large"): 4,
    ("flash_pallas_backward_fused", 128, "document_128"): 4,
    ("flash_pallas_backward_fused", 128, "document_window_128"): 4,
    ("flash_pallas_backward_fused", 128, "packed_128"): 4,
    ("flash_pallas_backward_scores_tile", 64, "long_bias"): 16,
    ("flash_pallas_forward", 24, "d24_padded"): 4,
    # Each warpgroup has code of its own: what another reads later, and the loop of far rows. Of the
    # others' loops small_causal has one word in each. With a launch of its own for far rows these
    # backwards take 1.01 to 1.04 of the time (versions_options_features.json).
    ("flash_pallas_backward_fused", 80, "d80_causal"): 4,
    ("flash_pallas_backward_fused", 96, "full"): 8,
    ("flash_pallas_backward_fused", 96, "causal"): 24,
    ("flash_pallas_backward_fused", 96, "ragged"): 8,
    ("flash_pallas_backward_fused", 96, "offset"): 20,
    ("flash_pallas_backward_fused", 96, "small_causal"): 24,
    ("flash_pallas_backward_fused", 96, "many_causal"): 24,
    ("flash_pallas_backward_fused", 96, "d96_group"): 8,
    ("flash_pallas_backward_fused", 96, "d96_window_group"): 48,
    ("flash_pallas_backward_fused", 96, "whole_tiles_96"): 8,
    ("flash_pallas_backward_fused", 96, "phi3_mini"): 12,
    # Scores less a shift that rows seldom have, next to sums of 256 columns and the weights of both
    # warpgroups; none where there is no such branch. A step takes 9,000 cycles. The branch that
    # reads a bias of -inf again adds 20 bytes, and 16 to dQ below; a division without a path for
    # tiny numbers 4, in this row alone.
    ("flash_pallas_forward_wide", 512, "wide_512_everything"): 100,
    # Once per tile, or once: the number of the CTA or of a tile, an address.
    ("flash_pallas_ragged", 128, "window_64"): 8,
    ("flash_pallas_ragged", 128, "starts_windows_16"): 8,
    ("flash_pallas_backward_wide_dq", 448, "wide_448_window_causal"): 12,
    ("flash_pallas_backward_wide_dq", 512, "wide_512_padded"): 16,
    ("flash_pallas_backward_wide_dq", 512, "wide_512_bias"): 180,
    ("flash_pallas_backward_wide_dq", 512, "wide_512_score_mod"): 128,
    ("flash_pallas_backward_wide_dq", 512, "wide_512_blocks"): 24,
    ("flash_pallas_backward_wide_dq", 512, "wide_512_everything"): 592,
    ("flash_pallas_backward_wide_dq", 512, "causal"): 24,
    ("flash_pallas_backward_wide_dq", 512, "offset"): 16,
    # Stored before the loops and read after them, but for the last two rows.
    ("flash_pallas_backward_wide_dkv", 448, "wide_448_window_causal"): 4,
    ("flash_pallas_backward_wide_dkv", 512, "causal"): 12,
    ("flash_pallas_backward_wide_dkv", 512, "offset"): 12,
    ("flash_pallas_backward_wide_dkv", 512, "wide_512_padded"): 8,
    ("flash_pallas_backward_wide_dkv", 512, "wide_512_bias_of_keys"): 4,
    ("flash_pallas_backward_wide_dkv", 512, "wide_512_alibi"): 12,
    ("flash_pallas_backward_wide_dkv", 512, "wide_512_score_mod"): 20,
    ("flash_pallas_backward_wide_dkv", 512, "wide_512_everything"): 496,
}


# The same without a producer warpgroup: the most of ptxas and of nvJitLink.
ALLOWED_WITHOUT_PRODUCER = {
    **{key: most for key, most in ALLOWED_SPILLS.items() if "_wide" in key[0]},
    ("flash_pallas_ragged", 128, "pages_16"): 28,
    ("flash_pallas_backward_push_kv", 64, "causal"): 4,
    ("flash_pallas_backward_push_kv", 256, "full"): 28,
    ("flash_pallas_backward_push_kv", 256, "causal"): 20,
    ("flash_pallas_forward", 64, "full"): 152,
    ("flash_pallas_forward", 64, "causal"): 32,
    ("flash_pallas_forward", 64, "ragged"): 4,
    ("flash_pallas_forward", 128, "full"): 4,  # 0 with a batch of 2, 4 or 8: they divide by shifts
    ("flash_pallas_forward", 128, "long"): 16,
    ("flash_pallas_forward", 128, "packed_128"): 56,
    ("flash_pallas_forward", 128, "document_128"): 100,
    ("flash_pallas_forward", 128, "document_window_128"): 128,
    ("flash_pallas_forward", 128, "softcap_causal_128"): 4,
    ("flash_pallas_forward", 128, "alibi_causal_128"): 80,
    ("flash_pallas_forward", 64, "float32_everything"): 48,
    ("flash_pallas_backward_fused", 64, "offset"): 16,
    ("flash_pallas_forward", 64, "positions_mods"): 92,
    ("flash_pallas_backward_fused", 64, "packed_causal"): 44,
    ("flash_pallas_backward_fused", 64, "positions_causal"): 20,
    ("flash_pallas_backward_fused", 128, "softcap_causal_128"): 8,
    ("flash_pallas_backward_fused", 128, "dropout_causal_128"): 28,
    ("flash_pallas_backward_fused", 128, "long_score_mod"): 76,
    ("flash_pallas_backward_fused", 64, "causal"): 8,
    ("flash_pallas_backward_fused", 64, "full"): 4,
    # As dQ is added after the turn, which is 1.09 to 1.21 times as fast (benchmarks/NOTES.md).
    ("flash_pallas_backward_fused", 128, "causal"): 8,
    ("flash_pallas_backward_fused", 128, "many_causal"): 8,
    ("flash_pallas_backward_fused", 128, "few_queries"): 8,
    ("flash_pallas_backward_fused", 128, "kv_lengths_zero_128"): 8,
    ("flash_pallas_backward_fused", 128, "window_causal_128"): 8,
    ("flash_pallas_backward_fused", 128, "long_window_128"): 8,
}

# Of float32 with one of MASKS.
ALLOWED_IN_FLOAT32 = {("flash_pallas_backward_dq", 128, "causal"): 40}

# Rows without a producer, where the others have one: what another jaxlib would run.
ALONE = " without producer"


Call = tuple[Callable, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One call of the backend.

    Attributes:
        path: "forward", "backward", "deterministic backward" or "decode", perhaps followed by
            ALONE; or a path of portable_rows.
        head_dim: head dim of q and k.
        dtype: "bfloat16", "float16" or "float32".
        mask: an entry of MASKS, of LONG_MASKS or of MODIFIERS; or a cell of a suite.
        call: makes (function, its arguments): what to compile. Arrays of cases take a tenth of a
            second each, too long for rows that are only counted.
        most_registers: registers that each thread may have at launch.
        allowed: table of allowed spills like ALLOWED_SPILLS; None: a table of this module.
    """

    path: str
    head_dim: int
    dtype: str
    mask: str
    call: Callable[[], Call]
    most_registers: int = MOST_REGISTERS
    allowed: Mapping[tuple[str, int, str], int] | None = None

    @property
    def producer(self) -> bool:
        """True where the kernel has a producer warpgroup, which only loads."""
        return trades_registers() and not self.path.endswith(ALONE)

    def __str__(self) -> str:
        return f"{self.path} {self.head_dim} {self.dtype} {self.mask}"

    def allowed_spills(self, kernel: str) -> int:
        """Returns the bytes that this kernel may spill; entries for MASKS are of 16 bits."""
        key = (kernel, self.head_dim, self.mask)
        if self.allowed is not None:
            return self.allowed.get(key, 0)
        if self.dtype == "float32" and self.mask in MASKS:
            return ALLOWED_IN_FLOAT32.get(key, 0)
        allowed = ALLOWED_SPILLS if self.producer else ALLOWED_WITHOUT_PRODUCER
        return allowed.get(key, 0)


def ready(function: Callable, *arguments: Any) -> Callable[[], Call]:
    """Returns `Row.call` of what is there already."""
    return lambda: (function, arguments)


def _row(path: str, head_dim: int, dtype: str, mask: str) -> Row:
    causal, length, traced = (MASKS | LONG_MASKS | SMALL_MASKS | MANY_MASKS)[mask]
    batch = 1 if mask in SMALL_MASKS else MANY if mask in MANY_MASKS else BATCH
    shape = Shape(batch, length, Q_HEADS, KV_HEADS, head_dim)
    return _of_shape(path, shape, dtype, mask, causal, traced)


def suite_rows(suite: str) -> Iterator[Row]:
    """Yields forward and backward of every cell of a benchmark suite; no spill is allowed for."""
    for cell in SUITES[suite]:
        for path in ("forward", "backward"):
            yield _of_shape(path, cell.shape, "bfloat16", cell.label, cell.causal)


def _of_shape(
    path: str, shape: Shape, dtype: str, mask: str, causal: bool, traced: bool = False
) -> Row:
    head_dim = shape.head_dim
    spec = AttentionSpec(
        scale=head_dim**-0.5,
        mask=Mask(right=0) if causal else Mask(),
        deterministic=path == "deterministic backward",
    )
    q = jax.ShapeDtypeStruct((shape.batch, shape.q_len, shape.q_heads, head_dim), dtype)
    kv = jax.ShapeDtypeStruct((shape.batch, shape.kv_len, shape.kv_heads, head_dim), dtype)
    offset = jax.ShapeDtypeStruct((shape.batch,), jnp.int32) if traced else None
    per_row = jax.ShapeDtypeStruct((shape.batch, shape.q_heads, shape.q_len), jnp.float32)
    operands = Operands(q, kv, kv, offset)
    backend = HopperBackend(trades_registers=False if path.endswith(ALONE) else None)
    blocks = backend.attention.plan(describe(operands, spec))
    if path.startswith("forward"):
        run, arguments = (lambda *a: backend.attention.run(spec, blocks, *a)), (operands,)
    else:
        run = lambda *a: backend.vjp.run(spec, blocks, *a, wanted=frozenset())
        arguments = (operands, cotangents(spec, q, per_row))
    return Row(path, head_dim, dtype, mask, ready(run, *arguments))


def cotangents(spec: AttentionSpec, do, per_row) -> Cotangents:
    """Returns the inputs of a backward; with a shift where the forward may find one."""
    shift = per_row if far_of(spec, do.dtype) else None
    return Cotangents(per_row, do, per_row, shift)


def _modifier_rows(case: Case) -> Iterator[Row]:
    """Yields forward and backward, with every gradient, of a case of the Hopper tests."""
    calls = functools.cache(lambda: _calls_of(case))
    for path in ("forward", "backward"):
        call = lambda path=path: calls()[path]
        yield Row(path, case.H, case.dtype, case.name, call)


def _calls_of(case: Case) -> dict[str, Call]:
    """Returns the calls of `_modifier_rows`, by path."""
    x = case.inputs()
    arguments = Arguments(**case.arguments(x), deterministic=case.deterministic)
    call = validate.canonicalize(x.q, x.k, x.v, arguments)
    backend, spec, operands = HopperBackend(), call.spec, call.operands
    blocks = backend.attention.plan(call.problem)
    if isinstance(blocks.backward, FusedBlocks):  # as with more key blocks than these few
        blocks = backend.attention.plan(call.problem, {"fused": {"split_q": 1}})
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    per_row = jax.ShapeDtypeStruct((case.B, case.N, case.T), jnp.float32)
    forms, do = jax.tree.map(shape, operands), shape(x.do)
    wanted = frozenset(name for name in EXTRA_GRADS if name in call.problem.features)
    forward = lambda o: backend.attention.run(spec, blocks, o)
    backward = lambda o, c: backend.vjp.run(spec, blocks, o, c, wanted)
    given = forms, cotangents(spec, do, per_row)
    return {"forward": (forward, given[:1]), "backward": (backward, given)}


def _pair_bias_row(length: int, head_dim: int) -> Row:
    """Returns a row of PAIR_BIASES, with the batch entries and heads of benchmarks/features.py."""
    entries, heads = 128, 4
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    q = shape(entries, length, heads, head_dim)
    per_row = jax.ShapeDtypeStruct((entries, heads, length), jnp.float32)
    operands = Operands(q, q, q)._replace(bias=shape(1, heads, length, length))
    backend, spec = HopperBackend(), AttentionSpec(scale=head_dim**-0.5)
    blocks = backend.attention.plan(describe(operands, spec))
    run = lambda o, c: backend.vjp.run(spec, blocks, o, c, frozenset({"bias"}))
    arguments = operands, cotangents(spec, q, per_row)
    name = f"pair bias {length}"
    return Row("backward", head_dim, "bfloat16", name, ready(run, *arguments))


def decode_call(
    head_dim: int, name: str, v_head_dim: int | None = None, heads: int = 32, kv_heads: int = 8
) -> tuple[decode.DecodeSpec, decode.DecodeOperands]:
    """Returns (spec, shapes of the operands) of an entry of DECODES."""
    entries, cached = DECODE_BATCH, DECODE_LENGTH
    columns = (head_dim, v_head_dim or head_dim)
    spec = decode.DecodeSpec(head_dim**-0.5, **DECODES[name])
    q_len = TOKENS.get(name, 1)
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    page_size, per_entry = spec.page_size, shape(jnp.int32, entries)
    stored = next((dtype for dtype in decode.QUANTISED if name.startswith(dtype)), jnp.bfloat16)
    lead, table = (entries, cached), None
    if page_size is not None:
        lead = (entries * cached // page_size, page_size)
        table = shape(jnp.int32, entries, cached // page_size)
    k, v = (shape(stored, *lead, kv_heads, width) for width in columns)
    if "shared" in name:
        spec, v = dataclasses.replace(spec, v_columns=columns[1]), None
    side = shape(jnp.float32, entries, heads) if name.endswith("modifiers") else None
    q = shape(jnp.bfloat16, entries, q_len, heads, head_dim)
    offset = None if spec.window_left is None else per_entry
    operands = decode.DecodeOperands(q, k, v, per_entry, offset, table, side, side)
    if stored != jnp.bfloat16:
        scale = shape(jnp.float32, 1 if table is None else lead[0], kv_heads)
        operands = operands._replace(k_scale=scale, v_scale=scale)
    if "starts" in name:
        operands = operands._replace(kv_starts=per_entry)
    if name.startswith("drafts"):
        mask = shape(jnp.bool_, entries, q_len, q_len)
        operands = operands._replace(draft_mask=mask, q_offset=None)
    if name.endswith("windows"):
        operands = operands._replace(window_left=per_entry)
    return spec, operands


def _decode_row(head_dim: int, name: str, *others: int) -> Row:
    """Returns the row of an entry of DECODES; see `decode_call` for the others."""
    spec, operands = decode_call(head_dim, name, *others)
    backend = HopperBackend()
    problem = decode.describe(operands, spec)
    blocks = backend.decode.plan(problem)
    run = lambda o: backend.decode.run(spec, blocks, o)
    # Two blocks of 256 threads have 128 registers each.
    both = isinstance(blocks, DecodeBlocks) and blocks.ctas_per_sm(problem) > 1
    most = 128 if both else MOST_REGISTERS
    said = f"{name}, {others[0]} {others[1]}/{others[2]}" if others else name
    return Row("decode", head_dim, "bfloat16", said, ready(run, operands), most)


def _decode_rows() -> Iterator[Row]:
    for head_dim, name in itertools.product((64, 128, 256), DECODES):
        if head_dim == 128 or name == "contiguous" or name.endswith("modifiers"):
            yield _decode_row(head_dim, name)
    for (head_dim, *others), names in WIDE_DECODES.items():
        yield from (_decode_row(head_dim, name, *others) for name in names)


def ragged_call(head_dim: int, name: str) -> tuple[ragged.RaggedSpec, ragged.RaggedOperands]:
    """Returns (spec, shapes of the operands) of an entry of RAGGED, 32 heads for 8 of keys."""
    page_size, asked = RAGGED[name]
    seqs, heads, columns = RAGGED_SEQS, 32, RAGGED_KEYS // page_size
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    pages = shape(jnp.bfloat16, seqs * columns, page_size, 8, head_dim)
    per_seq, per_head = shape(jnp.int32, seqs), shape(jnp.float32, seqs, heads)
    given = {name: per_head for name in ("sinks", "alibi_slopes") if name in asked}
    given |= {name: per_seq for name in ("kv_starts", "window_left") if name in asked}
    q = shape(jnp.bfloat16, RAGGED_TOKENS, heads, head_dim)
    table, ends = shape(jnp.int32, seqs, columns), shape(jnp.int32, seqs + 1)
    operands = ragged.RaggedOperands(
        *(q, pages, pages, per_seq, table, ends), num_seqs=shape(jnp.int32), **given
    )
    window, softcap = (1000 if "window" in asked else None), (30.0 if "softcap" in asked else None)
    spec = decode.DecodeSpec(head_dim**-0.5, window, softcap, page_size=page_size)
    return ragged.RaggedSpec(spec), operands


def _ragged_row(path: str, head_dim: int, name: str) -> Row:
    """Returns the row of the chunks of an entry of RAGGED."""
    spec, operands = ragged_call(head_dim, name)
    problem = ragged.describe(operands, spec)
    producer = trades_registers() and not path.endswith(ALONE)
    blocks = choose_chunk_blocks(problem, H200_SMS, producer)
    run = lambda o: ragged_chunks(blocks, problem, ragged.in_range(o), H200_SMS, False)
    return Row(path, head_dim, "bfloat16", name, ready(run, operands))


def _whole_ragged_row(name: str, **given) -> Row:
    """Returns the row of a whole call of an entry of RAGGED: decode, combine and chunks.

    `given` are fields of the DecodeSpec.
    """
    spec, operands = ragged_call(128, name)
    steps = dataclasses.replace(spec.decode, **given)
    spec = dataclasses.replace(spec, decode=steps)
    backend = HopperBackend()
    blocks = backend.ragged.plan(ragged.describe(operands, spec))
    run = lambda o: backend.ragged.run(spec, blocks, o)
    return Row("steps and chunks", 128, "bfloat16", name, ready(run, operands))


def _ragged_rows() -> Iterator[Row]:
    for head_dim, name in itertools.product((64, 128, 256), RAGGED):
        if name.startswith("prefix"):
            continue
        if head_dim == 128 or name.startswith(("pages", "modifiers")):
            yield _ragged_row("ragged", head_dim, name)
    if trades_registers():
        yield _ragged_row("ragged" + ALONE, 128, "pages_16")
    yield _whole_ragged_row("pages_128", num_splits=1)
    yield _whole_ragged_row("pages_16", num_splits=4)
    yield _whole_ragged_row("prefix_pages_64", shares_prefix=True)


def _rows_without_producer() -> Iterator[Row]:
    paths, head_dims, masks = ("forward", "backward"), (64, 128, 256), ("full", "causal")
    for path, head_dim, mask in itertools.product(paths, head_dims, masks):
        yield _row(path + ALONE, head_dim, "bfloat16", mask)
    yield from (_row("backward" + ALONE, 96, "bfloat16", mask) for mask in masks)


def _packed_rows() -> Iterator[Row]:
    """Yields what flash_attention_varlen runs, causal, where one array says what both have."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    length, of = 8192, jax.ShapeDtypeStruct
    q, kv = shape(1, length, Q_HEADS, 128), shape(1, length, KV_HEADS, 128)
    per_row = of((1, Q_HEADS, length), jnp.float32)
    known = Operands(q, kv, kv, q_first=of((1, length), jnp.int32))
    one = of((1,), jnp.int32)
    for name, operands in (
        ("varlen", known),
        ("varlen_padded", known._replace(q_lengths=one, kv_lengths=one)),
    ):
        spec, backend = AttentionSpec(scale=0.1, mask=Mask(right=0)), HopperBackend()
        blocks = backend.attention.plan(describe(operands, spec))
        forward = functools.partial(backend.attention.run, spec, blocks)
        backward = functools.partial(backend.vjp.run, spec, blocks, wanted=frozenset())
        yield Row("forward", 128, "bfloat16", name, ready(forward, operands))
        arguments = operands, cotangents(spec, q, per_row)
        yield Row("backward", 128, "bfloat16", name, ready(backward, *arguments))


def _rows_of_other_lengths() -> Iterator[Row]:
    for head_dim, mask in itertools.product((96, 128), LONG_MASKS):
        yield _row("forward", head_dim, "bfloat16", mask)
    yield from _packed_rows()
    for name, shape in PROGRAMS.items():
        yield _of_shape("backward", shape, "bfloat16", name, causal=True)
    for name, shape in ENCODERS.items():
        yield _of_shape("backward", shape, "bfloat16", name, causal=False)
    sizes = itertools.product((64, 128), ("forward", "backward"), (*SMALL_MASKS, *MANY_MASKS))
    yield from (_row(path, head_dim, "bfloat16", mask) for head_dim, path, mask in sizes)


def rows() -> Iterator[Row]:
    """Yields all rows; other masks than full and causal in bfloat16 only, the code is the same."""
    for name in (*MODIFIERS, *WIDE_MODIFIERS):
        yield from _modifier_rows(CASES[name])
    yield from (_pair_bias_row(*sizes) for sizes in PAIR_BIASES)
    for head_dim, path in itertools.product((64, 128, 256), ("forward", "backward")):
        for dtype, mask in itertools.product(("bfloat16", "float16"), MASKS):
            if dtype == "float16" and mask not in ("full", "causal"):
                continue
            yield _row(path, head_dim, dtype, mask)
            if path == "backward":
                yield _row("deterministic backward", head_dim, dtype, mask)
    yield from (_row("backward", 192, "bfloat16", mask) for mask in MASKS)
    for mask in ("full", "causal", "ragged", "offset", "small_causal", "many_causal"):
        yield _row("backward", 96, "bfloat16", mask)
    for sizes in itertools.product(("forward", "backward"), WIDE_HEAD_DIMS, WIDE_MASKS):
        path, head_dim, mask = sizes
        yield _row(path, head_dim, "bfloat16", mask)
    yield from _rows_of_other_lengths()
    tangents = tangent_rows(HopperBackend(capability="9.0"))
    for path, head_dim, dtype, mask, run, arguments in tangents:
        yield Row(path, head_dim, dtype, mask, ready(run, *arguments))
    if trades_registers():
        yield from _rows_without_producer()
    for path, head_dim in itertools.product(("forward", "backward"), (64, 128)):
        for mask in ("full", "causal"):
            yield _row(path, head_dim, "float32", mask)
    yield from _decode_rows()
    yield from _ragged_rows()
