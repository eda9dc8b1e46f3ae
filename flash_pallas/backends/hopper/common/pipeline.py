"""Shared memory: tiles as TMA and wgmma want them, rings, matmuls, clusters and loads."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core import integers as ints
from ....core.padding import pad_axis
from ...gpu.auxiliary_arrays import within_reach
from ...gpu.launch import WARPGROUP_ROWS, shared_memory, tile_transforms
from ...gpu.ptx import inline
from ...gpu.ptx.cleared_rows import clear_padding
from ...gpu.ptx.inline import WARPGROUP

# --- Shared memory and rings ----------------------------------------------------------------------

SMEM_LIMIT = 232_448  # bytes a CTA may use on Hopper
SWIZZLES = (128, 64, 32)  # bytes; a row of a tile in shared memory is a multiple of one of them


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "empty"],
    meta_fields=["slots", "hides_slot", "refill", "before"],
)
@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring of slots that a producer fills and consumers empty, in turn.

    A kernel declares it among its shared memory (`declare`), and gets it back with the barriers.

    Attributes:
        full: barriers of the fills, one a slot.
        empty: barriers of the releases, one a slot; None where no slot is filled twice.
        slots: number of slots.
        hides_slot: the index of a slot is computed anew in every use, see `hidden`.
        refill: called with the number of the next fill of a released slot.
        before: uses before the one that is counted as number 0.
    """

    full: Any
    empty: Any
    slots: int
    hides_slot: bool = False
    refill: Callable[[Any], Any] | None = None
    before: Any = 0

    @classmethod
    def declare(cls, slots: int, *, copies: int = 1, readers: int = 1, cluster: int = 1) -> Ring:
        """Declares the barriers of a ring.

        Args:
            slots: number of slots.
            copies: arrivals that make a fill: copies into a slot, or warpgroups that write there.
            readers: warpgroups that release a slot, of each CTA; 0 where no slot is filled twice.
            cluster: number of CTAs that release it.
        """
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=slots)
        return cls(full, empty_barrier(cluster, readers, slots) if readers else None, slots)

    def filled_by(self, copies: int) -> Ring:
        """Returns the declaration with fills of this many arrivals."""
        return dataclasses.replace(self, full=dataclasses.replace(self.full, num_arrivals=copies))

    def use(self, n):
        """Returns the number of the n-th use among all uses."""
        none = isinstance(self.before, int) and self.before == 0
        return n if none else n + self.before

    def slot(self, n):
        """Returns the slot of the n-th use."""
        slot = ints.remainder(self.use(n), self.slots)
        return hidden(slot) if self.hides_slot else slot

    def wait_full(self, n):
        """Waits, as a consumer, until the n-th fill has arrived."""
        plgpu.barrier_wait(self.full.at[self.slot(n)])

    def release(self, n):
        """Releases, as a consumer, the n-th fill, which has been read; calls `refill`."""
        plgpu.barrier_arrive(self.empty.at[self.slot(n)])
        if self.refill is not None:
            self.refill(n + self.slots)

    def wait_empty(self, n):
        """Waits, as the producer, until the slot of the n-th fill may be overwritten."""
        later = self.use(n) >= self.slots
        pl.when(later)(lambda: plgpu.barrier_wait(self.empty.at[self.slot(n)]))

    def drain(self, uses):
        """Observes, as the producer at the end, the releases that no later fill waited for."""

        @pl.loop(lax.max(jnp.int32(0), uses - self.slots), uses)
        def _(n):
            plgpu.barrier_wait(self.empty.at[self.slot(n)])


def load_inline(
    loads,
    total: Callable[[], Any],
    *rings: tuple[Ring, Callable[[Any], Any]],
    once: Callable[[], Any] | None = None,
) -> list[Ring]:
    """Loads in a compute warpgroup what rings start with, where a kernel has no producer.

    Args:
        loads: whether this is the warpgroup that loads, the last to release a slot.
        total: returns the number of fills of each ring, which is computed where it is compared.
        rings: each with a function that issues its n-th fill.
        once: issues the loads that come before these.

    Returns:
        The rings, whose slots this warpgroup fills again where it releases them.
    """
    fill = lambda load, n: pl.when(n < total())(lambda: load(n))

    @pl.when(loads)
    def _():
        if once is not None:
            once()
        for n in range(max(ring.slots for ring, _ in rings)):
            for ring, load in rings:
                if n < ring.slots:
                    fill(load, jnp.int32(n))

    def refilled(ring: Ring, load):
        return dataclasses.replace(ring, refill=lambda n: pl.when(loads)(lambda: fill(load, n)))

    return [refilled(*ring) for ring in rings]


def swizzles(width: int, dtype, *columns: int) -> list[int]:
    """Returns the swizzles, in bytes, that a tile with rows of `width` elements can have.

    The widest comes first. A row is a multiple of the swizzle, and TMA can copy arrays with these
    numbers of columns into the tile and out of it. They may have fewer than the tile: TMA reads 0
    past an array's end and writes nothing there. But it copies rows in pieces as wide as the
    swizzle, and where an array has several it knows the end of none, only how many there are; and
    rows start at multiples of 16 bytes.

    The widest is to be taken, but narrower ones cost less than padded copies. bf16, H200, causal,
    B=4, T=4096, 16 heads, forward and backward: at head dim 128, 64 bytes cost 2 and 2 % and 32
    bytes 16 and 8 %; head dim 80 with 32 bytes is 1.27 and 1.07 times as fast as with copies padded
    to 96 and 128, and 96 with 64 bytes 1.18 times as fast in a backward that ran it as 128.

    Both operands of a wgmma must have the same swizzle if both lie in shared memory.
    """
    size = jnp.dtype(dtype).itemsize
    rows = [count * size for count in columns]
    return [
        s
        for s in SWIZZLES
        if width * size % s == 0 and all(row % (16 if row <= s else s) == 0 for row in rows)
    ]


def tile_buffer(shape, dtype, swizzle: int | None = None):
    """Returns the shared memory of a tile for TMA and wgmma.

    A row is a multiple of the swizzle, in bytes; None is the widest that divides it.
    """
    swizzle = swizzle or swizzles(shape[-1], dtype)[0]
    columns = swizzle // jnp.dtype(dtype).itemsize
    if shape[-1] % columns:
        raise AssertionError(f"{shape=}: rows of {dtype} must be multiples of {columns} elements")
    return plgpu.SMEM(shape, dtype, transforms=tile_transforms(swizzle, dtype))


def fits(scratch) -> bool:
    """Returns whether a CTA that allocates this finds room for it."""
    return shared_memory(scratch) <= SMEM_LIMIT


def row_buffer(shape):
    """Returns shared memory for one float32 per row."""
    return plgpu.SMEM(shape, jnp.float32)


def hidden(index):
    """Returns an index of shared memory that is computed anew in every step.

    Descriptors of operands, one a wgmma, are then not held over the loop.
    """
    return lax.optimization_barrier(jnp.int32(index))


def warpgroup_rows(warpgroup):
    """Returns the rows of a tile that belong to one warpgroup, as a slice."""
    return pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)


def rows_of(ref, index, tile, column: int | None = None):
    """Returns ref.at[index] in rows as long as those of `tile`, from `column` on.

    The array's may be shorter: see `swizzles`.
    """
    if column is None and ref.shape[-1] == tile.shape[-1]:
        return ref.at[index]
    zero = index[0] * 0  # traced: JAX refuses a static slice past the array's end
    first = zero if column is None else zero + column
    return ref.at[(*index, pl.ds(first, tile.shape[-1]))]


# --- Matmuls on the tensor cores, and their operands in device and in shared memory ---------------

LENGTH_MULTIPLE = 8  # rows of a swizzled TMA tile: an array's length must be a multiple of it


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """Products of operands of one dtype: 16-bit ones as they are, float32 ones in parts.

    A float32 operand is the sum of two bfloat16 ones, hi = bfloat16(x) and lo = bfloat16(x - hi),
    and a matmul is three wgmmas: hi hi + hi lo + lo hi, added up in one float32 accumulator. lo is
    at most 2^-8 |x| and its own rounding error at most 2^-17 |x|. Including lo lo, which is left
    out, the error of a matmul a b is at most 2^-15 |a b|, and 2^-18 |a b| in the root mean square.

    An operand that is one array of shape [..., D], in device or in shared memory, holds its parts
    side by side, [..., 2 D] with hi first: one copy moves both, and an element takes as many bytes
    as in float32. In registers the parts are a tuple. Results leave the kernels in the same form,
    because they are staged where an operand was.

    Attributes:
        dtype: dtype of the call: bfloat16, float16 or float32.
        interpret: run by the interpreter.
    """

    dtype: Any
    interpret: bool = False

    @property
    def parts(self) -> int:
        """Number of 16-bit arrays that make one operand."""
        return 2 if self.dtype == jnp.float32 else 1

    @property
    def operand_dtype(self):
        """Dtype of one part."""
        return jnp.dtype(jnp.bfloat16 if self.parts > 1 else self.dtype)

    @property
    def count(self) -> int:
        """Number of wgmmas of one matmul, as `wgmma_wait` counts them."""
        return 3 if self.parts > 1 else 1

    # --- device memory ---------------------------------------------------------------------------

    def operand(self, x, head_dim: int, *summed_rows: int):
        """Returns x [B, length, heads, <= head_dim] as the kernels read it; x itself if it is so.

        It gets zero padding to a length in multiples of 8, and to this head dim where TMA does not
        pad. Zero columns change no score, and the columns that they add to results are dropped.

        Args:
            x: the array.
            head_dim: head dim of its tiles in shared memory.
            *summed_rows: one for each kind of these tiles, as `buffer` takes it.
        """
        columns = self.columns(x.shape[3], head_dim, *summed_rows)
        x = pad_axis(pad_axis(x, 3, columns), 1, ints.round_up(x.shape[1], LENGTH_MULTIPLE))
        if self.parts == 1:
            return x
        return jnp.concatenate([part.astype(self.operand_dtype) for part in _halves(x)], axis=-1)

    def columns(self, width: int, head_dim: int, *summed_rows: int) -> int:
        """Returns `width` or `head_dim`: the columns in device memory of an array of that width.

        `summed_rows` has one number for each kind of its tiles; none stands for 0.
        """
        if self.parts > 1:  # lie side by side: past the end of one is the other
            return head_dim
        # With 32 bytes, 240 filled up to 256 is 0.79 (forward) and 0.76 times as fast as a padded
        # copy (H200, causal, T=16k), and 112 to 128 0.93 and 1.05 times.
        narrowest = 64 if head_dim > 128 else 32
        for rows in summed_rows or (0,):
            possible = swizzles(math.gcd(head_dim, rows), self.operand_dtype, width)
            if not possible or possible[0] < narrowest:
                return head_dim
        return width

    def joined(self, x):
        """Converts what a kernel wrote, an operand, to an array of the call's dtype."""
        if self.parts == 1:
            return x
        hi, lo = jnp.split(x.astype(self.dtype), self.parts, axis=-1)
        return hi + lo

    # --- shared memory ---------------------------------------------------------------------------

    def buffer(self, shape, *arrays, summed_rows: int = 0):
        """Returns the shared memory of an operand of this shape; see `swizzle`."""
        swizzle = self.swizzle(shape[-1], *arrays, summed_rows=summed_rows)
        return tile_buffer((*shape[:-1], self.parts * shape[-1]), self.operand_dtype, swizzle)

    def swizzle(self, width: int, *arrays, summed_rows: int = 0) -> int:
        """Returns the widest swizzle (bytes) that divides what matmuls sum over and suits copies.

        Args:
            width: length of a tile's rows, which matmuls sum over.
            *arrays: operands in device memory that are copied into the tile or out of it; None
                where one is not known.
            summed_rows: number of rows of a block, where a matmul sums over those too.
        """
        columns = [x.shape[-1] // self.parts for x in arrays if x is not None]
        return swizzles(math.gcd(width, summed_rows), self.operand_dtype, *columns)[0]

    def refs(self, ref) -> tuple:
        """Returns the refs of the parts of an operand in shared memory."""
        if self.parts == 1:
            return (ref,)
        width, rows = ref.shape[-1] // self.parts, (slice(None),) * (len(ref.shape) - 1)
        return tuple(ref.at[(*rows, slice(i, i + width))] for i in (0, width))

    def store(self, ref, x):
        """Writes x to shared memory as an operand: f32 in registers, or what `split` made of it."""
        parts = x if isinstance(x, tuple) else self.split(x)
        for target, part in zip(self.refs(ref), parts, strict=True):
            target[...] = part

    def load(self, ref, layout):
        """Loads what `store` wrote, as f32 in registers."""
        hi, *lo = (part.astype(jnp.float32) for part in self.load_parts(ref, layout))
        return hi + lo[0] if lo else hi

    def load_parts(self, ref, layout) -> tuple:
        """Loads the parts of an operand into registers."""
        return tuple(plgpu.load(part, layout=layout) for part in self.refs(ref))

    # --- registers -------------------------------------------------------------------------------

    def split(self, x) -> tuple:
        """Splits x, f32 in registers, into the parts of an operand."""
        if self.parts == 1:
            return (x.astype(self.operand_dtype),)
        if self.interpret:
            return tuple(part.astype(self.operand_dtype) for part in _halves(x))
        hi = x.astype(self.operand_dtype)
        return hi, (x - hi.astype(jnp.float32)).astype(self.operand_dtype)

    def multiply(self, accumulator, a, b, *, transposed: bool = False):
        """Issues accumulator += a @ b, or a @ b^T: `count` asynchronous wgmmas.

        Args:
            accumulator: plgpu.ACC.
            a: an operand in shared memory, or its parts in registers.
            b: an operand in shared memory.
            transposed: multiply by b^T.
        """
        lefts = a if isinstance(a, tuple) else self.refs(a)
        rights = [part.transpose((1, 0)) if transposed else part for part in self.refs(b)]
        for i, left in enumerate(lefts):
            for right in rights[: self.parts - i]:
                plgpu.wgmma(accumulator, left, right)

    def scores(self, q, k):
        """Computes q @ k^T and waits for it, f32 in registers; both are operands of `multiply`."""

        def product(accumulator):
            self.multiply(accumulator, q, k, transposed=True)
            return plgpu.wgmma_accumulator_load(accumulator, wait_n=0)

        return pl.run_scoped(product, plgpu.ACC((q.shape[0], k.shape[0]), jnp.float32))


def _halves(x):
    """Returns (hi, lo) of float32 x, both in float32.

    It does not convert there and back, which XLA takes for the identity.
    """
    hi = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return hi, x - hi


# --- Clusters of CTAs that load together what all of them read ------------------------------------
# The CTAs of a cluster go through the same number of steps. Each has a ring in its own shared
# memory, and some of the tiles in a slot are the same for all. Every producer reads a part of such
# a tile and multicasts it: TMA writes it into the same slot of every CTA and counts its bytes in
# the full barrier of each. That changes two things about the ring, and nothing else:
#
#     full    belongs to one CTA. Its producer announces all bytes of a tile, from any CTA, so a
#             consumer waits as without a cluster. Bytes of a neighbour may come before they are
#             announced: the phase cannot end, as the producer's own arrival is still missing.
#     empty   is a promise to all producers, since all of them write here. A consumer that has read
#             a slot arrives at the empty barrier of every CTA, and each counts the warpgroups of
#             the cluster. A producer that has waited for its own may overwrite the slot everywhere.
#
# At a barrier of the cluster, one thread of the warpgroup arrives for each CTA; at an ordinary one,
# all 128 threads do. So the warps of a warpgroup meet before it: otherwise a warp that is ahead
# would give away rows that another one still reads.
#
# A CTA may not end while others write to it or arrive at its barriers. They no longer do once it
# has seen the last release of each slot, which is what `Ring.drain` waits for.
#
# The interpreter makes the arrivals and finds races of the ring, but it ignores `collective_axes`:
# every CTA loads all parts. Multicast runs on a GPU alone (tests/hopper_cases.py).

CLUSTER_AXIS = "neighbour"


def cluster_axes(size: int) -> dict[str, int]:
    """Returns the cluster axes of a launch with clusters of that many CTAs, with their sizes."""
    return {CLUSTER_AXIS: size} if size > 1 else {}


def cluster_rank(size: int):
    """Returns the rank of this CTA in its cluster."""
    return lax.axis_index(CLUSTER_AXIS) if size > 1 else jnp.int32(0)


def multicast(size: int) -> str | None:
    """Returns `collective_axes` of a copy that the CTAs of a cluster make together."""
    return CLUSTER_AXIS if size > 1 else None


def empty_barrier(size: int, warpgroups: int, slots: int):
    """Makes the empty barriers of a ring that `warpgroups` warpgroups of each CTA read."""
    if size == 1:
        return plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots)
    return plgpu.ClusterBarrier(
        collective_axes=(CLUSTER_AXIS,), num_arrivals=warpgroups, num_barriers=slots
    )


def cluster_arrive(barrier, interpret: bool):
    """Arrives once at a barrier of the cluster, when every warp of this warpgroup has come here."""
    inline.warpgroup_barrier(interpret)
    plgpu.barrier_arrive(barrier)


def cluster_release(size: int, ring: Ring, n, interpret: bool):
    """Releases the n-th fill of a ring for this warpgroup, a consumer that has read it."""
    if size > 1:
        inline.warpgroup_barrier(interpret)
    ring.release(n)


# --- Loads that zero the padding of a tile, which may hold NaN ------------------------------------
# Only tiles that hold padding pay: the loading threads wait for the copy, write zeros and then
# arrive themselves. A copy of the whole array with padding cleared would be as large as the array
# (20 % of the forward at T = 32k with packed documents).


class Padding(NamedTuple):
    """Padding of one axis, in device memory."""

    valid: Any  # int32[B, length, and further ones]: 0 for padding
    tiles: Any  # int32[B, tiles]: 1 for those that hold padding

    @classmethod
    def of(cls, valid, tile: int) -> Padding | None:
        """Makes the record from bool[B, length], for tiles of `tile` rows.

        Returns None where `valid` is None.
        """
        if valid is None:
            return None
        padded = pad_axis(valid, 1, -(-valid.shape[1] // tile) * tile, True)
        holes = ~jnp.all(padded.reshape(len(valid), -1, tile), axis=-1)
        # Beyond the end TMA delivers zeros.
        length = within_reach(valid.shape[1])
        return cls(pad_axis(valid, 1, length, True).astype(jnp.int32), holes.astype(jnp.int32))


def loader(padding: Padding | None, *options) -> Callable:
    """Returns the function that loads a tile, (source, destination, full, batch, tile).

    Args:
        padding: padding of the array's rows; None for plain copies.
        *options: the other fields of Loader.
    """
    if padding is not None:
        return Loader(padding, *options)
    return lambda source, destination, full, *_: plgpu.copy_gmem_to_smem(source, destination, full)


class Loader(NamedTuple):
    """Loader of the tiles of one array, which clears the padding in them.

    Attributes:
        padding: padding of the array's rows.
        arrived: mbarrier of one arrival, for this loader alone.
        swizzle: swizzle of the tile in shared memory, in bytes.
        interpret: run under the interpreter.
        threads: number of threads that load together, WARP or WARPGROUP.
    """

    padding: Padding
    arrived: Any
    swizzle: int
    interpret: bool
    threads: int = WARPGROUP

    def __call__(self, source, destination, full, batch, tile):
        """Starts the copy of a tile, which arrives once on `full`.

        Where rows are padding, waits for the copy, zeroes them and then arrives.

        Args:
            source: the tile in device memory.
            destination: [rows, columns] in shared memory.
            full: the barrier.
            batch: the batch entry.
            tile: number of the tile along the axis that may hold padding.
        """
        copy = lambda barrier: plgpu.copy_gmem_to_smem(source, destination, barrier)
        padding = self.padding
        holes = padding.tiles[batch, tile]
        pl.when(holes == 0)(lambda: copy(full))

        @pl.when(holes != 0)
        def _():
            copy(self.arrived)
            plgpu.barrier_wait(self.arrived)
            rows = destination.shape[0]
            valid = padding.valid.at[batch, pl.ds(tile * rows, rows)]
            clear_padding(destination, valid, self.swizzle, self.interpret, self.threads)
            plgpu.barrier_arrive(full)
