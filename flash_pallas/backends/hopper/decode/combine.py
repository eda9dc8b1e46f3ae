"""The second decode kernel: joins what was computed for each share of the keys.

It computes core.softmax.merge, in one launch where XLA takes several.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import softmax
from ....core.decode import DecodeProblem
from ....core.problem import Outputs
from ...gpu.launch import float32, launch
from ...gpu.ptx.first_columns import store_columns
from ..common.pipeline import row_buffer
from .plan import JOINING_THREADS, DecodePlan, DecodeResults, Packed, combined_columns, packed_row
from .tiles import takes_wide

# Shares that a warpgroup joins, in straight-line code, so that all their loads are under way at one
# time; more warpgroups have the others. Four warpgroups took 2.6 us for 32 shares and one took 2.3
# (H100, benchmarks/results/wide_decode_trials.txt). 128 in one took 20 s to compile.
SHARES, MOST_JOINERS = 32, 4
MOST_ELSEWHERE = 16  # shares that a warpgroup joins in the launch of another kernel


class JoinSmem(NamedTuple):
    """Shared memory in which several warpgroups exchange their parts; row j is of warpgroup j."""

    o: Any  # f32[joiners, columns]
    rows: Any  # f32[joiners, 3], fields of Joined
    met: Any  # mbarrier of one arrival of each


class Joined(NamedTuple):
    """Attention to some shares of the keys, for one row."""

    shift: Any  # the largest of the shares that see a key; -inf where none does
    most: Any  # the largest log-sum-exp relative to it, base 2; -inf likewise
    sums: Any  # of exp2(log-sum-exp - most)
    o: Any  # sum of the outputs with the same weights


class Row(NamedTuple):
    """Place of a row: a query of one head."""

    batch: Any
    head: Any  # of K and V
    query: Any
    in_group: Any  # which of the heads that share the KV head
    q_head: Any


@dataclasses.dataclass(frozen=True)
class CombineKernel:
    """One launch of the combine kernel.

    Attributes:
        plan: plan of the decode kernel whose shares are joined.
    """

    plan: DecodePlan

    def __call__(self, parts: DecodeResults, sinks, ends, out_o, out_lse, out_shift, *smem):
        packed = None if ends is None else packed_row(ends, lax.axis_index("batch"))
        row, splits = self.row(), self.plan.blocks.num_splits
        if self.joiners == 1:
            joined = self.part(self.shares(parts, row, range(splits)))
        else:
            wg, per_joiner = lax.axis_index("wg"), -(-splits // self.joiners)
            own = [wg * per_joiner + i for i in range(per_joiner)]
            exist = [n < splits for n in own] if splits % self.joiners else None
            in_range = [lax.min(n, jnp.int32(splits - 1)) for n in own]
            joined = self.part(self.shares(parts, row, in_range), exist)
            self.hand_over(smem[0], wg, joined)

        def finish(joined):
            self.finish(joined, sinks, DecodeResults(out_o, out_lse, out_shift), row, packed)

        if self.joiners == 1:
            finish(joined)
        else:
            pl.when(wg == 0)(lambda: finish(self.handed_over(smem[0])))

    @property
    def joins_elsewhere(self) -> bool:
        """True if `join_packed` can do what this launch does: shares take few registers."""
        plan = self.plan
        return plan.several and plan.blocks.num_splits <= MOST_ELSEWHERE and self.ctas == 1

    def join_packed(self, parts: DecodeResults, sinks, ends, out: DecodeResults, number):
        """Joins the shares of a row in one warpgroup of another launch, if its entry has one query.

        Args:
            parts: shares, of packed queries.
            sinks: f32[B, N], or None.
            ends: int32[B + 1], of Packed.
            out: packed o [tokens, N, Hv], lse and shift [B, N, 1].
            number: number of the row: entry * N + query head.
        """
        problem = self.plan.problem
        heads, group = jnp.int32(problem.q_heads), jnp.int32(problem.group)
        batch, q_head = lax.div(number, heads), lax.rem(number, heads)
        head, in_group = lax.div(q_head, group), lax.rem(q_head, group)
        row = Row(batch, head, jnp.int32(0), in_group, q_head)
        packed = packed_row(ends, batch)

        @pl.when(packed[1])
        def _():
            joined = self.part(self.shares(parts, row, range(self.plan.blocks.num_splits)))
            self.finish(joined, sinks, out, row, packed)

    def row(self) -> Row:
        """Returns the row of this CTA."""
        batch, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        group = jnp.int32(self.plan.problem.group)
        in_group = lax.rem(row, group)
        return Row(batch, head, lax.div(row, group), in_group, head * group + in_group)

    def share(self, parts: DecodeResults, place: tuple, query, in_group) -> DecodeResults:
        """Returns a row of the share at `place`, (batch entry, KV head, split)."""
        return DecodeResults(
            self.own_columns(parts.o.at[(*place, query, in_group)]),
            parts.lse.at[(*place, in_group, query)],
            parts.shift.at[(*place, in_group, query)],
        )

    def shares(self, parts: DecodeResults, row: Row, splits) -> list[DecodeResults]:
        """Returns the shares of a row that these splits have."""
        place = row.batch, row.head
        return [self.share(parts, (*place, n), row.query, row.in_group) for n in splits]

    def finish(self, joined: Joined, sinks, out: DecodeResults, row: Row, packed):
        """Joins the sink, if there is one, and writes the row; `packed` as in `store`."""
        if sinks is not None:
            joined = self.join(joined, self.sink(sinks[row.batch, row.q_head]))
        self.store(joined, out, (row.batch, row.query, row.q_head), packed)

    def store(self, joined: Joined, out: DecodeResults, row: tuple, packed):
        """Divides by the sums and writes a row, (batch entry, query, query head).

        `packed` is (row of packed o, whether it exists); None: o is not packed.
        """
        batch, query, q_head = row
        empty = joined.sums == 0.0
        sums = jnp.where(empty, 1.0, joined.sums)
        lse = joined.most + jnp.log(sums) * softmax.LOG2E
        o = (joined.o * (1.0 / sums)).astype(out.o.dtype)
        if packed is None:
            target = self.own_columns(out.o.at[batch, query, q_head])
            store_columns(o, target, self.plan.interpret)
        else:
            place, exists = packed
            target = self.own_columns(out.o.at[place, q_head])
            store_o = functools.partial(store_columns, o, target, self.plan.interpret)
            pl.when(exists)(store_o)

        def store_row():
            out.lse[batch, q_head, query] = jnp.where(empty, softmax.EMPTY_ROW, lse)
            out.shift[batch, q_head, query] = jnp.where(empty, 0.0, _finite(joined.shift))

        if self.ctas == 1:
            store_row()
        else:
            pl.when(lax.axis_index("columns") == 0)(store_row)

    @property
    def joiners(self) -> int:
        """Number of warpgroups of a CTA, each of which joins a range of the shares."""
        return min(MOST_JOINERS, -(-self.plan.blocks.num_splits // SHARES))

    @property
    def columns(self) -> int:
        """Number of columns that a CTA joins."""
        columns = combined_columns(self.plan.head_dims[1])
        return columns if self.ctas == 1 else JOINING_THREADS

    def scratch(self) -> tuple:
        """Returns the shared memory of a CTA, if its warpgroups exchange their parts."""
        if self.joiners == 1:
            return ()
        o, rows = (row_buffer((self.joiners, width)) for width in (self.columns, 3))
        return (JoinSmem(o, rows, plgpu.Barrier(num_arrivals=self.joiners)),)

    def hand_over(self, smem: JoinSmem, wg, joined: Joined):
        """Writes what this warpgroup has joined to shared memory."""
        smem.o[wg] = joined.o
        for i, x in enumerate(joined[:3]):
            smem.rows[wg, i] = x
        plgpu.barrier_arrive(smem.met)
        plgpu.barrier_wait(smem.met)

    def handed_over(self, smem: JoinSmem) -> Joined:
        """Returns what all warpgroups have joined, joined in their order."""

        def part(wg: int) -> Joined:
            shift, most, sums = (smem.rows[wg, i] for i in range(3))
            return Joined(shift, most, sums, _load(smem.o.at[wg]))

        return functools.reduce(self.join, map(part, range(self.joiners)))

    @property
    def ctas(self) -> int:
        """Number of CTAs that join a row, each 128 of its columns.

        Above head dim 256 the columns are shared, as 128 shares of 512 columns are 256 KB: 16 query
        heads would read 4 MB with 16 of 132 SMs. Not timed.
        """
        width = self.plan.problem.v_head_dim
        shared = takes_wide(self.plan.problem) and width % JOINING_THREADS == 0
        return width // JOINING_THREADS if shared else 1

    def own_columns(self, row):
        """Returns the columns of a row, the last axis of a ref, that this CTA joins."""
        if self.ctas == 1:
            return row
        return row.at[pl.ds(lax.axis_index("columns") * JOINING_THREADS, JOINING_THREADS)]

    @property
    def unit(self) -> float:
        """Factor that makes a shift a natural logit."""
        return self.plan.problem.unit

    def relative(self, log2, shift, new_shift):
        """Returns base-2 log-sum-exps relative to a new shift; -inf for rows that see no key."""
        return (shift - _finite(new_shift)) * (self.unit * softmax.LOG2E) + log2

    def part(
        self, shares: list[DecodeResults], exist: list | None = None, written: bool = True
    ) -> Joined:
        """Joins shares in device memory, all of which are loaded at once.

        Args:
            shares: the shares.
            exist: for each of them, whether it counts; None: all do.
            written: those that do not count hold numbers; else they may hold anything.
        """
        lse = [share.lse[...] for share in shares]
        parts = [_load(share.o) for share in shares]  # before what must wait for lse
        if exist is not None and not written:
            parts = [_where(exists, x) for x, exists in zip(parts, exist, strict=True)]
        seen = [x < softmax.EMPTY_ROW / 2 for x in lse]
        if exist is not None:
            seen = [sees & exists for sees, exists in zip(seen, exist, strict=True)]
        shift = [share.shift[...] for share in shares]
        shift = [jnp.where(sees, x, -jnp.inf) for sees, x in zip(seen, shift, strict=True)]
        largest = functools.reduce(jnp.maximum, shift)
        log2 = [jnp.where(sees, x, -jnp.inf) for sees, x in zip(seen, lse, strict=True)]
        log2 = [self.relative(x, old, largest) for x, old in zip(log2, shift, strict=True)]
        most = functools.reduce(jnp.maximum, log2)
        weights = [jnp.exp2(x - _finite(most)) for x in log2]
        total = functools.reduce(jnp.add, map(jnp.multiply, parts, weights))
        return Joined(largest, most, functools.reduce(jnp.add, weights), total)

    def sink(self, sink) -> Joined:
        """Returns the sink as one more share, which has no values; a sink of -inf is none."""
        none, far = sink == -jnp.inf, jnp.abs(sink) > softmax.FAR_FLOAT32 * softmax.LN2
        shift = jnp.where(far, sink * (1.0 / self.unit), 0.0)
        shift = jnp.where(none, -jnp.inf, shift)
        most = (sink - _finite(shift) * self.unit) * softmax.LOG2E
        return Joined(shift, most, jnp.where(none, 0.0, 1.0), None)

    def join(self, a: Joined, b: Joined) -> Joined:
        """Joins two parts; b.o may be None, which is 0."""
        shift = jnp.maximum(a.shift, b.shift)
        log2 = [self.relative(x.most, x.shift, shift) for x in (a, b)]
        most = jnp.maximum(*log2)
        left, right = (jnp.exp2(x - _finite(most)) for x in log2)
        o = a.o * left if b.o is None else a.o * left + b.o * right
        return Joined(shift, most, a.sums * left + b.sums * right, o)


def _finite(most):
    # Constants are literals: those of jnp.zeros_like, as in softmax.finish, come with a reshard
    # where the call's arrays are laid out over a mesh, which Mosaic does not lower.
    return jnp.where(most == -jnp.inf, 0.0, most)


def _where(exists, x):
    """Returns x, or zeros; `exists` is a scalar."""
    if exists is True:
        return x
    return jnp.where(jnp.broadcast_to(exists, x.shape), x, jnp.zeros_like(x))


def _load(ref):
    size = ref.shape[0]
    return plgpu.load(
        ref, layout=plgpu.Layout.WG_STRIDED((size,), vec_size=size // JOINING_THREADS)
    )


def combine(
    plan: DecodePlan, parts: DecodeResults, sinks: Any, packed: Packed | None = None
) -> Outputs:
    """Launches the combine kernel.

    Args:
        plan: plan of the decode kernel.
        parts: results of the decode kernel, one for each share of the keys.
        sinks: f32[B, N], natural logits, or None.
        packed: where o is packed; None: it is not.

    Returns:
        Outputs: o [B, T, N, Hv], or packed [tokens, N, Hv], in q's dtype; lse_log2 and shift
        f32[B, N, T].
    """
    problem, kernel = plan.problem, CombineKernel(plan)
    columns = {"columns": kernel.ctas} if kernel.ctas > 1 else {}
    run = launch(
        kernel,
        out=_shapes(problem, packed),
        scratch=kernel.scratch(),
        grid={"batch": problem.batch, "head": problem.kv_heads, "row": plan.rows} | columns,
        threads=kernel.joiners,
        name="flash_pallas_decode_combine",
        interpret=plan.interpret,
    )
    shares = DecodeResults(*parts[:3])
    return Outputs(*run(shares, sinks, None if packed is None else packed.ends))


def _shapes(problem: DecodeProblem, packed: Packed | None) -> tuple:
    """Returns shapes and dtypes of the results: o, log-sum-exp and shift."""
    heads = (problem.batch, problem.q_heads, problem.q_len)
    lead = (problem.batch, problem.q_len) if packed is None else (packed.tokens,)
    o_shape = (*lead, problem.q_heads, problem.v_head_dim)
    return jax.ShapeDtypeStruct(o_shape, problem.dtype), float32(heads), float32(heads)


# --- A shared prefix and the rest of the keys, in one launch --------------------------------------


class Places(NamedTuple):
    """Places of the sequences' queries in the launch that reads shared prefixes, int32[B]."""

    tile: Any  # batch entry of that launch; the number of these, or more, if there are none
    slot: Any  # place among the sequences of the tile


@dataclasses.dataclass(frozen=True)
class JoinKernel(CombineKernel):
    """One launch that joins the shares of two launches of the decode kernel, of narrow heads.

    Attributes:
        plan: plan of the launch that reads each sequence's own keys.
        prefix: plan of the one that reads shared prefixes.
    """

    prefix: DecodePlan

    @property
    def joiners(self) -> int:
        """One warpgroup joins all shares, SHARES at most."""
        return 1

    def __call__(self, own: DecodeResults, shared: DecodeResults, places: Places, *others):
        sinks, ends, *out = others
        packed = None if ends is None else packed_row(ends, lax.axis_index("batch"))
        row, tiles = self.row(), self.prefix.problem.batch
        tile = places.tile[row.batch]
        exists, tile = tile < tiles, lax.min(tile, jnp.int32(tiles - 1))
        query = places.slot[row.batch] * self.plan.problem.q_len + row.query
        number = self.plan.blocks.num_splits
        shares = self.shares(own, row, range(number))
        for n in range(self.prefix.blocks.num_splits):
            shares.append(self.share(shared, (tile, row.head, n), query, row.in_group))
        exist = [True] * number + [exists] * (len(shares) - number)
        # A tile without sequences has written nothing, and rows that no sequence has may be NaN.
        joined = self.part(shares, exist, written=False)
        self.finish(joined, sinks, DecodeResults(*out), row, packed)


def join(
    plans: tuple[DecodePlan, DecodePlan],
    own: DecodeResults,
    shared: DecodeResults,
    places: Places,
    sinks: Any,
    packed: Packed | None,
) -> Outputs:
    """Launches the kernel that joins each sequence's own keys with those of its prefix.

    Args:
        plans: of the sequences' own keys, and of the prefixes.
        own: results of the former, shares.
        shared: results of the latter; tiles without keys may hold anything.
        places: where the sequences are in `shared`.
        sinks: f32[B, N], natural logits, or None.
        packed: as in `combine`.

    Returns:
        Outputs, as of `combine`.
    """
    plan, prefix = plans
    problem = plan.problem
    run = launch(
        JoinKernel(plan, prefix),
        out=_shapes(problem, packed),
        scratch=(),
        grid={"batch": problem.batch, "head": problem.kv_heads, "row": plan.rows},
        threads=1,
        name="flash_pallas_decode_join",
        interpret=plan.interpret,
    )
    ends = None if packed is None else packed.ends
    return Outputs(*run(DecodeResults(*own[:3]), DecodeResults(*shared[:3]), places, sinks, ends))
