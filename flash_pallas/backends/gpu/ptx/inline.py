"""Code inside kernels that Pallas has no primitive for, written as MLIR or PTX."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from ....core.mask import Limits

# --- Register-level pieces that Pallas has no primitive for, each next to its plain jnp form ------
# Functions that take `interpret` have both forms: the interpreter runs the plain one, the GPU the
# inlined one. Tiles are f32 (rows, cols) in the WGMMA register layout unless a docstring says more.

WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)  # one value per row of a WGMMA tile
COLS = WGMMA.reduce(0)  # one value per column
WARP, WARPGROUP = 32, 128  # threads
PIECE_BYTES = 16  # that one instruction moves
FIRST_NAMED_BARRIER = 8  # above Mosaic's own, one for each of at most 4 warpgroups
LANE_COLS = 8  # columns of a WGMMA tile after which a thread's own columns repeat


# Each limit is one compare of an element's (static) coordinate with a per-thread bound: the compare
# takes an immediate. Comparing iota values instead keeps 32 of them alive through the whole loop
# (128 to 208 bytes of spills in the causal kernels).
_COMPARE = {
    "low": arith.CmpIPredicate.sge,
    "high": arith.CmpIPredicate.sle,
    "rows": arith.CmpIPredicate.slt,
    "cols": arith.CmpIPredicate.slt,
}


def _limit_body(kinds, hidden, _, tile, *bounds):
    row0, col0 = origin(tile.shape, tile.layout)
    limits = []
    for kind, bound in zip(kinds, bounds, strict=True):
        first = {"rows": row0, "cols": col0}.get(kind)
        first = arith.subi(col0, row0) if first is None else first
        limits.append((kind, arith.subi(splat(bound), first)))

    def kept(row, col):
        bits = []
        for kind, limit in limits:
            coordinate = {"rows": row, "cols": col}.get(kind, col - row)
            bits.append(arith.cmpi(_COMPARE[kind], i32_constant(coordinate), limit))
        return functools.reduce(arith.andi, bits)

    return selected(tile, kept, hidden)


def selected(tile, kept, hidden: float):
    """Returns the tile with `hidden` wherever kept(row, column of thread 0), an i1, is false."""
    replacement = f32_constant(hidden)
    registers = tile.registers.copy()
    for index, row, col in coordinates(tile.shape, tile.layout):
        register = registers[index]
        for e in range(elements(register)):
            position = {"dynamic_position": [], "static_position": [e]}
            keep = kept(row, col + e)
            x = vector.extract(register, **position)
            register = vector.insert(arith.select(keep, x, replacement), register, **position)
        registers[index] = register
    return fragmented(registers, tile.layout)


def hide(tile, limits: Limits, interpret: bool, hidden: float = -math.inf):
    """Returns the tile with `hidden` wherever `limits` does not keep it."""
    bounds = {kind: bound for kind, bound in limits._asdict().items() if bound is not None}
    if not bounds:
        return tile
    if interpret:
        return jnp.where(limits.keep(tile.shape), tile, hidden)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, *(plgpu.Layout.WG_SPLAT,) * len(bounds)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA),
    )(functools.partial(_limit_body, tuple(bounds), hidden))
    return run(tile, *map(jnp.int32, bounds.values()))


def _between_body(limited, hidden, _, tile, *bounds):
    i32 = ir.IntegerType.get_signless(32)
    col0 = arith.index_cast(i32, next(iter(tile.layout.thread_idxs(tile.shape)))[1])
    compare = [_COMPARE[kind] for kind in limited]
    by_row = {}
    for index, row, _ in coordinates(tile.shape, tile.layout):
        row_limits = [arith.subi(at(bound.registers[index], 0), col0) for bound in bounds]
        by_row.setdefault(row, row_limits)

    def kept(row, col):
        limits = zip(compare, by_row[row], strict=True)
        bits = [arith.cmpi(predicate, i32_constant(col), limit) for predicate, limit in limits]
        return functools.reduce(arith.andi, bits)

    return selected(tile, kept, hidden)


def hide_outside(tile, low, high, interpret: bool, hidden: float = -math.inf):
    """Returns the tile with `hidden` except where low <= column <= high, with bounds per row.

    Args:
        tile: f32[rows, columns].
        low: int32[rows] in the layout ROWS; None is no limit.
        high: int32[rows] in the layout ROWS; None is no limit.
        interpret: run by the interpreter.
        hidden: what hidden elements become.
    """
    limits = {kind: x for kind, x in (("low", low), ("high", high)) if x is not None}
    if not limits:
        return tile
    bounds = [lax.broadcast_in_dim(x, tile.shape, (0,)) for x in limits.values()]
    if interpret:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        kept = {"low": lax.ge, "high": lax.le}
        for kind, bound in zip(limits, bounds, strict=True):
            tile = jnp.where(kept[kind](column, bound), tile, hidden)
        return tile
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,) * (1 + len(bounds)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA),
    )(functools.partial(_between_body, tuple(limits), hidden))
    return run(tile, *bounds)


def _lane_sums_body(_, tile):
    out_shape = (tile.shape[0], LANE_COLS)
    parts = {}
    for index, row, col in coordinates(tile.shape, tile.layout):
        parts.setdefault((row, col % LANE_COLS), []).append(tile.registers[index])
    registers = np.empty(tile.layout.registers_shape(out_shape), dtype=object)
    for index, row, col in coordinates(out_shape, tile.layout):
        registers[index] = functools.reduce(arith.addf, parts[row, col])
    return fragmented(registers, tile.layout)


def lane_sums(tile, interpret: bool):
    """Computes row sums that stay inside each thread: (rows, cols) -> (rows, 8), no lane exchange.

    The exchange is left to the end of the loop: 4 SHFL and 4 FADD fewer in every step (3-4 % of the
    forward at head dim 64 on H200).
    """
    out_shape = (tile.shape[0], LANE_COLS)
    if interpret:
        return tile.reshape(tile.shape[0], -1, LANE_COLS).sum(axis=1)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(out_shape, jnp.float32, WGMMA)
    )(_lane_sums_body)
    return run(tile)


def _scale_columns_body(_, tile, *scales):
    registers, part_columns = tile.registers.copy(), tile.shape[1] // len(scales)
    for index, _, col in coordinates(tile.shape, tile.layout):
        scale = splat(scales[col // part_columns])
        register = registers[index]
        factor = vector.broadcast(register.type, scale)
        registers[index] = arith.mulf(register, factor)
    return fragmented(registers, tile.layout)


def scale_columns(tile, scales, interpret: bool):
    """Multiplies each of len(scales) equal parts of the columns, 8 or more, by its own scalar."""
    if interpret:
        return tile * jnp.repeat(jnp.stack(scales), tile.shape[1] // len(scales))[None]
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, *(plgpu.Layout.WG_SPLAT,) * len(scales)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA),
    )(_scale_columns_body)
    return run(tile, *scales)


def _warp_grew(old, new, slack):
    """Returns i32, uniform over a warp: 1 if the max of some row grew by more than `slack`."""

    def scalar(x):
        if isinstance(x.type, ir.VectorType):
            return vector.extract(x, dynamic_position=[], static_position=[0])
        return x

    grew = None
    for a, b in zip(old.registers.flat, new.registers.flat, strict=True):
        bit = arith.cmpf(
            arith.CmpFPredicate.OGT, arith.subf(scalar(b), scalar(a)), f32_constant(slack)
        )
        grew = bit if grew is None else arith.ori(grew, bit)
    return of_some_lane(grew)


def _vote_body(slack, _, old, new):
    return mgpu.FragmentedArray.splat(_warp_grew(old, new, slack), (), is_signed=True)


def _pick_body(slack, _, old, new):
    grew = arith.cmpi(arith.CmpIPredicate.ne, _warp_grew(old, new, slack), i32_constant(0))
    registers = old.registers.copy()
    for i in np.ndindex(*registers.shape):
        registers[i] = arith.select(grew, new.registers[i], old.registers[i])
    return fragmented(registers, old.layout)


def lazy_max(old, new, slack: float, interpret: bool):
    """Keeps the old row maxima unless some row of the warp grew by more than `slack` (base 2).

    Returns (maxima, grew: i32 scalar). The softmax is exact whichever maxima are kept: weights only
    stay below 2**slack instead of 1. `grew` is uniform per warp, so it may guard arithmetic but no
    barrier or copy.
    """
    if interpret:
        return new, jnp.int32(1)
    pick = plgpu.inline_mgpu(
        arg_types=(ROWS, ROWS), return_type=plgpu.ShapeDtypeStruct(old.shape, jnp.float32, ROWS)
    )(functools.partial(_pick_body, slack))
    vote = plgpu.inline_mgpu(
        arg_types=(ROWS, ROWS),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(functools.partial(_vote_body, slack))
    return pick(old, new), vote(old, new)


def _some_differ_body(value, _, rows):
    some = None
    for register in rows.registers.flat:
        bit = arith.cmpf(arith.CmpFPredicate.UNE, at(register, 0), f32_constant(value))
        some = bit if some is None else arith.ori(some, bit)
    return mgpu.FragmentedArray.splat(of_some_lane(some), (), is_signed=True)


def some_differ(rows, value: float, interpret: bool):
    """Returns i32, uniform over a warp: 1 if one of its rows, f32 in the layout ROWS, differs."""
    if interpret:
        return jnp.int32(1)
    vote = plgpu.inline_mgpu(
        arg_types=(ROWS,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT)
    )(functools.partial(_some_differ_body, value))
    return vote(rows)


def _exceeds_body(limit, _, sums):
    most = None
    for register in sums.registers.flat:
        for e in range(elements(register)):
            bit = arith.cmpf(arith.CmpFPredicate.UGT, at(register, e), f32_constant(limit))
            most = bit if most is None else arith.ori(most, bit)
    return mgpu.FragmentedArray.splat(of_some_lane(most), (), is_signed=True)


def exceeds(sums, limit: float, interpret: bool):
    """Returns i32, uniform over a warp: 1 if one of its `lane_sums` is above `limit`, or NaN."""
    if interpret:
        return jnp.int32(~(sums <= limit).all())
    vote = plgpu.inline_mgpu(
        arg_types=(WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(functools.partial(_exceeds_body, limit))
    return vote(sums)


def _settle_body(_, tile, never):
    i32 = ir.IntegerType.get_signless(32)
    registers = [llvm.bitcast(i32, register) for register in tile.registers.flat]
    for i in range(0, len(registers), 4):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [splat(never), *registers[i : i + 4]],
            "{ .reg .pred p; setp.lt.s32 p, $0, 0; @p st.shared.v4.b32 [$0], {$1, $2, $3, $4}; }",
            "r,r,r,r,r",
            has_side_effects=True,
        )


def settle(tile, positive, interpret: bool):
    """Forces a 16-bit tile into its registers before the next barrier, not only at its first use.

    It is stored if `positive`, a traced i32, is negative, which it never is; ptxas does not know.
    """
    if not interpret:
        run = plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.Layout.WG_SPLAT))(_settle_body)
        run(tile, jnp.int32(positive))


def _named_barrier_body(operation, threads, _, barrier):
    mgpu.utils.inline_ptx(f"bar.{operation} $0, {threads};", splat(barrier), has_side_effects=True)


def named_barrier(operation: str, barrier, threads: int):
    """Issues PTX `bar.sync` or `bar.arrive` on a hardware barrier.

    Barrier ids 0 to num_threads are Mosaic's.
    """
    run = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(
        functools.partial(_named_barrier_body, operation, threads)
    )
    run(lax.convert_element_type(barrier, jnp.int32))


def _barrier_any_body(barrier, threads, _, bit):
    i32 = ir.IntegerType.get_signless(32)
    code = (
        "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; "
        f"bar.red.or.pred q, {barrier}, {threads}, p; selp.b32 $0, 1, 0, q; }}"
    )
    some = llvm.inline_asm(i32, [splat(bit)], code, "=r,r", has_side_effects=True)
    return mgpu.FragmentedArray.splat(some, (), is_signed=True)


def barrier_any(barrier: int, threads: int, bit, interpret: bool):
    """Returns i32: 1 if one of the threads arrived at this hardware barrier with a nonzero bit."""
    if interpret:
        return bit
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(functools.partial(_barrier_any_body, barrier, threads))
    return run(bit)


def warpgroup_barrier(interpret: bool):
    """Waits until every warp of the warpgroup has arrived here."""
    if not interpret:
        plgpu.inline_mgpu()(lambda _: mgpu.utils.warpgroup_barrier())()


def _unknown_body(_, x):
    return mgpu.FragmentedArray.splat(opaque(splat(x)), (), is_signed=True)


def unknown(x, interpret: bool):
    """Returns the same int32, of which the compiler knows nothing.

    As the end of a loop it keeps a loop of one or a few steps from being unrolled.
    """
    x = jnp.int32(x)
    if interpret:
        return x
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )(_unknown_body)
    return run(x)


# --- Words in device memory, by which CTAs of one launch tell each other what they have written ---
# For single warps, as those of a producer warpgroup.


_on_word = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(plgpu.Layout.WG_SPLAT,) * 2))


def _word(words, index):
    element = arith.index_cast(ir.IndexType.get(), splat(index))
    return mgpu.utils.memref_ptr(mgpu.utils.memref_slice(words, (mgpu.ds(element, 1),)))


def set_bits_body(_, words, index, bits):
    """Writes the instructions of `set_bits` into a kernel."""
    code = "red.release.gpu.global.or.b32 [$0], $1;"
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARP):
        mgpu.utils.inline_ptx(code, _word(words, index), splat(bits), has_side_effects=True)


def set_bits(words, index, bits):
    """Sets bits of words[index], i32 in device memory, as a warp, behind what it has written.

    Copies out of shared memory must be complete before.
    """
    _on_word(set_bits_body)(words, jnp.int32(index), bits)


def await_bits_body(_, words, index, bits):
    """Writes the instructions of `await_bits` into a kernel."""
    i32, word, bits = ir.IntegerType.get_signless(32), _word(words, index), splat(bits)
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARP):
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint(loop.before.blocks.append()):
            code = "ld.acquire.gpu.global.b32 $0, [$1];"
            current = mgpu.utils.inline_ptx(code, word, result_types=i32, has_side_effects=True)
            missing = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(current, bits), bits)
            scf.condition(missing, [])
        with ir.InsertionPoint(loop.after.blocks.append()):
            scf.yield_([])
    mgpu.utils.warp_barrier()


def await_bits(words, index, bits):
    """Waits, as a warp, until words[index] has these bits; sees what was written before each."""
    _on_word(await_bits_body)(words, jnp.int32(index), bits)


def fence_copies_body(_):
    """Writes the instruction of `fence_copies` into a kernel."""
    mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)


def fence_copies():
    """Orders a warp's later copies out of shared memory behind what it has seen, or waited for."""
    plgpu.inline_mgpu()(fence_copies_body)()


# --- Registers of a tile in the WGMMA layout, for code that is written into the kernel as MLIR ----


def coordinates(shape, layout):
    """Yields (register index, row, column) of thread 0's first element in every register."""
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tile_strides = layout.tiling.tile_strides(tuple(strides))
    for index in np.ndindex(*layout.registers_shape(shape)):
        yield index, *divmod(int(np.dot(index, tile_strides)), shape[1])


def origin(shape, layout):
    """Returns the i32 (row, column) of this thread's first element."""
    i32 = ir.IntegerType.get_signless(32)
    row, col = next(iter(layout.thread_idxs(shape)))
    return arith.index_cast(i32, row), arith.index_cast(i32, col)


def i32_constant(x: int):
    """Returns an i32 constant."""
    return arith.constant(ir.IntegerType.get_signless(32), x)


def signed_constant(bits: int) -> int:
    """Returns the int32 that has these 32 bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def f32_constant(x: float):
    """Returns an f32 constant."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))


def opaque(x):
    """Returns the same i32 or i64, unknown to LLVM: sums with it stay where they are."""
    wide = x.type == ir.IntegerType.get_signless(64)
    code, constraints = ("mov.b64 $0, $1;", "=l,l") if wide else ("mov.b32 $0, $1;", "=r,r")
    return llvm.inline_asm(x.type, [x], code, constraints, has_side_effects=True)


def elements(register) -> int:
    """Returns how many elements a register holds."""
    return ir.VectorType(register.type).shape[0]


def splat(array):
    """Returns the one value of a scalar or splat array."""
    return array.registers[()] if array.registers.shape == () else array.registers.flat[0]


def fragmented(registers, layout, is_signed=None):
    """Wraps these registers in a FragmentedArray."""
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def at(register, element: int):
    """Extracts one element of a register."""
    return vector.extract(register, dynamic_position=[], static_position=[element])


def pair(*values):
    """Packs two elements into a register."""
    register = llvm.mlir_undef(ir.VectorType.get((2,), values[0].type))
    for e, value in enumerate(values):
        register = vector.insert(value, register, dynamic_position=[], static_position=[e])
    return register


def of_some_lane(bit):
    """Returns i32, uniform over a warp: 1 if the i1 is set in some lane."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        i32,
        [arith.extui(i32, bit)],
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
        " selp.b32 $0, 1, 0, p; }",
        "=r,r",
        has_side_effects=True,
    )


def filled(shape, layout, value):
    """Returns the registers of a tile whose elements are value(row, column of thread 0)."""
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for index, row, col in coordinates(shape, layout):
        registers[index] = pair(value(row, col), value(row, col + 1))
    return registers


def assembly(result_type, code: str, *operands):
    """Emits PTX without side effects: `code` makes $0 of $1, $2, ..., all of 32 bits."""
    types = [result_type, *[x.type for x in operands]]
    constraints = "=" + ",".join(["f" if isinstance(t, ir.F32Type) else "r" for t in types])
    return llvm.inline_asm(result_type, list(operands), code, constraints, has_side_effects=False)


def _use_zero_body(_):
    zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get_f32(0.0))
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [zero], "// zero $0", "f", has_side_effects=True)


def use_zero(interpret: bool):
    """Keeps a register that holds 0.0 alive up to here.

    LLVM gives the register from which accumulators get their zeros to the last accumulator. ptxas
    then waits for the matmul before it, where that is in flight (C7517): in nested loops, out of
    which LLVM does not hoist the constant. With a use of the zero after the first matmul of the
    last accumulator, ptxas does not wait.
    """
    if not interpret:
        plgpu.inline_mgpu()(_use_zero_body)()
