"""Decoders: this package, and what jax has for a few queries against a cache.

The peers read a contiguous cache in full and have no lengths. For the Triton kernel the cache is
laid out head by head before it is timed, as it would copy it otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas
from flash_pallas.core import decode, kv_blocks
from flash_pallas.frontend import dispatch, validate_decode

from .decoding import CHOSEN_KEYS, CUDNN, OURS, STEP, TRITON, Call, Sizes

TRITON_RANGES = 512  # CTAs of its grid to aim at: fewer leave SMs idle, more gain nothing


class Unsupported(Exception):
    """Raised where a provider cannot run a call; the message says why."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A call that can be compiled.

    Attributes:
        arrange: (q, k, v) -> the arrays of `run`; not timed.
        run: those arrays -> o [B, T, N, H]; to be jitted.
        chosen: what was left to the provider, for the results: number of splits and the like.
    """

    arrange: Callable[..., tuple]
    run: Callable[..., Any]
    chosen: dict[str, Any]

    def lower(self, sizes: Sizes, call: Call):
        """Lowers the program; it is ready to compile."""
        arrays = jax.eval_shape(self.arrange, *sizes.shapes(call.queries))
        return jax.jit(self.run).lower(*arrays)


def ours(sizes: Sizes, call: Call, backend: str) -> Decoder:
    """Returns flash_decode with full lengths, traced as data; pages lie in a random order.

    Pages of eight bits have scales of their own, all alike. Padding holds NaN.
    """
    size, static = call.page_size, {"kv_block_size": CHOSEN_KEYS} if call.chosen else {}
    splits = "auto" if call.num_splits is None else call.num_splits
    columns = 0 if size is None else sizes.length // size
    pages = sizes.batch * columns
    table = np.random.default_rng(0).permutation(pages).reshape(sizes.batch, columns)
    inverse = np.argsort(table, axis=None)

    if sizes.shared:
        static["v_head_dim"] = sizes.v_head_dim or sizes.head_dim
    of_both = lambda function, *arrays: tuple(None if x is None else function(x) for x in arrays)

    def arrange(q, k, v):
        v = None if sizes.shared else v
        given = {"kv_lengths": jnp.full((sizes.batch,), sizes.length, jnp.int32)}
        if call.cache is not None:
            step = STEP if call.cache == "int8" else 1.0
            k, v = of_both(lambda x: _eight_bits(x, call.cache, step), k, v)
            lead = () if size is None else (pages,)
            scale = jnp.full((*lead, sizes.kv_heads), step, jnp.float32)
            given |= {"k_scale": scale} | ({} if sizes.shared else {"v_scale": scale})
        if size is not None:
            k, v = of_both(lambda x: _pages(x, pages, inverse), k, v)
            given["page_table"] = jnp.asarray(table, jnp.int32)
        if call.padding:
            widths = ((0, 0), (call.padding, 0), (0, 0), (0, 0))
            k, v = of_both(lambda x: jnp.pad(x, widths, constant_values=jnp.nan), k, v)
            given["kv_lengths"] += call.padding
            given["kv_starts"] = jnp.full((sizes.batch,), call.padding, jnp.int32)
        if call.traced_window:
            given["window"] = jnp.int32(sizes.length)
        if call.chosen:
            given["kv_blocks"] = jnp.asarray(sizes.chosen(call.chosen))
        return q, k, v, given

    def problem(q, k, v, given):
        arguments = validate_decode.DecodeArguments(num_splits=splits, **given, **static)
        found = validate_decode.canonicalize(q, k, v, arguments)
        spec, operands = kv_blocks.as_pages(*found)
        blocks = dispatch.BACKENDS[backend].decode.plan(decode.describe(operands, spec))
        return spec, dataclasses.replace(blocks, **dict(call.blocks)), operands

    def run(q, k, v, given):
        if call.blocks:  # The public function has no argument for them.
            return dispatch.BACKENDS[backend].decode.run(*problem(q, k, v, given)).o
        options = {"num_splits": splits, "backend": backend, **static}
        return flash_pallas.flash_decode(q, k, v, **options, **given)

    found = []
    describe = lambda *x: found.append(problem(*arrange(*x))[1])
    jax.eval_shape(describe, *sizes.shapes(call.queries))
    return Decoder(arrange, run, dataclasses.asdict(found[0]))


@functools.partial(jax.jit, static_argnums=1)
def _pages(x, pages, inverse):
    return x.reshape(pages, -1, *x.shape[2:])[inverse]


@functools.partial(jax.jit, static_argnums=1)
def _eight_bits(x, dtype, step):
    return (x.astype(jnp.float32) / step).astype(dtype)


def jax_cudnn(sizes: Sizes, call: Call, backend: str) -> Decoder:
    """Returns jax.nn.dot_product_attention on cuDNN, for one query."""
    _only_plain(call)
    run = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    return Decoder(lambda q, k, v: (q, k, v), run, {})


def pallas_triton(sizes: Sizes, call: Call, backend: str) -> Decoder:
    """Returns jax.experimental.pallas.ops.gpu.decode_attention.gqa, for one query."""
    _only_plain(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import decode_attention
    tiles = sizes.batch * sizes.kv_heads
    splits = call.num_splits or min(max(TRITON_RANGES // tiles, 1), sizes.length // 256)

    def run(q, k, v):
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))  # undone by gqa: nothing is copied
        return decode_attention.gqa(q[:, 0], k, v, k_splits=splits)[:, None]

    arrange = lambda q, k, v: (q, _by_head(k), _by_head(v))
    return Decoder(arrange, run, {"num_splits": splits})


@jax.jit
def _by_head(x):
    return jnp.swapaxes(x, 1, 2)


def _only_plain(call: Call) -> None:
    others = call.page_size is not None or call.blocks or call.cache or call.chosen
    if call.queries != 1 or others:
        raise Unsupported(f"takes one query and a contiguous cache, not {call.label}")


PROVIDERS: dict[str, Callable[[Sizes, Call, str], Decoder]] = {
    OURS: ours,
    CUDNN: jax_cudnn,
    TRITON: pallas_triton,
}


def reference(q, k, v, chosen=None):
    """Computes (o in float32, o of plain jnp in q's dtype): the truth, and a measure of error.

    `chosen`: blocks that each KV head reads, int32[B, K, M]; None: all keys.
    """
    key = jnp.arange(k.shape[1])
    seen = key[None] <= jnp.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
    seen = seen[None, None]
    if chosen is not None:
        some = jnp.any(chosen[..., None] == key[None, None, None] // CHOSEN_KEYS, axis=2)
        seen = seen & jnp.repeat(some, q.shape[2] // k.shape[2], axis=1)[:, :, None]

    def attend(q, k, v):
        width = v.shape[-1]  # jax.nn wants that of k
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, k.shape[-1] - width),))
        return jax.nn.dot_product_attention(q, k, v, mask=seen)[..., :width]

    with jax.default_matmul_precision("highest"):
        exact = attend(*(x.astype(jnp.float32) for x in (q, k, v)))
    with jax.numpy_dtype_promotion("standard"):  # jax.nn adds float32 to bfloat16
        return exact, attend(q, k, v)
