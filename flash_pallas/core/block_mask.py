"""Block masks: the blocks of (queries, keys) that attention computes."""

from __future__ import annotations

import dataclasses
import functools
import html
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..typing import AnyArray, Array, Bool, Int, MaskMod
from . import block_lists, mesh_axes, mods
from .apart import apart
from .block_lists import EMPTY, PARTIAL, WHOLE
from .mask import Tile

SMALLEST_BLOCK = 64
# A call without a block mask makes lists of its mask_mod if it has at least PAIRS pairs and at most
# those of its platform in MOST_PAIRS, which take seconds on two cores of a CPU. It uses the lists
# if at least LEAST_EMPTY of the blocks are empty.
AUTOMATIC_BLOCK, LEAST_EMPTY = (128, 128), 0.125
PAIRS, MOST_PAIRS = 2048 * 2048, {"cpu": 1 << 30, "gpu": 1 << 34}
# Number of pairs of a query and a key for which a mask is evaluated at one time.
PAIRS_AT_ONCE = 1 << 24


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["lists", "traced", "mask"],
    meta_fields=["q_len", "kv_len", "block", "kind"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class BlockMask:
    """A mask whose empty blocks cost nothing: the `block_mask` of `flash_attention`.

    Make one with `from_mask_mod`, `from_indices` or `from_dense`. It is a pytree, so it can be an
    argument of jitted functions, be vmapped over, and be sharded over batch and heads. A different
    mask of the same sizes does not cause recompilation.

    Attributes:
        lists: int32 [B or 1, N or 1, Q blocks, 2 + M]. For each block of queries: the number of its
            blocks of keys that are partial, the number of those it has in all, and then their
            indices.
        traced: the mask inside partial blocks, as the traced mask_mod with the arrays that it
            reads; or None.
        mask: the mask inside partial blocks, as bool [B or 1, N or 1, T, S]; or None.
        q_len: T, number of queries.
        kv_len: S, number of keys.
        block: size of a block, as (queries, keys).
        kind: how it was made: "mask_mod", "indices", "dense", or several of these.
    """

    lists: Array
    traced: mods.Traced | None
    mask: Array | None
    q_len: int
    kv_len: int
    block: tuple[int, int]
    kind: str

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: MaskMod,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        *,
        block: tuple[int, int] = (128, 128),
    ) -> BlockMask:
        """Returns the block mask of a function of positions.

        FlexAttention (https://arxiv.org/abs/2412.05496). Every pair of a query and a key is
        evaluated once, on the default device and also under jit, without forming an array of all
        pairs.

        Args:
            mask_mod: (b, n, i, j) -> bool, where True means visible. It is elementwise JAX on int32
                scalars, like the `mask_mod` of `flash_attention`: the index in the flattened batch,
                the query head, the query and the key. It may capture arrays, also traced ones.
                Arrays of integers or bools, such as document ids, may be indexed by b and i or by b
                and j; other arrays by b and n.
            batch: number of batch entries; 1 if the mask does not depend on b.
            heads: number of query heads or of KV heads; 1 if the mask does not depend on n.
            q_len: number of queries, T.
            kv_len: number of keys, S.
            block: (queries, keys) of a block: a multiple of 64 queries, and 64 or 128 keys.

        Raises:
            TypeError: mask_mod is not a function, or does not return one bool.
            ValueError: mask_mod cannot be traced into a kernel, or a size is out of range.

        Example:
            >>> from flash_pallas import BlockMask
            >>> prefix = lambda b, n, i, j: (j <= i) | (j < 512)
            >>> BlockMask.from_mask_mod(prefix, 1, 1, 4096, 4096).sparsity
            0.478515625
        """
        sizes = _checked_sizes(q_len, kv_len, block)
        if not callable(mask_mod):
            raise TypeError(f"mask_mod must be a function, got {mask_mod!r}")
        for name, size in (("batch", batch), ("heads", heads)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} is {size!r}: it must be a positive int; 1 for all alike")
        try:
            places = lambda: [jnp.arange(n, dtype=jnp.int32)[None] for n in sizes[:2]]
            traced = mods.trace(mask_mod, batch, heads, positions=places)
        except mods.NotElementwise as error:
            raise ValueError(
                f"mask_mod cannot be traced into a kernel: {error}"
            ) from error.__cause__
        lists = _lists_of_mod((batch, heads), sizes, traced)
        return cls(lists, traced, None, *sizes, "mask_mod")

    @classmethod
    def from_indices(
        cls,
        kv_indices: Int[AnyArray, "#B #N Qb M"],
        counts: Int[AnyArray, "#B #N Qb"] | None = None,
        *,
        q_len: int,
        kv_len: int,
        block: tuple[int, int] = (128, 128),
    ) -> BlockMask:
        """Returns the mask that shows each block of queries the blocks of keys in its list.

        Use it for blocks chosen by top-k, as in MoBA (https://arxiv.org/abs/2502.13189) or NSA
        (https://arxiv.org/abs/2502.11089). The lists may be traced. `causal` and all other masks of
        the call also hide keys within these blocks.

        Args:
            kv_indices: integers [B or 1, N or 1, Q blocks, M]: indices of blocks of keys, in any
                order. A negative index is ignored, and a repeated one counts once. The heads are
                those of q or those of k.
            counts: integers [B or 1, N or 1, Q blocks]: number of entries of each list that count.
                None means all M.
            q_len: number of queries, T.
            kv_len: number of keys, S.
            block: (queries, keys) of a block: a multiple of 64 queries, and 64 or 128 keys.

        Raises:
            TypeError: an array does not hold integers.
            ValueError: shapes or sizes do not match, or a numpy array has an index beyond the last
                block. In a jax array such an index is ignored.

        Example:
            >>> import jax.numpy as jnp
            >>> from flash_pallas import BlockMask
            >>> chosen = jnp.array([[[[0, -1], [0, 1], [2, 0], [2, 3]]]])
            >>> BlockMask.from_indices(chosen, q_len=512, kv_len=512).sparsity
            0.5625
        """
        sizes = _checked_sizes(q_len, kv_len, block)
        q_blocks, kv_blocks = _blocks(*sizes)
        index = _integers("kv_indices", kv_indices)
        if index.ndim != 4 or index.shape[2] != q_blocks:
            raise ValueError(
                f"kv_indices has shape {index.shape}: it must be [B or 1, N or 1, {q_blocks}, M], "
                f"a list for each of the {q_blocks} blocks of {block[0]} queries"
            )
        _check_numbers("kv_indices", kv_indices, kv_blocks)
        if counts is not None:
            counts = _integers("counts", counts)
            if counts.shape != index.shape[:3]:
                raise ValueError(
                    f"counts has shape {counts.shape}: it must be {index.shape[:3]}, one for each "
                    "list of kv_indices"
                )
        listed = functools.partial(_lists_of_indices, kv_blocks)
        lists = _on_mesh(listed, index, counts)
        return cls(lists, None, None, *sizes, "indices")

    @classmethod
    def from_dense(
        cls, mask: Bool[AnyArray, "#B #N T S"], *, block: tuple[int, int] = (128, 128)
    ) -> BlockMask:
        """Returns the block mask of an array, which is kept for the partial blocks.

        Args:
            mask: bool [B or 1, N or 1, T, S]; True means visible.
            block: (queries, keys) of a block: a multiple of 64 queries, and 64 or 128 keys.

        Raises:
            TypeError: mask is not an array of bool.
            ValueError: mask is not of rank 4, or the block size is out of range.

        Example:
            >>> import jax.numpy as jnp
            >>> from flash_pallas import BlockMask
            >>> BlockMask.from_dense(jnp.tri(256, dtype=bool)[None, None]).sparsity
            0.25
        """
        if not hasattr(mask, "dtype") or mask.dtype != jnp.bool_:
            raise TypeError(
                "mask must be an array of bool, got "
                f"{getattr(mask, 'dtype', type(mask).__name__)}: convert it with jnp.array(mask, "
                "bool)"
            )
        if mask.ndim != 4:
            raise ValueError(f"mask has shape {mask.shape}: it must be [B or 1, N or 1, T, S]")
        q_len, kv_len = mask.shape[2:]
        sizes = _checked_sizes(q_len, kv_len, block)
        mask = jnp.asarray(mask)
        states = lambda mask: _states_of_dense(mask, sizes[2])
        lists = _on_mesh(lambda mask: block_lists.of_states(states(mask)), mask)
        return cls(lists, None, mask, *sizes, "dense")

    def __and__(self, other: BlockMask) -> BlockMask:
        """Returns the mask that shows what both masks show.

        Raises:
            ValueError: the masks have different sizes; an axis of 1 fits any.
        """
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_alike(other)
        traced = _joined(operator.and_, self, other)
        masks = [x.mask for x in (self, other) if x.mask is not None]
        mask = _on_mesh(lambda *x: functools.reduce(operator.and_, x), *masks) if masks else None
        kinds = sorted({*self.kind.split(" and "), *other.kind.split(" and ")})
        intersection = self._with(jnp.minimum, other, traced, mask)
        return dataclasses.replace(intersection, kind=" and ".join(kinds))

    def __or__(self, other: BlockMask) -> BlockMask:
        """Returns the mask that shows what either mask shows.

        Raises:
            ValueError: the masks have different sizes or different kinds. Both must be made from a
                mask_mod, both from indices, or both from a dense mask.
        """
        if not isinstance(other, BlockMask):
            return NotImplemented
        self._check_alike(other)
        # With other kinds, neither mod nor array alone says what is visible in a block.
        if self.kind != other.kind or " and " in self.kind:
            raise ValueError(
                f"| of block masks made from {self.kind} and from {other.kind}: both must be made "
                "from a mask_mod, both from indices, or both from a dense mask. Say both in one "
                "mask_mod, or combine the outputs of two calls by their log-sum-exp"
            )
        traced = _joined(operator.or_, self, other)
        mask = None if self.mask is None else _on_mesh(operator.or_, self.mask, other.mask)
        return self._with(jnp.maximum, other, traced, mask)

    @property
    def sparsity(self) -> float:
        """Fraction of the blocks that are empty, from 0 to 1."""
        number = self.lists[..., 1].size * self._shape[1]
        return 1.0 - float(jnp.sum(self.lists[..., 1])) / number

    def to_dense(self) -> Bool[Array, "#B #N T S"]:
        """Returns the mask as bool [B or 1, N or 1, T, S]. It is large, and is meant for tests."""
        return _on_mesh(BlockMask._dense, self)

    def _dense(self):
        states = jnp.repeat(jnp.repeat(self._states, self.block[0], 2), self.block[1], 3)
        states = states[:, :, : self.q_len, : self.kv_len]
        seen = states != EMPTY
        if self.traced is not None:
            seen &= (states == WHOLE) | _everywhere(self.traced, seen.shape)
        return seen if self.mask is None else seen & ((states == WHOLE) | self.mask)

    def plot(self, batch: int = 0, head: int = 0, width: int = 64) -> str:
        """Returns a picture with a line per block of queries and a column per block of keys.

        A full square is a whole block, a shaded square a partial one, and a dot an empty one.

        Args:
            batch: index of the batch entry.
            head: index of the head.
            width: largest number of columns and of lines. If there are more blocks, each character
                represents several of them, and shows a whole or empty block only if all of them
                are.

        Example:
            >>> from flash_pallas import BlockMask
            >>> print(BlockMask.from_mask_mod(lambda b, n, i, j: j <= i, 1, 1, 384, 384).plot())
            ▒··
            █▒·
            ██▒
        """
        states = np.asarray(_on_mesh(lambda mask: mask._states, self))[batch, head]
        for axis in (0, 1):
            step = -(-states.shape[axis] // width)
            starts = np.arange(0, states.shape[axis], step)
            low, high = (f.reduceat(states, starts, axis) for f in (np.minimum, np.maximum))
            states = np.where(low == high, low, PARTIAL)
        return "\n".join("".join("·▒█"[x] for x in row) for row in states)

    def __repr__(self) -> str:
        entries, heads = self.lists.shape[:2]
        text = (
            f"BlockMask of {self.q_len} queries and {self.kv_len} keys, made from {self.kind}: "
            f"blocks of {self.block[0]} queries and {self.block[1]} keys, batch {entries}, "
            f"heads {heads}"
        )
        return text + (f", {self.sparsity:.1%} of the blocks empty" if self._is_known else "")

    def _repr_html_(self) -> str:
        """Returns the picture of the first batch entry and head, for notebooks."""
        text = html.escape(repr(self))
        if not self._is_known:
            return f"<p>{text}</p>"
        # Square characters, so that the picture has the shape of the mask.
        style = "line-height: 1em; letter-spacing: 0.4em; font-family: monospace"
        return f'<p>{text}</p><pre style="{style}">{html.escape(self.plot())}</pre>'

    @property
    def _is_known(self) -> bool:
        """True if the lists are computed, and this process has all of them."""
        if isinstance(self.lists, np.ndarray):
            return True
        traced = isinstance(self.lists, jax.core.Tracer)
        return not traced and getattr(self.lists, "is_fully_addressable", False)

    def check(self, q_len: int, kv_len: int, batch: int, heads: tuple[int, int]) -> None:
        """Checks that the mask fits a call.

        Args:
            q_len: number of queries.
            kv_len: number of keys.
            batch: number of entries of the flattened batch.
            heads: number of query heads and of KV heads.

        Raises:
            ValueError: the mask does not fit.
        """
        if (self.q_len, self.kv_len) != (q_len, kv_len):
            raise ValueError(
                f"block_mask is of {self.q_len} queries and {self.kv_len} keys, and the call has "
                f"{q_len} and {kv_len}: make one for these lengths"
            )
        params = [("captured arrays", x) for x in self.traced.params] if self.traced else []
        masks = [("mask", self.mask)] if self.mask is not None else []
        for name, x in (("lists", self.lists), *masks, *params):
            if x.shape[0] not in (1, batch) or x.shape[1] not in (1, *heads):
                raise ValueError(
                    f"block_mask has {name} of {x.shape[0]} batch entries and {x.shape[1]} heads: "
                    f"there must be 1 or {batch}, and 1 or {' or '.join(map(str, set(heads)))}; "
                    "under vmap give it in_axes, or leave its axes at 1"
                )

    @property
    def _shape(self) -> tuple[int, int]:
        """Numbers of blocks of queries and of keys."""
        return _blocks(self.q_len, self.kv_len, self.block)

    @property
    def _states(self):
        return block_lists.states_of(self.lists, self._shape[1])

    def _with(self, join: Callable, other: BlockMask, traced, mask) -> BlockMask:
        joined = lambda *masks: block_lists.of_states(join(*(x._states for x in masks)))
        lists = _on_mesh(joined, self, other)
        return dataclasses.replace(self, lists=lists, traced=traced, mask=mask)

    def _check_alike(self, other: BlockMask) -> None:
        sizes = lambda x: (x.q_len, x.kv_len, x.block)
        if sizes(self) != sizes(other):
            raise ValueError(
                f"block masks of (queries, keys, block) {sizes(self)} and {sizes(other)}: these "
                "must be the same"
            )
        for axis, name in enumerate(("batch entries", "heads")):
            sizes = self.lists.shape[axis], other.lists.shape[axis]
            if 1 not in sizes and sizes[0] != sizes[1]:
                raise ValueError(
                    f"block masks of {sizes[0]} and of {sizes[1]} {name}: these must be the same, "
                    "or one of them 1; heads are those of q in both, or those of k in both"
                )


def _checked_sizes(q_len, kv_len, block) -> tuple[int, int, tuple[int, int]]:
    """Checks sizes and returns them as ints."""
    try:
        q_len, kv_len = map(operator.index, (q_len, kv_len))
        block_q, block_kv = map(operator.index, block)
    except (TypeError, ValueError):
        raise TypeError(
            f"q_len {q_len!r}, kv_len {kv_len!r} and block {block!r} must be ints, the last a pair "
            "of them"
        ) from None
    if q_len < 1 or kv_len < 1:
        raise ValueError(f"q_len is {q_len} and kv_len {kv_len}: both must be positive")
    if block_q < 1 or block_q % SMALLEST_BLOCK or block_kv not in (64, 128):
        raise ValueError(
            f"block is {block}: its queries must be a multiple of 64 and its keys 64 or 128, as in "
            "(128, 128)"
        )
    return q_len, kv_len, (block_q, block_kv)


def _blocks(q_len: int, kv_len: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-q_len // block[0]), -(-kv_len // block[1])


def _integers(name: str, x):
    """Returns an array of integers as int32."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be an array of integers, got {getattr(x, 'dtype', type(x).__name__)}"
        )
    held, most = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32).max
    low, high = (np.asarray(n, x.dtype) for n in (max(held.min, -1), min(held.max, most)))
    if isinstance(x, np.ndarray):  # which jnp would cut to 32 bits before it clips
        return jnp.asarray(np.clip(x, low, high).astype(np.int32))
    return lax.clamp(low, jnp.asarray(x), high).astype(jnp.int32)


def _check_numbers(name: str, x, blocks: int) -> None:
    """Raises ValueError where values that are known name a block past the last."""
    if isinstance(x, np.ndarray) and x.size and x.max() >= blocks:
        raise ValueError(
            f"{name} contains {x.max()}: there are {blocks} blocks, numbered from 0; -1 is none"
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _lists_of_mod(leading: tuple[int, int], sizes, traced: mods.Traced):
    """Returns `lists` of a traced mask_mod, for `leading` batch entries and heads."""
    q_len, kv_len, (block_q, block_kv) = sizes
    q_blocks, kv_blocks = _blocks(*sizes)
    shape = block_q, kv_blocks * block_kv

    def states(row_and_block):
        row, q_block = row_and_block
        tile = Tile(q_block * block_q, jnp.int32(0), shape)
        of_row = [lax.broadcast_in_dim(x.reshape(-1)[row], shape, ()) for x in traced.params]
        entry = row // leading[1]
        of_row += [
            _spread(tile, side, _entry(x, entry, side, q_block * block_q, shape))
            for side, x in zip(traced.mod.vectors, traced.vectors, strict=True)
        ]
        seen = traced.mod(tile, tuple(of_row))
        inside = (tile.q_pos < q_len) & (tile.kv_pos < kv_len)
        by_block = lambda x: x.reshape(block_q, kv_blocks, block_kv)
        any_seen = jnp.any(by_block(seen & inside), axis=(0, 2))
        all_seen = jnp.all(by_block(seen | ~inside), axis=(0, 2))
        state = jnp.where(any_seen, jnp.where(all_seen, WHOLE, PARTIAL), EMPTY)
        return state.astype(jnp.int8)

    number = jnp.arange(leading[0] * leading[1] * q_blocks, dtype=jnp.int32)
    at_once = max(1, PAIRS_AT_ONCE // (shape[0] * shape[1]))
    block_states = lax.map(states, (number // q_blocks, number % q_blocks), batch_size=at_once)
    return block_lists.of_states(block_states.reshape(*leading, q_blocks, kv_blocks))


class OwnLists(NamedTuple):
    """Lists of blocks for a call without a block mask; their blocks have size `AUTOMATIC_BLOCK`.

    Attributes:
        lists: numpy array in the form of `BlockMask.lists`.
        empty: fraction of the blocks that are empty.
    """

    lists: np.ndarray
    empty: float


def is_looked_at(q_len: int, kv_len: int) -> bool:
    """Returns whether a call of these lengths makes lists from its mask_mod."""
    return PAIRS <= q_len * kv_len <= MOST_PAIRS.get(jax.default_backend(), 0)


@functools.lru_cache(maxsize=64)
def lists_of_positions(mod: mods.Mod, q_len: int, kv_len: int) -> OwnLists:
    """Returns the lists of a mask_mod that reads only i and j. They are evaluated once."""
    sizes = q_len, kv_len, AUTOMATIC_BLOCK
    lists = apart(lambda: np.asarray(_lists_of_mod((1, 1), sizes, mods.Traced(mod, ()))))
    counts, kv_blocks = lists[..., 1], _blocks(*sizes)[1]
    longest = block_lists.COUNTS + max(int(counts.max()), 1)
    return OwnLists(lists[..., :longest], 1.0 - counts.sum() / (counts.size * kv_blocks))


def _lists_of_indices(kv_blocks: int, index, counts):
    """Returns `lists` of numbers of blocks, of which the first `counts` of each list count."""
    if counts is not None:
        place = lax.broadcasted_iota(jnp.int32, index.shape, 3)
        index = jnp.where(place < counts[..., None], index, -1)
    return block_lists.of_indices(index, WHOLE, kv_blocks)


def _on_mesh(call: Callable, *masks):
    """Returns call(*masks), an array [B or 1, N or 1, ...] that is sharded as the masks are.

    Args:
        call: of arrays and of BlockMasks.
        masks: these, of several batch entries and heads, or of one for all.
    """
    if mesh_axes.mesh_of(masks) is None:
        return call(*masks)
    arrays = [x for x in jax.tree.leaves(masks) if x.ndim > 2]
    cuts: list[tuple[str, ...]] = []
    for axis in (0, 1):
        size = max(x.shape[axis] for x in arrays)
        axis_names = (mesh_axes.names_of(x)[axis] for x in arrays if x.shape[axis] == size)
        free = (names for names in axis_names if names and set(names).isdisjoint(sum(cuts, ())))
        cuts.append(next(free, ()))
    return mesh_axes.compiled_as_auto(call, masks, PartitionSpec(*(x or None for x in cuts)))


def _states_of_dense(mask, block: tuple[int, int]):
    """Returns int8[B, N, Q blocks, KV blocks] of a mask [B, N, T, S]."""
    pads = [(0, -n % size) for n, size in zip(mask.shape[2:], block, strict=True)]

    def by_block(fill: bool):
        x = jnp.pad(mask, ((0, 0), (0, 0), *pads), constant_values=fill)
        rows, columns = (n // size for n, size in zip(x.shape[2:], block, strict=True))
        return x.reshape(*x.shape[:2], rows, block[0], columns, block[1])

    any_seen, all_seen = jnp.any(by_block(False), (3, 5)), jnp.all(by_block(True), (3, 5))
    return jnp.where(any_seen, jnp.where(all_seen, WHOLE, PARTIAL), EMPTY).astype(jnp.int8)


def _entry(x, entry, side: int, first, shape):
    """Returns a vector [B or 1, length] of one batch entry at the queries or keys of a tile."""
    x = x[0] if len(x) == 1 else x[entry]
    x = jnp.pad(x, (0, -len(x) % shape[side]))
    return lax.dynamic_slice_in_dim(x, first if side == 0 else 0, shape[side])


def _spread(tile: Tile, side: int, x):
    return (tile.per_q, tile.per_kv)[side](x)


def _everywhere(traced: mods.Traced, shape):
    """Returns the mod's value of every pair, bool [B or 1, N or 1, T, S]."""
    tile = Tile(jnp.int32(0), jnp.int32(0), shape[2:])

    def one(params, vectors):
        spread_params = [lax.broadcast_in_dim(x, tile.shape, ()) for x in params]
        sides = zip(traced.mod.vectors, vectors, strict=True)
        return traced.mod(tile, spread_params + [_spread(tile, side, x) for side, x in sides])

    params = [jnp.broadcast_to(x, shape[:2]) for x in traced.params]
    vectors = [jnp.broadcast_to(x, (shape[0], x.shape[1])) for x in traced.vectors]
    if not params and not vectors:
        return one((), ())[None, None]
    of_heads = jax.vmap(one, (0, None), axis_size=shape[1])
    return jax.vmap(of_heads, axis_size=shape[0])(params, vectors)


def _joined(join: Callable, one: BlockMask, other: BlockMask) -> mods.Traced | None:
    """Returns what `join`, & or |, makes of two masks' mods."""
    if one.traced is None or other.traced is None:
        return one.traced or other.traced
    return mods.joined(join, one.traced, other.traced)
