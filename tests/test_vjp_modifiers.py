"""The custom_vjp with masks and modifiers: what it saves, what it computes and what it does not."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads

import flash_pallas as fp
from flash_pallas import reference
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla.backend import XlaVjp
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.transforms import derivatives

B, T, S, N, K, H = 2, 9, 12, 4, 2, 8


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def inputs(dtype=jnp.float32, q_len=T, kv_len=S, heads=N):
    shapes = [(B, q_len, heads, H), (B, kv_len, heads // 2, H), (B, kv_len, heads // 2, H)]
    return [draw(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def ids(seed, length):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 3, (B, length)), jnp.int32)


SLOPES = draw(7, N)


def tilted(score, b, n, i, j):
    return score + SLOPES[n].astype(score.dtype) * (i - j).astype(score.dtype)


# --- a bias of -inf -------------------------------------------------------------------------------

CAPTURED = jnp.float32(0.7)
AFTER = {
    "nothing": {},
    "softcap": {"softcap": 3.0},
    "score_mod": {"score_mod": lambda c: lambda s, b, n, i, j: s * c},
    "both": {"softcap": 3.0, "score_mod": lambda c: lambda s, b, n, i, j: s * c + jnp.exp(s)},
}
ATTEND = {
    "reverse": fp.flash_attention,
    "any": partial(fp.flash_attention, differentiable="any"),
    "oracle": lambda *x, **y: reference.attention(*x, **y)[0],
}


@pytest.mark.thorough(always=["softcap-reverse", "both-any", "nothing-oracle"])
@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("after", AFTER)
def test_a_bias_of_minus_infinity_is_a_mask(after, attend):
    """Compares values and gradients with those of a mask; two queries see no key."""
    numbers, shown = draw(5, 1, N, T, S), jnp.tri(T, S, -1, dtype=bool).at[4].set(False)
    infinite = jnp.where(shown, numbers, -jnp.inf)

    def loss(q, k, v, bias, captured, **mask):
        options = dict(AFTER[after])
        if "score_mod" in options:
            options["score_mod"] = options["score_mod"](captured)
        return jnp.sum(jnp.sin(ATTEND[attend](q, k, v, bias=bias, **options, **mask)))

    given, gradient = inputs(), jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)))
    compare = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5))
    found = gradient(*given, infinite, CAPTURED)
    compare(found, gradient(*given, numbers, CAPTURED, mask=shown[None, None]))
    assert not found[1][0][:, [0, 4]].any() and not found[1][3][:, :, ~shown].any()


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("after", ["nothing", "softcap"])
def test_a_bias_of_infinity_is_a_nan_of_its_row(after, attend):
    bias = draw(5, 1, 1, T, S).at[:, :, 2, 3].set(jnp.inf)
    o = ATTEND[attend](*inputs(), bias=bias, **AFTER[after])
    assert (jnp.isnan(o).all((0, 2, 3)) == (jnp.arange(T) == 2)).all()
    assert jnp.isfinite(jnp.delete(o, 2, 1)).all()


# --- residuals ------------------------------------------------------------------------------------

# Arguments, and the shapes of what they add to the residuals, besides q, k, v, o and lse.
RESIDUALS = {
    "window": ({"window": (3, 1)}, []),
    "softcap": ({"softcap": 2.0}, []),
    "bias": ({"bias": draw(5, 1, N, 1, S)}, [(1, N, 1, S)]),
    "mask": ({"mask": draw(5, B, 1, T, S) > -0.5}, [(B, 1, T, S)]),
    "segments": ({"q_segment_ids": ids(0, T), "kv_segment_ids": ids(1, S)}, [(B, T), (B, S)]),
    "lengths": (
        {"q_lengths": jnp.array([9, 3]), "kv_lengths": jnp.array([4, 12])},
        [(B,), (B,)],
    ),
    "sinks": ({"sinks": SLOPES}, [(B, N)]),
    "ALiBi": ({"alibi_slopes": SLOPES}, [(B, N)]),
    "dropout": ({"dropout_rate": 0.3, "dropout_seed": 1}, [(B, N)]),
    "score_mod": ({"score_mod": tilted}, [(B, N)]),
}


@pytest.mark.thorough(always=["bias", "segments", "score_mod"])
@pytest.mark.parametrize(("keywords", "added"), RESIDUALS.values(), ids=RESIDUALS)
def test_the_residuals_are_those_of_plain_attention_and_the_side_inputs(keywords, added):
    args = inputs()
    (o, lse), pull = jax.vjp(lambda *a: fp.flash_attention_with_lse(*a, **keywords), *args)
    saved = sorted(leaf.shape for leaf in jax.tree.leaves(pull))
    shift = lse  # the other part of the log-sum-exp
    assert saved == sorted([*(x.shape for x in (*args, o, lse, shift)), *added])


class Recording(XlaBackend):
    """A backend that notes which gradients its backward is asked for."""

    wanted: list
    # No other one is equal, so nothing that was traced for another is reused.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def vjp(self):
        return RecordingVjp(self)


class RecordingVjp(XlaVjp):
    def run(self, spec, blocks, operands, cotangents, wanted):
        self.backend.wanted.append(wanted)
        return super().run(spec, blocks, operands, cotangents, wanted)


def recorded(function, *args):
    """Returns the sets that every backward in `function(attend)(*args)` wants; only traces it."""
    backend = Recording()
    object.__setattr__(backend, "wanted", [])

    def attend(q, k, v, **keywords):
        call = validate.canonicalize(q, k, v, Arguments(**keywords))
        blocks = backend.attention.plan(call.problem)
        return call.unfold(*derivatives.attend(backend, call.spec, blocks, call.operands))[0]

    jax.make_jaxpr(function(attend))(*args)
    return set(backend.wanted)


def plain(f):
    return f


@pytest.mark.thorough(always=["plain"])
@pytest.mark.parametrize(
    "wrap",
    [plain, jax.jit, jax.checkpoint, partial(jax.checkpoint, policy=fp.save_attention)],
    ids=["plain", "jit", "checkpoint", "checkpoint with policy"],
)
def test_no_gradient_is_computed_that_nobody_asks_for(wrap):
    q, k, v = inputs()
    bias, slopes, table = draw(5, 1, N, 1, S), draw(6, N), draw(7, N)

    def loss(attend):
        def call(q, bias, slopes, table):
            mod = lambda score, b, n, i, j: score * table[n].astype(score.dtype)
            o = attend(q, k, v, bias=bias, alibi_slopes=slopes, score_mod=mod)
            return jnp.sum(jnp.sin(o))

        return wrap(call)

    args, asked = (q, bias, slopes, table), ["bias", "alibi_slopes", "score_params"]
    assert recorded(lambda attend: jax.grad(loss(attend), 0), *args) == {frozenset()}
    for i, name in enumerate(asked):
        assert recorded(lambda attend, i=i: jax.grad(loss(attend), i + 1), *args) == {
            frozenset([name])
        }
    assert recorded(lambda attend: jax.grad(loss(attend), (1, 2, 3)), *args) == {frozenset(asked)}
    stopped = lambda attend: jax.grad(
        lambda b: loss(attend)(q, jax.lax.stop_gradient(b), *args[2:])
    )
    assert recorded(stopped, bias) == set()  # no backward at all


def test_no_gradient_of_the_bias_under_vmap_and_scan():
    q, k, v = inputs()
    bias = draw(5, 3, 1, N, 1, S)
    total = lambda attend, q, bias: jnp.sum(jnp.sin(attend(q, k, v, bias=bias)))
    vmapped = lambda attend: jax.vmap(jax.grad(partial(total, attend)), (None, 0))
    assert recorded(vmapped, q, bias) == {frozenset()}
    scanned = lambda attend: jax.grad(
        lambda q: jax.lax.scan(lambda c, b: (c + total(attend, q, b), None), 0.0, bias)[0]
    )
    assert recorded(scanned, q) == {frozenset()}


def largest(jaxpr) -> int:
    """Returns the size, in elements, of the largest array made in a jaxpr or inside it."""
    found = 0
    for equation in jaxpr.eqns:
        found = max([found, *(getattr(x.aval, "size", 0) for x in equation.outvars)])
        found = max([found, *(largest(inner) for inner in jaxprs_in_params(equation.params))])
    return found


LENGTH = 256
LONG = {"backend": "xla", "blocks": {"block_q": 32, "block_kv": 32}}
QUADRATIC = {
    "bias of keys": {"bias": jnp.ones((1, 1, 1, LENGTH))},
    "bias of pairs": {"bias": jnp.ones((1, 1, LENGTH, LENGTH))},
    "mask of padding": {"mask": jnp.ones((B, 1, 1, LENGTH), bool)},
    "mask of pairs": {"mask": jnp.ones((1, 1, LENGTH, LENGTH), bool)},
    "segments": dict.fromkeys(
        ("q_segment_ids", "kv_segment_ids"), jnp.ones((B, LENGTH), jnp.int32)
    ),
    "ALiBi, window, sinks": {"alibi_slopes": SLOPES, "window": (9, 0), "sinks": SLOPES},
    "dropout, score_mod": {"dropout_rate": 0.5, "dropout_seed": 0, "score_mod": tilted},
}


@pytest.mark.parametrize("keywords", QUADRATIC.values(), ids=QUADRATIC)
def test_nothing_grows_to_batch_heads_and_both_lengths(keywords):
    q, k, v = inputs(q_len=LENGTH, kv_len=LENGTH)
    learned = {name: x for name, x in keywords.items() if name in ("bias", "alibi_slopes", "sinks")}
    rest = {name: x for name, x in keywords.items() if name not in learned}

    def loss(call):
        return lambda q, k, v, learned: jnp.sum(jnp.sin(call(q, k, v, **rest, **learned)))

    size = lambda call: largest(
        jax.make_jaxpr(jax.grad(loss(call), (0, 1, 2, 3)))(q, k, v, learned).jaxpr
    )
    given = max([q.size, *(x.size for x in jax.tree.leaves(keywords) if hasattr(x, "size"))])
    # Twice: a float32 sum and its copy, or tiles of two batch entries side by side.
    assert size(partial(fp.flash_attention, **LONG)) <= 2 * given < B * N * LENGTH**2
    assert size(lambda *a, **kw: reference.attention(*a, **kw)[0]) >= B * N * LENGTH**2


def test_vmap_repeats_the_smaller_of_bias_and_mask():
    q, k, v = inputs(q_len=64, kv_len=64)
    call = partial(fp.flash_attention, backend="xla", blocks={"block_q": 16, "block_kv": 16})
    every = lambda bias, mask: call(q, k, v, bias=bias, mask=mask)
    size = lambda axes, *args: largest(jax.make_jaxpr(jax.vmap(every, axes))(*args).jaxpr)
    own, shared = jnp.ones((3, 1, N, 64, 64)), jnp.ones((B, 1, 1, 64), bool)
    assert size((0, None), own, shared) <= own.size
    own, shared = jnp.ones((3, 1, 1, 1, 64), bool), jnp.ones((B, N, 64, 64))
    assert size((None, 0), shared, own) <= shared.size


FLOAT64 = {
    "bias of keys": {"bias": (1, N, 1, 6)},
    "bias of queries": {"bias": (B, 1, 5, 1)},
    "slopes and sinks": {"alibi_slopes": (N,), "sinks": (B, N)},
}


@pytest.mark.thorough(always=["slopes and sinks"])
@pytest.mark.parametrize("shapes", FLOAT64.values(), ids=FLOAT64)
def test_check_grads_in_float64(shapes):
    with jax.enable_x64(True):
        args = inputs(jnp.float64, q_len=5, kv_len=6)
        side = {name: draw(8, *shape, dtype=jnp.float64) for name, shape in shapes.items()}
        keywords = {
            "softcap": 3.0,
            "window": (2, 1),
            "q_offset": jnp.array([1, -3], jnp.int32),
            "dropout_rate": 0.3,
            "dropout_seed": 5,
            "blocks": {"block_q": 4, "block_kv": 4},
            "backend": "xla",
        }

        def call(args, side):
            o, lse = fp.flash_attention_with_lse(*args, **side, **keywords)
            return o, jnp.where(jnp.isneginf(lse), 0.0, lse)

        check_grads(call, (args, side), order=1, modes=("rev",))


def test_max_logit_has_no_gradient():
    q, k, v = inputs()
    most = lambda q: jnp.sum(fp.flash_attention_with_max_logit(q, k, v, softcap=2.0)[2])
    assert not jax.grad(most)(q).any()


def test_the_gradient_of_a_bias_in_bfloat16():
    q, k, v = inputs()
    bias = draw(5, 1, N, 1, S, dtype=jnp.bfloat16)
    loss = lambda b: jnp.sum(jnp.sin(fp.flash_attention(q, k, v, bias=b)))
    found, exact = jax.grad(loss)(bias), jax.grad(loss)(bias.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    # One rounding of a sum that was made in float32.
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_a_nan_cotangent_of_padding_stays_there():
    q, k, v = inputs()
    lengths = jnp.array([4, 9], jnp.int32)
    bias = draw(5, 1, N, T, S)
    call = lambda *a: fp.flash_attention_with_lse(*a[:3], bias=a[3], q_lengths=lengths)
    (o, lse), pull = jax.vjp(call, q, k, v, bias)
    padding = jnp.arange(T)[None] >= lengths[:, None]
    ones = jnp.where(padding[..., None, None], 0.0, jnp.ones_like(o)), jnp.zeros_like(lse)
    nans = jnp.where(padding[..., None, None], jnp.nan, jnp.ones_like(o)), jnp.zeros_like(lse)
    for a, b in zip(pull(ones), pull(nans), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough(always=["bias"])
@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_second_order_is_refused_with_a_way_out(name):
    q, k, v = inputs()
    side = {"bias": draw(5, 1, N, 1, S), "alibi_slopes": SLOPES, "sinks": SLOPES}[name]
    call = lambda x: jnp.sum(jnp.sin(fp.flash_attention(q, k, v, **{name: x})))
    with pytest.raises(NotImplementedError, match=r"second-order.*reference\.attention"):
        jax.grad(lambda x: jnp.sum(jax.grad(call)(x) ** 2))(side)


def test_integer_operands_have_float0_cotangents():
    q, k, v = inputs()
    given = {
        "q_segment_ids": ids(0, T),
        "kv_segment_ids": ids(1, S),
        "kv_lengths": jnp.array([4, 12], jnp.int32),
        "mask": draw(5, 1, 1, T, S) > -0.5,
        "dropout_seed": jnp.uint32(3),
    }
    call = lambda given: fp.flash_attention(q, k, v, dropout_rate=0.3, **given)
    o, pull = jax.vjp(call, given)
    (cotangents,) = pull(o)
    for name, x in given.items():
        assert cotangents[name].dtype == jax.dtypes.float0
        assert cotangents[name].shape == x.shape
