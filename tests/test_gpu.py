"""Tests that need a Hopper GPU: `make test-gpu`."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_gpu

import flash_pallas
from flash_pallas import flash_attention, flash_attention_with_lse, flash_decode, reference
from flash_pallas.backends.gpu import ahead, jax_compat
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward import dq_sums
from flash_pallas.backends.hopper.backward.fused import launches
from flash_pallas.backends.hopper.common import tile_lists

from . import (
    checks,
    chosen_blocks,
    cudnn_cases,
    hopper_decode_cases,
    hopper_ragged_cases,
    ragged_cases,
    tangent_checks,
    test_portable_interpreted,
    test_shared_prefix,
    test_tangent_kernels,
)
from .cases import Case
from .hopper_cases import (
    DIAGONAL,
    DIAGONAL_ON_DEVICE,
    FAR_ON_DEVICE,
    FORWARD_BLOCKS,
    FUSED_BLOCKS,
    LARGE_ON_DEVICE,
    ON_DEVICE,
    ROTATED,
)
from .portable_cases import WIDE
from .test_any_order import TRANSFORMED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", (*ON_DEVICE, *LARGE_ON_DEVICE), ids=str)
def test_kernels(case):
    checks.assert_matches_oracle(checks.bind("hopper"), case, kernels=True)


@pytest.mark.parametrize("case", FAR_ON_DEVICE, ids=str)
def test_rows_that_are_left_to_another_launch(case, monkeypatch):
    monkeypatch.setattr(launches, "ENOUGH", 1)
    checks.assert_matches_oracle(checks.bind("hopper"), case, kernels=True)


@pytest.mark.parametrize("case", DIAGONAL_ON_DEVICE, ids=str)
def test_dq_is_stored_at_the_diagonal(case, monkeypatch):
    if case in DIAGONAL:  # small: a section is one pair of a batch entry and a head
        monkeypatch.setattr(dq_sums, "AT_ONCE_BYTES", 0)
        monkeypatch.setattr(launches, "ENOUGH", 1)
    checks.assert_matches_oracle(checks.bind("hopper"), case, kernels=True)


@pytest.mark.parametrize("case", ROTATED, ids=str)
def test_rotated_lists(case, monkeypatch):
    monkeypatch.setattr(tile_lists, "STREAMED_BYTES", 0)
    monkeypatch.setattr(tile_lists, "AT_ONCE", 2)
    checks.assert_matches_oracle(checks.bind("hopper"), case, kernels=True)


HALVES = [case for case in (*ON_DEVICE, *LARGE_ON_DEVICE) if case.dtype != "float32"]


@pytest.mark.parametrize("case", [*HALVES, *WIDE], ids=str)
def test_portable_kernels(case):
    checks.assert_matches_oracle(checks.bind("portable"), case, kernels=True)


@pytest.mark.parametrize(
    ("case", "blocks"), FORWARD_BLOCKS, ids=[case.name for case, _ in FORWARD_BLOCKS]
)
def test_forward_blocks(case, blocks):
    checks.assert_matches_oracle(checks.bind("hopper", {"forward": blocks}), case, kernels=True)


@pytest.mark.parametrize(
    ("case", "blocks"), FUSED_BLOCKS, ids=[case.name for case, _ in FUSED_BLOCKS]
)
def test_fused_blocks(case, blocks):
    checks.assert_matches_oracle(checks.bind("hopper", {"fused": blocks}), case, kernels=True)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("mods", [False, True])
def test_varlen(backend, mods):
    lengths = ((700, 0, 33, 1, 266), (300, 64, 500, 128, 8))
    cu = [jnp.cumsum(jnp.array([0, *n], jnp.int32)) for n in lengths]
    shapes = ((1100, 8, 128), (1000, 2, 128), (1000, 2, 128), (1100, 8, 128))
    keys = jax.random.split(jax.random.key(0), 4)
    given = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]
    options = {"causal": True, "alignment": "end", "softcap": 5.0}
    if mods:
        options["mask_mod"] = lambda b, n, i, j: (i + 2 * j) % 7 != 0

    @functools.partial(jax.jit, static_argnums=0)
    def results(name, q, k, v, do):
        call = lambda q, k, v: flash_pallas.flash_attention_varlen(
            q, k, v, cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1], backend=name, **options
        )
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    exact = results("xla", *(x.astype(jnp.float32) for x in given))
    plain, found = results("xla", *given), results(backend, *given)
    assert not found[0][1000:].any()  # padding
    assert not found[2][1000:].any()
    for factor, e, p, f in zip((2, 3, 3, 3), exact, plain, found, strict=True):
        error, allowed = (jnp.abs(x.astype(jnp.float32) - e) for x in (f, p))
        assert error.max() <= factor * allowed.max()
        assert jnp.sqrt(jnp.mean(error**2)) <= factor * jnp.sqrt(jnp.mean(allowed**2))


def test_float32_is_as_precise_as_documented():
    checks.assert_precision_of_float32(checks.bind("hopper"))


def _inputs(batch, length, heads, kv_heads, head_dim, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]


def _gradients(q, k, v, do, backend="hopper", **options):
    o, pull = jax.vjp(lambda *x: flash_attention(*x, backend=backend, **options), q, k, v)
    return o, *pull(do)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_is_bit_identical(head_dim, causal):
    x = _inputs(2, 1000, 8, 4, head_dim)
    run = jax.jit(lambda *x: _gradients(*x, causal=causal, deterministic=True))
    first = run(*x)
    for _ in range(50):
        for a, b in zip(first, run(*x), strict=True):
            assert jnp.array_equal(a, b)


def test_forward_dk_and_dv_are_bit_identical_by_default():
    x = _inputs(2, 1000, 8, 4, 128)
    run = jax.jit(lambda *x: _gradients(*x, causal=True))
    first = run(*x)
    for _ in range(50):
        again = run(*x)
        for i in (0, 2, 3):
            assert jnp.array_equal(first[i], again[i])


LOAD = """
import jax, jax.numpy as jnp
x = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16)
step = jax.jit(lambda x: (x @ x) / jnp.abs(x @ x).max())
print("ready", flush=True)
while True:
    step(x).block_until_ready()
"""


@pytest.fixture
def load():
    """Another process that multiplies matrices on the same GPU, as a neighbor would."""
    with subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None and busy.stdout.readline() == "ready\n"
        yield
        assert busy.poll() is None, "the load has ended before its time"
        busy.kill()


REPEATED = {
    "d64_causal": {"head_dim": 64, "causal": True},
    "d128": {"head_dim": 128, "causal": False},
    "d128_causal": {"head_dim": 128, "causal": True},
    "d256_causal": {"head_dim": 256, "causal": True},
}


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("name", REPEATED)
def test_200_runs_under_load_have_the_same_bits(name, backend, load):
    """Looks for races that need another timing: forward, and the deterministic backward."""
    head_dim, causal = REPEATED[name]["head_dim"], REPEATED[name]["causal"]
    q, k, v, do = _inputs(2, 1000, 8, 4, head_dim)
    ids = jnp.asarray(np.repeat([[0, 1, 2]], [300, 411, 289], axis=1).repeat(2, axis=0))

    @jax.jit
    def run(q, k, v, do):
        options = {"q_segment_ids": ids, "kv_segment_ids": ids, "causal": causal}
        call = lambda *x: flash_attention(*x, **options, deterministic=True, backend=backend)
        o, pull = jax.vjp(call, q, k, v)
        return o, *pull(do)

    first = run(q, k, v, do)
    for _ in range(200):
        for a, b in zip(first, run(q, k, v, do), strict=True):
            assert jnp.array_equal(a, b)


def test_kernels_are_compiled_ahead_and_once(caplog, monkeypatch):
    """Checks that what is lowered compiles in the thread, and that programs share their kernels."""
    monkeypatch.setattr(mosaic_gpu, jax_compat.KERNELS, {})
    monkeypatch.setenv(ahead.VARIABLE, "1")
    compiled, compile_one = [], ahead.compiled

    def noted(digest, module):
        compile_one(digest, module)
        compiled.append(digest)

    monkeypatch.setattr(ahead, "compiled", noted)
    x = jax.ShapeDtypeStruct((1, 1088, 2, 64), jnp.bfloat16)  # of no other test
    loss = lambda x: flash_attention(x, x, x, backend="hopper").astype(jnp.float32).sum()
    with caplog.at_level("DEBUG", "flash_pallas"):
        jax.jit(jax.grad(loss)).lower(x)
        jax.jit(lambda x: jax.grad(loss)(x) + 1).lower(x)
        ahead.wait()
    known = getattr(mosaic_gpu, jax_compat.KERNELS)
    assert type(known) is ahead.Kernels and len(known) > 1
    assert sorted(compiled) == sorted(known)
    assert "was not compiled ahead" not in caplog.text


def test_auto_takes_the_hopper_kernels():
    q, k, v, _ = _inputs(1, 256, 2, 2, 64)
    assert flash_pallas.explain(flash_pallas.flash_attention, q, k, v).backend == "hopper"
    text = jax.jit(flash_attention).lower(q, k, v).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("causal", [False, True])
def test_peak_memory_grows_linearly(causal):
    def peak(length):
        shape = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
        run = jax.jit(lambda *x: _gradients(*x, causal=causal))
        analysis = run.lower(shape, shape, shape, shape).compile().memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    assert peak(16384) <= 8.2 * peak(2048)


def test_vmap_and_remat():
    case = Case("vmap", T=200, S=200, B=3, N=4, K=2, dtype="bfloat16", causal=True)
    one = checks.bind("hopper")

    def call(q, k, v, **arguments):
        layer = jax.checkpoint(lambda *x: one(*x, **arguments), policy=flash_pallas.save_attention)
        return jax.vmap(layer)(q, k, v)

    checks.assert_matches_oracle(call, case)


@pytest.mark.parametrize("case", (*cudnn_cases.CASES, *cudnn_cases.WIDE), ids=str)
def test_cudnn(case):
    """Runs cuDNN itself, on cases that test_cudnn.py runs on a stand-in."""
    checks.assert_matches_oracle(checks.bind("cudnn"), case)


def test_cudnn_under_vmap_and_remat():
    case = dataclasses.replace(cudnn_cases.CASES[0], B=3, K=2, causal=True)
    one = checks.bind("cudnn")

    def call(q, k, v, **arguments):
        layer = jax.checkpoint(lambda *x: one(*x, **arguments), policy=flash_pallas.save_attention)
        return jax.vmap(layer)(q, k, v)

    checks.assert_matches_oracle(call, case)


def test_cudnn_runs_one_forward_in_two_loops():
    """Checks that XLA drops the forward that the backward traces again."""
    x, k, v, _ = _inputs(2, 256, 4, 2, 64)
    layer = lambda x, _: (flash_attention(x, k, v, backend="cudnn", causal=True), None)
    loss = lambda x: jax.lax.scan(layer, x, length=2)[0].astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
    calls = re.findall(r'custom_call_target="(__cudnn[$]\w+)"', text)
    assert calls.count("__cudnn$fmhaSoftmaxBackward") == 1
    assert calls.count("__cudnn$fmhaSoftmax") == 1
    assert "mosaic_gpu" not in text


def test_cudnn_is_taken_by_name_alone_on_hopper():
    q, k, v, _ = _inputs(1, 256, 2, 2, 64)
    passed = flash_pallas.explain(flash_pallas.flash_attention, q, k, v)
    assert passed.backend == "hopper" and "ask for it by name" in passed.reasons["cudnn"]
    named = flash_pallas.explain(flash_pallas.flash_attention, q, k, v, backend="cudnn")
    assert re.match(r"cuDNN \d+\.\d+\.\d+ through jax\.nn", named.note or "")


def test_lse_of_hidden_rows_is_minus_infinity():
    q, k, v, _ = _inputs(1, 128, 2, 2, 64)
    o, lse = flash_attention_with_lse(q, k, v, causal=True, q_offset=-50, backend="hopper")
    assert (
        np.isneginf(np.asarray(lse)[..., :50]).all()
        and np.isfinite(np.asarray(lse)[..., 50:]).all()
    )
    assert not np.asarray(o, np.float32)[:, :50].any()


@pytest.mark.parametrize("step", hopper_decode_cases.ON_DEVICE, ids=str)
def test_decode_kernels(step):
    found, whole = hopper_decode_cases.run(HopperBackend(), step, stages=3)
    hopper_decode_cases.assert_matches_oracle(step, whole, found)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_decode_of_shared_prefixes(backend, T):
    drawn = test_shared_prefix.drawn(T, "bfloat16", (8, 2), (128, 128))
    test_shared_prefix.assert_right(backend, *drawn)


CHOSEN = [
    pytest.param(backend, case, id=f"{backend}-{case}")
    for backend in ("hopper", "portable")
    for case in chosen_blocks.CASES
    if case.dtype != "float32" and (backend == "hopper" or case.cache is None)
]


@pytest.mark.parametrize("name", ["steps alone", "bfloat16", "float8", "together"])
@pytest.mark.parametrize("backend", ["hopper", "portable", "xla"])
def test_ragged_mixes(backend, name):
    mix = ragged_cases.MIXES[name]
    if backend != "xla" and (mix.dtype == "float32" or mix.cache):
        mix = dataclasses.replace(mix, dtype="bfloat16", cache=None)
    drawn = mix.draw()
    given = jax.tree.map(jnp.asarray, drawn)
    call = jax.jit(functools.partial(ragged_cases.attend, mix, backend=backend))
    ragged_cases.assert_right(mix, drawn, call(*given), kernels=backend != "xla")


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_integers_cut_out_of_one_array(backend):
    """Checks lengths that begin 64 bytes behind the start of an array, as those of an engine do."""
    seqs, columns = 64, 4  # lengths of 256 bytes: XLA copies slices whose size is no multiple
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 64 * columns, seqs)
    table = rng.permutation(seqs * columns)
    sheet = np.concatenate([np.zeros(16), lengths, table, np.arange(seqs + 1)]).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    pages = (seqs * columns, 64, 2, 128)
    shapes = (seqs, 8, 128), pages, pages
    arrays = [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True)]

    def call(q, k, v, lengths, table, ends):
        given = {"kv_lengths": lengths, "page_table": table, "cu_q_lens": ends}
        return flash_pallas.ragged_paged_attention(q, k, v, **given, backend=backend)

    def cut(q, k, v, sheet):
        lengths, table, ends = jnp.split(sheet[16:], (seqs, seqs * (1 + columns)))
        return call(q, k, v, lengths, table.reshape(seqs, columns), ends)

    whole = (jnp.asarray(x, jnp.int32) for x in (lengths, table.reshape(seqs, columns)))
    right = call(*arrays, *whole, jnp.arange(seqs + 1, dtype=jnp.int32))
    np.testing.assert_array_equal(jax.jit(cut)(*arrays, sheet), right)


@pytest.mark.parametrize("mix", hopper_ragged_cases.ON_DEVICE, ids=str)
def test_ragged_chunks(mix):
    found, whole = hopper_ragged_cases.run(mix, num_sms=132, interpret=False)
    hopper_ragged_cases.assert_matches_oracle(mix, found, whole)


@pytest.mark.parametrize(("backend", "case"), CHOSEN)
def test_decode_of_chosen_blocks(backend, case):
    decode = lambda q, k, v, options: flash_decode(
        q, k, v, **options, backend=backend, return_lse=True
    )
    chosen_blocks.assert_right(case, decode)


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_derivatives_of_every_order(backend, name):
    """Holds them to three times the error of plain jnp in bfloat16, by the root mean square."""
    shape = (1, 20, 2, 16) if name in test_tangent_kernels.FEW else (2, 300, 4, 64)
    arrays = jax.random.normal(jax.random.key(1), (6, *shape), jnp.bfloat16)
    attend = functools.partial(flash_attention_with_lse, backend=backend, differentiable="any")
    run = lambda f, dtype: jax.jit(
        functools.partial(TRANSFORMED[name], functools.partial(f, causal=True))
    )(*arrays.astype(dtype))
    exact, plain = run(reference.attention, jnp.float32), run(checks.plain, jnp.bfloat16)
    wide = lambda tree: [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    found, exact, plain = map(wide, (run(attend, jnp.bfloat16), exact, plain))
    size = lambda x: np.sqrt(np.mean(np.square(x)))
    for a, b, c in zip(found, exact, plain, strict=True):
        assert size(a - b) <= 3 * size(c - b) + 1e-3 * size(b)


@pytest.mark.parametrize("case", test_tangent_kernels.CASES, ids=str)
def test_tangents_of_hopper(case):
    call = tangent_checks.bind("hopper")
    tangent_checks.assert_matches_oracle(call, case, kernels=True)


@pytest.mark.parametrize("case", test_tangent_kernels.named(*test_tangent_kernels.AFTER_O), ids=str)
def test_tangents_of_hopper_after_the_forward(case):
    call = tangent_checks.bind("hopper")
    tangent_checks.assert_matches_oracle(call, case, kernels=True, how="linearize")


@pytest.mark.parametrize("case", test_portable_interpreted.CASES, ids=str)
def test_tangents_of_portable(case):
    call = tangent_checks.bind("portable")
    tangent_checks.assert_matches_oracle(call, case, kernels=True)


@pytest.mark.parametrize(
    "case", test_tangent_kernels.named(*test_tangent_kernels.SECOND_ORDER), ids=str
)
def test_hessian_vector_products_of_hopper(case):
    call = tangent_checks.bind("hopper")
    tangent_checks.assert_second_order_matches_oracle(call, case)


def test_the_gradient_of_every_order_is_that_of_the_default():
    q, k, v, do = _inputs(2, 512, 8, 2, 128)

    def gradients(differentiable):
        options = {"causal": True, "deterministic": True, "differentiable": differentiable}
        o, pull = jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)
        return o, pull(do)

    pair = gradients("reverse"), gradients("any")
    jax.tree.map(np.testing.assert_array_equal, *pair)


def test_decode_is_bit_identical():
    q, k, v, _ = _inputs(2, 1024, 8, 2, 128)
    decode = jax.jit(lambda q: flash_decode(q, k, v, num_splits=5, backend="hopper"))
    first = decode(q[:, :4])
    for _ in range(50):
        assert jnp.array_equal(first, decode(q[:, :4]))


def test_auto_decodes_with_the_hopper_kernels():
    q, k, v, _ = _inputs(2, 1024, 8, 2, 128)
    q, lengths = q[:, :1], jnp.array([1000, 3])
    assert (
        flash_pallas.explain(flash_pallas.flash_decode, q, k, v, kv_lengths=lengths).backend
        == "hopper"
    )
    found = flash_decode(q, k, v, kv_lengths=lengths)
    near = flash_decode(q, k, v, kv_lengths=lengths, backend="xla")
    assert jnp.abs(found.astype(jnp.float32) - near.astype(jnp.float32)).max() < 2**-7
