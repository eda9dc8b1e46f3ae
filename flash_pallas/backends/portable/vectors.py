"""cp.async of per-column float32 vectors (LSE, delta) into shared memory, next to their tile."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxlib.mlir.dialects import arith

from ..mosaic.registers import i32_constant, splat
from .threads import assembly, device_address, linear, shared_address, thread

UNIT_ELEMENTS = 4  # f32 in 16 bytes


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


def start_body(_, source, tile, first, count):
    """Issues the copy with a predicate: no surrounding code would be moved across a branch."""
    element = arith.muli(thread(), i32_constant(UNIT_ELEMENTS))
    to = linear(shared_address(tile), (element, 4))
    of = device_address(source, arith.addi(splat(first), element), 4)
    copy = "cp.async.cg.shared.global [$0], [$1], 16;"
    code = f"{{ .reg .pred p; setp.lt.s32 p, $2, $3; @p {copy} }}"
    assembly(code, "r,l,r,r", to, of, element, splat(count))
