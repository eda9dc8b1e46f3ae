"""Inputs of score modifiers besides Q, K and V: loaded straight from device memory into registers.

Values of rows (queries, or keys where scores are transposed) are loaded once and kept. Those of
columns and of single elements are loaded at every tile, before its matmuls, which hide the latency.
A bias or mask in the accumulator's layout is read in pieces of 8 neighbouring elements a row, whole
sectors of float32. Where scores are transposed it is read as it lies, element by element.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import scores
from ....core.problem import Operands, Problem
from ....core.scores import TileInputs
from ...gpu import auxiliary_arrays, score_tile
from ...gpu.auxiliary_arrays import AuxiliaryGmem
from ...gpu.ptx import device_tiles, inline


class Place(NamedTuple):
    """Place of a score tile; starts are indices, not positions."""

    batch: Any
    head: Any
    row_start: Any
    column_start: Any
    shape: tuple[int, int]

    @classmethod
    def of(cls, cta, tile, column_block) -> Place:
        """Returns the place of one tile of a CTA that owns a block of rows of one head."""
        starts = cta.block * tile.rows, column_block * tile.columns
        return cls(cta.batch, cta.head, *starts, (tile.rows, tile.columns))

    @property
    def rows(self):
        """Slice of the tile's rows."""
        return pl.ds(self.row_start, self.shape[0])

    @property
    def columns(self):
        """Slice of the tile's columns."""
        return pl.ds(self.column_start, self.shape[1])


class RowFragments(NamedTuple):
    """Registers that last as long as the rows of a tile and its head."""

    vectors: TileInputs = TileInputs()  # int32[rows] each
    keys: Any = None  # int32[rows], of dropout
    bias: Any = None  # f32[rows] or f32 scalar
    mask: Any = None  # likewise
    far: Any = None  # i32 scalar, AuxiliaryGmem.far of this head's group
    scalars: TileInputs = TileInputs()


@dataclasses.dataclass(frozen=True)
class AuxiliaryInputs:
    """Loader of the inputs of score modifiers in one kernel.

    Attributes:
        problem: what is computed.
        q_axis: axis of the kernel's tiles that runs over queries; 0: rows are queries.
        interpret: run under the interpreter.
    """

    problem: Problem
    q_axis: int
    interpret: bool

    def arrays(self, operands: Operands) -> AuxiliaryGmem:
        """Returns the operands as a kernel reads them; vectors are padded beyond the last tile."""
        return auxiliary_arrays.gmem(self.problem, self.q_axis, operands)

    def row_fragments(self, gmem: AuxiliaryGmem, place: Place) -> RowFragments:
        """Loads the inputs that do not depend on place.column_start."""
        read = scores.vectors(self.problem, self.q_axis)
        return RowFragments(
            vectors=TileInputs(**self._vectors(gmem.row_vectors, place, 0, read)),
            keys=self._keys(gmem.row_keys, place, place.rows, 0),
            bias=self._row_values(gmem.bias, self.problem.bias_shape, place),
            mask=self._row_values(gmem.mask, self.problem.mask_shape, place),
            far=self._far(gmem, place),
            scalars=auxiliary_arrays.scalars(gmem, place.batch, place.head),
        )

    def read(
        self, fragments: RowFragments, gmem: AuxiliaryGmem, place: Place, *, ids: bool = True
    ) -> TileInputs:
        """Returns the inputs of the modifiers at one tile.

        Args:
            fragments: result of `row_fragments`.
            gmem: result of `arrays`.
            place: place of the tile.
            ids: vectors hide some of the tile. If they don't, nor does a mask where lists call the
                tile whole.
        """
        problem = self.problem if ids else self.problem.of_whole_tiles
        by_axis = lambda rows, columns: (columns, rows) if self.q_axis else (rows, columns)
        read = [scores.vectors(problem, axis, hides=ids) for axis in (0, 1)]
        columns = self._vectors(gmem.column_vectors, place, 1, read[1 - self.q_axis])
        vectors = fragments.vectors._asdict() | columns
        vectors = {name: vectors[name] for names in read for name in names}
        column_keys = self._keys(gmem.column_keys, place, place.columns, 1)
        q_keys, kv_keys = by_axis(fragments.keys, column_keys)
        mask = self._wide(fragments.mask, gmem.mask, problem.mask_shape, place)
        shift, query = None, place.column_start if self.q_axis else place.row_start
        if fragments.far is not None:
            far = fragments.far
            shift = score_tile.row_shift(self.problem, gmem, far, place.head, query, some=far)
        inputs = fragments.scalars._replace(
            **vectors,
            q_keys=q_keys,
            kv_keys=kv_keys,
            mask=None if mask is None else mask.astype(jnp.float32) != 0.0,
            shift=shift,
        )
        if (bias_shape := self.problem.bias_shape) is None:
            return inputs
        read_bias = lambda bias_place: self._wide(fragments.bias, gmem.bias, bias_shape, bias_place)
        # The barrier makes the second read load the bias anew, so that registers need not keep it.
        again = lambda: read_bias(
            place._replace(row_start=lax.optimization_barrier(place.row_start))
        )
        return score_tile.with_bias(self.problem, inputs, read_bias(place), again)

    def _far(self, gmem: AuxiliaryGmem, place: Place):
        if gmem.far is None:
            return None
        return gmem.far[place.batch, lax.div(jnp.int32(place.head), jnp.int32(self.problem.group))]

    def _entry(self, shape, place: Place):
        return auxiliary_arrays.entry(self.problem, shape, place.batch, place.head)

    def _vector(self, ref, entry, elements, axis: int) -> Any:
        """Loads one value for each row (axis 0) or column (1) of a tile, or returns None."""
        if ref is None:
            return None
        return load_vector(ref.at[(*entry, elements)], axis)

    def _vectors(self, refs, place: Place, axis: int, read: tuple[str, ...]) -> dict[str, Any]:
        """Loads those vectors of a tile's rows (axis 0) or columns (1) that are in `read`."""
        names = scores.vectors(self.problem, axis ^ self.q_axis)
        elements = (place.rows, place.columns)[axis]
        return {
            name: load_vector(ref.at[place.batch, elements], axis)
            for name, ref in zip(names, refs, strict=True)
            if name in read
        }

    def _keys(self, ref, place: Place, elements, axis: int):
        if ref is None:
            return None
        shared = ref.shape[0] == 1 and ref.shape[1] == 1
        entry = (0, 0) if shared else (place.batch, place.head)
        return self._vector(ref, entry, elements, axis)

    def _row_values(self, ref, shape, place: Place):
        kind = auxiliary_arrays.kind(shape, self.q_axis)
        if kind == "scalar":
            return ref[(*self._entry(shape, place), 0)]
        if kind == "rows":
            return self._vector(ref, self._entry(shape, place), place.rows, 0)
        return None

    def _wide(self, row_values, ref, shape, place: Place):
        """Returns a bias or mask over a tile, in its dtype; None if there is none."""
        kind = auxiliary_arrays.kind(shape, self.q_axis)
        if kind is None:
            return None
        if kind in ("rows", "scalar"):
            return lax.broadcast_in_dim(row_values, place.shape, (0,) if kind == "rows" else ())
        entry = self._entry(shape, place)
        if kind == "columns":
            vector = load_vector(ref.at[(*entry, place.columns)], 1)
            return lax.broadcast_in_dim(vector, place.shape, (1,))
        return load_tile(ref.at[entry], place, self.q_axis, self.interpret)


def load_vector(ref, axis: int):
    """Loads a vector, one element for each row (axis 0) or column (1) of a tile, into registers.

    It lies in device memory, or in the fused backward in shared memory.
    """
    layout = inline.COLS if axis else inline.ROWS
    return plgpu.load(ref, layout=layout, optimized=False)


def load_tile(ref, place: Place, q_axis: int, interpret: bool):
    """Loads a tile of [T, S] in device memory, in its dtype; beyond an end it may be anything."""
    starts = place.row_start, place.column_start
    return device_tiles.load(ref, starts, place.shape, q_axis, interpret)
