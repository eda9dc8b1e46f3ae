"""Elementwise work on a tile of scores between two matmuls.

The meaning is that of core/scores.py, for one head; here it is mapped over batch and heads, each
tile's inputs are cut out of the call's arrays, and gradients of those are summed to their shapes
tile by tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...core import dropout, scores
from ...core.mask import Tile
from ...core.problem import AttentionSpec, Operands
from ...core.scores import VECTORS, TileInputs
from ...core.softmax import EMPTY_ROW
from .grid import Grid, pad

PAIRWISE = ("bias", "mask")  # operands with an axis of queries and one of keys


class Extras(NamedTuple):
    """Gradients of operands other than q, k and v; None for those not asked for."""

    bias: Any = None  # [Bb, N1, T1, S1], of a tile or, padded, of the call
    alibi_slopes: Any = None  # [B, N]
    score_params: Any = None  # a tuple of [B, N], None for integers


class _Place(NamedTuple):
    """Position of one head's tile."""

    q_start: Any
    kv_start: Any
    kv_len: Any  # keys from there on are hidden; None where the tile has no such keys


@dataclasses.dataclass(frozen=True, eq=False)
class Tiles:
    """The side inputs of one call, read tile by tile.

    Attributes:
        grid: the tiles that the call is cut into.
        sides: its operands, padded to whole tiles and in the dtype of the scores.
        wanted: the operands whose gradients are asked for.
        clears: what is hidden is scored as 0, so that JAX finds derivatives of 0 there.
    """

    grid: Grid
    sides: Operands
    wanted: frozenset[str] = frozenset()
    clears: bool = False

    @classmethod
    def of(cls, grid: Grid, operands: Operands, wanted: frozenset[str] = frozenset()) -> Tiles:
        """Returns the tiles of these operands."""
        spec, (block_q, block_kv) = grid.problem.spec, grid.tile_shape
        changes: dict[str, Any] = {}
        for name in PAIRWISE:
            x = getattr(operands, name)
            if x is not None:
                x = pad(x, 2, block_q, 0) if x.shape[2] > 1 else x
                changes[name] = pad(x, 3, block_kv, 0) if x.shape[3] > 1 else x
        for names, block, fill in zip(VECTORS, grid.tile_shape, (-1, -2), strict=True):
            present = ((name, getattr(operands, name)) for name in names)
            changes |= {name: pad(x, 1, block, fill) for name, x in present if x is not None}
        if operands.q_places is not None:
            changes["q_places"] = pad(operands.q_places, 1, block_q, 0)
            changes["kv_places"] = pad(operands.kv_places, 1, block_kv, 0)
        if operands.q_offset is None:
            changes["q_offset"] = jnp.full((1,), spec.q_offset, jnp.int32)
        if operands.alibi_slopes is not None:
            changes["alibi_slopes"] = operands.alibi_slopes.astype(grid.dtype)
        return cls(grid, operands._replace(**changes), wanted)

    def constant(self) -> Tiles:
        """Returns the same tiles, of operands that are not differentiated."""
        return dataclasses.replace(self, sides=lax.stop_gradient(self.sides))

    @property
    def spec(self) -> AttentionSpec:
        """Static parameters of the call."""
        return self.grid.problem.spec

    def logits(self, qk, q_block, kv_block):
        """Returns Logits.x of products [B, K, G, block_q, block_kv], -inf where hidden.

        The second result is the dropout mask, a bool of the same shape; None without dropout.
        """

        def one(qk, place, inputs):
            tile, inputs = self._tile(place, inputs)
            tile_logits, keep = self._scored(tile, qk, place, inputs)
            x = tile_logits.x if keep is None else jnp.where(keep, tile_logits.x, -jnp.inf)
            return x, scores.kept(self.spec, tile, inputs) if self.spec.dropout_rate else None

        return self._grouped(self._over_heads(one, qk, q_block, kv_block))

    def weights_and_gradients(self, products, rows, q_block, kv_block):
        """Computes (the factor of dO in dV, d (scale * qk), Extras of this tile).

        The first is P after dropout.

        Args:
            products: qk and dP = dO v^T, [B, K, G, block_q, block_kv] each.
            rows: lse_log2, shift and delta, [B, K, G, block_q] each.
            q_block: index of the tile's Q block.
            kv_block: index of its KV block.
        """

        def one(arrays, place, inputs):
            qk, dp, lse_log2, shift, delta = arrays
            tile, inputs = self._tile(place, inputs)
            tile_logits, keep = self._scored(tile, qk, place, inputs)
            keep = self._with_rows(tile, keep, lse_log2)
            p = jnp.exp2(
                (tile_logits.x - tile.per_q(shift)) * tile_logits.log2_scale - tile.per_q(lse_log2)
            )
            p = p if keep is None else jnp.where(keep, p, 0.0)
            used = p
            if self.spec.dropout_rate:
                gain = dropout.gain(self.spec.dropout_rate)
                kept = scores.kept(self.spec, tile, inputs)
                used, dp = (jnp.where(kept, x * gain, 0.0) for x in (p, dp))
            dz, dparams = tile_logits.pull(p * (dp - tile.per_q(delta)))
            if keep is not None and self.spec.score_modifiers:
                # Hidden scores may be anything, and so may their derivatives.
                dz, dparams = jax.tree.map(lambda d: jnp.where(keep, d, 0.0), (dz, dparams))
            return used, dz, self._extras(tile, inputs, dz, dparams)

        used, dz, extras = self._over_heads(one, (*products, *rows), q_block, kv_block)
        if extras.bias is not None:
            extras = extras._replace(bias=_sum_to(extras.bias, self.sides.bias.shape[:2]))
        return *self._grouped((used, dz)), extras

    def no_extras(self, like) -> Extras:
        """Returns zeros in which the Extras of all tiles are summed."""
        sides, zeros = self.sides, self.grid.zeros
        bias = None
        if "bias" in self.wanted:
            # With both axes present every element belongs to one tile: nothing is added up.
            once = 1 not in sides.bias.shape[2:]
            bias = zeros(sides.bias.shape, like, sides.bias.dtype if once else None)
        slopes = zeros(sides.alibi_slopes.shape, like) if "alibi_slopes" in self.wanted else None
        params = None
        if "score_params" in self.wanted:
            params = [zeros(p.shape, like) if _is_float(p) else None for p in sides.score_params]
        return Extras(bias, slopes, None if params is None else tuple(params))

    def add(self, total: Extras, part: Extras, q_block, kv_block) -> Extras:
        """Adds the Extras of one tile to the sum."""
        with_bias = total._replace(bias=None), part._replace(bias=None)
        added = jax.tree.map(jnp.add, *with_bias)
        if total.bias is None:
            return added
        start = self._corner(total.bias, q_block, kv_block)
        old = lax.dynamic_slice(total.bias, start, part.bias.shape)
        bias = lax.dynamic_update_slice(total.bias, old + part.bias.astype(old.dtype), start)
        return added._replace(bias=bias)

    def finished(self, total: Extras, operands: Operands) -> Extras:
        """Returns the sums in the shapes of the operands."""
        bias = total.bias
        if bias is not None:
            rows, columns = operands.bias.shape[2:]
            bias = bias[:, :, :rows, :columns]
        return Extras(bias, total.alibi_slopes, total.score_params or ())

    def _scored(self, tile: Tile, qk, place: _Place, inputs: TileInputs):
        """Computes (Logits, bool of what is visible or None) of one head's tile."""
        limits = tile.limits(self.spec.mask, place.kv_len)
        keep = scores.visible(self.spec, tile, inputs)
        if inputs.bias is not None and self.spec.score_modifiers:
            # Where the bias is -inf, derivatives may be NaN.
            finite = inputs.bias != -jnp.inf
            keep = finite if keep is None else keep & finite
        if not limits.is_trivial:
            near = limits.keep(tile.shape)
            keep = near if keep is None else keep & near
        if self.clears and keep is not None:
            seen = lambda x: None if x is None else jnp.where(keep, x, 0.0)
            qk, inputs = seen(qk), inputs._replace(bias=seen(inputs.bias))
        return scores.logits(self.spec, tile, qk, inputs), keep

    def _with_rows(self, tile: Tile, keep, lse_log2):
        """Removes from `keep` the rows whose outputs were discarded, where they may hold NaN.

        Their queries are 0, so it takes a bias or the user's function to make one.
        """
        if self.sides.bias is None and self.spec.score_mod is None:
            return keep
        rows = tile.per_q(lse_log2 < EMPTY_ROW / 2)
        return rows if keep is None else keep & rows

    def _extras(self, tile: Tile, inputs: TileInputs, dz, dparams) -> Extras:
        """Computes what one head's tile adds to each gradient."""
        bias = slopes = params = None
        if "bias" in self.wanted:
            axes = tuple(i for i in (0, 1) if self.sides.bias.shape[2 + i] == 1)
            bias = jnp.sum(dz, axis=axes, keepdims=True) if axes else dz
        if "alibi_slopes" in self.wanted:
            slopes = jnp.sum(scores.slope_pull(scores.placed(tile, inputs), dz))
        if "score_params" in self.wanted:
            params = jax.tree.map(jnp.sum, dparams)
        return Extras(bias, slopes, params)

    def _tile(self, place: _Place, inputs: TileInputs):
        """Returns one head's Tile, and its inputs spread over it."""
        tile = Tile(place.q_start, place.kv_start, self.grid.tile_shape)
        spread = lambda x: jnp.broadcast_to(x, tile.shape)
        bias = None if inputs.bias is None else spread(inputs.bias.astype(self.grid.dtype))
        mask = None if inputs.mask is None else spread(inputs.mask)
        return tile, inputs._replace(bias=bias, mask=mask)

    def _over_heads(self, function, arrays, q_block, kv_block):
        """Maps `function` of one head's tile over every [B, N]; `arrays` are [B, K, G, ...]."""
        sizes = (self.grid.problem.batch, self.grid.problem.q_heads)
        arrays = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[3:]), arrays)
        place, inputs = self._place(q_block, kv_block), self._inputs(q_block, kv_block)
        leaves, tree = jax.tree.flatten((arrays, place, inputs))
        mapped = [[n == size for n, size in zip(x.shape, sizes, strict=False)] for x in leaves]
        call = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))
        for i in (1, 0):
            call = jax.vmap(call, in_axes=tuple(0 if m[i] else None for m in mapped))
        # An axis that is not mapped is squeezed: arrays that depend on positions alone stay small.
        shared = [tuple(i for i in (0, 1) if not m[i]) for m in mapped]
        return call(*(lax.squeeze(x, axes) for x, axes in zip(leaves, shared, strict=True)))

    def _grouped(self, tiles):
        """Reshapes tiles [B, N, ...] to [B, K, G, ...]."""
        heads = (self.grid.problem.kv_heads, self.grid.problem.group)
        return jax.tree.map(lambda x: x.reshape(x.shape[0], *heads, *x.shape[2:]), tiles)

    def _place(self, q_block, kv_block) -> _Place:
        """Returns the positions of a tile, with leading axes [B or 1, 1]."""
        block_q, block_kv = self.grid.tile_shape
        kv_len = None
        if self.sides.kv_lengths is not None:
            kv_len = self.sides.kv_lengths[:, None]
        elif self.grid.problem.kv_len % block_kv:
            kv_len = jnp.full((1, 1), self.grid.problem.kv_len, jnp.int32)
        kv_start = jnp.full((1, 1), kv_block * block_kv, jnp.int32)
        return _Place(self.sides.q_offset[:, None] + q_block * block_q, kv_start, kv_len)

    def _inputs(self, q_block, kv_block) -> TileInputs:
        """Returns the inputs of a tile, with leading axes [B or 1, N or 1].

        Bias and mask are [.., block_q or 1, block_kv or 1].
        """
        sides, (block_q, block_kv) = self.sides, self.grid.tile_shape
        ids = lambda x, block, size: (
            None if x is None else lax.dynamic_slice_in_dim(x, block * size, size, 1)[:, None]
        )
        q_keys = kv_keys = None
        if sides.q_places is not None:
            calls = sides.dropout_keys[..., None]
            q_keys = dropout.row_keys(calls, ids(sides.q_places, q_block, block_q))
            kv_keys = dropout.column_keys(ids(sides.kv_places, kv_block, block_kv))
        vectors = {
            name: ids(getattr(sides, name), block, size)
            for names, block, size in zip(
                VECTORS, (q_block, kv_block), (block_q, block_kv), strict=True
            )
            for name in names
        }
        return TileInputs(
            **vectors,
            bias=self._cut(sides.bias, q_block, kv_block),
            mask=self._cut(sides.mask, q_block, kv_block),
            slope=sides.alibi_slopes,
            score_params=sides.score_params,
            mask_params=sides.mask_params,
            dropout_key=sides.dropout_keys,
            q_keys=q_keys,
            kv_keys=kv_keys,
        )

    def _cut(self, x, q_block, kv_block):
        """Returns the part of a bias or a mask that one tile reads."""
        if x is None:
            return None
        sizes = [min(n, s) for n, s in zip(x.shape[2:], self.grid.tile_shape, strict=True)]
        cut = lax.dynamic_slice(x, self._corner(x, q_block, kv_block), (*x.shape[:2], *sizes))
        entries = x.shape[0]  # may be symbolic, which len(x) is not
        repeats = self.grid.problem.batch // entries
        if entries == 1 or repeats == 1:
            return cut
        spread = jnp.broadcast_to(cut[:, None], (entries, repeats, *cut.shape[1:]))
        return spread.reshape(-1, *cut.shape[1:])

    def _corner(self, x, q_block, kv_block):
        """Returns the start indices of a tile in a padded bias or mask."""
        starts = zip(x.shape[2:], (q_block, kv_block), self.grid.tile_shape, strict=True)
        zero = jnp.int32(0)
        return zero, zero, *(zero if n == 1 else block * size for n, block, size in starts)


def _sum_to(x, leading):
    """Sums x [B, N, ...] to [Bb, N1, ...]."""
    x = x.reshape(leading[0], -1, *x.shape[1:]).sum(1)
    return x.sum(1, keepdims=True) if leading[1] == 1 else x


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
