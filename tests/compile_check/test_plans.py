"""Programs as XLA plans them for an H200, the card's own plan: their memory and their kernels."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from flash_pallas import (
    flash_attention,
    flash_decode,
    ragged_paged_attention,
    save_attention,
)
from flash_pallas.backends.gpu.jax_compat import trades_registers
from flash_pallas.backends.hopper import backend

from .device import H200, compile_for


def _peak(function, *arguments) -> int:
    plan = compile_for(H200, function, *arguments).memory_analysis()
    return plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes


@pytest.fixture
def on_h200(monkeypatch):
    """Pretends to have an H200: its topology is the default device of what is compiled."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(backend, "_device_reason", lambda capability: None)
    monkeypatch.setattr(backend, "_num_sms", lambda: backend.H200_SMS)


@pytest.mark.compile
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_run_one_forward(on_h200, remat):
    """Checks that XLA does not run a kernel again to write its result where the loop stacks it."""
    x = jax.ShapeDtypeStruct((4, 1024, 8, 128), jnp.bfloat16)

    def layer(x, _):
        return x + flash_attention(x, x, x, causal=True, backend="hopper"), None

    def loss(x):
        one = jax.checkpoint(layer, policy=save_attention, prevent_cse=False) if remat else layer
        return jax.lax.scan(one, x, length=4)[0].astype(jnp.float32).sum()

    text = compile_for(H200, jax.grad(loss), x).as_text()
    calls = re.findall(r'custom_call_target="mosaic_gpu.*op_name="[^"]*/(\w+)/mpmd_map"', text)
    zeros = ["flash_pallas_zeros"] * (not trades_registers())  # of dQ, where CTAs only add to it
    assert sorted(calls) == ["flash_pallas_backward_fused", "flash_pallas_forward", *zeros]


@pytest.mark.compile
@pytest.mark.parametrize(("length", "head_dim"), [(2048, 16), (1024, 32), (2048, 64)])
def test_gradients_of_a_pair_bias(on_h200, length, head_dim):
    """Checks what forward and gradients in one program keep, in terms of the forward's bytes.

    Arguments and results are twice the forward's. The rest are float32 sums: of dQ and, with a
    producer warpgroup, of the bias's gradient. docs/training.md has the number.
    """
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    q, bias = shape(128, length, 4, head_dim), shape(1, 4, length, length)

    def attention(q, k, v, bias):
        return flash_attention(q, k, v, bias=bias, backend="hopper")

    def gradients(q, k, v, bias, do):
        return jax.vjp(attention, q, k, v, bias)[1](do)

    forward, both = _peak(attention, q, q, q, bias), _peak(gradients, q, q, q, bias, q)
    most = 2.6 if trades_registers() else 2.25
    assert both <= most * forward


# What XLA calls a kernel together with the slices that it reads, or writes, where they lie.
SLICING = '"__custom_fusion"'


@pytest.mark.compile
def test_misaligned_slices_are_copied(on_h200):
    """Checks that the lengths of an engine's sheet, 64 bytes behind its start, are copied."""
    shape = jax.ShapeDtypeStruct
    q, pages = shape((16, 8, 128), jnp.bfloat16), shape((512, 64, 8, 128), jnp.bfloat16)

    def step(q, pages, sheet):
        lengths, table, ends = sheet[16:80], sheet[80:336].reshape(64, 4), sheet[336:]
        given = {"kv_lengths": lengths, "page_table": table, "cu_q_lens": ends}
        return ragged_paged_attention(q, pages, pages, **given, backend="hopper")

    text = compile_for(H200, step, q, pages, shape((401,), jnp.int32)).as_text()
    assert "mosaic_gpu" in text and SLICING not in text


@pytest.mark.compile
def test_stacked_caches_are_read_where_they_lie(on_h200):
    """Checks that a scan over layers copies no layer of the cache to decode from it."""
    q = jax.ShapeDtypeStruct((4, 1, 8, 128), jnp.bfloat16)
    caches = jax.ShapeDtypeStruct((6, 4, 4096, 2, 128), jnp.bfloat16)

    def layer(q, kv):
        return q + flash_decode(q, *kv, backend="hopper"), None

    text = compile_for(H200, lambda q, k, v: jax.lax.scan(layer, q, (k, v))[0], q, caches, caches)
    assert SLICING in text.as_text()
