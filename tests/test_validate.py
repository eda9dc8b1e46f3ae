"""Every bad argument: its type of error and what the message must say."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flash_pallas as fp
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments


def array(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


Q, K = array(2, 8, 4, 16), array(2, 8, 2, 16)

BAD = {
    "rank 2": ((array(8, 16),) * 3, {}, ValueError, r"\(8, 16\).*rank 3.*q\[:, None, :\]"),
    "ranks differ": ((Q, K[0], K[0]), {}, ValueError, "same rank, got 4, 3 and 3"),
    "list": (([1.0], K, K), {}, TypeError, "q must be an array, got list"),
    "None": ((Q, None, K), {}, TypeError, "k must be an array, got NoneType"),
    "str": ((Q, K, "v"), {}, TypeError, "v must be an array, got str"),
    "batch": ((Q, K[:1], K[:1]), {}, ValueError, "batch dimensions differ"),
    "batch of v": ((Q, K, K[:1]), {}, ValueError, "batch dimensions differ"),
    "lengths": ((Q, K, K[:, :5]), {}, ValueError, "k has length 8 and v length 5"),
    "heads of k and v": ((Q, K, K[:, :, :1]), {}, ValueError, "k has 2 heads and v 1"),
    "group": ((array(2, 8, 3, 16), K, K), {}, ValueError, "3 heads and k 2.*multiple"),
    "more key heads": ((K, Q, Q), {}, ValueError, "2 heads and k 4.*multiple"),
    "head_dim": ((Q, K[..., :8], K), {}, ValueError, "q has head_dim 16 and k head_dim 8"),
    "no heads": ((array(2, 8, 0, 16), K, K), {}, ValueError, "0 heads.*positive"),
    "head_dim 0": ((array(2, 8, 4, 0), K, K), {}, ValueError, "head_dim 0.*positive"),
    "v_head_dim 0": ((Q, K, array(2, 8, 2, 0)), {}, ValueError, "v has.*positive"),
    "dtypes": (
        (Q, K.astype(jnp.bfloat16), K.astype(jnp.float16)),
        {},
        TypeError,
        "q float32, k bfloat16, v float16",
    ),
    "int": ((Q.astype(jnp.int32), K, K), {}, TypeError, "q has dtype int32.*bfloat16, float16"),
    "bool": ((Q, K > 0, K), {}, TypeError, "k has dtype bool"),
    "complex": ((Q, K, K.astype(jnp.complex64)), {}, TypeError, "v has dtype complex64"),
    "key": ((jax.random.key(0), K, K), {}, TypeError, "q has dtype key"),
    "fp8": (
        (Q.astype(jnp.float8_e4m3fn), K, K),
        {},
        NotImplementedError,
        "float8_e4m3fn: supported are bfloat16",
    ),
    "causal str": ((Q, K, K), {"causal": "yes"}, TypeError, "causal must be a bool, got 'yes'"),
    "causal int": ((Q, K, K), {"causal": 1}, TypeError, "causal must be a bool, got 1"),
    "causal array": ((Q, K, K), {"causal": jnp.array(True)}, TypeError, "causal.*static"),
    "deterministic": (
        (Q, K, K),
        {"deterministic": None},
        TypeError,
        "deterministic must be a bool",
    ),
    "scale nan": ((Q, K, K), {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "scale inf": ((Q, K, K), {"scale": float("inf")}, ValueError, "scale must be finite"),
    "scale str": ((Q, K, K), {"scale": "1"}, TypeError, "scale must be a Python number"),
    "scale array": ((Q, K, K), {"scale": np.ones(2)}, TypeError, "scale must be a Python number"),
    "scale bool": ((Q, K, K), {"scale": True}, TypeError, "scale must be a Python number"),
    "scale complex": ((Q, K, K), {"scale": np.complex64(1)}, TypeError, "scale must be"),
    "offset float": ((Q, K, K), {"q_offset": 1.5}, TypeError, "q_offset must be an int.*1.5"),
    "offset bool": ((Q, K, K), {"q_offset": True}, TypeError, "q_offset must be an int"),
    "offset huge": ((Q, K, K), {"q_offset": 2**31}, ValueError, r"2147483648.*2\*\*30"),
    "offset dtype": (
        (Q, K, K),
        {"q_offset": jnp.ones(2)},
        TypeError,
        r"q_offset has dtype float32.*astype\(jnp.int32\)",
    ),
    "offset shape": (
        (Q, K, K),
        {"q_offset": jnp.ones(3, jnp.int32)},
        ValueError,
        r"q_offset has shape \(3,\).*\(2,\)",
    ),
    "blocks list": ((Q, K, K), {"blocks": [64]}, TypeError, "blocks must be None or a dict"),
    "blocks field": (
        (Q, K, K),
        {"blocks": {"block_k": 64}, "backend": "xla"},
        ValueError,
        "unknown fields.*block_k.*block_kv",
    ),
    "blocks size": (
        (Q, K, K),
        {"blocks": {"block_q": 0}, "backend": "xla"},
        ValueError,
        "block_q.*0.*positive",
    ),
    "backend": ((Q, K, K), {"backend": "cuda"}, ValueError, "'cuda'.*'auto'.*'hopper'.*'xla'"),
}


FUNCTIONS = {
    "attention": fp.flash_attention,
    "with lse": fp.flash_attention_with_lse,
    "explain": functools.partial(fp.explain, fp.flash_attention),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_bad_arguments(case, function):
    args, kwargs, error, message = BAD[case]
    with pytest.raises(error, match=message):
        function(*args, **kwargs)


def test_bad_arguments_are_found_while_tracing():
    with pytest.raises(ValueError, match="head_dim"):
        jax.eval_shape(fp.flash_attention, Q, K[..., :8], K)


def test_traced_values_that_must_be_static():
    with pytest.raises(TypeError, match=r"scale is traced.*multiply q"):
        jax.jit(lambda s: fp.flash_attention(Q, K, K, scale=s))(0.5)
    with pytest.raises(TypeError, match=r"causal.*static.*static_argnames"):
        jax.jit(lambda c: fp.flash_attention(Q, K, K, causal=c))(True)


def test_arguments_after_the_arrays_are_keywords():
    with pytest.raises(TypeError, match="by position"):
        fp.flash_attention(Q, K, K, True)


def test_float0():
    with pytest.raises(TypeError, match="q has dtype"):
        fp.flash_attention(np.zeros(Q.shape, jax.dtypes.float0), K, K)


def test_an_empty_call_still_checks_the_backend():
    with pytest.raises(ValueError, match="cuda"):
        fp.flash_attention(Q[:0], K[:0], K[:0], backend="cuda")


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float64(0.5), 0.5, jnp.float32(0.5)])
def test_scales_that_are_numbers(scale):
    np.testing.assert_array_equal(
        fp.flash_attention(Q, K, K, scale=scale), fp.flash_attention(Q, K, K, scale=0.5)
    )


def test_numpy_inputs():
    q, k = np.asarray(Q), np.asarray(K)
    o = fp.flash_attention(q, k, k, q_offset=np.int64(0), causal=np.True_)
    assert isinstance(o, jax.Array) and o.dtype == jnp.float32


@pytest.mark.thorough(always=["batch0", "batch3"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3)])
def test_batch_dimensions(batch):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((*batch, 8, 4, 16)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((*batch, 10, 2, 16)), jnp.float32)
    offset = jnp.asarray(rng.integers(-3, 3, batch), jnp.int32)
    o, lse = fp.flash_attention_with_lse(q, k, k, causal=True, q_offset=offset)
    assert o.shape == q.shape and lse.shape == (*batch, 4, 8)
    flat = lambda x: x.reshape(-1, *x.shape[len(batch) :])
    for b, one in enumerate(flat(q)):
        expected = fp.flash_attention(
            one, flat(k)[b], flat(k)[b], causal=True, q_offset=int(offset.reshape(-1)[b])
        )
        np.testing.assert_allclose(flat(o)[b], expected, rtol=1e-6, atol=1e-6)


def test_a_scalar_offset_array_serves_the_whole_batch():
    scalar = fp.flash_attention(Q, K, K, causal=True, q_offset=jnp.int32(-3))
    np.testing.assert_array_equal(scalar, fp.flash_attention(Q, K, K, causal=True, q_offset=-3))


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_empty_sizes(empty):
    q = {"batch": Q[:0], "queries": Q[:, :0], "keys": Q}[empty]
    k = {"batch": K[:0], "queries": K, "keys": K[:, :0]}[empty]
    (o, lse), pull = jax.vjp(fp.flash_attention_with_lse, q, k, k)
    assert o.shape == q.shape and not o.any()
    assert lse.shape == (q.shape[0], 4, q.shape[1]) and jnp.isneginf(lse).all()
    grads = pull((jnp.ones_like(o), jnp.ones_like(lse)))
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    assert not any(g.any() for g in grads)
    assert "nothing to compute" in str(fp.explain(fp.flash_attention, q, k, k))


def test_the_canonical_form():
    keywords = {"scale": None, "deterministic": False}
    call = validate.canonicalize(Q, K, K, Arguments(causal=True, q_offset=5, **keywords))
    assert call.spec.q_offset == 5 and call.spec.mask.right == 0 and call.spec.scale == 0.25
    plain = validate.canonicalize(Q, K, K, Arguments(causal=False, q_offset=5, **keywords))
    assert plain.spec.q_offset == 0, "without a mask an offset must not make another program"


@pytest.mark.parametrize("band", [{"causal": True}, {"window": (3, 0)}], ids=["causal", "window"])
@pytest.mark.parametrize("name", ["attention", "explain"])
def test_one_causal_query_says_where_it_is(name, band):
    """Refuses a decode step as written for FlashAttention, which aligns the ends."""
    q, k, function = Q[:, :1], K, FUNCTIONS[name]
    with pytest.raises(ValueError, match=r"one query, k 8 keys.*q_offset=7.*q_offset=0"):
        function(q, k, k, **band)
    for said in (0, 7, jnp.int32(7)):
        function(q, k, k, q_offset=said, **band)
    function(q, k[:, :1], k[:, :1], **band)
    function(Q[:, :2], k, k, **band)


def test_one_causal_query_of_dot_product_attention_sees_key_0_as_in_jax_nn():
    q, k = Q[:, :1], K * jnp.arange(1.0, 9.0)[None, :, None, None]
    ours, theirs = (
        f(q, k, k, is_causal=True) for f in (fp.dot_product_attention, jax.nn.dot_product_attention)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_arrays_in_the_layout_of_torch_are_warned_of():
    q = array(2, 8, 1024, 16)
    with pytest.warns(UserWarning, match=r"q has 1024 heads and length 8.*swapaxes\(x, -3, -2\)"):
        fp.explain(fp.flash_attention, q, q, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = array(1, 1, 128, 16)
        fp.explain(fp.flash_attention, q, q, q)


def test_a_warning_points_at_the_call_and_not_into_the_package():
    x = jnp.zeros((1, 8, 1024, 8))  # [batch, heads, length, head_dim], as in PyTorch
    with pytest.warns(UserWarning, match="swapaxes") as found:
        fp.flash_attention(x, x, x)
    assert {each.filename for each in found} == {__file__}
