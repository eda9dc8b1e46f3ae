"""Decode steps that read chosen blocks of a cache, and what dense attention says of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from .hopper_decode_cases import assert_near


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A step; the first sequence's lists have every block, those of the last sequence none.

    Attributes:
        lengths: number of keys of each sequence.
        block: keys of a block.
        heads: number of lists of a sequence: 1 or K.
        page: page size, or None for a contiguous cache.
        cache: dtype of a cache in eight bits, with a scale for each sequence or page and head.
        options: other arguments of flash_decode.
    """

    name: str
    lengths: tuple[int, ...] = (300, 257, 64, 1, 190)
    block: int = 64
    heads: int = 2
    page: int | None = None
    cache: str | None = None
    N: int = 8
    K: int = 2
    H: int = 64
    S: int = 320
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name

    def draw(self):
        """Returns ((q, k, v), arguments of flash_decode, dense k and v, bool[B, K, S] of keys)."""
        rng, batch = np.random.default_rng(5), len(self.lengths)
        normal = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(self.dtype))
        q = normal(batch, 1, self.N, self.H)
        dense = [normal(batch, self.S, self.K, self.H) for _ in range(2)]
        count = -(-self.S // self.block)
        index = rng.integers(-1, count, (batch, self.heads, count + 2)).astype(np.int32)
        index[0, :, :count] = rng.permutation(count)
        index[1, 0] = rng.choice([-5, -(2**31), 2**31 - 1, count, 2], count + 2)
        index[-1] = -1
        seen = np.zeros((batch, self.K, self.S), bool)
        length = np.array(self.lengths)
        for b, head, each in np.ndindex(batch, self.K, count + 2):
            i = int(index[b, head % self.heads, each])
            if 0 <= i < count:
                seen[b, head, i * self.block : (i + 1) * self.block] = True
        seen &= np.arange(self.S) < length[:, None, None]
        arguments = dict(self.options) | {"kv_lengths": length, "kv_blocks": index}
        arguments["kv_block_size"] = self.block
        stored = [np.where(seen.any(1)[:, :, None, None], x, np.nan) for x in dense]
        if self.cache is not None:
            scales = np.exp2(rng.integers(-6, -3, (2, batch, self.K))).astype(np.float32)
            stored = [
                np.clip(np.round(x / s[:, None, :, None]), -128, 127).astype(self.cache)
                for x, s in zip(dense, scales, strict=True)
            ]
            dense = [
                (x.astype(np.float32) * s[:, None, :, None]).astype(jnp.dtype(self.dtype))
                for x, s in zip(stored, scales, strict=True)
            ]
            arguments |= {"k_scale": scales[0], "v_scale": scales[1]}
        else:
            stored = [x.astype(jnp.dtype(self.dtype)) for x in stored]
        if self.page is not None:
            columns = self.S // self.page
            table = rng.permutation(batch * columns).reshape(batch, columns).astype(np.int32)
            for place, x in enumerate(stored):
                pages = np.empty((batch * columns, self.page, *x.shape[2:]), x.dtype)
                pages[table] = x.reshape(batch, columns, self.page, *x.shape[2:])
                stored[place] = pages
            for name in ("k_scale", "v_scale"):
                if name in arguments:
                    scale = np.empty((batch * columns, self.K), np.float32)
                    scale[table] = arguments[name][:, None]
                    arguments[name] = scale
            arguments["page_table"] = table
        return (q, *stored), arguments, dense, seen


_SINKS = np.linspace(-1.0, 2.0, 8).astype(np.float32)
CASES = (
    Chosen("contiguous"),
    Chosen("shared", heads=1, options=(("sinks", _SINKS), ("num_splits", 3))),
    Chosen("pages", page=64, options=(("softcap", 3.0),)),
    Chosen("blocks_of_pages", page=16, block=32, heads=1),
    Chosen("small_blocks_128", block=16, H=128, dtype="bfloat16"),
    Chosen("one_head", N=4, K=1, heads=1, dtype="bfloat16", options=(("num_splits", 2),)),
    Chosen(
        "wide", (65, 128, 1), block=32, H=304, S=128, dtype="bfloat16", options=(("num_splits", 2),)
    ),
    Chosen("int8", cache="int8", dtype="bfloat16"),
    Chosen("int8_pages", cache="int8", page=32, block=64, dtype="bfloat16", heads=1),
)


def assert_right(case: Chosen, attend):
    """Checks attend(q, k, v, arguments) -> (o, lse) against dense attention with a mask."""
    (q, *stored), arguments, dense, seen = case.draw()
    found = attend(q, *stored, arguments)
    of_heads = np.repeat(seen, case.N // case.K, axis=1)
    options = {name: arguments.get(name) for name in ("sinks", "softcap")}
    assert_near(str(case), (q, *dense), options | {"mask": of_heads[:, :, None]}, found)
    if "sinks" not in arguments:
        o, lse = (np.asarray(x, np.float64) for x in found)
        nothing = ~of_heads.any(-1)
        assert nothing.any() and (o[:, 0][nothing] == 0).all()
        assert (lse[..., 0][nothing] == -np.inf).all()
