"""The kernel of docs/internals/new-kernel.md, the largest logit of every query, and its test."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flash_pallas.backends.gpu import launch, score_tile
from flash_pallas.backends.gpu.ptx import inline
from flash_pallas.backends.hopper.common.auxiliary_inputs import AuxiliaryInputs, Place
from flash_pallas.backends.hopper.common.pipeline import Matmuls, Ring, fits, warpgroup_rows
from flash_pallas.core.mask import Limits, Mask
from flash_pallas.core.problem import AttentionSpec, Operands, Problem, describe

from .dense_reference import Dense, forward
from .interpreter import race_checked

WARPGROUPS, ROWS, BLOCK_KV, STAGES = 2, launch.WARPGROUP_ROWS, 128, 2
BLOCK_Q = WARPGROUPS * ROWS
Smem = collections.namedtuple("Smem", "q k aux q_full ring")
Cta = collections.namedtuple("Cta", "gmem out smem place kv_tiles")


@pytest.mark.thorough(always=["bias"])
@dataclasses.dataclass(frozen=True)
class MaxLogit:
    """One launch of the kernel; the methods are the phases of a CTA."""

    problem: Problem
    interpret: bool = False
    matmuls = property(lambda self: Matmuls(self.problem.dtype, self.interpret))
    aux = property(lambda self: AuxiliaryInputs(self.problem, q_axis=0))

    def refusal(self) -> str | None:
        """Returns why the kernel cannot run the problem, or None."""
        if self.problem.head_dim % 16:
            return f"takes multiples of 16 as head dim, not {self.problem.head_dim}: pad q and k"
        if {"q_offset", "kv_lengths", "block_lists"} & self.problem.features:
            return "takes no array that says which tiles are read"
        return None if fits(self.scratch()) else "finds no room in shared memory"

    def scratch(self) -> Smem:
        """Declares shared memory and barriers; K and `aux`, which travels with it, are a ring."""
        return Smem(
            q=self.matmuls.buffer((BLOCK_Q, self.problem.head_dim)),
            k=self.matmuls.buffer((STAGES, BLOCK_KV, self.problem.head_dim)),
            aux=self.aux.buffers(STAGES, BLOCK_Q, BLOCK_KV),
            q_full=plgpu.Barrier(),
            ring=Ring.declare(STAGES, copies=1 + self.aux.copies, readers=WARPGROUPS),
        )

    def run(self, operands: Operands):
        """Launches the kernel; returns f32[B, N, T], -inf for queries that see no key."""
        problem, q_tiles = self.problem, pl.cdiv(self.problem.q_len, BLOCK_Q)
        q, k = (self.matmuls.operand(x, problem.head_dim) for x in (operands.q, operands.k))
        out = launch.float32((problem.batch, problem.q_heads, q_tiles * BLOCK_Q))
        grid = {"q_tile": q_tiles, "head": problem.q_heads, "batch": problem.batch}
        options = {"threads": WARPGROUPS + 1, "name": "max_logit", "interpret": self.interpret}
        call = launch.launch(self, out=out, scratch=(self.scratch(),), grid=grid, **options)
        return call((q, k, self.aux.arrays(operands)))[:, :, : problem.q_len]

    def __call__(self, gmem, out, smem: Smem):
        batch, head, tile, wg = map(lax.axis_index, ("batch", "head", "q_tile", "wg"))
        place = Place(batch, head, tile * BLOCK_Q, 0, BLOCK_Q, BLOCK_KV)
        mask, position = self.problem.spec.mask, place.row_start + self.problem.spec.q_offset
        kv_tiles = mask.kv_blocks(position, BLOCK_Q, self.problem.kv_len, BLOCK_KV)
        cta = Cta(gmem, out, smem, place, kv_tiles)
        pl.when(wg < WARPGROUPS)(lambda: self.consume(cta, warpgroup_rows(wg)))
        pl.when(wg == WARPGROUPS)(lambda: self.produce(cta))

    def produce(self, cta: Cta):
        """Loads Q, then K tile by tile with what modifiers read: the producer warpgroup."""
        (q, k, aux), smem, ring, place = cta.gmem, cta.smem, cta.smem.ring, cta.place
        queries = place.batch, pl.ds(place.row_start, BLOCK_Q), place.head
        plgpu.copy_gmem_to_smem(q.at[queries], smem.q, smem.q_full)
        kv_head = lax.div(place.head, jnp.int32(self.problem.group))

        def load(n):
            slot, start = ring.slot(n), (cta.kv_tiles.start + n) * BLOCK_KV
            keys, full = (place.batch, pl.ds(start, BLOCK_KV), kv_head), ring.full.at[slot]
            ring.wait_empty(n)
            plgpu.copy_gmem_to_smem(k.at[keys], smem.k.at[slot], full)
            self.aux.load(aux, smem.aux, slot, full, place._replace(column_start=start))

        total = jnp.int32(cta.kv_tiles.stop - cta.kv_tiles.start)
        pl.loop(jnp.int32(0), total)(load)
        ring.drain(total)

    def consume(self, cta: Cta, own):
        """Finds the row maxima of 64 queries: a compute warpgroup."""
        place = cta.place._replace(row_start=cta.place.row_start + own.start, rows=ROWS)
        fragments = self.aux.fragments(cta.gmem[2], place)
        most = plgpu.layout_cast(jnp.full(ROWS, -jnp.inf, jnp.float32), inline.ROWS)
        plgpu.barrier_wait(cta.smem.q_full)
        for low, high, masked in cta.kv_tiles.zones():
            step = functools.partial(self.step, cta, own, fragments, masked)
            most = lax.fori_loop(jnp.int32(low), jnp.int32(high), step, most)
        cta.out[place.batch, place.head, pl.ds(place.row_start, ROWS)] = most * self.problem.unit

    def step(self, cta: Cta, own, fragments, masked: bool, kv_tile, most):
        """Raises the row maxima to those of one more tile of K."""
        spec, smem, n = self.problem.spec, cta.smem, kv_tile - cta.kv_tiles.start
        slot, q_start = smem.ring.slot(n), cta.place.row_start + own.start + spec.q_offset
        shape, kv_start = (ROWS, BLOCK_KV), kv_tile * BLOCK_KV
        tile = score_tile.RegisterTile(q_start, kv_start, shape, interpret=self.interpret)
        limits = tile.limits(spec.mask, self.problem.kv_len) if masked else Limits()
        smem.ring.wait_full(n)
        s = self.matmuls.scores(smem.q.at[own], smem.k.at[slot])  # (1) S = Q K^T
        inputs = self.aux.inputs(fragments, smem.aux, slot, shape, own)
        x = score_tile.logits(spec, tile, s, inputs, limits).x  # scaled, modified and masked
        smem.ring.release(n)
        return jnp.maximum(most, x.max(axis=1))


SHAPES = (2, 150, 4, 64), (2, 300, 2, 64), (1, 4, 150, 300)  # of q, k and bias: no whole tiles
SPECS = {
    "causal_and_rows_without_keys": AttentionSpec(0.125, Mask(right=0), q_offset=-20),
    "window_and_softcap": AttentionSpec(0.125, Mask(40, 10), softcap=5.0),
    "bias": AttentionSpec(0.125),
}


@pytest.mark.interpret
@pytest.mark.parametrize("case", SPECS)
def test_the_largest_logits(case):
    spec, mask, rng = SPECS[case], SPECS[case].mask, np.random.default_rng(0)
    q, k, bias = (jnp.asarray(rng.uniform(size=x), jnp.bfloat16) for x in SHAPES)
    operands = Operands(q, -k, k, bias=bias if case == "bias" else None)
    kernel = MaxLogit(describe(operands, spec))
    jax.jit(kernel.run).trace(operands).lower(lowering_platforms=("cuda",))
    with race_checked():
        found = dataclasses.replace(kernel, interpret=True).run(operands)
    q, k, bias = (x if x is None else np.float64(x) for x in (q, operands.k, operands.bias))
    i, j = np.arange(150)[None] + spec.q_offset, np.arange(300)[None]
    ahead = j[:, None] - i[..., None]
    seen = (mask.left is None or ahead >= -mask.left) & (mask.right is None or ahead <= mask.right)
    exact = forward(Dense(q, k, k, seen, 0.125, i, j, bias, softcap=spec.softcap))
    np.testing.assert_allclose(found, exact.most, rtol=2e-5, atol=2e-5)
    wide = MaxLogit(dataclasses.replace(kernel.problem, head_dim=72))
    assert kernel.refusal() is None and "not 72: pad q and k" in str(wide.refusal())
