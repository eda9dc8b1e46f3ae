"""Plain readers of memory: their speed is the ceiling of what decoding can reach.

They are kernels that stream an array through shared memory and compute nothing, and a sum by XLA.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flash_pallas.backends.gpu.launch import launch
from flash_pallas.backends.hopper.common.pipeline import Ring, tile_buffer

COLUMNS = 128
SUM = "XLA sum"


@dataclasses.dataclass(frozen=True)
class Reader:
    """A kernel in which every CTA streams its share of x [R, 128] through a ring of tiles, by TMA.

    Attributes:
        ctas: number of CTAs that share the rows.
        rows: rows of a tile.
        stages: tiles in flight.
        interpret: run by the interpreter.
    """

    ctas: int
    rows: int
    stages: int
    interpret: bool = False

    @property
    def label(self) -> str:
        """Name in the results."""
        return f"TMA, {self.ctas} CTAs, {self.stages} stages of {self.rows} rows"

    def __call__(self, x):
        """Returns int32[ctas, 128]: the number of tiles that each CTA has read."""
        buffer = tile_buffer((self.stages, self.rows, COLUMNS), x.dtype)
        barrier = plgpu.Barrier(num_barriers=self.stages)
        return launch(
            self.kernel,
            out=jax.ShapeDtypeStruct((self.ctas, COLUMNS), jnp.int32),
            scratch=(buffer, barrier, barrier),
            grid={"cta": self.ctas},
            threads=2,
            name="reader",
            interpret=self.interpret,
        )(x)

    def kernel(self, x, out, smem, full, empty):
        """Runs a producer warpgroup that loads, and a consumer that gives the slots back."""
        ring = Ring(full, empty, self.stages)
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        tiles = x.shape[0] // self.rows
        share = lambda n: lax.div(n * jnp.int32(tiles), jnp.int32(self.ctas))
        first, count = share(cta), share(cta + 1) - share(cta)

        def load(j, _):
            ring.wait_empty(j)
            rows = pl.ds((first + j) * self.rows, self.rows)
            slot = ring.slot(j)
            plgpu.copy_gmem_to_smem(x.at[rows], smem.at[slot], full.at[slot])

        def release(j, _):
            ring.wait_full(j)
            ring.release(j)

        @pl.when(wg == 0)
        def _():
            lax.fori_loop(0, count, release, None)
            out[cta] = jnp.full((COLUMNS,), count, jnp.int32)

        @pl.when(wg == 1)
        def _():
            lax.fori_loop(0, count, load, None)
            ring.drain(count)


READERS = (Reader(132, 64, 12), Reader(264, 64, 6))


def xla_sum(x):
    """Sums an array in float32, for which XLA reads it once."""
    return jnp.sum(x, dtype=jnp.float32)
