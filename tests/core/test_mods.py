"""Users' functions: traced into tiles, differentiated, compared, refused."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core import mods
from flash_pallas.core.mask import Tile

B, N = 3, 2
TILE = Tile(4, 9, (5, 6))
SCORES = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
PER_HEAD = jnp.asarray(np.random.default_rng(1).standard_normal(N), jnp.float32)
COUNTS = jnp.asarray([7, 9, 12], jnp.int32)


def traced(*arguments, **options):
    """Returns a traced function and its arrays of batch entries and heads."""
    found = mods.trace(*arguments, **options)
    return found.mod, found.params


def on_tile(function, b, n, score=SCORES):
    """Evaluates the traced function on one tile of head n of batch entry b."""
    mod, arrays = traced(function, B, N, None if score is None else jnp.float32)
    assert all(x.shape == (B, N) for x in arrays)
    params = [jnp.broadcast_to(x[b, n], TILE.shape) for x in arrays]
    return mod(TILE, params) if score is None else mod(TILE, params, jnp.asarray(score))


def element_by_element(function, b, n, score=SCORES):
    found = []
    for row, column in np.ndindex(*TILE.shape):
        place = [jnp.int32(x) for x in (b, n, 4 + row, 9 + column)]
        leading = [] if score is None else [jnp.asarray(score[row, column])]
        found.append(function(*leading, *place))
    return np.stack(found).reshape(TILE.shape)


@jax.custom_jvp
def softer(x):
    return x * 0.5


softer.defjvp(lambda primals, tangents: (softer(*primals), tangents[0] * 0.5))

SCORE_FUNCTIONS = {
    "identity": lambda s, b, n, i, j: s,
    "constant": lambda s, b, n, i, j: jnp.float32(2.0),
    "captured": lambda s, b, n, i, j: s * PER_HEAD[n] + PER_HEAD.sum(),
    "only a captured value": lambda s, b, n, i, j: PER_HEAD[n],
    "positions": lambda s, b, n, i, j: s + jnp.abs(i - j).astype(jnp.float32) ** 2,
    "nested calls": lambda s, b, n, i, j: jax.nn.silu(s) + jnp.where(i > j, jnp.tanh(s), softer(s)),
    "batch and head": lambda s, b, n, i, j: s + (b * 10 + n * i).astype(jnp.float32),
    "loop": lambda s, b, n, i, j: s * jax.lax.fori_loop(0, 3, lambda _, x: x * 2.0, PER_HEAD[n]),
    "clip": lambda s, b, n, i, j: jnp.clip(jnp.exp2(s), 0.5, 2.0) % 1.5,
    "exact gelu": lambda s, b, n, i, j: jax.nn.gelu(s, approximate=False),
    "less usual": lambda s, b, n, i, j: jnp.log2(jnp.abs(s) + 1.0) + jnp.arctan(s) + jnp.sinh(s),
    "checkpoint": jax.checkpoint(lambda s, b, n, i, j: s * s * PER_HEAD[n]),
}
MASK_FUNCTIONS = {
    "causal": lambda b, n, i, j: j <= i,
    "always": lambda b, n, i, j: True,
    "counts": lambda b, n, i, j: (j < COUNTS[b]) & ((i + n) % 2 == 0),
    "heads alone": lambda b, n, i, j: n == 1,
    "logic": lambda b, n, i, j: ~(((i // 2) == (j // 3)) | (PER_HEAD[n] > 0.0)) ^ (i * j > 50),
}


@pytest.mark.thorough(always=["0-0-captured", "0-0-positions", "2-1-exact gelu"])
@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
@pytest.mark.parametrize(("b", "n"), [(0, 0), (2, 1)])
def test_score_functions(name, b, n):
    function = SCORE_FUNCTIONS[name]
    found = on_tile(function, b, n)
    assert found.shape == TILE.shape and found.dtype == jnp.float32
    np.testing.assert_allclose(found, element_by_element(function, b, n), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
@pytest.mark.parametrize(("b", "n"), [(0, 0), (2, 1)])
def test_mask_functions(name, b, n):
    function = MASK_FUNCTIONS[name]
    found = on_tile(function, b, n, score=None)
    assert found.shape == TILE.shape and found.dtype == jnp.bool_
    np.testing.assert_array_equal(found, element_by_element(function, b, n, score=None))


def test_in_a_transposed_tile():
    lying = Tile(4, 9, (6, 5), q_axis=1)
    mod, _ = traced(SCORE_FUNCTIONS["positions"], B, N, jnp.float32)
    found = mod(lying, (), jnp.asarray(SCORES.T))
    np.testing.assert_array_equal(found, mod(TILE, (), jnp.asarray(SCORES)).T)


def test_gradients_reach_what_was_captured():
    def value(per_head, traced):
        function = lambda s, b, n, i, j: s * jnp.sin(per_head[n]) + b.astype(jnp.float32)
        if not traced:
            return sum(element_by_element(function, 2, n).sum() for n in range(N))
        return sum(on_tile(function, 2, n).sum() for n in range(N))

    found = jax.grad(lambda x: value(x, True))(PER_HEAD)
    np.testing.assert_allclose(found, np.cos(PER_HEAD) * SCORES.sum(), rtol=1e-4)


def test_known_values_are_computed_outside_and_once():
    function = lambda s, b, n, i, j: s + jnp.exp(PER_HEAD[n]) * jnp.exp(PER_HEAD[n])
    mod, arrays = traced(function, B, N, jnp.float32)
    assert len(arrays) == 1 and "exp" not in mod.primitives
    np.testing.assert_allclose(arrays[0], np.exp(2 * np.asarray(PER_HEAD))[None].repeat(B, 0), 1e-6)


def test_arrays_are_stored_as_float32_or_int32():
    half, flags = PER_HEAD.astype(jnp.bfloat16), jnp.array([True, False])
    function = lambda s, b, n, i, j: jnp.where(
        flags[n] & (i > j), s, s + (half[n] * 1).astype(s.dtype)
    )
    _, arrays = traced(function, B, N, jnp.float32)
    assert {x.dtype.name for x in arrays} == {"float32", "int32"}
    for n in range(N):
        np.testing.assert_allclose(
            on_tile(function, 0, n), element_by_element(function, 0, n), rtol=1e-6
        )


def test_equal_functions_make_equal_mods_whatever_they_captured():
    make = lambda x: lambda s, b, n, i, j: s * x[n]
    first, second = (traced(make(x), B, N, jnp.float32)[0] for x in (PER_HEAD, 2 * PER_HEAD))
    assert first == second and hash(first) == hash(second)
    other = traced(lambda s, b, n, i, j: s + PER_HEAD[n], B, N, jnp.float32)[0]
    shifted = traced(lambda s, b, n, i, j: s * PER_HEAD[n] + 1.0, B, N, jnp.float32)[0]
    swapped = traced(lambda s, b, n, i, j: s + (i - j).astype(s.dtype), B, N, jnp.float32)[0]
    turned = traced(lambda s, b, n, i, j: s + (j - i).astype(s.dtype), B, N, jnp.float32)[0]
    assert len({first, other, shifted, swapped, turned}) == 5


TABLE = jnp.zeros((B, N, 16, 16))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, b, n, i, j: s + TABLE[b, n, i, j], "indexed by b and n"),
        (lambda s, b, n, i, j: s + (TABLE[b, n] * s).sum(), "indexed by b and n"),
        (lambda s, b, n, i, j: jax.lax.cond(i > j, lambda: s, lambda: -s), "'cond'.*jnp.where"),
        (lambda s, b, n, i, j: jax.lax.fori_loop(0, i, lambda _, x: x, s), "'while'.*jnp.where"),
        (lambda s, b, n, i, j: jnp.stack([s, s + 1.0]).max(), "makes a vector.*nest jnp.where"),
    ],
)
def test_what_is_not_elementwise_is_refused(function, message):
    with pytest.raises(mods.NotElementwise, match=message):
        traced(function, B, N, jnp.float32)


@pytest.mark.parametrize(
    ("function", "score_dtype", "message"),
    [
        (lambda s, b, n, i, j: i, jnp.float32, "score_mod must return one float"),
        (lambda s, b, n, i, j: (s, s), jnp.float32, "score_mod must return one float"),
        (lambda s, b, n, i, j: PER_HEAD * s, jnp.float32, "a scalar"),
        (lambda b, n, i, j: i + j, None, "mask_mod must return one bool"),
    ],
)
def test_what_returns_something_else_is_refused(function, score_dtype, message):
    with pytest.raises(TypeError, match=message):
        traced(function, B, N, score_dtype)


IDS = np.array([[0, 0, 1, 1, 2, 2, 2, 3, 3, 3], [0] * 10, [3, 2, 1, 0, 0, 1, 2, 3, 0, 1]])
FLAGS = IDS[0] > 1
LOOKUPS = {
    "documents": (lambda b, n, i, j: IDS_OF[b, i] == IDS_OF[b, j], (0, 1)),
    "of all entries": (lambda b, n, i, j: FLAGS_OF[j] | (j <= i), (1,)),
    "computed": (lambda b, n, i, j: (IDS_OF[b, i // 2] + 1) * n >= IDS_OF[b, j] - (i - j), (0, 1)),
    "with a head's": (lambda b, n, i, j: (IDS_OF[b, i] > n) & (PER_HEAD[n] > 0.0), (0,)),
}
IDS_OF, FLAGS_OF = jnp.asarray(IDS), jnp.asarray(FLAGS)


@pytest.mark.parametrize("name", LOOKUPS)
def test_arrays_are_looked_up_by_positions(name):
    function, sides = LOOKUPS[name]
    queries, keys = jnp.arange(10, dtype=jnp.int32)[None], jnp.arange(9, -1, -1)[None]
    found = mods.trace(function, B, N, positions=lambda: (queries, jnp.broadcast_to(keys, (B, 10))))
    assert found.mod.vectors == sides and "gather" not in found.mod.primitives
    places = np.asarray(queries)[0], np.asarray(keys)[0]
    tile = Tile(0, 0, (10, 10), positions=tuple(jnp.asarray(x) for x in np.meshgrid(
        *places, indexing="ij")))  # fmt: skip
    for b, n in np.ndindex(B, N):
        params = [jnp.broadcast_to(x[b, n], tile.shape) for x in found.params]
        rows = [x[b if len(x) > 1 else 0] for x in found.vectors]
        params += [(tile.per_q, tile.per_kv)[s](x) for s, x in zip(sides, rows, strict=True)]
        wanted = [
            [function(b, n, jnp.int32(i), jnp.int32(j)) for j in places[1]] for i in places[0]
        ]
        np.testing.assert_array_equal(found.mod(tile, params), np.array(wanted))


def test_what_cannot_be_looked_up():
    places = lambda: (jnp.arange(10, dtype=jnp.int32)[None],) * 2
    by_head = lambda b, n, i, j: IDS_OF[n, i] > j
    real = lambda b, n, i, j: PER_HEAD[i] > j.astype(jnp.float32)
    pairs = lambda b, n, i, j: IDS_OF[i, j] > 0
    for function, message in (
        (by_head, "indexes a captured array by n together with i or j"),
        (real, r"makes float32\[\] of a captured array"),
        (pairs, "indexes an array by i or j.*as mask="),
    ):
        with pytest.raises(mods.NotElementwise, match=message):
            mods.trace(function, B, N, positions=places)
    with pytest.raises(mods.NotElementwise):  # a score_mod looks nothing up
        mods.trace(lambda s, b, n, i, j: s * PER_HEAD[i], B, N, jnp.float32)


def test_joined_functions_read_what_each_read():
    places = lambda: (jnp.arange(10, dtype=jnp.int32)[None],) * 2
    first = lambda b, n, i, j: (IDS_OF[b, i] == IDS_OF[b, j]) & (COUNTS[b] > j)
    second = lambda b, n, i, j: (FLAGS_OF[j] & (PER_HEAD[n] > 0.0)) | (COUNTS[b] > i)
    one, other = (mods.trace(f, B, N, positions=places) for f in (first, second))
    tile = Tile(0, 0, (10, 10))

    def values(found, b, n):
        params = [jnp.broadcast_to(x[b, n], tile.shape) for x in found.params]
        rows = [x[b if len(x) > 1 else 0] for x in found.vectors]
        spread = zip(found.mod.vectors, rows, strict=True)
        return found.mod(tile, params + [(tile.per_q, tile.per_kv)[s](x) for s, x in spread])

    for join in (operator.and_, operator.or_):
        both = mods.joined(join, one, other)
        for b, n in np.ndindex(B, N):
            wanted = join(values(one, b, n), values(other, b, n))
            np.testing.assert_array_equal(values(both, b, n), wanted)
    assert mods.joined(operator.or_, one, other).mod != mods.joined(operator.and_, one, other).mod


KEEPS_NAN = {
    "arithmetic": (lambda s, b, n, i, j: s * PER_HEAD[n] - jnp.abs(s) / (1.0 + s * s), True),
    "functions": (lambda s, b, n, i, j: jnp.tanh(jnp.exp(s)) + jnp.log1p(s), True),
    "converted": (lambda s, b, n, i, j: s.astype(jnp.bfloat16).astype(s.dtype), True),
    "choice": (lambda s, b, n, i, j: jnp.where(i > j, s, 0.5 * s), False),
    "maximum": (lambda s, b, n, i, j: jnp.maximum(s, -9.0), False),
    "integers": (lambda s, b, n, i, j: s.astype(jnp.int32).astype(s.dtype), False),
    "not read": (lambda s, b, n, i, j: PER_HEAD[n] * (i - j).astype(jnp.float32), False),
    "read in vain": (lambda s, b, n, i, j: jnp.where(s > 0.0, 1.0, 2.0), False),
    "constant": (lambda s, b, n, i, j: jnp.float32(1.0), False),
}


@pytest.mark.parametrize(("function", "expected"), KEEPS_NAN.values(), ids=KEEPS_NAN)
def test_what_is_known_to_keep_a_nan_does(function, expected):
    function_ = lambda s, b, n, i, j: function(s, b, n, i, j).astype(jnp.float32)
    found = mods.trace(function_, B, N, jnp.float32)
    assert found.mod.keeps_nan == expected
    if expected:
        params = [jnp.broadcast_to(x[0, 0], (4, 4)) for x in found.params]
        nan = jnp.full((4, 4), jnp.nan, jnp.float32)
        assert np.isnan(found.mod(Tile(0, 0, (4, 4)), params, nan)).all()
