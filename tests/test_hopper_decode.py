"""The decode kernels on CPU: right, free of races and deadlocks, for every kind of cache."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.decode.tiles import DecodeBlocks
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.core import decode
from flash_pallas.frontend import dispatch

from .hopper_decode_cases import STEPS, Step, assert_matches_oracle, run
from .interpreter import race_checked

BACKEND = HopperBackend(interpret=True, num_sms=2)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_decode_kernels(step):
    with race_checked():
        found, whole = run(BACKEND, step)
        assert found[0].dtype == jnp.dtype(step.dtype) and found[1].dtype == jnp.float32
    assert_matches_oracle(step, whole, found)


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        ((1, 1, 2, 16, "float32"), (1, 64, 1, 16), "decodes bfloat16 and float16, not float32"),
        ((1, 1, 2, 592, "bfloat16"), (1, 64, 1, 592), "head dims of q and k up to 576, not 592"),
        ((1, 1, 2, 264, "bfloat16"), (1, 64, 1, 264), "head dim 264: pad it to 272"),
        ((1, 1, 2, 104, "bfloat16"), (1, 64, 1, 104), "head dim 104: pad it to 128"),
        ((1, 1, 2, 64, "bfloat16"), (1, 60, 1, 64), "caches of a multiple of 8 keys, not 60"),
    ],
)
def test_what_hopper_refuses_runs_on_xla(monkeypatch, q, k, reason):
    backends = {"hopper": HopperBackend(interpret=True), "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    q, k = jnp.ones(q[:-1], q[-1]), jnp.ones(k, q[-1])
    message = f"backend='hopper': .*{reason}.*; backend='auto' or 'xla' can run"
    with pytest.raises(fp.UnsupportedByBackend, match=message):
        fp.explain(fp.flash_decode, q, k, k, backend="hopper")
    found = fp.explain(fp.flash_decode, q, k, k)
    assert found.backend == "xla" and reason in found.reasons["hopper"]


def test_hopper_takes_what_it_can(monkeypatch):
    backends = {"hopper": HopperBackend(interpret=True, num_sms=132), "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    q, k = jnp.ones((1, 4, 8, 128), jnp.bfloat16), jnp.ones((1, 8192, 2, 128), jnp.bfloat16)
    found = fp.explain(fp.flash_decode, q, k, k)
    assert found.backend == "hopper" and found.blocks.num_splits > 16
    assert fp.explain(fp.flash_decode, q, k, k, num_splits=3).blocks.num_splits == 3


@pytest.mark.thorough(always=["split-2"])
@pytest.mark.parametrize(
    ("step", "launches"),
    [
        (Step("split", (1,), N=8, K=2, H=128, Hv=128, num_splits=3), 2),
        (Step("whole", (1, 1), T=4, N=8, K=2, num_splits=1), 1),
        (Step("odd_groups", (1,), T=3, N=10, K=2, H=80, Hv=32, sides=("slopes", "sinks")), 2),
        (Step("one_row", (1,), N=2, K=2, page_size=16, num_splits=1, sides=("sinks",)), 1),
        (Step("latent", (1,), N=16, H=576, Hv=512), 2),
        (Step("wide", (1,), N=8, K=2, T=2, H=304, Hv=272, num_splits=1), 1),
        (Step("shared", (1,), N=16, H=576, Hv=512, page_size=64, shared=True), 2),
        (Step("shared_rows", (1,), N=64, H=576, Hv=512, shared=True), 2),
        (Step("shared_narrow", (1,), H=128, shared=True, num_splits=1), 1),
    ],
    ids=str,
)
def test_nothing_is_launched_beside_the_kernels(step, launches):
    given = step.operands()[0]
    backend = HopperBackend()
    blocks = DecodeBlocks(step.block_kv, stages=2, num_splits=step.num_splits)
    if max(step.H, step.Hv) > 256:
        blocks = backend.decode.plan(decode.describe(given, step.spec))
    run = jax.jit(lambda x: tuple(backend.decode.run(step.spec, blocks, x)))
    text = run.trace(given).lower(lowering_platforms=("cuda",)).as_text()
    found = collections.Counter(re.findall(r"(?:stablehlo|chlo)\.(\w+)", text))
    assert found.pop("custom_call") == launches
    assert set(found) <= {"reshape", "optimization_barrier"}, found


@pytest.mark.parametrize(
    ("changes", "upright", "stages"),
    [
        ({"H": 128, "Hv": 128}, True, 2),
        ({"H": 128, "Hv": 128, "T": 4}, True, 2),
        ({"H": 128, "Hv": 128, "T": 5}, False, 3),
        ({"H": 256, "Hv": 256}, True, 3),
        ({"Hv": 96}, False, 5),
        ({"H": 512, "Hv": 512, "N": 8}, True, 2),  # of K, and one of V
        ({"H": 576, "Hv": 512, "N": 16}, False, 2),  # 1 KB short of upright
        ({"H": 576, "Hv": 512, "N": 128}, False, 2),
        ({"H": 576, "Hv": 512, "N": 16, "shared": True}, True, 2),
        ({"H": 576, "Hv": 512, "N": 17, "shared": True}, False, 2),
        ({"H": 320, "Hv": 256, "T": 2}, True, 3),
        ({"H": 320, "Hv": 256, "T": 5}, False, 5),
        ({"H": 512, "Hv": 512, "cache": "int8"}, True, 1),
        ({"H": 576, "Hv": 512, "N": 16, "shared": True, "cache": "int8"}, True, 3),
        ({"H": 576, "Hv": 512, "N": 64, "shared": True, "cache": "int8"}, False, 4),
        ({"H": 128, "Hv": 128, "cache": "int8"}, True, 4),
        ({"H": 96, "Hv": 128, "cache": "int8"}, False, 4),
        ({"page_size": 64, "cache": "int8", "scaled": "rows"}, True, 8),
    ],
)
def test_which_queries_are_columns(changes, upright, stages):
    step = dataclasses.replace(Step("any", (1,)), **changes)
    problem = decode.describe(step.operands()[0], step.spec)
    found = BACKEND.decode.plan(problem)
    assert (found.upright, found.stages) == (upright, stages)


def test_hopper_needs_a_gpu():
    q, k = jnp.ones((1, 1, 2, 64), jnp.bfloat16), jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    message = "backend='hopper': needs an NVIDIA GPU of compute capability 9.0"
    with pytest.raises(fp.UnsupportedByBackend, match=message):
        fp.flash_decode(q, k, k, backend="hopper")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16", "T": 5, "page_size": 16, "scaled": "rows"}, "by no scales of pages"),
        ({"H": 16}, "a cache with head dim 16: pad it to 32"),
        ({"Hv": 80}, "a cache with head dim 80: pad it to 96"),
        ({"dtype": "float32"}, "not float32"),
    ],
)
def test_caches_of_eight_bits_that_are_refused(changes, reason):
    step = Step("any", (1,), cache="int8")
    describe = lambda step: decode.describe(step.operands()[0], step.spec)
    assert BACKEND.decode.refusal(describe(step)) is None
    found = BACKEND.decode.refusal(describe(dataclasses.replace(step, **changes)))
    assert found is not None and reason in found


def test_wide_heads_that_are_refused():
    describe = lambda **x: decode.describe(
        (step := Step("any", (1,), **x)).operands()[0], step.spec
    )
    refusal = BACKEND.decode.refusal(describe(H=336, Hv=320, cache="int8"))
    assert refusal == "would have to copy a cache with head dim 336: pad it to 352"
    assert BACKEND.decode.refusal(describe(H=64, Hv=528)) == (
        "decodes head dims of v up to 512, not 528"
    )
    later = HopperBackend(capability="9.0", trades_registers=False)
    assert later.decode.refusal(describe(T=5, H=576, Hv=384)) is None
    assert later.decode.refusal(describe(T=4, H=576, Hv=512, shared=True)) is None
    refusal = later.decode.refusal(describe(T=5, H=576, Hv=400))
    assert refusal is not None and "head dims of v up to 384 with jaxlib 0.12" in refusal


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "head_dims", "keys", "splits"),
    [
        (1, 8192, 32, 4, (512, 512), 64, 32),
        (16, 8192, 32, 4, (512, 512), 64, 2),
        (1, 32768, 16, 1, (576, 512), 32, 128),
        (1, 32768, 128, 1, (576, 512), 32, 64),
        (128, 8192, 128, 1, (576, 512), 32, 1),
    ],
)
def test_splits_of_wide_heads(batch, length, heads, kv_heads, head_dims, keys, splits):
    step = Step("any", (1,))
    problem = dataclasses.replace(
        decode.describe(step.operands()[0], dataclasses.replace(step.spec, num_splits=None)),
        **{"batch": batch, "kv_len": length, "q_heads": heads, "kv_heads": kv_heads},
        **dict(zip(("head_dim", "v_head_dim"), head_dims, strict=True)),
    )
    blocks = HopperBackend(interpret=True, num_sms=132).decode.plan(problem)
    assert (blocks.block_kv, blocks.num_splits) == (keys, splits)


@pytest.mark.parametrize(
    ("batch", "length", "cache", "splits"),
    [
        (1, 8192, None, 16),
        (1, 32768, None, 16),
        (1, 131072, None, 33),
        (16, 8192, None, 1),
        (128, 8192, None, 1),
        (1, 32768, "int8", 32),
        (16, 8192, "int8", 2),
        (128, 8192, "int8", 1),
    ],
)
def test_splits_fill_the_multiprocessors(batch, length, cache, splits):
    step = Step("any", (1,), cache=cache)
    problem = dataclasses.replace(
        decode.describe(step.operands()[0], dataclasses.replace(step.spec, num_splits=None)),
        **{"batch": batch, "kv_len": length, "head_dim": 128, "v_head_dim": 128},
        **{"q_heads": 32, "kv_heads": 8},
    )
    assert HopperBackend(interpret=True, num_sms=132).decode.plan(problem).num_splits == splits
