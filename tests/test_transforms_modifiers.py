"""Masks and modifiers under the transformations of JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.integrations import transformers

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of a few dozen terms of order one
T, S, N, K = 9, 12, 4, 2


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs(*batch):
    return [draw(i, *batch, *shape) for i, shape in enumerate([(T, N, 8), (S, K, 8), (S, K, 8)])]


def visible(seed, *shape):
    """Draws a mask with two thirds visible; some queries may see nothing."""
    return draw(seed, *shape) > -0.5


def squared(*args, **keywords):
    return jnp.sum(jnp.sin(fp.flash_attention(*args, **keywords)))


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


def one_by_one(function, in_axes, *args):
    """Computes the expected result of vmap, one member at a time."""
    size = next(x.shape[0] for x, axis in zip(args, in_axes, strict=True) if axis is not None)
    member = lambda i: [x if a is None else x[i] for x, a in zip(args, in_axes, strict=True)]
    results = [function(*member(i)) for i in range(size)]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


# Batch dimensions [2, 2], so that a bias may have one entry, one for each half (a divisor of the
# batch), one for each column (which is expanded), or one for each entry.
ENTRIES = {"one": (1, 1), "halves": (2, 1), "columns": (1, 2), "all": (2, 2)}
PATTERNS = [
    ("q", "one", None, "one", 0),
    ("q", "halves", None, "all", None),
    ("q", "halves", 0, "halves", None),
    ("q", "all", None, "one", None),
    ("q", "all", 0, "halves", 0),
    ("q", "columns", None, "halves", None),
    (None, "one", 0, "all", None),
    (None, "halves", None, "halves", 0),
]


@pytest.mark.thorough(always=["None-halves-None-halves-0"])
@pytest.mark.parametrize(("batched", "bias", "bias_axis", "mask", "mask_axis"), PATTERNS)
def test_vmap_of_shared_and_own_bias_and_mask(batched, bias, bias_axis, mask, mask_axis):
    size = lambda axis: () if axis is None else (3,)
    q, k, v = (draw(i, 2, 2, *s) for i, s in enumerate([(T, N, 8), (S, K, 8), (S, K, 8)]))
    q_axis = 0 if batched else None
    q = draw(0, *size(q_axis), 2, 2, T, N, 8)
    biases = draw(5, *size(bias_axis), *ENTRIES[bias], 1, T, S)
    masks = visible(6, *size(mask_axis), *ENTRIES[mask], N, 1, S)
    call = lambda q, bias, mask: squared(q, k, v, bias=bias, mask=mask)
    axes = (q_axis, bias_axis, mask_axis)
    gradient = jax.value_and_grad(call, (0, 1))
    found = jax.vmap(gradient, axes)(q, biases, masks)
    assert_close(found, one_by_one(gradient, axes, q, biases, masks))
    # A bias that all members share has one gradient, of its own shape.
    shared = jax.grad(lambda bias: jnp.sum(jax.vmap(call, axes)(q, bias, masks)))(biases)
    expected = found[1][1] if bias_axis == 0 else jnp.sum(found[1][1], 0)
    assert_close(shared, expected)


def test_nested_vmap_of_a_bias_of_one_level():
    q, k, v = draw(0, 3, 2, 2, T, N, 8), draw(1, 2, S, K, 8), draw(2, 2, S, K, 8)
    bias, mask = draw(5, 2, 1, N, T, 1), visible(6, 3, 2, 1, T, S)
    call = lambda q, bias, mask: squared(q, k, v, bias=bias, mask=mask)
    gradient = jax.grad(call, (0, 1))
    found = jax.vmap(jax.vmap(gradient, (0, 0, None)), (0, None, 0))(q, bias, mask)
    row = lambda q, mask: one_by_one(gradient, (0, 0, None), q, bias, mask)
    assert_close(found, one_by_one(row, (0, 0), q, mask))


def test_vmap_over_every_other_operand():
    q, k, v = inputs(2)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, (3, 2, S)), jnp.int32)

    def call(ids, lengths, slopes, sinks, offset):
        return squared(
            q,
            k,
            v,
            causal=True,
            q_offset=offset,
            q_segment_ids=ids[:, :T],
            kv_segment_ids=ids,
            kv_lengths=lengths,
            q_lengths=jnp.clip(lengths - 2, 0, T),
            alibi_slopes=slopes,
            sinks=sinks,
        )

    args = (
        ids,
        jnp.array([[12, 3], [5, 9], [0, 2]], jnp.int32),
        draw(3, 3, N),
        draw(4, 2, N),
        jnp.array([3, -4, 0], jnp.int32),
    )
    axes, gradient = (0, 0, 0, None, 0), jax.value_and_grad(call, (2, 3))
    assert_close(jax.vmap(gradient, axes)(*args), one_by_one(gradient, axes, *args))


def with_slopes(q, k, v, slopes):
    """Computes ALiBi as a score_mod with a captured array."""

    def score_mod(score, b, n, i, j):
        distance = jnp.abs(i - j).astype(score.dtype)
        return score - slopes[n].astype(score.dtype) * distance

    return squared(q, k, v, score_mod=score_mod)


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)], ids=str)
def test_what_a_score_mod_captures_is_differentiated_and_vmapped(axes):
    q, k, v = draw(0, *(() if axes[0] is None else (3,)), 2, T, N, 8), *inputs(2)[1:]
    slopes = draw(3, *(() if axes[1] is None else (3,)), N)
    ours = jax.value_and_grad(lambda q, slopes: with_slopes(q, k, v, slopes), (0, 1))
    alibi = jax.value_and_grad(lambda q, s: squared(q, k, v, alibi_slopes=s), (0, 1))
    found = jax.jit(jax.vmap(ours, axes))(q, slopes)
    assert_close(found, one_by_one(alibi, axes, q, slopes))


def test_new_ids_and_a_new_lambda_compile_nothing():
    q, k, v = inputs(2)
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None

    def call(ids, slope, factor=2.0):
        slopes = jnp.full(N, slope)
        return fp.flash_attention(
            q,
            k,
            v,
            q_segment_ids=ids[:, :T],
            kv_segment_ids=ids,
            score_mod=lambda score, b, n, i, j: factor * score + slopes[n],
        ).block_until_ready()

    ids, other = jnp.zeros((2, S), jnp.int32), jnp.ones((2, S), jnp.int32)
    call(ids, 1.0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call(other, 3.0)
        assert not compiled
        call(ids, 1.0, factor=4.0)
        assert compiled, "another constant is another function"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_a_mask_mod_sees_the_entry_of_the_whole_batch():
    q, k, v = inputs(3)
    first = jnp.array([0, 4, 8], jnp.int32)
    mask_mod = lambda b, n, i, j: (j >= first[b]) & (j <= i + n)
    place = jnp.arange(S)[None, None, None]
    mask = (place >= first[:, None, None, None]) & (
        place <= jnp.arange(T)[None, None, :, None] + jnp.arange(N)[None, :, None, None]
    )
    assert_close(
        fp.flash_attention(q, k, v, mask_mod=mask_mod), fp.flash_attention(q, k, v, mask=mask)
    )


def weights(seed, batch=2, length=24, **keywords):
    """Computes the kept weights themselves, [batch, queries, heads, keys]."""
    q = jnp.zeros((batch, length, N, 8))
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], (batch, length, K, length))
    k = jnp.zeros((batch, length, K, 8))
    return fp.flash_attention(q, k, v, dropout_rate=0.4, dropout_seed=seed, **keywords)


@pytest.mark.thorough
def test_dropout_is_the_same_under_every_transformation(devices):
    seeds = jax.random.split(jax.random.key(0), 3)
    expected = jnp.stack([weights(seed) for seed in seeds])
    assert len(np.unique(np.asarray(expected).reshape(3, -1), axis=0)) == 3
    share = np.mean(np.asarray(expected) == 0.0)
    assert abs(share - 0.4) < 5 * np.sqrt(0.4 * 0.6 / expected.size)
    kept = lambda x: np.asarray(x) > 0.0
    same = lambda found: np.testing.assert_array_equal(kept(found), kept(expected))
    same(jax.vmap(weights)(seeds))
    same(jax.vmap(jax.jit(jax.checkpoint(weights)))(seeds))
    same(jax.lax.scan(lambda _, seed: (None, weights(seed)), None, seeds)[1])
    blocks = partial(weights, backend="xla", blocks={"block_q": 8, "block_kv": 16})
    same(jnp.stack([blocks(seed) for seed in seeds]))
    assert not np.array_equal(kept(jax.vmap(weights, (None,), axis_size=3)(seeds[0])), expected)
    same_twice = jax.vmap(lambda _: weights(seeds[0]))(jnp.arange(2))
    np.testing.assert_array_equal(kept(same_twice), kept(jnp.stack([expected[0]] * 2)))


def test_dropout_does_not_depend_on_how_the_batch_is_sharded(devices):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    call = lambda q: fp.flash_attention(
        q, q, q, dropout_rate=0.4, dropout_seed=jax.random.key(1), causal=True
    )
    q = draw(0, 4, T, N, 8)
    sharded = jax.device_put(q, NamedSharding(mesh, P("data")))
    assert_close(jax.jit(call)(sharded), call(q))


def test_dropout_drops_the_same_in_the_backward():
    length = 24
    k = q = jnp.zeros((2, length, N, 8))
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], (2, length, N, length))
    call = partial(fp.flash_attention, dropout_rate=0.4, dropout_seed=7)
    p, pull = jax.vjp(lambda v: call(q, k, v), v)
    (dv,) = pull(v)  # P^T times the identity
    np.testing.assert_allclose(dv, jnp.swapaxes(p, 1, 3), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(dv) > 0, np.asarray(jnp.swapaxes(p, 1, 3)) > 0)


@pytest.mark.parametrize("make", [jnp.int32, jnp.uint32, np.array, np.int32, np.int64], ids=str)
def test_the_same_seed_drops_the_same_weights_in_every_type(make):
    dropped = lambda p: np.asarray(p) == 0
    expected = dropped(weights(3))
    assert 0.3 < expected.mean() < 0.5
    np.testing.assert_array_equal(dropped(weights(make(3))), expected)
    np.testing.assert_array_equal(dropped(jax.jit(weights)(make(3))), expected)
    np.testing.assert_array_equal(dropped(jax.vmap(weights)(jnp.array([3]))[0]), expected)


@pytest.mark.thorough
def test_remat_and_scan_draw_what_plain_layers_draw():
    q, k, v = inputs(2)
    seeds = jnp.arange(3)

    def network(q, wrap):
        layer = lambda x, seed: (
            x
            + fp.flash_attention(
                x, k, v, dropout_rate=0.4, dropout_seed=seed, bias=jnp.ones((N, 1, S))[None]
            )
        )
        if wrap is None:
            for seed in range(3):
                q = layer(q, jnp.asarray(seed))
            return jnp.sum(jnp.sin(q))
        step = lambda x, seed: (wrap(layer)(x, seed), None)
        return jnp.sum(jnp.sin(jax.lax.scan(step, q, seeds)[0]))

    expected = jax.grad(network)(q, None)
    remat = partial(jax.checkpoint, policy=fp.save_attention)
    for wrap in (lambda f: f, jax.checkpoint, remat):
        assert_close(jax.jit(partial(jax.grad(network), wrap=wrap))(q), expected)


OPERANDS = {
    "q_segment_ids": jnp.asarray(np.random.default_rng(0).integers(-1, 2, (4, T)), jnp.int32),
    "kv_segment_ids": jnp.asarray(np.random.default_rng(1).integers(-1, 2, (4, S)), jnp.int32),
    "q_lengths": jnp.array([9, 4, 0, 7], jnp.int32),
    "kv_lengths": jnp.array([12, 1, 5, 0], jnp.int32),
    "mask": visible(6, 4, 1, T, S),
    "bias": draw(5, 1, N, 1, S),
    "alibi_slopes": draw(3, N),
    "sinks": draw(4, N),
    "dropout_seed": jnp.uint32(5),
}
SHARDED = {"q_segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths", "mask"}


@pytest.mark.thorough(always=["True"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_of_sharded_and_replicated_operands(devices, check_vma):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    args = inputs(4)
    learned = ("bias", "alibi_slopes", "sinks")
    spec = {name: P("data") if name in SHARDED else P() for name in OPERANDS}
    # One dropout for all entries: inside shard_map an entry's number is that of its shard.
    static = {"dropout_rate": 0.3, "broadcast_dropout": True, "softcap": 4.0}
    attend = lambda q, k, v, side: fp.flash_attention(q, k, v, **static, **side)
    wrapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P("data"), spec),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    def gradient(call):
        def loss(q, k, v, some):
            return jnp.sum(jnp.sin(call(q, k, v, {**OPERANDS, **some})))

        some = {name: OPERANDS[name] for name in learned}
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*args, some)

    assert_close(gradient(wrapped), gradient(attend))


@pytest.mark.thorough(always=["True"])
@pytest.mark.parametrize("jitted", [False, True])
def test_debug_nans_is_quiet_for_poisoned_padding_and_rows_without_keys(jitted):
    q, k, v = inputs(2)
    lengths, kv_lengths = jnp.array([4, 0], jnp.int32), jnp.array([7, 3], jnp.int32)
    beyond = lambda x, n: (jnp.arange(x.shape[1])[None] >= n[:, None])[..., None, None]
    poison = lambda x, n: jnp.where(beyond(x, n), jnp.nan, x)
    mask = jnp.ones((1, 1, T, S), bool).at[0, 0, 2].set(False)
    bias = jnp.zeros((1, 1, 1, S)).at[..., 3].set(-jnp.inf)

    def loss(q, k, v, bias):
        o, lse = fp.flash_attention_with_lse(
            q, k, v, q_lengths=lengths, kv_lengths=kv_lengths, mask=mask, bias=bias, softcap=None
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

    gradient = jax.value_and_grad(loss, (0, 1, 2, 3))
    gradient = jax.jit(gradient) if jitted else gradient
    poisoned = poison(q, lengths), poison(k, kv_lengths), poison(v, kv_lengths)
    expected = gradient(q, k, v, bias)
    with jax.debug_nans(True):
        found = gradient(*poisoned, bias)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    dq, dk, dv, dbias = found[1]
    assert not dq[1].any() and not dq[0, 4:].any() and not dq[0, 2].any()
    assert not dk[0, 7:].any() and not dv[1].any() and not dbias[..., 3].any()


MEANS = {
    "flash_attention": partial(fp.flash_attention, empty_rows="mean"),
    "any": partial(fp.flash_attention, empty_rows="mean", differentiable="any"),
    "with_lse": lambda *x, **y: fp.flash_attention_with_lse(*x, empty_rows="mean", **y)[0],
    "drop-in": lambda *x, kv_lengths: fp.dot_product_attention(
        *x, key_value_seq_lengths=kv_lengths
    ),
    "transformers": lambda q, k, v, **y: transformers._Weights(q, k, y).of(v),
}


@pytest.mark.parametrize("name", MEANS)
def test_debug_nans_is_quiet_where_rows_without_keys_are_means(name):
    """Poisons keys and values past their lengths; one entry has no key at all."""
    q, k, v = inputs(2)
    kv_lengths = jnp.array([7, 0], jnp.int32)
    beyond = (jnp.arange(S)[None] >= kv_lengths[:, None])[..., None, None]
    loss = lambda q, k, v: jnp.sum(jnp.sin(MEANS[name](q, k, v, kv_lengths=kv_lengths)))
    gradient = jax.value_and_grad(loss, (0, 1, 2))
    expected = gradient(q, *(jnp.where(beyond, 0.0, x) for x in (k, v)))
    poisoned = jnp.where(beyond, jnp.nan, k), jnp.where(beyond, jnp.inf, v).at[0, 9].set(jnp.nan)
    with jax.debug_nans(True):
        value, (dq, dk, dv) = gradient(q, *poisoned)
    # Zeros in padding have a gradient, that of the mean; what is no number has none.
    right = expected[1][2].at[1].set(0.0)
    assert_close((value, (dq, dk, dv)), (expected[0], (*expected[1][:2], right)))


def test_the_gradient_of_a_mean_adds_up_rows_in_float32():
    """Sums 512 rows of bfloat16, up to 113, before the gradient of the mean of 4 values."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    q, k, do = draw(1, 512, 2, 16), draw(1, 4, 1, 16), draw(1, 512, 2, 16)
    call = lambda v: fp.flash_attention(q, k, v, kv_lengths=0, empty_rows="mean", backend="xla")
    (dv,) = jax.vjp(call, k)[1](do)
    exact = np.broadcast_to(np.asarray(do, np.float64).sum((1, 2)) / 4.0, (1, 4, 16))
    np.testing.assert_allclose(np.asarray(dv, np.float64)[:, :, 0], exact, rtol=2.0**-8, atol=2e-3)


def test_x64_widens_nothing():
    with jax.enable_x64(True):
        low = lambda x: x.astype(jnp.bfloat16)
        args = [low(x) for x in inputs(4)]
        side = {name: low(OPERANDS[name]) for name in ("bias", "alibi_slopes", "sinks")}
        rest = {name: x for name, x in OPERANDS.items() if name not in side}

        def call(q, k, v, side):
            mod = lambda score, b, n, i, j: score + 0.5 * (i - j).astype(score.dtype)
            keywords = {"score_mod": mod, "dropout_rate": 0.2, "window": (8, 3), "softcap": 5.0}
            return fp.flash_attention_with_max_logit(q, k, v, **side, **rest, **keywords)

        outputs, pull = jax.vjp(call, *args, side)
        assert [x.dtype for x in outputs] == [jnp.bfloat16, jnp.float32, jnp.float32]
        grads = pull(tuple(jnp.ones_like(x) for x in outputs))
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}


def test_members_share_the_gradient_of_a_bias_as_batch_entries_only():
    """Compares vmap, which has one bias gradient per member, with a batch, which adds into one."""
    members, length = 8, 512
    x = jax.ShapeDtypeStruct((members, length, 2, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 2, length, length), jnp.float32)

    def copies(attend) -> float:
        loss = lambda x, bias: jnp.sum(jnp.sin(attend(x, bias)))
        compiled = jax.jit(jax.grad(loss, 1)).lower(x, bias).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (2 * length * length * 4)

    attend = lambda x, bias: fp.flash_attention(x, x, x, bias=bias)
    mapped = jax.vmap(lambda x, bias: attend(x[None], bias)[0], (0, None))
    # Each has the bias and its gradient once more.
    assert copies(mapped) - copies(attend) >= members
