"""Tiles that each warpgroup of one CTA of a pair hands to the same warpgroup of the other.

Rank 0 sends a tile in every step. It goes from registers into the shared memory of rank 1, where
the same threads want the same elements: so every thread writes its own in pieces of 16 bytes, side
by side with those of its neighbours, and nothing is rearranged. There is one slot, and rank 0 may
be one step ahead.

    arrived     an mbarrier of each warpgroup of rank 1, which counts the bytes that come
    read        both warpgroups of rank 1 arrive there once the slot is free, in rank 0 too. Before
                that they announce the bytes of the next tile: none can come before

Rank 0 may not end before it has seen the last tile read: until then rank 1 arrives at its barriers.
Nothing is on its way to rank 1 once that has received its last tile.

The interpreter cannot reach the shared memory of a neighbour. Under it the tiles pass through
device memory, and the barrier `handed` of the cluster stands for `arrived`. There, every barrier
must be waited for in each CTA, which both do where nothing is held up.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from ...gpu.launch import WARPGROUP_ROWS
from ...gpu.ptx.inline import WARPGROUP, WGMMA, fragmented, i32_constant
from ..common import cluster, pipeline

TILE = WARPGROUP_ROWS, WARPGROUP_ROWS
WORDS = WARPGROUP_ROWS**2 // 2  # of 32 bits in a tile of 16-bit elements
PIECE = 4  # words that a thread writes or reads at once
RECEIVER = 1  # rank in the cluster


class Received(NamedTuple):
    """Shared memory of the CTA that receives, one slot for each warpgroup."""

    words: Any  # int32[warpgroups, WORDS]
    arrived: Any  # int32[warpgroups, 2], an mbarrier each


def received_buffer(warpgroups: int) -> Received:
    """Returns the shared memory for tiles of 16-bit elements."""
    buffer = lambda size: plgpu.SMEM((warpgroups, size), jnp.int32)
    return Received(buffer(WORDS), buffer(2))


def stand_in(*places: int, warpgroups: int, dtype) -> jax.ShapeDtypeStruct:
    """Returns the array in device memory that the interpreter uses instead."""
    return jax.ShapeDtypeStruct((*places, warpgroups, *TILE), dtype)


@dataclasses.dataclass(frozen=True)
class Handover:
    """The way from a warpgroup of one CTA to that of the other, as either sees it.

    Attributes:
        received: words and mbarrier of this warpgroup's slot.
        handed: barrier of the cluster, at which the warpgroups of rank 0 arrive; interpreted.
        read: barrier of the cluster, at which those of rank 1 arrive.
        stand_in: this warpgroup's tile in device memory; interpreted.
        dtype: dtype of the elements, of 16 bits.
        interpret: run by the interpreter.
    """

    received: Received
    handed: Any
    read: Any
    stand_in: Any
    dtype: Any
    interpret: bool

    # --- rank 0 ----------------------------------------------------------------------------------

    def send(self, tile):
        """Sends a tile in the layout WGMMA, as soon as the one before has been read."""
        plgpu.barrier_wait(self.read)
        if self.interpret:
            self.stand_in[...] = tile
            self._arrive(self.handed)
            return
        run = plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(), plgpu.RefType()))
        run(_send_body)(tile, *self.received)

    def drain(self):
        """Waits until the last tile has been read."""
        plgpu.barrier_wait(self.read)

    # --- rank 1 ----------------------------------------------------------------------------------

    def open(self):
        """Initializes the mbarrier, and lets the first tile come."""
        if not self.interpret:
            plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(cluster.init_body)(
                self.received.arrived
            )
        self._offer()

    def receive(self, n):
        """Returns the n-th tile, in the layout WGMMA, and lets the next one come."""
        if self.interpret:
            plgpu.barrier_wait(self.handed)
            tile = self.stand_in[...]
        else:
            run = plgpu.inline_mgpu(
                arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT),
                return_type=plgpu.ShapeDtypeStruct(TILE, self.dtype, WGMMA),
            )(functools.partial(_receive_body, self.dtype))
            tile = run(*self.received, lax.rem(n, jnp.int32(2)))
        self._offer()
        return tile

    def _offer(self):
        """Says that the slot is free, after announcing what comes into it."""
        if not self.interpret:
            plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_announce_body)(self.received.arrived)
        self._arrive(self.read)

    def _arrive(self, barrier):
        pipeline.cluster_arrive(barrier, self.interpret)
        if self.interpret:
            plgpu.barrier_wait(barrier)


def _own_words(words):
    """Returns the address of this thread's first piece of a slot."""
    return arith.addi(cluster.address(words), arith.muli(cluster.thread(), i32_constant(4 * PIECE)))


def _pieces(count: int) -> list[tuple[int, int]]:
    """Returns (first word, distance in bytes from the thread's first piece) of its pieces."""
    return [(i, 4 * WARPGROUP * i) for i in range(0, count, PIECE)]


def _announce_body(_, barrier):
    """Arrives for the phase in which the bytes of the next tile are to come."""
    cluster.announce(barrier, 4 * WORDS)


def _send_body(_, tile, words, barrier):
    """Writes this thread's elements into the slot of the other CTA, where they are counted."""
    i32 = ir.IntegerType.get_signless(32)
    registers = [llvm.bitcast(i32, register) for register in tile.registers.flat]
    stores = " ".join(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
        f" [to + {distance}], {{{', '.join(f'${2 + i + word}' for word in range(PIECE))}}}, [full];"
        for i, distance in _pieces(len(registers))
    )
    cluster.run(
        "{ .reg .b32 to, full;"
        f" mapa.shared::cluster.u32 to, $0, {RECEIVER};"
        f" mapa.shared::cluster.u32 full, $1, {RECEIVER}; {stores} }}",
        _own_words(words),
        cluster.address(barrier),
        *registers,
    )


def _receive_body(dtype, _, words, barrier, parity):
    """Waits for the tile, and reads this thread's elements."""
    cluster.wait(barrier, parity)
    pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
    layout = WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape(TILE), dtype=object)
    address, found = _own_words(words), []
    for _, distance in _pieces(registers.size):
        found += _load_piece(address, distance)
    for index, word in zip(np.ndindex(*registers.shape), found, strict=True):
        registers[index] = llvm.bitcast(pair, word)
    return fragmented(registers, layout)


def _load_piece(address, distance: int):
    """Loads one piece from shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    found = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * PIECE),
        [address],
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {distance}];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, found, [i]) for i in range(PIECE)]
