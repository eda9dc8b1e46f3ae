"""The call that a row stands for: its arrays, drawn in numpy, and its arguments."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..api import flash_attention_with_lse
from ..core.block_mask import BlockMask
from ..decode import decode_from_ring, flash_decode
from ..frontend.explain import ExplainedCall, first_call
from ..ragged import ragged_paged_attention
from ..varlen import flash_attention_varlen
from . import dense

EIGHT_BITS = ("int8", "float8_e4m3fn")
SOFTCAP, DROPOUT, SEED = 3.0, 0.1, 7
WINDOW = (150, 60)
BLOCK = 128  # of a block mask
# Tile sizes depend on (B, T, K): with these options a short call runs with those of a long one.
LONG = {"tiles of 4096": (4, 4096, 16), "tiles of 8192": (1, 8192, 2)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One call on one backend.

    Attributes:
        target: a name of `rows.TARGETS`.
        function: "attention", "varlen", "decode" or "ragged".
        wanted: "gradient" (with the outputs), "tangents" (with the outputs), "linear" (tangents of
            a forward that has run), "hessian", or "output".
        head_dim: of q and k.
        v_head_dim: of v.
        dtype: of q.
        options: names of what else the call has.
    """

    target: str
    function: str
    wanted: str
    head_dim: int
    v_head_dim: int
    dtype: str
    options: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the row in a file of results."""
        sizes = f"{self.head_dim}/{self.v_head_dim} {self.dtype}"
        options = ", ".join(self.options) or "plain"
        return f"{self.target} {self.function} {self.wanted} {sizes}: {options}"

    @classmethod
    def parse(cls, key: str) -> Row:
        """Returns the row of this name."""
        head, _, options = key.partition(": ")
        target, function, wanted, sizes, dtype = head.split(" ")
        head_dim, v_head_dim = map(int, sizes.split("/"))
        names = () if options == "plain" else tuple(options.split(", "))
        return cls(target, function, wanted, head_dim, v_head_dim, dtype, names)

    @property
    def cache_dtype(self) -> str:
        """Dtype of the cache."""
        return next((name for name in EIGHT_BITS if name in self.options), self.dtype)

    @property
    def page_size(self) -> int | None:
        """Keys of a page; None for a contiguous cache."""
        return self._size("pages of")

    @property
    def ring(self) -> int | None:
        """Rows of the ring that the keys are in; None where they are in order."""
        return self._size("ring of")

    def _size(self, kind: str) -> int | None:
        sizes = [int(name.split()[-1]) for name in self.options if name.startswith(kind)]
        return sizes[0] if sizes else None


class Sizes(NamedTuple):
    """Sizes of a call, in jax.nn's letters."""

    B: int
    T: int
    S: int
    N: int
    K: int


class Recipe(NamedTuple):
    """An array that is drawn: (generator, shape) -> its values."""

    shape: tuple[int, ...]
    dtype: str
    draw: Callable


def _normal(rng, shape):
    return rng.normal(size=shape)


def _hiding(rng, shape):
    return np.where(rng.random(shape) < 0.2, -np.inf, rng.normal(size=shape))


def _constant(values) -> Callable:
    return lambda rng, shape: np.broadcast_to(np.asarray(values), shape).copy()


def _uniform(low: float, high: float) -> Callable:
    return lambda rng, shape: rng.uniform(low, high, shape)


def _large(rng, shape):
    """Draws queries; logits of every seventh one of the first entry are beyond 2^12."""
    queries = rng.normal(size=shape)
    queries[:1, ::7] *= 2.0**11
    return queries


def _mostly(rng, shape):
    return rng.random(shape) < 0.8


# --- Attention ------------------------------------------------------------------------------------


def sizes_of(row: Row) -> Sizes:
    """Returns the sizes: a few tiles, the last of which is not whole."""
    has = set(row.options)
    if row.function in ("decode", "ragged"):
        return _cache_sizes(row)
    T, S, N, K = 203, 293, 2, 2
    if "causal" in has or "lists" in has:
        T = 293
    if "few queries" in has:
        T, S, K = 4, 1104, 1
    if has & {"whole tiles", *LONG}:
        T, S = 384, 384
    if "GQA" in has:
        N = 3 * K
    if "many entries" in has:  # launches of their own for rows with large logits
        return Sizes(88, 260, 260, 4, 4)
    return Sizes(1 if row.function == "varlen" else 2, T, S, N, K)


def _attention(row: Row) -> dict[str, Recipe]:
    (B, T, S, N, K), dtype = sizes_of(row), row.dtype
    shape = (T, N), (S, K)
    if row.function == "attention":
        shape = (B, *shape[0]), (B, *shape[1])
    width, v_width = row.head_dim, row.v_head_dim
    recipe_of = {
        "q": Recipe(
            (*shape[0], width), dtype, _large if "large logits" in row.options else _normal
        ),
        "k": Recipe((*shape[1], width), dtype, _normal),
        "v": Recipe((*shape[1], v_width), dtype, _normal),
    }
    if row.function == "varlen":
        recipe_of["cu_seqlens_q"] = Recipe((4,), "int32", _constant([0, 71, 71, T - 5]))
        if "other keys" in row.options:
            recipe_of["cu_seqlens_kv"] = Recipe((4,), "int32", _constant([0, 130, 140, S - 3]))
        else:
            for name in "kv":
                recipe_of[name] = recipe_of[name]._replace(shape=(T, *recipe_of[name].shape[1:]))
            S = T
    scores = (B, N, T, S)[4 - (4 if row.function == "attention" else 3) :]
    with_ones = lambda *axes: tuple(1 if i in axes else size for i, size in enumerate((B, N, T, S)))
    every = {
        "bias": ("bias", Recipe(scores, dtype, _normal)),
        "hiding bias": ("bias", Recipe(scores, dtype, _hiding)),
        "float32 bias": ("bias", Recipe(scores, "float32", _normal)),
        "bias without gradient": ("bias", Recipe(scores, dtype, _normal)),
        "shared bias": ("bias", Recipe(with_ones(0), dtype, _normal)),
        "bias of keys": ("bias", Recipe(with_ones(0, 2), dtype, _normal)),
        "bias of queries": ("bias", Recipe(with_ones(0, 3), dtype, _normal)),
        "mask": ("mask", Recipe(scores, "bool", _mostly)),
        "mask of keys": ("mask", Recipe(with_ones(1, 2), "bool", _mostly)),
        "ALiBi": ("alibi_slopes", Recipe((N,), "float32", _uniform(0.01, 0.06))),
        "sinks": ("sinks", Recipe((N,), "float32", _uniform(0.0, 3.0))),
        "dropout": ("dropout_seed", Recipe((), "int32", _constant(SEED))),
        "score_mod": ("strength", Recipe((N,), "float32", _uniform(-0.5, 0.5))),
        "traced offset": ("q_offset", Recipe((B,), "int32", _constant([20, -10][:B]))),
        "traced window": ("window_left", Recipe((B,), "int32", _constant([100, 180][:B]))),
        "lists": ("kv_indices", Recipe((1, 1, 3, 2), "int32", _constant(LISTS))),
    }
    recipe_of |= dict(every[name] for name in row.options if name in every)
    if "segments" in row.options:
        for side, length in (("q", T), ("kv", S)):
            ids = np.minimum(np.arange(length) // 110, 1) - (np.arange(length) >= length - 9)
            ids = np.where(np.arange(length) >= length - 9, -1, ids)
            recipe_of[f"{side}_segment_ids"] = Recipe((B, length), "int32", _constant(ids))
    if "lengths" in row.options:
        recipe_of["q_lengths"] = Recipe((B,), "int32", _constant([T, T - 60]))
        recipe_of["kv_lengths"] = Recipe((B,), "int32", _constant([S - 17, S - 130]))
    if "positions" in row.options:
        for side, length in (("q", T), ("kv", S)):
            places = np.arange(length) + np.arange(length) // 50 * 3
            recipe_of[f"{side}_positions"] = Recipe((B, length), "int32", _constant(places))
    return recipe_of


LISTS = [[[[0, -1], [1, 0], [2, 1]]]]


# --- Caches ---------------------------------------------------------------------------------------


def _cache_sizes(row: Row) -> Sizes:
    has, page = set(row.options), row.page_size or 16
    T, N, K = 1, 8, 2  # four rows: one token of four heads
    if "24 rows" in has:
        T = 6
    if "96 rows" in has:
        T, N = 12, 16
    if "64 heads" in has:
        N, K = 64, 1
    S = -(-320 // page) * page
    return Sizes(4 if row.function == "ragged" else 3, T, S, N, K)


def _cache(row: Row) -> dict[str, Recipe]:
    (B, T, S, N, K), has, page = sizes_of(row), set(row.options), row.page_size
    entries, length = (B, S) if page is None else (B * S // page + 2, page)
    cache = row.cache_dtype
    scaled = {"scales", "scales of rows"} & has
    if cache == "int8":
        most = 128 if scaled else 4
        values = lambda rng, shape: rng.integers(-most, most, shape)
    else:
        values = _normal
    shape = (100, N) if row.function == "ragged" else (B, T, N)
    recipe_of = {
        "q": Recipe((*shape, row.head_dim), row.dtype, _normal),
        "k": Recipe((entries, length, K, row.head_dim), cache, values),
        "v": Recipe((entries, length, K, row.v_head_dim), cache, values),
        "kv_lengths": Recipe((B,), "int32", _constant([S - 3, 0, 130, 77][:B])),
    }
    if "values in keys" in has:
        del recipe_of["v"]
    if row.function == "ragged":
        recipe_of["kv_lengths"] = Recipe((B,), "int32", _constant([S - 3, 130, 50, 77]))
        ends = [0, 85, 91, 91, 94] if "steps of 8" in has else [0, 90, 91, 91, 94]
        recipe_of["cu_q_lens"] = Recipe((5,), "int32", _constant(ends))
    if page is not None:
        draw = functools.partial(_table, shares="shared prefix" in has, entries=entries)
        recipe_of["page_table"] = Recipe((B, S // page), "int32", draw)
    every = {
        "sinks": ("sinks", Recipe((N,), "float32", _uniform(0.0, 3.0))),
        "ALiBi": ("alibi_slopes", Recipe((N,), "float32", _uniform(0.01, 0.06))),
        "starts": ("kv_starts", Recipe((B,), "int32", _constant([37, 0, -4, 5][:B]))),
        "traced window": ("window", Recipe((B,), "int32", _constant([90, 40, 70, 20][:B]))),
        "traced offset": ("q_offset", Recipe((B,), "int32", _constant([200, -2, 100][:B]))),
        "blocks": ("kv_blocks", Recipe((B, 1, 4), "int32", _constant([3, 0, -1, 3]))),
        "drafts": ("draft_mask", Recipe((B, T, T), "bool", _trees)),
    }
    recipe_of |= dict(every[name] for name in row.options if name in every)
    if row.ring is not None:
        first = max(0, S - 3 - row.ring)
        recipe_of["kv_starts"] = Recipe((B,), "int32", _constant([first, 0, 18]))
    if scaled:
        shape = (entries, K) if "scales of rows" in has else (K,)
        size = 64.0 if cache == "int8" else 1.0
        for name in ("k_scale", "v_scale"):
            if name[0] in recipe_of:
                recipe_of[name] = Recipe(shape, "float32", _uniform(0.5 / size, 1.5 / size))
    return recipe_of


def _table(rng, shape, *, shares: bool, entries: int):
    table = rng.permutation(entries)[: np.prod(shape)].reshape(shape)
    if shares:
        table[:, :2] = table[0, :2]
    return table


def _trees(rng, shape):
    """Draws masks of trees: each token sees itself, a token before it, and what that one sees."""
    mask = np.zeros(shape, bool)
    for entry in mask:
        for t in range(shape[-1]):
            parent = int(rng.integers(max(-1, t - 3), t)) if t else -1
            entry[t] = entry[parent] if parent >= 0 else False
            entry[t, t] = True
    return mask


# --- The call -------------------------------------------------------------------------------------


def recipes(row: Row) -> dict[str, Recipe]:
    """Returns the arrays of a row by their names; those of functions and block masks among them."""
    return _cache(row) if row.function in ("decode", "ragged") else _attention(row)


def static(row: Row) -> dict[str, Any]:
    """Returns the arguments that are no arrays."""
    every = {
        "causal": {"causal": True},
        "causal at an offset": {"causal": True, "q_offset": 90},
        "softcap": {"softcap": SOFTCAP},
        "window": {"window": WINDOW},
        "dropout": {"dropout_rate": DROPOUT},
        "deterministic": {"deterministic": True},
        "traced offset": {} if row.function == "decode" else {"causal": True},
        "positions": {"causal": True},
        "three splits": {"num_splits": 3},
        "shared prefix": {"shared_prefix": "auto"},
        "blocks": {"kv_block_size": row.page_size or 64},
        "steps of 4": {"step_tokens": 4},
        "steps of 8": {"step_tokens": 8},
        "values in keys": {"v_head_dim": row.v_head_dim},
        "other keys": {"alignment": "end"},
    }
    options: dict[str, Any] = {}
    for name in row.options:
        options |= every.get(name, {})
    if row.wanted in ("tangents", "linear", "hessian"):
        options["differentiable"] = "any"
    return options


def arguments(row: Row, arrays: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of the public function, by position and by name."""
    remaining = dict(arrays)
    q, k, v = (remaining.pop(name, None) for name in "qkv")
    named = static(row)
    if (strength := remaining.pop("strength", None)) is not None:
        named["score_mod"] = _score_mod(strength)
    if "mask_mod" in row.options:
        named["mask_mod"] = mask_mod
    if (left := remaining.pop("window_left", None)) is not None:
        named["window"] = (left, WINDOW[1])
    if (index := remaining.pop("kv_indices", None)) is not None:
        lengths = {"q_len": q.shape[-3], "kv_len": k.shape[-3]}
        named["block_mask"] = BlockMask.from_indices(index, block=(BLOCK, BLOCK), **lengths)
    if row.ring is not None:
        k, v = (_rolled(x, remaining["kv_lengths"], row.ring) for x in (k, v))
        # The number that has been written.
        remaining["kv_starts"] = remaining["kv_starts"] + np.int32(row.ring)
    return (q, k, v), named | remaining


def _rolled(x, lengths, rows: int):
    """Returns the last keys of [B, S, K, H] as a ring: the key at position p is in row p % rows."""
    last = lengths[:, None] - 1
    place = last - (last - np.arange(rows, dtype=np.int32)[None]) % rows
    return jnp.take_along_axis(x, place[..., None, None], axis=1, mode="clip")


def _decode_from_ring(q, k, v, *, kv_lengths, kv_starts, **named):
    return decode_from_ring(q, k, v, kv_lengths, kv_starts, **named)


def _score_mod(strength):
    def score_mod(score, b, n, i, j):
        pattern = dense.MOD_STRENGTH * ((i + j) % 3).astype(score.dtype)
        return score + strength[n].astype(score.dtype) * pattern * score * score

    return score_mod


def mask_mod(b, n, i, j):
    """Hides a third of all pairs of a query and a key."""
    return (i + 2 * j + n) % 3 != 0


def function_of(row: Row) -> Callable:
    """Returns (q, k, v, **named) -> (o, lse)."""
    return {
        "attention": flash_attention_with_lse,
        "varlen": functools.partial(flash_attention_varlen, return_lse=True),
        "decode": functools.partial(flash_decode, return_lse=True)
        if row.ring is None
        else _decode_from_ring,
        "ragged": functools.partial(ragged_paged_attention, return_lse=True),
    }[row.function]


def explained(row: Row, backend: str) -> ExplainedCall:
    """Returns what `explain` reports for the call of the row."""
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in recipes(row).items()}

    def call(arrays):
        positional, named = arguments(row, arrays)
        function_of(row)(*positional, **named, backend=backend)

    return first_call(call, shapes)


def drawn(row: Row) -> dict[str, np.ndarray]:
    """Draws the arrays of a row, the same in every run and for every target."""
    rng = np.random.default_rng(zlib.crc32(row.key.partition(" ")[2].encode()))
    return {
        name: x.draw(rng, x.shape).astype(jnp.dtype(x.dtype)) for name, x in recipes(row).items()
    }


WANTED = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "strength")


def moving(row: Row, arrays: dict[str, Any]) -> list[str]:
    """Returns the names of the arrays that have gradients, or tangents."""
    names = [name for name in WANTED if name in arrays]
    if row.wanted == "hessian":
        return names[:3]
    return [name for name in names if name != "bias" or "bias without gradient" not in row.options]


def poisoned(row: Row, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays with NaN in what lengths and starts hide, which may be anything."""
    with_nan = dict(arrays)
    if row.wanted not in ("gradient", "output"):
        return with_nan
    if "q_lengths" in arrays:
        for names, side in (("q", "q"), ("kv", "kv")):
            for name in names:
                beyond = np.arange(arrays[name].shape[1]) >= arrays[f"{side}_lengths"][:, None]
                with_nan[name] = np.where(beyond[..., None, None], np.nan, arrays[name])
    contiguous = row.function == "decode" and "page_table" not in arrays
    if contiguous and row.cache_dtype == row.dtype and "kv_blocks" not in arrays:
        key = np.arange(arrays["k"].shape[1])
        hidden = key >= arrays["kv_lengths"][:, None]
        hidden |= key < arrays.get("kv_starts", np.zeros(1, int))[:, None]
        for name in {"k", "v"} & set(arrays):
            with_nan[name] = np.where(hidden[..., None, None], np.nan, arrays[name])
    return {name: x.astype(arrays[name].dtype) for name, x in with_nan.items()}
