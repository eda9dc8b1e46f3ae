"""The paired backward: all five matmuls of FlashAttention-2's Algorithm 2 for head dims to 256.

At head dim 256 dK and dV of 64 keys take half of an SM's registers, and the float32 sums of dQ that
CTAs of 64 keys make would be more than L2 adds up. So a cluster of two CTAs owns 128 keys. Each has
64 of them with dK and dV, as backward/split/dkv.py does; they exchange dS, and each computes half of
the columns of dQ for all 128 keys:

    warpgroup 0   S^T = K Q^T     P^T                                    dV += P^T dO
    warpgroup 1   dP^T = V dO^T   dS^T = P^T (dP^T - delta)              dK += dS^T Q
    both          dQ = dS K       a quarter of the columns each, of the tile before
    warpgroup 2   the producer

dQ of a tile is computed in the step after it, so that the other CTA's dS has a step to arrive. It is
added to float32 sums in device memory straight from registers; those lie in the order in which
threads have them, and XLA puts dQ in order. The order in which pairs add to dQ differs from run to run,
and with it the last bits; backward/split is deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .....core.problem import Operands, Problem
from .....core.scores import TileInputs
from ....gpu import inline
from ....gpu.inline import i32_constant, splat
from ....gpu.launch import WARPGROUP_ROWS, launch
from ...common import cluster, pipeline
from ...common.pipeline import CLUSTER_AXIS, WARPGROUP, Ring, rows_of
from ..fused.kernel import zeros
from ..fused.tiles import pairs_at_once
from ..operands import BackwardArrays, QTileRange, mask_everywhere
from ..split.dkv import DK_WARPGROUP, DV_WARPGROUP, PRODUCER, DkvCta, DkvKernel, DkvLoads
from .exchange import Exchange, stand_in
from .tiles import PAIR, WARPGROUPS, PairedBlocks, dq_columns, dq_part, paired_scratch, swizzle_of_k

def hidden(x):
    """Returns the same int32, of which the compiler knows nothing: found anew in every step."""
    return lax.optimization_barrier(jnp.int32(x))


class PairedRing(Ring):
    """Ring whose descriptors of operands are made in every step, not held over the loop."""

    def slot(self, n):
        return hidden(super().slot(n))


class SharedRing(PairedRing):
    """Ring that the CTAs of a pair fill together, and release to each other."""

    def release(self, n):
        """Releases the n-th fill once every warp has read it."""
        inline.warpgroup_barrier(False)
        super().release(n)


@dataclasses.dataclass(frozen=True)
class PairedCta(DkvCta):
    """Refs, rings and place of one CTA of a pair.

    Attributes:
        dq: f32[B, T8, N, D] in device memory: sums.
        block: number of the pair's 128 keys.
        rank: of this CTA in the pair.
        exchange: of dS.
        dq_acc: accumulator of this warpgroup's part of dQ, within a step.
    """

    dq: Any = None
    block: Any = None
    rank: Any = None
    exchange: Any = None
    dq_acc: Any = None

    def anew(self) -> PairedCta:
        """Returns this record with operands whose descriptors are not held over the loop."""
        zero, smem = hidden(0), self.smem
        k, v, k_other = (x.at[zero] for x in (smem.k, smem.v, smem.k_other))
        smem = smem._replace(k=k, v=v, k_other=k_other)
        return dataclasses.replace(self, smem=smem, rank=hidden(self.rank))

    @property
    def half(self) -> int:
        """Number of columns of dQ that a CTA computes."""
        return self.smem.k_other.shape[-1]


@dataclasses.dataclass(frozen=True)
class PairedKernel(DkvKernel):
    """One launch of the paired kernel; see DkvKernel, of which it has the scores, dK and dV."""

    blocks: PairedBlocks

    @property
    def loads(self) -> PairedLoads:
        """Copies from device memory into shared memory, and the sums of dQ."""
        return PairedLoads(self.problem, self.blocks)

    @property
    def at_once(self) -> int:
        """Number of pairs of a batch entry and a KV head that are worked on at one time."""
        return pairs_at_once(self.problem, self.problem.batch * self.problem.kv_heads)

    @property
    def grid(self) -> dict[str, int]:
        """The grid, of clusters: sections as in backward/fused/launches.py."""
        pairs = self.problem.batch * self.problem.kv_heads
        blocks = pl.cdiv(self.problem.kv_len, self.blocks.block_pair)
        return {"section": pl.cdiv(pairs, self.at_once), "kv": blocks, "pair": self.at_once}

    def run(self, dq, gmem: BackwardArrays, dk, dv, *refs):
        """Runs a CTA; `dq`: sums to which it adds."""
        passed, (smem, bars) = refs[:-2], refs[-2:]
        pair = lax.axis_index("section") * self.at_once + lax.axis_index("pair")
        batches, pairs = self.problem.batch, self.problem.batch * self.problem.kv_heads
        batch, kv_head = lax.rem(pair, jnp.int32(batches)), lax.div(pair, jnp.int32(batches))
        block, rank = lax.axis_index("kv"), pipeline.cluster_rank(PAIR)
        ring = SharedRing if self.blocks.multicast and not self.interpret else PairedRing
        exchange = Exchange(
            ds=smem.ds,
            arrived=smem.arrived,
            handed_over=bars.p_full,
            full=bars.ds_full,
            empty=bars.ds_empty,
            written=bars.ds_handed,
            stand_in=passed[0].at[batch, kv_head, block] if passed else None,
            rank=rank,
            swizzle=swizzle_of_k(self.problem, gmem),
            interpret=self.interpret,
        )
        cta = PairedCta(
            gmem=gmem,
            dk=dk,
            dv=dv,
            smem=smem,
            bars=bars,
            q=ring(bars.q_full, bars.q_empty, self.blocks.stages),
            do=ring(bars.do_full, bars.do_empty, self.blocks.do_stages),
            p=None,
            batch=batch,
            kv_head=kv_head,
            kv_start=(block * PAIR + rank) * WARPGROUP_ROWS,
            q_tiles=self.q_tiles(gmem, (batch, kv_head, block)),
            dq=dq,
            block=block,
            rank=rank,
            exchange=exchange,
        )
        if pairs % self.at_once == 0:
            self.run_roles(cta)
        else:  # the last section is smaller
            pl.when(pair < pairs)(lambda: self.run_roles(cta))

    def run_roles(self, cta: PairedCta):
        """Sends each warpgroup to its role."""
        wg = lax.axis_index("wg")
        pl.when(wg == DV_WARPGROUP)(lambda: self.compute_dv(cta))
        pl.when(wg == DK_WARPGROUP)(lambda: self.compute_dk(cta))
        pl.when(wg == PRODUCER)(lambda: self.loads(cta))

    def q_tiles(self, gmem: BackwardArrays, at) -> QTileRange:
        size = self.blocks.block_pair, self.blocks.block_q
        loops = {"mask_all": mask_everywhere(self.problem) or self.blocks.mask_all}
        if self.blocks.stagger:
            loops["shift"] = at[2]
        return QTileRange.of(self.problem, gmem, (at[0], at[2]), *size, **loops)

    # --- warpgroup 0 -----------------------------------------------------------------------------

    def sum_dv(self, cta: PairedCta, far):
        accumulator = self.result_accumulator(self.problem.v_head_dim)
        dv = pl.run_scoped(functools.partial(self.loop_over_dv, cta, far), accumulator)
        self.last_dq(cta, DV_WARPGROUP)
        self.meet(cta)
        staging = cta.smem.v.at[0]
        self.store(dv, staging, rows_of(cta.dv, cta.keys, staging))
        cta.exchange.drain(cta.q_tiles.total)

    def dv_step(self, cta: PairedCta, fragments: TileInputs, far, dv_acc, block_of, n, *, masked):
        """Hands over P^T of the n-th tile, issues dV += P^T dO, and adds dQ of the tile before."""
        block, n = block_of(n), hidden(n)
        if self.problem.group > 1:  # under the wait for Q
            place = self.loads.place(cta, cta.q_tiles[n][0], block)
            fragments = self.auxiliary.fragments_of_head(fragments, cta.gmem.auxiliary, place)
        cta.q.wait_full(n)
        run = functools.partial(self.dv_matmuls, cta, fragments, (n, block), masked, far, dv_acc)
        dq = pl.run_scoped(run, self.score_accumulator, self.dq_accumulator(DV_WARPGROUP))
        self.add_dq(cta, n - 1, DV_WARPGROUP, dq)

    def dv_matmuls(self, cta: PairedCta, fragments, at, masked, far, dv_acc, s_acc, dq_acc):
        """Returns dQ of the tile before; dV ends during the next tile."""
        n, _ = at
        cta = dataclasses.replace(cta.anew(), dq_acc=dq_acc)
        p, handed = self.weights(cta, fragments, at, masked, far, s_acc)
        cta.exchange.hand_over(n, handed[0])
        self.issue_dq(cta, n - 1, DV_WARPGROUP)
        cta.do.wait_full(n)
        self.matmuls.multiply(dv_acc, p, cta.smem.do.at[cta.do.slot(n)])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        cta.exchange.release(n - 1)
        return dq

    # --- warpgroup 1 -----------------------------------------------------------------------------

    def compute_dk(self, cta: PairedCta):
        plgpu.set_max_registers(self.blocks.compute_registers, action="increase")
        cta.exchange.open()
        accumulator = self.result_accumulator(self.problem.head_dim)
        plgpu.barrier_wait(cta.bars.k_full)
        dk = pl.run_scoped(functools.partial(self.loop_over_dk, cta), accumulator)
        self.last_dq(cta, DK_WARPGROUP)
        self.meet(cta)
        staging = cta.smem.k.at[0]
        out = rows_of(cta.dk, cta.keys, staging)
        self.store(dk * self.problem.spec.scale, staging, out)

    def dk_step(self, cta: PairedCta, dk_acc, n):
        """Sends dS^T of the n-th tile, issues dK += dS^T Q, and adds dQ of the tile before."""
        cta.do.wait_full(n)
        run = functools.partial(self.dk_matmuls, cta, dk_acc, n)
        dq = pl.run_scoped(run, self.score_accumulator, self.dq_accumulator(DK_WARPGROUP))
        self.add_dq(cta, n - 1, DK_WARPGROUP, dq)

    def dk_matmuls(self, cta: PairedCta, dk_acc, n, dp_acc, dq_acc):
        """Returns dQ of the tile before; dK ends during the next tile."""
        cta = dataclasses.replace(cta.anew(), dq_acc=dq_acc)
        ds = self.score_gradients(cta, n, dp_acc)
        cta.exchange.send(n, ds[0])
        if not self.drops_twice:
            cta.q.wait_full(n)
        self.issue_dq(cta, n - 1, DK_WARPGROUP)
        self.matmuls.multiply(dk_acc, ds, cta.smem.q.at[cta.q.slot(n)])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        cta.exchange.release(n - 1)
        return dq

    def handed(self, cta: PairedCta, n):
        return cta.exchange.probabilities(n).astype(jnp.float32)

    # --- dQ --------------------------------------------------------------------------------------

    def dq_accumulator(self, warpgroup: int):
        """Accumulator of a warpgroup's part of dQ."""
        columns = dq_columns(self.problem.head_dim, warpgroup)[1]
        return plgpu.ACC((self.blocks.block_q, columns), jnp.float32)

    def issue_dq(self, cta: PairedCta, n, warpgroup: int):
        """Issues dQ = dS K of the n-th tile, two wgmmas; for n = -1, of what lies there."""
        wait = cta.exchange.wait if warpgroup == DV_WARPGROUP else cta.exchange.receive
        pl.when(n >= 0)(lambda: wait(n))
        first, columns = dq_columns(self.problem.head_dim, warpgroup)
        own, slot = cta.rank * cta.half + first, cta.exchange.slot(n)
        of = lambda rank: cta.smem.ds.at[slot, rank].transpose((1, 0))
        plgpu.wgmma(cta.dq_acc, of(cta.rank), cta.smem.k.at[:, pl.ds(own, columns)])
        plgpu.wgmma(cta.dq_acc, of(1 - cta.rank), cta.smem.k_other.at[:, pl.ds(first, columns)])

    def add_dq(self, cta: PairedCta, n, warpgroup: int, dq):
        """Adds a warpgroup's part of dQ of the n-th tile; n = -1 is none.

        It is a part of the sums all the same, which is left alone: a branch around registers that
        wgmmas have written makes ptxas end those in flight (C7517).
        """
        first, columns = dq_columns(self.problem.head_dim, warpgroup)
        member, block = cta.q_tiles[lax.max(n, jnp.int32(0))]
        head = cta.kv_head * self.problem.group + member
        parts = pl.ds(first // 8, columns // 8)
        target = cta.dq.at[cta.batch, head, block, cta.rank, parts]
        if self.interpret:
            add_interpreted(cta.smem.dq[warpgroup], target, jnp.where(n >= 0, dq, 0.0))
        else:
            add_to_device(target, n >= 0, dq)

    def last_dq(self, cta: PairedCta, warpgroup: int):
        """Adds dQ of the last tile."""
        total = cta.q_tiles.total

        def run(dq_acc):
            self.issue_dq(dataclasses.replace(cta.anew(), dq_acc=dq_acc), total - 1, warpgroup)
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        dq = pl.run_scoped(run, self.dq_accumulator(warpgroup))
        cta.exchange.release(total - 1)
        self.add_dq(cta, total - 1, warpgroup, dq)

    def meet(self, cta: PairedCta):
        """Waits for the other warpgroup, which has read K and V for the last time."""
        plgpu.barrier_arrive(cta.bars.met)
        plgpu.barrier_wait(cta.bars.met)


class PairedLoads(DkvLoads):
    """Loads of one CTA of a pair."""

    def __call__(self, cta: PairedCta):
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")

        self.load_k(cta)

        @pl.loop(jnp.int32(0), cta.q_tiles.total)
        def _(n):
            self.load_q(cta, n)
            pl.when(n == 0)(lambda: self.load_v(cta))
            self.load_do(cta, n)

        self.drain(cta)

    def load_k(self, cta: PairedCta):
        """Loads this CTA's keys, and its columns of the other's."""
        k, other = (x.at[0] for x in (cta.smem.k, cta.smem.k_other))
        plgpu.copy_gmem_to_smem(rows_of(cta.gmem.k, cta.keys, k), k, cta.bars.k_full)
        start = (cta.block * PAIR + 1 - cta.rank) * WARPGROUP_ROWS
        columns = pl.ds(cta.rank * cta.half, cta.half)
        keys = cta.gmem.k.at[cta.batch, pl.ds(start, WARPGROUP_ROWS), cta.kv_head, columns]
        plgpu.copy_gmem_to_smem(keys, other, cta.bars.k_full)

    def load_v(self, cta: PairedCta):
        v = cta.smem.v.at[0]
        plgpu.copy_gmem_to_smem(rows_of(cta.gmem.v, cta.keys, v), v, cta.bars.v_full)

    def load(self, ring: Ring, n, source, buffer, part=()):
        slot, shared = ring.slot(n), CLUSTER_AXIS if self.blocks.multicast else None
        target, full = buffer.at[(slot, *part)], ring.full.at[slot]
        plgpu.copy_gmem_to_smem(source, target, full, collective_axes=shared)


# --- Sums of dQ -----------------------------------------------------------------------------------


def sums_shape(problem: Problem) -> tuple[int, ...]:
    """Returns the shape of the sums: by batch entry, head, tile of 64 queries, rank, and part."""
    tiles = pl.cdiv(problem.q_len, WARPGROUP_ROWS)
    columns = dq_part(problem.head_dim // PAIR)
    return problem.batch, problem.q_heads, tiles, PAIR, *columns


def in_order(problem: Problem, sums):
    """Returns dQ [B, T up to whole tiles, N, D] in the problem's dtype from the sums."""
    # A thread has rows r and r + 8 of its warp's sixteen, and two columns of eight.
    batch, heads, tiles, *_ = sums.shape
    sums = (sums * problem.spec.scale).astype(problem.dtype)
    sums = sums.reshape(batch, heads, tiles, problem.head_dim // 8, 4, 8, 4, 2, 2)
    sums = sums.transpose(0, 2, 4, 7, 5, 1, 3, 6, 8)  # warp, half, row; column
    return sums.reshape(batch, tiles * WARPGROUP_ROWS, heads, problem.head_dim)


def add_interpreted(buffer, target, dq):
    """Adds a part through shared memory; f32[64, columns]."""
    groups = dq.shape[1] // 8
    by_thread = dq.reshape(4, 2, 8, groups, 4, 2).transpose(3, 0, 2, 4, 1, 5)
    buffer[...] = by_thread.reshape(buffer.shape)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target, reduction_op="add")
    plgpu.wait_smem_to_gmem(0)


def add_to_device(target, there, dq):
    """Adds a part from registers, f32[64, columns], where `there` is true."""
    arguments = plgpu.RefType(), plgpu.Layout.WG_SPLAT, inline.WGMMA
    run = plgpu.inline_mgpu(arg_types=arguments)(_add_body)
    run(target, there.astype(jnp.int32), dq)


def _add_body(_, target, there, dq):
    """Adds four elements of each thread at a time."""
    i64, columns = ir.IntegerType.get_signless(64), {}
    for index, row, column in inline.coordinates(dq.shape, dq.layout):
        columns.setdefault(column, {})[row] = dq.registers[index]
    out = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(target))
    out = arith.addi(out, arith.extui(i64, arith.muli(cluster.thread(), i32_constant(16))))
    for column, rows in columns.items():
        values = [inline.at(rows[row], e) for row in sorted(rows) for e in range(2)]
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [out, splat(there), *values],
            "{ .reg .pred p; setp.ne.s32 p, $1, 0;"
            f" @p red.relaxed.gpu.global.add.v4.f32 [$0 + {column // 8 * WARPGROUP * 16}],"
            " {$2, $3, $4, $5}; }",
            "l,r,f,f,f,f",
            has_side_effects=True,
        )


def backward_paired(
    problem: Problem,
    blocks: PairedBlocks,
    operands: Operands,
    arrays: BackwardArrays,
    interpret: bool,
):
    """Launches the kernel.

    Args:
        problem: a problem with the head dims of `paired_problem`.
        blocks: tile sizes.
        operands: operands of the call.
        arrays: arrays that a backward kernel reads.
        interpret: run by the interpreter.

    Returns:
        (dq, dk, dv): in the dtypes and shapes of `arrays`, but dq is as wide as the kernel runs it.
    """
    kernel = PairedKernel(problem, blocks, interpret)
    given = arrays.for_rows(problem, operands, 1, (blocks.block_q, blocks.block_pair))
    made = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.k, arrays.v)]
    if interpret:
        places = problem.batch, problem.kv_heads, kernel.grid["kv"], blocks.ds_stages, PAIR
        made.append(stand_in(*places, dtype=problem.dtype))

    def run(refs):
        dq, *out = refs
        call = launch(
            functools.partial(kernel.run, dq),
            out=tuple(made),
            scratch=paired_scratch(problem, blocks, arrays, interpret),
            grid=kernel.grid,
            cluster=pipeline.cluster_axes(PAIR),
            threads=WARPGROUPS + 1,
            name="flash_pallas_backward_paired",
            interpret=interpret,
        )
        for ref, x in zip(out, call(given), strict=False):
            ref[...] = x

    (cleared,) = zeros([sums_shape(problem)], interpret)
    empty = [jnp.zeros(x.shape, x.dtype) for x in made[:2]]  # XLA drops them
    dq, dk, dv = pl.run_state(run)((cleared, *empty))
    return in_order(problem, dq), dk, dv
