"""Context parallelism: every strategy is attention on whole arrays, and balanced as it says."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.core.mask import Mask
from flash_pallas.parallel import (
    context_parallel_attention,
    from_zigzag,
    sharded_attention,
    to_zigzag,
    zigzag_positions,
)
from flash_pallas.parallel.plan import Plan

pytestmark = pytest.mark.usefixtures("quickly")

B, T, N, K, H = 2, 32, 4, 2, 8
ATOL = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums of a few dozen terms of order one
STRATEGIES = ("ring", "all_gather", "ulysses")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs():
    return draw(B, T, N, H, seed=0), draw(B, T, K, H, seed=1), draw(B, T, K, H, seed=2)


def ring_of(devices, types=AxisType.Auto):
    return jax.make_mesh((len(devices),), ("context",), axis_types=(types,), devices=devices)


SEEDS = [3, np.int32(3), np.int64(2**40 + 3), jnp.uint32(3), jax.random.key]


@pytest.mark.parametrize("seed", SEEDS, ids=["int", "np.int32", "np.int64", "jnp.uint32", "key"])
def test_a_seed_of_any_type_drops_what_it_drops_on_one_device(devices, seed):
    seed = seed(3) if callable(seed) else seed
    options = {"dropout_rate": 0.5, "dropout_seed": seed}
    found = context_parallel_attention(
        *inputs(), mesh=ring_of(devices[:2]), axis="context", **options
    )
    np.testing.assert_allclose(found, fp.flash_attention(*inputs(), **options), **ATOL)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_drops_what_it_drops_on_one_device(devices, strategy):
    """Whatever else is cut: the batch, or the heads."""
    mesh = jax.make_mesh(
        (2, 2), ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    place = {"mesh": mesh, "axis": "context", "strategy": strategy, "layout": "zigzag"}
    for other, shared in (("head_axis", False), ("batch_axis", True)):
        options = {"causal": True, "dropout_rate": 0.5, "broadcast_dropout": shared}
        call = partial(context_parallel_attention, **place, **{other: "fsdp"}, **options)
        found = call(*(to_zigzag(x, 2) for x in inputs()), dropout_seed=3)
        expected = fp.flash_attention(*inputs(), dropout_seed=3, **options)
        np.testing.assert_allclose(from_zigzag(found, 2), expected, **ATOL)


def test_a_rematerialised_layer_inside_shard_map(devices):
    mesh = ring_of(devices)

    def layer(attend, x, k, v):
        step = lambda x, _: (x + attend(jnp.sin(x), k, v), None)
        step = jax.checkpoint(step, policy=fp.save_attention)
        return jax.lax.scan(step, x, None, length=2)[0]

    cut = jax.shard_map(
        partial(layer, partial(sharded_attention, axis="context", causal=True)),
        mesh=mesh,
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    whole = partial(layer, partial(fp.flash_attention, causal=True))
    loss = lambda call: lambda *a: jnp.sum(jnp.sin(call(*a)))
    grads = [jax.jit(jax.grad(loss(call), (0, 1, 2)))(*inputs()) for call in (cut, whole)]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, **ATOL)


@pytest.mark.parametrize(
    ("options", "sent"),
    [({}, 3), ({"causal": True}, 3), ({"window": (7, 0)}, 1), ({"window": 7}, 3)],
)
def test_keys_that_nobody_sees_are_not_sent(devices, options, sent):
    call = partial(context_parallel_attention, mesh=ring_of(devices), axis="context", **options)
    text = jax.jit(call).lower(*inputs()).as_text()
    assert text.count("collective_permute") == 2 * sent  # of k and of v


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        # A step has one call for devices at which it has wrapped around, and one for the others.
        ({}, 1 + 3 * 2),
        ({"causal": True}, 1 + 3),
        ({"window": (7, 0)}, 1 + 1),
        ({"window": 7}, 1 + 2),  # the next device's keys come last
        ({"causal": True, "layout": "zigzag"}, 1 + 3 * 2),
    ],
)
def test_steps_in_which_nothing_is_visible_run_no_kernel(devices, options, kernels):
    call = partial(context_parallel_attention, mesh=ring_of(devices), axis="context", **options)
    text = str(jax.make_jaxpr(call)(*inputs()))
    assert text.count("name=_first_order_only") == kernels


MASKS = (
    [Mask(), Mask.causal()]
    + [Mask(left, right) for left in (0, 3, 4, 9, None) for right in (0, 2, 11)]
    + [Mask(right=3), Mask(left=8)]
)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_plan_of_a_ring_computes_every_visible_pair_once(mask, zigzag, shards):
    length = 4
    plan = Plan(shards, length, zigzag, mask)
    total = shards * length
    places = zigzag_positions(total, shards) if zigzag else np.arange(total)
    seen = np.zeros((total, total), int)
    for step in range(plan.last_step + 1):
        for me in range(shards):
            for piece in plan.pieces(step, wrapped=me < step):
                _compute(plan, piece, step, me, places, seen)
    position = np.arange(total)
    visible = mask.visible(position[:, None], position[None])
    expected = np.ones((total, total), int) if visible is None else visible.astype(int)
    np.testing.assert_array_equal(seen, expected)


def _compute(plan, piece, step, me, places, seen):
    """Adds 1 to the pairs that one piece computes."""
    half = lambda x, i: x if i is None else np.split(x, 2)[i]
    rows = half(places.reshape(plan.shards, -1)[me], piece.rows)
    cols = half(places.reshape(plan.shards, -1)[(me - step) % plan.shards], piece.cols)
    offset = piece.offset
    if piece.far:
        offset = piece.far * plan.far_distance(step - plan.shards * (me < step), me)
    i, j = offset + np.arange(len(rows))[:, None], np.arange(len(cols))[None]
    keep = piece.mask.visible(i, j)
    seen[np.ix_(rows, cols)] += 1 if keep is None else keep


def test_zigzag_balances_causal_work():
    plan = Plan(shards=4, length=8, zigzag=True, mask=Mask.causal())
    sizes = {None: 8, 0: 4, 1: 4}
    for step in range(1, 4):
        work = {
            sum(sizes[p.rows] * sizes[p.cols] for p in plan.pieces(step, wrapped))
            for wrapped in (False, True)
        }
        assert work == {32}
        assert all(p.mask.is_trivial for w in (False, True) for p in plan.pieces(step, w))


def test_zigzag_and_back():
    x = jnp.arange(24).reshape(2, 12)
    assert to_zigzag(x, 2)[0].tolist() == [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(from_zigzag(to_zigzag(x, 3), 3), x)
    with pytest.raises(ValueError, match=r"length is 12.*multiple of 8"):
        to_zigzag(x, 4)


BAD = {
    "strategy": ({"strategy": "star"}, "strategy is 'star'"),
    "layout": ({"layout": "spiral"}, "layout is 'spiral'"),
    "backend": ({"backend": "none"}, "backend is 'none'"),
    "dropout": ({"dropout_rate": 0.5}, "dropout_seed is None"),
    "ids": ({"q_segment_ids": jnp.zeros((B, T), jnp.int32)}, "kv_segment_ids is None"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(devices, options, message):
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(*inputs(), mesh=ring_of(devices), axis="context", **options)


def test_what_it_has_not(devices):
    call = partial(context_parallel_attention, *inputs(), mesh=ring_of(devices), axis="context")
    with pytest.raises(TypeError, match="unexpected arguments alibi_slopes, bias"):
        call(bias=jnp.zeros((1, 1, T, T)), alibi_slopes=jnp.ones(N))


def test_sizes_that_do_not_fit(devices):
    call = partial(context_parallel_attention, mesh=ring_of(devices), axis="context")
    q, k, v = inputs()
    with pytest.raises(ValueError, match="32 queries and 16 keys"):
        call(q, k[:, ::2], v[:, ::2])
    with pytest.raises(ValueError, match="2 query heads for 4 devices"):
        call(q[:, :, :2], k, v, strategy="ulysses")
    with pytest.raises(ValueError, match=r"q has shape \(32, 4, 8\).*batch, length"):
        call(q[0], k[0], v[0])
    with pytest.raises(ValueError, match="3 tokens and layout is 'zigzag'"):
        call(q[:, :12], k[:, :12], v[:, :12], layout="zigzag")
