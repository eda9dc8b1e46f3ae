"""Tiles in registers, handed to the same threads of the other CTA of a pair as words."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ..launch import WARPGROUP_ROWS
from . import cluster
from .inline import WARPGROUP, WGMMA, fragmented, i32_constant

TILE = WARPGROUP_ROWS, WARPGROUP_ROWS
WORDS = WARPGROUP_ROWS**2 // 2  # of 32 bits in a tile of 16-bit elements
PIECE = 4  # words that a thread writes or reads at once
RECEIVER = 1  # rank in the cluster


def send(tile, words, barrier):
    """Writes this thread's elements into the slot of the other CTA, where they are counted.

    Args:
        tile: [64, 64] of 16 bits in the layout WGMMA.
        words: int32[WORDS] in shared memory, the slot.
        barrier: an mbarrier in shared memory; that of the other CTA counts.
    """
    run = plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(), plgpu.RefType()))
    run(_send_body)(tile, words, barrier)


def receive(words, barrier, parity, dtype):
    """Waits for the tile, and reads this thread's elements; returns it in the layout WGMMA.

    Args:
        words: int32[WORDS] in shared memory, the slot.
        barrier: the mbarrier that counts its bytes.
        parity: parity of the number of tiles before this one.
        dtype: dtype of the elements, of 16 bits.
    """
    run = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(TILE, dtype, WGMMA),
    )(functools.partial(_receive_body, dtype))
    return run(words, barrier, parity)


def _own_words(words):
    """Returns the address of this thread's first piece of a slot."""
    return arith.addi(cluster.address(words), arith.muli(cluster.thread(), i32_constant(4 * PIECE)))


def _pieces(count: int) -> list[tuple[int, int]]:
    """Returns (first word, distance in bytes from the thread's first piece) of its pieces."""
    return [(i, 4 * WARPGROUP * i) for i in range(0, count, PIECE)]


def _send_body(_, tile, words, barrier):
    i32 = ir.IntegerType.get_signless(32)
    registers = [llvm.bitcast(i32, register) for register in tile.registers.flat]
    stores = " ".join(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
        f" [to + {distance}], {{{', '.join(f'${2 + i + word}' for word in range(PIECE))}}}, [full];"
        for i, distance in _pieces(len(registers))
    )
    cluster.emit(
        "{ .reg .b32 to, full;"
        f" mapa.shared::cluster.u32 to, $0, {RECEIVER};"
        f" mapa.shared::cluster.u32 full, $1, {RECEIVER}; {stores} }}",
        _own_words(words),
        cluster.address(barrier),
        *registers,
    )


def _receive_body(dtype, _, words, barrier, parity):
    cluster.emit_wait(barrier, parity)
    pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
    layout = WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape(TILE), dtype=object)
    address, loaded = _own_words(words), []
    for _, distance in _pieces(registers.size):
        loaded += _load_piece(address, distance)
    for index, word in zip(np.ndindex(*registers.shape), loaded, strict=True):
        registers[index] = llvm.bitcast(pair, word)
    return fragmented(registers, layout)


def _load_piece(address, distance: int):
    """Loads one piece from shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    piece = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * PIECE),
        [address],
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {distance}];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, piece, [i]) for i in range(PIECE)]
