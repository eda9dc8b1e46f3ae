"""The portable backend: calls that it takes, its tile sizes, and the order of its steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from flash_pallas.backends.portable import PortableBackend, tiling
from flash_pallas.backends.portable.backward.tiles import FusedSizes, SplitSizes
from flash_pallas.backends.portable.common.kernel import Steps
from flash_pallas.backends.portable.common.tiles import (
    RESERVED,
    WIDEST_SHARED,
    TileSizes,
    memory_of,
)
from flash_pallas.backends.portable.tiling import PortableBlocks
from flash_pallas.core.block_lists import BlockLists
from flash_pallas.core.mask import BlockRange, Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe
from flash_pallas.devices import GENERATIONS

ANYWHERE = PortableBackend(interpret=True, capability="8.6")


def problem(head_dim=64, v_head_dim=None, dtype=jnp.bfloat16, batch=1, **spec):
    q = jax.ShapeDtypeStruct((batch, 256, 2, head_dim), dtype)
    v = jax.ShapeDtypeStruct((batch, 256, 2, v_head_dim or head_dim), dtype)
    return describe(Operands(q, q, v), AttentionSpec(scale=1.0, **spec))


def kernels(found: PortableBlocks):
    """Returns the sizes of each kernel that runs."""
    if isinstance(found.backward, FusedSizes):
        return {"forward": found.forward, "fused": found.backward}
    return {"forward": found.forward, "dkv": found.backward.dkv, "dq": found.backward.dq}


@pytest.mark.parametrize("capability", GENERATIONS)
@pytest.mark.parametrize("head_dims", [(8, 8), (64, 64), (72, 40), (128, 128), (192, 128),
                                       (64, 256), (256, 256), (288, 288), (328, 64),
                                       (64, 400), (512, 512)])  # fmt: skip
@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_fit(capability, head_dims, deterministic):
    described = problem(*head_dims, deterministic=deterministic)
    found = PortableBackend(interpret=True, capability=capability).attention.plan(described)
    for name, tile in kernels(found).items():
        size = tiling.bytes_of(name, tile, described)
        assert size <= memory_of(capability) - RESERVED


@pytest.mark.parametrize(
    ("capability", "head_dim", "deterministic", "expected"),
    [
        ("8.0", 64, False, (128, 128, 1, 1)),
        ("8.6", 64, False, (128, 64, 1, 1)),
        ("9.0", 64, False, (128, 128, 2, 4)),
        ("8.0", 128, False, (128, 64, 1, 1)),
        ("9.0", 128, False, (128, 128, 1, 4)),
        ("12.0", 128, False, (64, 64, 1, 4)),
        ("8.0", 256, False, (64, 64, 1, 1)),
        ("9.0", 256, False, (64, 64, 1, 4)),
        ("8.6", 256, False, None),
        ("9.0", 288, False, None),
        ("9.0", 128, True, None),
    ],
)
def test_which_backward_runs(capability, head_dim, deterministic, expected):
    """Expects the fused backward where dQ may be summed in any order and shared memory has room."""
    backend = PortableBackend(interpret=True, capability=capability)
    found = backend.attention.plan(problem(head_dim, deterministic=deterministic)).backward
    if expected is None:
        assert isinstance(found, SplitSizes)
    else:
        assert isinstance(found, FusedSizes)
        assert (found.rows, found.columns, found.slots, found.vector) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"dq": {}}, "'dq': on the portable backend this call runs the kernels 'forward', 'fused'"),
        ({"fused": {"width": 3}}, r"blocks\['fused'\] is {'width': 3}: a dict with keys"),
        ({"fused": {"columns": 96}}, "rows and columns must be 64 or 128"),
        ({"fused": {"slots": 3}}, "slots must be 1 or 2"),
        ({"fused": {"vector": 4}}, "vector must be 1 before compute capability 9.0"),
        ({"fused": {"heads": 0}}, "a positive int"),
        ({"fused": {"rows": 128}}, "bytes of shared memory of 100352: pass fewer"),
        ({"forward": {"rows": 96}}, "rows must be 64 or 128"),
        ({"forward": {"columns": 20}}, "columns a multiple of 16"),
        ({"forward": {"slots": 3}}, "slots must be 1, or 2 of the forward"),
        ({"forward": {"columns": 256}}, "bytes of shared memory of 100352: pass fewer"),
    ],
)
def test_tiles_that_cannot_be(override, message):
    with pytest.raises(ValueError, match=message):
        ANYWHERE.attention.plan(problem(128), override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"forward": {"shared_weights": True}}, "must be False above head dim 256"),
        ({"forward": {"turns": True, "slots": 2}}, "slots must be 1 where tiles take turns"),
        ({"fused": {}}, "this call runs the kernels 'forward', 'dkv', 'dq'"),
        ({"dq": {"turns": False}}, "bytes of shared memory of 165888"),
    ],
)
def test_tiles_that_wide_heads_cannot_have(override, message):
    backend = PortableBackend(interpret=True, capability="8.0")
    with pytest.raises(ValueError, match=message):
        backend.attention.plan(problem(512), override)


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0"])
def test_every_wide_head_has_tiles(capability):
    """Checks all tiles of head dims above 256, of sums of dS too, with a bias and with many."""
    backend = PortableBackend(interpret=True, capability=capability)
    most = memory_of(capability) - RESERVED
    wide = range(264, WIDEST_SHARED + 1, 8)
    for dims in [*((w, w) for w in wide), *((w, 8) for w in wide), *((8, w) for w in wide)]:
        for shape in ((1, 1, 256, 256), (1, 1, 1, 256)):
            features = frozenset({"bias"})
            described = dataclasses.replace(problem(*dims), features=features, bias_shape=shape)
            found = backend.attention.plan(described)
            sums = {"score_tiles": found.scores.tile, "score_lines": found.scores.lines}
            for name, tile in (kernels(found) | sums).items():
                assert tile is None or tiling.bytes_of(name, tile, described) <= most, (dims, name)


def test_slots_of_the_forward_alone():
    with pytest.raises(ValueError, match="slots must be 1, or 2 of the forward"):
        ANYWHERE.attention.plan(problem(128, deterministic=True), {"dq": {"slots": 2}})


@pytest.mark.parametrize(
    ("capability", "head_dim", "tile"),
    [
        ("8.0", 64, (128, 128)),
        ("8.6", 64, (128, 64)),  # two blocks of 128 x 128 take more than 100 KB
        ("8.6", 32, (128, 128)),
        ("8.9", 128, (128, 64)),
        ("9.0", 256, (64, 64)),
        ("8.0", 256, (64, 32)),  # two blocks of 64 x 64 take 202 KB of 164
        ("12.0", 256, (64, 48)),
        ("10.0", 128, (128, 32)),
    ],
)
def test_the_forwards_tile_is_what_there_is_room_and_registers_for(capability, head_dim, tile):
    found = PortableBackend(interpret=True, capability=capability).attention.plan(problem(head_dim))
    assert (found.forward.rows, found.forward.columns) == tile


def test_what_changes_scores_leaves_registers_for_fewer_columns():
    plain = dataclasses.replace(problem(128), spec=AttentionSpec(scale=1.0, mask=Mask(right=0)))
    columns = lambda described: ANYWHERE.attention.plan(described).forward.columns
    spec = dataclasses.replace(plain.spec, softcap=30.0)
    assert columns(plain) == 2 * columns(dataclasses.replace(plain, spec=spec))
    window = dataclasses.replace(plain.spec, mask=Mask(left=64, right=0))
    assert columns(plain) == 2 * columns(dataclasses.replace(plain, spec=window))


@pytest.mark.parametrize(
    ("dims", "shared"), [((64, 128), False), ((192, 128), False), ((64, 144), False),
                         ((64, 160), True), ((192, 192), True), ((256, 256), True)]
)  # fmt: skip
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_weights_are_shared_where_o_is_wide(dims, shared, softcap):
    """Checks that weights are shared where O is wide and can be cut: 144 columns cannot."""
    plain = dataclasses.replace(problem(dims[0]), v_head_dim=dims[1])
    described = dataclasses.replace(plain, spec=AttentionSpec(scale=1.0, softcap=softcap))
    assert ANYWHERE.attention.plan(described).forward.shared_weights == shared


def test_tiles_of_the_caller():
    described = problem(64, deterministic=True)
    found = kernels(ANYWHERE.attention.plan(described, {"dq": {"columns": 32}}))
    assert found == kernels(ANYWHERE.attention.plan(described)) | {
        "dq": TileSizes(found["dq"].rows, 32)
    }


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (problem(dtype=jnp.float32), "takes bfloat16 and float16, not float32: cast"),
        (problem(576, 512), "takes head dims up to 512, not 576"),
        (problem(batch=70_000), "takes batches up to 65535, not 70000: split the batch"),
    ],
)
def test_what_it_refuses(described, message):
    assert message in ANYWHERE.attention.refusal(described)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    "zones",
    [
        [(0, 2, False), (2, 3, True)],
        [(1, 1, True), (1, 4, False), (4, 6, True)],
        [(2, 3, True), (3, 3, False), (3, 5, True)],
        [(4, 4, True), (4, 4, False)],
    ],
)
def test_steps_go_through_every_zone_with_every_head(zones, group):
    """Compares the order of steps with that of the loops; it decides the next copy."""
    expected = [
        (member, block, masked)
        for low, high, masked in zones
        for member in range(group)
        for block in range(low, high)
    ]
    steps = Steps([(jnp.int32(low), jnp.int32(high), masked) for low, high, masked in zones], group)
    found = []

    def note(n, count, masked):
        found.append(masked)
        return count + 1

    with jax.disable_jit():
        total = steps.fold(note, 0, hides_end=False)
    assert total == len(expected) and found == [masked for *_, masked in expected]
    for n, (member, block, _) in enumerate(expected):
        step = steps[n]
        assert (int(step.member), int(step.block), bool(step.exists)) == (member, block, True)
    assert not any(bool(steps[n].exists) for n in range(total, total + 4))


def test_a_zone_without_blocks_has_no_loop():
    stop = jnp.int32(7)
    assert Steps.of(BlockRange(0, 0, stop, stop)).zones == [(0, stop, False)]


@pytest.mark.parametrize("at", [(0, 0, 0), (1, 1, 1), (3, 1, 2), (2, 0, 2)])
@pytest.mark.parametrize("per_head", [None, 3])
def test_steps_go_through_a_list(at, per_head):
    """Compares steps with lists of two batch entries, which four share, and of two heads."""
    bounds = jnp.tile(jnp.array([[0, 2, 3], [3, 3, 3], [3, 4, 6]], jnp.int32), (2, 2, 1, 1))
    index = jnp.arange(2 * 2 * 7, dtype=jnp.int32).reshape(2, 2, 7) * 5 % 9
    lists = BlockLists(bounds, index)
    batch, head, tile = at
    start, whole, stop = bounds[batch // 2, head, tile]
    entries = index[batch // 2, head, start:stop]
    steps = Steps.of_list(problem(batch=4), lists.in_one, at, per_head)
    found = []

    def note(n, count, masked):
        found.append(masked)
        return count + 1

    with jax.disable_jit():
        assert steps.fold(note, 0, hides_end=False) == len(entries)
        assert found == [True] * int(whole - start) + [False] * int(stop - whole)
        found.clear()
        assert steps.all_masked().fold(note, 0, hides_end=False) == len(entries)
        assert all(found)
    for n, entry in enumerate(entries):
        expected = divmod(int(entry), per_head or 100)
        assert (int(steps[n].member), int(steps[n].block)) == expected
        assert steps[n].exists and steps.all_masked()[n].exists
    assert not any(steps[len(entries) + i].exists for i in range(2))


def listed(block_shape, head_dim=64, bias_shape=None, **spec):
    described = problem(head_dim, block_shape=block_shape, **spec)
    features = {"block_lists"} | ({"bias"} if bias_shape else set())
    return dataclasses.replace(described, features=frozenset(features), bias_shape=bias_shape)


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0", "10.0"])
@pytest.mark.parametrize("block_shape", [(64, 64), (128, 128), (192, 64), (64, 128), (320, 128)])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 384, 512])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_divide_blocks(capability, block_shape, head_dim, deterministic):
    backend = PortableBackend(interpret=True, capability=capability)
    for bias_shape in ((1, 1, 256, 256), (1, 1, 1, 256)):
        described = listed(block_shape, head_dim, bias_shape, deterministic=deterministic)
        found = backend.attention.plan(described)
        for name, tile in kernels(found).items():
            queries, keys = tile.rows, tile.columns
            if name in ("dkv", "fused"):
                queries, keys = keys, queries
            assert block_shape[0] % queries == 0 and block_shape[1] % keys == 0
        if lines := found.scores.lines:
            assert not any(n % m for n in block_shape for m in (lines.rows, lines.columns))
        else:
            tile = found.scores.tile
            assert block_shape[0] % tile.rows == 0 and block_shape[1] % tile.columns == 0


@pytest.mark.parametrize(
    "override", [{"forward": {"rows": 128}}, {"forward": {"columns": 48}}, {"fused": {"rows": 128}}]
)
def test_tiles_that_do_not_divide_blocks(override):
    message = r"must divide the blocks of block_mask, \(192, 64\) of \(queries, keys\): pass fewer"
    backend = PortableBackend(interpret=True, capability="9.0")
    with pytest.raises(ValueError, match=message):
        backend.attention.plan(listed((192, 64)), override)
