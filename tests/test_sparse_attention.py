"""examples/sparse_attention.py against dense attention to the same keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import sparse_attention as sparse
from flash_pallas import reference

B, T, N, K, H = 2, 512, 4, 2, 32
BLOCKS = T // sparse.BLOCK
CAUSAL = jnp.tri(T, dtype=bool)[None, None]


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = zip(keys, (N, K, K, N), strict=True)
    return [jax.random.normal(x, (B, T, n, H)) for x, n in sizes]


def dense_of(chosen):
    """Returns bool [B, N, T, T]: what lists of blocks [B, K, blocks, M] show, causally."""
    listed = np.zeros((B, K, BLOCKS, BLOCKS), bool)
    for b, n, i in np.ndindex(B, K, BLOCKS):
        listed[b, n, i, [j for j in np.asarray(chosen)[b, n, i] if j >= 0]] = True
    for axis in (2, 3):
        listed = np.repeat(listed, sparse.BLOCK, axis)
    return jnp.repeat(jnp.asarray(listed), N // K, axis=1) & CAUSAL


def with_gradients(function, *arguments):
    """Returns the output and the gradients of its product with a fixed array."""

    @jax.jit
    def run(do, *arguments):
        o, pull = jax.vjp(function, *arguments)
        return o, *pull(do)

    return run(*arguments)


def assert_equal(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-5)


def test_blocks_are_chosen_by_their_means_and_lie_in_the_past(arrays):
    q, k = arrays[:2]
    chosen = np.asarray(sparse.best_blocks(q, k, 3, jnp.eye(BLOCKS, dtype=bool)))
    assert chosen.shape == (B, K, BLOCKS, 3)
    means = [np.asarray(x).reshape(B, BLOCKS, sparse.BLOCK, -1, H).mean(2) for x in (q, k)]
    for b, n, i in np.ndindex(B, K, BLOCKS):
        query = means[0][b, i, 2 * n : 2 * n + 2].sum(0)
        best = np.argsort(-(means[1][b, :i, n] @ query))[:2]
        assert set(chosen[b, n, i]) - {-1} == {i, *best}


def test_moba(arrays):
    *qkv, do = arrays
    chosen = sparse.best_blocks(*qkv[:2], 3, jnp.eye(BLOCKS, dtype=bool))
    dense = lambda q, k, v: reference.attention(q, k, v, mask=dense_of(chosen))[0]
    found = with_gradients(lambda *x: sparse.moba(*x, count=3), do, *qkv)
    assert_equal(found, with_gradients(dense, do, *qkv))


def test_native_sparse_attention(arrays):
    *qkv, do = arrays
    gates = 0.5 * jax.random.normal(jax.random.key(5), (3, N))
    always = jnp.eye(BLOCKS, dtype=bool).at[:, 0].set(True)
    chosen = sparse.best_blocks(*qkv[:2], 3, always)
    row, column = np.arange(T)[:, None], np.arange(T)
    past = jnp.asarray((np.arange(BLOCKS) + 1) * sparse.BLOCK <= row)[None, None]
    near = jnp.asarray(row - column <= 100)[None, None] & CAUSAL

    def dense(q, k, v, gates):
        mean = lambda x: x.reshape(B, BLOCKS, sparse.BLOCK, K, H).mean(2)
        parts = (
            reference.attention(q, mean(k), mean(v), mask=past),
            reference.attention(q, k, v, mask=dense_of(chosen)),
            reference.attention(q, k, v, mask=near),
        )
        weights = [
            jnp.exp(lse + gate[None, :, None]) for (_, lse), gate in zip(parts, gates, strict=True)
        ]
        total = sum(weights)
        spread = lambda x: (x / total).swapaxes(1, 2)[..., None]
        return sum(o * spread(w) for (o, _), w in zip(parts, weights, strict=True))

    call = lambda *x: sparse.native_sparse(*x, count=3, window=100)
    assert_equal(with_gradients(call, do, *qkv, gates), with_gradients(dense, do, *qkv, gates))


def test_video(arrays):
    *qkv, do = arrays
    grid = (2, 2, 2)
    assert (sparse.video_tiles(grid) >= 0).all() and sparse.video_tiles(grid).shape[3] == 8
    place = np.array(list(np.ndindex(4, 2, 1)))
    near = np.abs(place[:, None] - place[None]).max(-1) <= 1
    dense_mask = jnp.asarray(np.repeat(np.repeat(near, sparse.BLOCK, 0), sparse.BLOCK, 1))
    dense = lambda q, k, v: reference.attention(q, k, v, mask=dense_mask[None, None])[0]
    found = with_gradients(lambda *x: sparse.video(*x, (4, 2, 1)), do, *qkv)
    assert_equal(found, with_gradients(dense, do, *qkv))


def test_it_runs(capsys):
    sparse.main()
    assert "NSA: (1, 384, 4, 32)" in capsys.readouterr().out
