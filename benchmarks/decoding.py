"""Decoding calls that are measured: groups on caches of one size, compared in one run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STEP = 1 / 16  # of coarse numbers, and so the scale of a cache of int8
CHOSEN_KEYS = 64  # of a block, where blocks are chosen
OURS, CUDNN, TRITON = "flash_pallas", "jax_cudnn", "pallas_triton"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a bfloat16 cache, k [B, S, K, H] and v [B, S, K, Hv], and its query heads.

    If it is shared, the values are the first Hv columns of k: one array.
    """

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    coarse: bool = False  # numbers that eight bits hold as well: multiples of STEP, 4 digits
    v_head_dim: int | None = None  # None: head_dim
    shared: bool = False

    @property
    def label(self) -> str:
        """B,S,N,K,H in one short string, or B,S,N,K,H/Hv where they differ."""
        dims = f"{self.head_dim}" + (f"/{self.v_head_dim}" if self.v_head_dim else "")
        dims += " shared" * self.shared
        return f"{self.batch},{self.length},{self.heads},{self.kv_heads},{dims}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of k and v together, which a step has to read."""
        columns = self.head_dim + (0 if self.shared else self.v_head_dim or self.head_dim)
        return 2 * self.batch * self.length * self.kv_heads * columns

    def shapes(self, queries: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the bfloat16 shapes of q [B, T, N, H], k and v."""
        heads = (queries, self.heads), *((self.length, self.kv_heads),) * 2
        widths = self.head_dim, self.head_dim, self.v_head_dim or self.head_dim
        dims = [(self.batch, *lead, width) for lead, width in zip(heads, widths, strict=True)]
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in dims]

    def caches(self, at_least: int) -> list[tuple[jax.Array, jax.Array]]:
        """Returns standard normal (k, v) pairs, as many as hold `at_least` bytes together.

        Of a shared cache v is a copy, for the reference.
        """
        shapes = [x.shape for x in self.shapes(1)[1:]]
        pairs = -(-at_least // self.kv_bytes)
        found = [
            [
                _normal(jax.random.key(2 * i + j), shape, self.coarse)
                for j, shape in enumerate(shapes[: 2 - self.shared])
            ]
            for i in range(pairs)
        ]
        whole = lambda k, v=None: (k, k[..., : shapes[1][-1]] if v is None else v)
        return [whole(*arrays) for arrays in found]

    def chosen(self, number: int) -> np.ndarray:
        """Draws different blocks of CHOSEN_KEYS keys for every sequence and KV head, [B, K, M]."""
        shape = self.batch, self.kv_heads, self.length // CHOSEN_KEYS
        order = np.random.default_rng(0).random(shape).argsort(axis=-1)
        return order[..., :number].astype(np.int32)

    def read_bytes(self, call: Call) -> int:
        """Bytes of k and v that a call has to read."""
        share = call.chosen * CHOSEN_KEYS / self.length if call.chosen else 1.0
        return round(self.kv_bytes * share) // (1 if call.cache is None else 2)

    def flops(self, call: Call) -> float:
        """Counts the operations of a call: 2 for each column of each score and output."""
        keys = call.chosen * CHOSEN_KEYS or self.length
        columns = self.head_dim + (self.v_head_dim or self.head_dim)
        return 2.0 * self.batch * keys * self.heads * call.queries * columns

    def queries(self, number: int) -> jax.Array:
        """Returns q [B, T, N, H], standard normal, for `number` query tokens."""
        return _normal(jax.random.key(999), self.shapes(number)[0].shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, coarse=False):
    found = jax.random.normal(key, shape, jnp.bfloat16)
    if not coarse:
        return found
    # Not by converting there and back, which XLA takes for the identity.
    found = jax.lax.reduce_precision(found.astype(jnp.float32), exponent_bits=8, mantissa_bits=3)
    return (jnp.round(found / STEP) * STEP).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to decode.

    Attributes:
        provider: the implementation, one of the names of PROVIDERS in decoders.py.
        queries: number of new tokens in each sequence.
        page_size: tokens of a page in a paged cache; None means a contiguous cache.
        cache: dtype of an 8-bit cache, with a scale for each head, or for each page and head.
        num_splits: number of ranges that the keys are read in; None leaves it to the provider.
        padding: number of keys of a contiguous cache before the sequence, hidden by kv_starts.
        traced_window: True if a window, given as an array, is as long as the sequence.
        chosen: number of blocks of CHOSEN_KEYS keys that each KV head reads, drawn; 0: all keys.
        blocks: fields of the backend's tile sizes to replace, for tuning.
    """

    provider: str = OURS
    queries: int = 1
    page_size: int | None = None
    cache: str | None = None
    num_splits: int | None = None
    padding: int = 0
    traced_window: bool = False
    chosen: int = 0
    blocks: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """Everything that sets this call apart from one token and a contiguous cache."""
        parts = [self.provider] * (self.provider != OURS)
        parts += [f"T={self.queries}"]
        parts += [f"pages of {self.page_size}"] * (self.page_size is not None)
        parts += [f"{self.cache}"] * (self.cache is not None)
        parts += [f"{self.num_splits} splits"] * (self.num_splits is not None)
        parts += [f"{self.padding} keys of padding"] * bool(self.padding)
        parts += ["traced window"] * self.traced_window
        parts += [f"{self.chosen} blocks of {CHOSEN_KEYS}"] * bool(self.chosen)
        return ", ".join([*parts, *(f"{name}={value}" for name, value in self.blocks)])


@dataclasses.dataclass(frozen=True)
class Group:
    """Calls on caches of the same size, timed against each other."""

    name: str
    sizes: Sizes
    calls: tuple[Call, ...]


def _blocks(num_splits: int, cache: str | None = None, **blocks: int) -> Call:
    return Call(num_splits=num_splits, cache=cache, blocks=tuple(blocks.items()))


_ONE = Call()
_PEERS = (_ONE, Call(CUDNN), Call(TRITON))
_STEPS = tuple(Call(queries=n) for n in (1, 4, 16))
_PAGES = (_ONE, *(Call(page_size=n) for n in (16, 64, 256)))
_EIGHT_BITS = (
    _ONE,
    *(Call(cache=dtype) for dtype in ("int8", "float8_e4m3fn")),
    *(Call(cache=dtype, page_size=64) for dtype in ("int8", "float8_e4m3fn")),
)
# The padding is as long as the sequence: what is not read must not cost anything.
_bounded = lambda length: (_ONE, Call(padding=length), Call(traced_window=True))
_chosen = (_ONE, *(Call(chosen=n) for n in (16, 64, 256)))
_splits = lambda *numbers: tuple(Call(num_splits=n) for n in numbers)
_WIDE = (_ONE, Call(page_size=64))
_DRAFTS = Call(queries=2, page_size=64)
_latent = lambda batch, heads, coarse=False: Sizes(
    batch, 32768, heads, 1, 576, coarse=coarse, v_head_dim=512, shared=True
)

GROUPS: tuple[Group, ...] = (
    *(Group("lengths", Sizes(1, n << 10), _PEERS) for n in (8, 32, 128, 512)),
    *(Group("batches", Sizes(n, 8192), _PEERS) for n in (16, 128)),
    Group("tokens", Sizes(1, 131072), _STEPS),
    Group("tokens", Sizes(16, 8192), _STEPS),
    Group("pages", Sizes(1, 131072), _PAGES),
    Group("pages", Sizes(16, 8192), _PAGES),
    Group("pages", Sizes(128, 8192), (_ONE, Call(page_size=64))),
    Group("lower bounds", Sizes(1, 32768), _bounded(32768)),
    Group("lower bounds", Sizes(16, 8192), _bounded(8192)),
    Group("chosen blocks", Sizes(1, 131072), _chosen),
    Group("chosen blocks", Sizes(16, 32768), _chosen),
    Group("head dims", Sizes(16, 8192, head_dim=64), (_ONE,)),
    Group("head dims", Sizes(16, 8192, head_dim=256), (_ONE,)),
    # Above head dim 256; from 64 MiB on. The last are caches of multi-head latent attention.
    *(Group("wide heads", Sizes(n, 8192, 32, 4, 512), _WIDE) for n in (1, 4, 16)),
    *(Group("latent", Sizes(1, 32768, n, 1, 576, v_head_dim=512), _WIDE) for n in (16, 64, 128)),
    *(Group("latent", Sizes(16, 32768, n, 1, 576, v_head_dim=512), _WIDE) for n in (16, 128)),
    *(Group("latent, one array", _latent(1, n), _WIDE) for n in (16, 64, 128)),
    *(Group("latent, one array", _latent(16, n), (*_WIDE, _DRAFTS)) for n in (16, 64, 128)),
    Group("splits", Sizes(1, 32768), _splits(1, 2, 4, 8, 16, 24, 32, 33, 64, 128)),
    Group("splits", Sizes(16, 8192), _splits(1, 2, 3, 4, 6, 8, 16)),
    Group("splits", Sizes(128, 8192), _splits(1, 2, 4)),
    *(Group("eight bits", Sizes(1, n << 10, coarse=True), _EIGHT_BITS) for n in (32, 128)),
    *(Group("eight bits", Sizes(n, 8192, coarse=True), _EIGHT_BITS) for n in (16, 128)),
    *(
        Group("eight bits, wide heads", Sizes(n, 8192, 32, 4, 512, coarse=True), _EIGHT_BITS)
        for n in (1, 16)
    ),
    *(
        Group("eight bits, latent", _latent(batch, n, coarse=True), _EIGHT_BITS)
        for batch, n in ((1, 16), (16, 16), (16, 64))
    ),
    Group(
        "blocks",
        Sizes(1, 32768),
        (
            _ONE,
            *(_blocks(16, stages=n) for n in (3, 4)),
            _blocks(16, guesses=False),
            *(_blocks(n) for n in (32, 33)),
            _blocks(16, stages=3, upright=False),
        ),
    ),
    Group("blocks", Sizes(1, 131072), (_ONE, *(_blocks(n, stages=3) for n in (16, 33)))),
    Group(
        "blocks", Sizes(16, 8192), (_ONE, _blocks(1, stages=3), _blocks(1, stages=3, upright=False))
    ),
    Group(
        "blocks",
        Sizes(1, 32768, coarse=True),
        (
            Call(cache="int8"),
            *(_blocks(n, "int8") for n in (16, 33)),
            _blocks(32, "int8", stages=3),
            _blocks(16, "int8", stages=6),
            _blocks(32, "int8", upright=False),
        ),
    ),
    Group(
        "blocks",
        Sizes(16, 8192, coarse=True),
        (
            Call(cache="int8"),
            _blocks(1, "int8", stages=8),
            _blocks(2, "int8", stages=3),
            _blocks(2, "int8", upright=False),
        ),
    ),
)
