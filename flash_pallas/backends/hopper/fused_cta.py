"""What a CTA of the fused backward is made of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import integers as ints
from ...core.problem import Problem
from . import cluster
from .arrays import BackwardArrays
from .fused_blocks import FusedBlocks
from .memory import Ring, row_buffer, tile_buffer
from .products import Products
from .query_walk import QueryWalk
from .side_inputs import Place, SideInputs, Streamed

WARPGROUPS = 2  # that compute, 64 keys each


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    q: Any  # [stages, block_q, D]
    do: Any  # [do_stages, block_q, D]
    k: Any  # [kv_stages, block_kv, D]
    v: Any  # [kv_stages, block_kv, D]
    ds: Any  # [ds_stages, block_kv, block_q]
    dq: Any  # f32[dq parts, dq tile]
    lse: Any  # f32[stages, block_q]
    delta: Any  # f32[do_stages, block_q]
    side: Streamed  # with Q
    received: Any = None  # [rows, block_q]: parts of dS from the rest of a cluster
    arrived: Any = None  # an mbarrier, of what is received


class Barriers(NamedTuple):
    """mbarriers; those without a count below have one arrival."""

    kv_full: Any  # K and V
    kv_empty: Any  # with turns: each warpgroup, whose dK and dV have been read
    q_full: Any  # Q, lse and what modifiers read
    q_empty: Any  # each warpgroup
    do_full: Any
    do_empty: Any  # each warpgroup
    delta_full: Any
    met: Any  # each warpgroup
    ds_ready: Any  # where they alternate: one per slot, each warpgroup
    turn: Any  # where they alternate under the interpreter: one per warpgroup
    dq_full: Any  # one per warpgroup
    dq_empty: Any  # one per warpgroup
    arrived: Any = None  # a tile that has padding to be cleared
    summed_full: Any = None  # with bias_cluster: a slot of dS, each warpgroup
    summed_empty: Any = None  # and added up, by each CTA of the cluster
    receives: Any = None  # each CTA of the cluster


class Results(NamedTuple):
    """What launches write; None: not yet, or never."""

    dq: Any = None  # f32[B, T8, N, D] of some batch entries and heads: sums
    dbias: Any = None  # f32[Bb, Nb, S, T], up to whole tiles, sums; never without bias_cluster
    dk: Any = None  # [B, S8, K, D]; or, where parts of a walk are added up later,
    dv: Any = None  # f32[parts, B, S up to whole tiles, K, D]


class KeyBlock(NamedTuple):
    """What a CTA works on."""

    batch: Any
    kv_head: Any
    start: Any  # its first key
    shift: Any  # the walk's: which tile of queries comes first


class Turns(NamedTuple):
    """The key blocks that a CTA takes, one after the other, with as many tiles of queries each."""

    count: Any
    place: Callable[[Any], KeyBlock]  # of a number


@dataclasses.dataclass(frozen=True)
class Cta:
    """The refs and the place of one CTA, as one of its warpgroups sees them."""

    gmem: BackwardArrays
    results: Results
    adds: bool  # to dq; False: writes it
    smem: Smem
    bars: Barriers
    q: Ring
    do: Ring
    kv: Ring
    keys: KeyBlock
    walk: QueryWalk
    wg: Any
    turns: Turns | None = None  # where it takes several key blocks
    turn: Any = 0

    def visit(self, key_block: Callable[[Cta], None]):
        """Call it for every key block of this CTA, with this record as it is there."""
        if (turns := self.turns) is None:
            key_block(self)
        else:
            pl.loop(jnp.int32(0), turns.count)(lambda turn: key_block(self.at(turns, turn)))

    def at(self, turns: Turns, turn) -> Cta:
        """In one of its turns. Rings go on, tiles are counted anew."""
        keys = turns.place(turn)
        walk = dataclasses.replace(self.walk, shift=keys.shift)
        here = dataclasses.replace(self, turn=turn, keys=keys, walk=walk)
        rings = {name: getattr(self, name)._replace(before=here.before) for name in ("q", "do")}
        return dataclasses.replace(here, **rings)

    @property
    def before(self):
        """Tiles of the key blocks before this one."""
        return 0 if self.turns is None else self.turn * self.walk.total

    @property
    def tiles(self):
        """Of all its key blocks."""
        return self.walk.total if self.turns is None else self.turns.count * self.walk.total

    def count(self, n):
        """Which of all tiles the n-th of this key block is."""
        return n if self.turns is None else n + self.before

    @property
    def kv_slot(self):
        """Where K and V lie."""
        return self.kv.slot(self.turn)

    @property
    def sums(self) -> Ring:
        """The slots of dS as those see them who add up dS of a cluster."""
        bars, slots = self.bars, self.smem.ds.shape[0]
        return Ring(bars.summed_full, bars.summed_empty, slots, before=self.before)

    def anew(self) -> Cta:
        """With a warpgroup index from which nothing is hoisted.

        ptxas holds addresses and descriptors made from `wg` over the loop, and at head dim 64 they
        spill (36 bytes; 60 to 190 those of K and V).
        """
        return dataclasses.replace(self, wg=lax.optimization_barrier(self.wg))

    def apart(self) -> Cta:
        """With numbers of which nothing is shared with another loop.

        Addresses that two loops have in common are held over both: 28 bytes of spills at head dim
        64, which the first of them, the one that matters, loads again in every step.
        """
        opaque = lambda x: x if ints.is_static(x) else lax.optimization_barrier(x)
        keys = KeyBlock(*map(opaque, self.keys))
        names = ("start", "full_start", "full_stop", "stop", "q_offset")
        walk = dataclasses.replace(self.walk, **{n: opaque(getattr(self.walk, n)) for n in names})
        return dataclasses.replace(self.anew(), keys=keys, turn=opaque(self.turn), walk=walk)

    def query_tile(self, n, block_q: int):
        """(query head, rows) of the n-th tile of the walk."""
        head, block = self.walk[n]
        return self.keys.kv_head * self.walk.group + head, pl.ds(block * block_q, block_q)

    def place(self, n, kv_start, rows: int, block_q: int) -> Place:
        """Of the n-th tile of the walk against some keys."""
        head, queries = self.query_tile(n, block_q)
        return Place(self.keys.batch, head, kv_start, queries.start, rows, block_q)

    def dq_part(self, tile, blocks: FusedBlocks, head_dim: int, wg):
        """Where a warpgroup's part of a dQ tile, a `query_tile`, lies in the buffer."""
        (head, rows), part, batch = tile, blocks.dq_tile(head_dim), self.keys.batch
        if (first := self.gmem.origin) is not None:
            batch, head = batch - first[0], head - first[1] * self.walk.group
        if blocks.dq_by_rows:
            return batch, pl.ds(rows.start + wg * part[0], part[0]), head, slice(None)
        return batch, rows, head, pl.ds(wg * part[1], part[1])

    @property
    def reduction(self) -> Literal["add"] | None:
        """What copies to dq do with what is there."""
        return "add" if self.adds else None

    def meet(self):
        """Wait for the other warpgroup."""
        plgpu.barrier_arrive(self.bars.met)
        plgpu.barrier_wait(self.bars.met)


def scratch(
    problem: Problem, blocks: FusedBlocks, arrays: BackwardArrays, interpret: bool
) -> tuple[Smem, Barriers]:
    """What to allocate."""
    head_dim, dtype = problem.head_dim, problem.dtype
    block_q, block_kv = blocks.block_q, blocks.block_kv
    bar, side = plgpu.Barrier, SideInputs(problem, q_axis=1)
    of_k, of_v = swizzles_of_k_and_v(problem, blocks, arrays)
    received = None
    if blocks.sums_bias:
        received = tile_buffer((blocks.received_rows, block_q), dtype, of_k)
        if interpret:  # where whole tiles of float32 are added
            received = plgpu.SMEM((block_kv, block_q), jnp.float32)
    smem = Smem(
        q=tile_buffer((blocks.stages, block_q, head_dim), dtype, of_k),
        do=tile_buffer((blocks.do_stages, block_q, head_dim), dtype, of_v),
        k=tile_buffer((blocks.kv_stages, block_kv, head_dim), dtype, of_k),
        v=tile_buffer((blocks.kv_stages, block_kv, head_dim), dtype, of_v),
        ds=tile_buffer((blocks.ds_stages, block_kv, block_q), dtype, of_k),
        dq=tile_buffer((WARPGROUPS, *blocks.dq_tile(head_dim)), jnp.float32),
        lse=row_buffer((blocks.stages, block_q)),
        delta=row_buffer((blocks.do_stages, block_q)),
        side=side.buffers(blocks.stages, block_kv, block_q),
        received=received,
        arrived=plgpu.SMEM((2,), jnp.int32) if blocks.sums_bias else None,
    )
    of_cluster = functools.partial(cluster.empty_barrier, blocks.bias_cluster)
    sums = blocks.sums_bias
    bars = Barriers(
        kv_full=bar(num_arrivals=2, num_barriers=blocks.kv_stages),
        kv_empty=(
            bar(num_arrivals=WARPGROUPS, num_barriers=blocks.kv_stages)
            if blocks.takes_turns
            else None
        ),
        q_full=bar(num_arrivals=2 + side.copies, num_barriers=blocks.stages),
        q_empty=cluster.empty_barrier(blocks.bias_cluster, WARPGROUPS, blocks.stages),
        do_full=bar(num_barriers=blocks.do_stages),
        do_empty=bar(num_arrivals=WARPGROUPS, num_barriers=blocks.do_stages),
        delta_full=bar(num_barriers=blocks.do_stages),
        met=bar(num_arrivals=WARPGROUPS),
        ds_ready=(
            bar(num_arrivals=WARPGROUPS, num_barriers=blocks.ds_stages)
            if blocks.alternate
            else None
        ),
        turn=bar(num_barriers=WARPGROUPS) if blocks.alternate and interpret else None,
        dq_full=bar(num_barriers=WARPGROUPS) if blocks.producer else None,
        dq_empty=bar(num_barriers=WARPGROUPS) if blocks.producer else None,
        arrived=bar() if {"q_lengths", "kv_lengths", "kv_segments"} & problem.features else None,
        summed_full=bar(num_arrivals=WARPGROUPS, num_barriers=blocks.ds_stages) if sums else None,
        summed_empty=of_cluster(1, blocks.ds_stages) if sums else None,
        receives=of_cluster(1, 1) if sums else None,
    )
    return smem, bars


def swizzles_of_k_and_v(problem: Problem, blocks: FusedBlocks, arrays: BackwardArrays):
    """Bytes, of Q and of dO too. K is an operand beside Q and beside dS, V beside dO alone.

    Of K's columns a warpgroup multiplies those that it has of dQ.
    """
    products, columns = Products(problem.dtype), blocks.dq_tile(problem.head_dim)[1]
    of_k = products.swizzle(problem.head_dim, arrays.k, summed_rows=columns)
    return of_k, products.swizzle(problem.head_dim, arrays.v)
