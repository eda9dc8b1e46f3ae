"""Calls that are measured beyond plain and causal attention, in groups compared in one run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas

from . import block_masks

Arguments = dict[str, Any]
Maker = Callable[["Sizes", Any], Arguments]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of q [B, T, N, H], k [B, T, K, H] and v [B, T, K, Hv], and their dtype."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        """B,T,N,K,H or H/Hv in one short string, and the dtype where it is not bfloat16."""
        dims = f"{self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f"/{self.v_head_dim}"
        label = f"{self.batch},{self.length},{self.heads},{self.kv_heads},{dims}"
        return label if self.dtype == "bfloat16" else f"{label} {self.dtype}"

    def arrays(self, seed: int = 0):
        """Draws (q, k, v, do), standard normal."""
        shapes = (
            (self.batch, self.length, self.heads, self.head_dim),
            (self.batch, self.length, self.kv_heads, self.head_dim),
            (self.batch, self.length, self.kv_heads, self.v_head_dim),
            (self.batch, self.length, self.heads, self.v_head_dim),
        )
        keys = jax.random.split(jax.random.key(seed), 4)
        dtype = jnp.dtype(self.dtype)
        return [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call attention.

    Attributes:
        name: name, unique in its group.
        static: keyword arguments of flash_attention that are not arrays.
        make: returns, from (sizes, key), the keyword arguments that are arrays.
        differentiated: names of arrays whose gradients are asked for besides those of q, k and v.
        visible: share of the T * T pairs that is visible, or None where it is not stated.
        function: what is called, with the arguments of flash_attention.
        mod: returns, from sizes and a function that makes an array for another library, the mask as
            a function of positions; for peers.
    """

    name: str
    static: tuple[tuple[str, Any], ...] = ()
    make: Maker = lambda sizes, key: {}
    differentiated: tuple[str, ...] = ()
    visible: Callable[[Sizes], float] | None = None
    function: Callable = flash_pallas.flash_attention
    mod: Callable[[Sizes, Callable], block_masks.Mod] | None = None

    def attention(self, backend: str) -> Callable:
        """Returns the function (q, k, v, arrays) -> o on this backend."""
        static = dict(self.static)
        return lambda q, k, v, arrays: self.function(q, k, v, backend=backend, **static, **arrays)


@dataclasses.dataclass(frozen=True)
class Group:
    """Variants on the same sizes, timed against each other; the first is the yardstick.

    Attributes:
        name: name of the table.
        sizes: sizes of the arrays.
        variants: what is called.
        peers: names of other implementations of the last variant, see peers.py.
        whole: plan the memory of gradients in one program too.
    """

    name: str
    sizes: Sizes
    variants: tuple[Variant, ...]
    peers: tuple[str, ...] = ()
    whole: bool = False

    def has(self, text: str) -> bool:
        """Says whether the name with the sizes, or the name of a variant, contains a text."""
        names = (f"{self.name} {self.sizes.label}", *(v.name for v in self.variants))
        return any(text in name for name in names)


DOCUMENTS = 16


def packed_ids(length: int, documents: int = DOCUMENTS, seed: int = 0) -> np.ndarray:
    """Draws segment ids of documents of unequal lengths, none shorter than a fourth of the mean."""
    cuts = np.random.default_rng(seed).dirichlet(np.full(documents, 4.0)) * 0.75 + 0.25 / documents
    ends = np.round(np.cumsum(cuts) * length).astype(int)
    return np.searchsorted(ends, np.arange(length), side="right").clip(0, documents - 1)


def _segments(sizes: Sizes, key) -> Arguments:
    ids = jnp.asarray(packed_ids(sizes.length), jnp.int32)
    ids = jnp.broadcast_to(ids, (sizes.batch, sizes.length))
    return {"q_segment_ids": ids, "kv_segment_ids": ids}


def _varlen(q, k, v, **options):
    """Computes flash_attention_varlen of a batch of one."""
    return flash_pallas.flash_attention_varlen(q[0], k[0], v[0], **options)[None]


def _in_batch(q, k, v, **options):
    """Computes flash_attention of as many sequences of one length as there are documents."""
    apart = lambda x: x.reshape(DOCUMENTS, -1, *x.shape[2:])
    o = flash_pallas.flash_attention(apart(q), apart(k), apart(v), **options)
    return o.reshape(*q.shape[:3], -1)


def _cu_seqlens(sizes: Sizes, key) -> Arguments:
    counts = np.bincount(packed_ids(sizes.length), minlength=DOCUMENTS)
    return {"cu_seqlens_q": jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)}


def _positions(sizes: Sizes, key) -> Arguments:
    index = jnp.broadcast_to(jnp.arange(sizes.length), (sizes.batch, sizes.length))
    return {"q_positions": index, "kv_positions": index}


def _packed_share(sizes: Sizes) -> float:
    counts = np.bincount(packed_ids(sizes.length)).astype(float)
    return float((counts * (counts + 1)).sum() / 2 / sizes.length**2)


def _in_batch_share(sizes: Sizes) -> float:
    return (sizes.length // DOCUMENTS + 1) / 2 / sizes.length


def _causal_share(sizes: Sizes) -> float:
    return (sizes.length + 1) / 2 / sizes.length


def _window_share(left: int, sizes: Sizes) -> float:
    inside = min(left + 1, sizes.length)
    return (inside * sizes.length - inside * (inside - 1) / 2) / sizes.length**2


def _pair_bias(sizes: Sizes, key) -> Arguments:
    shape = (1, sizes.heads, sizes.length, sizes.length)
    return {"bias": jax.random.normal(key, shape, jnp.bfloat16)}


def _lengths(sizes: Sizes, key) -> Arguments:
    padding = min(100, sizes.length // 2)
    return {"kv_lengths": jnp.full((sizes.batch,), sizes.length - padding, jnp.int32)}


def _slopes(sizes: Sizes, key) -> Arguments:
    exponents = -8.0 * jnp.arange(1, sizes.heads + 1, dtype=jnp.float32) / sizes.heads
    return {"alibi_slopes": jnp.exp2(exponents)}


def _sinks(sizes: Sizes, key) -> Arguments:
    return {"sinks": jax.random.normal(key, (sizes.heads,))}


def squashed(score, b, n, i, j):
    """Computes a score_mod that is neither linear nor one of the built-in ones."""
    return score / (1.0 + jnp.abs(score) * 0.01)


_CAUSAL = (("causal", True),)
CAUSAL = Variant("causal", _CAUSAL, visible=_causal_share)
FULL = Variant("full")
WINDOW = Variant(
    "causal, window 1024",
    (*_CAUSAL, ("window", (1023, 0))),
    visible=functools.partial(_window_share, 1023),
)
PACKED = Variant(f"causal, {DOCUMENTS} packed documents", _CAUSAL, _segments, visible=_packed_share)
VARLEN = Variant(
    f"causal, varlen of {DOCUMENTS} documents", _CAUSAL, _cu_seqlens, (), _packed_share, _varlen
)
# The same tokens without a document that ends within a tile: what packing is to be measured by.
IN_BATCH = Variant(
    f"causal, {DOCUMENTS} sequences of one length",
    _CAUSAL,
    visible=_in_batch_share,
    function=_in_batch,
)
POSITIONS = Variant("causal by positions", _CAUSAL, _positions, visible=_causal_share)
WINDOW_ARRAY = Variant(
    "causal, window 1024 as an array",
    _CAUSAL,
    lambda sizes, key: {"window": jnp.int32(1023)},
    visible=functools.partial(_window_share, 1023),
)
SOFTCAP = Variant("causal, softcap 50", (*_CAUSAL, ("softcap", 50.0)))
# Its speed depends on the logits (backends/gpu/ptx/softcap.py): here every step has large ones.
SOFTCAP_LARGE = Variant(
    "causal, softcap 50, scale 1", (*_CAUSAL, ("softcap", 50.0), ("scale", 1.0))
)
DROPOUT = Variant("causal, dropout 0.1", (*_CAUSAL, ("dropout_rate", 0.1), ("dropout_seed", 0)))
ALIBI = Variant("causal, ALiBi", _CAUSAL, _slopes)
ANY_ORDER = Variant("causal, differentiable to any order", (*_CAUSAL, ("differentiable", "any")))
SINKS = Variant("causal, sinks", _CAUSAL, _sinks, ("sinks",))
LENGTHS = Variant("causal, kv_lengths", _CAUSAL, _lengths)
SCORE_MOD = Variant("causal, score_mod", (*_CAUSAL, ("score_mod", squashed)))
PAIR_BIAS = Variant("bias [1, N, T, T]", (), _pair_bias, ("bias",))


def _sizes(batch, length, heads, head_dim, v_head_dim=None, kv_heads=None) -> Sizes:
    return Sizes(batch, length, heads, kv_heads or heads, head_dim, v_head_dim or head_dim)


def _in_float32(sizes: Sizes) -> Sizes:
    return dataclasses.replace(sizes, dtype="float32")


_BIAS_PEERS = ("jax_cudnn", "tokamax")
FLOAT32_PEERS = ("torch_efficient", "jax_xla")
_MODIFIED = (CAUSAL, SOFTCAP, SOFTCAP_LARGE, DROPOUT, ALIBI, SINKS, LENGTHS, SCORE_MOD)


def _of_mod(name: str, mod: block_masks.Mod, rows: int = 128) -> Variant:
    """Returns the variant of a block mask made from a function of positions."""
    wide = f", blocks of {rows}" if rows != 128 else ""
    return Variant(
        f"block mask, {name}{wide}",
        make=lambda sizes, key: {"block_mask": block_masks.of_mod(mod, sizes.length, rows)},
        visible=lambda sizes: block_masks.share(mod, sizes.length),
        mod=lambda sizes, array: mod,
    )


def _documents(sizes: Sizes, array: Callable) -> block_masks.Mod:
    return block_masks.documents(array(packed_ids(sizes.length).astype(np.int32)))


def _random(sizes: Sizes, array: Callable) -> block_masks.Mod:
    found = array(block_masks.random_blocks(sizes.length))
    return lambda b, n, i, j: found[i // 128, j // 128]


BLOCKS_DOCUMENTS = Variant(
    f"block mask, {DOCUMENTS} documents by ids",
    make=lambda sizes, key: {
        "block_mask": block_masks.of_mod(_documents(sizes, jnp.asarray), sizes.length)
    },
    visible=_packed_share,
    mod=_documents,
)
BLOCKS_RANDOM = Variant(
    "block mask, a tenth of the blocks",
    make=lambda sizes, key: {"block_mask": block_masks.of_random_blocks(sizes.length)},
    visible=lambda sizes: float(block_masks.random_blocks(sizes.length).mean()),
    mod=_random,
)


def _chosen(block: int, most: int) -> Variant:
    """Returns the variant of so many blocks chosen for every head and block of queries."""
    return Variant(
        f"block mask, {most} blocks of {block}",
        make=lambda sizes, key: {
            "block_mask": block_masks.of_chosen(sizes.heads, sizes.length, block, most)
        },
        visible=lambda sizes: min(1.0, most * block / sizes.length),
    )


# Whose lists flash_attention makes by itself.
OWN_LISTS = Variant(
    "mask_mod, window 1024 and 64 global keys",
    (("mask_mod", block_masks.window_and_global),),
    visible=lambda sizes: block_masks.share(block_masks.window_and_global, sizes.length),
)
_BLOCKS = (
    (CAUSAL, _of_mod("causal", block_masks.causal), _of_mod("causal", block_masks.causal, 192)),
    (WINDOW, _of_mod("window 1024", block_masks.window)),
    (
        CAUSAL,
        OWN_LISTS,
        _of_mod("window 1024 and 64 global keys", block_masks.window_and_global),
    ),
    (
        CAUSAL,
        _of_mod("prefix of 4096", block_masks.prefix),
        _of_mod("prefix of 4096", block_masks.prefix, 192),
    ),
    (PACKED, BLOCKS_DOCUMENTS),
    (FULL, BLOCKS_RANDOM),
)
# Video sparse attention (flashinfer's pull request 5326): S = 109,632, 7 heads, 64 blocks of 64.
VIDEO_LENGTH, VIDEO_HEADS = 109_632, 7
_WIDTHS = ((192, 128), (96, 96), (80, 80), (72, 72))

GROUPS: tuple[Group, ...] = (
    Group("modifiers", _sizes(4, 4096, 16, 128), _MODIFIED),
    Group("modifiers", _sizes(4, 4096, 32, 64), _MODIFIED),
    Group("modifiers", _sizes(4, 4096, 8, 256), (CAUSAL, SOFTCAP, SOFTCAP_LARGE, DROPOUT)),
    *(
        Group("window", _sizes(1, length, 16, 128), (CAUSAL, WINDOW, WINDOW_ARRAY))
        for length in (8192, 32768, 131072)
    ),
    Group("derivatives", _sizes(4, 4096, 16, 128), (CAUSAL, ANY_ORDER)),
    Group("packed", _sizes(1, 32768, 16, 128), (CAUSAL, IN_BATCH, PACKED, VARLEN, POSITIONS)),
    Group("packed", _sizes(1, 131072, 16, 128), (IN_BATCH, PACKED, VARLEN)),
    *(
        Group("pair bias", _sizes(128, length, 4, dim), (FULL, PAIR_BIAS), _BIAS_PEERS, whole=True)
        for dim in (16, 32, 64)
        for length in (1024, 2048, 4096)
    ),
    *(
        Group("head dims", _sizes(4, 4096, 16, *dims), (variant,), ("torch_cudnn",))
        for dims in _WIDTHS
        for variant in (FULL, CAUSAL)
    ),
    *(Group("block masks", _sizes(1, 32768, 16, 128), pair, ("flex",)) for pair in _BLOCKS),
    *(
        Group("video blocks", _sizes(1, VIDEO_LENGTH, VIDEO_HEADS, 128), (_chosen(*size),))
        for size in ((64, 64), (128, 64))
    ),
    *(
        Group("float32", _in_float32(_sizes(4, 4096, 16, dim)), (CAUSAL,), FLOAT32_PEERS)
        for dim in (64, 128)
    ),
    # What FlashAttention-3 has besides causal and plain attention, 2048 wide.
    *(
        Group("fa3", _sizes(batch, length, 2048 // dim, dim), (variant,), ("fa3",))
        for batch, length, variant in ((1, 32768, VARLEN), (1, 32768, WINDOW), (4, 4096, SINKS))
        for dim in (64, 128)
    ),
)
