"""Tiles in shared memory, the copies that fill and drain them, and how these are ordered.

A row of a tile is padded by 16 bytes, so that the eight rows that `ldmatrix` reads at once lie in
different banks: a row of a multiple of 32 bytes plus 16 is an odd number of 16-byte units. Copies
are `cp.async` of 16 bytes, which writes zeros where it is told to read nothing: zero padding for
rows past an end, whatever lies there, and for columns that the array does not have.

Under the interpreter a tile is NaN from `start` to `arrived`, so a read that comes too early, or of
a tile that is already being filled again, is a NaN in the result. It cannot show warps that
overtake each other; the barrier that keeps them together is in `arrived` and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from ....core.decode import DecodeProblem
from ....core.integers import round_up
from ....core.problem import Problem
from ...gpu.ptx import inline
from ...gpu.ptx.inline import i32_constant, opaque, splat

# --- threads, addresses and inline PTX -----------------------------------------------------------

THREADS = 128  # of a warpgroup
WARP = 32


def thread():
    """Returns the i32 index of this thread in its warpgroup, hidden from the compiler.

    Addresses computed from it are therefore computed again in every step: those of all copies and
    matmuls of a step would take 20 to 40 registers.
    """
    return opaque(arith.remui(mgpu.utils.thread_idx(), i32_constant(THREADS)))


def shared_address(ref):
    """Returns the i32 address at which a ref of shared memory starts."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def device_address(ref, index, size: int):
    """Returns the i64 address of element `index` (i32) of a ref of device memory.

    Args:
        ref: of device memory.
        index: i32.
        size: bytes of an element.
    """
    i64 = ir.IntegerType.get_signless(64)
    return linear(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), (index, size))


def linear(base, *terms):
    """Computes base + x * factor summed over all terms, in the type of the base; x is i32."""
    for x, factor in terms:
        if x.type != base.type:
            x = arith.extsi(base.type, x)
        factor = arith.constant(base.type, factor)
        base = arith.addi(base, arith.muli(x, factor))
    return base


def less(x, y):
    """Returns the i1 x < y, signed."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def where(condition, run):
    """Emits run() for threads for which the i1 holds; None: for all threads."""
    if condition is None:
        run()
        return
    with ir.InsertionPoint(scf.IfOp(condition).then_block):
        run()
        scf.yield_([])


def assembly(code: str, constraints: str, *operands):
    """Emits PTX that has no result."""
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(operands), code, constraints, has_side_effects=True)


# --- tiles, and copies by all warpgroups of a CTA ------------------------------------------------


class Warpgroups(NamedTuple):
    """All warpgroups of a CTA, as one of them sees them.

    Attributes:
        interpret: run by the interpreter.
        size: number of warpgroups.
        rank: index of this warpgroup.
        barrier: an mbarrier at which all of them arrive. The interpreter has no named barriers.
    """

    interpret: bool
    size: int = 1
    rank: Any = 0
    barrier: Any = None

    def sync(self, bit=None) -> Any:
        """Waits until all warps of all warpgroups have arrived here.

        Args:
            bit: i32, uniform over a warp; only with one warpgroup. If given, the result is 1 if
                some warp arrived with a nonzero bit.
        """
        if bit is not None:
            if self.size > 1:
                raise AssertionError("warps of one warpgroup agree on a bit, no others")
            return inline.barrier_any(inline.FIRST_NAMED_BARRIER, 128, bit, self.interpret)
        if self.size == 1:
            inline.warpgroup_barrier(self.interpret)
        elif self.interpret:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
        else:
            inline.named_barrier("sync", inline.FIRST_NAMED_BARRIER, 128 * self.size)
        return None

    def part(self, count: int):
        """Returns (start, size) of this warpgroup's share of `count` rows or columns."""
        size = count // self.size
        return self.rank * size, size

    def rows(self, tile):
        """Returns (first row, ref) of this warpgroup's share of a tile."""
        if self.size == 1:
            return 0, tile
        first, size = self.part(tile.shape[0])
        return first, tile.at[pl.ds(first, size)]


UNIT = 16  # bytes that a thread copies at once
UNIT_ELEMENTS = UNIT // 2  # all operands of matmuls have 16 bits
DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))
HEAD_DIM_MULTIPLE = UNIT_ELEMENTS  # rows are copied in whole units
VECTOR_UNIT = 4  # f32 in 16 bytes


def buffer(shape, dtype):
    """Allocates shared memory for tiles [..., rows, columns], columns a multiple of 16.

    The dtype has 16 bits, or 8 for what is widened before matmuls read it.
    """
    *outer, columns = shape
    if columns % 16:
        raise AssertionError(f"{shape=}: columns must be a multiple of 16")
    return plgpu.SMEM((*outer, columns + UNIT // jnp.dtype(dtype).itemsize), dtype)


WIDEST_ALONE = 256  # head dim up to which registers of one warpgroup hold 64 rows of O or of dQ


def warpgroups_of(problem: Problem | DecodeProblem) -> int:
    """Returns the number of warpgroups that share the head dims; see common/shares.py."""
    return 1 if max(problem.head_dim, problem.v_head_dim) <= WIDEST_ALONE else 2


def widths(problem: Problem | DecodeProblem) -> tuple[int, int]:
    """Returns the columns of tiles of Q and K, and those of V and O."""
    unit = 16 * warpgroups_of(problem)
    return round_up(problem.head_dim, unit), round_up(problem.v_head_dim, unit)


def columns_of(tile) -> int:
    """Returns the columns of a tile without the padding of its rows."""
    return tile.shape[-1] - UNIT_ELEMENTS


class Copy(NamedTuple):
    """Rows `first` to `first + rows of the tile` of an array, zeros from `limit` on.

    And before `start`, where there is one.

    Attributes:
        source: [length, columns] in device memory; columns are whole units of 16 bytes, not above
            the tile's.
            Or [outer, inner, columns], whose row r is [r // inner, r % inner].
        tile: [rows, columns] in shared memory, of `buffer`.
        first: row of the array, int32.
        limit: int32; rows from there on are not read. Rows of the tile below it exist.
        start: int32; rows before it are not read. None: all are.
    """

    source: Any
    tile: Any
    first: Any
    limit: Any
    start: Any = None


class Vector(NamedTuple):
    """Elements `first` to `first + count` of an array, which a warpgroup copies alone.

    Attributes:
        source: f32[length] in device memory, which starts at a multiple of 16 bytes.
        tile: f32[size] in shared memory, size a multiple of 4 and at most 512.
        first: int32, a multiple of 4.
        count: int32: `size`, or 0 to copy nothing.
    """

    source: Any
    tile: Any
    first: Any
    count: Any


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies between device memory and tiles, by all threads of a CTA.

    Attributes:
        interpret: run by the interpreter.
        warpgroups: those of the CTA, which have equal parts of the rows of each tile.
        hides_offsets: see `_body`.
    """

    interpret: bool
    warpgroups: Warpgroups
    hides_offsets: bool = True

    def start(self, *copies: Copy | Vector):
        """Starts copies, which together are one group for `arrived`.

        Every warp must have read what was in the tiles before: the last `arrived` or `sync` comes
        after these reads.
        """
        for copy in map(self._own, copies):
            if self.interpret:
                of_floats = jnp.issubdtype(copy.tile.dtype, jnp.floating)
                wrong = jnp.nan if of_floats else 127
                copy.tile[...] = jnp.full(copy.tile.shape, wrong, copy.tile.dtype)
            else:
                vector = isinstance(copy, Vector)
                _call(_start_vector_body if vector else self._body(_start_body), *copy)
        if self.interpret:
            return
        plgpu.inline_mgpu()(_commit_body)()

    def arrived(self, *copies: Copy | Vector, pending: int = 0, bit=None):
        """Waits until all but the newest `pending` groups have arrived, for every thread.

        Args:
            copies: those of the groups that now arrive, as they were started.
            pending: groups that were started after them.
            bit: see Warpgroups.sync, whose result is returned.
        """
        if self.interpret:
            for copy in map(self._own, copies):
                _fill(copy)
        else:
            plgpu.inline_mgpu()(functools.partial(_wait_body, pending))()
        return self.sync(bit)

    def _body(self, write):
        """Returns the function that writes a copy into the kernel.

        The start of an array is the same for all threads. If each thread computes the offset from
        it first, and ptxas then takes that as it is, the start need not occupy two registers per
        thread through the loop: 8 bytes of the forward's spills, and 4 of the fused backward's on
        8.0.
        """
        return functools.partial(write, self.hides_offsets)

    def _own(self, copy):
        if isinstance(copy, Vector):
            return copy
        down, tile = self.warpgroups.rows(copy.tile)
        return copy._replace(tile=tile, first=copy.first + down)

    def sync(self, bit=None):
        """Waits until all warps have arrived here; see Warpgroups.sync."""
        return self.warpgroups.sync(bit)

    def store(self, tile, target, first, limit):
        """Copies a tile to rows `first` on of [length, columns] in device memory, up to `limit`.

        Under the interpreter the array has all rows of the tile.
        """
        down, tile = self.warpgroups.rows(tile)
        first = first + down
        if self.interpret:
            rows, columns = tile.shape[0], target.shape[1]
            target[pl.ds(first, rows)] = tile[:, pl.ds(0, columns)]
            return
        _call(self._body(_store_body), target, tile, first, limit)


class Stream(NamedTuple):
    """Prefetch of the tiles that a loop streams past, step by step.

    A kernel's step says when: it waits for the tiles that a matmul reads, and starts the copies of
    later ones where warps have read what lies in their slots. Before the loop the tiles of step 0
    are started, so that copies are always one step ahead.

    Attributes:
        copies: copies of tiles by the warpgroups of the CTA.
        names: names of a step's tiles.
        slots: number of steps, 1 or 2, whose tiles have places in shared memory.
        load: (name, n, slot) -> the copies of a tile of the n-th step to its slot, which read
            nothing if there is no such step.
    """

    copies: Copies
    names: tuple[str, ...]
    slots: int
    load: Callable[[str, Any, Any], tuple[Copy | Vector, ...]]

    def slot(self, n):
        """Returns the slot of the tiles of the n-th step."""
        return lax.bitwise_and(jnp.int32(n), jnp.int32(1)) if self.slots == 2 else 0

    def start(self, n, *names: str):
        """Starts copies of the n-th step as one group: of the tiles `names`, or of all."""
        self.copies.start(*self._of(n, names))

    def wait(self, n, *names: str, pending: int = 0, bit=None):
        """Waits for tiles of the n-th step, all by default; see Copies.arrived."""
        return self.copies.arrived(*self._of(n, names), pending=pending, bit=bit)

    def end(self):
        """Waits, after the loop, for what was started for a step that does not exist."""
        self.copies.arrived()

    def _of(self, n, names: tuple[str, ...]) -> list[Copy | Vector]:
        slot = self.slot(n)
        return [copy for name in names or self.names for copy in self.load(name, n, slot)]


def _call(body, array, tile, first, limit, start=None):
    rows = [jnp.int32(x) for x in (first, limit, start) if x is not None]
    scalars = (plgpu.Layout.WG_SPLAT,) * len(rows)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *scalars))(body)
    run(array, tile, *rows)


def _fill(copy: Copy | Vector):
    if isinstance(copy, Vector):
        copy.tile[...] = copy.source[pl.ds(copy.first, copy.tile.shape[0])]
        return
    rows, columns = copy.tile.shape[0], copy.source.shape[-1]
    row = jnp.int32(copy.first) + jnp.arange(rows, dtype=jnp.int32)
    found = jnp.take(copy.source[...].reshape(-1, columns), row, axis=0, mode="clip")
    read = row < copy.limit
    if copy.start is not None:
        read = read & (row >= copy.start)
    found = jnp.where(read[:, None], found, jnp.zeros_like(found))
    widths = ((0, 0), (0, copy.tile.shape[1] - columns))
    copy.tile[...] = jnp.pad(found, widths)


# --- what is written into the kernel -------------------------------------------------------------


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
        self.wide = self.per_row > WIDEST_ALONE // UNIT_ELEMENTS and len(strides) == 1
        self.slots = 1 << (self.per_row - 1).bit_length() if self.wide else self.per_row
        i64 = ir.IntegerType.get_signless(64)
        self.array = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(array))
        self.tile = shared_address(tile)

    def each(self):
        """Yields all units of this thread."""
        me, total, count = thread(), self.rows * self.slots, i32_constant(self.slots)
        if THREADS % self.slots == 0 and len(self.row_bytes) == 1:  # they lie below each other
            row, column = arith.divui(me, count), arith.remui(me, count)
            starts = range(0, total, THREADS)
            if not self.wide:
                yield from self._below(row, column, starts)
                return
            # A branch also where every thread takes it, of which the compiler does not know: past
            # it ptxas fetches no fragments ahead, which at head dim 512 took all registers.
            there = less(column, i32_constant(self.per_row))
            if self.slots == self.per_row:
                there = less(i32_constant(-1), opaque(self.limit))
            with ir.InsertionPoint(scf.IfOp(there).then_block):
                yield from self._below(row, column, starts)
                scf.yield_([])
            return
        for start in range(0, total, THREADS):
            unit = arith.addi(me, i32_constant(start))
            row, column = arith.divui(unit, count), arith.remui(unit, count)
            yield from self._below(row, column, [start], at=start)

    def _below(self, row, column, starts, at: int = 0):
        """Yields, for each start, the unit (start - at) / (slots of a row) rows below `row`."""
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
            down = (start - at) // self.slots
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
    for unit in _Units(source, tile, bounds, hides_offset).each():
        size = arith.select(unit.inside, i32_constant(UNIT), i32_constant(0))
        to, of = f"[$0+{unit.tile_offset}]", f"[$1+{unit.array_offset}]"
        code = f"cp.async.cg.shared.global.L2::128B {to}, {of}, {UNIT}, $2;"
        operands = unit.tile, unit.array, size
        where(unit.exists, functools.partial(assembly, code, "r,l,r", *operands))


def _commit_body(_):
    assembly("cp.async.commit_group;", "")


def _wait_body(pending: int, _):
    assembly(f"cp.async.wait_group {pending};", "")


def _store_body(hides_offset: bool, _, target, tile, first, limit):
    i32 = ir.IntegerType.get_signless(32)
    four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    for unit in _Units(target, tile, (first, limit), hides_offset).each():
        inside = unit.inside if unit.exists is None else arith.andi(unit.inside, unit.exists)
        with ir.InsertionPoint(scf.IfOp(inside).then_block):
            code = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{unit.tile_offset}];"
            constraints = "=r,=r,=r,=r,r"
            found = llvm.inline_asm(four, [unit.tile], code, constraints, has_side_effects=True)
            values = [llvm.extractvalue(i32, found, [i]) for i in range(4)]
            code = f"st.global.v4.b32 [$0+{unit.array_offset}], {{$1, $2, $3, $4}};"
            assembly(code, "l,r,r,r,r", unit.array, *values)
            scf.yield_([])


def _start_vector_body(_, source, tile, first, count):
    """Issues the copy with a predicate: no surrounding code would be moved across a branch."""
    element = arith.muli(thread(), i32_constant(VECTOR_UNIT))
    to = linear(shared_address(tile), (element, 4))
    of = device_address(source, arith.addi(splat(first), element), 4)
    copy = "cp.async.cg.shared.global [$0], [$1], 16;"
    code = f"{{ .reg .pred p; setp.lt.s32 p, $2, $3; @p {copy} }}"
    assembly(code, "r,l,r,r", to, of, element, splat(count))
