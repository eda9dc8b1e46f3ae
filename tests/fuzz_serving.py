"""Random calls of decoding, ragged attention and caches with values, and what is right."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp
from flash_pallas.nn import RingCache
from flash_pallas.nn._cached import New, attend

from . import dense_reference, draft_masks, rounding_bounds
from .dense_reference import Dense
from .fuzz_attention import Call, exact_side, normal
from .random_calls import Draw
from .rounding_bounds import Unit

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 128, 192, 256, 288, 512, 576, 576)
PAGE_SIZES = (16, 16, 48, 64, 128, 256)
QUANTISED = ("int8", "float8_e4m3fn")
NARROW = (64, 128, 256)  # head dims of caches in eight bits that all kernels take


@dataclasses.dataclass
class _Cache:
    """Keys and values of sequences: as they are stored, and as numbers.

    Attributes:
        arrays: what is given of k, v, page_table, k_scale and v_scale.
        table: page of every span of each sequence [B, columns]; None where the cache has no pages.
        options: v_head_dim, where there is no v.
    """

    arrays: dict[str, Any]
    table: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    width: int = 0

    @property
    def room(self) -> int:
        size = self.arrays["k"].shape[1]
        return size if self.table is None else size * self.table.shape[1]

    def values(self) -> tuple[Any, Any]:
        """Returns k and v as float64 [B, S, K, H], which is 0 where it is no number."""
        k = self._of("k")
        return k, k[..., : self.width] if "v" not in self.arrays else self._of("v")

    def _of(self, name: str):
        x = np.nan_to_num(np.asarray(self.arrays[name]).astype(np.float64), posinf=0.0, neginf=0.0)
        scale = self.arrays.get(f"{name}_scale")
        if scale is not None:
            scale = np.nan_to_num(exact_side(scale))
            x = x * scale.reshape(-1, 1, scale.shape[-1], 1)
        if self.table is None:
            return x
        x = x[self.table]
        return x.reshape(len(x), -1, *x.shape[3:])


def _head_dims(draw: Draw, stored: str | None) -> tuple[int, int]:
    kind = draw.rng.random()
    if stored:
        width = draw.one_of(NARROW) if kind < 0.6 else 32 * draw.between(1, 18)
    else:
        width = draw.one_of(HEAD_DIMS) if kind < 0.6 else 16 * draw.between(1, 36)
    step = 32 if stored else 16
    of_v = min(width, 512)
    return width, of_v if draw.chance(0.8) else step * draw.between(1, 256 // step)


def _stored(draw: Draw, shape, dtype: str, stored: str | None):
    if stored is None:
        return normal(draw, shape, dtype)
    if stored == "int8":
        return draw.rng.integers(-127, 128, shape).astype(np.int8)
    return normal(draw, shape, stored, 16.0)


def _cache(draw: Draw, sizes, dtype: str, page_size: int | None, *, alone: bool) -> _Cache:
    """Draws a cache.

    Args:
        draw: the decisions.
        sizes: (B, S, K, H, Hv, dtype in eight bits or None, whether v is a part of k).
        dtype: that of q.
        page_size: rows of a page, which divides S; None without pages.
        alone: whether every page belongs to one sequence.
    """
    batch, room, heads, width, of_v, stored, shared = sizes
    rows, length, table = batch, room, None
    if page_size is not None:
        columns = room // page_size
        rows, length = batch * columns + 3, page_size
        table = draw.rng.permutation(rows)[: batch * columns].reshape(batch, columns)
        if not alone and draw.chance(0.5):  # a prefix that several have
            members = draw.rng.random(batch) < 0.7
            prefix = draw.between(1, columns)
            table[members, :prefix] = table[0, :prefix]
    arrays = {"k": _stored(draw, (rows, length, heads, width), dtype, stored)}
    if not shared:
        arrays["v"] = _stored(draw, (rows, length, heads, of_v), dtype, stored)
    if stored is not None and draw.chance(0.8):
        power = {"int8": -6.0, "float8_e4m3fn": -4.0}[stored]
        for name in arrays.copy():
            lead = (rows, heads) if draw.chance(0.5) else (heads,)
            power_of = power + draw.rng.integers(-1, 2, lead)
            arrays[f"{name}_scale"] = np.exp2(power_of).astype(np.float32)
    options = {"v_head_dim": of_v} if shared else {}
    return _Cache(arrays, table, options, of_v)


def _poison(cache: _Cache, lengths, starts) -> None:
    """Puts garbage wherever no sequence has a key, and where no table entry is looked at."""
    k = cache.arrays["k"]
    used = np.zeros(k.shape[:2], bool)
    size, table = k.shape[1], cache.table
    garbage = (-1, -(2**31), 2**31 - 1)
    shown = None if table is None else table.astype(np.int32)
    for b, (first, last) in enumerate(zip(starts, lengths, strict=True)):
        if table is None:
            used[b, max(first, 0) : max(last, 0)] = True
            continue
        for column in range(table.shape[1]):
            low, high = max(first - column * size, 0), min(last - column * size, size)
            used[table[b, column], low : max(high, low)] = True
            if high <= low:
                shown[b, column] = garbage[column % 3]
    number = np.issubdtype(k.dtype, np.integer)
    for name in {"k", "v"} & set(cache.arrays):
        cache.arrays[name][~used] = 127 if number else np.nan
    if table is not None:
        cache.arrays["page_table"] = shown


def _window(seen_distance, seen, window):
    return seen if window is None else seen & (seen_distance <= np.reshape(window, (-1, 1, 1, 1)))


def _visible(keys: int, lengths, first, options: dict[str, Any]):
    """Returns (bool [B, 1, T, S], positions of queries [B, T], positions of keys [B, S]).

    Args:
        keys: S.
        lengths: number of keys [B].
        first: position of the first query [B].
        options: "tokens", "starts", "window", and drafts and blocks where there are any.
    """
    tokens, batch = options["tokens"], len(lengths)
    j = np.tile(np.arange(keys), (batch, 1))
    i = np.reshape(first, (-1, 1)) + np.arange(tokens)
    there = (j >= np.reshape(options["starts"], (-1, 1))) & (j < np.reshape(lengths, (-1, 1)))
    drafts = options.get("drafts")
    if drafts is None:
        seen = (j[:, None, None] <= i[:, None, :, None]) & there[:, None, None]
    else:
        others = drafts & ~np.eye(tokens, dtype=bool)
        depth = others.sum(-1)
        i = np.reshape(first, (-1, 1)) + depth
        seen = np.tile(there[:, None, None], (1, 1, tokens, 1))
        for b in range(batch):
            for u in range(tokens):
                key = int(first[b]) + u
                if 0 <= key < keys:
                    seen[b, 0, :, key] &= drafts[b, :, u]
                    j[b, key] = i[b, u]
    seen = _window(i[:, None, :, None] - j[:, None, None], seen, options.get("window"))
    blocks = options.get("blocks")
    return (seen if blocks is None else seen & blocks), i, j


def _results(d: Dense, q, k, kernels: bool) -> dict[str, tuple[Any, Any]]:
    """Returns (exact, deviation) of o and lse, for arrays of the dtypes of q and of k."""
    f, eight_bits = dense_reference.forward(d), kernels and k.dtype.name in QUANTISED
    limits = rounding_bounds.of_forward(d, f, Unit.of(q.dtype.name, kernels, eight_bits=eight_bits))
    return {"o": (f.o.swapaxes(1, 2), limits["o"]), "lse": (f.lse, limits["lse"])}


def _sides(draw: Draw, batch: int, heads: int, side: str, names) -> dict[str, Any]:
    found = {}
    for name, size in (("sinks", 2.0), ("alibi_slopes", 0.05)):
        if name in names and draw.chance(0.25):
            x = normal(draw, draw.one_of(((heads,), (batch, heads))), side, size)
            found[name] = np.abs(x) if name == "alibi_slopes" else x
    return found


def _of_batch(x, batch: int):
    """Returns [B, N] of [N] or [B, N], as float64; None stays None."""
    return None if x is None else np.broadcast_to(exact_side(x), (batch, np.shape(x)[-1]))


def decode(draw: Draw, backend: str, *, x64: bool) -> Call:
    """Draws a call of flash_decode."""
    batch, kv_heads = draw.between(1, 4), draw.between(1, 3)
    heads = kv_heads * draw.one_of((1, 2, 3, 4, 8))
    page_size = draw.one_of((None, None, *PAGE_SIZES))
    room = draw.between(1, 8) * page_size if page_size else 8 * draw.between(1, 80)
    stored = draw.one_of((None, None, None, *QUANTISED))
    dtype = draw.one_of(("bfloat16", "bfloat16", "float16"))
    if backend == "xla" and draw.chance(0.15):
        dtype = "float32"
    width, of_v = _head_dims(draw, stored)
    shared = of_v <= width and draw.chance(0.2)
    drafts = draw.chance(0.2)
    blocks = not drafts and draw.chance(0.15)
    tokens = draw.one_of((1, 1, 1, 2, 4, 16))
    tokens = 1 if blocks else draw.one_of((2, 4, 16, 40)) if drafts else tokens
    sizes = (batch, room, kv_heads, width, of_v, stored, shared)
    cache = _cache(draw, sizes, dtype, page_size, alone=blocks)
    side = "float64" if x64 else "float32"
    ints = lambda x: np.asarray(x, draw.one_of(("int32", "int64") if x64 else ("int32",)))
    arrays: dict[str, Any] = {"q": normal(draw, (batch, tokens, heads, width), dtype)}
    numbers = lambda low, high: draw.rng.integers(low, high + 1, batch)
    given = numbers(-1, room + 3) if draw.chance(0.2) else numbers(0, room)
    arrays["kv_lengths"] = ints(given)
    lengths, first = np.clip(given, 0, room), given - tokens
    said: dict[str, Any] = {"tokens": tokens, "starts": np.zeros(batch, int)}
    options = cache.options | {"return_lse": True}
    prefixed = page_size is not None and tokens <= 32 and not blocks and draw.chance(0.3)
    if not (blocks or prefixed):
        _first_keys(draw, arrays, options, said, ints, room)
        if not drafts and draw.chance(0.2):
            first = numbers(-tokens, room)
            arrays["q_offset"] = ints(first)
    if drafts:
        kind = draw.one_of(draft_masks.KINDS)
        mask = draft_masks.drawn(draw.rng, kind, batch, tokens)
        if draw.chance(0.4):  # drafts that do not see themselves
            mask &= ~np.eye(tokens, dtype=bool) | (draw.rng.random((1, tokens, tokens)) < 0.5)
        arrays["draft_mask"] = said["drafts"] = mask
    if prefixed:
        options["shared_prefix"] = "auto"
    if blocks:
        _chosen_blocks(draw, cache, arrays, options, said, room)
    names = ("sinks",) if blocks or prefixed else ("sinks", "alibi_slopes")
    arrays |= _sides(draw, batch, heads, side, names)
    if draw.chance(0.25):
        options["softcap"] = draw.one_of((1.0, 5.0, 30.0))
    if draw.chance(0.5):
        options["num_splits"] = draw.one_of((1, 2, 3, 7))
    _poison(cache, lengths, said["starts"])
    arrays |= cache.arrays
    return _served("flash_decode", arrays, options, x64, _decoded(cache, lengths, first, said))


def _first_keys(draw: Draw, arrays, options, said, ints, room: int) -> None:
    """Draws starts and a window, known or an array."""
    batch = len(arrays["kv_lengths"])
    if draw.chance(0.25):
        said["starts"] = draw.rng.integers(-2, room + 1, batch)
        arrays["kv_starts"] = ints(said["starts"])
    if draw.chance(0.35):
        said["window"] = draw.one_of((0, 3, 70))
        options["window"] = draw.one_of((said["window"], (said["window"], None)))
    elif draw.chance(0.3):
        said["window"] = draw.rng.integers(0, room + 1, batch)
        arrays["window"] = ints(said["window"])


def _chosen_blocks(draw, cache: _Cache, arrays, options, said, room: int) -> None:
    """Draws kv_blocks; what they show is in said["blocks"]."""
    size = cache.arrays["k"].shape[1]
    sizes = [n for n in (16, 64, 128) if room % n == 0]
    if cache.table is not None:
        sizes = [n for n in (size, 2 * size) if n <= 256 and room % n == 0]
    if not sizes:
        return
    block, batch = draw.one_of(sizes), len(arrays["q"])
    lists = draw.one_of((1, cache.arrays["k"].shape[2]))
    chosen = draw.rng.integers(-1, room // block, (batch, lists, draw.one_of((1, 3, 9))))
    arrays["kv_blocks"] = chosen.astype(np.int32)
    options["kv_block_size"] = block
    shown = (chosen[..., None] == np.arange(room) // block).any(2)  # [B, lists, S]
    heads, kv_heads = arrays["q"].shape[2], cache.arrays["k"].shape[2]
    shown = np.repeat(shown, heads // lists, axis=1) if lists == kv_heads else shown
    said["blocks"] = shown[:, :, None]


def _decoded(cache: _Cache, lengths, first, said) -> Callable:
    """Returns (arrays, options) -> the problem."""

    def problem(arrays, options) -> Dense:
        batch = len(lengths)
        seen, i, j = _visible(cache.room, lengths, first, said)
        return Dense(
            np.asarray(arrays["q"]).astype(np.float64),
            *cache.values(),
            seen=seen,
            scale=options.get("scale", arrays["q"].shape[-1] ** -0.5),
            i=i,
            j=j,
            slopes=_of_batch(arrays.get("alibi_slopes"), batch),
            sinks=_of_batch(arrays.get("sinks"), batch),
            softcap=options.get("softcap"),
        )

    return problem


def _text(function: str, arrays, options) -> str:
    shown = {n: f"{x.dtype}{list(x.shape)}" for n, x in arrays.items()}
    known = ("kv_lengths", "kv_starts", "q_offset", "window", "cu_q_lens")
    shown |= {n: str(arrays[n].tolist()) for n in known if n in arrays}
    return f"{function} {shown} {options}"


def _served(function: str, arrays, options, x64: bool, problem) -> Call:

    def program(backend: str) -> Callable:
        def call(arrays):
            given = dict(arrays)
            q, k, v = given.pop("q"), given.pop("k"), given.pop("v", None)
            o, lse = getattr(fp, function)(q, k, v, **given, **options, backend=backend)
            return {"o": o, "lse": lse}

        return call

    expected = lambda kernels: _results(problem(arrays, options), arrays["q"], arrays["k"], kernels)
    return Call(function, _text(function, arrays, options), x64, arrays, program, expected)


def ragged(draw: Draw, backend: str, *, x64: bool) -> Call:
    """Draws a call of ragged_paged_attention: prompts, steps, sequences without new tokens."""
    seqs, kv_heads = draw.between(1, 5), draw.between(1, 3)
    heads, page_size = kv_heads * draw.one_of((1, 2, 3, 4)), draw.one_of(PAGE_SIZES[:5])
    room = page_size * draw.between(1, max(1, 512 // page_size))
    stored = draw.one_of((None, None, None, *QUANTISED))
    dtype = draw.one_of(("bfloat16", "bfloat16", "float16"))
    width, of_v = _head_dims(draw, stored)
    shared = of_v <= width and draw.chance(0.2)
    sizes = (seqs, room, kv_heads, width, of_v, stored, shared)
    writes = stored is None and draw.chance(0.4)
    prefixed = not writes and draw.chance(0.2)
    cache = _cache(draw, sizes, dtype, page_size, alone=not prefixed)
    counts = np.array([draw.one_of((0, 1, 1, 3, draw.between(1, 120))) for _ in range(seqs)])
    counts = np.minimum(counts, room)
    beyond = draw.chance(0.3)  # new tokens that there is no room for
    given = counts + draw.rng.integers(0, np.maximum(room - counts, 0) + 1 + 9 * beyond)
    cu = np.concatenate([[0], np.cumsum(counts)])
    tokens = int(cu[-1]) + draw.between(0, 5) or 1
    ints = lambda x: np.asarray(x, draw.one_of(("int32", "int64") if x64 else ("int32",)))
    arrays: dict[str, Any] = {"q": normal(draw, (tokens, heads, width), dtype)}
    arrays["q"][cu[-1] :] = np.nan
    arrays |= {"kv_lengths": ints(given), "cu_q_lens": ints(cu)}
    said: dict[str, Any] = {"starts": np.zeros(seqs, int)}
    options = cache.options | {"return_lse": True, "step_tokens": draw.one_of((1, 1, 4, 16))}
    if not prefixed:
        _first_keys(draw, arrays, options, said, ints, room)
    else:
        options["shared_prefix"] = "auto"
    side, names = "float64" if x64 else "float32", ("sinks", "alibi_slopes")
    arrays |= _sides(draw, seqs, heads, side, names[:1] if prefixed else names)
    if draw.chance(0.25):
        options["softcap"] = draw.one_of((1.0, 30.0))
    before = None
    if writes:
        before = _written(draw, cache, arrays, cu, given)
    _poison(cache, np.clip(given, 0, room), said["starts"])
    arrays |= cache.arrays
    if before is not None:  # what the call is given: without the new tokens
        arrays |= before
    expected = functools.partial(_of_ragged, cache, arrays, options, said)
    program = functools.partial(_ragged_program, options)
    text = _text("ragged_paged_attention", arrays, options)
    return Call("ragged_paged_attention", text, x64, arrays, program, expected)


def _written(draw: Draw, cache: _Cache, arrays, cu, given) -> dict[str, Any]:
    """Draws new tokens and writes them into the cache; returns the pages from before."""
    before = {}
    size, tokens = cache.arrays["k"].shape[1], len(arrays["q"])
    for name in ("k", "v"):
        if name not in cache.arrays:
            continue
        whole = cache.arrays[name]
        new = normal(draw, (tokens, *whole.shape[2:]), whole.dtype)
        before[name] = whole.copy()
        for s in range(len(given)):
            for t in range(cu[s + 1] - cu[s]):
                place = int(given[s]) - int(cu[s + 1] - cu[s]) + t
                if 0 <= place < cache.room:
                    whole[cache.table[s, place // size], place % size] = new[cu[s] + t]
                    before[name][cache.table[s, place // size], place % size] = np.nan
        arrays[f"new_{name}"] = new
    return before


def _ragged_program(options, backend: str) -> Callable:
    def call(arrays):
        given = dict(arrays)
        q, k, v = given.pop("q"), given.pop("k"), given.pop("v", None)
        o, lse, *_ = fp.ragged_paged_attention(q, k, v, **given, **options, backend=backend)
        return {"o": o, "lse": lse}

    return call


def _of_ragged(cache: _Cache, arrays, options, said, kernels: bool):
    """Computes every sequence on its own; rows of none are 0, with a log-sum-exp of -inf."""
    q, cu = exact_side(arrays["q"]), arrays["cu_q_lens"].astype(int)
    k, v = cache.values()
    tokens, heads, width = q.shape
    o, lse = np.zeros((tokens, heads, cache.width)), np.full((heads, tokens), -np.inf)
    of_o, of_lse = np.zeros_like(o), np.zeros(lse.shape)
    seqs = len(cu) - 1
    slopes = _of_batch(arrays.get("alibi_slopes"), seqs)
    sinks = _of_batch(arrays.get("sinks"), seqs)
    windows = said.get("window")
    windows = None if windows is None else np.broadcast_to(windows, seqs)
    for s in range(seqs):
        rows, length = slice(cu[s], cu[s + 1]), int(arrays["kv_lengths"][s])
        count = cu[s + 1] - cu[s]
        if not count:
            continue
        one = {"tokens": count, "starts": said["starts"][s : s + 1]}
        if windows is not None:
            one["window"] = windows[s : s + 1]
        bounded = np.clip([length], 0, cache.room)
        seen, i, j = _visible(cache.room, bounded, np.array([length - count]), one)
        part = lambda x, s=s: None if x is None else x[s : s + 1]
        softcap = options.get("softcap")
        of_s = (q[None, rows], part(k), part(v), seen, width**-0.5, i, j)
        d = Dense(*of_s, slopes=part(slopes), sinks=part(sinks), softcap=softcap)
        found = _results(d, arrays["q"], cache.arrays["k"], kernels)
        (o[rows], of_o[rows]), both = (x[0] for x in found["o"]), found["lse"]
        lse[:, rows], of_lse[:, rows] = (x[0] for x in both)
    return {"o": (o, of_o), "lse": (lse, of_lse)}


def caches(draw: Draw, backend: str, *, x64: bool) -> Call:
    """Draws steps of append_kv and flash_decode, with tokens that are taken back in between."""
    batch, kv_heads = draw.between(1, 3), draw.between(1, 2)
    heads, page_size = kv_heads * draw.one_of((1, 2, 4)), draw.one_of((None, 16, 64))
    width = draw.one_of((64, 128, 16 * draw.between(1, 16)))
    columns = draw.between(2, 6)
    room = columns * (page_size or 40)
    dtype, stored = draw.one_of(("bfloat16", "float16")), draw.one_of((None, None, *QUANTISED))
    width = 32 * -(-width // 32) if stored else width
    rows, table = batch, None
    if page_size:
        rows = batch * columns
        table = draw.rng.permutation(rows).reshape(batch, columns).astype(np.int32)
    steps = []
    lengths = draw.rng.integers(0, room + 1 if draw.chance(0.4) else room // 2, batch)
    arrays: dict[str, Any] = {"lengths": lengths.astype(np.int32)}
    shape = (rows, page_size or room, kv_heads, width)
    held = {name: _stored(draw, shape, dtype, stored) for name in "kv"}
    arrays |= {name: x.copy() for name, x in held.items()}
    scales = {}
    if stored:
        power = {"int8": -5, "float8_e4m3fn": -4}[stored]
        scales = {f"{n}_scale": np.full((kv_heads,), 2.0**power, np.float32) for n in "kv"}
        arrays |= scales
    if table is not None:
        arrays["page_table"] = table
    for number in range(3):
        tokens = draw.one_of((1, 1, 4, 7))
        new = {f"{n}{number}": normal(draw, (batch, tokens, kv_heads, width), dtype) for n in "kv"}
        new[f"q{number}"] = normal(draw, (batch, tokens, heads, width), dtype)
        arrays |= new
        back = draw.rng.integers(0, tokens, batch)
        arrays[f"back{number}"] = back.astype(np.int32)
        for b in range(batch):
            for t in range(tokens):
                place = int(lengths[b]) + t
                if place < room:
                    at = (b, place) if table is None else _at(table, b, place, page_size)
                    for name in "kv":
                        x = new[f"{name}{number}"][b, t]
                        held[name][at] = _quantised(x, scales.get(f"{name}_scale"), stored)
        whole = lengths + tokens  # those without room count
        cache = _Cache({n: x.copy() for n, x in held.items()} | scales, table, {}, width)
        steps.append((cache, np.minimum(whole, room), lengths, tokens))
        lengths = whole - back
    options = {"window": draw.one_of((None, 20))}
    expected = functools.partial(_of_caches, arrays, options, steps)
    program = functools.partial(_cache_program, options, len(steps))
    return Call("append_kv", _text("append_kv", arrays, options), x64, arrays, program, expected)


def _at(table, b: int, place: int, page_size: int) -> tuple[int, int]:
    return int(table[b, place // page_size]), place % page_size


def _quantised(x, scale, stored: str | None):
    if stored is None:
        return x
    x = x.astype(np.float32) / scale[:, None]
    if stored == "int8":
        return np.clip(np.round(x), -127, 127).astype(np.int8)
    return np.clip(x, -448.0, 448.0).astype(jnp.dtype(stored))


def _cache_program(options, steps: int, backend: str) -> Callable:
    def call(arrays):
        cache = fp.KVCache(arrays["k"], arrays["v"], arrays["lengths"])
        names = ("page_table", "k_scale", "v_scale")
        where = {name: arrays[name] for name in names if name in arrays}
        found = {}
        for n in range(steps):
            cache = fp.append_kv(cache, arrays[f"k{n}"], arrays[f"v{n}"], **where)
            given = {"kv_lengths": cache.lengths, "return_lse": True, "backend": backend}
            k, v = cache.k, cache.v
            o, lse = fp.flash_decode(arrays[f"q{n}"], k, v, **where, **given, **options)
            found |= {f"o{n}": o, f"lse{n}": lse}
            cache = cache._replace(lengths=jnp.maximum(cache.lengths - arrays[f"back{n}"], 0))
        return found

    return call


def _of_caches(arrays, options, steps, kernels: bool):
    found = {}
    for n, (cache, lengths, first, tokens) in enumerate(steps):
        said = {"tokens": tokens, "starts": np.zeros(len(lengths), int)}
        said["window"] = options["window"]
        problem = _decoded(cache, lengths, first, said)
        given = {"q": arrays[f"q{n}"]}
        both = _results(problem(given, {}), given["q"], cache.arrays["k"], kernels)
        found |= {f"{name}{n}": x for name, x in both.items()}
    return found


def rings(draw: Draw, backend: str, *, x64: bool) -> Call:
    """Draws steps of a layer with a RingCache, with tokens that are taken back in between."""
    batch, kv_heads = draw.between(1, 3), draw.between(1, 2)
    heads, dtype = kv_heads * draw.one_of((1, 2, 4)), draw.one_of(("bfloat16", "float16"))
    width = draw.one_of((64, 128, 16 * draw.between(1, 16)))
    window, drafts = draw.one_of((1, 16, 20, 128, 300)), draw.one_of((0, 1, 4, 9))
    make = functools.partial(RingCache.empty, batch, window, kv_heads, width, dtype, drafts=drafts)
    room = jax.eval_shape(make).k.shape[1]
    counts = [draw.between(1, 2 * room), *(draw.one_of((1, 1, 5, 40)) for _ in range(4))]
    arrays = _sides(draw, batch, heads, "float32", ("sinks", "alibi_slopes"))
    arrays = {name: x if x.ndim == 1 else x[0] for name, x in arrays.items()}
    whole = {name: np.zeros((batch, sum(counts), kv_heads, width)) for name in "kv"}
    lengths = longest = np.zeros(batch, np.int32)
    steps = []
    for n, tokens in enumerate(counts):
        arrays[f"q{n}"] = normal(draw, (batch, tokens, heads, width), dtype)
        added = draw.rng.integers(0, tokens + 1, batch) if draw.chance(0.5) else [tokens] * batch
        for name in "kv":
            arrays[f"{name}{n}"] = new = normal(draw, (batch, tokens, kv_heads, width), dtype)
            for b in range(batch):
                whole[name][b, lengths[b] : lengths[b] + added[b]] = new[b, : added[b]]
        steps.append(({name: x.copy() for name, x in whole.items()}, lengths, added))
        after = lengths + np.asarray(added)
        longest = np.maximum(longest, after)  # from which tokens are taken back
        lowest = np.where(longest > room, longest - (room - window), 0).clip(0, after)
        lengths = after - draw.rng.integers(0, after - lowest + 1)
        longest = np.where(lengths == 0, 0, longest)
        arrays[f"new_lengths{n}"] = np.asarray(added, np.int32)
        arrays[f"back{n}"] = (after - lengths).astype(np.int32)
    softcap = draw.one_of((None, None, 20.0))
    options = {"window": (window - 1, 0), "softcap": softcap}
    expected = functools.partial(_of_rings, arrays, options, steps)
    program = functools.partial(_ring_program, options, make, len(steps))
    said = options | {"drafts": drafts}
    return Call("RingCache", _text("RingCache", arrays, said), x64, arrays, program, expected)


def _ring_program(options, make: Callable, steps: int, backend: str) -> Callable:
    given = {"scale": None, "precision": None, "num_splits": "auto", "backend": backend}
    layer = types.SimpleNamespace(**options, **given)

    def call(arrays):
        ring, results = make(), {}
        sides = arrays.get("alibi_slopes"), arrays.get("sinks")
        for n in range(steps):
            qkv, new = (arrays[f"{name}{n}"] for name in "qkv"), New(arrays[f"new_lengths{n}"])
            results[f"o{n}"], ring = attend(layer, ring, tuple(qkv), new, *sides)
            ring = ring._replace(lengths=ring.lengths - arrays[f"back{n}"])
        return results

    return call


def _of_rings(arrays, options, steps, kernels: bool):
    """Computes every step against all tokens that were accepted; padding may be anything."""
    results, sides = {}, {}
    for name, field in (("alibi_slopes", "slopes"), ("sinks", "sinks")):
        sides[field] = _of_batch(arrays.get(name), len(steps[0][1]))
    for n, (whole, lengths, added) in enumerate(steps):
        q = arrays[f"q{n}"]
        tokens, width = q.shape[1], q.shape[3]
        i = lengths[:, None] + np.arange(tokens)
        j = np.tile(np.arange(whole["k"].shape[1]), (len(lengths), 1))
        far = i[:, None, :, None] - j[:, None, None]
        seen = (far >= 0) & (far <= options["window"][0])
        qkv = exact_side(q), whole["k"], whole["v"]
        d = Dense(*qkv, seen, width**-0.5, i, j, softcap=options["softcap"], **sides)
        o, deviation = _results(d, q, arrays[f"k{n}"], kernels)["o"]
        padding = np.arange(tokens) >= np.reshape(added, (-1, 1))
        results[f"o{n}"] = o, np.where(padding[..., None, None], np.inf, deviation)
    return results
