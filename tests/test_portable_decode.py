"""The portable decode kernel on CPU: right for every kind of cache, and no tile read too early."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.backends.portable.decode.tiles import PortableDecodeBlocks
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.core import decode, softmax
from flash_pallas.frontend import dispatch

from .hopper_decode_cases import STEPS, Step, assert_matches_oracle
from .interpreter import race_checked

BACKEND = PortableBackend(interpret=True, capability="8.0", num_sms=2)

SHARED = (
    *("no_key_and_one", "around_two_blocks", "lengths_out_of_range", "more_splits_than_blocks"),
    *("four_tokens_one_split", "two_tiles_of_rows", "queries_before_keys", "window", "modifiers"),
    *("one_head_each", "wide", "narrow_values", "pages_of_16", "pages_of_48", "pages_of_64"),
    *("starts", "starts_at_the_end", "starts_as_rows", "starts_and_window", "windows"),
    *("starts_and_windows", "starts_of_pages_of_48", "starts_of_pages_of_64"),
    *("ring", "ring_in_pieces", "ring_wide"),
    *("starts_of_int8", "starts_of_float8", "int8", "int8_unscaled", "float8", "shared_int8"),
    *("float8_pages_of_64", "starts_of_float8_as_rows", "drafts_of_int8"),
    *("drafts", "drafts_of_64", "drafts_in_windows", "drafts_in_tiles", "drafts_wide"),
    *("without_room", "drafts_without_room"),
    *("wide_512", "latent", "latent_pages_of_16", "wide_modifiers", "wide_starts", "wide_values"),
    *("wide_int8", "wide_float8_as_rows", "shared_latent_float8"),
)
CASES = (
    *(step for step in STEPS if step.name in SHARED),
    Step("around_a_block", (63, 64, 65), N=2, num_splits=1),
    Step("head_dim_72", (65, 130), H=72, Hv=72, N=2, num_splits=1, sides=("sinks",)),
    Step("head_dim_128", (200,), T=3, N=6, K=2, H=128, Hv=128, dtype="float16"),
    Step("odd_group_of_pages", (200, 77), T=3, N=10, K=2, page_size=32, window=70, softcap=3.0),
)


def run(step: Step, operands, num_splits: int):
    """Runs decode with the backend's block sizes and the given number of splits."""
    problem = decode.describe(operands, step.spec)
    assert BACKEND.decode.refusal(problem) is None
    blocks = dataclasses.replace(BACKEND.decode.plan(problem), num_splits=num_splits)
    return jax.jit(lambda x: BACKEND.decode.run(step.spec, blocks, x))(operands)


def assert_right(step: Step, num_splits: int):
    """Checks that the kernel is free of races, and as near to the oracle as it has to be."""
    given, whole = step.operands()
    with race_checked():
        found = run(step, given, num_splits)
        assert found.o.dtype == jnp.dtype(step.dtype) and found.lse_log2.dtype == jnp.float32
    assert_matches_oracle(step, whole, (found.o, softmax.natural(found.lse_log2)))


@pytest.mark.thorough(always=["pages_of_64"])
@pytest.mark.interpret
@pytest.mark.parametrize("step", CASES, ids=str)
def test_decode_kernel(step):
    assert_right(step, min(step.num_splits, 3))


@pytest.mark.interpret
def test_pages_that_sequences_share():
    step = Step("shared", (130, 130), N=2, page_size=64, num_splits=1)
    given, whole = step.operands()
    table = np.array(given.page_table)
    table[1, 1:] = table[0, 1:]  # both read the second page and the last key
    both = [np.array(x) for x in whole[1:3]]
    for x in both:
        x[1, 64:] = x[0, 64:]
    with race_checked():
        found = run(step, given._replace(page_table=table), 1)
    whole = whole._replace(k=both[0], v=both[1])
    assert_matches_oracle(step, whole, (found.o, softmax.natural(found.lse_log2)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache": "int8", "H": 72}, "a cache with head dim 72: pad it to 80"),
        ({"cache": "float8_e4m3fn", "Hv": 272}, "a cache with head dim 272: pad it to 288"),
        (
            {"cache": "int8", "dtype": "float16", "page_size": 16, "scaled": "rows"},
            "float16 weights by no scales of pages: cast q to bfloat16",
        ),
        ({"dtype": "float32"}, "decodes bfloat16 and float16, not float32"),
        ({"H": 264}, "a cache with head dim 264: pad it to 272"),
        ({"H": 592}, "decodes head dims of q and k up to 576, not 592"),
        ({"Hv": 528}, "decodes head dims of v up to 512, not 528"),
        ({"H": 70}, "a cache with head dim 70: pad it to 72"),
    ],
)
def test_what_is_refused(changes, reason):
    step = dataclasses.replace(Step("any", (1,)), **changes)
    found = BACKEND.decode.refusal(decode.describe(step.operands()[0], step.spec))
    assert found is not None and reason in found


@pytest.mark.parametrize(("capability", "taken"), [("8.0", True), ("8.6", False), ("9.0", True)])
def test_what_shared_memory_has_no_room_for(capability, taken):
    step = Step("any", (1,), H=576, Hv=512)
    backend = PortableBackend(interpret=True, capability=capability)
    found = backend.decode.refusal(decode.describe(step.operands()[0], step.spec))
    assert (found is None) == taken
    assert taken or "takes 103424 bytes of shared memory for head dims 576 and 512" in str(found)


def test_explain_tells_of_a_cache_in_eight_bits(monkeypatch):
    backends = {"portable": BACKEND, "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    q, k = jnp.ones((1, 1, 2, 64), jnp.bfloat16), jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    assert fp.explain(fp.flash_decode, q, k, k, backend="portable").backend == "portable"
    eight = k.astype(jnp.int8)
    assert fp.explain(fp.flash_decode, q, eight, eight).backend == "portable"
    wide = jnp.ones((1, 64, 1, 72), jnp.int8)
    found = fp.explain(fp.flash_decode, q, eight, wide)
    assert found.backend == "xla" and "head dim 72: pad it to 80" in found.reasons["portable"]


def test_it_needs_a_gpu():
    step = Step("any", (1,))
    problem = decode.describe(step.operands()[0], step.spec)
    found = PortableBackend().decode.refusal(problem)
    assert found is not None and "needs an NVIDIA GPU" in found


@pytest.mark.parametrize(
    ("batch", "length", "changes", "splits"),
    [
        (1, 32768, {}, 27),
        (1, 2048, {}, 8),
        (1, 200, {}, 1),
        (16, 8192, {}, 2),
        (128, 8192, {}, 1),
        (1, 32768, {"num_splits": 3}, 3),
        (1, 32768, {"window_left": 1000}, 3),
    ],
)
def test_ranges_fill_the_multiprocessors_twice(batch, length, changes, splits):
    step = Step("any", (1,))
    spec = dataclasses.replace(step.spec, **{"num_splits": None, **changes})
    problem = dataclasses.replace(
        decode.describe(step.operands()[0], spec),
        **{"batch": batch, "kv_len": length, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
    )
    backend = PortableBackend(interpret=True, capability="8.0")  # of 108 SMs
    assert backend.decode.plan(problem) == PortableDecodeBlocks(columns=64, num_splits=splits)


@pytest.mark.parametrize(
    ("capability", "head_dim", "columns"),
    [
        *(("8.6", 64, 64), ("8.6", 128, 32), ("8.0", 128, 64), ("8.0", 256, 32), ("10.0", 256, 32)),
        *(("8.6", 304, 32), ("8.6", 512, 16), ("8.0", 512, 32), ("10.0", 512, 32)),
    ],
)
def test_two_blocks_share_a_multiprocessor(capability, head_dim, columns):
    step = Step("any", (1,), H=head_dim, Hv=head_dim)
    problem = decode.describe(step.operands()[0], step.spec)
    backend = PortableBackend(interpret=True, capability=capability)
    assert backend.decode.plan(problem).columns == columns
