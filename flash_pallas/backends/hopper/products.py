"""Matrix products of the tensor cores: of 16-bit operands as they are, of float32 ones in parts.

A float32 operand is the sum of two bfloat16 ones, hi = bfloat16(x) and lo = bfloat16(x - hi), and a
product is three: hi hi + hi lo + lo hi, added up in one float32 accumulator. lo is at most
2^-8 |x| and its own rounding at most 2^-17 |x|. With lo lo, which is left out, a product a b is
wrong by at most 2^-15 |a b|, and by 2^-18 |a b| in the root mean square.

Where an operand is one array of shape [..., D], in device or in shared memory, it holds its parts
side by side, [..., 2 D] with hi first: one copy moves both, and an element takes as many bytes as
in float32. In registers the parts are a tuple. Results leave the kernels in the same form, because
they are staged where an operand was.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core.integers import round_up
from ...core.padding import pad_axis
from .memory import swizzles, tile_buffer

LENGTH_MULTIPLE = 8  # rows of a swizzled TMA tile: an array's length must be a multiple of it


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of operands of one dtype.

    Attributes:
        dtype: of the call: bfloat16, float16 or float32.
        interpret: run by the interpreter.
    """

    dtype: Any
    interpret: bool = False

    @property
    def parts(self) -> int:
        """16-bit arrays that make one operand."""
        return 2 if self.dtype == jnp.float32 else 1

    @property
    def operand_dtype(self):
        """Of one part."""
        return jnp.dtype(jnp.bfloat16 if self.parts > 1 else self.dtype)

    @property
    def count(self) -> int:
        """wgmmas of one product: what `wgmma_wait` counts."""
        return 3 if self.parts > 1 else 1

    # --- device memory ---------------------------------------------------------------------------

    def operand(self, x, head_dim: int, *summed_rows: int):
        """x [B, length, heads, <= head_dim] as the kernels read it; x itself if it is so.

        Zero-padded to a length in multiples of 8, and to this head dim where TMA does not. Zero
        columns change no score, and the columns that they add to results are dropped.

        Args:
            x: the array.
            head_dim: of its tiles in shared memory.
            *summed_rows: as `buffer` gets them for each of these tiles.
        """
        columns = self.columns(x.shape[3], head_dim, *summed_rows)
        x = pad_axis(pad_axis(x, 3, columns), 1, round_up(x.shape[1], LENGTH_MULTIPLE))
        if self.parts == 1:
            return x
        return jnp.concatenate([part.astype(self.operand_dtype) for part in _halves(x)], axis=-1)

    def columns(self, width: int, head_dim: int, *summed_rows: int) -> int:
        """Of an array that uses `width` of `head_dim`, in device memory: one or the other.

        `summed_rows`: of each kind of its tiles; none stands for 0.
        """
        if self.parts > 1:  # lie side by side: past the end of one is the other
            return head_dim
        # With 32 bytes, 240 filled up to 256 is 0.79 (forward) and 0.76 times as fast as a padded
        # copy (H200, causal, T=16k), and 112 to 128 0.93 and 1.05 times.
        narrowest = 64 if head_dim > 128 else 32
        widest = (self._swizzles(head_dim, rows, width)[:1] for rows in summed_rows or (0,))
        return width if all(s and s[0] >= narrowest for s in widest) else head_dim

    def joined(self, x):
        """What a kernel wrote, an operand, as an array of the call's dtype."""
        if self.parts == 1:
            return x
        hi, lo = jnp.split(x.astype(self.dtype), self.parts, axis=-1)
        return hi + lo

    # --- shared memory ---------------------------------------------------------------------------

    def buffer(self, shape, *arrays, summed_rows: int = 0):
        """Shared memory of an operand of this shape; see `swizzle`."""
        swizzle = self.swizzle(shape[-1], *arrays, summed_rows=summed_rows)
        return tile_buffer((*shape[:-1], self.parts * shape[-1]), self.operand_dtype, swizzle)

    def swizzle(self, width: int, *arrays, summed_rows: int = 0) -> int:
        """Bytes: the widest that divides what products sum over and suits what is copied.

        Args:
            width: of a tile's rows, which products sum over.
            *arrays: operands in device memory that are copied into the tile or out of it.
            summed_rows: columns of a block of rows, where a product sums over those too.
        """
        columns = (x.shape[-1] // self.parts for x in arrays)
        return self._swizzles(width, summed_rows, *columns)[0]

    def _swizzles(self, width: int, summed_rows: int, *columns: int) -> list[int]:
        return swizzles(math.gcd(width, summed_rows), self.operand_dtype, *columns)

    def refs(self, ref) -> tuple:
        """The parts of an operand in shared memory."""
        if self.parts == 1:
            return (ref,)
        width, rows = ref.shape[-1] // self.parts, (slice(None),) * (len(ref.shape) - 1)
        return tuple(ref.at[(*rows, slice(i, i + width))] for i in (0, width))

    def store(self, ref, x):
        """Write x, f32 registers, to shared memory as an operand."""
        self.store_parts(ref, self.split(x))

    def store_parts(self, ref, parts: tuple):
        """Write what `split` made."""
        for target, part in zip(self.refs(ref), parts, strict=True):
            target[...] = part

    def load(self, ref, layout):
        """What `store` wrote, in f32 registers."""
        hi, *lo = (part.astype(jnp.float32) for part in self.load_parts(ref, layout))
        return hi + lo[0] if lo else hi

    def load_parts(self, ref, layout) -> tuple:
        """An operand in registers."""
        return tuple(plgpu.load(part, layout=layout) for part in self.refs(ref))

    # --- registers -------------------------------------------------------------------------------

    def split(self, x) -> tuple:
        """The parts of x, f32 registers."""
        if self.parts == 1:
            return (x.astype(self.operand_dtype),)
        if self.interpret:
            return tuple(part.astype(self.operand_dtype) for part in _halves(x))
        hi = x.astype(self.operand_dtype)
        return hi, (x - hi.astype(jnp.float32)).astype(self.operand_dtype)

    def multiply(self, accumulator, a, b, *, transposed: bool = False):
        """Issue accumulator += a @ b, or a @ b^T: `count` asynchronous wgmmas.

        Args:
            accumulator: plgpu.ACC.
            a: an operand in shared memory, or its parts in registers.
            b: an operand in shared memory.
            transposed: b is to be transposed.
        """
        lefts = a if isinstance(a, tuple) else self.refs(a)
        rights = [part.transpose((1, 0)) if transposed else part for part in self.refs(b)]
        for i, left in enumerate(lefts):
            for right in rights[: self.parts - i]:
                plgpu.wgmma(accumulator, left, right)


def _halves(x):
    """(hi, lo) of float32 x, in float32.

    Not by converting there and back, which XLA takes for the identity.
    """
    hi = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return hi, x - hi
