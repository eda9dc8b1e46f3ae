"""Register-level pieces that Pallas has no primitive for, each with its plain meaning beside it.

Every function takes `interpret`: the interpreter runs the plain jnp form, the GPU the inlined one.
All tiles are f32 (rows, cols) in the WGMMA register layout.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from ...core import dropout
from ...core.tile import Limits

WGMMA = plgpu.Layout.WGMMA
ROWS = WGMMA.reduce(1)  # one value per row of a WGMMA tile
COLS = WGMMA.reduce(0)  # one value per column
LANE_COLS = 8  # columns of a WGMMA tile after which a thread's own columns repeat


def _coordinates(shape, layout):
    """(register index, row, column) of thread 0's first element in every register of a tile."""
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tile_strides = layout.tiling.tile_strides(tuple(strides))
    for index in np.ndindex(*layout.registers_shape(shape)):
        linear = sum(i * s for i, s in zip(index, tile_strides, strict=True))
        yield index, linear // shape[1], linear % shape[1]


def _i32(x: int):
    return arith.constant(ir.IntegerType.get_signless(32), x)


def _f32(x: float):
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))


def _elements(register) -> int:
    return ir.VectorType(register.type).shape[0]


def _splat(array):
    return array.registers[()] if array.registers.shape == () else array.registers.flat[0]


def _fragmented(registers, layout, is_signed=None):
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


# Each limit is one compare of an element's (static) coordinate with a per-thread bound: the compare
# takes an immediate. Comparing iota values instead keeps 32 of them alive through the whole loop
# (128 to 208 bytes of spills in the causal kernels).
_COMPARE = {
    "low": (lambda row, col: col - row, "sge"),
    "high": (lambda row, col: col - row, "sle"),
    "rows": (lambda row, col: row, "slt"),
    "cols": (lambda row, col: col, "slt"),
}


def _limit_body(kinds, _, tile, *bounds):
    i32 = ir.IntegerType.get_signless(32)
    row0, col0 = (arith.index_cast(i32, x) for x in next(iter(tile.layout.thread_idxs(tile.shape))))
    limits = []
    for kind, bound in zip(kinds, bounds, strict=True):
        origin = {"rows": lambda: row0, "cols": lambda: col0}.get(
            kind, lambda: arith.subi(col0, row0)
        )()
        limits.append((*_COMPARE[kind], arith.subi(_splat(bound), origin)))

    def kept(row, col):
        each = [
            arith.cmpi(getattr(arith.CmpIPredicate, predicate), _i32(coordinate(row, col)), limit)
            for coordinate, predicate, limit in limits
        ]
        return functools.reduce(arith.andi, each)

    return _select(tile, kept, float("-inf"))


def _select(tile, kept, other: float):
    """The tile with `other` wherever kept(row, column of thread 0), an i1, is false."""
    replacement = _f32(other)
    registers = tile.registers.copy()
    for index, row, col in _coordinates(tile.shape, tile.layout):
        register = registers[index]
        for e in range(_elements(register)):
            at = {"dynamic_position": [], "static_position": [e]}
            keep = kept(row, col + e)
            x = vector.extract(register, **at)
            register = vector.insert(arith.select(keep, x, replacement), register, **at)
        registers[index] = register
    return _fragmented(registers, tile.layout)


def hide(tile, limits: Limits, interpret: bool):
    """The tile with -inf wherever `limits` does not keep it."""
    given = {kind: bound for kind, bound in limits._asdict().items() if bound is not None}
    if not given:
        return tile
    if interpret:
        return jnp.where(limits.keep(tile.shape), tile, -jnp.inf)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, *(plgpu.Layout.WG_SPLAT,) * len(given)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA),
    )(functools.partial(_limit_body, tuple(given)))
    return run(tile, *map(jnp.int32, given.values()))


def _lane_sums_body(_, tile):
    out_shape = (tile.shape[0], LANE_COLS)
    parts = {}
    for index, row, col in _coordinates(tile.shape, tile.layout):
        parts.setdefault((row, col % LANE_COLS), []).append(tile.registers[index])
    registers = np.empty(tile.layout.registers_shape(out_shape), dtype=object)
    for index, row, col in _coordinates(out_shape, tile.layout):
        registers[index] = functools.reduce(arith.addf, parts[row, col])
    return _fragmented(registers, tile.layout)


def lane_sums(tile, interpret: bool):
    """Row sums that stay inside each thread: (rows, cols) -> (rows, 8), no lane exchange.

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


def _warp_grew(old, new, slack):
    """i32, uniform over a warp: 1 if some row's maximum grew by more than `slack`."""
    i32 = ir.IntegerType.get_signless(32)

    def scalar(x):
        if isinstance(x.type, ir.VectorType):
            return vector.extract(x, dynamic_position=[], static_position=[0])
        return x

    grew = None
    for a, b in zip(old.registers.flat, new.registers.flat, strict=True):
        bit = arith.cmpf(arith.CmpFPredicate.OGT, arith.subf(scalar(b), scalar(a)), _f32(slack))
        grew = bit if grew is None else arith.ori(grew, bit)
    return llvm.inline_asm(
        i32,
        [arith.extui(i32, grew)],
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
        " selp.b32 $0, 1, 0, p; }",
        "=r,r",
        has_side_effects=True,
    )


def _vote_body(slack, _, old, new):
    return mgpu.FragmentedArray.splat(_warp_grew(old, new, slack), (), is_signed=True)


def _pick_body(slack, _, old, new):
    grew = arith.cmpi(arith.CmpIPredicate.ne, _warp_grew(old, new, slack), _i32(0))
    registers = old.registers.copy()
    for i in np.ndindex(*registers.shape):
        registers[i] = arith.select(grew, new.registers[i], old.registers[i])
    return _fragmented(registers, old.layout)


def lazy_max(old, new, slack: float, interpret: bool):
    """Keep the old row maxima unless some row of the warp grew by more than `slack` (base 2).

    Returns (maxima, grew: i32 scalar). Exact whatever it keeps: weights only stay below 2**slack
    instead of 1. `grew` is uniform per warp, so it may guard arithmetic but no barrier or copy.
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


def _named_barrier_body(operation, threads, _, barrier):
    mgpu.utils.inline_ptx(f"bar.{operation} $0, {threads};", _splat(barrier), has_side_effects=True)


def named_barrier(operation: str, barrier, threads: int):
    """PTX `bar.sync` or `bar.arrive` on a hardware barrier (ids 0 to num_threads are Mosaic's)."""
    run = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(
        functools.partial(_named_barrier_body, operation, threads)
    )
    run(lax.convert_element_type(barrier, jnp.int32))


def _opaque(x):
    """The same i32, of which the compiler knows nothing: sums with it stay where they are used."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [x], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _thread_origin(shape, layout):
    """i32 (row, column) of this thread's first element."""
    i32 = ir.IntegerType.get_signless(32)
    return tuple(arith.index_cast(i32, x) for x in next(iter(layout.thread_idxs(shape))))


def _filled(shape, layout, element_type, value):
    """The registers of a tile of value(row, column of thread 0)."""
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    like = ir.VectorType.get((2,), element_type)
    for index, row, col in _coordinates(shape, layout):
        register = llvm.mlir_undef(like)
        for e in range(2):
            register = vector.insert(
                value(row, col + e), register, dynamic_position=[], static_position=[e]
            )
        registers[index] = register
    return registers


def _positions_body(shape, axis, _, start):
    layout = WGMMA.to_mgpu()
    base = _opaque(arith.addi(_splat(start), _thread_origin(shape, layout)[axis]))
    registers = _filled(
        shape,
        layout,
        ir.IntegerType.get_signless(32),
        lambda row, col: arith.addi(base, _i32((row, col)[axis])),
    )
    return _fragmented(registers, layout, is_signed=True)


def positions(shape, axis: int, start, interpret: bool):
    """int32[shape]: start + index along the axis.

    Plain iota is the same in every step, so the compiler computes it once and keeps its 32 to 64
    registers alive through the loop; here every value is a sum of one register and an immediate.
    """
    if interpret:
        return jnp.int32(start) + lax.broadcasted_iota(jnp.int32, shape, axis)
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, WGMMA),
    )(functools.partial(_positions_body, shape, axis))
    return run(jnp.int32(start))


def _distance_body(shape, _, shift):
    layout, f32 = WGMMA.to_mgpu(), ir.F32Type.get()
    row0, col0 = _thread_origin(shape, layout)
    base = arith.sitofp(f32, _opaque(arith.addi(_splat(shift), arith.subi(row0, col0))))
    registers = _filled(
        shape, layout, f32, lambda row, col: math.absf(arith.addf(base, _f32(float(row - col))))
    )
    return _fragmented(registers, layout)


def distance(shape, shift, interpret: bool):
    """f32[shape]: |row - column + shift|, exact below 2**24; one conversion for the whole tile."""
    if interpret:
        row, col = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return lax.convert_element_type(lax.abs(row - col + jnp.int32(shift)), jnp.float32)
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, WGMMA),
    )(functools.partial(_distance_body, shape))
    return run(jnp.int32(shift))


def _spread(x):
    """dropout.spread of an i32."""
    x = arith.muli(x, _i32(_signed(dropout.FACTORS[0])))
    x = arith.xori(x, arith.shrui(x, _i32(dropout.SHIFT)))
    return arith.muli(x, _i32(_signed(dropout.FACTORS[1])))


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _kept_body(threshold, kv_axis, _, seeds):
    at = {"dynamic_position": []}
    values = {}
    for index, row, col in _coordinates(seeds.shape, seeds.layout):
        for e in range(2):
            values[row, col + e] = functools.partial(
                vector.extract, seeds.registers[index], static_position=[e], **at
            )
    limit = _i32(_signed(threshold << 16))
    upper = _i32(_signed(0xFFFF0000))
    bits, mixed = ir.IntegerType.get_signless(1), {}
    registers = seeds.registers.copy()
    for index, row, col in _coordinates(seeds.shape, seeds.layout):
        found = llvm.mlir_undef(ir.VectorType.get((2,), bits))
        for e in range(2):
            place = [row, col + e]
            high = place[kv_axis] & dropout.PAIR_BIT
            place[kv_axis] -= high
            place = tuple(place)
            if place not in mixed:
                mixed[place] = _spread(values[place]())
            half = mixed[place]
            if not high:  # the low half of fold(x), moved up
                half = arith.xori(arith.shli(half, _i32(16)), arith.andi(half, upper))
            keep = arith.cmpi(arith.CmpIPredicate.uge, half, limit)
            found = vector.insert(keep, found, static_position=[e], **at)
        registers[index] = found
    return _fragmented(registers, seeds.layout, is_signed=False)


def kept(seeds, threshold: int, kv_axis: int):
    """bool: core.dropout.kept of fold(spread(seeds)), hashed once for two keys eight apart.

    Args:
        seeds: int32, the same for keys that differ in PAIR_BIT; keys start at a multiple of 16.
        threshold: dropout.threshold of the rate.
        kv_axis: along which keys run.
    """
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(seeds.shape, jnp.bool_, WGMMA)
    )(functools.partial(_kept_body, threshold, kv_axis))
    return run(seeds)
