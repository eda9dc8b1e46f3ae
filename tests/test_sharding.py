"""Attention under jit on arrays sharded over batch and heads: per shard, with the same results."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.transforms import derivatives

B, T, S, N, H = 4, 9, 12, 8, 8
ATOL = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of a few dozen terms of order one
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(devices, types, **sizes):
    """Returns a mesh of these axes, all of one type; names are those of real programs."""
    types = (types,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs(kv_heads, *extra, batch=B):
    return (
        draw(*extra, batch, T, N, H, seed=0),
        draw(*extra, batch, S, kv_heads, H, seed=1),
        draw(*extra, batch, S, kv_heads, H, seed=2),
    )


def sides(batch=B):
    """Returns operands with gradients that shards share, and some without."""
    ids = np.sort(np.random.default_rng(3).integers(-1, 2, (batch, S)), axis=1)
    return {
        "bias": draw(1, N, 1, S, seed=4),
        "sinks": draw(N, seed=5),
        "alibi_slopes": draw(N, seed=6),
        "q_segment_ids": jnp.asarray(ids[:, :T], jnp.int32),
        "kv_segment_ids": jnp.asarray(ids, jnp.int32),
        "kv_lengths": jnp.array([12, 1, 5, 7], jnp.int32)[:batch],
    }


def gradient(q, k, v, side, **options):
    """Computes (o, gradients of q, k, v and floats of `side`); cotangents are not symmetric."""

    def loss(q, k, v, learned):
        o, lse = fp.flash_attention_with_lse(q, k, v, **options, **{**side, **learned})
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0)), o

    learned = {n: x for n, x in side.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    (_, o), grads = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, learned)
    return o, grads


def compare(call, args, specs, mesh):
    """Runs `call` on sharded and on whole arguments; returns both results, which are close.

    No shard of q, k or v is gathered or sent; gradients of small operands may be.
    """
    jitted = jax.jit(call)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    sharded = jax.tree.map(put, args, specs)
    compiled = jitted.lower(*sharded).compile()
    found, expected = compiled(*sharded), jitted(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **ATOL)
    assert moved(compiled.as_text()) < B // 2 * S * H  # the smallest shard of k
    return found, expected


def moved(text: str) -> int:
    """Returns the number of elements of the largest array that is gathered or sent."""
    names = r"(?:all-gather|all-to-all|collective-permute)(?:-start)?\("
    shapes = re.findall(rf"= \(?\w+\[([\d,]*)\]\S* {names}", text)
    return max([int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes], default=0)


HEADS, BOTH = P(None, None, "model"), P("data", None, "model")
FSDP = P(("data", "fsdp"))
# Key heads, batch; how queries and keys are cut; sizes of data, fsdp and model. An axis
# that cuts neither is that of the parameters, or of the experts.
LAYOUTS = {
    "data parallel": (2, B, P("data"), P("data"), (4, 1, 2)),
    "data and fsdp": (2, B, FSDP, FSDP, (2, 2, 2)),
    "minor axis first": (2, B, P(("fsdp", "data")), P(("fsdp", "data")), (2, 2, 2)),
    "data and model": (2, B, BOTH, BOTH, (2, 2, 2)),
    "one key head": (1, B, BOTH, P("data"), (2, 2, 2)),
    "fewer key heads than shards": (2, B, HEADS, P(), (1, 2, 4)),
    "batch 1": (4, 1, HEADS, HEADS, (2, 1, 4)),
}


@pytest.mark.thorough(always=["minor axis first-explicit"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shards_compute_what_the_whole_does(eight_devices, types, layout):
    kv_heads, batch, q_spec, kv_spec, (data, fsdp, model) = layout
    mesh = mesh_of(eight_devices, types, data=data, fsdp=fsdp, model=model)
    side = sides(batch)
    rows = P(q_spec[0])
    specs = {n: rows if n.endswith(("ids", "lengths")) else P() for n in side}
    call = partial(gradient, causal=True, dropout_rate=0.3, dropout_seed=7)
    args, specs = (*inputs(kv_heads, batch=batch), side), (q_spec, kv_spec, kv_spec, specs)
    (o, _), (whole, _) = compare(call, args, specs, mesh)
    # The very same weights are dropped: a kept one would differ by far more than rounding does.
    np.testing.assert_array_equal(o == 0.0, whole == 0.0)


@pytest.mark.thorough(always=["1-(2, 2)"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("bias_heads", [1, N])
def test_a_bias_shared_by_parts_of_the_batch(devices, shape, bias_heads):
    mesh = mesh_of(devices, AxisType.Auto, data=shape[0], model=shape[1])
    bias = draw(2, 1, bias_heads, 1, S, seed=8)

    def call(q, k, v, bias):
        def loss(q, k, v, bias):
            q, k, v = (x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v))
            return jnp.sum(jnp.sin(fp.flash_attention(q, k, v, bias=bias)))

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    compare(call, (*inputs(4), bias), (BOTH, BOTH, BOTH, P()), mesh)


@pytest.mark.thorough(always=["explicit"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_vmap_scan_and_checkpoint_of_sharded_arrays(devices, types):
    mesh = mesh_of(devices, types, data=2, model=2)

    def call(q, k, v):
        attend = jax.vmap(partial(fp.flash_attention, causal=True))
        layer = lambda x, _: (x + attend(jnp.sin(x), k, v), None)
        layer = jax.checkpoint(layer, policy=fp.save_attention)
        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, None, length=2)[0]))

    compare(jax.grad(call, (0, 1, 2)), inputs(4, 3), (P(None, *BOTH),) * 3, mesh)


def test_specs_of_jit_and_a_context_of_auto_axes(devices):
    """Gives the mesh to jit alone: no type of an argument has it."""
    mesh = mesh_of(devices, AxisType.Auto, data=2, model=2)
    spec = NamedSharding(mesh, BOTH)
    attend = jax.jit(fp.flash_attention, in_shardings=(spec,) * 3)
    args = inputs(4)
    text = attend.lower(*args).compile().as_text()
    assert moved(text) == 0
    assert f"[{B // 2},{T},{N // 2},{H}]" in text
    np.testing.assert_allclose(attend(*args), fp.flash_attention(*args), **ATOL)


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_sharded_sequence_is_refused(devices, name):
    cut = P(None, "context")
    specs = {"q": (cut, P(), P()), "k": (P(), cut, cut)}[name]
    message = f"sequence axis of {name} is sharded over .*'context'.*context_parallel_attention"
    for types, error in (
        (AxisType.Explicit, ValueError),
        (AxisType.Auto, jax.errors.JaxRuntimeError),
    ):
        mesh = mesh_of(devices, types, context=4)
        args = [jnp.ones((2, 8, 4, 8))] * 3
        args = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
        for call in (fp.flash_attention, jax.jit(fp.flash_attention)):
            with pytest.raises(error, match=message):
                call(*args)


@pytest.mark.parametrize("types", TYPES)
def test_a_sharded_sequence_is_gathered_where_that_is_asked_for(devices, types):
    mesh = mesh_of(devices, TYPES[types], data=2, model=2)
    move = {"auto": jax.lax.with_sharding_constraint, "explicit": jax.sharding.reshard}[types]
    args, whole = inputs(4), NamedSharding(mesh, P("data"))
    cut = [jax.device_put(x[:, :8], NamedSharding(mesh, P("data", "model"))) for x in args]
    found = jax.jit(lambda *cut: fp.flash_attention(*(move(x, whole) for x in cut)))(*cut)
    np.testing.assert_allclose(found, fp.flash_attention(*(x[:, :8] for x in args)), **ATOL)


@pytest.mark.thorough(always=["('data', 'model')"])
@pytest.mark.parametrize(
    "axes",
    [("data", "model"), (("data", "model"), None), (None, ("model", "data"))],
    ids=str,
)
def test_dropout_and_mods_inside_shard_map_count_in_the_whole(devices, axes):
    mesh = mesh_of(devices, AxisType.Auto, data=2, model=2)
    slopes = draw(B, N, seed=9)
    attend = partial(
        fp.flash_attention,
        dropout_rate=0.5,
        dropout_seed=3,
        score_mod=lambda score, b, n, i, j: score * slopes[b, n],
    )
    args, spec = inputs(8), P(axes[0], None, axes[1])
    local = partial(attend, shard_axes=axes)
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))(*args)
    np.testing.assert_allclose(found, attend(*args), **ATOL)


@pytest.mark.parametrize("axes", ["data", ("data",), ("nowhere", None)], ids=str)
def test_bad_shard_axes(axes):
    with pytest.raises(ValueError, match="shard_axes is"):
        fp.flash_attention(*inputs(4), shard_axes=axes)


@pytest.mark.thorough(always=["auto"])
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_the_hopper_kernels_lower_for_shards(devices, types):
    """Lowers for Hopper: Pallas refuses varying types, the partitioner constants; xla does not."""
    mesh = mesh_of(devices, types, data=2, model=2)
    sharding, heads = NamedSharding(mesh, BOTH), NamedSharding(mesh, P(None, "model"))
    x = jax.ShapeDtypeStruct((4, 256, 4, 64), jnp.bfloat16, sharding=sharding)
    bias = jax.ShapeDtypeStruct((1, 4, 256, 256), jnp.bfloat16, sharding=heads)
    backend = HopperBackend(num_sms=132)

    def lowered(**options) -> str:
        def loss(q, k, v, bias):
            call = validate.canonicalize(q, k, v, Arguments(bias=bias, **options))
            blocks = backend.attention.plan(call.problem)
            o, _, _ = derivatives.attend(backend, call.spec, blocks, call.operands)
            return jnp.sum(o.astype(jnp.float32))

        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(x, x, x, bias)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    for text in (lowered(causal=True), lowered()):
        assert text.count("CustomSPMDPartitioning") == (2 if types == AxisType.Auto else 0)
        assert ("mosaic_gpu" in text) == (types == AxisType.Explicit)


def test_gradients_that_shards_share_in_16_bits(devices):
    """Checks gradients summed in float32: each of the two parts, and the sum, is rounded once."""
    mesh = mesh_of(devices, AxisType.Auto, data=1, model=4)
    args = [x.astype(jnp.bfloat16) for x in inputs(2)]
    loss = lambda q, k, v: jnp.sum(jnp.sin(fp.flash_attention(q, k, v).astype(jnp.float32)))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    found = jax.jit(jax.grad(loss, (1, 2)))(*map(put, args, (HEADS, P(), P())))
    expected = jax.grad(loss, (1, 2))(*args)
    rounding = float(jnp.finfo(jnp.bfloat16).eps) / 2
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        # Parts may be larger than their sum, but not than the largest there is.
        assert np.abs(a - b).max() <= 4 * rounding * np.abs(b).max()
