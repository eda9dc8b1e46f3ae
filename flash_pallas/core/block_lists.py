"""Block lists: which KV blocks each Q block reads, and which Q blocks each KV block.

A mask is cut into blocks. Of one that nothing is seen of, nothing is computed; one that is seen
whole needs no mask; the others are partial. The operand `block_lists` names what is left, int32[Bb,
N1, Q blocks, 2 + M]: for each Q block how many of its KV blocks are partial, how many it has in
all, and their numbers. Partial ones come first, each kind ascends, and what follows is 0.

Everything here runs in XLA, in time and memory proportional to the lists, unless it says states:
those are int8 of every pair of blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import bounds
from .problem import Operands, Problem

EMPTY, PARTIAL, WHOLE = 0, 1, 2  # states of a block
# Operands by which tiles of one list may be hidden in one batch entry and visible in another.
OF_ENTRIES = ("q_offset", "q_lengths", "kv_lengths", "q_segments", "q_first", "q_last")
MOST_KEYS = 2**31  # of int32, by which entries are sorted
HALF = 15  # bits in which `_counted` counts tiles
MOST_COUNTED = 2**HALF - 1
COUNTS = 2  # columns of `block_lists` in front of the numbers
# Logarithms to base 2 of the lengths that `longest_first` tells apart, relative to their mean. The
# longest of a causal mask are twice as long as the mean, and not to be torn from their heads: with
# octaves over all heads a backward of 32k tokens was at 0.98 of the native one.
SHORTEST, VERY_LONG, LONGEST = -3, 2, 12


class BlockLists(NamedTuple):
    """The blocks of the other sequence that each block reads.

    Attributes:
        bounds: int32[Bb, N1, blocks, 3]: where a block's list begins in `index`, where its whole
            blocks begin, and where it ends.
        index: int32[Bb, N1, entries], numbers of blocks, one more than all lists have.
        order: what `longest_first` returns, or None.
        rotation: what `rotations` returns, or None.
    """

    bounds: Any
    index: Any
    order: Any = None
    rotation: Any = None

    @property
    def in_one(self) -> BlockLists:
        """The same with all lists in one: `index` int32[entries], and places counted in it."""
        entries, heads, length = self.index.shape
        first = jnp.arange(entries * heads, dtype=jnp.int32).reshape(entries, heads, 1, 1) * length
        return self._replace(bounds=self.bounds + first, index=self.index.reshape(-1))


def of_states(states):
    """Returns the operand for int8[Bb, N1, Q blocks, KV blocks] of EMPTY, PARTIAL and WHOLE."""
    return _sorted(_places(states.shape, 3), states, states.shape[-1])


def of_indices(index, state: int, kv_blocks: int):
    """Returns the operand for lists of KV blocks that all have one state.

    Args:
        index: int32[Bb, N1, Q blocks, M], in any order; what is no number of a block is nothing,
            and a repeated number counts once.
        state: PARTIAL or WHOLE.
        kv_blocks: number of KV blocks.
    """
    index = jnp.sort(index, axis=-1)
    repeated = jnp.diff(index, axis=-1, prepend=-1) == 0
    valid = (index >= 0) & (index < kv_blocks) & ~repeated
    return _sorted(index, jnp.where(valid, state, EMPTY), kv_blocks)


def states_of(lists, kv_blocks: int):
    """Returns int8[Bb, N1, Q blocks, KV blocks], the states that `of_states` made lists of."""
    index, state = _entries(lists)
    states = jnp.zeros((*lists.shape[:-1], kv_blocks), jnp.int8)
    index = jnp.where(state == EMPTY, kv_blocks + _places(index.shape, 3), index)  # nowhere
    put = lambda states, *entry: states.at[entry[0]].set(entry[1], mode="drop", unique_indices=True)
    for _ in range(3):
        put = jax.vmap(put)
    return put(states, index, state.astype(jnp.int8))


def of_queries(problem: Problem, operands: Operands, tile: tuple[int, int]) -> BlockLists:
    """Returns the KV tiles that each Q tile of a call reads.

    Args:
        problem: of the call.
        operands: of the call.
        tile: (queries, keys) of a tile, divisors of those of a block.
    """
    lists = planned(problem, operands, tile)
    *leading, q_tiles, width = lists.shape
    start = jnp.arange(q_tiles, dtype=jnp.int32) * (width - COUNTS)
    start = jnp.broadcast_to(start, lists.shape[:-1])[..., None]
    index = _readable(lists[..., COUNTS:].reshape(*leading, -1))
    return BlockLists(jnp.concatenate([start, start + lists[..., :COUNTS]], axis=-1), index)


def of_keys(
    problem: Problem, operands: Operands, tile: tuple[int, int], group: int = 1
) -> BlockLists:
    """Returns the Q tiles that read each KV tile of a call.

    Args:
        problem: of the call.
        operands: of the call.
        tile: (queries, keys) of a tile, divisors of those of a block.
        group: number of query heads that read a KV tile one after the other. A list then has the
            tiles of all of them, that of member m of the group and of Q tile i as m * Q tiles + i,
            and there is one for each KV head, or one for all.
    """
    lists = planned(problem, operands, tile)
    index, state = _entries(lists)
    entries, heads, q_tiles, width = index.shape
    kv_tiles = -(-problem.kv_len // tile[1])
    if width >= kv_tiles and group * q_tiles < MOST_COUNTED:
        return _counted(states_of(lists, kv_tiles), group, width)
    span = (2 * kv_tiles + 1) * group * q_tiles
    if span > MOST_KEYS:
        raise ValueError(
            f"the mask has {q_tiles} x {kv_tiles} tiles of {group} query heads, and these are "
            "numbered in int32, up to 2**30: take larger blocks"
        )
    members = (entries, max(heads // group, 1), group, q_tiles, width)
    own = group if heads > 1 else 1
    index, state = (
        jnp.broadcast_to(x.reshape(*members[:2], own, q_tiles, width), members)
        for x in (index, state)
    )
    # Sorted by KV tile, then partial before whole ones, then by member and Q tile.
    kinds = jnp.where(state == EMPTY, 2 * kv_tiles, index * 2 + jnp.where(state == WHOLE, 1, 0))
    number = _places(members, 2) * q_tiles + _places(members, 3)
    leading = (*members[:2], -1)
    key = _rows_sorted((kinds * (group * q_tiles) + number).reshape(leading), span)
    count = lambda kinds: jnp.zeros(2 * kv_tiles, jnp.int32).at[kinds].add(1, mode="drop")
    sizes = jax.vmap(jax.vmap(count))(kinds.reshape(leading))
    ends = jnp.cumsum(sizes, axis=-1, dtype=jnp.int32).reshape(*leading[:2], kv_tiles, 2)
    starts = ends[..., :1] - sizes.reshape(ends.shape)[..., :1]
    return BlockLists(jnp.concatenate([starts, ends], axis=-1), _readable(key % (group * q_tiles)))


def _counted(states, group: int, width: int) -> BlockLists:
    """Returns `of_keys` for int8[Bb, N1, Q tiles, KV tiles], no larger than the lists.

    Without a sort: a tile's place is the number of those before it.

    Args:
        states: of all tiles, EMPTY, PARTIAL or WHOLE.
        group: as of `of_keys`.
        width: number of entries that each list of KV tiles has room for.
    """
    entries, heads, q_tiles, kv_tiles = states.shape
    own = group if heads > 1 else 1
    shape = entries, max(heads // group, 1), group, q_tiles, kv_tiles
    states = jnp.broadcast_to(states.reshape(*shape[:2], own, *shape[3:]), shape)
    states = states.reshape(*shape[:2], group * q_tiles, kv_tiles)
    # Both kinds in one sum: partial ones in the lower half of the bits, whole ones in the upper.
    kinds = jnp.where(states == WHOLE, 1 << HALF, jnp.where(states == PARTIAL, 1, 0))
    sums = jnp.cumsum(kinds, axis=2, dtype=jnp.int32)
    partial, whole = sums & MOST_COUNTED, sums >> HALF
    last = lambda x: x[:, :, -1]
    stop = jnp.cumsum(last(partial) + last(whole), axis=-1, dtype=jnp.int32)
    middle = stop - last(whole)
    start = middle - last(partial)
    before = jnp.where(states == WHOLE, middle[:, :, None] + whole, start[:, :, None] + partial)
    room = group * q_tiles * width + 1  # an empty list at the end can be read too
    nowhere = room + _places(states.shape, 2) * kv_tiles + _places(states.shape, 3)
    place = jnp.where(states == EMPTY, nowhere, before - 1).reshape(*shape[:2], -1)
    number = _places(states.shape, 2).reshape(place.shape)
    zeros = jnp.zeros(room, jnp.int32)
    put = lambda place, number: zeros.at[place].set(number, mode="drop", unique_indices=True)
    index = jax.vmap(jax.vmap(put))(place, number)
    return BlockLists(jnp.stack([start, middle, stop], axis=-1), index)


def _rows_sorted(keys, span: int):
    """Returns int32[Bb, N1, entries], each row sorted; keys are from 0 to `span`.

    As one array where its keys can be numbered: XLA sorts several with kernels of its own, one long
    one by radix.
    """
    rows = keys.shape[0] * keys.shape[1]
    if rows == 1 or rows * span > MOST_KEYS:
        return jnp.sort(keys, axis=-1)
    first = jnp.arange(rows, dtype=jnp.int32).reshape(*keys.shape[:2], 1) * span
    return jnp.sort((keys + first).reshape(-1)).reshape(keys.shape) - first


def longest_first(lists: BlockLists, batch: int, heads: int):
    """Returns the tiles of a call in the order in which they begin.

    A tile that begins last and takes long leaves other SMs idle: one whose keys every query reads
    takes as long as thirty of a window. So tiles with very long lists come first. The others stay
    with those of their head, which read the same keys, the longest first: of tiles whose lists are
    about as long, up to a factor of two, blocks ascend.

    Args:
        lists: of all tiles.
        batch: number of batch entries, of which several may share a list.
        heads: number of heads, which may share a list.

    Returns:
        int32[batch * heads * tiles], numbers of tiles: (entry * heads + head) * tiles + tile.
    """
    size = lists.bounds[..., 2] - lists.bounds[..., 0]
    (entries, own, tiles), total = size.shape, size.size
    relative = size.astype(jnp.float32).reshape(-1)
    relative /= jnp.maximum(jnp.mean(relative), 1.0)
    octaves = jnp.clip(jnp.round(jnp.log2(relative)), SHORTEST, LONGEST)
    rank, place = LONGEST - octaves.astype(jnp.int32), jnp.arange(total, dtype=jnp.int32)
    long = octaves >= VERY_LONG
    of_list = jnp.where(long, 0, 1 + place // tiles) * (LONGEST - SHORTEST + 1) + rank
    number = jnp.sort(of_list * total + place) % total
    shared = batch // entries, heads // own
    copies = shared[0] * shared[1]
    if copies == 1:
        return number
    # The very long tiles of one head after the other, then the others of one after the other.
    first = jnp.sum(long, dtype=jnp.int32)
    place = jnp.arange(total * copies, dtype=jnp.int32)
    rest = place - first * copies
    copy, within = (
        jnp.where(rest < 0, *both)
        for both in zip(
            jnp.divmod(place, jnp.maximum(first, 1)),
            jnp.divmod(rest, jnp.maximum(total - first, 1)),
            strict=True,
        )
    )
    of_list, tile = jnp.divmod(number[jnp.where(rest < 0, within, first + within)], tiles)
    entry, head = jnp.divmod(of_list, own)
    entry = entry * shared[0] + copy // shared[1]
    return (entry * heads + head * shared[1] + copy % shared[1]) * tiles + tile


def rotations(lists: BlockLists, heads: int, blocks: int, at_once: int):
    """Returns by how much the list of whole blocks of each tile is rotated.

    Tiles that are worked on at one time should read the same blocks, or else L2 must hold all of
    them. All lists ascend, but tiles do not begin together. So a hand goes round the blocks, like
    that of a clock, once while a list of mean length is read. A tile begins at the block where the
    hand is when the tile does, which is known from the lengths of the lists before it.

    Args:
        lists: `in_one`, with their order.
        heads: number of heads.
        blocks: number of blocks of the other sequence, for all heads of a list.
        at_once: number of tiles that are worked on at one time.

    Returns:
        int32[batch * heads * tiles], by number of the tile.
    """
    entries, own, tiles = lists.bounds.shape[:3]
    number = lists.order
    head, tile = jnp.divmod(number, tiles)
    entry, head = jnp.divmod(head, heads)
    entry, head = entry // (number.size // (heads * tiles * entries)), head // (heads // own)
    start, whole_start, stop = (lists.bounds[entry, head, tile, end] for end in range(3))
    size = stop - start
    before = jnp.cumsum(size, dtype=jnp.int32) - size
    round_ = jnp.maximum(jnp.sum(size, dtype=jnp.int32) // number.size, 1) * at_once
    share = (before % round_).astype(jnp.float32) / round_.astype(jnp.float32)
    hand = (share * blocks).astype(jnp.int32)
    low, high = whole_start, stop
    for _ in range(int(blocks).bit_length()):
        middle = (low + high) // 2
        left = (low < high) & (lists.index[middle] < hand)
        low, high = jnp.where(left, middle + 1, low), jnp.where(left, high, middle)
    first = jnp.where(low < stop, low, whole_start) - whole_start
    return jnp.zeros_like(first).at[number].set(first, unique_indices=True)


def planned(problem: Problem, operands: Operands, tile: tuple[int, int]):
    """Returns the lists of a call's tiles, without what else hides keys.

    Blocks are cut into tiles. Those that causal, windows, lengths, ids or positions hide are left
    out, and those of which they hide a part become partial, as does the tile in which the keys end.
    So in whole tiles nothing hides a key.

    Returns:
        int32[Bb or B, N1, Q tiles, 2 + M].
    """
    lists = _cut(operands.block_lists, problem, tile)
    lengths = {"q_lengths", "kv_lengths"} & problem.features
    tail = problem.kv_len % tile[1]
    if problem.spec.mask.is_trivial and not lengths and not problem.hides_by_arrays and not tail:
        return lists
    if lengths or problem.hides_by_arrays or problem.traced_offset:
        lists = jnp.repeat(lists, problem.batch // lists.shape[0], axis=0)
    index, state = _entries(lists)
    low, whole_low, whole_high, high = (
        x[:, None, :, None] for x in _bands(problem, operands, tile)
    )
    seen = (index >= low) & (index < high)
    whole = (index >= whole_low) & (index < whole_high)
    if problem.hides_by_arrays:
        listed = lambda pairs: jnp.take_along_axis(pairs[:, None], index, axis=-1, mode="clip")
        seen &= listed(bounds.meets(problem, operands, *tile))
        whole &= listed(bounds.whole(operands, *tile))
    if operands.q_lengths is not None:
        seen &= _places(index.shape, 2) * tile[0] < operands.q_lengths[:, None, None, None]
    state = jnp.where(seen, jnp.where(whole, state, jnp.minimum(state, PARTIAL)), EMPTY)
    return _sorted(index, state, -(-problem.kv_len // tile[1]))


def _cut(lists, problem: Problem, tile: tuple[int, int]):
    """Returns the lists of tiles for those of blocks."""
    block = problem.spec.block_shape or tile
    rows, columns = (size // n for size, n in zip(block, tile, strict=True))
    if rows > 1:
        lists = jnp.repeat(lists, rows, axis=2)[:, :, : -(-problem.q_len // tile[0])]
    if columns == 1:
        return lists
    index = jnp.repeat(lists[..., COUNTS:] * columns, columns, axis=-1)
    index += _places(index.shape, 3) % columns
    counts = lists[..., :COUNTS] * columns
    # A block's last tiles may lie beyond the last key.
    inside = index < -(-problem.kv_len // tile[1])
    _, state = _entries(jnp.concatenate([counts, index], axis=-1))
    return _sorted(index, jnp.where(inside, state, EMPTY), -(-problem.kv_len // tile[1]))


def _places(shape, axis: int):
    """Returns int32[shape], the place of each element along an axis."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _readable(index):
    """Appends an entry, so that the place where an empty list begins can be read."""
    return jnp.pad(index, ((0, 0), (0, 0), (0, 1)))


def _bands(problem: Problem, operands: Operands, tile: tuple[int, int]):
    """Returns what Mask.kv_blocks says of each Q tile, four of int32[B or 1, Q tiles]."""
    block_q, block_kv = tile
    start = jnp.arange(-(-problem.q_len // block_q), dtype=jnp.int32) * block_q
    offset = jnp.int32(problem.spec.q_offset) if operands.q_offset is None else operands.q_offset
    kv_len = jnp.int32(problem.kv_len) if operands.kv_lengths is None else operands.kv_lengths

    position, kv_len = start[None] + offset.reshape(-1, 1), kv_len.reshape(-1, 1)

    def ends(position, kv_len):
        blocks = problem.spec.mask.kv_blocks(position, block_q, kv_len, block_kv)
        return tuple(map(jnp.int32, blocks))

    return jax.vmap(jax.vmap(ends))(*jnp.broadcast_arrays(position, kv_len))


def _entries(lists):
    """Returns (number, state) of every entry of the operand, EMPTY past the end of a list."""
    place = _places((*lists.shape[:-1], lists.shape[-1] - COUNTS), 3)
    partial, count = lists[..., :1], lists[..., 1:COUNTS]
    state = jnp.where(place < count, jnp.where(place < partial, PARTIAL, WHOLE), EMPTY)
    return lists[..., COUNTS:], state


def _sorted(index, state, blocks: int):
    """Returns the operand for entries in any order; those that are EMPTY are left out."""
    whole = jnp.where(state == WHOLE, index + blocks, index)
    key = jnp.sort(jnp.where(state == EMPTY, 2 * blocks, whole), axis=-1)
    counts = [jnp.sum(key < n * blocks, axis=-1, keepdims=True, dtype=jnp.int32) for n in (1, 2)]
    return jnp.concatenate([*counts, jnp.where(key < 2 * blocks, key % blocks, 0)], axis=-1)
