"""Common parts of the kernels for wide heads: loads, scores, exchange, sums.

64 rows of a result 512 wide take 256 registers a thread of one warpgroup: two warpgroups share the
rows of a CTA, and each has half of the columns of the result. Scores are computed once. In a step
of 128 columns of scores

    (1) S of this step: each warpgroup has 64 of the columns
    (2) sums += weights of the step before, those of both warpgroups, times half of the columns of
        the summed operand
        weights of this step are made of S while (2) is under way, and handed over in shared memory

Whatever streams comes in chunks of 64 rows and 64 to 192 columns. A warpgroup reads its own chunks
alone, and loads them itself, into a ring of its own, as soon as a matmul has ended: there is no
producer, two warpgroups have 255 registers a thread, and only weights tie them to each other. An
operand may stream twice, for scores and for sums: it comes from L2. A 64 x 64 wgmma with both
operands in shared memory reads 128 bytes a cycle, all there is, and so does this kernel in half of
its matmuls (benchmarks/NOTES.md).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.mask import Limits
from ....core.problem import Problem
from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.ptx import inline
from ...gpu.score_tile import RegisterTile
from ..backward.operands import BackwardArrays, own_place
from ..common.auxiliary_inputs import AuxiliaryInputs, Place
from ..common.pipeline import Matmuls, hidden
from .column_tiles import column_tiles, masks
from .tiles import (
    COLUMNS,
    SWIZZLED,
    WARPGROUPS,
    Chunks,
    Role,
    WideBarriers,
    WideBlocks,
    WideSmem,
)

FLIGHT = 2  # matmuls of scores in flight, where there are slots enough


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
        near: (head, first row) of the tiles of columns of the step before, of this and of the next.
        first: number of the first chunk of this step, or its slot, see WideKernel.divides_once.
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
    near: tuple = ()
    first: Any = None

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
    def chunks(self) -> Chunks:
        """The chunks that a warpgroup reads in a step."""
        return Chunks(self.problem, self.role, self.blocks.width)

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
            tiles=column_tiles(self.problem, gmem, self.role.q_axis, (batch, head, block)),
            wg=lax.axis_index("wg"),
        )
        self.load_first(cta)
        self.store_weights(cta, (jnp.zeros((WARPGROUP_ROWS, WARPGROUP_ROWS), self.problem.dtype),))
        accumulator = plgpu.ACC((WARPGROUP_ROWS, self.blocks.width), jnp.float32)
        accumulators = (accumulator,) * self.chunks.results
        plgpu.barrier_wait(bars.own)
        state, sums = pl.run_scoped(functools.partial(self.sum, cta), *accumulators)
        self.drain(cta)
        self.store(cta, state, sums)

    def sum(self, cta: WideCta, *accumulators):
        """Sums over all tiles; returns (state that `fold` returns, sums, f32[64, width] each)."""
        state = self.fold(cta, accumulators)
        total = cta.tiles.total
        for _ in self.sums(self.at_step(cta, total), total, accumulators):
            pass
        return state, [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accumulators]

    @property
    def accumulator(self):
        """Accumulator of a tile of scores."""
        return plgpu.ACC((WARPGROUP_ROWS, WARPGROUP_ROWS), jnp.float32)

    # --- what the kernels do with a tile of scores -----------------------------------------------

    def fold(self, cta: WideCta, accumulators):
        """Runs the steps, which leave the weights of the last; returns what `store` needs."""
        raise NotImplementedError

    def store(self, cta: WideCta, state, sums):
        """Computes the results from the sums, f32[64, width] each, and writes them."""
        raise NotImplementedError

    # --- loads -----------------------------------------------------------------------------------

    def load_first(self, cta: WideCta):
        """Loads the CTA's own rows, and as many chunks as there are slots."""

        @pl.when(cta.wg == 0)
        def _():
            for name, target in zip(self.role.own, cta.smem.own, strict=True):
                count = self.chunks.of(name)
                for chunk in range(count):
                    source = self.chunk_of(cta, name, cta.head, cta.start, chunk)
                    plgpu.copy_gmem_to_smem(source, target.at[chunk], cta.bars.own)
                for _ in range(count, target.shape[0]):  # of another role
                    plgpu.barrier_arrive(cta.bars.own)

        cta = self.at_step(cta, jnp.int32(0))
        for position in range(self.blocks.chunks):
            self.copy(cta, jnp.int32(0), 0, position)
        for n in range(self.blocks.stages if self.auxiliary.copies else 0):
            self.load_auxiliary(cta, jnp.int32(n))

    def chunk_of(self, cta: WideCta, name: str, head, row, chunk):
        """Returns the ref of a chunk of an operand in device memory."""
        # Traced: JAX refuses a static slice past the array's end, where TMA reads 0.
        column, width = (cta.batch * 0 + chunk) * self.blocks.width, self.blocks.width
        rows, columns = pl.ds(row, WARPGROUP_ROWS), pl.ds(column, width)
        return getattr(cta.gmem, name).at[cta.batch, rows, head, columns]

    def load(self, cta: WideCta, n, position: int):
        """Loads the chunk at a position of the n-th step, which may be of a later step.

        After the last step there is a block of the summed operand alone.
        """
        inline.warpgroup_barrier(self.interpret)  # every warp has read what was in the slot
        later, place = divmod(position, self.chunks.total)
        block, total = n + later, cta.tiles.total
        if place in self.chunks.summed:
            pl.when(block <= total)(lambda: self.copy(cta, n, later, place))
            return
        pl.when(block < total)(lambda: self.copy(cta, n, later, place))
        following = range(place, self.chunks.summed.stop, self.blocks.chunks)
        after = [p for p in following if p in self.chunks.summed]
        if after:  # the next chunk of the summed operand in this slot
            pl.when(block == total)(lambda: self.copy(cta, n, later, after[0]))

    def copy(self, cta: WideCta, n, later: int, place: int):
        """Starts the copy of a chunk into its slot, which is free.

        Args:
            cta: the CTA at the n-th step.
            n: the step.
            later: 0 or 1, how many steps later the chunk is read.
            place: its position in that step.
        """
        slot = self.slot(cta, place + later * self.chunks.total)
        chunk = place - self.chunks.summed.start
        half = self.chunks.results
        if place in self.chunks.summed:
            (head, row), name = cta.near[later], self.role.summed
            row, chunk = row + chunk // half * WARPGROUP_ROWS, cta.wg * half + chunk % half
        else:
            pair, chunk = (0, place) if chunk < 0 else (1, place - self.chunks.summed.stop)
            (head, row), name = cta.near[1 + later], self.role.scores[pair][1]
            row = row + cta.wg * WARPGROUP_ROWS
        source = self.chunk_of(cta, name, head, row, chunk)
        target, full = cta.smem.ring.at[cta.wg, slot], self.full(cta, slot)
        plgpu.copy_gmem_to_smem(source, target, full)

    def at_step(self, cta: WideCta, n) -> WideCta:
        """Returns the CTA at the n-th step."""
        last = cta.tiles.total - 1
        steps = lax.max(n - 1, jnp.int32(0)), lax.min(n, last), lax.min(n + 1, last)
        tiles = (self.column_tile(cta, step) for step in steps)
        near = tuple((head, block * COLUMNS) for head, block in tiles)
        first = n * self.chunks.total
        if self.divides_once:
            first = lax.rem(hidden(first), jnp.int32(self.blocks.chunks))
        return dataclasses.replace(cta, near=near, first=first)

    @property
    def divides_once(self) -> bool:
        """True where the slot of a step's first chunk is kept, and others are computed from it.

        That saves 25 instructions a chunk. Where chunks are narrow it is no faster, and what is
        kept is spilled (dQ: 208 bytes instead of 128 with a score_mod).
        """
        return self.blocks.width > SWIZZLED

    def slot(self, cta: WideCta, position: int):
        """Returns the slot of a chunk of this step; positions beyond it are of the next."""
        chunks = jnp.int32(self.blocks.chunks)
        if self.chunks.total % self.blocks.chunks == 0:  # the same in every step
            return jnp.int32(position % self.blocks.chunks)
        if not self.divides_once:
            return lax.rem(hidden(cta.first + position), chunks)
        slot = hidden(cta.first) + jnp.int32(position % self.blocks.chunks)
        return jnp.where(slot < chunks, slot, slot - chunks)

    def full(self, cta: WideCta, slot):
        """Returns the barrier of a slot of this warpgroup's ring."""
        return cta.bars.full.at[cta.wg * self.blocks.chunks + slot]

    def arrived(self, cta: WideCta, position: int):
        """Waits for a chunk of this step; returns its ref in shared memory."""
        slot = self.slot(cta, position)
        plgpu.barrier_wait(self.full(cta, slot))
        return cta.smem.ring.at[cta.wg, hidden(slot)]

    def reload(self, cta: WideCta, n, position: int):
        """Loads another chunk in place of one of the n-th step, which has been read."""
        self.load(cta, n, position + self.blocks.chunks)

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
            slot, place = self.auxiliary_slot(cta, n), self.place(cta, head, block, cta.wg)
            full = cta.bars.auxiliary_full.at[slot]
            self.auxiliary.load(cta.gmem.auxiliary, cta.smem.auxiliary, slot, full, place)

    def auxiliary_slot(self, cta: WideCta, n):
        """Returns the slot of what streams besides chunks, of the n-th step."""
        return cta.wg * self.blocks.stages + lax.rem(n, jnp.int32(self.blocks.stages))

    def drain(self, cta: WideCta):
        """Waits until the other warpgroup has read this one's last weights."""
        plgpu.barrier_wait(cta.bars.weights_empty)

    def place(self, cta: WideCta, head, block, wg) -> Place:
        """Returns the place of a warpgroup's tile of scores; `head` is that of its columns."""
        head = head if self.role.q_axis else cta.head
        column = block * COLUMNS + wg * WARPGROUP_ROWS
        return Place(cta.batch, head, cta.start, column, WARPGROUP_ROWS, WARPGROUP_ROWS)

    # --- a step ----------------------------------------------------------------------------------

    def multiply_scores(self, cta: WideCta, n, pair: int, accumulator):
        """Issues the matmuls of one pair of the n-th step; those of the last chunks are in flight.

        Returns the function that loads others in place of these, once they have been read.
        """
        own, first = cta.smem.own[pair], self.chunks.summed.stop if pair else 0
        flight = min(FLIGHT, max(self.blocks.chunks // 3, 1))
        count = self.chunks.of(self.role.scores[pair][0])
        for chunk in range(count):
            right = self.arrived(cta, first + chunk)
            self.matmuls.multiply(accumulator, own.at[hidden(chunk)], right, transposed=True)
            if chunk >= flight:
                plgpu.wgmma_wait(flight)
                self.reload(cta, n, first + chunk - flight)

        def reload():
            for chunk in range(max(count - flight, 0), count):
                self.reload(cta, n, first + chunk)

        return reload

    def store_weights(self, cta: WideCta, weights):
        """Hands a warpgroup's weights, an operand, to both."""
        self.matmuls.store(cta.smem.weights.at[cta.wg], weights)
        plgpu.barrier_arrive(cta.bars.weights_full)

    def replace_weights(self, cta: WideCta, weights):
        """Hands a warpgroup's weights to both, once both have read those of the step before."""
        plgpu.barrier_wait(cta.bars.weights_empty)
        self.store_weights(cta, weights)

    def sums(self, cta: WideCta, n, accumulators):
        """Adds the weights of the step before times the summed operand to the results.

        Yields after each matmul that it issues, and before it waits for the last: other work may be
        done meanwhile. At most two are in flight. Until it has ended, accumulators are not to be
        touched.
        """
        plgpu.barrier_wait(cta.bars.weights_full)
        pieces = [(part, acc) for part in range(WARPGROUPS) for acc in accumulators]
        weights, places = None, list(self.chunks.summed)
        for i, (part, accumulator) in enumerate(pieces):
            if i > 1:
                plgpu.wgmma_wait(1)
                self.reload(cta, n, places[i - 2])
            if i % len(accumulators) == 0:
                weights = self.matmuls.load_parts(cta.smem.weights.at[part], inline.WGMMA)
                if part == WARPGROUPS - 1:
                    plgpu.barrier_arrive(cta.bars.weights_empty)
            self.matmuls.multiply(accumulator, weights, self.arrived(cta, places[i]))
            yield
        plgpu.wgmma_wait(1)
        self.reload(cta, n, places[-2])
        yield  # with two chunks, other work is left to be done under the last (1.06 at 384)
        plgpu.wgmma_wait(0)
        self.reload(cta, n, places[-1])

    def tile(self, cta: WideCta, block) -> RegisterTile:
        """Describes a warpgroup's tile of scores: where it lies, and its shape."""
        column = block * COLUMNS + cta.wg * WARPGROUP_ROWS
        offset = cta.gmem.offset(self.problem, cta.batch)
        starts = (column + offset, cta.start) if self.role.q_axis else (cta.start + offset, column)
        shape = WARPGROUP_ROWS, WARPGROUP_ROWS
        return RegisterTile(*starts, shape, q_axis=self.role.q_axis, interpret=self.interpret)

    def limits(self, cta: WideCta, tile: RegisterTile, masked: bool = True) -> Limits:
        """Returns what positions leave visible of a tile; `masked`: they may hide some of it."""
        if not (masked and masks(self.problem, cta.tiles)):
            return Limits()
        return tile.limits(self.problem.spec.mask, cta.tiles.kv_len)

    def inputs(self, cta: WideCta, fragments, n):
        """Returns what modifiers read at the tile of the n-th step."""
        shape, rows = (WARPGROUP_ROWS, WARPGROUP_ROWS), pl.ds(0, WARPGROUP_ROWS)
        slot = self.auxiliary_slot(cta, n)
        if self.auxiliary.copies:
            plgpu.barrier_wait(cta.bars.auxiliary_full.at[slot])
        return self.auxiliary.inputs(fragments, cta.smem.auxiliary, slot, shape, rows)

    def reload_auxiliary(self, cta: WideCta, n):
        """Loads another step's in place of what `inputs` has read."""
        if self.auxiliary.copies:
            inline.warpgroup_barrier(self.interpret)
            self.load_auxiliary(cta, n + self.blocks.stages)

    # --- results ---------------------------------------------------------------------------------

    def store_chunks(self, cta: WideCta, out, chunks):
        """Writes a warpgroup's chunks of the result, f32[64, width] each, through the ring."""
        for i, x in enumerate(chunks):
            staging = cta.smem.ring.at[cta.wg, i % self.blocks.chunks]
            if i >= self.blocks.chunks:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.matmuls.store(staging, x)
            plgpu.commit_smem()
            number = cta.wg * len(chunks) + i
            rows = pl.ds(cta.start, WARPGROUP_ROWS)
            columns = pl.ds(number * self.blocks.width, self.blocks.width)
            plgpu.copy_smem_to_gmem(staging, out.at[cta.batch, rows, cta.head, columns])
        plgpu.wait_smem_to_gmem(0)
