"""What the kernels for wide heads have in common: loads, scores, exchange, sums.

64 rows of a result 512 wide take 256 registers a thread of one warpgroup: two warpgroups share the
rows of a CTA, and each has half of the columns of the result. Scores are computed once. In a step of
128 columns of scores

    each warpgroup has the scores of 64 of them, and makes weights of them
    the warpgroups hand their weights to each other through shared memory
    each multiplies all weights with its half of the columns of the summed operand

Whatever streams comes in chunks of 128 rows and 64 columns, through one ring: those of the operands
that scores are made of, then those of the summed one. The same operand may stream twice in a step:
it comes from L2. A 64 x 64 wgmma with both operands in shared memory reads 128 bytes a cycle, all
there is, and so does this kernel in half of its matmuls (benchmarks/NOTES.md).

The last warpgroup loads. There is no producer: two warpgroups have 255 registers a thread.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.problem import Problem
from ...gpu import inline
from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.score_tile import RegisterTile
from ..backward.operands import (
    BackwardArrays,
    KvTileList,
    KvTileRange,
    QTileList,
    QTileRange,
    mask_everywhere,
    own_place,
)
from ..common.auxiliary_inputs import AuxiliaryInputs, Place
from ..common.pipeline import Ring
from ..common.wgmma import Matmuls
from .tiles import (
    AUX_STAGES,
    CHUNK,
    COLUMNS,
    WARPGROUPS,
    Role,
    WideBarriers,
    WideBlocks,
    WideSmem,
)

LOADER = WARPGROUPS - 1  # the warpgroup that loads


def hidden(index):
    """Returns an index of shared memory that is found anew in every step.

    Descriptors of operands, one a wgmma, are then not held over the loop.
    """
    return lax.optimization_barrier(jnp.int32(index))


class At(NamedTuple):
    """Place of a chunk."""

    use: Any  # number of the chunk among all of the CTA
    slot: Any


@dataclasses.dataclass(frozen=True)
class WideCta:
    """Refs, rings and place of one CTA, as one of its warpgroups sees them.

    Attributes:
        gmem: operands in device memory.
        out: results in device memory.
        smem: shared memory.
        bars: its mbarriers.
        batch: the batch entry.
        head: head of the rows: a query head, or a head of keys.
        block: number of the block of rows.
        tiles: tiles of columns that the CTA goes through.
        wg: index of the warpgroup.
    """

    gmem: BackwardArrays
    out: Any
    smem: WideSmem
    bars: WideBarriers
    batch: Any
    head: Any
    block: Any
    tiles: Any
    wg: Any

    @property
    def start(self):
        """Index of the first row."""
        return self.block * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class WideKernel:
    """One launch; the methods are the phases of a CTA.

    Attributes:
        problem: what is computed, see `wide_problem`.
        blocks: options.
        role: what is computed from what.
        interpret: run by the interpreter.
    """

    problem: Problem
    blocks: WideBlocks
    role: Role
    interpret: bool

    @property
    def matmuls(self) -> Matmuls:
        """Matmuls of operands of the call's dtype."""
        return Matmuls(self.problem.dtype, self.interpret)

    @property
    def auxiliary(self) -> AuxiliaryInputs:
        """Auxiliary inputs, which modifiers read."""
        return AuxiliaryInputs(self.problem, self.role.q_axis)

    @functools.cached_property
    def reads(self) -> list[tuple[str, int]]:
        """The chunks of a step, (operand, number)."""
        return self.role.reads(self.problem)

    def __call__(self, gmem: BackwardArrays, *refs):
        out, (smem, bars) = refs[:-2], refs[-2:]
        heads = self.problem.kv_heads if self.role.q_axis else self.problem.q_heads
        batch, block, head = own_place(self.problem, gmem, heads)
        causal = self.problem.spec.mask.right is not None
        if causal and not self.role.q_axis and not self.problem.is_listed:  # the longest rows first
            block = pl.cdiv(self.problem.q_len, WARPGROUP_ROWS) - 1 - block
        head = head()
        cta = WideCta(
            gmem=gmem,
            out=out,
            smem=smem,
            bars=bars,
            batch=batch,
            head=head,
            block=block,
            tiles=self.tiles(gmem, (batch, head, block)),
            wg=lax.axis_index("wg"),
        )
        self.load_first(cta)
        accumulators = (self.accumulator,) * self.role.results(self.problem)
        plgpu.barrier_wait(bars.own)
        state, found = pl.run_scoped(functools.partial(self.fold, cta), *accumulators)
        plgpu.barrier_arrive(bars.done)
        plgpu.barrier_wait(bars.done)
        self.drain(cta)
        self.store(cta, state, found)

    def tiles(self, gmem: BackwardArrays, at):
        """Returns the tiles of columns of a CTA; `at`: (batch entry, head, block of rows)."""
        (batch, _, block), size = at, (WARPGROUP_ROWS, COLUMNS)
        if self.role.q_axis:
            loops = {"mask_all": mask_everywhere(self.problem)}
            if self.problem.is_listed:
                return QTileList.of(self.problem, gmem, at, *size, **loops)
            return QTileRange.of(self.problem, gmem, (batch, block), *size, **loops)
        if self.problem.is_listed:
            return KvTileList.of(self.problem, gmem, at, COLUMNS)
        position = block * WARPGROUP_ROWS + gmem.offset(self.problem, batch)
        return KvTileRange.of(self.problem, gmem, (batch, block, position), *size)

    @property
    def accumulator(self):
        """Accumulator of a tile of scores, or of a chunk of the result."""
        return plgpu.ACC((WARPGROUP_ROWS, CHUNK), jnp.float32)

    # --- what the kernels do with a tile of scores -----------------------------------------------

    def fold(self, cta: WideCta, *accumulators):
        """Sums the results over all tiles of columns; returns (state, results), f32[64, 64] each."""
        raise NotImplementedError

    def store(self, cta: WideCta, state, found):
        """Finishes the results and writes them."""
        raise NotImplementedError

    # --- loads, by the last warpgroup ------------------------------------------------------------

    def load_first(self, cta: WideCta):
        """Loads the CTA's own rows, and as many chunks as there are slots."""

        @pl.when(cta.wg == LOADER)
        def _():
            for name, target in zip(self.role.own, cta.smem.own, strict=True):
                for chunk in range(target.shape[0]):
                    rows = pl.ds(cta.start, WARPGROUP_ROWS)
                    source = self.chunk_of(getattr(cta.gmem, name), cta, (rows, cta.head), chunk)
                    plgpu.copy_gmem_to_smem(source, target.at[chunk], cta.bars.own)
            if self.auxiliary.copies:
                for n in range(AUX_STAGES):
                    self.load_auxiliary(cta, jnp.int32(n))
            for position in range(self.blocks.chunks):
                self.load(cta, jnp.int32(0), position)

    def chunk_of(self, ref, cta: WideCta, at, chunk: int):
        """Returns the ref of a chunk of an array; `at`: (rows, head)."""
        rows, head = at
        # Traced: JAX refuses a static slice past the array's end, where TMA reads 0.
        start = cta.batch * 0 + chunk * CHUNK
        return ref.at[cta.batch, rows, head, pl.ds(start, CHUNK)]

    def load(self, cta: WideCta, n, position: int):
        """Loads the chunk at a position of the n-th step, which may be of a later step."""
        later, place = divmod(position, len(self.reads))
        step, (name, chunk) = n + later, self.reads[place]

        @pl.when(step < cta.tiles.total)
        def _():
            at, (head, block) = self.at(step, place), self.column_tile(cta, step)
            again = at.use >= self.blocks.chunks
            pl.when(again)(lambda: plgpu.barrier_wait(cta.bars.empty.at[at.slot]))
            rows = pl.ds(block * COLUMNS, COLUMNS)
            source = self.chunk_of(getattr(cta.gmem, name), cta, (rows, head), chunk)
            target = cta.smem.ring.at[at.slot]
            plgpu.copy_gmem_to_smem(source, target, cta.bars.full.at[at.slot])

    def at(self, n, position: int, more=None) -> At:
        """Returns the place of a chunk of the n-th step.

        Args:
            cta: the CTA.
            n: the step.
            position: of the chunk among those of the step.
            more: int32, 0 or 1, to add to the position; None: 0.
        """
        chunks, use = self.blocks.chunks, n * len(self.reads) + position
        use = use if more is None else use + more
        static = len(self.reads) % chunks == 0
        if more is not None:
            static = static and position % 2 == 0 and chunks % 2 == 0
        if not static:
            return At(use, lax.rem(hidden(use), jnp.int32(chunks)))
        slot = jnp.int32(position % chunks)
        return At(use, slot if more is None else slot + more)

    def release(self, cta: WideCta, n, position: int, at: At):
        """Releases a chunk; the last warpgroup loads another one into its slot.

        Args:
            cta: the CTA.
            n: the step.
            position: that of the chunk, where this is the last warpgroup.
            at: place of the chunk.
        """
        plgpu.barrier_arrive(cta.bars.empty.at[at.slot])
        pl.when(cta.wg == LOADER)(lambda: self.load(cta, n, position + self.blocks.chunks))

    def column_tile(self, cta: WideCta, n):
        """Returns (head, block) of the n-th tile of columns."""
        if not self.role.q_axis:
            return lax.div(cta.head, jnp.int32(self.problem.group)), cta.tiles[n]
        member, block = cta.tiles[n]
        return cta.head * self.problem.group + member, block

    def load_auxiliary(self, cta: WideCta, n):
        """Loads what streams besides chunks, of the n-th step, if there is one."""

        @pl.when(n < cta.tiles.total)
        def _():
            head, block = self.column_tile(cta, n)
            for wg in range(WARPGROUPS):
                slot = lax.rem(n, jnp.int32(AUX_STAGES)) * WARPGROUPS + wg
                again = n >= AUX_STAGES
                pl.when(again)(lambda slot=slot: plgpu.barrier_wait(cta.bars.auxiliary_empty.at[slot]))
                place = self.place(cta, head, block, wg)
                full = cta.bars.auxiliary_full.at[slot]
                self.auxiliary.load(cta.gmem.auxiliary, cta.smem.auxiliary, slot, full, place)

    def drain(self, cta: WideCta):
        """Observes the releases that nobody waited for."""
        plgpu.barrier_wait(cta.bars.weights_empty)

        @pl.when(cta.wg == LOADER)
        def _():
            ring = Ring(cta.bars.full, cta.bars.empty, self.blocks.chunks)
            ring.drain(cta.tiles.total * len(self.reads))
            for n in range(AUX_STAGES if self.auxiliary.copies else 0):
                for wg in range(WARPGROUPS):
                    empty = cta.bars.auxiliary_empty.at[n * WARPGROUPS + wg]
                    pl.when(n < cta.tiles.total)(lambda empty=empty: plgpu.barrier_wait(empty))

    def place(self, cta: WideCta, head, block, wg) -> Place:
        """Returns the place of a warpgroup's tile of scores; `head` is that of its columns."""
        head = head if self.role.q_axis else cta.head
        column = block * COLUMNS + wg * WARPGROUP_ROWS
        return Place(cta.batch, head, cta.start, column, WARPGROUP_ROWS, WARPGROUP_ROWS)

    # --- a step ----------------------------------------------------------------------------------

    def multiply_scores(self, cta: WideCta, n, accumulators):
        """Issues the matmuls of the n-th step's scores; those of the last chunk are in flight."""
        position, own_columns = 0, pl.ds(cta.wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        for own, accumulator in zip(cta.smem.own, accumulators, strict=True):
            for chunk in range(own.shape[0]):
                at = self.at(n, position)
                plgpu.barrier_wait(cta.bars.full.at[at.slot])
                right = cta.smem.ring.at[hidden(at.slot), own_columns]
                self.matmuls.multiply(accumulator, own.at[hidden(chunk)], right, transposed=True)
                if position:
                    plgpu.wgmma_wait(1)
                    self.release(cta, n, position - 1, self.at(n, position - 1))
                position += 1

    def release_scores(self, cta: WideCta, n):
        """Releases the last chunk of scores, whose matmul is over."""
        last = sum(own.shape[0] for own in cta.smem.own) - 1
        self.release(cta, n, last, self.at(n, last))

    def exchange(self, cta: WideCta, n, weights):
        """Hands a warpgroup's weights, an operand, to the other one; returns that one's."""
        ring = Ring(cta.bars.weights_full, cta.bars.weights_empty, 1)
        pl.when(n > 0)(lambda: plgpu.barrier_wait(ring.empty))
        self.matmuls.store_parts(cta.smem.weights.at[cta.wg], weights)
        plgpu.barrier_arrive(ring.full)
        plgpu.barrier_wait(ring.full)
        found = self.matmuls.load_parts(cta.smem.weights.at[1 - cta.wg], inline.WGMMA)
        plgpu.barrier_arrive(ring.empty)
        return found

    def multiply_weights(self, cta: WideCta, n, weights, accumulators):
        """Adds weights times the summed operand to the results.

        Args:
            cta: the CTA.
            n: the step.
            weights: operands: those of this warpgroup, and of the other one.
            accumulators: of the results.
        """
        first = sum(own.shape[0] for own in cta.smem.own)
        halves = [pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS) for wg in (cta.wg, 1 - cta.wg)]
        for i, accumulator in enumerate(accumulators):
            mine = self.at(n, first + WARPGROUPS * i, cta.wg)
            plgpu.barrier_wait(cta.bars.full.at[mine.slot])
            for part, rows in zip(weights, halves, strict=True):
                right = cta.smem.ring.at[hidden(mine.slot), rows]
                self.matmuls.multiply(accumulator, part, right)
            if i:
                plgpu.wgmma_wait(1)
                self.release_pair(cta, n, first + WARPGROUPS * (i - 1))
        plgpu.wgmma_wait(0)
        self.release_pair(cta, n, first + WARPGROUPS * (len(accumulators) - 1))

    def release_pair(self, cta: WideCta, n, position: int):
        """Releases a chunk that this warpgroup has read, and that of the other one beside it."""
        mine, other = (self.at(n, position, wg) for wg in (cta.wg, 1 - cta.wg))
        # What has not arrived is not to be released: the other warpgroup may be a round behind.
        plgpu.barrier_wait(cta.bars.full.at[other.slot])
        self.release(cta, n, position, other)
        self.release(cta, n, position + 1, mine)

    def tile(self, cta: WideCta, block) -> RegisterTile:
        """Describes a warpgroup's tile of scores: where it lies, and its shape."""
        column = block * COLUMNS + cta.wg * WARPGROUP_ROWS
        offset = cta.gmem.offset(self.problem, cta.batch)
        starts = (column + offset, cta.start) if self.role.q_axis else (cta.start + offset, column)
        shape = WARPGROUP_ROWS, WARPGROUP_ROWS
        return RegisterTile(*starts, shape, q_axis=self.role.q_axis, interpret=self.interpret)

    def inputs(self, cta: WideCta, fragments, n, *, ids: bool):
        """Returns what modifiers read at the tile of the n-th step."""
        shape, rows = (WARPGROUP_ROWS, WARPGROUP_ROWS), pl.ds(0, WARPGROUP_ROWS)
        slot = lax.rem(n, jnp.int32(AUX_STAGES)) * WARPGROUPS + cta.wg
        if self.auxiliary.copies:
            plgpu.barrier_wait(cta.bars.auxiliary_full.at[slot])
        return self.auxiliary.inputs(fragments, cta.smem.auxiliary, slot, shape, rows, ids=ids)

    def release_auxiliary(self, cta: WideCta, n):
        """Releases what `inputs` has read, and loads that of a later step."""
        if not self.auxiliary.copies:
            return
        slot = lax.rem(n, jnp.int32(AUX_STAGES)) * WARPGROUPS + cta.wg
        plgpu.barrier_arrive(cta.bars.auxiliary_empty.at[slot])
        pl.when(cta.wg == LOADER)(lambda: self.load_auxiliary(cta, n + AUX_STAGES))

    # --- results ---------------------------------------------------------------------------------

    def store_chunks(self, cta: WideCta, out, chunks):
        """Writes a warpgroup's chunks of the result, f32[64, 64] each, through the ring."""
        half = len(chunks)
        for i, x in enumerate(chunks):
            number = cta.wg * half + i
            slot, rows = lax.div(number, jnp.int32(2)), lax.rem(number, jnp.int32(2))
            staging = cta.smem.ring.at[slot, pl.ds(rows * WARPGROUP_ROWS, WARPGROUP_ROWS)]
            self.matmuls.store(staging, x)
            plgpu.commit_smem()
            rows = pl.ds(cta.start, WARPGROUP_ROWS)
            columns = pl.ds(number * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(staging, out.at[cta.batch, rows, cta.head, columns])
        plgpu.wait_smem_to_gmem(0)
