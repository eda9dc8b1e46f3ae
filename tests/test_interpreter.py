"""The extended interpreter runs a pipelined kernel, and notices each way of breaking it."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flash_pallas.backends.gpu.ptx import inline

from . import interpreter_callbacks
from .interpreter import INTERPRET, DeadlockError, KernelFault, RaceError, race_checked

pytestmark = pytest.mark.interpret

TILE, STEPS, STAGES = 64, 4, 2


def _consume(fault, o_ref, x_s, w_s, bias_s, o_s, full, empty):
    """Computes out += (x[j] @ w[j] as registers) @ w[j] + bias[j], one ring slot per j."""

    def step(j, total):
        slot = lax.rem(j, jnp.int32(STAGES))
        if fault != "missing full wait":
            plgpu.barrier_wait(full.at[slot])

        # An ordinary load of the slot; TMA overwrites it once the slot is released.
        bias = plgpu.load(bias_s.at[slot], layout=plgpu.Layout.WGMMA.reduce(1))

        def product(acc):
            plgpu.wgmma(acc, x_s.at[slot], w_s.at[slot])
            return plgpu.wgmma_accumulator_load(acc, wait_n=0)

        xw = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))

        def square(acc):
            acc[...] = total
            plgpu.wgmma(acc, xw.astype(jnp.float16), w_s.at[slot])
            if fault == "early accumulator read":
                plgpu.wgmma(acc, xw.astype(jnp.float16), w_s.at[slot])
                return plgpu.wgmma_accumulator_load(acc, wait_n=1)
            if fault == "release before wgmma_wait":
                plgpu.barrier_arrive(empty.at[slot])
            plgpu.wgmma_wait(0)
            return acc[...]

        total = pl.run_scoped(square, plgpu.ACC((TILE, TILE), jnp.float32))
        total = total + lax.broadcast_in_dim(bias, (TILE, TILE), [0])
        if fault not in ("release before wgmma_wait", "missing release"):
            plgpu.barrier_arrive(empty.at[slot])
        return total

    zero = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), plgpu.Layout.WGMMA)
    total = lax.fori_loop(jnp.int32(0), jnp.int32(STEPS), step, zero)
    o_s[...] = total
    if fault != "missing commit_smem":
        plgpu.commit_smem()
    reduction = "add" if fault != "plain store" else None
    plgpu.copy_smem_to_gmem(o_s, o_ref, reduction_op=reduction)
    if fault == "missing store wait":
        o_s[...] = total
    plgpu.wait_smem_to_gmem(0)


def _produce(fault, x_ref, w_ref, bias_ref, x_s, w_s, bias_s, full, empty):
    def load(j, _):
        slot = lax.rem(j, jnp.int32(STAGES))
        if fault != "missing empty wait":
            pl.when(j >= STAGES)(lambda: plgpu.barrier_wait(empty.at[slot]))
        for source, target in ((x_ref, x_s), (w_ref, w_s), (bias_ref, bias_s)):
            plgpu.copy_gmem_to_smem(source.at[j], target.at[slot], full.at[slot])

    lax.fori_loop(jnp.int32(0), jnp.int32(STEPS), load, None)
    if fault != "missing empty wait":
        for slot in range(STAGES):
            plgpu.barrier_wait(empty.at[slot])


def _pipeline(x, w, bias, fault: str = "", blocks: int = 1):
    """Computes [TILE, TILE] f32: every CTA of the grid adds the same sum to one zeroed output."""

    def kernel(x_ref, w_ref, bias_ref, x_s, w_s, bias_s, o_s, full, empty):
        warpgroup = lax.axis_index("wg")

        @pl.when(warpgroup == 0)
        def _():
            plgpu.set_max_registers(240, action="increase")
            _consume(fault, out, x_s, w_s, bias_s, o_s, full, empty)

        @pl.when(warpgroup == 1)
        def _():
            plgpu.set_max_registers(24, action="decrease")

            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    _produce(fault, x_ref, w_ref, bias_ref, x_s, w_s, bias_s, full, empty)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = functools.partial(plgpu.SMEM, dtype=jnp.float16, transforms=transforms)
    out = jax.new_ref(jnp.zeros((TILE, TILE), jnp.float32))
    plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=[
            ring((STAGES, TILE, TILE)),
            ring((STAGES, TILE, TILE)),
            plgpu.SMEM((STAGES, TILE), jnp.float32),
            plgpu.SMEM((TILE, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        interpret=INTERPRET,
    )(x, w, bias)
    return out[...]


def _operands():
    rng = np.random.default_rng(0)
    # Sixteenths: sums of products are exact in float32 in any order. Else one that lies between two
    # numbers of 16 bits is rounded to the one or the other, as the processor adds up.
    draw = lambda *shape: jnp.asarray(np.round(2 * rng.normal(size=shape)) / 16, jnp.float16)
    bias = jnp.asarray(rng.normal(size=(STEPS, TILE)), jnp.float32)
    return draw(STEPS, TILE, TILE), draw(STEPS, TILE, TILE), bias


def _run(fault: str = "", blocks: int = 1, deadlock_s: float = 60.0):
    with race_checked(deadlock_s):
        return np.asarray(jax.jit(_pipeline, static_argnums=(3, 4))(*_operands(), fault, blocks))


def _expected():
    x, w, bias = (np.asarray(a, np.float32) for a in _operands())
    xw = np.einsum("jab,jbc->jac", x, w).astype(np.float16).astype(np.float32)
    return np.einsum("jab,jbc->ac", xw, w) + bias.sum(0)[:, None]


@pytest.mark.thorough(always=["1"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_correct_kernel_passes(blocks):
    """Checks values, and that ACC, register operands, reductions and slot reuse are no races."""
    np.testing.assert_allclose(_run(blocks=blocks), blocks * _expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(always=["missing empty wait", "early accumulator read"])
@pytest.mark.parametrize(
    "fault",
    [
        "missing commit_smem",
        "release before wgmma_wait",
        "missing empty wait",
        "early accumulator read",
        "missing store wait",
    ],
)
def test_race_is_reported(fault):
    with pytest.raises(RaceError, match=r"test_interpreter\.py"):
        _run(fault)


def test_missing_full_wait_is_reported():
    """Expects a race, or the interpreter's own error if the consumer outran every phase."""
    with pytest.raises((RaceError, jax.errors.JaxRuntimeError)):
        _run("missing full wait")


def test_blocks_that_store_to_one_place_race():
    _run("plain store", blocks=1)
    with pytest.raises(RaceError, match="write of"):
        _run("plain store", blocks=2)


def test_deadlock_is_reported_and_leaves_the_interpreter_usable():
    with pytest.raises(DeadlockError, match="no barrier completed"):
        _run("missing release", deadlock_s=3.0)
    _run()


def _set_bits_of_own_words():
    """Returns the words of two CTAs of a cluster, each of which sets bits of its own."""
    words = jax.new_ref(jnp.zeros(2, jnp.int32))

    def kernel(done_ref, done_s):
        rank = lax.axis_index("rank")

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                for bit in range(8):
                    inline.set_bits(words, rank, jnp.int32(1 << bit))

        done_s[...] = jnp.ones_like(done_s)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(done_s, done_ref.at[rank])
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((2, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        cluster=(2,),
        cluster_names=("rank",),
        num_threads=1,
        thread_name="wg",
        interpret=INTERPRET,
    )()
    return words[...]


def test_ctas_of_a_cluster_keep_the_bits_of_each_others_words(monkeypatch):
    read = interpreter_callbacks._read

    def read_slowly(*place):
        value = read(*place)
        time.sleep(0.02)  # in which the other CTA sets a bit
        return value

    monkeypatch.setattr(interpreter_callbacks, "_read", read_slowly)
    with race_checked():
        assert jax.jit(_set_bits_of_own_words)().tolist() == [255, 255]


def test_nothing_interpreted_is_an_error():
    with pytest.raises(AssertionError, match="no race-checked kernel"), race_checked():
        jnp.zeros(3).block_until_ready()


def test_own_errors_pass_through():
    with pytest.raises(ZeroDivisionError), race_checked():
        raise ZeroDivisionError
    assert not issubclass(ZeroDivisionError, KernelFault)
