"""Calls of a serving engine that are measured: mixes of prompts and steps over pages.

A program is several layers: what is made of the integers alone is then made once, as in a model.
Each layer has queries of its own and the pages of one of four layers in turn, so that none finds
its keys in the L2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas

LAYERS = 16  # the smallest models that are served have as many
POOLS = 4  # layers whose pages fit into memory


@dataclasses.dataclass(frozen=True)
class Mix:
    """One step of an engine.

    Attributes:
        name: for the table.
        sequences: (queries, keys) of each sequence, new tokens included.
        prefix: keys at the front that all sequences share, in the same pages.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    prefix: int = 0
    page_size: int = 64
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def tokens(self) -> int:
        """Number of rows of q."""
        return sum(queries for queries, _ in self.sequences)

    @property
    def columns(self) -> int:
        """Pages that the longest sequence has."""
        return max(-(-keys // self.page_size) for _, keys in self.sequences)

    @property
    def pages(self) -> int:
        """Number of pages of a layer."""
        own = (max(keys - self.prefix, 0) for _, keys in self.sequences)
        return self.prefix // self.page_size + sum(-(-keys // self.page_size) for keys in own)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of a layer, shared ones once."""
        return 4 * self.pages * self.page_size * self.kv_heads * self.head_dim

    @property
    def flops(self) -> float:
        """Floating-point operations of a layer."""
        pairs = sum(queries * (keys - (queries - 1) / 2) for queries, keys in self.sequences)
        return 4.0 * self.heads * self.head_dim * pairs

    def table(self) -> np.ndarray:
        """Draws the page table, int32[S, columns]: shared pages first, the others in any order."""
        common, number = self.prefix // self.page_size, 0
        order = np.random.default_rng(0).permutation(self.pages).astype(np.int32)
        table = np.zeros((len(self.sequences), self.columns), np.int32)
        table[:, :common] = order[:common]
        for row, (_, keys) in zip(table, self.sequences, strict=True):
            own = -(-max(keys - self.prefix, 0) // self.page_size)
            row[common : common + own] = order[common + number : common + number + own]
            number += own
        return table

    def arrays(self, dtype=jnp.bfloat16) -> Arrays:
        """Draws the arrays of all layers."""
        pages = min(LAYERS, POOLS), self.pages, self.page_size, self.kv_heads, self.head_dim
        draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, dtype)
        q = draw(0, LAYERS, self.tokens, self.heads, self.head_dim)
        return Arrays(q, draw(1, *pages), draw(2, *pages), self.integers())

    def integers(self, wanted: Callable[[int], bool] = lambda queries: True) -> dict[str, Any]:
        """Returns the integers of a ragged call; other sequences are left out of the same arrays.

        Args:
            wanted: says by its number of queries whether a sequence is there.
        """
        kept = [i for i, (queries, _) in enumerate(self.sequences) if wanted(queries)]
        order = [*kept, *(i for i in range(len(self.sequences)) if i not in kept)]
        queries, keys = (np.array(x, np.int32)[order] for x in zip(*self.sequences, strict=True))
        queries[len(kept) :] = 0
        found = {"cu_q_lens": np.cumsum([0, *queries]), "kv_lengths": keys, "num_seqs": len(kept)}
        found = {name: jnp.asarray(x, jnp.int32) for name, x in found.items()}
        return found | {"page_table": jnp.asarray(self.table()[order])}


class Arrays(NamedTuple):
    """The arrays of a program."""

    q: Any  # [layers, tokens, N, H]
    k: Any  # [pools, pages, page_size, K, H]
    v: Any
    integers: dict[str, Any]

    def layers(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yields (q, k, v) of each layer."""
        for i, q in enumerate(self.q):
            pool = i % len(self.k)
            yield q, self.k[pool], self.v[pool]


def ragged(arrays: Arrays, **options):
    """Calls ragged_paged_attention in every layer."""
    call = lambda q, k, v: flash_pallas.ragged_paged_attention(
        q, k, v, **options, **arrays.integers
    )
    return [call(*layer) for layer in arrays.layers()]


def steps(arrays: Arrays, **options):
    """Calls flash_decode in every layer, of a mix of nothing but steps of one token."""
    places = {name: arrays.integers[name] for name in ("kv_lengths", "page_table")}
    call = lambda q, k, v: flash_pallas.flash_decode(q[:, None], k, v, **options, **places)[:, 0]
    return [call(*layer) for layer in arrays.layers()]


def contiguous(mix: Mix, arrays: Arrays, **options):
    """Calls flash_attention in every layer, of equal chunks whose keys lie one after the other."""
    (queries, keys), count = mix.sequences[0], len(mix.sequences)
    rows = lambda x, length: x.reshape(count, -1, *x.shape[-2:])[:, :length]
    call = lambda q, k, v: flash_pallas.flash_attention(
        rows(q, queries),
        rows(k, keys),
        rows(v, keys),
        causal=True,
        q_offset=keys - queries,
        **options,
    )
    return [call(*layer) for layer in arrays.layers()]


_steps = lambda number, keys: ((1, keys),) * number

MIXES = (
    *(Mix("steps", _steps(n, keys)) for n, keys in ((16, 8192), (64, 8192), (256, 4096))),
    Mix("one prompt", ((8192, 8192),)),
    Mix("one prompt, pages of 16", ((8192, 8192),), page_size=16),
    Mix("prompts", ((1024, 1024),) * 8),
    Mix("chunk at the end", ((2048, 32768),)),
    Mix("steps and a chunk", (*_steps(32, 8192), (2048, 8192))),
    Mix("chunks and steps", (*((512, 4096),) * 8, *_steps(120, 8192))),
    Mix("shared prefix", _steps(64, 8192 + 256), prefix=8192),
    Mix("shared prefix, 256", _steps(256, 8192 + 256), prefix=8192),
)
