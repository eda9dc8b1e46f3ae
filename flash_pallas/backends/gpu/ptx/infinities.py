"""A bias of -inf in registers: found in a tile, marked by NaN, and cleared from weights.

Each function has a plain jnp form, which the interpreter runs.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import math as mlir_math

from .inline import (
    WGMMA,
    assembly,
    at,
    f32_constant,
    fragmented,
    i32_constant,
    of_some_lane,
    pair,
    signed_constant,
)

_ONES = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
_INFINITY = {"bf16": 0x7F80, "f16": 0x7C00}


def _times(word, factor: int, plus, half: str):
    """Emits word * factor + plus for pairs of 16 bits; with 0 a NaN where the word is infinite.

    GPUs before 9.0 have no addition, and no comparison, of pairs of bfloat16.
    """
    code = f"fma.rn.{half}x2 $0, $1, $2, $3;"
    return assembly(word.type, code, word, i32_constant(factor), plus)


def _wide_pair(word):
    """Converts a pair of bfloat16 to one of float32."""
    low = arith.shli(word, i32_constant(16))
    high = arith.andi(word, i32_constant(signed_constant(0xFFFF0000)))
    return pair(*(llvm.bitcast(ir.F32Type.get(), x) for x in (low, high)))


def _words(tile):
    """Returns the distinct registers of a tile of 16 bits, each with its word."""
    i32 = ir.IntegerType.get_signless(32)
    return {x: llvm.bitcast(i32, x) for x in dict.fromkeys(tile.registers.flat)}


def _replaced(tile, registers: dict):
    """Returns a tile of other registers in place of those of this one."""
    replaced = np.empty(tile.registers.shape, dtype=object)
    for index in np.ndindex(*replaced.shape):
        replaced[index] = registers[tile.registers[index]]
    return fragmented(replaced, tile.layout)


def _with_marked_body(scale, _, tile, bias):
    i32, f32, one = ir.IntegerType.get_signless(32), ir.F32Type.get(), i32_constant(1)
    upper = i32_constant(signed_constant(0xFFFF0000))
    low = lambda word: assembly(i32, "prmt.b32 $0, $1, $2, 0x1054;", word, one)
    high = lambda word: arith.ori(arith.andi(word, upper), one)
    halves = {x: (low(word), high(word)) for x, word in _words(bias).items()}
    wide = {x: [llvm.bitcast(f32, half) for half in words] for x, words in halves.items()}
    registers, code = tile.registers.copy(), "fma.rn.ftz.f32 $0, $1, $2, $3;"
    for index in np.ndindex(*registers.shape):
        added = wide[bias.registers[index]]
        terms = ((at(registers[index], e), f32_constant(scale), added[e]) for e in (0, 1))
        registers[index] = pair(*(assembly(f32, code, *operands) for operands in terms))
    return fragmented(registers, tile.layout)


def with_marked(tile, scale: float, bias, interpret: bool):
    """Computes tile * scale + bias, but NaN where the bias is infinite.

    With its lowest bit set an infinity is a NaN: the conversion from bfloat16 needs no further
    instruction for that, and 0 + 0 remains 0, as such small numbers are flushed. In other dtypes
    0 times the bias is added to it.

    Args:
        tile: f32 in the WGMMA layout.
        scale: a Python float.
        bias: tile of the same shape, in the dtype of its array.
        interpret: run by the interpreter.
    """
    if interpret or bias.dtype != jnp.bfloat16:
        bias = bias.astype(jnp.float32)
        return tile * scale + (bias + bias * 0.0)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA), return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, WGMMA)
    )(functools.partial(_with_marked_body, scale))
    return run(tile, bias)


def _run_on_bias(tile, result_type, body):
    half = "bf16" if tile.dtype == jnp.bfloat16 else "f16"
    run = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=result_type)
    return run(functools.partial(body, half))(tile)


def _widened_body(_half, _, tile):
    return _replaced(tile, {x: _wide_pair(word) for x, word in _words(tile).items()})


def widened(tile, interpret: bool):
    """Converts a tile to float32: from bfloat16 in two thirds of Mosaic GPU's instructions."""
    if interpret or tile.dtype != jnp.bfloat16:
        return tile.astype(jnp.float32)
    return _run_on_bias(tile, plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA), _widened_body)


_CHAINS = 4  # of dependent additions


def _looked_at_body(half, _, tile):
    words, sums = _words(tile), [i32_constant(0)] * _CHAINS
    for i, word in enumerate(words.values()):
        sums[i % _CHAINS] = _times(word, 0, sums[i % _CHAINS], half)
    total = functools.reduce(lambda a, b: _times(a, _ONES[half], b, half), sums)
    nan = []
    for part in (total, arith.shrui(total, i32_constant(16))):
        bits = arith.andi(part, i32_constant(0x7FFF))
        nan.append(arith.cmpi(arith.CmpIPredicate.ugt, bits, i32_constant(_INFINITY[half])))
    some = mgpu.FragmentedArray.splat(of_some_lane(arith.ori(*nan)), (), is_signed=True)
    if half == "bf16":
        return _replaced(tile, {x: _wide_pair(word) for x, word in words.items()}), some
    return tile.astype(ir.F32Type.get()), some


def _looked_at_wide_body(_, tile):
    sums, zero = [f32_constant(0.0)] * _CHAINS, f32_constant(0.0)
    values = [at(x, e) for x in dict.fromkeys(tile.registers.flat) for e in (0, 1)]
    for i, value in enumerate(values):
        sums[i % _CHAINS] = mlir_math.fma(value, zero, sums[i % _CHAINS])
    total = functools.reduce(arith.addf, sums)
    some = arith.cmpf(arith.CmpFPredicate.UNO, total, total)
    return mgpu.FragmentedArray.splat(of_some_lane(some), (), is_signed=True)


def looked_at(tile, interpret: bool):
    """Converts a bias to float32 and looks for infinities, as `marked` does.

    Returns:
        (f32 tile; i32, uniform over a warp: not 0 if it has an infinity or a NaN).
    """
    if interpret:
        wide = tile.astype(jnp.float32)
        return wide, jnp.int32((wide == -math.inf).any())
    some = plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT)
    if tile.dtype == jnp.float32:
        run = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=some)
        return tile, run(_looked_at_wide_body)(tile)
    wide = plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA)
    return _run_on_bias(tile, (wide, some), _looked_at_body)


def _some_infinite_body(_, ref):
    f32 = ir.F32Type.get()
    lane = arith.remui(mgpu.utils.thread_idx(), i32_constant(32))
    base, size = mgpu.utils.memref_ptr(ref), ref.type.shape[0]
    width, total = 4, f32_constant(0.0)
    for first in range(0, size, 32 * width):
        place = arith.addi(arith.muli(lane, i32_constant(width)), i32_constant(first))
        place = arith.minui(place, i32_constant(size - width))
        pointer = mgpu.utils.getelementptr(base, [place], f32)
        values = llvm.load(ir.VectorType.get((width,), f32), pointer)
        for e in range(width):
            total = mlir_math.fma(at(values, e), f32_constant(0.0), total)
    some = arith.cmpf(arith.CmpFPredicate.UNO, total, total)
    return mgpu.FragmentedArray.splat(of_some_lane(some), (), is_signed=True)


def some_infinite(ref, interpret: bool):
    """Looks for infinities in a vector in shared memory, of which each lane reads its own part.

    Args:
        ref: f32[columns], columns a multiple of 4.
        interpret: run by the interpreter.

    Returns:
        i32, uniform over a warp: not 0 if it has an infinity or a NaN.
    """
    if interpret:
        return jnp.int32((ref[...] == -math.inf).any())
    splat_ = plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT)
    run = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=splat_)
    return run(_some_infinite_body)(ref)


def _numbers_body(_, tile):
    if isinstance(tile.mlir_dtype, ir.F32Type):
        larger = lambda x: assembly(x.type, "max.f32 $0, $1, $2;", x, f32_constant(0.0))
        distinct = dict.fromkeys(tile.registers.flat)
        return _replaced(tile, {x: pair(*(larger(at(x, e)) for e in (0, 1))) for x in distinct})
    half = "bf16" if isinstance(tile.mlir_dtype, ir.BF16Type) else "f16"
    larger = lambda x: assembly(x.type, f"max.{half}x2 $0, $1, $2;", x, i32_constant(0))
    words = _words(tile)
    return _replaced(tile, {x: llvm.bitcast(x.type, larger(word)) for x, word in words.items()})


def numbers(tile, interpret: bool):
    """Returns what is not negative with 0 in place of NaN: in 16 bits one instruction for two."""
    if interpret:
        return jnp.where(tile > 0.0, tile, jnp.zeros_like(tile))
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, WGMMA)
    )(_numbers_body)
    return run(tile)
