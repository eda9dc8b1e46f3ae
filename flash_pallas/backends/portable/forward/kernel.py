"""Forward: O and the log-sum-exp (FlashAttention-2, arXiv:2307.08691, Algorithm 1).

A CTA of four warps owns a Q tile of one head and folds the KV blocks that it sees into O, which
stays in registers.

    S = Q K^T, softmax in registers, O += P V

With one slot each for tiles of K and V, V is in flight while S is computed and the next K while O
is, and all warps synchronize twice a step. With two, both are in flight for a whole step and warps
synchronize once; the room of a second tile of each is what a second CTA on the SM may need.

Above head dim 256 two warpgroups have half of the columns each (common/shares.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import block_lists, bounds, dropout, scores, softmax
from ....core.block_lists import BlockLists
from ....core.mask import Limits
from ....core.problem import Operands, Outputs, Problem
from ....core.scores import TileInputs
from ...gpu import score_tile
from ...gpu.auxiliary_arrays import AuxiliaryGmem
from ...gpu.launch import launch
from ...gpu.ptx import inline
from ...gpu.ptx.mma_sync import Grid
from ...gpu.ptx.online_softmax import LOWEST, far_of, settled
from ...gpu.ptx.rows_of_grids import get_rows, put_rows
from ...gpu.ptx.sums_of_rows import row_sums
from ...gpu.score_tile import RegisterTile
from .. import tiling
from ..common.auxiliary_inputs import AuxiliaryInputs, Place, RowFragments
from ..common.kernel import Kernel, Steps, kv_limits, kv_tile_range, longest_first
from ..common.shares import Shares
from ..common.smem_tiles import Copies, Copy, Stream, warpgroups_of, widths
from ..common.softmax import SLACK, Online, Rows, Weighed, per_row
from ..common.tiles import TileSizes
from ..tiling import Exchange, ForwardSmem


class ForwardArrays(NamedTuple):
    """Arrays in device memory that the forward reads."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    q_offset: Any = None  # int32[B], where problem.traced_offset
    q_lengths: Any = None  # int32[B]
    bounds: Any = None  # int32[B, Q blocks, 2], where arrays decide which keys are read
    # BlockLists.in_one of Q tiles, in place of `bounds`; if problem.is_listed
    lists: BlockLists | None = None
    aux: AuxiliaryGmem = AuxiliaryGmem()


class ForwardOut(NamedTuple):
    """Results in device memory; R is T rounded up to whole tiles."""

    o: Any  # [B, T, N, Hv]
    lse: Any  # f32[B, N, R], base 2
    shift: Any  # f32[B, N, R], see core/softmax.py; None where no logit can be far
    most: Any  # f32[B, N, R], the largest logit, natural; or None


class ForwardCta(NamedTuple):
    """State of one CTA and its Q tile."""

    gmem: ForwardArrays
    out: ForwardOut
    smem: ForwardSmem
    batch: Any
    head: Any
    kv_head: Any
    block: Any
    position: Any  # of the first query
    kv_length: Any  # keys there are
    shares: Shares
    copies: Copies
    fragments: RowFragments = RowFragments()
    steps: Any = None  # through blocks of keys
    stream: Any = None  # of their tiles


@dataclasses.dataclass(frozen=True)
class ForwardKernel(Kernel):
    """One launch of the forward; its methods are the phases of a CTA."""

    problem: Problem
    tile: TileSizes
    interpret: bool

    @property
    def online(self) -> Online:
        """Online softmax: the update of the rows from one KV block to the next."""
        slack = 0.0 if self.problem.spec.max_logit else SLACK
        return Online(self.interpret, far_of(self.problem.spec, self.problem.dtype), slack)

    @property
    def inputs(self) -> AuxiliaryInputs:
        """Loader of what score modifiers read; rows are queries."""
        return AuxiliaryInputs(self.problem, 0, self.interpret)

    def __call__(self, gmem: ForwardArrays, out: ForwardOut, smem: ForwardSmem):
        cta = self.place(gmem, out, smem)
        cta = cta._replace(steps=self.steps(cta))
        q_length = self.problem.q_len if gmem.q_lengths is None else gmem.q_lengths[cta.batch]
        q = gmem.q.at[cta.batch, :, cta.head]
        own = Copy(q, smem.q, cta.block * self.tile.rows, q_length)
        load = functools.partial(self.load, cta)
        stream = Stream(cta.copies, ("k", "v"), self.tile.slots, load)
        cta.copies.start(own)
        stream.start(0, *(stream.names if self.tile.slots == 2 else ("k",)))
        cta.copies.arrived(own, pending=1)
        fragments = self.inputs.row_fragments(gmem.aux, Place.of(cta, self.tile, 0))
        cta = cta._replace(fragments=fragments, stream=stream)
        columns = cta.shares.columns(widths(self.problem)[1])[1]
        zeros = self.folding(cta).zeros(self.tile.rows, columns)
        no_keys = self.online.no_keys(self.tile.rows, zeros)
        rows = cta.steps.fold(
            functools.partial(self.step, cta), no_keys, hides_end=not self.interpret
        )
        stream.end()
        self.finish(cta, rows)

    def place(self, gmem: ForwardArrays, out: ForwardOut, smem: ForwardSmem) -> ForwardCta:
        """Returns where this CTA is: batch entry, heads, Q tile and number of keys."""
        batch, head, block = (lax.axis_index(name) for name in ("batch", "head", "q"))
        block = longest_first(self.problem, self.tile.rows, block)
        offset = self.problem.spec.q_offset if gmem.q_offset is None else gmem.q_offset[batch]
        lengths, shares = gmem.aux.kv_lengths, self.shares(smem.scores)
        return ForwardCta(
            gmem=gmem,
            out=out,
            smem=smem.whole,
            batch=batch,
            head=head,
            kv_head=lax.div(head, jnp.int32(self.problem.group)),
            block=block,
            position=block * self.tile.rows + offset,
            kv_length=self.problem.kv_len if lengths is None else lengths[batch],
            shares=shares,
            copies=self.copies_of(shares),
        )

    def steps(self, cta: ForwardCta) -> Steps:
        """Returns the steps of the CTA's loop over KV blocks."""
        gmem = cta.gmem
        if gmem.lists is not None:
            return Steps.of_list(self.problem, gmem.lists, (cta.batch, cta.head, cta.block))
        coordinates, tile = (cta.batch, cta.block), (self.tile.rows, self.tile.columns)
        traced = None if gmem.aux.kv_lengths is None else cta.kv_length
        return Steps.of(
            kv_tile_range(self.problem, coordinates, cta.position, tile, gmem.bounds, traced)
        )

    def load(self, cta: ForwardCta, name: str, n, slot) -> tuple[Copy]:
        """Returns the copy of the K or V tile of the n-th step."""
        step, tile = cta.steps[n], getattr(cta.smem, name).at[slot]
        source = getattr(cta.gmem, name).at[cta.batch, :, cta.kv_head]
        limit = step.limit(cta.kv_length)
        return (Copy(source, tile, step.block * self.tile.columns, limit),)

    # --- a KV block -----------------------------------------------------------------------------

    def step(self, cta: ForwardCta, n, rows: Rows, *, masked: bool) -> Rows:
        """Folds one KV block into the rows."""
        kv_block = cta.steps[n].block
        place = Place.of(cta, self.tile, kv_block)
        inputs = self.inputs.read(cta.fragments, cta.gmem.aux, place, ids=masked)
        slot = cta.stream.slot(n)
        self.wait_for_k(cta.stream, n)
        zeros, width = (
            self.matmuls.zeros(self.tile.rows, self.tile.columns),
            widths(self.problem)[0],
        )
        s = cta.shares.product(zeros, cta.smem.q, cta.smem.k.at[slot], width)
        if self.tile.turns:
            cta.shares.read()
            cta.stream.start(n, "v")
        elif self.early:
            cta.stream.start(n + 1, "k")
        weigh = functools.partial(self.weigh, cta, kv_block, inputs, s, masked=masked)
        wait = functools.partial(self.wait_for_v, cta.stream, n)
        rows = self.folding(cta).fold(rows, weigh, wait, cta.smem.v.at[slot])
        if self.tile.turns:
            cta.copies.sync()
            cta.stream.start(n + 1, "k")
        return rows

    def wait_for_k(self, stream: Stream, n):
        """Waits for K of the n-th step and starts the next copies, into what warps have read."""
        if self.tile.slots == 2:
            stream.wait(n)
            stream.start(n + 1)
        else:
            stream.wait(n, "k")
            if not self.tile.turns:
                stream.start(n, "v")

    def wait_for_v(self, stream: Stream, n, bit=None) -> Any:
        """Waits for V of the n-th step, after which nobody needs K any more.

        With a bit warps synchronize in any case, and the bit of Warpgroups.sync is returned.
        """
        if self.tile.slots == 2:  # V has arrived with K
            return None if bit is None else stream.copies.sync(bit)
        any_bit = stream.wait(n, "v", bit=bit, pending=1 if self.early else 0)
        if not self.tile.turns and not self.early:
            stream.start(n + 1, "k")
        return any_bit

    @property
    def early(self) -> bool:
        """True if the next K is copied from S on: two warpgroups have read K when S is summed."""
        tile = self.tile
        return warpgroups_of(self.problem) > 1 and tile.slots == 1 and not tile.turns

    def folding(self, cta: ForwardCta) -> OwnRows | SharedWeights:
        """Returns how O is accumulated: with P in registers, or through shared memory."""
        if cta.smem.exchange is None:
            return OwnRows(cta.shares.columns(widths(self.problem)[1])[0], self.interpret)
        grid = Grid.of(self.tile.rows, widths(self.problem)[1])
        return SharedWeights(cta.smem.exchange, grid, self.interpret)

    def weigh(
        self, cta: ForwardCta, kv_block, inputs: TileInputs, s, rows: Rows, *, masked: bool
    ) -> Weighed:
        """Computes the weights of a tile of S, in 16 bits after dropout."""
        problem = self.problem if masked else self.problem.of_whole_tiles
        spec, tile = problem.spec, self.score_tile(cta, kv_block)
        limits = Limits()
        if masked:
            limits = kv_limits(self.problem, tile, cta.gmem.aux.kv_lengths, cta.kv_length)
        x, log2_scale, _ = score_tile.logits(spec, tile, s, inputs, limits, relative=True)

        def narrowed(p):
            if spec.dropout_rate:
                p = jnp.where(scores.kept(spec, tile, inputs), p, jnp.zeros_like(p))
            return p.astype(self.problem.dtype)

        return self.online.weigh(rows, x, log2_scale, narrowed)

    def score_tile(self, cta: ForwardCta, kv_block) -> RegisterTile:
        """Returns the RegisterTile of a KV block's scores: their positions and shape."""
        start, shape = kv_block * self.tile.columns, (self.tile.rows, self.tile.columns)
        return RegisterTile(cta.position, start, shape, interpret=self.interpret)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self, cta: ForwardCta, rows: Rows):
        """Divides O by the row sums and writes O, the log-sum-exp and the largest logit."""
        spec, sinks, unit = self.problem.spec, cta.gmem.aux.sinks, self.problem.unit
        m, moved = settled(rows.maxima)
        sink = None
        if sinks is not None:
            sink = lax.broadcast_in_dim(sinks[cta.batch, cta.head], m.shape, ())
            sink = sink if self.interpret else plgpu.layout_cast(sink, inline.ROWS)
        l = row_sums(rows.l, self.interpret)
        inverse, lse, shift = softmax.finish(m, l, moved, sink, unit)
        if spec.dropout_rate:
            inverse = inverse * dropout.gain(spec.dropout_rate)
        first = cta.block * self.tile.rows
        own = pl.ds(first, self.tile.rows)
        self.folding(cta).put(rows.o, inverse, cta.smem.q)
        cta.copies.sync()
        target = cta.out.o.at[cta.batch, :, cta.head]
        cta.copies.store(cta.smem.q, target, first, self.problem.q_len)

        def store():
            cta.out.lse[cta.batch, cta.head, own] = lse
            if cta.out.shift is not None:
                cta.out.shift[cta.batch, cta.head, own] = shift
            if cta.out.most is not None:
                most = moved * unit + m * softmax.LN2
                none = jnp.full_like(m, -jnp.inf)
                cta.out.most[cta.batch, cta.head, own] = jnp.where(m <= LOWEST, none, most)

        cta.shares.once(store)


def forward(problem: Problem, tile: TileSizes, operands: Operands, interpret: bool) -> Outputs:
    """Launches the forward.

    Args:
        problem: description of the operands.
        tile: tile sizes.
        operands: v is 0 where segment ids mark padding; head dims are multiples of 8.
        interpret: run under the interpreter.
    """
    blocks = pl.cdiv(problem.q_len, tile.rows)
    rows = blocks * tile.rows
    per_row = jax.ShapeDtypeStruct((problem.batch, problem.q_heads, rows), jnp.float32)
    shape = (problem.batch, rows if interpret else problem.q_len, problem.q_heads)
    out = ForwardOut(
        o=jax.ShapeDtypeStruct((*shape, problem.v_head_dim), problem.dtype),
        lse=per_row,
        shift=per_row if far_of(problem.spec, problem.dtype) else None,
        most=per_row if problem.spec.max_logit else None,
    )
    kernel = ForwardKernel(problem, tile, interpret)
    run = launch(
        kernel,
        out=(out,),
        scratch=(tiling.forward_layout(problem, tile, interpret),),
        grid=grid(problem, blocks),
        threads=warpgroups_of(problem),
        name="flash_pallas_portable_forward",
        interpret=interpret,
    )
    listed, sizes = problem.is_listed, (tile.rows, tile.columns)
    dynamic = problem.is_dynamic and not listed
    (outputs,) = run(
        ForwardArrays(
            q=operands.q,
            k=operands.k,
            v=operands.v,
            q_offset=operands.q_offset,
            q_lengths=operands.q_lengths,
            bounds=bounds.kv_bounds(problem, operands, *sizes) if dynamic else None,
            lists=block_lists.of_queries(problem, operands, sizes).in_one if listed else None,
            aux=kernel.inputs.arrays(operands),
        )
    )
    rows = (outputs.lse, outputs.shift, outputs.most)
    rows = (None if x is None else x[:, :, : problem.q_len] for x in rows)
    return Outputs(outputs.o[:, : problem.q_len], *rows)


def grid(problem: Problem, blocks: int) -> dict[str, int]:
    """Returns the axes of the launch, the fastest one last.

    Q tiles of one head read the same keys, so they start together. Where their loops differ in
    length, those of all heads start longest first instead. Head by head, the longest Q tile of the
    last head starts when hardly any work is left: 4 x 16 heads of 32 blocks on 264 CTA slots then
    take 296 steps for work of 256 (benchmarks/NOTES.md).
    """
    mask, heads = problem.spec.mask, {"head": problem.q_heads}
    if mask.right is not None and mask.left is None:
        return {"batch": problem.batch, "q": blocks, **heads}
    return {"batch": problem.batch, **heads, "q": blocks}


# --- two ways for P to reach the warps that accumulate O += P V ----------------------------------
# Reads of shared memory dominate a step of a wide head: every warp loads its own operands. A warp
# that has 16 rows of P in registers and accumulates all columns of O for them reads all of V.
# Through shared memory any warp can have any rows: with 64 rows and 256 columns a warp has all rows
# and a quarter of the columns, and reads 16 KB instead of 32 KB for a matmul of 64 keys (see Grid).


@dataclasses.dataclass(frozen=True)
class OwnRows(Kernel):
    """Accumulation with P in registers: the warp of a row's scores has all of its columns of O.

    Attributes:
        column: the first column of V and O that the warpgroup has.
        interpret: run under the interpreter.
    """

    column: Any
    interpret: bool

    def zeros(self, rows: int, columns: int):
        """Returns O before the first KV block."""
        return self.matmuls.zeros(rows, columns)

    def fold(self, rows: Rows, weigh: Callable[[Rows], Weighed], wait: Callable, v) -> Rows:
        """Adds a KV block whose scores are known.

        Args:
            rows: the rows so far.
            weigh: computes the weights from the scores.
            wait: waits for V; see ForwardKernel.wait_for_v.
            v: the V tile, [columns, Hv] in shared memory.
        """
        wait()
        weighed = weigh(rows)
        rows = Online.rescaled(rows, weighed)
        return rows._replace(o=self.matmuls.add(rows.o, weighed.p, v, column=self.column))

    def put(self, o, inverse, tile):
        """Writes O times one factor per row to shared memory, in 16 bits."""
        self.matmuls.put(o * per_row(inverse, o.shape), tile, self.column)


@dataclasses.dataclass(frozen=True)
class SharedWeights(Kernel):
    """Accumulation with P in shared memory: parts of O are as square as they can be.

    Attributes:
        exchange: shared memory that P passes through.
        grid: arrangement of the warps over O.
        interpret: run under the interpreter.
    """

    exchange: Exchange
    grid: Grid
    interpret: bool

    def zeros(self, rows: int, columns: int):
        """Returns O before the first KV block; see OwnRows."""
        return self.matmuls.zeros(rows, columns, self.grid)

    def fold(self, rows: Rows, weigh: Callable[[Rows], Weighed], wait: Callable, v) -> Rows:
        """Adds a KV block whose scores are known; see OwnRows.

        All warps synchronize when V has arrived, and with the same barrier tell each other whether
        a row max grew. P is in shared memory by then, and is overwritten only after the next one.
        """
        weighed, exchange = weigh(rows), self.exchange
        alpha = weighed.alpha()
        self.matmuls.put(weighed.p, exchange.weights)
        put_rows(alpha, exchange.factors, self.interpret)
        grew = wait(weighed.grew)

        def rescaled():
            return self._scaled(rows.o)

        o = lax.cond(grew > 0, rescaled, lambda: rows.o)
        o = self.matmuls.add_part(o, exchange.weights, v, 0, self.grid)
        return Rows(o, weighed.maxima, rows.l * alpha + weighed.sums)

    def put(self, o, inverse, tile):
        """Writes O times one factor per row to shared memory, in 16 bits; see OwnRows."""
        put_rows(inverse, self.exchange.factors, self.interpret)
        self.copies.sync()
        self.matmuls.put(self._scaled(o), tile, 0, self.grid)

    def _scaled(self, o):
        """Returns O times the factors in shared memory."""
        factors = get_rows(self.exchange.factors, o.shape[0], self.grid, self.interpret)
        return o * per_row(factors, o.shape)
