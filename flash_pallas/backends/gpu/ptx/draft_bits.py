"""Bits of drafts in kernels: what of a tile of scores a query sees of the last keys."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ....core.decode import DecodeProblem
from ....core.drafts import WORD_BITS
from .inline import (
    WGMMA,
    at,
    coordinates,
    elements,
    i32_constant,
    origin,
    selected,
    signed_constant,
    splat,
)

SHIFT = WORD_BITS.bit_length() - 1


class DraftBits(NamedTuple):
    """The drafts that each query of a tile sees.

    Attributes:
        words: one or two vectors int32, one value per query: bit u % 32 of word u // 32 is draft u.
        first: int32, number of the key that is draft 0.
    """

    words: tuple[Any, ...]
    first: Any


def unsupported(problem: DecodeProblem) -> str | None:
    """Returns why kernels cannot decode the drafts of this problem, or None."""
    if problem.drafts and "alibi_slopes" in problem.features:
        return (
            "takes no ALiBi with draft_mask, whose drafts have other positions than their keys: "
            "leave alibi_slopes out"
        )
    return None


def hide(tile, bits: DraftBits, first, axis: int, interpret: bool):
    """Returns the tile with -inf where a query does not see a draft; other keys stay.

    Keys past the last draft are hidden, too.

    Args:
        tile: f32[rows, columns] in the layout WGMMA.
        bits: what the queries see; words are vectors along the tile's other axis, in its layout.
        first: number of the tile's first key, int32.
        axis: axis of the keys.
        interpret: run by the interpreter.
    """
    start = jnp.int32(first) - bits.first
    words = [lax.broadcast_in_dim(x, tile.shape, (1 - axis,)) for x in bits.words]
    if interpret:
        draft = lax.broadcasted_iota(jnp.int32, tile.shape, axis) + start
        word = jnp.where(draft < 0, jnp.int32(-1), jnp.int32(0))
        for number, x in enumerate(words):
            word = jnp.where(draft >> SHIFT == number, x, word)
        seen = lax.shift_right_logical(word, draft & (WORD_BITS - 1)) & 1
        return jnp.where(seen == 1, tile, -jnp.inf)
    run = plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.Layout.WG_SPLAT, *(WGMMA,) * len(words)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, WGMMA),
    )(functools.partial(_hide_body, axis))
    return run(tile, start, *words)


def _hide_body(axis, _, tile, start, *words):
    own = {}
    for index, row, col in coordinates(tile.shape, tile.layout):
        for e in range(elements(tile.registers[index])):
            query = row if axis else col + e
            if query not in own:
                own[query] = [at(word.registers[index], e) for word in words]
    start = arith.addi(splat(start), origin(tile.shape, tile.layout)[axis])
    place = functools.cache(lambda part: _place(start, part))
    bits = functools.cache(lambda query, part: _bits(own[query], *place(part)))

    def kept(row, col):
        query, key = (row, col) if axis else (col, row)
        seen = bits(query, key // WORD_BITS)
        bit = i32_constant(signed_constant(1 << key % WORD_BITS))
        return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(seen, bit), i32_constant(0))

    return selected(tile, kept, -math.inf)


def _place(start, part: int):
    """Returns i32 (word, bit in it) of draft start + 32 * part; words before 0 and after exist."""
    draft = arith.addi(start, i32_constant(part * WORD_BITS))
    word = arith.shrsi(draft, i32_constant(SHIFT))
    return word, arith.andi(draft, i32_constant(WORD_BITS - 1))


def _bits(words, word, bit):
    """Returns the 32 bits from a place on, of words that all ones precede and zeros follow."""
    i64 = ir.IntegerType.get_signless(64)
    two_words = None
    for later in (1, 0):
        number = arith.addi(word, i32_constant(later))
        before = arith.cmpi(arith.CmpIPredicate.slt, number, i32_constant(0))
        current = arith.select(before, i32_constant(-1), i32_constant(0))
        for i, x in enumerate(words):
            matches = arith.cmpi(arith.CmpIPredicate.eq, number, i32_constant(i))
            current = arith.select(matches, x, current)
        current = arith.extui(i64, current)
        if two_words is None:
            two_words = arith.shli(current, arith.constant(i64, WORD_BITS))
        else:
            two_words = arith.ori(two_words, current)
    shifted = arith.shrui(two_words, arith.extui(i64, bit))
    return arith.trunci(ir.IntegerType.get_signless(32), shifted)
