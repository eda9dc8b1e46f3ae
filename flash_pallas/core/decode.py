"""Records of decoding, attention of a few new tokens to a KV cache: spec, operands, shapes.

The cache is read once and there is little to compute, so decoding is memory-bound. One sequence
and one KV head are too little work for a GPU: the keys are split into ranges that are read at the
same time (split-KV), each with its own output and log-sum-exp, and `softmax.merge` joins them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import drafts
from .mask import DraftMask, Mask
from .problem import AttentionSpec, Shapes

MAX_TOKENS = 64  # queries of one sequence: a step, or the proposals of speculative decoding
# Layers decode up to so many new tokens; more of them attend to a contiguous copy of the cache.
STEP_TOKENS = 16
PAGE_SIZES = range(16, 257, 16)
MAX_SPLITS = 128
# A window of so many keys hides none: positions and lengths are at most as large. Positions are at
# least -2**30, so that the difference fits int32.
UNBOUNDED = 2**30
# Why kernels refuse a call whose spec has a v_first other than 0.
VALUES_BEHIND_KEYS = (
    "reads no values that lie behind the keys in one array, and to split it copies the cache: keep "
    "them in two arrays"
)
QUANTISED = ("float8_e4m3fn", "int8")  # dtypes of a cache that q may not have


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """Static parameters of one decode call: everything but the arrays. Always causal.

    Attributes:
        scale: multiplies q @ k^T; positive.
        window_left: number of keys before its own position that a query sees; None is all, or what
            DecodeOperands.window_left says.
        softcap: logits become softcap * tanh(logits / softcap).
        num_splits: number of ranges in which the keys are read; None leaves it to the backend.
        page_size: keys per page; None for a contiguous cache.
        block_size: keys per block of DecodeOperands.kv_blocks; None without them.
        v_columns: number of columns of `DecodeOperands.k` that are the values, where there is no
            DecodeOperands.v.
        v_first: the first of these columns; the keys are the first head_dim columns. Only xla
            takes another than 0.
        ring: the cache of a sequence is a ring of S rows: key j is row j % S, unless it has been
            overwritten. Lengths may exceed S. One query, no q_offset, no page table.
        shares_prefix: leading pages that several sequences have are read once for all of them; see
            shared_prefix.py.
    """

    scale: float
    window_left: int | None = None
    softcap: float | None = None
    num_splits: int | None = None
    page_size: int | None = None
    block_size: int | None = None
    v_columns: int | None = None
    shares_prefix: bool = False
    v_first: int = 0
    ring: bool = False

    @property
    def mask(self) -> Mask:
        """Mask in positions: the keys that a query sees."""
        return Mask(self.window_left, 0)

    @property
    def attention(self) -> AttentionSpec:
        """The same parameters as an AttentionSpec, for `scores.logits` and `Tile.limits`."""
        return AttentionSpec(scale=self.scale, mask=self.mask, softcap=self.softcap)


class DecodeOperands(NamedTuple):
    """The arrays of one decode call; an absent one is None.

    Query t of entry b sits at position i = q_offset[b] + t. It sees key j where
    i - window_left <= j <= i and kv_starts[b] <= j < kv_lengths[b]; a query at a negative position
    sees none. With draft_mask the last T keys are the tokens of the queries: query t sees the u-th
    of them where draft_mask[b, t, u], every key before them, and sits at the position that
    drafts.py gives it.
    Key j of a paged cache is row j % page_size of page page_table[b, j // page_size]. Heads may
    have tables and lengths of their own: backends get them for `kv_blocks`, see kv_blocks.py.

    Backends clip: a kernel does so in passing, where XLA would launch another for it, about 1 us.
    """

    q: Any  # [B, T, N, H], 1 <= T <= MAX_TOKENS
    k: Any  # [B, S, K, H], or pages [num_pages, page_size, K, H]
    # [B, S, K, Hv], or pages [num_pages, page_size, K, Hv]; None: columns of k, by the spec
    v: Any
    # int32[B] or [B, K]; keys beyond may hold NaN. Clipped to [0, room], see `key_range`.
    kv_lengths: Any
    q_offset: Any  # int32[B]; None: kv_lengths - T, where kv_lengths is not clipped to kv_len
    page_table: Any = None  # int32[B, max_pages] or [B, K, max_pages]. Clipped to [0, num_pages)
    sinks: Any = None  # f32[B, N], natural logits
    alibi_slopes: Any = None  # f32[B, N]
    # For a cache in one of the dtypes QUANTISED: a key is k * k_scale. None is 1.
    k_scale: Any = None  # f32[1, K], or one row for each row of k: [B, K] or [num_pages, K]
    v_scale: Any = None  # likewise, of v; without v None is that of k
    # int32[B]; keys before it may hold NaN. Below 0 is 0. With a ring S more: the number of keys
    # that have been written, of which the last S are there
    kv_starts: Any = None
    window_left: Any = None  # int32[B] in [0, UNBOUNDED), where the spec has none
    kv_blocks: Any = None  # int32[B, 1 or K, M], blocks that the only query of an entry reads
    prefix_lengths: Any = None  # int32[B], keys that it shares, where the spec shares a prefix
    draft_mask: Any = None  # bool[B, T, T]; without q_offset


class LowerBound(NamedTuple):
    """Lower bound of the keys of one sequence, in a kernel."""

    mask: Mask  # its left side may be int32; it has one wherever there is a start
    start: Any  # int32, the first key, or None: key 0. Past every key where none is left


@dataclasses.dataclass(frozen=True)
class DecodeProblem(Shapes):
    """Shapes, dtypes and spec of a decode call, from which a backend tells support and tile sizes.

    Attributes:
        kv_len: number of keys that a sequence has room for: S, or max_pages * page_size. With
            kv_blocks, number of keys that may be chosen.
        num_pages: number of pages of the cache; None for a contiguous cache.
        kv_dtype: dtype of the cache.
        features: those that are present of "page_table", "sinks", "alibi_slopes", "kv_starts",
            "window_left", "kv_blocks" (heads have page tables of their own), "draft_mask" and
            "page_scales" (the pages of a cache have scales of their own).
    """

    operation: ClassVar[str] = "decode"  # of backends.base.Backend
    kv_dtype: np.dtype
    spec: DecodeSpec
    num_pages: int | None = None
    features: frozenset[str] = frozenset()

    @property
    def unit(self) -> float:
        """Factor from logits as `scores.Logits` has them to natural ones, as in `Problem.unit`."""
        return self.spec.attention.unit("alibi_slopes" in self.features)

    @property
    def windowed(self) -> bool:
        """True if there is a window."""
        return self.spec.window_left is not None or "window_left" in self.features

    @property
    def bounded_below(self) -> bool:
        """True if something may hide the first keys: a window, or starts."""
        return self.windowed or "kv_starts" in self.features

    @property
    def part_len(self) -> int | None:
        """Number of keys that lie side by side: of a page, or of a ring; None: all of them do."""
        return self.kv_len if self.spec.ring else self.spec.page_size

    @property
    def overwritten(self) -> int:
        """Number by which `DecodeOperands.kv_starts` exceed the first keys: S with a ring."""
        return self.kv_len if self.spec.ring else 0

    @property
    def drafts(self) -> int:
        """Number of the last keys of which a mask says who sees them; 0 without `draft_mask`."""
        return self.q_len if "draft_mask" in self.features else 0

    def key_range(self, kv_length, q_offset, exists=None):
        """Returns (number of keys that there are, position of query 0) of sequences, int32.

        Where new tokens found no room, those that did keep their positions: these come from
        `kv_length` before it is clipped to the room. Of one token that sees all keys the position
        changes nothing, and the kernel has an instruction less.

        Args:
            kv_length: int32, one or an array.
            q_offset: likewise, or None.
            exists: bool, False for a sequence that has no keys here; None: all have.
        """
        none, room = jnp.int32(0), jnp.int32(UNBOUNDED if self.spec.ring else self.kv_len)
        moved = self.q_len > 1 or self.windowed or "alibi_slopes" in self.features
        clips = q_offset is not None or not moved
        # If not to the room, clip to UNBOUNDED: sums with positions must not wrap.
        count = lax.clamp(none, kv_length, room if clips else jnp.int32(UNBOUNDED))
        if exists is not None:
            count = lax.select(exists, count, none)
        position = count - self.q_len if q_offset is None else q_offset
        return (count if clips else lax.clamp(none, count, room)), position

    def lower_bound(self, kv_starts, window_left, batch, keys) -> LowerBound:
        """Returns the lower bound of a sequence's keys, in a kernel.

        Args:
            kv_starts: int32[B] in device memory, or None.
            window_left: int32[B] in device memory, or None.
            batch: number of the sequence.
            keys: result of `key_range`.
        """
        length, position = keys
        mask = self.spec.mask
        if window_left is not None:
            mask = Mask(window_left[batch], 0)
        if kv_starts is not None and mask.left is None:
            # With a mask that has a left side, every row has a first key, as it has a last one.
            mask = Mask(UNBOUNDED, 0)
        if self.drafts:
            mask = DraftMask(mask.left, 0, self.drafts, position)
        if kv_starts is None:
            return LowerBound(mask, None)
        start = lax.max(kv_starts[batch] - self.overwritten, jnp.int32(0))
        return LowerBound(mask, jnp.where(start < length, start, jnp.int32(UNBOUNDED)))

    @property
    def of_heads(self) -> bool:
        """True if KV heads have page tables and lengths of their own."""
        return "kv_blocks" in self.features

    @property
    def shares_kv(self) -> bool:
        """True if the values are columns of the keys."""
        return self.spec.v_columns is not None

    @property
    def quantised(self) -> bool:
        """True if the cache has one of the dtypes in QUANTISED."""
        return self.kv_dtype != self.dtype


def describe(operands: DecodeOperands, spec: DecodeSpec) -> DecodeProblem:
    """Returns the DecodeProblem of these operands."""
    batch, q_len, q_heads, head_dim = operands.q.shape
    rows, length, kv_heads, _ = operands.k.shape
    v_head_dim = (spec.v_columns or 0) if operands.v is None else operands.v.shape[-1]
    table = operands.page_table
    optional = ("page_table", "sinks", "alibi_slopes", "kv_starts", "window_left", "kv_blocks")
    optional += ("draft_mask",)
    features = {name for name in optional if getattr(operands, name) is not None}
    if table is not None and table.ndim == 3:
        features.add("kv_blocks")
    scales = (x for x in (operands.k_scale, operands.v_scale) if x is not None)
    if table is not None and any(len(x) > 1 for x in scales):
        features.add("page_scales")
    return DecodeProblem(
        batch=batch,
        q_len=q_len,
        kv_len=length if table is None else table.shape[-1] * length,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=np.dtype(operands.q.dtype),
        kv_dtype=np.dtype(operands.k.dtype),
        spec=spec,
        num_pages=None if table is None else rows,
        features=frozenset(features),
    )


class DraftArrays(NamedTuple):
    """Arrays that kernels read for `draft_mask`; None without one."""

    words: Any = None  # int32[B, 1 or 2, T], see drafts.words
    depths: Any = None  # int32[B, T], where there is a window

    @classmethod
    def of(cls, problem: DecodeProblem, operands: DecodeOperands) -> DraftArrays:
        """Returns the arrays of a call."""
        mask, left = operands.draft_mask, operands.window_left
        if mask is None:
            return cls()
        left = problem.spec.window_left if left is None else left
        depths = drafts.depths(mask) if problem.windowed else None
        return cls(drafts.words(drafts.in_window(mask, left)), depths)
