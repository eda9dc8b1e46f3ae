"""Rows that see one key, where weights are not relative to the largest of them.

Relative to its maximum the one weight of such a row is 1, and O is V to the last bit. A weight that
is not 1 is rounded to bfloat16 before it multiplies V, but not in the sum that O is divided by: O
is then V up to one unit in the last place. So that sum is rounded too where it is one weight, that
is where the bits of all weights, OR-ed, are those of the sum. This costs a quarter of an
instruction per element; to sum rounded weights would cost two. A row with several keys passes for
one with a single key only if the others do not show in the bits of the sum.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from .inline import ROWS, WGMMA
from .registers import assembly, coordinates, fragmented, i32_constant, signed_constant


def several(like):
    """Returns the bits of rows with more than one weight: NaN."""
    return jnp.full_like(like, math.nan)


def joined(bits, p, interpret: bool):
    """Returns f32[rows] with the bits of `bits` and of every weight of the row, OR-ed.

    Args:
        bits: f32[rows], of a bfloat16: the sum's if there is one weight.
        p: bfloat16 (rows, columns) in the WGMMA layout.
        interpret: run by the interpreter.
    """
    if interpret:
        as_bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
        words = as_bits(p.astype(jnp.float32))
        found = lax.reduce(words, jnp.uint32(0), lax.bitwise_or, (1,))
        return lax.bitcast_convert_type(found | as_bits(bits), jnp.float32)
    run = plgpu.inline_mgpu(
        arg_types=(ROWS, WGMMA), return_type=plgpu.ShapeDtypeStruct(bits.shape, jnp.float32, ROWS)
    )(_joined_body)
    return run(bits, p)


def divisor(bits, l):
    """Returns the divisor of O in place of the row sums l: l, rounded where it is one weight."""
    rounded = l.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(bits == rounded, rounded, l)


def _joined_body(_, bits, p):
    i32, by_row = ir.IntegerType.get_signless(32), {}
    for index, row, _col in coordinates(p.shape, p.layout):
        by_row.setdefault(row, []).append(llvm.bitcast(i32, p.registers[index]))
    registers, found = bits.registers.copy(), []
    for old, row in zip(registers.flat, sorted(by_row), strict=True):
        word = functools.reduce(arith.ori, by_row[row])
        word = arith.ori(word, arith.shli(word, i32_constant(16)))
        for lanes in (1, 2):  # the other threads of the row
            code = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
            word = arith.ori(word, assembly(i32, code, word))
        word = arith.andi(word, i32_constant(signed_constant(0xFFFF0000)))
        joined = arith.ori(llvm.bitcast(i32, old), word)
        found.append(llvm.bitcast(old.type, joined))
    registers.flat = found
    return fragmented(registers, bits.layout)
