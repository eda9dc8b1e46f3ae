"""differentiable="any": forward mode, second and third order, against dense attention."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import flash_pallas as fp
from flash_pallas import reference
from flash_pallas.backends import base
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla import any_order as smooth
from flash_pallas.core import softmax
from flash_pallas.core.problem import Operands, Tangents, describe
from flash_pallas.core.softmax import sum_dtype
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.nn import linen as layers
from flash_pallas.nn import nnx as nnx_layers
from flash_pallas.parallel import context_parallel_attention
from flash_pallas.transforms import any_order, derivatives

from .cases import CASES, FEATURES, Case
from .interpreter import race_checked

BLOCKS = {"block_q": 32, "block_kv": 32}
SHAPE = (1, 12, 2, 4)
ANY = functools.partial(
    fp.flash_attention_with_lse,
    causal=True,
    backend="xla",
    blocks={"block_q": 4, "block_kv": 8},
    differentiable="any",
)
DENSE = functools.partial(reference.attention, causal=True)


@pytest.fixture(autouse=True)
def _float64(request):
    kernels = request.node.get_closest_marker("interpret")
    with jax.enable_x64(kernels is None):
        yield


def arrays(count: int, shape=SHAPE):
    return jax.random.normal(jax.random.key(0), (count, *shape), jnp.float64)


def close(found, expected, rtol=1e-9, atol=1e-9):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), found, expected
    )


def wide(x):
    return x.astype(sum_dtype(x.dtype))


def loss(f):
    return lambda *args: sum(jnp.sum(jnp.sin(wide(x)) ** 2) for x in f(*args))


def of_lse(outputs):
    return wide(outputs[0]).sum() + (outputs[1] ** 2).sum()


def of_o(outputs):
    return outputs[1].sum() + (wide(outputs[0]) ** 2).sum()


def through_a_loop(f):
    def run(q, k, v):
        step = lambda x, _: (jax.checkpoint(f)(x, k, v)[0], None)
        return jax.lax.scan(step, q, length=3)[0]

    return run


def mean_flow(f, *args):
    def squares(q, k, v):
        (o, _), (do, _) = jax.jvp(f, (q, k, v), args[3:])
        return jnp.sum((o - jax.lax.stop_gradient(do)) ** 2)

    return jax.grad(squares, (0, 1, 2))(*args[:3])


def members(f, q, dq, rest):
    return jax.vmap(lambda q: f(q, *rest))(jnp.stack([q, dq]))


TRANSFORMED = {
    "grad": lambda f, q, k, v, *_: jax.grad(loss(f), (0, 1, 2))(q, k, v),
    "jvp": lambda f, *x: jax.jvp(f, x[:3], x[3:]),
    "jvp of q": lambda f, q, k, v, dq, *_: jax.jvp(lambda q: f(q, k, v), (q,), (dq,)),
    "jacfwd": lambda f, q, k, v, *_: jax.jacfwd(f, (0, 1, 2))(q, k, v),
    # One for each output: JAX has no common dtype for O in bfloat16 and the log-sum-exp.
    "jacrev": lambda f, q, k, v, *_: [
        jax.jacrev(lambda *x, i=i: f(*x)[i], (0, 1, 2))(q, k, v) for i in (0, 1)
    ],
    "hessian": lambda f, q, k, v, *_: jax.hessian(loss(f))(q, k, v),
    "jvp of grad": lambda f, *x: jax.jvp(jax.grad(loss(f), (0, 1, 2)), x[:3], x[3:]),
    "grad of jvp": lambda f, *x: jax.grad(
        lambda q: loss(lambda *args: jax.jvp(f, args, x[3:])[1])(q, *x[1:3])
    )(x[0]),
    "grad of grad": lambda f, q, k, v, *_: jax.grad(
        lambda q: jnp.sum(jax.grad(loss(f))(q, k, v) ** 2)
    )(q),
    # The cotangent of O is a constant here, that of the log-sum-exp is not.
    "grad of grad by lse": lambda f, q, k, v, *_: jax.grad(
        lambda q: jnp.sum(jax.grad(lambda q: of_lse(f(q, k, v)))(q) ** 2)
    )(q),
    "grad of grad by o": lambda f, q, k, v, *_: jax.grad(
        lambda q: jnp.sum(jax.grad(lambda q: of_o(f(q, k, v)))(q) ** 2)
    )(q),
    "jvp of jvp": lambda f, *x: jax.jvp(
        lambda q: jax.jvp(f, (q, *x[1:3]), x[3:])[1], (x[0],), (x[3],)
    ),
    "third": lambda f, q, k, v, dq, dk, dv: jax.jvp(
        lambda q: jax.jvp(lambda q: jax.grad(loss(f))(q, k, v), (q,), (dq,))[1], (q,), (dv,)
    ),
    "MeanFlow": mean_flow,
    "linearize": lambda f, *x: jax.linearize(f, *x[:3])[1](*x[3:]),
    "linear_transpose": lambda f, *x: jax.linear_transpose(jax.linearize(f, *x[:3])[1], *x[:3])(
        jax.tree.map(jnp.cos, f(*x[:3]))
    ),
    "vmap of jvp": lambda f, *x: jax.vmap(lambda dq: jax.jvp(f, x[:3], (dq, *x[4:])))(
        jnp.stack([x[3], x[0]])
    ),
    "vmap of grad": lambda f, q, k, v, dq, *_: members(jax.grad(loss(f)), q, dq, (k, v)),
    "grad of vmap": lambda f, q, k, v, dq, *_: jax.grad(
        lambda dq: sum(jnp.sum(wide(x) ** 2) for x in members(f, q, dq, (k, v)))
    )(dq),
    "jvp of checkpoint": lambda f, *x: jax.jvp(jax.checkpoint(f), x[:3], x[3:]),
    "loop": lambda f, q, k, v, *_: jax.grad(loss(lambda *x: [through_a_loop(f)(*x)]))(q, k, v),
    "saved": lambda f, q, k, v, *_: jax.grad(
        loss(jax.checkpoint(f, policy=fp.save_attention)), (0, 1, 2)
    )(q, k, v),
}
ALWAYS = ["MeanFlow-pushing", "grad of grad-jnp", "loop-pushing"]


@dataclasses.dataclass(frozen=True)
class Pushing(XlaBackend):
    """A backend with a forward mode of its own, which has O and its tangent in one call."""

    @property
    def jvp(self):
        return PushingJvp(self)

    @property
    def jvp_of_vjp(self):
        return PushingJvpOfVjp(self)


class PushingJvp(base.Jvp):
    def __init__(self, backend):
        self.backend = backend

    def refusal(self, problem, blocks, moves, *, primal):
        return None

    def run(self, spec, operands, given, found):
        given = given._replace(sinks=None)
        moving = operands._replace(**{n: None for n, t in given._asdict().items() if t is None})
        problem = describe(operands, spec)

        def outputs(moving):
            own = {n: x for n, x in moving._asdict().items() if x is not None}
            out = smooth.attention(
                spec, self.backend.attention.plan(problem), operands._replace(**own)
            )
            return out.o, out.lse_log2, softmax.natural(out.lse_log2)

        (o, lse_log2, _), (do, _, dlse) = jax.jvp(outputs, (moving,), (given,))
        own = (o, lse_log2, jnp.zeros_like(lse_log2)) if found is None else (None,) * 3
        return Tangents(*own, do, dlse)


class PushingJvpOfVjp(base.JvpOfVjp):
    def __init__(self, backend):
        self.backend = backend

    def refusal(self, problem, moves, wanted):
        return None if moves | wanted <= {"q", "k", "v"} else "has those of q, k and v alone"

    def run(self, spec, operands, cotangents, given, moved):
        problem = describe(operands, spec)

        def outputs(*qkv):
            moving = operands._replace(**dict(zip("qkv", qkv, strict=True)))
            out = smooth.attention(spec, self.backend.attention.plan(problem), moving)
            return out.o, softmax.natural(out.lse_log2)

        gradients = lambda qkv, *of_rows: jax.vjp(outputs, *qkv)[1](of_rows)
        over = lambda a, b: jnp.einsum("btnh,btnh->bnt", a, b)
        (o, _), (of_o, _) = jax.jvp(outputs, operands[:3], given[:3])
        do, ddo = cotangents.do, moved.do
        dlse = over(o, do) - cotangents.delta, over(of_o, do) + over(o, ddo) - moved.delta
        primals, tangents = (operands[:3], do, dlse[0]), (given[:3], ddo, dlse[1])
        return Operands(*jax.jvp(gradients, primals, tangents)[1])


def pushing(q, k, v, **options):
    backend = Pushing()
    options = options or {"causal": True}
    call = validate.canonicalize(q, k, v, Arguments(differentiable="any", **options))
    blocks = backend.attention.plan(call.problem)
    return any_order.attend(backend, call.spec, blocks, call.operands)[:2]


@pytest.mark.thorough(always=ALWAYS)
@pytest.mark.parametrize("attend", [ANY, pushing], ids=["jnp", "pushing"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name, attend):
    run = lambda f: jax.jit(functools.partial(TRANSFORMED[name], f))(*arrays(6))
    close(run(attend), run(DENSE))


@pytest.mark.thorough(always=["bias_infinite_score_mod"])
@pytest.mark.parametrize("case", (*CASES, *FEATURES), ids=str)
def test_tangents_and_hessian_vector_products(case):
    """Compares them by all operands that have a gradient, where O and LSE are finite."""
    widen = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    x = jax.tree.map(lambda x: jnp.asarray(widen(np.asarray(x))), case.inputs())
    moves = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    side = {name: value for name, value in x.side.items() if moves(value)}
    primals = x.q, x.k, x.v, side
    wave = lambda x: jnp.cos(3.0 * jnp.arange(x.size, dtype=jnp.float64)).reshape(x.shape)
    given = jax.tree.map(wave, primals)

    def outputs(call, arguments):
        def run(q, k, v, side):
            o, lse = call(q, k, v, **arguments(case, x._replace(side=x.side | side)))
            return o, jnp.where(jnp.isfinite(lse), lse, 0.0)

        return run

    blocks = None if case.block_mask else BLOCKS
    call = functools.partial(
        fp.flash_attention_with_lse, backend="xla", blocks=blocks, differentiable="any"
    )
    pairs = []
    for f in (outputs(call, Case.arguments), outputs(reference.attention, Case.oracle_arguments)):
        gradient = jax.grad(
            lambda *args, f=f: sum(
                jnp.sum(x * x * w) for x, w in zip(f(*args), (x.do, x.dlse), strict=True)
            ),
            (0, 1, 2, 3),
        )
        run = lambda *args, f=f, gradient=gradient: (jax.jvp(f, *args), jax.jvp(gradient, *args)[1])
        pairs.append(jax.jit(run)(primals, given))
    close(*pairs, rtol=1e-7, atol=1e-7)


@pytest.mark.thorough(always=["2"])
@pytest.mark.parametrize("order", [2, 3])
def test_check_grads(order):
    check_grads(ANY, tuple(arrays(3, (1, 5, 1, 2))), order=order, modes=("fwd", "rev"))


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("width", [64, 128])
def test_hopper_runs_the_same_kernels_for_a_gradient(width):
    backend = HopperBackend(interpret=True, num_sms=2)
    case = Case("any", T=130, S=150, N=2, K=1, H=width, causal=True, dtype="bfloat16")
    x = case.inputs()
    call = validate.canonicalize(x.q, x.k, x.v, Arguments(causal=True))
    blocks = backend.attention.plan(call.problem)

    def gradients(attend):
        run = lambda *qkv: attend(
            backend, call.spec, blocks, call.operands._replace(**dict(zip("qkv", qkv, strict=True)))
        )[:2]
        o, pull = jax.vjp(run, *call.operands[:3])
        return o, pull((x.do, x.dlse.astype(o[1].dtype)))

    with race_checked():
        pair = [
            jax.jit(gradients, static_argnums=0)(f) for f in (derivatives.attend, any_order.attend)
        ]
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.interpret
def test_tangents_of_hopper():
    backend = HopperBackend(interpret=True, num_sms=2)
    case = Case("any", T=130, S=70, N=2, K=1, H=64, dtype="bfloat16")
    x = case.inputs()
    call = validate.canonicalize(x.q, x.k, x.v, Arguments())
    blocks = backend.attention.plan(call.problem)
    run = lambda *qkv: any_order.attend(
        backend, call.spec, blocks, call.operands._replace(**dict(zip("qkv", qkv, strict=True)))
    )[:2]
    wide = lambda x: jnp.asarray(x, jnp.float32)
    given = (x.do, jnp.flip(x.k, 1), jnp.flip(x.v, 1))
    with race_checked():
        found = jax.jit(lambda *args: jax.jvp(run, args[:3], args[3:])[1])(x.q, x.k, x.v, *given)
    exact = jax.jvp(reference.attention, (*map(wide, (x.q, x.k, x.v)),), (*map(wide, given),))[1]
    for a, b in zip(found, exact, strict=True):
        error = np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2))
        assert error <= 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.sqrt(np.mean(b**2))


@pytest.mark.thorough(always=["jvp of grad"])
@pytest.mark.parametrize("order", ["jvp", "jvp of grad", "grad of grad"])
def test_memory_is_linear_in_the_length(order):
    attend = functools.partial(
        fp.flash_attention_with_lse,
        backend="xla",
        blocks={"block_q": 128, "block_kv": 128},
        differentiable="any",
    )

    def planned(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        run = jax.jit(functools.partial(TRANSFORMED[order], attend))
        return run.lower(*[x] * 6).compile().memory_analysis().temp_size_in_bytes

    small, large = planned(2048), planned(8192)
    assert large <= 4.5 * small and large < 8192 * 8192  # of 4 bytes each would be four times that


@pytest.mark.thorough(always=["shard_map"])
@pytest.mark.parametrize("how", ["Auto", "Explicit", "shard_map"])
def test_sharded_over_batch_and_heads(how, eight_devices):
    kind = AxisType.Explicit if how == "Explicit" else AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2, devices=eight_devices)
    spec = P("data", None, "model")
    q, k, v, dq, dk, dv = arrays(6, (4, 24, 4, 8))
    attend = ANY
    if how == "shard_map":
        out = (spec, P("data", "model"))
        attend = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=out)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    for name in ("jvp of grad", "MeanFlow"):
        run = lambda f, x, name=name: jax.jit(functools.partial(TRANSFORMED[name], f))(*x)
        given = (q, k, v, dq, dk, dv)
        expected = run(DENSE, given)
        with jax.set_mesh(mesh) if how == "Explicit" else contextlib.nullcontext():
            close(run(attend, [*map(put, given)]), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("name", ["jvp of grad", "grad of grad", "MeanFlow"])
def test_context_parallel(strategy, modified, name, eight_devices):
    """Differentiates attention to a sequence on four devices, with sinks and rows without keys."""
    mesh = jax.make_mesh((4,), ("sequence",), devices=eight_devices[:4])
    ids = jnp.asarray(np.repeat([0, 1, -1], [10, 12, 10])[None], jnp.int32)
    options = {"causal": True}
    if modified:
        options = {"sinks": jnp.arange(4.0), "q_segment_ids": ids, "kv_segment_ids": ids}

    def outputs(f):
        def run(*args):
            o, lse = f(*args)[:2]
            return o, jnp.where(jnp.isfinite(lse), lse, 0.0)

        return run

    parallel = functools.partial(
        context_parallel_attention,
        mesh=mesh,
        axis="sequence",
        strategy=strategy,
        differentiable="any",
        return_lse=True,
        **options,
    )
    given, dense = arrays(6, (1, 32, 4, 8)), functools.partial(reference.attention, **options)
    run = lambda f: jax.jit(functools.partial(TRANSFORMED[name], outputs(f)))(*given)
    close(run(parallel), run(dense))


@pytest.mark.thorough(always=["jvp-pushing", "jvp of grad-pushing", "grad-jnp"])
@pytest.mark.parametrize("path", ["pushing", "jnp"])
@pytest.mark.parametrize("name", ["jvp", "linearize", "grad", "jvp of grad", "grad of grad"])
def test_sinks_of_padding(path, name):
    """Moves the sinks: the log-sum-exp of a query with a negative id is its sink."""
    ids = jnp.asarray([[0, 0, 0, 0, 1, 1, 1, 1, -1, -1, -1, -1]], jnp.int32)
    options = {
        "q_segment_ids": ids,
        "kv_segment_ids": ids,
        "q_lengths": jnp.asarray([10], jnp.int32),
    }

    def outputs(attend):
        def run(q, k, sinks):
            o, lse = attend(q, k, k, sinks=sinks, **options)
            return o, jnp.where(jnp.arange(12) < 10, lse, 0.0)  # -inf beyond the length

        return run

    fast = functools.partial(ANY, causal=False) if path == "jnp" else pushing
    (q, k), (dq, dk) = arrays(2), arrays(2) + 1.0
    given = q, k, jnp.asarray([0.3, -1.0]), dq, dk, jnp.asarray([0.7, 2.0])
    run = lambda f: jax.jit(functools.partial(TRANSFORMED[name], outputs(f)))(*given)
    found = run(fast)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    close(found, run(reference.attention))


def test_refusals():
    x = arrays(1)[0]
    with pytest.raises(ValueError, match="differentiable is 'forward': 'reverse' has the gradient"):
        fp.flash_attention(x, x, x, differentiable="forward")
    with pytest.raises(ValueError, match="differentiable is True"):
        fp.flash_attention(x, x, x, differentiable=True)
    y = arrays(1)[0]
    for function in (jax.jvp, lambda f, *x: jax.jvp(jax.grad(lambda y: f(y).sum()), *x)):
        with pytest.raises((TypeError, NotImplementedError), match="differentiable='any'"):
            function(lambda y: fp.flash_attention(y, y, y), (y,), (y,))


def test_the_transpose_in_v():
    q, k, v, do = arrays(4, (1, 16, 2, 8))
    call = lambda v: fp.flash_attention(q, k, v, differentiable="any")
    (found,) = jax.linear_transpose(jax.linearize(call, v)[1], v)(do)
    np.testing.assert_array_equal(found, jax.vjp(call, v)[1](do)[0])


def test_other_functions_and_layers():
    q, k, v, dq, *_ = arrays(6, (1, 16, 2, 8))
    dense = lambda q: reference.attention(q, k, v)[0]
    expected = jax.jvp(dense, (q,), (dq,))[1]
    varlen = lambda q: fp.flash_attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=jnp.array([0, 16]), differentiable="any"
    )[None]
    likely = lambda q: fp.flash_attention_with_max_logit(q, k, v, differentiable="any")[0]
    for function in (varlen, likely):
        close(jax.jvp(function, (q,), (dq,))[1], expected)
    assert "blockwise jnp" in str(fp.explain(fp.flash_attention, q, k, v, differentiable="any"))
    assert "blockwise jnp" not in str(fp.explain(fp.flash_attention, q, k, v))
    x = arrays(1, (2, 8, 16))[0][0][None].astype(jnp.float32)
    options = {"num_heads": 2, "differentiable": "any"}
    module = layers.FlashAttention(**options)
    assert isinstance(module, linen.Module)
    params = module.init(jax.random.key(0), x)
    check_grads(lambda x: module.apply(params, x), (x,), order=1, rtol=2e-2, atol=2e-2)
    layer = nnx_layers.FlashAttention(in_features=16, rngs=nnx.Rngs(0), **options)
    check_grads(layer, (x,), order=1, rtol=2e-2, atol=2e-2)
