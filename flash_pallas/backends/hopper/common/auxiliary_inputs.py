"""Inputs of score modifiers besides Q, K and V: from device memory into registers.

A kernel holds tiles of scores whose rows stay with a warpgroup (queries in the forward and dQ
kernels, keys where scores are transposed) and whose columns stream by. So an input is one of

    scalar   one per (batch entry, head): slope, sink, dropout key, what score_mod captured
    rows     one per row, read once: segment ids, positions, a bias the same for all columns
    columns  one per column, streamed with K (or Q): the same, or a bias the same for all rows
    tile     one per element, streamed likewise: a bias or mask with both axes

Everything that a call lacks is None here and leaves no trace in the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.problem import Operands, Problem
from ....core.scores import HIDING, TileInputs, vectors
from ...gpu import auxiliary_arrays, score_tile
from ...gpu.auxiliary_arrays import MASK_DTYPE, AuxiliaryGmem
from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.ptx import infinities, inline
from .pipeline import row_buffer, tile_buffer


class Streamed(NamedTuple):
    """Shared memory of streamed inputs, one slot per stage of the ring that they travel with."""

    vectors: tuple = ()  # int32[stages, columns] each, as AuxiliaryGmem.column_vectors
    keys: Any = None  # int32[stages, columns], of dropout
    bias: Any = None  # f32[stages, columns], or [stages, queries, keys]
    mask: Any = None  # as bias


@dataclasses.dataclass(frozen=True)
class AuxiliaryInputs:
    """The auxiliary inputs of one kernel: what streams, what registers keep, and how it reads them.

    Attributes:
        problem: what is computed.
        q_axis: which axis of its tiles runs over queries; 0: rows are queries.
    """

    problem: Problem
    q_axis: int

    def arrays(self, operands: Operands) -> AuxiliaryGmem:
        """Returns the operands as the kernel reads them."""
        return auxiliary_arrays.gmem(self.problem, self.q_axis, operands)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of what streams: vectors, and the other fields of Streamed that there are."""
        names = self.column_vectors + ("keys",) * self.drops
        for name, shape in (("bias", self.problem.bias_shape), ("mask", self.problem.mask_shape)):
            if shape is not None and self.kind(shape) in _STREAMED:
                names += (name,)
        return names

    @property
    def copies(self) -> int:
        """Number of further copies per stage: arrivals to add to the ring's full barrier."""
        return len(self.streams)

    def kind(self, shape) -> str | None:
        """Returns "scalar", "rows", "columns", "tile" or None for a bias or mask of this shape."""
        return auxiliary_arrays.kind(shape, self.q_axis)

    def buffers(self, stages: int, rows: int, columns: int) -> Streamed | None:
        """Returns shared memory for `rows` rows, of all warpgroups together, and `columns`.

        Returns None where nothing streams.
        """
        if not self.streams:
            return None
        tile = (rows, columns)[:: -1 if self.q_axis else 1]

        def wide(name, shape, dtype):
            if name not in self.streams:
                return None
            if self.kind(shape) == "columns":
                return row_buffer((stages, columns))
            return tile_buffer((stages, *tile), dtype)

        problem = self.problem
        return Streamed(
            vectors=tuple(plgpu.SMEM((stages, columns), jnp.int32) for _ in self.column_vectors),
            keys=plgpu.SMEM((stages, columns), jnp.int32) if self.drops else None,
            bias=wide("bias", problem.bias_shape, problem.bias_dtype),
            mask=wide("mask", problem.mask_shape, MASK_DTYPE),
        )

    @property
    def column_vectors(self) -> tuple[str, ...]:
        """Names of the vectors of columns, in the order of AuxiliaryGmem.column_vectors."""
        return vectors(self.problem, 1 - self.q_axis)

    @property
    def drops(self) -> bool:
        """True if there is dropout."""
        return "dropout_keys" in self.problem.features

    # --- the producer ----------------------------------------------------------------------------

    def load(
        self,
        gmem: AuxiliaryGmem,
        smem: Any,
        slot,
        barrier,
        place: Place,
        shared: str | None = None,
    ):
        """Starts the copies of one stage; each arrives once on `barrier` (full.at[slot]).

        Args:
            gmem: source of the copies.
            smem: destination of the copies.
            slot: slot of the ring.
            barrier: mbarrier to arrive on.
            place: place of the tile; its row_start and rows are those of all warpgroups together.
            shared: `collective_axes` of a bias.
        """
        for vector, target in zip(gmem.column_vectors, smem.vectors if smem else (), strict=True):
            source = vector.at[place.batch, pl.ds(place.column_start, place.columns)]
            plgpu.copy_gmem_to_smem(source, target.at[slot], barrier)
        if self.drops:
            source = self.keys_at(gmem.column_keys, place, place.column_start, place.columns)
            plgpu.copy_gmem_to_smem(source, smem.keys.at[slot], barrier)
        for name, shape in (("bias", self.problem.bias_shape), ("mask", self.problem.mask_shape)):
            if name in self.streams:
                source = self.source(getattr(gmem, name), shape, place)
                target = getattr(smem, name).at[slot]
                axes = shared if name == "bias" else None
                plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=axes)

    def keys_at(self, ref, place: Place, start, length: int):
        """Returns the ref of dropout's keys of one tile's rows or columns."""
        shared = ref.shape[0] == 1 and ref.shape[1] == 1
        entry, head = (0, 0) if shared else (place.batch, place.head)
        return ref.at[entry, head, pl.ds(start, length)]

    def source(self, ref, shape, place: Place):
        """Returns the ref of a streamed bias or mask of one tile."""
        columns = pl.ds(place.column_start, place.columns)
        rows = pl.ds(place.row_start, place.rows)
        entry, head = self.entry(shape, place)
        if self.kind(shape) == "columns":
            return ref.at[entry, head, columns]
        return ref.at[(entry, head, *((columns, rows) if self.q_axis else (rows, columns)))]

    def entry(self, shape, place: Place):
        """Returns (batch entry, head) of a bias or mask that may be shared between several."""
        return auxiliary_arrays.entry(self.problem, shape, place.batch, place.head)

    # --- a compute warpgroup ---------------------------------------------------------------------

    def fragments(self, gmem: AuxiliaryGmem, place: Place) -> TileInputs:
        """Loads the row fragments: the inputs that registers keep for a warpgroup's rows.

        What belongs to rows or to the head is there, a bias or mask as f32[64] or a scalar; what
        streams is None. place.row_start is that of the warpgroup's own 64 rows.
        """
        return self.fragments_of_head(self.fragments_of_rows(gmem, place), gmem, place)

    def fragments_of_rows(self, gmem: AuxiliaryGmem, place: Place) -> TileInputs:
        """Loads the row fragments that are the same for every head."""
        rows = pl.ds(place.row_start, WARPGROUP_ROWS)
        named = zip(vectors(self.problem, self.q_axis), gmem.row_vectors, strict=True)
        loaded: dict[str, Any] = {
            name: _load_rows(vector.at[place.batch, rows]) for name, vector in named
        }
        if self.q_axis:
            loaded["kv_keys"] = self.row_keys(gmem, place)
        return TileInputs(**loaded)

    def row_keys(self, gmem: AuxiliaryGmem, place: Place):
        """Loads dropout's keys of the rows; None without dropout."""
        if not self.drops:
            return None
        return _load_rows(self.keys_at(gmem.row_keys, place, place.row_start, WARPGROUP_ROWS))

    def fragments_of_head(
        self, fragments: TileInputs, gmem: AuxiliaryGmem, place: Place
    ) -> TileInputs:
        """Returns the row fragments with what belongs to place.head."""
        if not self.q_axis:
            fragments = fragments._replace(q_keys=self.row_keys(gmem, place))
        fragments = fragments._replace(
            bias=self.row_value(gmem.bias, self.problem.bias_shape, place),
            mask=self.row_value(gmem.mask, self.problem.mask_shape, place),
        )
        scalars = auxiliary_arrays.scalars(gmem, place.batch, place.head)
        return fragments._replace(
            slope=scalars.slope,
            score_params=scalars.score_params,
            mask_params=scalars.mask_params,
            dropout_key=scalars.dropout_key,
        )

    def far(self, gmem: AuxiliaryGmem, batch, head):
        """Returns AuxiliaryGmem.far of a query head, or None."""
        if gmem.far is None:
            return None
        return gmem.far[batch, lax.div(jnp.int32(head), jnp.int32(self.problem.group))]

    def row_value(self, ref, shape, place: Place):
        """Loads a bias or mask into registers; None if it streams or is absent."""
        kind = auxiliary_arrays.kind(shape, self.q_axis)
        if kind not in ("rows", "scalar"):
            return None
        entry, head = self.entry(shape, place)
        if kind == "scalar":
            return ref[entry, head, 0]
        return _load_rows(ref.at[entry, head, pl.ds(place.row_start, WARPGROUP_ROWS)])

    def inputs(
        self, fragments: TileInputs, smem, slot, shape, rows, *, ids: bool = True
    ) -> TileInputs:
        """Returns the inputs of the modifiers at one tile.

        Args:
            fragments: row fragments.
            smem: the stages, Streamed; None where nothing streams.
            slot: slot of the stage that has arrived.
            shape: shape of the warpgroup's tile.
            rows: the warpgroup's rows within the streamed tile (a pl.ds).
            ids: vectors hide something of the tile.
        """
        columns, tile_inputs = ("q" if self.q_axis else "kv"), {}
        read = vectors(self.problem, 1 - self.q_axis, hides=ids)
        if not ids:
            tile_inputs |= dict.fromkeys(HIDING)
        for name, vector in zip(self.column_vectors, smem.vectors if smem else (), strict=True):
            if name in read:
                tile_inputs[name] = plgpu.load(vector.at[slot], layout=inline.COLS)
        if self.drops:
            tile_inputs[f"{columns}_keys"] = plgpu.load(smem.keys.at[slot], layout=inline.COLS)
        if (size := self.problem.bias_shape) is not None:
            streamed = None if smem is None else smem.bias
            wide = functools.partial(self.wide, fragments.bias, streamed, size)
            # With the barrier it is read from shared memory again, not kept in registers.
            again = lambda: wide(lax.optimization_barrier(slot), shape, rows)
            some = None
            if smem is not None and self.kind(size) == "columns":
                some = functools.partial(infinities.some_infinite, smem.bias.at[slot])
            bias = wide(slot, shape, rows)
            fragments = score_tile.with_bias(self.problem, fragments, bias, again, some)
        if (size := self.problem.mask_shape) is not None:
            streamed = None if smem is None else smem.mask
            mask = self.wide(fragments.mask, streamed, size, slot, shape, rows)
            tile_inputs["mask"] = mask.astype(jnp.float32) != 0.0
        return fragments._replace(**tile_inputs)

    def wide(self, row_values, smem, size, slot, shape, rows):
        """Returns a bias or mask over the warpgroup's tile, in its dtype."""
        kind = self.kind(size)
        if kind in ("rows", "scalar"):
            return lax.broadcast_in_dim(row_values, shape, (0,) if kind == "rows" else ())
        if kind == "columns":
            vector = plgpu.load(smem.at[slot], layout=inline.COLS)
            return lax.broadcast_in_dim(vector, shape, (1,))
        if self.q_axis == 0:
            return plgpu.load(smem.at[slot, rows], layout=inline.WGMMA)
        return _load_transposed(smem.at[slot, :, rows].transpose((1, 0)))


class Place(NamedTuple):
    """Place of a tile; starts are indices, not positions."""

    batch: Any
    head: Any
    row_start: Any
    column_start: Any
    rows: int
    columns: int


_STREAMED = ("columns", "tile")


def _load_transposed(ref):
    """Loads a tile whose columns are contiguous; in 16 bits ldmatrix transposes it on the way."""
    if ref.dtype.itemsize == 2:
        return plgpu.load(ref, layout=inline.WGMMA)
    tile = plgpu.load(ref, layout=plgpu.Layout.WGMMA_TRANSPOSED)
    return plgpu.layout_cast(tile, inline.WGMMA)


def _load_rows(ref):
    return plgpu.load(ref, layout=inline.ROWS, optimized=False)


# --- Calls that ask for so much that score tiles of the usual size lack registers -----------------


def wants_narrow_tiles(problem: Problem) -> bool:
    """Returns whether float32 score tiles 64 wide lack registers: 140 to 300 bytes of spills."""
    wide = max(problem.head_dim, problem.v_head_dim) > 64
    return problem.dtype == np.float32 and wide and many(modifiers(problem))


def many(asked: set[str]) -> bool:
    """Returns whether so much is asked for that tiles of the usual size spill."""
    return "mask_mod" in asked or len(asked) > 2


def modifiers(problem: Problem) -> set[str]:
    """Returns the names of what the call asks for that takes registers."""
    arrays = {"bias", "mask", "alibi_slopes", "dropout_keys", "kv_segments", "q_first", "q_last"}
    return (arrays & problem.features) | (problem.spec.modifiers - {"dropout_rate"})
