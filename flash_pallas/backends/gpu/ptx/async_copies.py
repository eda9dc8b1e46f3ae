"""Copies between device memory and padded tiles in shared memory, by all threads of a warpgroup.

`cp.async` brings 16 bytes at a time, and zeros where it is told to read nothing. What is started
between two calls of `commit` is one group, for which `wait` waits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from .inline import i32_constant, opaque, splat
from .threads import (
    THREADS,
    UNIT,
    UNIT_ELEMENTS,
    assembly,
    device_address,
    less,
    linear,
    shared_address,
    thread,
    where,
)

LONG_ROW = 256  # columns; threads divide longer rows in another way, see _Units
VECTOR_UNIT = 4  # f32 in 16 bytes


def start_copy(source, tile, first, limit, start=None, *, hides_offset: bool):
    """Starts the copy of rows `first` on to a tile: zeros from `limit` on, and before `start`.

    The start of an array is the same for all threads. If each thread computes the offset from
    it first, and ptxas then takes that as it is, the start need not occupy two registers per
    thread through the loop: 8 bytes of the forward's spills, and 4 of the fused backward's on
    8.0.

    Args:
        source: [length, columns] or [outer, inner, columns] in device memory.
        tile: [rows, columns and padding] in shared memory.
        first: row of the array, int32.
        limit: row, int32.
        start: row, int32, or None.
        hides_offset: ptxas takes the offset from the start of the array as it is.
    """
    _call(functools.partial(_start_body, hides_offset), source, tile, first, limit, start)


def start_vector(source, tile, first, count):
    """Starts the copy of f32 elements `first` to `first + count` of a vector in device memory."""
    _call(_start_vector_body, source, tile, first, count)


def commit():
    """Ends a group: of all copies started since the last one."""
    plgpu.inline_mgpu()(_commit_body)()


def wait(pending: int):
    """Waits until all but the newest `pending` groups of this thread have arrived."""
    plgpu.inline_mgpu()(functools.partial(_wait_body, pending))()


def store(target, tile, first, limit, *, hides_offset: bool):
    """Writes a tile to rows `first` on, up to `limit`, in device memory; see start_copy."""
    _call(functools.partial(_store_body, hides_offset), target, tile, first, limit)


def _call(body, array, tile, first, limit, start=None):
    rows = [jnp.int32(x) for x in (first, limit, start) if x is not None]
    scalars = (plgpu.Layout.WG_SPLAT,) * len(rows)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *scalars))(body)
    run(array, tile, *rows)


class _Unit(NamedTuple):
    """16 bytes that a thread copies, at constant offsets from addresses that it has anyway."""

    tile: Any  # i32, address in shared memory
    tile_offset: int
    array: Any  # i64, address in device memory
    array_offset: int
    inside: Any  # i1: the array has it, between start and limit
    exists: Any  # i1: the tile has it; None: it does


class _Units:
    """The units of a tile that a thread copies."""

    def __init__(self, array, tile, bounds: tuple, hides_offset: bool) -> None:
        self.hides_offset = hides_offset
        self.first, self.limit, *self.start = map(splat, bounds)
        self.rows, self.pitch = tile.type.shape
        self.size = mgpu.utils.bitwidth(array.type.element_type) // 8
        self.elements = UNIT // self.size
        self.per_row = (self.pitch - self.elements) // self.elements
        *_, self.inner, self.columns = array.type.shape
        (*strides, unit), _ = array.type.get_strides_and_offset()
        assert unit == 1, "rows must be contiguous"
        self.row_bytes = [self.size * stride for stride in strides]
        # Of rows longer than 256 columns a thread has units below each other, or none. With an
        # address of its own for each unit dK of 448 columns spilled 80 to 500 bytes. Rows of two
        # axes have such addresses all the same, so there every thread has units.
        self.wide = self.per_row > LONG_ROW // UNIT_ELEMENTS and len(strides) == 1
        self.slots = 1 << (self.per_row - 1).bit_length() if self.wide else self.per_row
        i64 = ir.IntegerType.get_signless(64)
        self.array = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(array))
        self.tile = shared_address(tile)

    def units(self):
        """Yields all units of this thread."""
        me, total, count = thread(), self.rows * self.slots, i32_constant(self.slots)
        if THREADS % self.slots == 0 and len(self.row_bytes) == 1:  # they lie below each other
            row, column = arith.divui(me, count), arith.remui(me, count)
            starts = range(0, total, THREADS)
            if not self.wide:
                yield from self._below(row, column, starts)
                return
            # A branch even where every thread takes it, which the compiler cannot see: ptxas
            # fetches no fragments ahead across it, which at head dim 512 took all registers.
            has_units = less(column, i32_constant(self.per_row))
            if self.slots == self.per_row:
                has_units = less(i32_constant(-1), opaque(self.limit))
            with ir.InsertionPoint(scf.IfOp(has_units).then_block):
                yield from self._below(row, column, starts)
                scf.yield_([])
            return
        for start in range(0, total, THREADS):
            unit = arith.addi(me, i32_constant(start))
            row, column = arith.divui(unit, count), arith.remui(unit, count)
            yield from self._below(row, column, [start], first_start=start)

    def _below(self, row, column, starts, first_start: int = 0):
        """Yields, for each start, the unit (start - first_start) / slots rows below `row`."""
        index = arith.addi(self.first, row)
        tile = linear(self.tile, (row, self.size * self.pitch), (column, UNIT))
        zero = arith.constant(ir.IntegerType.get_signless(64), 0)
        offset = linear(zero, *self._row(index), (column, UNIT))
        array = arith.addi(self.array, opaque(offset) if self.hides_offset else offset)
        left = arith.subi(self.limit, index)  # rows below the limit
        if self.columns < self.pitch - self.elements:
            in_array = less(column, i32_constant(self.columns // self.elements))
            left = arith.select(in_array, left, i32_constant(0))
        before = [arith.subi(x, index) for x in self.start]  # rows above the start
        total = self.rows * self.slots
        for start in starts:
            down = (start - first_start) // self.slots
            exists = None
            if start + THREADS > total:
                exists = less(thread(), i32_constant(total - start))
            inside = less(i32_constant(down), left)
            for rows in before:
                inside = arith.andi(inside, less(rows, i32_constant(down + 1)))
            yield _Unit(
                tile=tile,
                tile_offset=down * self.size * self.pitch,
                array=array,
                array_offset=down * self.row_bytes[-1],
                inside=inside,
                exists=exists,
            )

    def _row(self, index):
        """Returns pairs (index, bytes), the sum of whose products is the offset of a row."""
        if len(self.row_bytes) == 1:
            return ((index, self.row_bytes[0]),)
        inner = i32_constant(self.inner)
        places = arith.divui(index, inner), arith.remui(index, inner)
        return zip(places, self.row_bytes, strict=True)


def _start_body(hides_offset: bool, _, source, tile, *bounds):
    for unit in _Units(source, tile, bounds, hides_offset).units():
        size = arith.select(unit.inside, i32_constant(UNIT), i32_constant(0))
        target, origin = f"[$0+{unit.tile_offset}]", f"[$1+{unit.array_offset}]"
        code = f"cp.async.cg.shared.global.L2::128B {target}, {origin}, {UNIT}, $2;"
        operands = unit.tile, unit.array, size
        where(unit.exists, functools.partial(assembly, code, "r,l,r", *operands))


def _commit_body(_):
    assembly("cp.async.commit_group;", "")


def _wait_body(pending: int, _):
    assembly(f"cp.async.wait_group {pending};", "")


def _store_body(hides_offset: bool, _, target, tile, first, limit):
    i32 = ir.IntegerType.get_signless(32)
    four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    for unit in _Units(target, tile, (first, limit), hides_offset).units():
        inside = unit.inside if unit.exists is None else arith.andi(unit.inside, unit.exists)
        with ir.InsertionPoint(scf.IfOp(inside).then_block):
            code = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{unit.tile_offset}];"
            constraints = "=r,=r,=r,=r,r"
            loaded = llvm.inline_asm(four, [unit.tile], code, constraints, has_side_effects=True)
            values = [llvm.extractvalue(i32, loaded, [i]) for i in range(4)]
            code = f"st.global.v4.b32 [$0+{unit.array_offset}], {{$1, $2, $3, $4}};"
            assembly(code, "l,r,r,r,r", unit.array, *values)
            scf.yield_([])


def _start_vector_body(_, source, tile, first, count):
    """Issues the copy with a predicate: no surrounding code would be moved across a branch."""
    element = arith.muli(thread(), i32_constant(VECTOR_UNIT))
    target = linear(shared_address(tile), (element, 4))
    origin = device_address(source, arith.addi(splat(first), element), 4)
    copy = "cp.async.cg.shared.global [$0], [$1], 16;"
    code = f"{{ .reg .pred p; setp.lt.s32 p, $2, $3; @p {copy} }}"
    assembly(code, "r,l,r,r", target, origin, element, splat(count))
