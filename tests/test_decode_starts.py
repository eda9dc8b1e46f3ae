"""Caches padded on the left, and windows that are arrays: against the oracle, on xla."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas import KVCache
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla import decode as xla_decode
from flash_pallas.core import decode, softmax
from flash_pallas.frontend import dispatch

from .checks import explain_on
from .hopper_decode_cases import STEPS, Step, assert_matches_oracle
from .interpreter import race_checked

BACKEND = XlaBackend()
BOUNDED = [step for step in STEPS if step.starts is not None or step.windows is not None]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla_decode, "BLOCK", 64)


def drawn(seed: int) -> Step:
    """Draws lengths, starts and windows: at block boundaries, beyond the length, anywhere."""
    rng = np.random.default_rng(seed)
    draw = lambda most: tuple(
        int(rng.choice([0, 1, 63, 64, 65, 128, rng.integers(most)])) for _ in range(4)
    )
    return Step(
        f"drawn_{seed}",
        lengths=tuple(256 - n for n in draw(250)),
        T=int(rng.integers(1, 17)),
        N=4,
        K=2,
        dtype=str(rng.choice(["float16", "bfloat16"])),
        page_size=[None, 16, 64][rng.integers(3)],
        num_splits=int(rng.integers(1, 6)),
        starts=draw(300),
        windows=draw(300) if seed % 2 else None,
        softcap=[None, 3.0][rng.integers(2)],
        sides=tuple(name for name in ("sinks", "slopes") if rng.integers(2)),
    )


@pytest.mark.thorough(always=["drawn_1"])
@pytest.mark.parametrize("step", [*BOUNDED, *map(drawn, range(8))], ids=str)
def test_the_oracle(step):
    given, whole = step.operands()
    blocks = BACKEND.decode.plan(decode.describe(given, step.spec))
    found = jax.jit(lambda x: BACKEND.decode.run(step.spec, blocks, x))(
        jax.tree.map(jnp.asarray, given)
    )
    assert_matches_oracle(step, whole, (found.o, softmax.natural(found.lse_log2, found.shift)))


def arrays(tokens: int = 2):
    """Draws (q, k, v, lengths, starts) of three sequences; the last has no key."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, n, 4, 32)).astype(np.float32) for n in (tokens, 256, 256))
    lengths, starts = np.array([200, 256, 130]), np.array([70, 128, 130])
    return tuple(map(jnp.asarray, (q, k[:, :, :2], v[:, :, :2], lengths, starts)))


def test_a_sequence_that_starts_at_its_length_has_no_keys():
    q, k, v, lengths, starts = arrays()
    attend = partial(fp.flash_decode, q, k, v, kv_lengths=lengths, return_lse=True)
    o, lse = attend(kv_starts=starts)
    assert (o[2] == 0).all() and (lse[2] == -jnp.inf).all() and jnp.isfinite(lse[:2]).all()
    hidden = jax.jit(lambda starts: attend(kv_starts=starts)[0])
    np.testing.assert_array_equal(hidden(starts.at[2].set(2**31 - 1)), hidden(starts))
    without, of_zero = (attend(kv_starts=x)[0] for x in (None, 0))
    of_negative = hidden(jnp.full(3, -(2**31)))
    np.testing.assert_array_equal(of_zero, without)
    np.testing.assert_array_equal(of_negative, without)


def test_padding_is_as_if_it_were_not_there():
    q, k, v, lengths, starts = arrays()
    o, lse = fp.flash_decode(q, k, v, kv_lengths=lengths, kv_starts=starts, return_lse=True)
    for b in range(2):
        own = slice(b, b + 1), slice(int(starts[b]), int(lengths[b]))
        right = fp.flash_decode(q[own[0]], k[own], v[own], return_lse=True)
        np.testing.assert_allclose(o[own[0]], right[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[own[0]], right[1], rtol=1e-5, atol=1e-6)


def test_one_program_serves_local_and_global_layers():
    q, k, v, lengths, starts = arrays()
    traces = []

    @jax.jit
    def layers(windows):
        def one(_, window):
            traces.append(1)
            attend = partial(fp.flash_decode, q, k, v, kv_lengths=lengths, kv_starts=starts)
            return None, attend(window=window)

        return jax.lax.scan(one, None, windows)[1]

    found = layers(jnp.array([0, 40, 100, 256]))
    assert len(traces) == 1
    for o, window in zip(found, (0, 40, 100, None), strict=True):
        right = fp.flash_decode(q, k, v, kv_lengths=lengths, kv_starts=starts, window=window)
        np.testing.assert_allclose(o, right, rtol=1e-5, atol=1e-6)


def test_vmap_is_one_call_after_another():
    q, k, v, lengths, starts = arrays()
    windows = jnp.array([[10, 300, 40], [0, 64, 128]])
    attend = lambda starts, window: fp.flash_decode(
        q, k, v, kv_lengths=lengths, kv_starts=starts, window=window
    )
    found = jax.vmap(attend)(jnp.stack([starts, starts // 2]), windows)
    right = jnp.stack([attend(starts, windows[0]), attend(starts // 2, windows[1])])
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("types", ["Auto", "Explicit"])
def test_sequences_on_a_mesh(devices, types):
    q, k, v, lengths, starts = (x[jnp.array([0, 1, 2, 0])] for x in arrays())
    attend = lambda q, k, v, n, starts, window: fp.flash_decode(
        q, k, v, kv_lengths=n, kv_starts=starts, window=window
    )
    given = (q, k, v, lengths, starts, jnp.array([3, 100, 7, 300]))
    right = jax.jit(attend)(*given)
    kind = getattr(jax.sharding.AxisType, types)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=devices[:4])
    cuts = [jax.P("data", None, "model")] * 3 + [jax.P("data")] * 3
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.NamedSharding(mesh, cut))
            for x, cut in zip(given, cuts, strict=True)
        ]
        found = jax.jit(attend)(*placed)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_blocks_of_padding_are_not_read(monkeypatch):
    read = []
    gather = xla_decode._gather

    def noted(cache, table, place, heads):
        jax.debug.callback(lambda first: read.append(int(first)), place[0])
        return gather(cache, table, place, heads)

    monkeypatch.setattr(xla_decode, "_gather", noted)
    q, k, v, lengths, starts = (x[:2] for x in arrays(tokens=1))
    jax.block_until_ready(fp.flash_decode(q, k, v, kv_lengths=lengths, kv_starts=starts))
    jax.effects_barrier()
    assert sorted(set(read)) == [64, 128, 192]  # the first starts at 70


@pytest.mark.parametrize(
    ("starts", "lengths", "blocks"),
    [
        ((0, 256), (256, 256), (4, 0)),
        ((64, 191), (200, 256), (3, 2)),
        ((250, 251), (250, 250), (0, 0)),
        ((300, 63), (256, 64), (0, 1)),
    ],
)
def test_the_hopper_kernel_plans_what_lies_between(starts, lengths, blocks):
    """Counts the blocks between start and length, of which every split reads its share."""
    problem = decode.describe(
        Step("any", (1, 1), starts=(1, 1)).operands()[0], Step("any", (1,)).spec
    )
    for b, count in enumerate(blocks):
        position = lengths[b] - 1
        keys = jnp.int32(lengths[b]), jnp.int32(position)
        bound = problem.lower_bound(jnp.array(starts), None, b, keys)
        found = bound.mask.kv_blocks(jnp.int32(position), 1, jnp.int32(lengths[b]), 64, bound.start)
        assert int(found.stop - found.start) == count


@pytest.mark.interpret
def test_a_call_reaches_the_hopper_kernel(monkeypatch):
    backend = HopperBackend(interpret=True, num_sms=2)
    monkeypatch.setattr(dispatch, "BACKENDS", dispatch.BACKENDS | {"hopper": backend})
    q, k, v, lengths, starts = arrays()
    q, k, v = (jnp.tile(x, 2).astype(jnp.bfloat16) for x in (q, k, v))
    options = {"kv_lengths": lengths, "kv_starts": starts, "window": jnp.array([40, 90, 300])}
    with race_checked():
        found = fp.flash_decode(q, k, v, backend="hopper", **options)
    right = fp.flash_decode(q, k, v, backend="xla", **options)
    assert jnp.abs(found.astype(jnp.float32) - right.astype(jnp.float32)).max() < 2**-6


def test_explain_says_what_a_call_has():
    q, k = (
        jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.bfloat16),
        jnp.ones((2, 8192, 2, 64), jnp.bfloat16),
    )
    per_entry = jax.ShapeDtypeStruct((2,), jnp.int32)
    found = explain_on("H200", fp.flash_decode, q, k, k, kv_starts=per_entry, window=per_entry)
    assert found.backend == "hopper" and found.problem.features == {"kv_starts", "window_left"}
    plain = explain_on("H200", fp.flash_decode, q, k, k)
    assert found.blocks.num_splits == plain.blocks.num_splits
    assert explain_on("A100", fp.flash_decode, q, k, k, kv_starts=3).backend == "portable"


BAD = [
    ({"kv_starts": jnp.ones(3, jnp.int32)}, ValueError, r"kv_starts has shape \(3,\)"),
    ({"kv_starts": jnp.ones(2)}, TypeError, "kv_starts has dtype float32"),
    ({"kv_starts": True}, TypeError, "kv_starts must be an int32 array"),
    ({"kv_starts": np.array([0, 2**40])}, ValueError, "kv_starts contains 1099511627776"),
    ({"kv_start": 3}, TypeError, "did you mean 'kv_starts'"),
    ({"window": jnp.array([1, -1])}, ValueError, "its entries must be at least 0"),
    ({"window": jnp.ones(2)}, TypeError, "window has dtype float32"),
    ({"window": jnp.ones(3, jnp.int32)}, ValueError, r"window has shape \(3,\)"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_arguments(options, error, message):
    q, k = jnp.ones((2, 1, 4, 16)), jnp.ones((2, 8, 2, 16))
    with pytest.raises(error, match=message):
        fp.flash_decode(q, k, k, **options)


# --- caches ---------------------------------------------------------------------------------------


def test_a_cache_carries_its_starts():
    q, k, v, _, _ = arrays(tokens=1)
    starts = jnp.array([5, 0, 3], jnp.int32)
    cache = KVCache.empty(3, 64, 2, 32, jnp.float32, starts=starts)
    assert (
        len(jax.tree.leaves(cache)) == 4 and len(jax.tree.leaves(cache._replace(starts=None))) == 3
    )
    cache = fp.append_kv(cache, k[:, :20], v[:, :20])

    def step(cache, new):
        cache = fp.append_kv(cache, *new)
        o = fp.flash_decode(q, cache.k, cache.v, kv_lengths=cache.lengths, kv_starts=cache.starts)
        return cache, o

    rows = [jnp.stack([x[:, t : t + 1] for t in range(20, 24)]) for x in (k, v)]
    cache, found = jax.jit(lambda *given: jax.lax.scan(step, *given))(cache, rows)
    np.testing.assert_array_equal(cache.starts, starts)
    np.testing.assert_array_equal(cache.lengths, [24] * 3)
    for b, start in enumerate([5, 0, 3]):
        own = slice(b, b + 1), slice(start, 24)
        right = fp.flash_decode(q[own[0]], k[own], v[own])
        np.testing.assert_allclose(found[-1, own[0]], right, rtol=1e-5, atol=1e-6)


def test_keys_are_rotated_by_their_positions_behind_the_padding():
    _, k, v, _, _ = arrays()
    padded = KVCache.empty(3, 32, 2, 32, jnp.float32, starts=jnp.array([5, 0, 3]))
    padded = fp.append_kv(padded, k[:, :20], v[:, :20], rope_theta=100.0)
    for b, start in enumerate([5, 0, 3]):
        right = fp.apply_rope(k[b : b + 1, start:20], jnp.arange(20 - start), 100.0)
        np.testing.assert_allclose(padded.k[b, start:20], right[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("starts", "error", "message"),
    [
        (jnp.ones(2, jnp.int32), ValueError, r"cache.starts has shape \(2,\).*for 3 sequences"),
        (jnp.ones(3), TypeError, "cache.starts has dtype float32"),
        (5, TypeError, "cache.starts must be an array of integers, got int"),
    ],
)
def test_starts_of_a_cache_that_cannot_be(starts, error, message):
    _, k, v, _, _ = arrays()
    cache = KVCache.empty(3, 32, 2, 32, jnp.float32, starts=starts)
    with pytest.raises(error, match=message):
        fp.append_kv(cache, k[:, :2], v[:, :2])
