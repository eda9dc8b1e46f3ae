"""The producer warpgroup of the fused backward: a warp loads, another adds dQ to device memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .....core.problem import Problem
from ...common import cluster
from ...common.auxiliary_inputs import AuxiliaryInputs
from ...common.pipeline import Ring, rows_of
from ...common.zero_padding import WARP, WARPGROUP, Loader, Padding
from .cta import FusedCta
from .tiles import WARPGROUPS, FusedBlocks, swizzles_of_k_and_v

LOAD_WARP, STORE_WARP = 0, 1


@dataclasses.dataclass(frozen=True)
class FusedProducer:
    """Copies of a CTA between device and shared memory, except those of dK and dV."""

    problem: Problem
    blocks: FusedBlocks
    interpret: bool

    def __call__(self, cta: FusedCta):
        """Runs the two warps of the producer over all tiles of this CTA."""
        plgpu.set_max_registers(self.blocks.producer_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == LOAD_WARP)(lambda: self.load(cta))
            pl.when(warp == STORE_WARP)(lambda: self.store_dq(cta))

    def load(self, cta: FusedCta):
        """Issues all loads of this CTA, then waits for the release of their slots."""
        cta.visit(self.load_walk)
        cta.q.drain(cta.tiles)
        cta.do.drain(cta.tiles)
        if cta.turns is not None:
            cta.kv.drain(cta.turns.count)

    def load_walk(self, cta: FusedCta):
        """Loads K and V once, then Q, LSE, dO and delta of every Q tile."""
        cta.kv.wait_empty(cta.turn)
        self.load_kv(cta)

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            place = self.place(cta, n)
            self.load_q(cta, n, place)
            self.load_do(cta, n, place)

    def load_kv(self, cta: FusedCta):
        """Loads K and V of this KV block."""
        slot = cta.kv_slot
        keys = (cta.keys.batch, pl.ds(cta.keys.start, self.blocks.block_kv), cta.keys.kv_head)
        block = lax.div(cta.keys.start, jnp.int32(self.blocks.block_kv))
        load_k, load_v = self.loaders(cta, cta.gmem.kv_padding)
        at = functools.partial(rows_of, tile=cta.smem.k)  # Q and dO are as wide
        k, v, full = cta.smem.k.at[slot], cta.smem.v.at[slot], cta.bars.kv_full.at[slot]
        load_k(at(cta.gmem.k, keys), k, full, cta.keys.batch, block)
        load_v(at(cta.gmem.v, keys), v, full, cta.keys.batch, block)

    def place(self, cta: FusedCta, n):
        """Returns (query head, rows, query block) of the n-th tile."""
        head, rows = cta.query_tile(n, self.blocks.block_q)
        return head, rows, cta.walk[n][1]

    def load_q(self, cta: FusedCta, n, place):
        """Loads Q of the n-th tile, which has this place, with its LSE and side inputs."""
        head, rows, block = place
        load, slot = self.loaders(cta, cta.gmem.q_padding)[0], cta.q.slot(n)
        source = rows_of(cta.gmem.q, (cta.keys.batch, rows, head), cta.smem.k)
        full = cta.bars.q_full.at[slot]
        cta.q.wait_empty(n)
        load(source, cta.smem.q.at[slot], full, cta.keys.batch, block)
        lse = cta.gmem.lse_log2.at[cta.keys.batch, head, rows]
        plgpu.copy_gmem_to_smem(lse, cta.smem.lse.at[slot], full)
        side = AuxiliaryInputs(self.problem, q_axis=1)
        if side.copies:
            where = cta.place(n, cta.keys.start, self.blocks.block_kv, self.blocks.block_q)
            shared = cluster.multicast(self.blocks.bias_cluster)
            side.load(cta.gmem.side, cta.smem.side, slot, full, where, shared)

    def load_do(self, cta: FusedCta, n, place):
        """Loads dO and delta of the n-th tile, which has this place."""
        head, rows, block = place
        load, slot = self.loaders(cta, cta.gmem.q_padding)[1], cta.do.slot(n)
        source = rows_of(cta.gmem.do, (cta.keys.batch, rows, head), cta.smem.k)
        cta.do.wait_empty(n)
        full = cta.bars.do_full.at[slot]
        load(source, cta.smem.do.at[slot], full, cta.keys.batch, block)
        delta = cta.gmem.delta.at[cta.keys.batch, head, rows]
        plgpu.copy_gmem_to_smem(delta, cta.smem.delta.at[slot], cta.bars.delta_full.at[slot])

    def loaders(self, cta: FusedCta, padding: Padding | None) -> list[Loader]:
        """Returns the loaders of Q and K, and of dO and V; their tiles may differ in swizzle."""
        swizzles = swizzles_of_k_and_v(self.problem, self.blocks, cta.gmem)
        threads = WARP if self.blocks.producer else WARPGROUP
        make = lambda swizzle: Loader(padding, cta.bars.arrived, swizzle, self.interpret, threads)
        return list(map(make, swizzles))

    def store_dq(self, cta: FusedCta):
        """Adds each warpgroup's part of every dQ tile to the float32 buffer in device memory.

        It writes the parts instead where `Cta.adds` is false.
        """
        cta.visit(self.store_walk)
        plgpu.wait_smem_to_gmem(0)

    def store_walk(self, cta: FusedCta):
        """Adds the dQ tiles of one KV block."""

        @pl.loop(jnp.int32(0), cta.walk.total)
        def _(n):
            tile = cta.query_tile(n, self.blocks.block_q)
            if self.blocks.alternate:
                for wg in (1, 0):  # as they come
                    self.add_dq(cta, tile, wg)
                    self.give_back(cta, n, wg, 0)
            else:
                self.add_dq(cta, tile, 0)
                self.add_dq(cta, tile, 1)
                self.give_back(cta, n, 0, 1)
                self.give_back(cta, n, 1, 0)

    def add_dq(self, cta: FusedCta, tile, wg: int):
        """Waits for a warpgroup's part of a dQ tile and starts to add it."""
        plgpu.barrier_wait(cta.bars.dq_full.at[wg])
        target = cta.results.dq.at[cta.dq_part(tile, self.blocks, self.problem.head_dim, wg)]
        plgpu.copy_smem_to_gmem(cta.smem.dq.at[wg], target, reduction_op=cta.reduction)

    def give_back(self, cta: FusedCta, n, wg: int, in_flight: int):
        """Releases the dQ buffer once at most `in_flight` adds are still reading theirs."""
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        more = cta.count(n) + 1 < cta.tiles
        pl.when(more)(lambda: plgpu.barrier_arrive(cta.bars.dq_empty.at[wg]))


@dataclasses.dataclass(frozen=True)
class FusedInlineLoads:
    """Loads without a producer warpgroup, issued by the later of the two compute warpgroups.

    That warpgroup is the last to release a slot of Q or dO. It fills the slot at once, with the
    tile that is as many further on as there are slots.
    """

    producer: FusedProducer

    def start(self, cta: FusedCta) -> FusedCta:
        """Loads what the walk starts with; returns the CTA with rings that refill on release."""
        loads = cta.wg == WARPGROUPS - 1

        @pl.when(loads)
        def _():
            self.producer.load_kv(cta)
            for n in range(max(cta.q.slots, cta.do.slots)):
                for ring, load in self.rings(cta):
                    if n < ring.slots:
                        self.fill(cta, load, jnp.int32(n))

        def refilled(ring: Ring, load):
            fill = functools.partial(self.fill, cta, load)
            return ring._replace(refill=lambda n: pl.when(loads)(lambda: fill(n)))

        q, do = (refilled(*ring) for ring in self.rings(cta))
        return dataclasses.replace(cta, q=q, do=do)

    def rings(self, cta: FusedCta):
        """Returns each ring with the function that fills a slot of it."""
        return (cta.q, self.producer.load_q), (cta.do, self.producer.load_do)

    def fill(self, cta: FusedCta, load: Callable, n):
        """Loads the n-th tile, if there is one."""
        pl.when(n < cta.walk.total)(lambda: load(cta, n, self.producer.place(cta, n)))

    def end(self, cta: FusedCta):
        """Observes the releases that no later fill waited for."""

        @pl.when(cta.wg == WARPGROUPS - 1)
        def _():
            cta.q.drain(cta.walk.total)
            cta.do.drain(cta.walk.total)
