"""The examples of higher derivatives, against dense attention and against formulas by hand."""

from __future__ import annotations

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from examples import hessian, laplacian, maml, mean_flow
from flash_pallas import reference

from .test_examples import run


@contextlib.contextmanager
def exactly():
    """Switches float64 on, and strict promotion off: Flax's norms promote with float32."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def dense(q, k, v, *, causal=False, scale=None, **_):
    """Computes dense attention, with a batch dimension or without."""
    batched = [x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)]
    return reference.attention(*batched, causal=causal, scale=scale)[0].reshape(q.shape)


def flat(tree):
    """Returns the leaves of a tree as one vector."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def assert_near(found, expected):
    """Compares trees, the expected one in float64, by the norm of what they differ by.

    A hundred units of rounding are allowed, in float32 as in float64: what differs by rounding
    alone is as many of either. These sums have less than a hundred terms.
    """
    found, expected = flat(found), flat(expected)
    error = np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < 100 * np.finfo(found.dtype).eps


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x, dtype), tree)


def normal(*shape, seed: int | list[int] = 0, scale=1.0):
    """Draws float64 numbers that are float32 ones too."""
    return cast(cast(np.random.default_rng(seed).normal(scale=scale, size=shape), "f4"), "f8")


def parameters(model, *inputs, seed=0):
    """Returns float64 parameters of which none is zero, as some are before training."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten(
        [normal(*x.shape, seed=[seed, i], scale=0.4) for i, x in enumerate(leaves)]
    )


def computed(compute, inputs, dtype="float64"):
    """Returns what `compute` makes of the inputs in a dtype."""
    with exactly() if dtype == "float64" else contextlib.nullcontext():
        found = jax.tree.map(np.asarray, jax.jit(compute)(*cast(inputs, dtype)))
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {dtype}
    return found


def pair(model, **sizes):
    """Returns a model of an example, and the same with dense attention."""
    return model(**sizes), model(**sizes, attention=dense)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: (mean_flow.MeanVelocity(**kw), jnp.ones((1, 4, 2)), jnp.ones(1), jnp.ones(1)),
        lambda **kw: (hessian.LanguageModel(5, 1, 8, **kw), jnp.zeros((1, 4), jnp.int32)),
        lambda **kw: (laplacian.PsiFormer(**kw), jnp.ones((3, 3))),
        lambda **kw: (maml.Regressor(**kw), jnp.ones((1, 4)), jnp.ones((1, 4))),
    ],
    ids=["mean_flow", "hessian", "laplacian", "maml"],
)
def test_models_call_the_attention_that_they_are_given(make):
    """Shows that what follows compares with dense attention."""
    calls = []

    def watched(*args, **kw):
        calls.append(kw)
        return dense(*args, **kw)

    model, *inputs = make(attention=watched)
    jax.eval_shape(model.init, jax.random.key(0), *inputs)
    assert len(calls) == model.layers


DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32"])


@pytest.mark.thorough(always=["float64"])
@DTYPES
def test_mean_flow_step(dtype):
    ours, theirs = pair(mean_flow.MeanVelocity, layers=1, width=16)
    x, noise = normal(2, 3, 8, 2)
    times = np.array([0.125, 0.25, 0.5]), np.array([0.75, 0.875, 0.5])
    params = parameters(ours, *cast((x, *times), np.float32))

    def step(model, *arguments):
        loss = functools.partial(mean_flow.mean_flow_loss, model.apply)
        return jax.value_and_grad(loss, has_aux=True)(*arguments)

    given = params, x, noise, times
    found = computed(functools.partial(step, ours), given, dtype)
    assert_near(found, computed(functools.partial(step, theirs), given))


def test_mean_flow_loss_by_hand():
    x, noise = normal(2, 4, 5, 2)
    r, t = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.9, 0.2, 0.8, 0.5])
    spread = lambda time: time[:, None, None]
    basis = lambda z, r, t: z * spread(t) ** 2 + spread(r)
    of = functools.partial(mean_flow.mean_flow_loss, lambda scale, *at: scale * basis(*at))
    inputs = 1.7, x, noise, (r, t)
    found, gradient = computed(jax.value_and_grad(of, has_aux=True), inputs)

    z, v = (1 - spread(t)) * x + spread(t) * noise, noise - x
    slope = 1.7 * (v * spread(t) ** 2 + 2 * z * spread(t))
    error = 1.7 * basis(z, r, t) - (v - spread(t - r) * slope)
    squares = (error**2).mean(axis=(1, 2))
    weights = 1 / (squares + 1e-3)
    expected = (weights * squares).mean(), squares.mean()
    by_scale = (spread(weights) * 2 * error * basis(z, r, t)).mean()
    np.testing.assert_allclose([*found, gradient], [*expected, by_scale], rtol=1e-12)


LANGUAGE = {"vocabulary": 7, "layers": 1, "width": 4}
TOKENS = np.random.default_rng(3).integers(7, size=(4, 9), dtype=np.int32)


@pytest.mark.thorough
@DTYPES
def test_hessian_product(dtype):
    """Compares it with the gradient of the gradient times the vector, by dense attention."""
    ours, theirs = pair(hessian.LanguageModel, **LANGUAGE)
    given = [parameters(ours, TOKENS, seed=seed) for seed in (0, 1)]

    def product(params, vector):
        loss = functools.partial(hessian.cross_entropy, ours, TOKENS)
        return hessian.hessian_product(loss, params, vector)

    def by_reverse_mode(params, vector):
        gradient = jax.grad(functools.partial(hessian.cross_entropy, theirs, TOKENS))
        along = lambda params: jax.tree.map(jnp.vdot, gradient(params), vector)
        return jax.grad(lambda params: sum(jax.tree.leaves(along(params))))(params)

    assert_near(computed(product, given, dtype), computed(by_reverse_mode, given))


@pytest.mark.thorough
def test_largest_eigenvalues():
    ours, theirs = pair(hessian.LanguageModel, **LANGUAGE)
    params = parameters(ours, TOKENS)
    loss = functools.partial(hessian.cross_entropy, ours, TOKENS)
    find = functools.partial(hessian.spectrum, loss, iterations=60)
    values, bounds = computed(find, (params,))

    def full(params):
        flat, unravel = ravel_pytree(params)
        return jax.hessian(lambda flat: hessian.cross_entropy(theirs, TOKENS, unravel(flat)))(flat)

    expected = np.linalg.eigvalsh(computed(full, (params,)))
    for i in (-1, -2, -3, 0):
        assert bounds[i] < 1e-6 * abs(expected[-1])
        # The error of a Ritz value is at most its bound, and quadratic in it near convergence.
        np.testing.assert_allclose(values[i], expected[i], rtol=1e-10)


def test_bounds_of_eigenvalues():
    """Stops Lanczos early, where bounds are large and still hold."""
    matrix = normal(40, 40)
    matrix = matrix + matrix.T
    exact = np.linalg.eigvalsh(matrix)
    find = lambda count: computed(
        lambda matrix: hessian.lanczos(lambda x: matrix @ x, normal(40), count), (matrix,)
    )
    values, bounds = find(8)
    nearest = np.abs(exact[:, None] - values).min(axis=0)
    assert np.all(nearest <= bounds) and np.all(bounds > 1e-3)
    np.testing.assert_allclose(find(40)[0], exact, atol=1e-10)


@pytest.mark.thorough
@DTYPES
def test_kinetic_energy(dtype):
    models = pair(laplacian.PsiFormer, layers=1, width=8, heads=2)
    positions = normal(4, 3)
    params = parameters(models[0], positions.astype(np.float32))

    def energy(params, positions):
        log_psi = functools.partial(models[0].apply, params)
        return laplacian.kinetic_energy(log_psi, positions, chunk=5)  # of 12: the last is smaller

    def whole(params, positions):
        log_psi = lambda flat: models[1].apply(params, flat.reshape(positions.shape))
        flat = positions.ravel()
        slope = jax.grad(log_psi)(flat)
        return -(jnp.trace(jax.hessian(log_psi)(flat)) + slope @ slope) / 2

    given = params, positions
    assert_near(computed(energy, given, dtype), computed(whole, given))


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_kinetic_energy_of_hydrogen(chunk):
    energy = lambda x: laplacian.kinetic_energy(lambda x: -2.0 * jnp.linalg.norm(x), x, chunk)
    found = computed(energy, (np.array([[0.3, -0.4, 1.2]]),))
    np.testing.assert_allclose(found, -(2.0**2) / 2 + 2.0 / 1.3, rtol=1e-12)


def test_potential_energy():
    positions = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [1.0, 0.0, 4.0]])
    apart = 5**-0.5 + 1 / 4 + 5**-0.5
    expected = apart - laplacian.CHARGE * (1 + 1 / 2 + 17**-0.5)
    np.testing.assert_allclose(
        computed(laplacian.potential_energy, (positions,)), expected, rtol=1e-12
    )


def test_electrons_of_equal_spin_can_be_exchanged():
    model = laplacian.PsiFormer(layers=1, width=8, heads=2)
    positions = normal(3, 3)
    params = parameters(model, positions.astype(np.float32))
    log_psi = jax.vmap(model.apply, (None, 0))
    orders = [[0, 1, 2], [1, 0, 2], [0, 2, 1]]
    one, same, other = computed(log_psi, (params, positions[np.array(orders)]))
    np.testing.assert_allclose(same, one, rtol=1e-12)
    assert abs(other - one) > 1e-3


def test_walkers_of_a_normal_distribution():
    walkers = jnp.zeros((4000, 1, 3))
    log_psi = lambda x: -jnp.sum(x**2, axis=(1, 2)) / 4
    move = functools.partial(laplacian.metropolis, log_psi, moves=60, width=1.0)
    moved = jax.jit(move)(walkers, jax.random.key(6))
    # Four standard deviations of means of 12,000 numbers and of their squares.
    assert abs(moved.mean()) < 4 / 12_000**0.5
    assert abs((moved**2).mean() - 1) < 4 * (2 / 12_000) ** 0.5


@pytest.mark.thorough
@DTYPES
def test_meta_gradient(dtype):
    """Compares it with (I - rate * Hessian) times a gradient, the Hessian of dense attention."""
    rate, (ours, theirs) = 0.1, pair(maml.Regressor, layers=1, width=8)
    tasks = maml.sines(jax.random.key(7), tasks=2, prompts=2, points=6)
    params = parameters(ours, *jax.tree.map(lambda x: x[0], tasks[0]))

    def gradients(params, tasks):
        meta = functools.partial(maml.meta_loss, functools.partial(maml.loss, ours))
        return [jax.grad(meta)(params, tasks, rate, first_order) for first_order in (True, False)]

    def by_hand(params, tasks):
        gradient = jax.grad(functools.partial(maml.loss, theirs))

        def of_task(support, query):
            of_support = lambda params: gradient(params, support)
            step = lambda param, grad: param - rate * grad
            after = gradient(jax.tree.map(step, params, of_support(params)), query)
            return [after, jax.tree.map(step, after, jax.jvp(of_support, (params,), (after,))[1])]

        mean = lambda x: x.mean(axis=0)
        return jax.tree.map(mean, jax.vmap(of_task)(*tasks))

    given = params, tasks
    expected = computed(by_hand, given)
    assert_near(computed(gradients, given, dtype), expected)
    first_order, exact = map(flat, expected)
    assert np.linalg.norm(first_order - exact) > 0.05 * np.linalg.norm(exact)


def test_a_point_is_predicted_from_those_before():
    model, (x, y) = maml.Regressor(layers=1, width=8), normal(2, 1, 6)
    params = parameters(model, *cast((x, y), np.float32))
    later = np.where(np.arange(6) < 3, y, y + 1.0)
    found, changed = (computed(model.apply, (params, x, values)) for values in (y, later))
    np.testing.assert_array_equal(found[:, :4], changed[:, :4])  # of y, the fourth sees three
    assert np.all(np.abs(found - changed)[:, 4:] > 1e-3)


def numbers(pattern, output):
    return [float(x) for x in re.findall(pattern, output)]


@pytest.mark.thorough
def test_mean_flow_runs(tmp_path):
    output = run("mean_flow.py", "--steps", 60, "--batch", 32, "--points", 8, cwd=tmp_path)
    errors = numbers(r"squared error ([\d.]+)", output)
    assert len(errors) == 10 and errors[-1] < errors[0]
    noise, samples = numbers(r"(?:noise|samples) ([\d.]+)", output)
    assert samples < noise


@pytest.mark.thorough
def test_hessian_runs(tmp_path):
    sizes = ("--layers", 1, "--width", 8, "--length", 32, "--iterations", 20, "--steps", 3)
    output = run("hessian.py", *sizes, cwd=tmp_path)
    losses = numbers(r"loss ([\d.]+) nats", output)
    assert len(losses) == 2 and losses[1] < losses[0]
    largest, limits = numbers(r"to ([\d.]+)", output), numbers(r"beyond ([\d.]+)", output)
    np.testing.assert_allclose(np.multiply(largest, limits), 2, rtol=1e-2)  # as printed


@pytest.mark.thorough
def test_laplacian_runs(tmp_path):
    output = run("laplacian.py", "--steps", 30, "--walkers", 64, "--chunk", 4, cwd=tmp_path)
    energies = numbers(r"energy (-[\d.]+) hartree", output)
    assert len(energies) == 10 and laplacian.EXACT < energies[-1] < energies[0]


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [(), ("--first-order",)], ids=["exact", "first order"])
def test_maml_runs(flags, tmp_path):
    sizes = ("--steps", 40, "--tasks", 8, "--points", 8)
    losses = numbers(r"after the inner step ([\d.]+)", run("maml.py", *sizes, *flags, cwd=tmp_path))
    assert len(losses) == 10 and losses[-1] < losses[0]
