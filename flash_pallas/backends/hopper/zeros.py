"""Arrays of zeros to add to. XLA's own kernel clears 134 MB in 40 us on an H200, this one in 32."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..mosaic.launch import float32, launch

CTAS = 2 * 132  # as many multiprocessors as an H200 has; half and twice as many take as long
TILE_BYTES = 32 << 10  # twice as many: 33 us
MOST_ROWS = MOST_COLUMNS = 256  # of a copy by TMA


def zeros(shape: tuple[int, ...], interpret: bool, after=None):
    """f32[shape] of zeros.

    Args:
        shape: whose last axis is one of FUSED_HEAD_DIMS or a multiple of 64.
        interpret: run by the interpreter.
        after: an array that is to be there before: XLA would else clear what is needed later first,
            or clear once and copy where there are several.
    """
    columns = shape[-1] if shape[-1] <= MOST_COLUMNS else 64
    of_all = math.prod(shape) // columns, columns
    rows = min(TILE_BYTES // (4 * columns), MOST_ROWS)
    tiles = pl.cdiv(of_all[0], rows)
    ctas = min(tiles, CTAS)
    run = launch(
        functools.partial(_clear, ctas, tiles),
        out=float32(of_all),
        scratch=(plgpu.SMEM((rows, columns), jnp.float32),),
        grid={"cta": ctas},
        threads=1,
        name="flash_pallas_zeros",
        interpret=interpret,
    )
    return run(after).reshape(shape)


def _clear(ctas: int, tiles: int, _, out, tile):
    """Every so many tiles; TMA writes nothing past the end of the last."""
    rows, columns = tile.shape
    layout = plgpu.Layout.WG_STRIDED(tile.shape, vec_size=4)
    tile[...] = plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), layout)
    plgpu.commit_smem()
    cta = lax.axis_index("cta")

    @pl.loop(cta, jnp.int32(tiles), step=jnp.int32(ctas))
    def _(n):
        plgpu.copy_smem_to_gmem(tile, out.at[pl.ds(n * rows, rows)])

    plgpu.wait_smem_to_gmem(0)
