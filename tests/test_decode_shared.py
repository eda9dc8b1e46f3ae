"""Values that are columns of the keys, as in multi-head latent attention: against values given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.decode.tiles import DecodeBlocks
from flash_pallas.backends.hopper.wide.latent import LatentBlocks
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.core import decode, softmax
from flash_pallas.frontend import dispatch, validate_decode

from .hopper_decode_cases import Step, assert_matches_oracle
from .interpreter import race_checked

B, S, H, HV = 2, 128, 40, 32


def drawn(paged: bool = False, dtype=jnp.float32, kv_heads: int = 1):
    """Draws (q, k, arguments) of a step."""
    rng = np.random.default_rng(5)
    shape = (2 * B * S // 64, 32, kv_heads, H) if paged else (B, S, kv_heads, H)
    q, k = (rng.standard_normal(x).astype(np.float32) for x in ((B, 1, 4, H), shape))
    given: dict[str, Any] = {"kv_lengths": jnp.array([100, 7])}
    if paged:
        given["page_table"] = jnp.asarray(rng.permutation(len(k)).reshape(B, -1), jnp.int32)
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype), given


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize(
    "options", [{}, {"num_splits": 3, "window": 20}, {"kv_starts": 5}], ids=str
)
def test_they_are_the_first_columns(paged, options):
    q, k, given = drawn(paged)
    found = fp.flash_decode(q, k, v_head_dim=HV, return_lse=True, **given, **options)
    right = fp.flash_decode(q, k, k[..., :HV], return_lse=True, **given, **options)
    assert found[0].shape == (B, 1, 4, HV)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_a_number_they_are_all_columns():
    q, k, given = drawn()
    found = fp.flash_decode(q, k, **given)
    np.testing.assert_array_equal(found, fp.flash_decode(q, k, k, v_head_dim=H, **given))


@pytest.mark.parametrize("rows", [1, B], ids=["heads", "sequences"])
def test_eight_bits_have_one_scale(rows):
    q, k, given = drawn()
    k = jnp.clip(jnp.round(k * 40), -127, 127).astype(jnp.int8)
    scale = jnp.linspace(0.01, 0.03, rows)[:, None]
    scale = scale[0] if rows == 1 else scale
    found = fp.flash_decode(q, k, v_head_dim=HV, k_scale=scale, **given)
    scales: dict[str, Any] = {"k_scale": scale, "v_scale": scale}
    np.testing.assert_array_equal(found, fp.flash_decode(q, k, k[..., :HV], **scales, **given))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_chosen_blocks(paged):
    q, k, given = drawn(paged)
    options: dict[str, Any] = {"kv_blocks": jnp.array([[[0, 2]], [[0, -1]]])}
    options |= {"kv_block_size": 32, **given}
    found = fp.flash_decode(q, k, v_head_dim=HV, **options)
    np.testing.assert_array_equal(found, fp.flash_decode(q, k, k[..., :HV], **options))


def test_vmap():
    q, k, given = drawn()
    call = lambda q, k: fp.flash_decode(q, k, v_head_dim=HV, **given)
    both = jnp.stack([q, -q]), jnp.stack([k, 2 * k])
    found = jax.vmap(call)(*both)
    np.testing.assert_allclose(found[1], call(-q, 2 * k), rtol=1e-5, atol=1e-5)
    one_cache = jax.vmap(call, in_axes=(0, None))(both[0], k)
    np.testing.assert_allclose(one_cache[1], call(-q, k), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh(devices, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=devices[:4])
    q, k, given = drawn(kv_heads=2)
    right = fp.flash_decode(q, k, v_head_dim=HV, **given)
    cut = NamedSharding(mesh, P("data", None, "model"))
    with jax.set_mesh(mesh):
        q, k = (jax.device_put(x, cut) for x in (q, k))
        found = jax.jit(lambda q, k: fp.flash_decode(q, k, v_head_dim=HV, **given))(q, k)
    assert found.sharding.is_equivalent_to(cut, 4)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_steps_with_a_cache():
    _, k, _ = drawn()
    q = jax.random.normal(jax.random.key(0), (B, S, 4, H))
    cache = fp.KVCache.empty(B, S, 1, H, k.dtype, shared=True)
    assert cache.v is None
    cache, o = fp.append_kv(cache, k[:, :120]), jnp.empty(0)
    for t in range(120, 123):
        cache = fp.append_kv(cache, k[:, t : t + 1])
        o = fp.flash_decode(q[:, t : t + 1], cache.k, v_head_dim=HV, kv_lengths=cache.lengths)
    whole = fp.flash_attention(q[:, :123], k[:, :123], k[:, :123, :, :HV], causal=True)
    assert cache.v is None and cache.lengths.tolist() == [123, 123]
    np.testing.assert_allclose(np.asarray(o)[:, 0], np.asarray(whole)[:, -1], rtol=1e-5, atol=1e-5)


def test_kernels_above_head_dim_256_take_them_from_one_tile(monkeypatch):
    backends = {"hopper": HopperBackend(interpret=True, num_sms=132), "xla": XlaBackend()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q, k = of(1, 1, 16, 576), of(1, 32768, 1, 576)
    found = fp.explain(fp.flash_decode, q, k, v_head_dim=512)
    assert found.backend == "hopper" and found.blocks.num_splits == 128
    assert found.blocks.upright and found.blocks.block_kv == 64
    # With an array of their own there is no room for tiles of 64 keys.
    apart = fp.explain(fp.flash_decode, q, k, of(1, 32768, 1, 512))
    assert apart.blocks.block_kv == 32
    many = fp.explain(fp.flash_decode, of(1, 1, 48, 576), k, v_head_dim=512).blocks
    assert not many.upright and many.block_kv == 64


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "length", "splits"),
    [(1, 1, 128, 32768, 64), (128, 2, 128, 4096, 1), (16, 1, 64, 32768, 8), (2, 1, 64, 200, 1)],
)
def test_64_heads_of_a_latent_cache(monkeypatch, batch, tokens, heads, length, splits):
    backend = HopperBackend(interpret=True, num_sms=132)
    monkeypatch.setattr(dispatch, "BACKENDS", {"hopper": backend})
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q, k = of(batch, tokens, heads, 576), of(batch, length, 1, 576)
    assert fp.explain(fp.flash_decode, q, k, v_head_dim=512).blocks == LatentBlocks(
        num_splits=splits
    )
    assert fp.explain(fp.flash_decode, q, k, v_head_dim=512, num_splits=3).blocks.num_splits == 3
    modified: list[dict[str, Any]] = [
        {"window": 8},
        {"kv_starts": 1},
        {"alibi_slopes": jnp.ones(heads)},
        {"draft_mask": jnp.ones((tokens, tokens), bool)},
    ]
    for others in modified:
        other = fp.explain(fp.flash_decode, q, k, v_head_dim=512, **others).blocks
        assert isinstance(other, DecodeBlocks)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize(
    "step",
    [
        Step("narrow", (130, 77), H=96, Hv=64, page_size=16, num_splits=2, shared=True),
        Step("latent", (90, 33), N=12, H=576, Hv=512, S=96, num_splits=2, shared=True),
        Step("wide", (90, 33), H=320, Hv=304, S=96, page_size=48, num_splits=2, shared=True),
    ],
    ids=str,
)
def test_portable_kernels(step):
    backend = PortableBackend(interpret=True, num_sms=2, capability="9.0")
    given, whole = step.operands()
    problem = decode.describe(given, step.spec)
    assert problem.shares_kv and backend.decode.refusal(problem) is None
    with race_checked():
        found = backend.decode.run(step.spec, backend.decode.plan(problem), given)
        found = jax.block_until_ready(found)
    assert_matches_oracle(step, whole, (found.o, softmax.natural(found.lse_log2)))


Q, K, _ = drawn()
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "too many": (
        {"v_head_dim": H + 1},
        ValueError,
        "v_head_dim is 41 and k has head dim 40.*1 to 40",
    ),
    "none": ({"v_head_dim": 0}, ValueError, "v_head_dim is 0"),
    "no int": ({"v_head_dim": 8.0}, TypeError, "v_head_dim is 8.0: it must be an int"),
    "bool": ({"v_head_dim": True}, TypeError, "v_head_dim is True"),
    "both": (
        {"v": K, "v_head_dim": 8},
        ValueError,
        r"v_head_dim is 8 and v has shape.*leave v out",
    ),
    "scale": (
        {"v_scale": jnp.ones(1)},
        ValueError,
        "v_scale is given and v is None.*leave v_scale",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        fp.flash_decode(Q, K, **options)
    with pytest.raises(error, match=message):
        fp.explain(fp.flash_decode, Q, K, **options)


BAD_APPENDS: dict[str, tuple[dict[str, Any], str]] = {
    "values": ({"v": K}, "v is given and cache.v is None.*leave v out"),
    "scale": ({"v_scale": jnp.ones(1)}, "v_scale is given and cache.v is None"),
    "rotation": ({"rope_theta": 10_000.0}, "it would rotate the values.*apply_rope"),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_bad_appends(name):
    options, message = BAD_APPENDS[name]
    cache = fp.KVCache.empty(B, 2 * S, 1, H, K.dtype, shared=True)
    with pytest.raises(ValueError, match=message):
        fp.append_kv(cache, K, **options)


def test_a_cache_with_values_needs_them():
    cache = fp.KVCache.empty(B, 2 * S, 1, H, K.dtype)
    with pytest.raises(ValueError, match=r"v is None and cache\.v has shape"):
        fp.append_kv(cache, K)


def test_layers_have_values_of_their_own():
    from flash_pallas.nn.linen import FlashAttention

    layer, x = FlashAttention(num_heads=2, causal=True), jnp.ones((B, 4, 16))
    params = layer.init(jax.random.key(0), x)
    cache = fp.KVCache.empty(B, S, 2, 8, x.dtype, shared=True)
    with pytest.raises(ValueError, match=r"cache\.v is None: a layer projects values of its own"):
        layer.apply(params, x, cache=cache)


def test_the_spec_says_how_many_columns():
    spec, operands = validate_decode.canonicalize(
        Q, K, None, validate_decode.DecodeArguments(v_head_dim=HV)
    )
    assert (spec.v_columns, operands.v) == (HV, None)
    assert decode.describe(operands, spec).v_head_dim == HV
