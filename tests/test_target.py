"""`flash_pallas.target`: programs for a GPU that is not here, traced, lowered and exported."""

from __future__ import annotations

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils

import flash_pallas as fp
from flash_pallas.backends.xla import unnamed
from flash_pallas.devices import DEVICES, targeted
from flash_pallas.frontend import dispatch

from . import exported as on_the_gpu

KERNEL = "mosaic_gpu_v2"
X = jax.random.normal(jax.random.key(0), (2, 128, 2, 64), jnp.bfloat16)


def attend(x, **options):
    return fp.flash_attention(x, x, x, causal=True, **options)


def gradient(x, **options):
    return jax.grad(lambda x: attend(x, **options).astype(jnp.float32).sum())(x)


def exported(function, *args, platforms=("cuda",)):
    return jax.export.export(jax.jit(function), platforms=platforms)(*args)


def kernels(program) -> int:
    text = program.mlir_module() if hasattr(program, "mlir_module") else program.as_text()
    return text.count(KERNEL)


@pytest.mark.thorough(always=["rtx 4090-portable"])
@pytest.mark.parametrize(("gpu", "name"), [("H100", "hopper"), ("rtx 4090", "portable")])
def test_kernels_of_a_gpu_that_is_not_here(gpu, name):
    """Checks one jitted function, whose programs within a target and outside are kept apart."""
    jitted = jax.jit(attend)
    lowered = lambda: jitted.trace(X).lower(lowering_platforms=("cuda",))
    outside = jitted(X)
    assert kernels(lowered()) == kernels(exported(attend, X)) == 0
    with fp.target(gpu):
        assert targeted() is DEVICES[gpu.replace(" ", "").lower()]
        found = fp.explain(fp.flash_attention, X, X, X, causal=True)
        assert found.backend == name and found.gpu == targeted().kind
        assert kernels(lowered()) == kernels(exported(attend, X)) == 1
        assert kernels(exported(gradient, X)) > 1
        assert kernels(exported(partial(attend, backend="portable"), X)) == 1
        assert kernels(exported(partial(attend, backend="xla"), X)) == 0
        np.testing.assert_array_equal(jitted(X), outside)  # jnp, on the CPU that is here
    assert targeted() is None
    assert kernels(lowered()) == 0


def test_what_is_traced_for_a_gpu_is_lowered_for_it_anywhere(monkeypatch):
    asked = []
    with fp.target("A100"):
        traced = jax.jit(attend).trace(X)
        with fp.target("H100"):
            assert utils._infer_arch() == (9, 0) and targeted() is DEVICES["h100"]
        assert utils._infer_arch() == (8, 0)
    there = utils._infer_arch
    monkeypatch.setattr(utils, "_infer_arch", lambda: asked.append(there()) or asked[-1])
    assert kernels(traced.lower(lowering_platforms=("cuda",))) == 1
    assert set(asked) == {(8, 0)} and there() == (9, 0)  # what Mosaic GPU assumes on a CPU


def _biased(x):
    bias = jax.random.normal(jax.random.key(1), (1, 2, 128, 128))
    loss = lambda x, b: fp.flash_attention(x, x, x, bias=b, softcap=9.0).astype(jnp.float32).sum()
    return jax.grad(loss, argnums=(0, 1))(x, bias)


def _far(x):
    """Returns a gradient that depends on a log-sum-exp of which kernels keep a shift."""
    return jax.grad(lambda x: fp.flash_attention_with_lse(300 * x, x, x)[1].sum())(x)


def _tangents(x):
    call = partial(attend, differentiable="any")
    push = lambda x: jax.jvp(call, (x,), (x,))[1].astype(jnp.float32).sum()
    return jax.jvp(call, (x,), (x,)), jax.grad(push)(x)


def _vmapped(x):
    return jax.vmap(lambda x: attend(x[None]))(x)


def _decoded(x):
    return fp.flash_decode(x[:, :1], x, x, kv_lengths=jnp.array([100, 5]), return_lse=True)


def _ragged(x):
    pages = x.reshape(4, 64, 2, 64)
    table, lengths = jnp.arange(4).reshape(2, 2), jnp.array([100, 64])
    places = {"kv_lengths": lengths, "page_table": table, "cu_q_lens": jnp.array([0, 100, 101])}
    return fp.ragged_paged_attention(x.reshape(256, 2, 64)[:101], pages, pages, **places)


@pytest.mark.thorough(always=["_far-H200", "_decoded-H200"])
@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize(
    "function", [gradient, _biased, _far, _tangents, _vmapped, _decoded, _ragged]
)
def test_one_program_has_kernels_for_cuda_and_jnp_for_the_cpu(function, gpu):
    with fp.target(gpu):
        program = exported(function, X, platforms=("cpu", "cuda"))
    assert kernels(program) and set(program.platforms) == {"cpu", "cuda"}
    of_gpu = {"H200": "NVIDIA_H200_of_sm_90", "A100": "NVIDIA_A100_SXM4_80GB_of_sm_80"}[gpu]
    assert f"this_program_was_made_for_{of_gpu};" in program.mlir_module()
    found = jax.export.deserialize(program.serialize()).call(X)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(function(X)), strict=True):
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())


def test_what_a_target_cannot_run():
    with fp.target("A100"):
        with pytest.raises(fp.UnsupportedByBackend, match=r"needs compute capability 9\.0 .* 8\.0"):
            attend(X, backend="hopper")
        with pytest.raises(fp.UnsupportedByBackend, match="asks the cuDNN that is here"):
            attend(X, backend="cudnn")
        with pytest.raises(fp.UnsupportedByBackend, match=r"autotune outside of flash_pallas\."):
            fp.autotune(X, X, X)
    with fp.target("B200"):
        assert fp.explain(fp.flash_attention, X, X, X).backend == "portable"
    with pytest.raises(
        ValueError, match=r"gpu is 'V100': write .*'RTX5090'.*Older GPUs run blockw"
    ):
        fp.target("V100")
    with pytest.raises(TypeError, match="name of a GPU"):
        fp.target(None)


def test_jnp_in_a_target_is_a_warning(caplog):
    dispatch._log_once.cache_clear()
    with fp.target("A100"):
        for x in (X, X + 1):
            exported(lambda x: attend(x), x.astype(jnp.float32))  # a new function is traced anew
            exported(lambda x: _ragged(x), x)
    single, chunks = [x.message for x in caplog.records if x.levelno == logging.WARNING]
    assert "in float32 runs as blockwise jnp" in single and "cast q, k and v" in single
    assert "ragged_paged_attention runs on 'portable'" in chunks and "chunks" in chunks


def test_jnp_that_is_exported_for_want_of_a_target_is_a_warning(caplog):
    unnamed.warn.cache_clear()
    exported(attend, X, platforms=("cpu",))
    exported(partial(attend, backend="xla"), X)
    assert not caplog.records
    for function in (attend, gradient, _decoded, _ragged):
        unnamed.warn.cache_clear()
        caplog.clear()
        exported(function, X)
        exported(function, X, platforms=("cpu", "cuda"))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and record.name == "flash_pallas"
        assert "blockwise jnp" in record.message and "flash_pallas.target('H100')" in record.message


@pytest.mark.thorough(always=["decode"])
@pytest.mark.parametrize("name", ["gqa", "bias", "packed", "decode", "ragged"])
def test_programs_for_the_gpu_can_be_written_and_are_checked(name, tmp_path):
    """Checks, by their jnp, the programs that tests/exported.py has run on a GPU."""
    on_the_gpu.write(tmp_path, [name], platforms=("cpu", "cuda"))
    found = on_the_gpu.check(tmp_path, [name])
    assert len(found) == 2 and all(each["right"] for each in found.values()), found


def test_a_wrong_program_is_found(tmp_path, monkeypatch):
    on_the_gpu.write(tmp_path, ["decode"], platforms=("cpu", "cuda"))
    monkeypatch.setattr(on_the_gpu, "LENGTHS", on_the_gpu.LENGTHS - 1)
    found = on_the_gpu.check(tmp_path, ["decode"])
    assert not any(each["right"] for each in found.values())
