"""`jax_enable_x64`: the same kernels, and float64 next to other q is cast, as in jax.nn."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.compat import flash_attn, flex
from flash_pallas.frontend import dispatch
from flash_pallas.nn import attention_fn, linen
from flash_pallas.parallel import context_parallel_attention

from . import checks
from .cases import Case
from .hopper_cases import INTERPRETED, MODIFIERS
from .hopper_ragged_cases import MIXES
from .hopper_ragged_cases import assert_matches_oracle as assert_ragged
from .hopper_ragged_cases import run_public as run_ragged
from .interpreter import race_checked
from .lowering_fuzz import GPUS, on

HOPPER = HopperBackend(interpret=True, num_sms=2)
PORTABLE = PortableBackend(interpret=True, capability="8.0")


@pytest.fixture(autouse=True)
def promotion():
    """Promotes as user programs do: other tests forbid float32 next to float64."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def shape(*sizes, dtype: Any = "bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def ints(*sizes):
    return shape(*sizes, dtype="int32")


def gradient(**options):
    def call(q, k, v, others, backend):
        total = lambda q, k, v: fp.flash_attention(q, k, v, backend=backend, **others, **options)
        return jax.grad(lambda *x: total(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    return call


def decode(q, k, v, others, backend):
    return fp.flash_decode(q, k, v, shared_prefix="auto", backend=backend, **others)


def ragged(q, k, v, others, backend):
    return fp.ragged_paged_attention(q, k, v, backend=backend, **others)


def hessian(q, k, v, others, backend):
    call = lambda q: fp.flash_attention(q, k, v, differentiable="any", backend=backend, **others)
    slope = jax.grad(lambda q: call(q).astype(jnp.float32).sum())
    return jax.jvp(slope, (q,), (q,))


def slanted(score, b, n, i, j):
    """Makes float64 of positions where numpy's and Python's floats are wide."""
    return score - np.float64(0.1) * abs(i - j) + 0.5 * (i // 2)


def wedge(b, n, i, j):
    return j <= 0.75 * i + np.int64(3)


ROWS = [shape(2, 640, 8, 128), shape(2, 640, 2, 128), shape(2, 640, 2, 128)]
# Enough tiles that CTAs divide their numbers.
LONG = [shape(4, 4096, 32, 128), shape(4, 4096, 8, 128), shape(4, 4096, 8, 128)]
PAGES = [shape(20, 64, 2, 128), shape(20, 64, 2, 128)]
TABLE = {"kv_lengths": ints(2), "page_table": ints(2, 8)}
IDS = {"q_segment_ids": ints(2, 640), "kv_segment_ids": ints(2, 640)}
BIAS = {"bias": shape(2, 1, 640, 640), "sinks": shape(8, dtype="float32")}
CALLS = {
    "grouped": (gradient(), LONG, {}),
    "causal": (gradient(causal=True), LONG, {}),
    "deterministic": (gradient(causal=True, deterministic=True), ROWS, {}),
    "modifiers": (gradient(softcap=5.0, dropout_rate=0.1, dropout_seed=1), ROWS, IDS | BIAS),
    "functions": (gradient(score_mod=slanted, mask_mod=wedge), ROWS, {}),
    "second order": (hessian, ROWS, {}),
    "shared prefix": (decode, [shape(2, 1, 8, 128), *PAGES], TABLE),
    "ragged": (ragged, [shape(100, 8, 128), *PAGES], TABLE | {"cu_q_lens": ints(3)}),
}


def kernels(gpu, call, arrays, others, x64: bool) -> list[str]:
    """Returns the text of each kernel of a call that is lowered for a GPU."""
    with jax.enable_x64(x64), on(gpu):
        whole = jax.jit(lambda q, k, v, others: call(q, k, v, others, gpu.backend))
        lowered = whole.trace(*arrays, others).lower(lowering_platforms=("cuda",))
    lines = [line for line in lowered.as_text().splitlines() if "mosaic_gpu" in line]
    return [line.split(" backend_config = ", 1)[-1] for line in lines]


@pytest.mark.thorough(always=["hopper-grouped"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("gpu", ["hopper", "portable-163"])
def test_kernels_are_those_without(gpu, name):
    """Compares kernels; JAX lowers `not` in that of ragged batches by a number of 64 bits."""
    wide, usual = (kernels(GPUS[gpu], *CALLS[name], x64) for x64 in (True, False))
    assert len(wide) == len(usual) > 0
    if (gpu, name) != ("hopper", "ragged"):
        assert wide == usual


def drawn(dtype, seed: int = 0):
    draw = np.random.default_rng(seed).standard_normal
    q, k, v = (jnp.asarray(draw((2, 20, 4, 8)), dtype) for _ in range(3))
    side = {"bias": (2, 1, 20, 20), "alibi_slopes": (4,), "sinks": (2, 4), "captured": (4,)}
    return (q, k, v), {name: np.float32(draw(sizes)) for name, sizes in side.items()}


def total(qkv, side, **options):
    """Computes attention in which the captured array meets the score as it is."""
    captured, others = side["captured"], {n: x for n, x in side.items() if n != "captured"}
    add = lambda score, b, n, i, j: score * captured[n] + 0.01 * (i - j)
    o = fp.flash_attention(*qkv, **others, score_mod=add, **options)
    return jnp.sum(o.astype(jnp.float32) ** 2)


@pytest.mark.parametrize("differentiable", ["reverse", "any"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float64_next_to_queries(dtype, differentiable):
    """Checks that float64 arrays are cast, and that their gradients are float64."""
    with jax.enable_x64(True):
        qkv, side = drawn(dtype)
        found = {}
        for kind in ("float32", "float64"):
            arrays = {name: jnp.asarray(x, kind) for name, x in side.items()}
            loss = lambda qkv, side: total(qkv, side, differentiable=differentiable)
            found[kind] = jax.jit(jax.value_and_grad(loss, (0, 1)))(qkv, arrays)
            assert {x.dtype for x in found[kind][1][1].values()} == {jnp.dtype(kind)}
            assert {x.dtype for x in found[kind][1][0]} == {jnp.dtype(dtype)}
    for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
        a, b = np.float64(a), np.float64(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_forward_mode_of_float64_next_to_queries():
    with jax.enable_x64(True):
        qkv, side = drawn("float32")
        arrays = {name: jnp.asarray(x, "float64") for name, x in side.items()}
        call = lambda side: total(qkv, side, differentiable="any")
        slope = jax.jvp(call, (arrays,), (arrays,))[1]
        grads = jax.grad(call)(arrays)
        expected = sum(jnp.vdot(grads[name], arrays[name]) for name in arrays)
        np.testing.assert_allclose(slope, expected, rtol=1e-4)


def test_a_finite_number_stays_one():
    """Hides by float64's smallest number, of which a cast alone would make -inf."""
    (q, k, v), _ = drawn("float32")
    with jax.enable_x64(True):
        least = jnp.full((20, 20), jnp.finfo(jnp.float64).min)
        some = jnp.where(jnp.arange(20)[:, None] < 5, least, 0.0)[None, None]
        o = fp.flash_attention(q, k, v, bias=some)
        np.testing.assert_allclose(o[:, 3], v.mean(1), rtol=1e-5, atol=1e-6)
        infinite = fp.flash_attention(q, k, v, bias=jnp.full((1, 1, 1, 20), -jnp.inf))
        np.testing.assert_array_equal(infinite, 0.0)
        add = lambda score, b, n, i, j: jnp.where(j > 3, score + least[n, 0], score)
        masked = fp.flash_attention(q, k, v, score_mod=add)
        expected = fp.flash_attention(q, k, v, kv_lengths=jnp.array(4))
        np.testing.assert_allclose(masked, expected, rtol=1e-5, atol=1e-6)


def test_wide_integers_of_functions():
    """Compares captured int64, numbers beyond int32 among them, with int32."""
    (q, k, v), _ = drawn("float32")
    lengths = np.array([7, 2**40], np.int64)
    with jax.enable_x64(True):
        wide = jnp.asarray(lengths)
        found = fp.flash_attention(q, k, v, mask_mod=lambda b, n, i, j: j < wide[b])
        ends = jnp.broadcast_to(wide[:, None], (2, 20))
        rows = fp.flash_attention(q, k, v, mask_mod=lambda b, n, i, j: j < ends[b, i])
    expected = fp.flash_attention(q, k, v, kv_lengths=jnp.array([7, 20]))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [fp.dot_product_attention, attention_fn, jax.nn])
def test_drop_ins_take_a_float64_bias(make):
    make = make.dot_product_attention if make is jax.nn else make
    (q, k, v), _ = drawn("float32")
    with jax.enable_x64(True):
        bias = jnp.where(jnp.tril(jnp.ones((20, 20), bool)), 0.0, -jnp.inf)[None, None]
        assert bias.dtype == jnp.float64
        found = make(q, k, v, bias=bias)
        assert found.dtype == jnp.float32
    expected = fp.flash_attention(q, k, v, causal=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(always=["(1, 4)-float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 4), (2, 4)], ids=str)
def test_lists_of_entries_and_heads(shape, dtype):
    with jax.enable_x64(True):
        draw = np.random.default_rng(1).standard_normal
        q, k, v = (jnp.asarray(draw((2, 130, 4, 8)), dtype) for _ in range(3))
        seen = np.random.default_rng(2).random((*shape, 130, 130)) < 0.3
        seen[:, 0, :, 64:] = False
        seen[..., 0] = True
        mask = fp.BlockMask.from_dense(jnp.asarray(seen), block=(64, 64))
        loss = lambda hide: lambda q: (fp.flash_attention(q, k, v, **hide) ** 2).sum()
        hides = {"block_mask": mask}, {"mask": jnp.asarray(seen)}
        found, expected = (jax.value_and_grad(loss(hide))(q) for hide in hides)
        if shape == (2, 4):
            of_any = (loss(hide | {"differentiable": "any"}) for hide in hides)
            products = (jax.jvp(jax.grad(each), (q,), (v,))[1] for each in of_any)
            pairs = zip((found, expected), products, strict=True)
            found, expected = ((*pair, product) for pair, product in pairs)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_shared_prefix_warns_of_nothing(dtype):
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        draw = np.random.default_rng(1).standard_normal
        pages = jnp.asarray(draw((8, 16, 2, 16)), dtype)
        q = jnp.asarray(draw((2, 1, 4, 16)), dtype)
        places: dict[str, Any] = {"page_table": jnp.array([[1, 2, 3], [1, 5, 6]])}
        places["kv_lengths"] = jnp.array([20, 30])
        found, expected = (
            fp.flash_decode(q, pages, pages, shared_prefix=shared, **places)
            for shared in ("auto", None)
        )
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# --- Every public function, with arrays of 64 bits next to data of 32 ----------------------------


class Sides:
    """Draws the arrays of a call: `floats` and `ints` are of 64 bits where x64 is on."""

    def __init__(self):
        self.draw = np.random.default_rng(3).standard_normal

    def data(self, *sizes):
        return jnp.asarray(self.draw(sizes), jnp.float32)

    def floats(self, *sizes):
        return jnp.asarray(np.float32(self.draw(sizes)), jnp.result_type(float))

    def ints(self, *values):
        return jnp.asarray(values, jnp.result_type(int))


def _varlen(x):
    q, k, v = x.data(8, 4, 8), x.data(8, 2, 8), x.data(8, 2, 8)
    sides = {"sinks": x.floats(4), "alibi_slopes": x.floats(4), "bias": x.floats(1, 8, 8)}
    return fp.flash_attention_varlen(
        q, k, v, cu_seqlens_q=x.ints(0, 3, 8), return_lse=True, **sides
    )


def _decode(x):
    k, table = (
        jnp.round(20 * x.data(8, 16, 2, 8)).astype(jnp.int8),
        x.ints(0, 1, 2, 3).reshape(2, 2),
    )
    scales = {"k_scale": abs(x.floats(2)) / 20, "v_scale": abs(x.floats(8, 2)) / 20}
    sides = {"sinks": x.floats(4), "alibi_slopes": x.floats(2, 4), "window": x.ints(3, 9)}
    given = {"kv_lengths": x.ints(20, 9), "page_table": table, "kv_starts": x.ints(1, 0)}
    return fp.flash_decode(x.data(2, 1, 4, 8), k, k, **given, **scales, **sides)


def _drafts(x):
    lengths, seen = x.ints(5, 8), jnp.tril(jnp.ones((3, 3), bool))
    given = {"kv_lengths": lengths, "draft_mask": seen, "window": x.ints(2, 3)}
    return fp.flash_decode(x.data(2, 3, 4, 8), x.data(2, 8, 2, 8), x.data(2, 8, 2, 8), **given)


def _ragged(x):
    pages, new = x.data(8, 16, 2, 8), x.data(8, 2, 8)
    places = {"kv_lengths": x.ints(20, 21), "page_table": x.ints(0, 1, 0, 3).reshape(2, 2)}
    places |= {"cu_q_lens": x.ints(0, 4, 5), "num_seqs": x.ints(2), "sinks": x.floats(4)}
    written = {"new_k": new, "new_v": new, "shared_prefix": "auto"}
    return fp.ragged_paged_attention(x.data(8, 4, 8), pages, pages, **places, **written)


def _append(x):
    empty = jnp.zeros((2, 16, 2, 8), jnp.float32)
    cache, new = fp.KVCache(empty, empty, lengths=x.ints(0, 7)), x.data(2, 3, 2, 8)
    return fp.append_kv(cache, new, new, new_lengths=x.ints(3, 1), rope_theta=1e4)[:2]


def _layer(x):
    layer = linen.FlashAttention(4, num_kv_heads=2, alibi=True, use_sinks=True, rope_theta=1e4)
    data, bias = x.data(2, 8, 16), x.floats(2, 1, 8, 8)
    weights = jax.tree.map(lambda a: x.data(*a.shape), layer.init(jax.random.key(0), data))
    total = lambda bias: (layer.apply(weights, data, bias=bias) ** 2).sum()
    return jax.value_and_grad(total)(bias)


def _over_devices(x, strategy):
    mesh = jax.make_mesh((2,), ("s",), (AxisType.Auto,), devices=jax.devices()[:2])
    q, k, v = (x.data(2, 16, 4, 8) for _ in range(3))
    ids, order = (jnp.broadcast_to(x.ints(*range(16)) // n, (2, 16)) for n in (9, 1))
    given = {"q_segment_ids": ids, "kv_segment_ids": ids, "q_positions": order}
    given |= {"kv_positions": order, "strategy": strategy, "causal": True}
    call = lambda sinks: context_parallel_attention(
        q, k, v, mesh=mesh, axis="s", sinks=sinks, **given
    )
    return jax.value_and_grad(lambda sinks: (call(sinks) ** 2).sum())(x.floats(4))


def _kvcache(x):
    arrays = (x.data(2, 1, 4, 8), *(x.data(2, length, 2, 8) for length in (32, 32, 1, 1)))
    sides = {"rotary_cos": x.floats(32, 4), "rotary_sin": x.floats(32, 4)}
    sides |= {"cache_seqlens": x.ints(3, 4), "alibi_slopes": x.floats(4)}
    return flash_attn.flash_attn_with_kvcache(*arrays, causal=True, **sides)


def _flex(x):
    slopes, ends = x.floats(4), x.ints(3, 8)
    add = lambda score, b, h, i, j: score + 0.1 * (i - j) * slopes[h]
    hide = flex.create_block_mask(lambda b, h, i, j: j < ends[b], 2, None, 8, 8)
    return flex.flex_attention(*(x.data(2, 4, 8, 8) for _ in range(3)), add, hide)


FUNCTIONS = {
    "varlen": _varlen,
    "decode": _decode,
    "drafts": _drafts,
    "ragged": _ragged,
    "append": _append,
    "layer": _layer,
    "ring": functools.partial(_over_devices, strategy="ring"),
    "all_gather": functools.partial(_over_devices, strategy="all_gather"),
    "ulysses": functools.partial(_over_devices, strategy="ulysses"),
    "kvcache": _kvcache,
    "flex": _flex,
}


@pytest.mark.thorough(always=["decode", "all_gather"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_wide_arrays(name):
    """Compares them with the same numbers in 32 bits; gradients are those of wide arrays."""
    usual = FUNCTIONS[name](Sides())
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        found = FUNCTIONS[name](Sides())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(usual), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    if isinstance(found, tuple) and name in ("layer", "ring", "all_gather", "ulysses"):
        assert [x.dtype for x in found] == [jnp.float32, jnp.float64]
    else:
        assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}


# --- Interpreted kernels --------------------------------------------------------------------------

GROUPED = Case("grouped", T=130, S=100, N=4, dtype="bfloat16", causal=True, x64=True)
GROUPED = dataclasses.replace(GROUPED, integers="int64", kv_lengths=(90,), sinks=True, alibi="N")
(EVERYTHING,) = (case for case in (*INTERPRETED, *MODIFIERS) if case.name == "everything")


@pytest.mark.thorough(always=["-hopper"])
@pytest.mark.interpret
@pytest.mark.parametrize("backend", [HOPPER, PORTABLE], ids=["hopper", "portable"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_interpreted_gradients(backend, deterministic):
    case = dataclasses.replace(GROUPED, deterministic=deterministic)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(backend), case, kernels=True)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("backend", [HOPPER, PORTABLE], ids=["hopper", "portable"])
def test_interpreted_modifiers(backend):
    case = dataclasses.replace(EVERYTHING, x64=True, integers="int64")
    with race_checked():
        checks.assert_matches_oracle(checks.bind(backend), case, kernels=True)


@pytest.mark.thorough(always=["portable"])
@pytest.mark.interpret
@pytest.mark.parametrize("backend", [HOPPER, PORTABLE], ids=["hopper", "portable"])
def test_interpreted_decoding_of_a_shared_prefix(backend, monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", {backend.name: backend, "xla": XlaBackend()})
    with jax.enable_x64(True):
        draw = np.random.default_rng(1).standard_normal
        pages = jnp.asarray(draw((8, 16, 1, 64)), "bfloat16")
        q = jnp.asarray(draw((2, 1, 2, 64)), "bfloat16")
        given: dict[str, Any] = {"page_table": jnp.array([[1, 2, 3], [1, 2, 6]])}
        given |= {"kv_lengths": jnp.array([40, 37]), "shared_prefix": "auto"}
        call = lambda name: fp.flash_decode(q, pages, pages, backend=name, **given)
        with race_checked():
            found = jax.block_until_ready(call(backend.name))
        expected = np.float32(call("xla"))
        np.testing.assert_allclose(np.float32(found), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.thorough
@pytest.mark.interpret
def test_interpreted_ragged_batches(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKENDS", {"hopper": HOPPER, "xla": XlaBackend()})
    (mix,) = (mix for mix in MIXES if mix.name == "pages_of_128")
    mix = dataclasses.replace(mix, counts=(20, 4, 1, 0), tokens=32)
    with jax.enable_x64(True), race_checked():
        found, whole = run_ragged(mix)
    assert_ragged(mix, found, whole, least=1)
