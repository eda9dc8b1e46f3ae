"""The decode kernel's tiles with queries as columns: for a few of them, 8 or 16.

Keys are the rows, 64 at a time as wgmma wants them, and nothing is computed for queries that do not
exist. At head dim 128 the compute warpgroup issues 154 instructions for a block of 64 keys and 8
queries, and holds 53 registers; with the 64 rows of rows.py it issues 313.

P^T is the right operand of its matmul and lies in shared memory. Up to head dim 256 PV of a block
overlaps with QK^T of the next, and a cache in eight bits is the left operand of both matmuls, which
may lie in registers: the compute warpgroup makes it float16, which holds every int8 and
float8_e4m3fn and takes the fewest instructions to make. Wider blocks the producer has widened.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.ptx import draft_bits, inline, inline_columns, modifiers
from ...gpu.ptx.eight_bit_tiles import key_rows, value_of, value_rows
from ...gpu.ptx.scaled_rows import load_scaled
from ..common.pipeline import swizzles
from .consumer import Consumer, Folded, QueryFragments
from .plan import DecodeCta, Keys

LEAST_SCALE = 2.0**-100  # of pages of V: smaller ones are as this one to float16 weights
# In float16 weights are at most 2**14 and not 1, so that those of 2**-28 are rounded as 1 is.
WEIGHT_BITS = 14.0


def per_column(x, shape):
    """Broadcasts one value per column, or one for all, over a tile."""
    return lax.broadcast_in_dim(x, shape, (1,) * x.ndim)


class ColumnConsumer(Consumer):
    """Consumer that computes S^T = K Q^T and O^T = V^T P^T; per-query values lie in inline.COLS."""

    @property
    def output_shape(self) -> tuple[int, int]:
        """Shape of the accumulator of O^T: [columns of V, queries]."""
        return self.plan.head_dims[1], self.plan.tile_rows

    @property
    def weight_bits(self) -> float:
        """Base-2 logarithm of the largest weight."""
        in_float16 = self.plan.matmuls.operand_dtype == jnp.float16
        return WEIGHT_BITS if in_float16 and self.plan.problem.quantised else 0.0

    def load_q(self, cta: DecodeCta):
        """Loads the Q tile; see Consumer. Where keys become float16, so do queries, scaled."""
        if not self.plan.in_registers:
            super().load_q(cta)
            return
        source = self.plan.of_entry(cta, cta.gmem.q)
        packed, swizzle = self.plan.packed(cta.tile), self.plan.q_swizzle(cta.gmem)
        load_scaled(packed, source, cta.smem.q, cta.smem.q_scale, swizzle)
        plgpu.commit_smem()

    def scales(self, cta: DecodeCta) -> tuple:
        """Returns (scale of QK^T, scale of V); each may be None."""
        k_scale, v_scale = super().scales(cta)
        if self.plan.in_registers:
            q_scale = plgpu.load(cta.smem.q_scale, layout=inline.COLS)
            k_scale = q_scale if k_scale is None else q_scale * k_scale
        return k_scale, v_scale

    def settle(self, cta: DecodeCta, keys: Keys):
        """Waits for the blocks that were guessed in vain, of V too; see Consumer.

        Those of a cache that the producer widens never come here.
        """
        if self.plan.in_memory:
            return

        def wait(n, _):
            cta.k.wait_full(n)
            if not self.plan.shares:
                self.plan.where_v_has(n, lambda: cta.v.wait_full(n))

        lax.fori_loop(keys.stop, self.plan.guessed(cta), wait, None)

    def start(self, cta: DecodeCta, keys: Keys) -> Folded:
        """Returns the state before any key, with a running sum for every element of a block."""
        columns = self.plan.tile_rows
        sums = jnp.zeros((self.plan.blocks.block_kv, columns), jnp.float32)
        return Folded(
            plgpu.layout_cast(jnp.full((columns,), -jnp.inf, jnp.float32), inline.COLS),
            plgpu.layout_cast(sums, inline.WGMMA),
            jnp.float32(LEAST_SCALE) if self.plan.page_scales else None,
        )

    def scaled_weights(self, p, scales: list, unit):
        """Scales the weights of a block by its scales of V, in units of the largest so far.

        Returns:
            (weights, the former unit in the new one, the new unit).
        """
        largest = functools.reduce(jnp.maximum, map(jnp.abs, scales), unit)
        inverse = 1.0 / largest
        scaled = [scale * inverse for scale in scales]
        return inline_columns.scale_rows(p, scaled, self.plan.interpret), unit * inverse, largest

    def step(
        self,
        cta: DecodeCta,
        keys: Keys,
        held: QueryFragments,
        o_acc,
        use,
        folded: Folded,
        *,
        masked: bool,
    ):
        """Folds in the block of this use: QK^T, softmax and PV.

        Operands in shared memory leave PV in flight, so that it overlaps with QK^T of the next
        block; above head dim 256 the slot is given back at once, as there are few.
        """
        (s, v_scales), unit = self.qk(cta, use), folded.unit
        first = keys.block(use) * self.plan.blocks.block_kv
        x, log2_scale = self.logits(held, s, first, masked)
        most = inline_columns.reduce_rows("max", x, cta.smem.across, self.plan.interpret)
        m = jnp.maximum(folded.m, most)
        # A row that has seen no key yet gets weights of exp2(-inf), not NaN.
        finite = jnp.where(m == -jnp.inf, jnp.zeros_like(m), m) if masked else m
        alpha = jnp.exp2((folded.m - finite) * log2_scale)
        # Scaled after the difference: that is exact where it matters, however large logits are.
        p = jnp.exp2((x - per_column(finite, x.shape)) * log2_scale + self.weight_bits)
        l = folded.l * per_column(alpha, p.shape) + p
        if v_scales is not None:
            p, shrink, unit = self.scaled_weights(p, v_scales, unit)
            alpha = alpha * shrink
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        o_acc[...] = o * per_column(alpha, o.shape)
        # Waiting for V after P is stored is better where nothing is to be cleared.
        if masked:
            self.clear_values(cta, keys, use)
        (weights,) = self.plan.matmuls.split(p)
        swizzle = self.plan.p_swizzle(*self.plan.copied(cta.gmem.v))
        inline_columns.store_transposed(weights, cta.smem.p, swizzle, self.plan.interpret)
        plgpu.commit_smem()
        if not masked and not self.plan.shares:
            cta.v.wait_full(use)
        self.multiply_values(cta, use, o_acc)
        return Folded(m, l, unit)

    def qk(self, cta: DecodeCta, use) -> tuple:
        """Returns (S^T, scales of V) of a block; its K and the V before have then been read.

        S^T is scaled where pages have scales; those of V, else None, come next to K's.
        """
        cta.k.wait_full(use)
        k_scales, v_scales = None, None
        if self.plan.page_scales:
            slot = cta.k.slot(use)
            k_scales, v_scales = (self.page_scales(cta, kind, slot) for kind in range(2))

        def matmul(s_acc):
            k = cta.smem.k.at[self.plan.slot(cta.k, use)]
            if self.plan.in_registers:
                k = (key_rows(k, self.plan.raw_swizzle(0), self.plan.interpret),)
                cta.k.release(use)
            self.plan.matmuls.multiply(s_acc, k, cta.smem.q, transposed=True)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        shape = (self.plan.blocks.block_kv, self.plan.tile_rows)
        s = pl.run_scoped(matmul, plgpu.ACC(shape, jnp.float32))
        if not self.plan.in_registers and not self.plan.shares:
            cta.k.release(use)
        if self.plan.defers:
            pl.when(use > 0)(lambda: cta.v.release(use - 1))
        if k_scales is not None:
            s = inline_columns.scale_rows(s, k_scales, self.plan.interpret)
        return s, v_scales

    def clear_values(self, cta: DecodeCta, keys: Keys, use):
        """Waits for V and zeroes the padding of the block; int8 has no NaN and stays as it is."""
        if not self.plan.shares:
            cta.v.wait_full(use)
        if self.plan.problem.kv_dtype.name == "int8":
            return
        if self.plan.in_registers:
            swizzle = self.plan.raw_swizzle(1)
        else:
            swizzle = self.plan.v_swizzle(*self.plan.copied(cta.gmem.v))
        v = cta.smem.v.at[cta.v.slot(use)]
        first = keys.block(use) * self.plan.blocks.block_kv
        self.plan.clear_padding(v, keys, first, swizzle)

    def multiply_values(self, cta: DecodeCta, use, o_acc):
        """Issues O^T += V^T P^T of a block; waits for it if V is an operand in registers."""
        v, matmuls = cta.smem.v.at[self.plan.slot(cta.v, use)], self.plan.matmuls
        if not self.plan.in_registers:
            if self.plan.shares and v.shape[1] > self.plan.part_columns:
                v = v.at[:, pl.ds(0, self.plan.part_columns)]
            matmuls.multiply(o_acc, v.transpose((1, 0)), cta.smem.p, transposed=True)
            if not self.plan.defers:
                plgpu.wgmma_wait(0)
                cta.v.release(use)
            return
        values = value_rows(v, self.plan.raw_swizzle(1), self.plan.interpret)
        cta.v.release(use)
        matmuls.multiply(o_acc, (values,), cta.smem.p, transposed=True)
        plgpu.wgmma_wait(0)  # for the registers that it reads

    def logits(self, held: QueryFragments, s, first, masked: bool):
        """Returns (x, log2_scale) of matmuls s, with keys from `first` on; -inf where hidden."""
        position = modifiers.positions(s.shape, 0, first, self.plan.interpret)
        if held.k_scale is not None:
            s = s * per_column(held.k_scale, s.shape)
        z = self.seen_logits(held, s, first, lambda: position, per_column)
        x = z.x
        if masked and held.drafts is not None:
            if held.first is not None:
                x = jnp.where(position >= per_column(held.first, s.shape), x, -jnp.inf)
            x = draft_bits.hide(x, held.drafts, first, 0, self.plan.interpret)
        elif masked:
            keep = position <= per_column(held.last, s.shape)
            if held.first is not None:
                keep = keep & (position >= per_column(held.first, s.shape))
            x = jnp.where(keep, x, -jnp.inf)
        return x, z.log2_scale

    def output(self, cta: DecodeCta, keys: Keys, o_acc):
        """Waits for the last matmul, releases the last V if it is still held, and returns O^T."""
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        if self.plan.defers:
            pl.when(keys.stop > 0)(lambda: cta.v.release(keys.stop - 1))
        return o

    def store(self, cta: DecodeCta, held: QueryFragments, o, folded: Folded):
        """Divides by the sums and writes O, the log-sum-exp and its shift; see Consumer."""
        inline.warpgroup_barrier(self.plan.interpret)
        l = inline_columns.reduce_rows("add", folded.l, cta.smem.across, self.plan.interpret)
        # As if the largest weight were 1: the error of a logarithm grows with its size.
        unit = 2.0**-self.weight_bits
        inverse, lse, shift = self.finish(cta, folded.m, l if unit == 1.0 else l * unit)
        if unit != 1.0:
            inverse = inverse * unit
        v_scale = held.v_scale if folded.unit is None else folded.unit
        if v_scale is not None:
            inverse = inverse * v_scale
        o = (o * per_column(inverse, o.shape)).astype(cta.smem.o.dtype)
        swizzle = swizzles(cta.smem.o.shape[1], cta.smem.o.dtype)[0]
        order = value_of if self.plan.in_registers else None
        inline_columns.store_transposed(o, cta.smem.o, swizzle, self.plan.interpret, order)
        cta.smem.lse[...], cta.smem.shift[...] = lse, shift
        self.publish(cta, swizzle)
