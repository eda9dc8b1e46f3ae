"""The shapes that are measured, each with its reason."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes in jax.nn's letters: q [B, T, N, H], k and v [B, S, K, H]."""

    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    reason: str = dataclasses.field(default="", compare=False)

    @property
    def kv_len(self) -> int:
        """S, the length of k and v, equal to T; every suite measures self-attention."""
        return self.q_len

    @property
    def label(self) -> str:
        """B,T,N,K,H in one short string."""
        return ",".join(
            str(x) for x in (self.batch, self.q_len, self.q_heads, self.kv_heads, self.head_dim)
        )


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row pair of a table: a shape with or without the causal mask, forward and backward."""

    shape: Shape
    causal: bool

    @property
    def label(self) -> str:
        """The shape's label and the mask."""
        return f"{self.shape.label} {'causal' if self.causal else 'full'}"


def _both(*shapes: Shape) -> tuple[Cell, ...]:
    return tuple(Cell(shape, causal) for shape in shapes for causal in (False, True))


_HEAD_DIM_128 = Shape(4, 4096, 16, 16, 128, "16k tokens, the head dim of most language models")
_HEAD_DIM_64 = Shape(4, 4096, 32, 32, 64, "head dim 64: exponentials weigh twice as much")
_HEAD_DIM_256 = Shape(4, 4096, 8, 8, 256, "head dim 256: registers and shared memory are tightest")

_MAIN_SHAPES = (
    _HEAD_DIM_128,
    Shape(1, 16384, 16, 16, 128, "long context: the loop's steady state"),
    Shape(16, 1024, 16, 16, 128, "short context: prologue, epilogue and launch weigh most"),
    _HEAD_DIM_64,
    _HEAD_DIM_256,
    Shape(2, 8192, 32, 8, 128, "grouped queries: K and V are read by four query heads"),
)
_HEAD_DIM_192 = Shape(
    4, 4096, 16, 16, 192, "head dim 192, of multi-head latent attention in training"
)
_HEAD_DIM_256_LONG = Shape(1, 16384, 8, 8, 256, "head dim 256, long")

# The bars of FlashAttention's README: from the shortest sequence to the longest, 2048 wide.
CHART_LENGTHS = tuple(512 * 2**i for i in range(6))
_CHART_SHAPES = tuple(
    Shape(16384 // length, length, 2048 // head_dim, 2048 // head_dim, head_dim, "a group of bars")
    for head_dim in (128, 64, 256)
    for length in CHART_LENGTHS
)

# Every row of a suite holds 16k tokens and N * H = 2048 (GQA: 4096), so that rows differ in how
# the work is cut and not in how much memory they touch: 64 MiB an array, above any L2.
SUITES: dict[str, tuple[Cell, ...]] = {
    "quick": _both(_HEAD_DIM_128, _HEAD_DIM_64, _HEAD_DIM_256),
    "h200": _both(*_MAIN_SHAPES),
    # Cells that "h200" lacks, to compare with FlashAttention-4: other head dims, other lengths.
    "fa4": _both(
        _HEAD_DIM_192,
        _HEAD_DIM_256_LONG,
        *(
            Shape(16384 // length, length, heads, kv_heads, head_dim, "from short to long")
            for head_dim, heads, kv_heads in (
                (64, 32, 32),
                (96, 16, 16),
                (128, 16, 16),
                (192, 16, 16),
            )
            for length in (1024, 2048, 8192, 16384)
        ),
    ),
    # Those of "h200", and others where its backward is likeliest to be ahead: short sequences, and
    # groups of small head dims. Head dim 96 is left out, as the wheel pads it to 128.
    "fa3": _both(
        *_MAIN_SHAPES,
        _HEAD_DIM_192,
        _HEAD_DIM_256_LONG,
        Shape(16, 1024, 16, 16, 192, "head dim 192, short"),
        Shape(16, 1024, 32, 32, 64, "head dim 64, short"),
        Shape(1, 16384, 32, 32, 64, "head dim 64, long"),
        Shape(32, 512, 16, 16, 128, "the shortest: every tile is a first or a last one"),
        Shape(2, 8192, 64, 8, 64, "K and V are read by eight query heads of 64"),
    ),
    # Head dims that neither cuDNN nor FlashAttention takes.
    "wide": (
        *_both(
            Shape(1, 8192, 32, 4, 512, "global layers of a language model, grouped queries"),
            Shape(2, 4096, 16, 16, 512, "the same work without groups"),
            Shape(1, 8192, 32, 4, 384, "between the two"),
        ),
        Cell(Shape(1, 16384, 1, 1, 512, "a VAE's attention to an image of 128 x 128"), False),
    ),
    "charts": _both(*_CHART_SHAPES),
    "smoke": _both(Shape(1, 128, 2, 1, 64, "seconds on a CPU: proves that the program runs")),
}

# Peak memory is read at one batch element, so that T is all that changes.
MEMORY_LENGTHS = tuple(1024 * 2**i for i in range(8))
MEMORY_SHAPE = Shape(1, 0, 16, 16, 128, "a 2048-wide layer, one sequence")
