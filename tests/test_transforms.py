"""Attention under every transformation of JAX, through the one path that all backends share."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas import reference
from flash_pallas.backends import xla
from flash_pallas.backends.xla.backend import XlaAttention
from flash_pallas.core.problem import Operands
from flash_pallas.transforms import derivatives

ATOL = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of a few dozen terms of order one

causal = partial(fp.flash_attention, causal=True)
dense = lambda *a, **kw: reference.attention(*a, causal=True, **kw)[0]


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs(*extra, batch=2, q_len=9, kv_len=12):
    return (
        draw(*extra, batch, q_len, 4, 8, seed=0),
        draw(*extra, batch, kv_len, 2, 8, seed=1),
        draw(*extra, batch, kv_len, 2, 8, seed=2),
    )


def squared(call):
    return lambda *a, **kw: jnp.sum(call(*a, **kw) ** 2)


def assert_close(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **ATOL)


def test_jit_of_grad():
    args = inputs()
    found = jax.jit(jax.value_and_grad(squared(causal), (0, 1, 2)))(*args)
    assert_close(found, jax.value_and_grad(squared(dense), (0, 1, 2))(*args))


VMAPS = {
    "all": (0, 0, 0),
    "q only": (0, None, None),
    "k and v only": (None, 0, 0),
    "v only": (None, None, 0),
    "inner axes": (1, 2, 3),
}


@pytest.mark.thorough(always=["gradient-inner axes", "gradient-q only", "forward-v only"])
@pytest.mark.parametrize("in_axes", VMAPS.values(), ids=VMAPS)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_vmap(in_axes, gradient):
    args = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(inputs(3), in_axes, strict=True)
    ]
    wrap = (lambda f: jax.grad(squared(f), (0, 1, 2))) if gradient else (lambda f: f)
    found, expected = (jax.vmap(wrap(f), in_axes)(*args) for f in (causal, dense))
    assert_close(found, expected)


@pytest.mark.thorough
def test_nested_vmap():
    q, k, v = inputs(3)
    nest = lambda f: jax.vmap(jax.vmap(f, (None, 0, 0)), (0, None, None))
    assert_close(nest(causal)(q, k, v), nest(dense)(q, k, v))
    nested = lambda f: nest(jax.grad(squared(f), (0, 1, 2)))
    assert_close(nested(causal)(q, k, v), nested(dense)(q, k, v))


def test_vmap_over_offsets():
    q, k, v = inputs()
    offsets = jnp.array([[-3, 0], [2, 5], [40, -40]], jnp.int32)
    each = lambda f: jax.vmap(lambda offset: f(q, k, v, q_offset=offset))
    assert_close(each(causal)(offsets), each(dense)(offsets))


def test_vmap_out_axis_and_an_unbatched_cotangent():
    q, k, v = inputs(3)
    assert jax.vmap(causal, out_axes=2)(q, k, v).shape == (2, 9, 3, 4, 8)

    def pulled(f):
        _, pull = jax.vjp(jax.vmap(f), q, k, v)
        return pull(jnp.broadcast_to(draw(2, 9, 4, 8, seed=5), q.shape))

    assert_close(pulled(causal), pulled(dense))
    o, pull = jax.vjp(causal, *inputs())
    basis = jnp.stack([draw(*o.shape, seed=i) for i in range(3)])
    batched = jax.vmap(pull)(basis)
    for i in range(3):
        assert_close([g[i] for g in batched], pull(basis[i]))


def count(jaxpr, is_match) -> int:
    """Counts equations that match, in the jaxpr and in all those inside it."""
    subs = lambda eqn: jax.tree.leaves(
        list(eqn.params.values()),
        is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns"),
    )
    total = 0
    for eqn in jaxpr.eqns:
        total += is_match(eqn)
        for sub in subs(eqn):
            sub = getattr(sub, "jaxpr", sub)
            if hasattr(sub, "eqns"):
                total += count(sub, is_match)
    return total


class Counting(xla.XlaBackend):
    """A backend whose forward carries a primitive that nothing else in the program uses."""

    @property
    def attention(self):
        return CountingAttention(self)


class CountingAttention(XlaAttention):
    def run(self, spec, blocks, operands):
        out = super().run(spec, blocks, operands)
        return out._replace(lse_log2=jnp.arctanh(jnp.tanh(out.lse_log2 * 0)) + out.lse_log2)


def attend_counting(q, k, v):
    problem = fp.explain(fp.flash_attention, q, k, v, causal=True).problem
    backend = Counting()
    operands = Operands(q, k, v)
    return derivatives.attend(backend, problem.spec, backend.attention.plan(problem), operands)[0]


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (fp.save_attention, 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.dots_saveable, 2),
        (jax.checkpoint_policies.save_only_these_names("flash_attention_out"), 2),
    ],
    ids=["save_attention", "nothing", "dots", "out only"],
)
def test_remat_runs_the_forward_again_only_if_not_saved(policy, forwards):
    q, k, v = inputs()
    layer = jax.checkpoint(lambda q: jnp.sin(attend_counting(jnp.sin(q), k, v)), policy=policy)
    jaxpr = jax.make_jaxpr(jax.grad(lambda q: jnp.sum(layer(q))))(q).jaxpr
    assert count(jaxpr, lambda eqn: eqn.primitive.name == "atanh") == forwards


policies = jax.checkpoint_policies
CLIENTS = {
    "context": (policies.save_only_these_names("context"), 2),
    "context too": (
        policies.save_from_both_policies(
            policies.save_only_these_names("context"), fp.save_attention
        ),
        1,
    ),
    "our names": (
        policies.save_only_these_names("mlp", "flash_attention_out", "flash_attention_lse"),
        1,
    ),
    "dots too": (policies.save_from_both_policies(policies.dots_saveable, fp.save_attention), 1),
    "offloaded": (
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["flash_attention_lse"],
            names_which_can_be_offloaded=["flash_attention_out"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        1,
    ),
}


@pytest.mark.parametrize(("policy", "forwards"), CLIENTS.values(), ids=CLIENTS)
def test_a_policy_of_a_model_that_names_what_attention_returns(policy, forwards):
    """Checks policies like `save_attention`: a name on O alone is not what the backward needs."""
    q, k, v = inputs()

    @partial(jax.checkpoint, policy=policy)
    def layer(w):
        context = checkpoint_name(attend_counting(q @ w, k, v), "context")
        return jnp.sin(checkpoint_name(context @ w, "mlp"))

    w = jnp.eye(q.shape[-1])
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(layer(w))))(w).jaxpr
    assert count(jaxpr, lambda eqn: eqn.primitive.name == "atanh") == forwards


def test_remat_and_scan_over_layers():
    q, k, v = inputs(kv_len=9)
    scales = jnp.array([0.5, 1.0, 1.5])

    def network(call, q, scales):
        layer = lambda x, s: (x + call(jnp.sin(x) * s, k, v), None)
        layer = jax.checkpoint(layer, policy=fp.save_attention)
        return jnp.sum(jax.lax.scan(layer, q, scales)[0] ** 2)

    found, expected = (jax.grad(partial(network, f), (0, 1))(q, scales) for f in (causal, dense))
    assert_close(found, expected)


@pytest.mark.thorough(always=["static-kv_sharded-False"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kv_sharded", [True, False], ids=["kv_sharded", "kv_replicated"])
@pytest.mark.parametrize("offset", ["static", "array"])
def test_shard_map(devices, check_vma, kv_sharded, offset):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    q, k, v = inputs(batch=4)
    if not kv_sharded:
        k, v = k[:1], v[:1]
    kv = P("data") if kv_sharded else P()
    offsets = {"static": 2, "array": jnp.array([-2, 0, 1, 5], jnp.int32)}[offset]
    keywords = {"mesh": mesh, "check_vma": check_vma}

    def local(q, k, v, *rest):
        return causal(q, k, v, q_offset=rest[0] if rest else offsets)

    specs, args = (P("data"), kv, kv), (q, k, v)
    if offset == "array":
        specs, args = (*specs, P("data")), (*args, offsets)
    sharded = jax.shard_map(local, in_specs=specs, out_specs=P("data"), **keywords)
    wide = lambda x: jnp.broadcast_to(x, (4, *x.shape[1:]))
    whole = lambda q, k, v, *_: dense(q, wide(k), wide(v), q_offset=offsets)
    found, expected = (jax.value_and_grad(squared(f), (0, 1, 2))(*args) for f in (sharded, whole))
    assert_close(found, expected)

    inside = jax.shard_map(
        lambda *a: jax.grad(lambda q: squared(local)(q, *a[1:]))(a[0]),
        in_specs=specs,
        out_specs=P("data"),
        **keywords,
    )
    assert_close(inside(*args), expected[1][0])


def test_a_replicated_result_cannot_be_claimed(devices):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("data"),) * 3, "out_specs": P()}
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(causal, mesh=mesh, **specs)(*inputs(batch=4))


def test_export():
    args = inputs()
    f = jax.jit(jax.value_and_grad(squared(causal)))
    exported = jax.export.export(f)(*args)
    assert_close(exported.call(*args), f(*args))
    (batch,) = jax.export.symbolic_shape("b")
    symbolic = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in args]
    exported = jax.export.export(jax.jit(causal))(*symbolic)
    assert_close(exported.call(*args), causal(*args))
    per_entry = lambda q, k, v: causal(q, k, v, bias=jnp.sum(q, (1, 3))[..., None, None])
    exported = jax.export.export(jax.jit(per_entry))(*symbolic)
    assert_close(exported.call(*args), per_entry(*args))
    q, k = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 16, 2, 8))
    symbolic = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, k)]
    exported = jax.export.export(jax.jit(fp.flash_decode))(*symbolic)
    assert_close(exported.call(q, k, k), fp.flash_decode(q, k, k))


@pytest.mark.parametrize("attend", [fp.flash_attention, fp.dot_product_attention, fp.flash_decode])
def test_symbolic_lengths_are_refused(attend):
    batch, length = jax.export.symbolic_shape("b, s")
    x = jax.ShapeDtypeStruct((batch, length, 4, 8), jnp.float32)
    q = jax.ShapeDtypeStruct((batch, 1, 4, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"k(ey)? has a symbolic length, s.*export a program"):
        jax.export.export(jax.jit(attend))(q, x, x)


def test_export_for_several_platforms_from_a_host_without_a_gpu_is_the_jnp_version():
    args = inputs()
    exported = jax.export.export(jax.jit(causal), platforms=["cuda", "cpu"])(*args)
    assert "mosaic" not in exported.mlir_module() and exported.platforms == ("cuda", "cpu")
    assert_close(exported.call(*args), causal(*args))


def test_donation_and_ahead_of_time():
    q, k, v = inputs(kv_len=9)
    expected = causal(q, k, v)
    step = jax.jit(causal, donate_argnums=0).lower(q, k, v).compile()
    assert_close(step(q, k, v), expected)
    assert q.is_deleted()


def test_debug_nans_is_quiet_for_rows_without_keys():
    args = inputs()
    with jax.debug_nans(True), jax.debug_infs(False):
        call = partial(causal, q_offset=-5)
        value, grads = jax.value_and_grad(squared(call), (0, 1, 2))(*args)
        assert jnp.isfinite(value) and all(jnp.isfinite(g).all() for g in grads)
        with pytest.raises(FloatingPointError):
            causal(args[0].at[0, 0, 0, 0].set(jnp.nan), *args[1:]).block_until_ready()


def test_debug_infs_finds_only_the_lse_of_rows_without_keys():
    args = inputs()
    with jax.debug_infs(True):
        value, grads = jax.value_and_grad(squared(causal), (0, 1, 2))(*args)
        assert jnp.isfinite(value) and all(jnp.isfinite(g).all() for g in grads)
        with pytest.raises(FloatingPointError, match="inf"):
            causal(*args, q_offset=-5)
        # Under jit nobody asks for the log-sum-exp.
        assert jnp.isfinite(jax.jit(partial(causal, q_offset=-5))(*args)).all()


def test_tracer_leaks_are_checked_on_xla_and_found_in_every_kernel_of_mosaic_gpu():
    """Checks README's claim: Pallas itself keeps tracers, even of a kernel that only copies."""
    args = inputs()

    def copied(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    kernel = plgpu.kernel(copied, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
    with jax.checking_leaks():
        assert jnp.isfinite(jax.jit(jax.grad(squared(causal)))(*args)).all()
        with pytest.raises(Exception, match="Leaked trace"):
            jax.jit(kernel).trace(jnp.ones(128))


@pytest.mark.parametrize("options", [{}, {"bias": jnp.ones((2, 4, 1, 1))}, {"kv_lengths": 3}])
def test_vmap_of_no_members(options):
    q, k, v = inputs(kv_len=9)
    attend = partial(fp.flash_attention_with_lse, **options)
    o, lse = jax.vmap(attend, (0, None, None))(jnp.zeros((0, *q.shape)), k, v)
    one = jax.eval_shape(attend, q, k, v)
    assert [x.shape for x in (o, lse)] == [(0, *x.shape) for x in one]
    loss = lambda q, k, v: jnp.sum(fp.flash_attention(q, k, v, **options))
    nothing = [jnp.zeros((0, *x.shape)) for x in (q, k, v)]
    for x, like in zip(jax.vmap(jax.grad(loss, (0, 1, 2)))(*nothing), nothing, strict=True):
        assert x.shape == like.shape


def test_enable_x64_does_not_widen():
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.bfloat16) for x in inputs())
        for offset in (0, jnp.array([1, -4], jnp.int32)):
            call = partial(fp.flash_attention_with_lse, causal=True, q_offset=offset)
            (o, lse), pull = jax.vjp(call, q, k, v)
            assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
            assert {g.dtype for g in pull((o, lse))} == {jnp.dtype(jnp.bfloat16)}


def test_eval_shape_and_leak_checking():
    args = inputs()
    shapes = jax.eval_shape(fp.flash_attention_with_lse, *args)
    assert [x.shape for x in shapes] == [(2, 9, 4, 8), (2, 4, 9)]
    with jax.checking_leaks():
        jax.jit(jax.grad(squared(causal)))(*args)


def test_disable_jit():
    args = inputs(q_len=3, kv_len=4)
    expected = dense(*args)
    with jax.disable_jit():
        assert_close(causal(*args), expected)


def test_nothing_grows_with_the_product_of_the_lengths():
    length = 512
    q, k, v = inputs(batch=1, q_len=length, kv_len=length)
    blocks = {"block_q": 32, "block_kv": 32}
    f = lambda *a: squared(partial(causal, backend="xla", blocks=blocks))(*a)
    jaxpr = jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(q, k, v).jaxpr
    size = lambda eqn: max(getattr(x.aval, "size", 0) for x in eqn.outvars) if eqn.outvars else 0
    assert count(jaxpr, lambda eqn: size(eqn) >= q.size) > 0
    assert count(jaxpr, lambda eqn: size(eqn) >= 4 * length * length) == 0
    oracle = jax.make_jaxpr(jax.grad(squared(dense)))(q, k, v).jaxpr
    assert count(oracle, lambda eqn: size(eqn) >= 4 * length * length) > 0


def test_eager_calls_compile_once():
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    args = inputs(q_len=11)
    offset, other = jnp.array([0, 1], jnp.int32), jnp.array([5, -1], jnp.int32)
    shorter = inputs(q_len=10)
    causal(*args, q_offset=offset).block_until_ready()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        causal(*args, q_offset=other).block_until_ready()
        assert not compiled
        causal(*shorter, q_offset=offset).block_until_ready()
        assert compiled, "the listener hears nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
