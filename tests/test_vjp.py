"""The custom_vjp: its residuals, its cotangents, and derivatives that it does not have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import flash_pallas as fp
from flash_pallas import reference

from . import checks
from .cases import named

(CASE,) = named("gqa_causal")


def inputs(dtype=jnp.float32, batch=2, q_len=9, kv_len=12):
    rng = np.random.default_rng(0)
    shapes = [(batch, q_len, 4, 8), (batch, kv_len, 2, 8), (batch, kv_len, 2, 8)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def test_the_residuals_are_q_k_v_o_and_lse_in_two_parts():
    x = CASE.inputs()
    (o, lse), pull = jax.vjp(lambda *a: fp.flash_attention_with_lse(*a, causal=True), x.q, x.k, x.v)
    saved = sorted((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pull))
    expected = sorted((a.shape, a.dtype.name) for a in (x.q, x.k, x.v, o, lse, lse))
    assert saved == expected


def test_an_offset_array_is_the_only_other_residual():
    q, k, v = inputs()
    offset = jnp.array([1, 2], jnp.int32)
    _, pull = jax.vjp(lambda *a: fp.flash_attention(*a, causal=True, q_offset=offset), q, k, v)
    saved = [leaf.shape for leaf in jax.tree.leaves(pull)]
    of_lse = [(2, 4, 9)] * 2
    assert sorted(saved) == sorted([q.shape, k.shape, v.shape, q.shape, *of_lse, (2,)])


@pytest.mark.thorough(always=["lse"])
@pytest.mark.parametrize("which", ["o", "lse"])
def test_one_output_alone(which):
    q, k, v = inputs()
    pick = 0 if which == "o" else 1
    weight = jnp.asarray(np.random.default_rng(1).standard_normal([(2, 9, 4, 8), (2, 4, 9)][pick]))
    weight = weight.astype(jnp.float32)
    loss = lambda call: lambda *a: jnp.sum(call(*a, causal=True)[pick] * weight)
    found = jax.grad(loss(fp.flash_attention_with_lse), (0, 1, 2))(q, k, v)
    exact = jax.grad(loss(reference.attention), (0, 1, 2))(q, k, v)
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_no_work_for_an_lse_that_is_not_used():
    q, k, v = inputs()
    text = lambda f: str(jax.make_jaxpr(jax.grad(f))(q))
    both = text(lambda q: sum(x.sum() for x in fp.flash_attention_with_lse(q, k, v)))
    only_o = text(lambda q: fp.flash_attention(q, k, v).sum())
    subtracted = "f32[2,4,9] = sub "
    assert both.count(subtracted) == 1 + only_o.count(subtracted)


def test_a_nan_cotangent_of_minus_infinity_stays_there():
    q, k, v = inputs()
    call = lambda *a: fp.flash_attention_with_lse(*a, causal=True, q_offset=-3)
    (o, lse), pull = jax.vjp(call, q, k, v)
    hidden = jnp.isneginf(lse)
    assert hidden.any()
    zeros = pull((jnp.ones_like(o), jnp.zeros_like(lse)))
    nans = pull((jnp.ones_like(o), jnp.where(hidden, jnp.nan, 0.0)))
    for a, b in zip(zeros, nans, strict=True):
        np.testing.assert_array_equal(a, b)


def test_merging_two_halves_of_the_keys_is_differentiable():
    q, k, v = inputs()

    def merged(q, k, v):
        (o1, l1), (o2, l2) = (
            fp.flash_attention_with_lse(q, k[:, s], v[:, s]) for s in (slice(0, 5), slice(5, None))
        )
        w = jnp.exp(l1 - jnp.logaddexp(l1, l2)).swapaxes(1, 2)[..., None]
        return o1 * w + o2 * (1 - w)

    weight = jnp.cos(jnp.arange(2 * 9 * 4 * 8, dtype=jnp.float32)).reshape(2, 9, 4, 8)
    loss = lambda call: lambda *a: jnp.sum(call(*a) * weight)
    found = jax.grad(loss(merged), (0, 1, 2))(q, k, v)
    exact = jax.grad(loss(lambda *a: reference.attention(*a)[0]), (0, 1, 2))(q, k, v)
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(always=["q_offset2"])
@pytest.mark.parametrize("q_offset", [0, -2, (1, -3)])
def test_check_grads_in_float64(q_offset):
    with jax.enable_x64(True):
        args = inputs(jnp.float64, q_len=5, kv_len=6)
        offset = jnp.asarray(q_offset, jnp.int32) if isinstance(q_offset, tuple) else q_offset

        def call(q, k, v):
            keywords = {"causal": True, "q_offset": offset, "blocks": {"block_q": 4, "block_kv": 4}}
            o, lse = fp.flash_attention_with_lse(q, k, v, backend="xla", **keywords)
            return o, jnp.where(jnp.isneginf(lse), 0.0, lse)

        assert [x.dtype for x in call(*args)] == [jnp.float64, jnp.float64]
        check_grads(call, args, order=1, modes=("rev",))
        o, _ = reference.attention(*args, causal=True, q_offset=offset)
        np.testing.assert_allclose(call(*args)[0], o, rtol=1e-13, atol=1e-13)


@pytest.mark.thorough
def test_the_oracle_itself_to_second_order():
    with jax.enable_x64(True):
        args = inputs(jnp.float64, batch=1, q_len=3, kv_len=4)
        call = lambda *a: reference.attention(*a, causal=True, q_offset=-1)[0]
        check_grads(call, args, order=2)


def test_the_oracle_against_a_loop():
    q, k, v = (np.asarray(x, np.float64) for x in inputs())
    o, lse = reference.attention(*inputs(), causal=True, q_offset=-2, scale=0.7)
    for b in range(2):
        for n in range(4):
            for i in range(9):
                last = i - 2
                if last < 0:
                    assert not o[b, i, n].any() and np.isneginf(lse[b, n, i])
                    continue
                s = 0.7 * k[b, : last + 1, n // 2] @ q[b, i, n]
                p = np.exp(s)
                np.testing.assert_allclose(lse[b, n, i], np.log(p.sum()), rtol=1e-5, atol=1e-6)
                expected = p @ v[b, : last + 1, n // 2] / p.sum()
                np.testing.assert_allclose(o[b, i, n], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attend", [fp.flash_attention, fp.dot_product_attention])
def test_forward_mode_is_refused_with_a_way_out(attend):
    q, k, v = inputs()
    message = r"flash_attention has no forward-mode.*jax\.grad.*reference\.attention"
    with pytest.raises(TypeError, match=message):
        jax.jvp(lambda q: attend(q, k, v), (q,), (q,))
    with pytest.raises(TypeError, match=message):
        jax.jacfwd(lambda q: attend(q, k, v))(q)


def test_forward_mode_of_a_jitted_function_is_refused_by_jax():
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp"):
        jax.jvp(jax.jit(lambda q: fp.flash_attention(q, k, v)), (q,), (q,))


@pytest.mark.parametrize("second", [jax.grad, jax.jacrev])
def test_second_order_is_refused_with_a_way_out(second):
    q, k, v = inputs()
    first = jax.grad(lambda q: jnp.sum(fp.flash_attention(q, k, v) ** 2))
    with pytest.raises(NotImplementedError, match=r"second-order.*reference\.attention"):
        second(lambda q: jnp.sum(first(q)))(q)
    with pytest.raises(NotImplementedError, match="second-order"):
        jax.jvp(first, (q,), (q,))


def test_second_order_in_something_else_works():
    q, k, v = inputs()

    def after_a_step(rate):
        loss = lambda v: jnp.sum(fp.flash_attention(q, k, v) ** 2)
        return jnp.sum(rate * jax.lax.stop_gradient(jax.grad(loss)(v)))

    assert jnp.isfinite(jax.grad(after_a_step)(0.1))


INNER = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum(),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, 2)[0],
}


@pytest.mark.thorough(always=["jit-plain", "jit-vmap"])
@pytest.mark.parametrize("wrap", INNER.values(), ids=INNER)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_first_order_meta_learning(wrap, jitted):
    """Runs MAML without second derivatives: the inner gradient is a constant of the outer one."""
    q, k, v = inputs()

    def outer_gradient(attend):
        def inner(q):
            return jnp.sum(attend(q, k, v) ** 2)

        loss = wrap(inner)

        def adapted(q):
            return loss(q - 0.1 * jax.lax.stop_gradient(jax.grad(loss)(q)))

        return (jax.jit if jitted else lambda f: f)(jax.grad(adapted))(q)

    found = outer_gradient(lambda *x: fp.flash_attention(*x))
    right = outer_gradient(lambda *x: reference.attention(*x)[0])
    np.testing.assert_allclose(found, right, rtol=2e-4, atol=2e-4)


@pytest.mark.thorough(always=["plain", "vmap"])
@pytest.mark.parametrize("wrap", INNER.values(), ids=INNER)
def test_second_order_is_refused_inside_every_transformation(wrap):
    q, k, v = inputs()
    loss = wrap(lambda q: jnp.sum(fp.flash_attention(q, k, v) ** 2))
    for call in (loss, jax.jit(loss)):
        with pytest.raises(NotImplementedError, match=r"second-order.*stop_gradient around"):
            jax.grad(lambda q, call=call: jnp.sum(jax.grad(call)(q)))(q)


def test_integer_offsets_have_float0_cotangents():
    q, k, v = inputs()
    offset = jnp.array([1, 2], jnp.int32)
    call = lambda offset: fp.flash_attention(q, k, v, causal=True, q_offset=offset)
    o, pull = jax.vjp(call, offset)
    (cotangent,) = pull(o)
    assert cotangent.dtype == jax.dtypes.float0 and cotangent.shape == (2,)


def test_the_same_array_three_times():
    case = CASE
    x = jnp.asarray(case.inputs().k)
    loss = lambda call: lambda x: jnp.sum(call(x, x, x, causal=True)[0] ** 2)
    found, exact = (jax.grad(loss(f))(x) for f in (checks.bind("xla"), reference.attention))
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)
