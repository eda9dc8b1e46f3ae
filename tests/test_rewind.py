"""Rolling caches whose lengths are set back, as where drafts are rejected, in both layers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx
from flax.core import meta

from flash_pallas import KVCache
from flash_pallas.nn import RingCache, _cached
from flash_pallas.nn.linen import FlashAttention as LinenAttention
from flash_pallas.nn.nnx import FlashAttention as NnxAttention

B, FEATURES, LONGEST = 3, 16, 96
HEADS = (2, FEATURES // 4, "float32")  # of a cache
SIZES = {"num_heads": 4, "num_kv_heads": 2, "causal": True}
PLAIN, ALIBI = {"rope_theta": 100.0}, {"alibi": True, "use_sinks": True, "softcap": 3.0}
CHUNKS = (1, 2, 5, 40)  # the last is more than a window, and than a ring


def built(kind: str, **options):
    """Builds a layer: (call in float32, call in float64), each (x, **keywords) -> output."""
    wide = partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
    if kind == "nnx":
        layer = NnxAttention(in_features=FEATURES, **SIZES, **options, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        run = lambda state, x, **given: nnx.merge(graph, state)(x, **given)
    else:
        linen = LinenAttention(**SIZES, **options)
        state = meta.unbox(linen.init(jax.random.key(0), jnp.zeros((1, 4, FEATURES))))
        run = linen.apply

    def exact(x):
        with jax.enable_x64(True):
            return np.asarray(jax.jit(run)(wide(state), jnp.asarray(x, jnp.float64)))

    return partial(run, state), exact


class Sequences:
    """The tokens that were accepted, whose outputs a layer without a cache has."""

    def __init__(self, rng, layer, exact):
        self.rng, self.exact = rng, exact
        self.x, self.lengths = np.zeros((B, LONGEST, FEATURES)), np.zeros(B, np.int32)
        self.call = jax.jit(lambda x, cache, new: layer(x, cache=cache, new_lengths=new))

    def append(self, cache, count: int, new):
        """Calls the layer with `new` [B] of `count` new tokens each, and checks its outputs."""
        x = self.rng.standard_normal((B, count, FEATURES)).astype(np.float32)
        o, cache = self.call(jnp.asarray(x), cache, jnp.asarray(new, jnp.int32))
        for b in range(B):
            self.x[b, self.lengths[b] : self.lengths[b] + new[b]] = x[b, : new[b]]
        whole = self.exact(self.x)
        for b, first in enumerate(self.lengths):
            wanted = whole[b, first : first + new[b]]
            np.testing.assert_allclose(o[b, : new[b]], wanted, rtol=1e-4, atol=1e-5)
        self.lengths = self.lengths + np.asarray(new, np.int32)
        assert cache.lengths.tolist() == self.lengths.tolist()
        return cache

    def rewind(self, cache, back):
        self.lengths = self.lengths - np.asarray(back, np.int32)
        return cache._replace(lengths=jnp.asarray(self.lengths))


@pytest.mark.thorough(always=["copied-linen"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("spare", [3, 8], ids=["copied", "in_place"])
def test_every_amount_that_there_is_room_for(kind, spare):
    """Entries are set back by other amounts, and verify drafts again in between."""
    layer, exact = built(kind, **PLAIN, window=(7, 0))
    run = Sequences(np.random.default_rng(0), layer, exact)
    cache = run.append(RingCache.empty(B, 8 + spare, *HEADS), 40, (40, 23, 9))
    for back in range(spare + 1):
        cache = run.append(cache, 5, (5, 4, 5))
        cache = run.rewind(cache, (back, back // 2, 0))
        cache = run.append(cache, 1, (1, 1, 1))
        cache = run.rewind(cache, (1, 0, 2))
        cache = run.append(cache, 2, (1, 2, 0))


@pytest.mark.thorough(always=["False-0-nnx"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("x64", [False, True])
def test_random_drafts(kind, seed, x64):
    """Draws windows, capacities, prompts, drafts, and how many of them are taken back."""
    rng = np.random.default_rng(seed)
    window = int(rng.choice([1, 4, 16, 20]))
    options = ALIBI if seed % 2 else PLAIN
    layer, exact = built(kind, **options, window=(window - 1, 0))
    run = Sequences(rng, layer, exact)
    drafts = int(rng.integers(1, 9))
    ring = RingCache.empty(B, window, *HEADS, drafts=drafts)
    if seed % 4 == 3:
        ring = RingCache.empty(B, window + drafts, *HEADS)
    spare = ring.k.shape[1] - window
    assert spare >= drafts
    with jax.enable_x64(x64):
        longest = run.lengths  # the most that there were, from which tokens are taken back
        for _ in range(12):
            count = int(rng.choice(CHUNKS))
            if run.lengths.max() + count > LONGEST:
                break
            ring = run.append(ring, count, rng.integers(0, count + 1, B))
            longest = np.maximum(longest, run.lengths)
            lowest = np.where(longest > ring.k.shape[1], longest - spare, 0)
            lowest = np.clip(lowest, 0, run.lengths)
            ring = run.rewind(ring, rng.integers(0, run.lengths - lowest + 1))
            longest = np.where(run.lengths == 0, 0, longest)


def test_a_scan_that_verifies_and_rejects():
    layer, exact = built("nnx", **PLAIN, window=(15, 0))
    rng, steps, drafts = np.random.default_rng(1), 14, 4
    x = rng.standard_normal((steps, B, drafts, FEATURES)).astype(np.float32)
    taken = rng.integers(0, drafts + 1, (steps, B)).astype(np.int32)

    def verify(ring, given):
        x, taken = given
        o, after = layer(x, cache=ring)
        return after._replace(lengths=ring.lengths + taken), o

    ring = RingCache.empty(B, 16, *HEADS, drafts=drafts)
    ring, o = jax.jit(lambda ring: jax.lax.scan(verify, ring, (x, taken)))(ring)
    for b in range(B):
        accepted = [x[s, b, : taken[s, b]] for s in range(steps)]
        whole = np.zeros((1, LONGEST, FEATURES))
        found = np.concatenate([o[s, b, : taken[s, b]] for s in range(steps)])
        whole[0, : len(found)] = np.concatenate(accepted)
        np.testing.assert_allclose(found, exact(whole)[0, : len(found)], rtol=1e-4, atol=1e-5)
    assert ring.lengths.tolist() == taken.sum(0).tolist()


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_more_than_there_is_room_for_is_an_error_where_known(kind, drafts):
    layer, _ = built(kind, window=(7, 0))
    ring = RingCache.empty(B, 8 + drafts, *HEADS)
    _, ring = layer(jnp.ones((B, 20, FEATURES)), cache=ring)
    jax.block_until_ready(ring)
    for count in (1, 3):
        far = ring._replace(lengths=ring.lengths.at[1].add(-1 - drafts))
        with pytest.raises(ValueError, match=rf"cache.lengths\[1\] is {19 - drafts}, set back by "):
            layer(jnp.ones((B, count, FEATURES)), cache=jax.block_until_ready(far))
    with pytest.raises(ValueError, match="lengths must be at least 0"):
        layer(jnp.ones((B, 1, FEATURES)), cache=ring._replace(lengths=np.array([3, -1, 0])))


def test_a_sequence_that_begins_anew():
    layer, exact = built("nnx", **PLAIN, window=(7, 0))
    run = Sequences(np.random.default_rng(2), layer, exact)
    cache = run.append(RingCache.empty(B, 8, *HEADS), 40, (40, 40, 5))
    cache = run.rewind(cache, (40, 0, 3))  # the last has lost nothing yet
    for count in (1, 2, 5):
        cache = run.append(cache, count, (count,) * 3)
    assert cache.written.tolist() == [8, 48, 10]


def test_a_ring_made_by_hand():
    layer, _ = built("nnx", window=(7, 0))
    ring = RingCache.empty(B, 8, *HEADS)
    _, after = layer(jnp.ones((B, 3, FEATURES)), cache=RingCache(*ring[:3]))
    assert after.written.tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match=r"cache.written has shape \(2,\)"):
        layer(jnp.ones((B, 1, FEATURES)), cache=ring._replace(written=jnp.zeros(2, int)))
    with pytest.raises(ValueError, match="drafts is -1: it must be at least 0"):
        RingCache.empty(B, 8, *HEADS, drafts=-1)


def test_rows_for_drafts():
    for window, drafts, room in ((8, 4, 16), (1024, 4, 1088), (4096, 8, 4224), (4096, 0, 4096)):
        assert RingCache.empty(1, window, 1, 1, "float32", drafts=drafts).k.shape[1] == room


def test_a_step_of_one_token_copies_no_ring(monkeypatch):
    layer, _ = built("nnx", **PLAIN, window=(4095, 0))
    monkeypatch.setattr(_cached, "_in_order", None)  # which copies
    ring = RingCache.empty(B, 4096, *HEADS, drafts=4)
    step = jax.jit(lambda x, ring: layer(x, cache=ring), donate_argnums=1)
    compiled = step.lower(jnp.ones((B, 1, FEATURES)), ring).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < ring.k.nbytes / 2


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_cache_of_all_tokens(kind):
    layer, exact = built(kind, **PLAIN)
    run = Sequences(np.random.default_rng(3), layer, exact)
    cache = run.append(KVCache.empty(B, LONGEST, *HEADS), 40, (40, 23, 0))
    for back in ((40, 7, 0), (1, 5, 2), (0, 0, 3)):
        cache = run.rewind(run.append(cache, 5, (5, 5, 5)), back)
    run.append(cache, 1, (1, 1, 1))
