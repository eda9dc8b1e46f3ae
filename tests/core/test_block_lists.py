"""Lists of tiles, for queries and for keys, against what numpy says of every pair of positions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.core import block_lists
from flash_pallas.core.block_lists import EMPTY, PARTIAL, WHOLE
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe

from .test_mask import visible as band

BATCH, HEADS, Q_LEN, KV_LEN, BLOCK = 3, 4, 43, 50, (8, 12)
Q_BLOCKS, KV_BLOCKS = 6, 5
TILES = {"blocks": BLOCK, "half of the queries": (4, 12), "parts of both": (2, 4)}


def states(*leading, seed=0):
    return np.random.default_rng(seed).integers(0, 3, (*leading, Q_BLOCKS, KV_BLOCKS))


def compiled(function, problem, operands, *static):
    return jax.jit(lambda operands: function(problem, operands, *static))(operands)


def spread(x, tile):
    """Repeats what is said of tiles for every pair of positions in them."""
    return np.repeat(np.repeat(x, tile[0], -2), tile[1], -1)[..., :Q_LEN, :KV_LEN]


@dataclasses.dataclass
class Hidden:
    """Masks of a call besides its lists.

    Attributes:
        mask: band of visible keys.
        offset: position of query 0, one number or one per entry.
        arrays: operands by name.
    """

    mask: Mask = Mask()
    offset: object = 0
    arrays: dict = dataclasses.field(default_factory=dict)

    def call(self, lists):
        """Returns (Problem, Operands) of a call with these lists."""
        q, k = jnp.zeros((BATCH, Q_LEN, HEADS, 8)), jnp.zeros((BATCH, KV_LEN, 2, 8))
        given = {name: jnp.asarray(x, jnp.int32) for name, x in self.arrays.items()}
        known = isinstance(self.offset, int)
        if not known:
            given["q_offset"] = jnp.asarray(self.offset, jnp.int32)
        spec = AttentionSpec(
            1.0, self.mask, q_offset=self.offset if known else 0, block_shape=BLOCK
        )
        operands = Operands(q, k, k, block_lists=lists, **given)
        return describe(operands, spec), operands

    def visible(self, padding: bool = False):
        """Returns bool[B, 1, T, S]: the pairs that nothing here hides.

        Queries beyond their length see nothing, or, with `padding`, what others would see: no
        backend looks at their lengths in a tile that has other queries too.
        """
        x = self.arrays
        offsets = np.broadcast_to(self.offset, (BATCH,))
        table = np.stack([band(self.mask, Q_LEN, KV_LEN, int(o)) for o in offsets])
        if "q_segments" in x:
            same = x["q_segments"][:, :, None] == x["kv_segments"][:, None]
            table &= same & (x["q_segments"] >= 0)[:, :, None]
        position = x.get("kv_positions", np.arange(KV_LEN)[None])[:, None]
        if "q_first" in x:
            table &= position >= x["q_first"][:, :, None]
        if "q_last" in x:
            table &= position <= x["q_last"][:, :, None]
        if "kv_lengths" in x:
            table &= np.arange(KV_LEN) < x["kv_lengths"][:, None, None]
        if "q_lengths" in x and not padding:
            table &= (np.arange(Q_LEN) < x["q_lengths"][:, None])[:, :, None]
        return table[:, None]


RNG = np.random.default_rng(1)
IDS = {
    "q_segments": np.sort(RNG.integers(-1, 4, (BATCH, Q_LEN)), axis=1),
    "kv_segments": np.sort(RNG.integers(0, 4, (BATCH, KV_LEN)), axis=1),
}
RANDOM_IDS = {name: RNG.integers(0, 2, x.shape) for name, x in IDS.items()}
LENGTHS = {"q_lengths": np.array([43, 0, 17]), "kv_lengths": np.array([50, 7, 24])}
FIRST = RNG.integers(0, 30, (BATCH, Q_LEN))
PLACES = {"q_first": FIRST, "q_last": FIRST + 20}
HIDDEN = {
    "nothing": Hidden(),
    "causal": Hidden(Mask(right=0)),
    "window": Hidden(Mask(left=9, right=4), offset=5),
    "window with offsets": Hidden(Mask(left=9, right=0), offset=np.array([7, -20, 30])),
    "lengths": Hidden(arrays=LENGTHS),
    "lengths and causal": Hidden(Mask(right=0), arrays=LENGTHS),
    "documents": Hidden(arrays=IDS),
    "ids in any order": Hidden(Mask(right=0), arrays=RANDOM_IDS),
    "positions": Hidden(
        arrays=PLACES
        | {"kv_positions": RNG.permuted(np.tile(np.arange(KV_LEN), (BATCH, 1)), axis=1)}
    ),
    "intervals and lengths": Hidden(arrays=PLACES | LENGTHS),
}


@pytest.mark.thorough(
    always=[
        "nothing-shared-parts of both",
        "window-own-parts of both",
        "window with offsets-shared-blocks",
        "lengths and causal-shared-parts of both",
        "documents-own-half of the queries",
        "ids in any order-shared-blocks",
        "positions-shared-blocks",
        "intervals and lengths-own-parts of both",
    ]
)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("leading", [(1, 1), (BATCH, HEADS)], ids=["shared", "own"])
@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_whole_tiles_are_visible_and_left_out_ones_hidden(hidden, leading, tile):
    given = states(*leading)
    problem, operands = hidden.call(block_lists.of_states(jnp.asarray(given)))
    lists = compiled(block_lists.planned, problem, operands, tile)
    assert lists.dtype == jnp.int32
    found = np.asarray(block_lists.states_of(lists, -(-KV_LEN // tile[1])))
    # Of partial blocks it is not known here what is visible: perhaps all, perhaps nothing.
    shown = spread(given, BLOCK)
    other = hidden.visible()
    whole, left_out = (spread(found == state, tile) for state in (WHOLE, EMPTY))
    assert (((shown == WHOLE) & hidden.visible(padding=True)) | ~whole).all()
    assert not ((shown != EMPTY) & other & left_out).any()
    # Keys of a whole tile are all there.
    assert not (found[..., -1] == WHOLE).any()
    if hidden.arrays.keys() <= LENGTHS.keys():  # Of the others, some stay that nothing is seen of.
        seen = (shown != EMPTY) & other
        # Nor is it asked in the last tiles which of their queries and keys there are.
        queries, keys = Q_LEN // tile[0] * tile[0], KV_LEN // tile[1] * tile[1]
        assert (left_out | blocks_with(seen, tile))[:, :, :queries, :keys].all()


def blocks_with(seen, tile):
    """Returns True for every pair in a tile that has a visible one."""
    pads = [(0, 0), (0, 0), *((0, -n % size) for n, size in zip(seen.shape[2:], tile, strict=True))]
    x = np.pad(seen, pads)
    rows, columns = (n // size for n, size in zip(x.shape[2:], tile, strict=True))
    x = x.reshape(*x.shape[:2], rows, tile[0], columns, tile[1])
    return spread(x.any((3, 5)), tile)


def listed(lists, entry, head, block):
    """Returns (partial, whole) numbers in a block's list."""
    start, whole, end = np.asarray(lists.bounds)[entry, head, block]
    index = np.asarray(lists.index)[entry, head]
    assert 0 <= start <= whole <= end < len(index)
    return list(index[start:whole]), list(index[whole:end])


@pytest.mark.thorough(always=["window-parts of both"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("name", ["nothing", "window", "documents"])
def test_tiles_of_a_query_tile_come_partial_first(name, tile):
    given = block_lists.of_states(jnp.asarray(states(1, HEADS)))
    problem, operands = HIDDEN[name].call(given)
    planned = compiled(block_lists.planned, problem, operands, tile)
    found = compiled(block_lists.of_queries, problem, operands, tile)
    state = np.asarray(block_lists.states_of(planned, -(-KV_LEN // tile[1])))
    for place in np.ndindex(*state.shape[:3]):
        expected = [list(np.flatnonzero(state[place] == kind)) for kind in (PARTIAL, WHOLE)]
        assert listed(found, *place) == tuple(expected)


@pytest.mark.thorough(
    always=[
        "counted-(3, 4)-2-parts of both",
        "counted-(1, 1)-4-blocks",
        "sorted-(3, 4)-2-parts of both",
        "sorted-(3, 4)-1-blocks",
    ]
)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("leading", [(1, 1), (1, HEADS), (BATCH, 1), (BATCH, HEADS)], ids=str)
@pytest.mark.parametrize("how", ["counted", "sorted"])
def test_tiles_of_a_kv_tile_are_those_of_all_its_query_heads(
    how, leading, group, tile, monkeypatch
):
    if how == "sorted":  # as lists are that are narrower than the keys, or too many to count
        monkeypatch.setattr(block_lists, "MOST_COUNTED", 0)
    problem, operands = HIDDEN["window"].call(block_lists.of_states(jnp.asarray(states(*leading))))
    planned = compiled(block_lists.planned, problem, operands, tile)
    found = compiled(block_lists.of_keys, problem, operands, tile, group)
    kv_tiles = -(-KV_LEN // tile[1])
    state = np.asarray(block_lists.states_of(planned, kv_tiles))
    q_tiles, heads = state.shape[2], max(leading[1] // group, 1)
    assert found.bounds.shape == (leading[0], heads, kv_tiles, 3)
    for entry, head, kv_tile in np.ndindex(leading[0], heads, kv_tiles):
        members = range(head * group, head * group + group) if leading[1] > 1 else (0,) * group
        column = np.concatenate([state[entry, member, :, kv_tile] for member in members])
        assert len(column) == group * q_tiles
        expected = [list(np.flatnonzero(column == kind)) for kind in (PARTIAL, WHOLE)]
        assert listed(found, entry, head, kv_tile) == tuple(expected)


def test_states_and_lists_are_each_other():
    given = states(2, 3)
    lists = block_lists.of_states(jnp.asarray(given, jnp.int8))
    np.testing.assert_array_equal(block_lists.states_of(lists, KV_BLOCKS), given)
    np.testing.assert_array_equal(lists[..., 0], (given == PARTIAL).sum(-1))
    np.testing.assert_array_equal(lists[..., 1], (given != EMPTY).sum(-1))


def test_numbers_that_are_no_blocks_are_left_out():
    index = jnp.array([3, -1, 5, 3, 0, -7, 2**31 - 1, -(2**31), 0, 4], jnp.int32)
    lists = block_lists.of_indices(index[None, None, None], WHOLE, KV_BLOCKS)
    np.testing.assert_array_equal(lists[0, 0, 0], [0, 3, 0, 3, 4, *[0] * 7])


@pytest.mark.parametrize("group", [1, 2])
def test_lists_without_entries(group):
    lists = block_lists.of_indices(jnp.zeros((1, 1, Q_BLOCKS, 0), jnp.int32), WHOLE, KV_BLOCKS)
    problem, operands = HIDDEN["nothing"].call(lists)
    for found in (
        block_lists.of_queries(problem, operands, BLOCK),
        block_lists.of_keys(problem, operands, BLOCK, group),
    ):
        assert (found.bounds == 0).all() and found.index.size


def test_more_tiles_than_int32_can_number():
    lists = jnp.zeros((1, 1, 1, 2), jnp.int32)
    problem, operands = HIDDEN["nothing"].call(lists)
    # 2**16 - 1 kinds of KV tiles and the one for what is empty, of 2**15 members of one Q tile.
    for length, group in ((2**15 - 1) * 12, 2**15), (2**15 * 12, 2**15):
        many = dataclasses.replace(problem, kv_len=length)
        if length % 2**15:
            block_lists.of_keys(many, operands, BLOCK, group)
        else:
            with pytest.raises(ValueError, match="numbered in int32"):
                block_lists.of_keys(many, operands, BLOCK, group)


@pytest.mark.parametrize("own", [(1, 1), (1, 3), (2, 1), (2, 3), (4, 3)], ids=str)
def test_very_long_lists_come_first_and_the_others_head_by_head(own):
    batch, heads, tiles = 4, 3, 50
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 1, 20, 21, 22, 40], (*own, tiles), p=[0.05, 0.05, 0.2, 0.2, 0.3, 0.2])
    sizes[..., rng.integers(tiles)] = 400
    start = jnp.zeros((*own, tiles), jnp.int32)
    bounds = jnp.stack([start, start, jnp.asarray(sizes, jnp.int32)], axis=-1)
    lists = block_lists.BlockLists(bounds, None)
    order = np.asarray(block_lists.longest_first(lists, batch, heads))
    np.testing.assert_array_equal(np.sort(order), np.arange(batch * heads * tiles))
    of_tile = np.repeat(sizes, batch // own[0], axis=0)
    of_tile = np.repeat(of_tile, heads // own[1], axis=1).reshape(-1)
    long = of_tile[order] == 400
    assert long[: batch * heads].all() and long.sum() == batch * heads
    pair = order[~long] // tiles
    assert (np.diff(pair) != 0).sum() == batch * heads - 1
    # Those of a head: 40, then 20 to 22, then 0 and 1, in octaves of the mean, which is 30.
    kinds = np.digitize(of_tile[order[~long]], [10, 30])
    same = np.diff(pair) == 0
    assert (np.diff(kinds)[same] <= 0).all()
    assert (np.diff(order[~long])[same & (np.diff(kinds) == 0)] > 0).all()


def test_causal_tiles_are_ordered_by_octaves_of_their_length():
    sizes = jnp.arange(1, 257, dtype=jnp.int32)
    bounds = jnp.stack([sizes * 0, sizes * 0, sizes], axis=-1)[None, None]
    order = block_lists.longest_first(block_lists.BlockLists(bounds, None), 1, 2)
    # The mean is 128.5; octaves end at sqrt(2) times as much, and so on.
    octaves = (182, 257), (91, 182), (46, 91), (23, 46), (1, 23)
    of_head = np.concatenate([np.arange(*x) for x in octaves])
    np.testing.assert_array_equal(order, np.concatenate([of_head, of_head + 256]) - 1)


def test_the_order_of_lists_that_are_all_empty():
    bounds = jnp.zeros((1, 1, 7, 3), jnp.int32)
    order = block_lists.longest_first(block_lists.BlockLists(bounds, None), 2, 3)
    np.testing.assert_array_equal(order, np.arange(42))


@pytest.mark.parametrize("own", [(1, 1), (2, 3)], ids=str)
def test_tiles_begin_where_the_hand_is(own):
    batch, heads, tiles, blocks, at_once = 2, 3, 40, 64, 5
    rng = np.random.default_rng(1)
    shown = jnp.asarray(rng.choice(3, (*own, tiles, blocks), p=[0.6, 0.1, 0.3]))
    given = block_lists.of_states(shown.at[..., 3, :].set(EMPTY))
    spec = AttentionSpec(1.0, block_shape=BLOCK)
    sizes = tiles * BLOCK[0], blocks * BLOCK[1]
    q, k = (jnp.zeros((batch, n, heads, 8)) for n in sizes)
    operands = Operands(q, k, k, block_lists=given)
    lists = compiled(block_lists.of_queries, describe(operands, spec), operands, BLOCK).in_one
    lists = lists._replace(order=block_lists.longest_first(lists, batch, heads))
    found = np.asarray(block_lists.rotations(lists, heads, blocks, at_once))
    assert found.shape == (batch * heads * tiles,) and len(np.unique(found)) > 5
    start, whole, stop = np.moveaxis(np.broadcast_to(lists.bounds, (batch, heads, tiles, 3)), -1, 0)
    size, before = (stop - start).reshape(-1), 0
    each = max(size.sum() // size.size, 1) * at_once
    for number in np.asarray(lists.order):
        place = np.unravel_index(number, start.shape)
        listed = np.asarray(lists.index)[whole[place] : stop[place]]
        hand = int(np.float32(before % each) / np.float32(each) * np.float32(blocks))
        later = np.flatnonzero(listed >= hand)
        assert found[number] == (later[0] if later.size else 0)
        before += size[number]
