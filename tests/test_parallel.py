"""Context parallelism: every strategy equals attention on whole arrays, balanced as it claims."""

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


@pytest.mark.thorough(always=["key"])
@pytest.mark.parametrize("seed", SEEDS, ids=["int", "np.int32", "np.int64", "jnp.uint32", "key"])
def test_a_seed_of_any_type_drops_what_it_drops_on_one_device(devices, seed):
    seed = seed(3) if callable(seed) else seed
    options = {"dropout_rate": 0.5, "dropout_seed": seed}
    found = context_parallel_attention(
        *inputs(), mesh=ring_of(devices[:2]), axis="context", **options
    )
    np.testing.assert_allclose(found, fp.flash_attention(*inputs(), **options), **ATOL)


@pytest.mark.thorough(always=["ulysses"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_drops_what_it_drops_on_one_device(devices, strategy):
    """Compares dropout with one device, with the batch or the heads cut as well."""
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


def test_a_rematerialized_layer_inside_shard_map(devices):
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
    "unknown axis": (
        {"axis": "seq"},
        r"axis is 'seq': the mesh has the axes \('context', 'fsdp'\)",
    ),
    "positions": ({"q_positions": jnp.zeros((B, 3), jnp.int32)}, r"q_positions has shape .*, 3\)"),
    "positions and dropout": (
        {
            "q_positions": jnp.zeros((B, T), jnp.int32),
            "causal": True,
            "strategy": "all_gather",
            "dropout_rate": 0.5,
            "dropout_seed": 1,
        },
        "with dropout and strategy='all_gather'.*take strategy='ring'",
    ),
    "no axis": ({"axis": None}, "axis is None: name the mesh axis that cuts the sequence"),
    "no axes": ({"axis": []}, r"axis is \[\]: name the mesh axis"),
    "unknown batch axis": ({"batch_axis": ["fsdp", "dp"]}, "batch_axis is .*'dp'.*the mesh has"),
    "one axis twice": ({"head_axis": "context"}, "head_axis and axis both have 'context'"),
    "scale": ({"scale": float("nan")}, "scale must be finite, got nan"),
    "window": ({"window": [-1, 0]}, r"window is \[-1, 0\]"),
    "precision": ({"precision": ["high"]}, "precision is .*high"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(devices, options, message):
    with pytest.raises(ValueError, match=message):
        context_parallel_attention(*inputs(), **place_on(devices) | options)


def place_on(devices):
    """Returns a mesh of two axes, with the sequence over one of them."""
    mesh = jax.make_mesh(
        (2, 2), ("context", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    return {"mesh": mesh, "axis": "context"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mesh", None, "mesh is None: it must be a jax.sharding.Mesh"),
        ("scale", "0.5", "scale must be a Python number"),
        ("causal", jnp.bool_(True), "causal is an array, but it must be static"),
        ("window", 2.0, "window is .*must be an int"),
    ],
)
def test_arguments_of_the_wrong_kind(devices, name, value, message):
    with pytest.raises(TypeError, match=message):
        context_parallel_attention(*inputs(), **place_on(devices) | {name: value})


def test_a_traced_scale(devices):
    call = lambda scale: context_parallel_attention(*inputs(), **place_on(devices), scale=scale)
    with pytest.raises(TypeError, match=r"scale is traced.*multiply q"):
        jax.jit(call)(0.5)


def test_options_that_are_the_same(devices):
    """Passes lists of axes, and numbers of jax and numpy, in place of plain options."""
    call = partial(context_parallel_attention, *inputs(), causal=True)
    place = place_on(devices)
    expected = call(**place, batch_axis="fsdp", scale=0.5, window=(3, 0), softcap=2.0)
    given = {"axis": ["context"], "batch_axis": ["fsdp"], "window": [np.int32(3), 0]}
    found = call(**place | given, scale=jnp.float32(0.5), softcap=np.float32(2.0))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.thorough(always=["all_gather"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_window_that_is_data_counts_in_the_whole(devices, strategy):
    expected = context_parallel_attention(*inputs(), **place_on(devices), window=(9, 2))
    found = jax.shard_map(
        lambda left, *x: sharded_attention(*x, axis="context", strategy=strategy, window=(left, 2)),
        mesh=ring_of(devices),
        in_specs=(P(), *(P(None, "context"),) * 3),
        out_specs=P(None, "context"),
    )(jnp.int32(9), *inputs())
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_batch(devices, strategy):
    q, k, v = (x[:0] for x in inputs())
    call = partial(context_parallel_attention, strategy=strategy, **place_on(devices))
    assert call(q, k, v, return_lse=True)[1].shape == (0, N, T)
    assert jax.grad(lambda q: jnp.sum(call(q, k, v)))(q).shape == q.shape


def test_outside_of_shard_map(devices):
    with pytest.raises(ValueError, match=r"axis is 'context'.*a jax\.shard_map.*there are none"):
        sharded_attention(*inputs(), axis="context")
    with pytest.raises(ValueError, match=r"axis is 'seq'.*there are \('context',\)"):
        jax.shard_map(
            partial(sharded_attention, axis="seq"),
            mesh=ring_of(devices),
            in_specs=P(None, "context"),
            out_specs=P(None, "context"),
        )(*inputs())


def test_what_it_has_not(devices):
    call = partial(context_parallel_attention, *inputs(), mesh=ring_of(devices), axis="context")
    with pytest.raises(TypeError, match=r"keyword arguments 'alibi_slopes', 'bias'.*; it takes"):
        call(bias=jnp.zeros((1, 1, T, T)), alibi_slopes=jnp.ones(N))
    with pytest.raises(TypeError, match=r"'block_mask': flash_attention has it, .*; it takes the"):
        call(block_mask=None)
    with pytest.raises(TypeError, match="'is_causal'; did you mean 'causal'"):
        call(is_causal=True)


def test_sizes_that_do_not_fit(devices):
    call = partial(context_parallel_attention, mesh=ring_of(devices), axis="context")
    q, k, v = inputs()
    with pytest.raises(ValueError, match="32 queries and 16 keys"):
        call(q, k[:, ::2], v[:, ::2])
    with pytest.raises(ValueError, match="2 query heads for 4 devices"):
        call(q[:, :, :2], k, v, strategy="ulysses")
    with pytest.raises(ValueError, match=r"q has shape \(32, 4, 8\).*batch, length"):
        call(q[0], k[0], v[0])
    message = "length is 13 and axis='context' has 4 devices.*multiple of 8; the zigzag.*-1"
    with pytest.raises(ValueError, match=message):
        call(q[:, :13], k[:, :13], v[:, :13], layout="zigzag")
    place = place_on(devices)
    with pytest.raises(ValueError, match="batch size is 1 and batch_axis='fsdp' has 2 devices"):
        call(q[:1], k[:1], v[:1], **place, batch_axis="fsdp")
    message = r"key heads is 1 and head_axis='fsdp' has 2 devices.*jnp\.repeat"
    with pytest.raises(ValueError, match=message):
        call(q, k[:, :, :1], v[:, :, :1], **place, head_axis="fsdp")
    inside = jax.shard_map(
        partial(sharded_attention, axis="context", layout="zigzag"),
        mesh=ring_of(devices),
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    with pytest.raises(ValueError, match="3 tokens and layout is 'zigzag'"):
        inside(q[:, :12], k[:, :12], v[:, :12])
