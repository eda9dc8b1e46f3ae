"""Matmuls on the tensor cores: of 16-bit operands as they are, of float32 ones in parts.

A float32 operand is the sum of two bfloat16 ones, hi = bfloat16(x) and lo = bfloat16(x - hi), and a
matmul is three wgmmas: hi hi + hi lo + lo hi, added up in one float32 accumulator. lo is at most
2^-8 |x| and its own rounding error at most 2^-17 |x|. Including lo lo, which is left out, the error
of a matmul a b is at most 2^-15 |a b|, and 2^-18 |a b| in the root mean square.

An operand that is one array of shape [..., D], in device or in shared memory, holds its parts side
by side, [..., 2 D] with hi first: one copy moves both, and an element takes as many bytes as in
float32. In registers the parts are a tuple. Results leave the kernels in the same form, because
they are staged where an operand was.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ....core.integers import round_up
from ....core.padding import pad_axis
from .pipeline import swizzles, tile_buffer

LENGTH_MULTIPLE = 8  # rows of a swizzled TMA tile: an array's length must be a multiple of it


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """Products of operands of one dtype.

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
        x = pad_axis(pad_axis(x, 3, columns), 1, round_up(x.shape[1], LENGTH_MULTIPLE))
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
        columns = (x.shape[-1] // self.parts for x in arrays if x is not None)
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
