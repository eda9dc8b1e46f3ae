"""Named problems that numerical tests draw from: one per feature, edge and pair that interacts."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import BlockMask
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments

from . import block_masks
from .mods import MASK_MODS, SCORE_MODS, blockwise

SEED_KINDS = {
    "int": int,
    "numpy": np.int64,
    "array": jnp.int32,
    "uint32": jnp.uint32,
    "key": jax.random.key,
}


class Inputs(NamedTuple):
    """Operands, the cotangents of both outputs, and the arrays of the features."""

    q: Any
    k: Any
    v: Any
    do: Any
    dlse: Any
    side: dict[str, Any]  # with gradients, by the name of the argument; "captured" by the score_mod
    given: dict[str, Any]  # without


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem, in jax.nn's letters; its arrays are drawn by named recipes.

    Attributes:
        q_offset: int, or a tuple, which becomes an int32 array with one entry per batch entry.
        bias, mask: shape as a string, each axis a letter of "BNTS" or "1"; a suffix of the bias
            says what is -inf: "BNTS-inf" a fifth of the elements, "BNTS-rows" all of every third
            query, "BNTS-causal" keys that begin after the query less 3, so that the first see none.
        segments: "packed", "unsorted", "padded", or "long": a short document, a long one, padding.
        q_positions, kv_positions: "restart" (documents that each count from 0), "gaps" (ascending),
            "random", or "shifted" (by a number of each batch entry's own).
        window_arrays: (left, right) of a window that is data, one number per batch entry, or None.
        q_lengths, kv_lengths: one length per batch entry.
        poison: whether padding holds NaN and Inf.
        alibi: shape of the slopes, "N" or "BN".
        score_mod, mask_mod: names of functions in tests/mods.py.
        block_mask: name of a recipe in tests/block_masks.py; or (what it is made from, axes of
            batch and heads, block), as in ("indices", "BK", (128, 64)): "mask_mod", "indices" or
            "dense"; axes are "B" or "1", and "N", "K" or "1".
        maxima: how the row max changes from right to left; factors are those of the weights.
            "rising" grows by 2**29 every 64 keys. "jump" grows by 2**577 and drops again 64 keys
            later. "wide" puts every fifth row far out. "apart" grows by 2**29 in each 16 of 64
            rows at a different block of 64 keys, from left to right.
        additive: a float32 bias that hides keys by a number, a different one for each batch entry:
            ("left_padding", numbers) hides the first keys, ("no_key", ...) all keys of some
            queries, and ("one_key", ...) all but one. Scores are multiples of 1/8, so that every
            implementation rounds their sum with the bias the same way.
        magnitude: power of two by which q and k are scaled up; a tuple has one for each batch
            entry. Scores are as exact as with `additive`, and several keys share the row max.
        integers: dtype of lengths, offsets and ids, where it can hold their values.
        seed_kind: type that carries the seed: "int", "numpy", "array", "uint32" or "key".
        x64: whether `jax_enable_x64` is on and side arrays, of numbers that their usual dtype
            holds, are float64.
    """

    name: str
    T: int
    S: int
    B: int = 1
    N: int = 2
    K: int = 2
    H: int = 64
    Hv: int | None = None
    dtype: str = "float32"
    causal: bool = False
    window: Any = None
    q_offset: int | tuple[int, ...] = 0
    scale: float | None = None
    deterministic: bool = False
    bias: str | None = None
    mask: str | None = None
    segments: str | None = None
    q_positions: str | None = None
    kv_positions: str | None = None
    window_arrays: tuple[Any, Any] | None = None
    empty_rows: str = "zero"
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    poison: bool = False
    softcap: float | None = None
    alibi: str | None = None
    sinks: bool = False
    dropout_rate: float = 0.0
    dropout_seed: int = 0
    broadcast_dropout: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    block_mask: str | tuple[str, str, tuple[int, int]] | None = None
    max_logit: bool = False
    maxima: str | None = None
    additive: tuple[str, tuple[float, ...]] | None = None
    magnitude: int | tuple[int, ...] = 0
    integers: str = "int32"
    seed_kind: str = "int"
    x64: bool = False

    def __str__(self):
        return self.name

    @property
    def width(self):
        """The context in which the case runs."""
        return jax.enable_x64(self.x64 or jax.config.jax_enable_x64)

    @property
    def usual(self) -> Case:
        """The same numbers in the dtypes that every program has: the oracle's case."""
        return dataclasses.replace(self, integers="int32", x64=False)

    @property
    def rounds(self) -> bool:
        """True where logits are so large that rounding them to float32 is part of the result."""
        return self.additive is not None or self.magnitude != 0

    @property
    def v_head_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    def arguments(self, x: Inputs) -> dict[str, Any]:
        """Returns the keyword arguments of `flash_attention`."""
        found = {
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
            "q_offset": 0 if isinstance(self.q_offset, tuple) else self.q_offset,
            "softcap": self.softcap,
        }
        if self.q_positions:
            del found["q_offset"]
        if self.empty_rows != "zero":
            found["empty_rows"] = self.empty_rows
        if self.dropout_rate:
            names = ("dropout_rate", "dropout_seed", "broadcast_dropout")
            found |= {name: getattr(self, name) for name in names}
            found["dropout_seed"] = SEED_KINDS[self.seed_kind](self.dropout_seed)
        found |= x.given | x.side
        if self.window_arrays:
            found["window"] = found.pop("window_left", None), found.pop("window_right", None)
        captured, prefix = found.pop("captured", None), found.pop("prefix", None)
        if self.score_mod:
            found["score_mod"] = SCORE_MODS[self.score_mod].make(captured)
        if self.mask_mod:
            found["mask_mod"] = MASK_MODS[self.mask_mod](prefix)
        if self.block_mask:
            sizes = self.B, (self.N, self.K), self.T, self.S
            if isinstance(self.block_mask, str):
                found["block_mask"] = block_masks.make(self.block_mask, *sizes, seed=0)
            else:
                blocks = found.pop("visible_blocks", None)
                found["block_mask"] = self._block_mask(found.pop("visible"), blocks)
        return found

    def oracle_arguments(self, x: Inputs) -> dict[str, Any]:
        """Returns the same for the oracle: what the block mask shows is in the mask."""
        found = self.arguments(x)
        if not isinstance(self.block_mask, tuple):
            return found
        del found["block_mask"]
        visible = x.given["visible"]
        if visible.shape[1] == self.K:
            visible = jnp.repeat(visible, self.N // self.K, axis=1)
        return found | {"mask": visible & found["mask"] if self.mask else visible}

    def _block_mask(self, visible, blocks) -> BlockMask:
        """Makes the block mask from what is visible, of pairs and of blocks."""
        made_from, _, block = self.block_mask or ("", "", None)
        if made_from == "dense":
            return BlockMask.from_dense(visible, block=block)
        sizes = {"q_len": self.T, "kv_len": self.S, "block": block}
        if made_from == "mask_mod":
            return BlockMask.from_mask_mod(blockwise, *visible.shape[:2], **sizes)
        last = blocks.shape[-1] - 1
        number = last - jax.lax.broadcasted_iota(jnp.int32, blocks.shape, 3)  # descending
        return BlockMask.from_indices(jnp.where(blocks[..., ::-1], number, -1), **sizes)

    @property
    def problem(self):
        x = self.inputs()
        arguments = Arguments(**self.arguments(x), deterministic=self.deterministic)
        return validate.canonicalize(x.q, x.k, x.v, arguments).problem

    def inputs(self, seed: int = 0) -> Inputs:
        """Draws normal operands and cotangents: ones would hide errors of the softmax."""
        draw = np.random.default_rng(seed).standard_normal
        q = draw((self.B, self.T, self.N, self.H))
        k = draw((self.B, self.S, self.K, self.H))
        v = draw((self.B, self.S, self.K, self.v_head_dim))
        do = draw((self.B, self.T, self.N, self.v_head_dim))
        dlse = draw((self.B, self.N, self.T))
        side, given = self._side(seed), self._given(seed)
        if self.rounds:
            q, k = self._whole_numbers(seed)
        if self.maxima:
            _lead(self.maxima, q, k)
        if self.poison:
            queries = self._padding(self.T, self.q_lengths, given.get("q_segment_ids"))
            keys = self._padding(self.S, self.kv_lengths, given.get("kv_segment_ids"))
            for x in (q, do):
                x[queries] = np.nan
            k[keys], v[keys] = np.inf, np.nan
            if self.q_lengths is not None:
                dlse.swapaxes(1, 2)[self._padding(self.T, self.q_lengths, None)] = np.nan
            _poison_bias(side.get("bias"), queries, keys)
        exact = jnp.float64 if self.dtype == "float64" else jnp.float32
        wide = self.x64 and jax.config.jax_enable_x64
        widened = lambda x: x.astype(jnp.float64) if wide else x
        return Inputs(
            *(jnp.asarray(x, self.dtype) for x in (q, k, v, do)),
            dlse=jnp.asarray(dlse, exact),
            side={
                name: widened(
                    jnp.asarray(x, self.dtype if name == "bias" and not self.additive else exact)
                )
                for name, x in side.items()
            },
            given={name: jnp.asarray(self._as_asked(name, x)) for name, x in given.items()},
        )

    def _as_asked(self, name: str, x):
        """Casts an int32 array to the dtype `integers`, where its values fit."""
        if x.dtype != np.int32 or name == "prefix" or not x.size:
            return x
        held = np.iinfo(self.integers)
        return x.astype(self.integers) if held.min <= x.min() and x.max() <= held.max else x

    def _draw(self, seed: int, name: str):
        """Returns a generator for this array only, so that features do not change each other."""
        return np.random.default_rng([seed, zlib.crc32(name.encode())])

    def _whole_numbers(self, seed: int):
        """Draws q and k such that every score is exact in every dtype; pairs of keys are alike."""
        draw = self._draw(seed, "whole").integers
        q = draw(-2, 3, (self.B, self.T, self.N, self.H)).astype(float)
        k = draw(-2, 3, (self.B, -(-self.S // 2), self.K, self.H)).astype(float)
        k = np.repeat(k, 2, axis=1)[:, : self.S]
        factor = np.exp2(np.broadcast_to(self.magnitude, self.B))[:, None, None, None]
        return q * factor, k * factor

    def _additive(self):
        """Builds the float32 bias that hides keys, [B, 1, 1, S] or [B, 1, T, S]."""
        kind, values = self.additive
        value = np.array(values, np.float32)[:, None, None, None]
        if kind == "left_padding":
            hides = np.arange(self.S) < self.S // 3
            return np.where(hides[None, None, None], value, np.float32(0.0))
        rows = np.arange(self.T)
        hides = ((rows >= self.T // 3) & (rows < self.T // 2))[:, None] & np.ones(self.S, bool)
        if kind == "one_key":
            hides &= (rows[:, None] + np.arange(self.S)) % self.S != 0
        return np.where(hides[None, None], value, np.float32(0.0))

    def _shape(self, pattern: str) -> tuple[int, ...]:
        sizes = {"B": self.B, "N": self.N, "T": self.T, "S": self.S, "1": 1}
        return tuple(sizes[letter] for letter in pattern)

    def _side(self, seed: int) -> dict[str, Any]:
        """Draws the float arrays that have gradients."""
        found: dict[str, Any] = {}
        normal = lambda name, shape: self._draw(seed, name).standard_normal(shape)
        if self.bias:
            pattern, *infinite = self.bias.split("-")
            found["bias"] = normal("bias", self._shape(pattern))
            if infinite:
                found["bias"][self._infinite(seed, infinite[0], found["bias"].shape)] = -np.inf
        if self.additive:
            found["bias"] = self._additive()
        if self.alibi:
            found["alibi_slopes"] = 0.1 * np.exp(normal("slopes", self._shape(self.alibi)))
        if self.sinks:
            found["sinks"] = 2.0 * normal("sinks", (self.N,))
        if self.score_mod:
            shape = SCORE_MODS[self.score_mod].captured
            found["captured"] = 0.5 * normal("captured", self._shape(shape))
        return found

    def _infinite(self, seed: int, kind: str, shape):
        """Draws which elements of a bias are -inf."""
        row, column = np.ogrid[: shape[2], : shape[3]]
        row = row if shape[2] > 1 else row + self.S // 2
        found = {
            "inf": (self._draw(seed, "infinite").random(shape) < 0.2) | (row == 0),
            "rows": row % 3 == 0,
            "causal": column > row - 3,
        }
        return np.broadcast_to(found[kind], shape)

    def _given(self, seed: int) -> dict[str, Any]:
        """Draws the arrays that have no gradients."""
        found: dict[str, Any] = {}
        if isinstance(self.q_offset, tuple):
            found["q_offset"] = np.array(self.q_offset, np.int32)
        for name in ("q_lengths", "kv_lengths"):
            if getattr(self, name) is not None:
                found[name] = np.array(getattr(self, name), np.int32)
        if self.mask:
            found["mask"] = self._draw(seed, "mask").random(self._shape(self.mask)) < 0.7
            if "T" in self.mask:
                found["mask"][:, :, self.T // 2] = False  # a row that sees no key
        if self.segments:
            rng = self._draw(seed, "segments")
            for name, length in (("q_segment_ids", self.T), ("kv_segment_ids", self.S)):
                if self.T == self.S and found.get("q_segment_ids") is not None:
                    found[name] = found["q_segment_ids"]
                else:
                    found[name] = _segments(self.segments, rng, self.B, length)
        found |= self._places(seed) | self._visible(seed)
        if self.mask_mod == "prefix":
            found["prefix"] = self._draw(seed, "prefix").integers(0, self.S, self.B, np.int32)
        return found

    def _visible(self, seed: int) -> dict[str, Any]:
        """Draws what the block mask shows: a third of the blocks whole, a third of them partly."""
        if not isinstance(self.block_mask, tuple):
            return {}
        made_from, axes, block = self.block_mask
        sizes = {"B": self.B, "N": self.N, "K": self.K, "1": 1}
        leading = tuple(sizes[letter] for letter in axes)
        if made_from == "mask_mod":
            grids = np.meshgrid(*map(np.arange, (*leading, self.T, self.S)), indexing="ij")
            return {"visible": blockwise(*grids)}
        rng = self._draw(seed, "visible")
        lengths = zip((self.T, self.S), block, strict=True)
        states = rng.integers(0, 3, (*leading, *(-(-n // size) for n, size in lengths)))
        if made_from == "indices":
            states = np.where(states, 2, 0)
        whole = np.repeat(np.repeat(states, block[0], 2), block[1], 3)[..., : self.T, : self.S]
        visible = rng.random(whole.shape) < 0.5 * whole
        return {"visible": visible} | (
            {"visible_blocks": states > 0} if made_from == "indices" else {}
        )

    def _places(self, seed: int) -> dict[str, Any]:
        """Draws positions, and the sides of a window that is data."""
        found: dict[str, Any] = {}
        for name, length in (("q_positions", self.T), ("kv_positions", self.S)):
            if recipe := getattr(self, name):
                rng = self._draw(seed, name)
                found[name] = _positions(recipe, rng, self.B, length, self.S)
        windows = ("window_left", "window_right") if self.window_arrays else ()
        for name, sides in zip(windows, self.window_arrays or (), strict=True):
            if sides is not None:
                found[name] = np.array(sides, np.int32)
        return found

    def _padding(self, length: int, lengths, segments):
        """Returns bool[B, length], True where a position is padding."""
        found = np.zeros((self.B, length), bool)
        if lengths is not None:
            found |= np.arange(length) >= np.array(lengths)[:, None]
        return found if segments is None else found | (segments < 0)


def _segments(recipe: str, rng, batch: int, length: int):
    """Draws document ids, int32[batch, length], by a named recipe."""
    cuts = np.sort(rng.integers(0, length + 1, (batch, 3)), axis=1)
    ids = (np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1)
    if recipe == "unsorted":
        ids = np.repeat(rng.integers(0, 4, (batch, -(-length // 7))), 7, axis=1)[:, :length]
    if recipe == "long":
        place = np.arange(length) * 8 // length  # the long one has three fourths of the length
        ids = np.broadcast_to(np.select([place < 1, place < 7], [0, 1], -1), (batch, length)).copy()
    if recipe == "padded":
        ids = np.where(ids == 1, -1, ids)  # a gap, and a tail
        ids[:, length - length // 5 :] = -1
    return ids.astype(np.int32)


def _positions(recipe: str, rng, batch: int, length: int, kv_len: int):
    """Draws positions, int32[batch, length], by a named recipe."""
    index = np.broadcast_to(np.arange(length), (batch, length))
    if recipe == "restart":
        cuts = np.sort(rng.integers(0, length + 1, (batch, 3)), axis=1)[:, None]
        first = np.max(np.where(cuts <= index[..., None], cuts, 0), axis=-1)
        return (index - first).astype(np.int32)
    if recipe == "gaps":
        return np.cumsum(rng.integers(0, 3, (batch, length)), axis=1).astype(np.int32)
    if recipe == "random":
        return rng.integers(0, kv_len, (batch, length)).astype(np.int32)
    return (index + rng.integers(-20, kv_len, (batch, 1))).astype(np.int32)


def _lead(recipe: str, q, k):
    """Changes normal q and k so that their logits, at scale H**-0.5, get the maxima of a Case."""
    if recipe == "wide":
        q[:, ::5] *= 11.0
        return
    if recipe == "apart":
        group, place = (np.arange(n) for n in (q.shape[1], k.shape[1]))
        for i in range(4):
            q[..., i] = (group // 16 % 4 == i)[:, None]
            k[..., i] = (20.0 * (place // 64 == i + 1) * k.shape[-1] ** 0.5)[:, None]
        return
    place = np.arange(k.shape[1])[::-1] // 64
    extra = {"rising": 20.0 * place, "jump": 400.0 * (place == 3) + 20.0 * (place == 5)}[recipe]
    q[..., 0] = 1.0
    k[..., 0] = (extra * k.shape[-1] ** 0.5)[:, None]


def _poison_bias(bias, queries, keys):
    """Writes NaN where every batch entry that reads an element of the bias has padding there."""
    if bias is None:
        return
    shared = len(bias) == 1
    of_all = lambda padding: padding.all(0, keepdims=True) if shared else padding
    if bias.shape[2] > 1:
        bias.swapaxes(1, 2)[of_all(queries)] = np.nan
    if bias.shape[3] > 1:
        np.moveaxis(bias, 3, 1)[of_all(keys)] = np.nan


_LENGTHS = [1, 2, 5, 17, 127, 128, 129]
_PAIRS = [(113, 203), (203, 113), (239, 1), (1, 239)]

CASES = (
    *(Case(f"length_{n}", T=n, S=n) for n in _LENGTHS),
    *(Case(f"length_{n}_causal", T=n, S=n, causal=True) for n in _LENGTHS),
    *(Case(f"lengths_{t}x{s}", T=t, S=s) for t, s in _PAIRS),
    *(Case(f"lengths_{t}x{s}_causal", T=t, S=s, causal=True) for t, s in _PAIRS),
    *(Case(f"bottom_right_{t}x{s}", T=t, S=s, causal=True, q_offset=s - t) for t, s in _PAIRS),
    Case("bfloat16", T=129, S=160, dtype="bfloat16"),
    Case("bfloat16_causal", T=160, S=160, dtype="bfloat16", causal=True),
    Case("bfloat16_gqa_causal", T=129, S=129, N=4, K=2, dtype="bfloat16", causal=True),
    Case("float16", T=129, S=160, dtype="float16"),
    Case("float16_causal", T=160, S=160, dtype="float16", causal=True),
    Case("batch", T=40, S=56, B=3),
    Case("gqa", T=70, S=90, B=2, N=6, K=2),
    Case("gqa_causal", T=90, S=90, B=2, N=6, K=2, causal=True),
    Case("mqa", T=70, S=90, N=4, K=1),
    Case("mqa_causal", T=70, S=70, N=4, K=1, causal=True),
    Case("head_dim_1", T=33, S=33, H=1, causal=True),
    Case("head_dim_40", T=33, S=47, H=40, dtype="bfloat16"),
    Case("head_dim_128", T=64, S=64, H=128, dtype="bfloat16", causal=True),
    Case("head_dim_256", T=64, S=64, H=256, dtype="bfloat16"),
    Case("narrow_values", T=64, S=80, H=64, Hv=32),
    Case("wide_values_causal", T=80, S=64, H=32, Hv=96, N=4, causal=True),
    Case("offset_positive", T=50, S=200, causal=True, q_offset=77),
    Case("offset_past_the_end", T=50, S=60, causal=True, q_offset=500),
    Case("offset_negative", T=150, S=60, causal=True, q_offset=-70),
    Case("offset_hides_all", T=50, S=60, causal=True, q_offset=-50),
    Case("offset_array", T=140, S=150, B=3, causal=True, q_offset=(-20, 0, 145)),
    Case("offset_array_gqa", T=33, S=150, B=2, N=4, causal=True, q_offset=(100, -33)),
    Case("offset_array_half", T=33, S=150, B=2, causal=True, q_offset=(10, 117), dtype="bfloat16"),
    Case("scale_large", T=64, S=64, scale=1.0),
    Case("scale_negative", T=64, S=64, scale=-0.25, causal=True),
    Case("scale_zero", T=20, S=150, scale=0.0),
    Case("deterministic", T=129, S=129, N=4, dtype="bfloat16", causal=True, deterministic=True),
)


def _small(name: str, **fields) -> Case:
    """Returns a case of a modifier: several tiles with SMALL_BLOCKS, a few heads and entries."""
    return Case(name, **({"T": 70, "S": 83, "B": 2, "N": 4, "H": 16} | fields))


_SQUARE = {"T": 75, "S": 75}

# One per feature, then one per pair that interacts: two that hide, two that move scores, and what
# reads a position together with what moves it.
FEATURES = (
    _small("window", window=(9, 4)),
    _small("window_int", window=11, dtype="bfloat16"),
    _small("window_left_only", window=(20, None), q_offset=-10),
    _small("window_causal", window=(13, 5), causal=True, **_SQUARE),
    _small("window_past_all_keys", window=(3, 0), q_offset=60),
    _small("window_offset_array", window=(8, 8), q_offset=(-30, 40)),
    _small("packed", segments="packed", **_SQUARE),
    _small("packed_causal", segments="packed", causal=True, dtype="bfloat16", **_SQUARE),
    _small("packed_cross", segments="packed"),
    _small("unsorted", segments="unsorted", **_SQUARE),
    _small("unsorted_cross_window", segments="unsorted", window=(30, 10)),
    _small("padded", segments="padded", poison=True, **_SQUARE),
    _small("padded_cross_causal", segments="padded", poison=True, causal=True),
    _small("kv_lengths", kv_lengths=(83, 31), poison=True),
    _small("kv_lengths_zero", kv_lengths=(0, 17), poison=True),
    _small("q_lengths", q_lengths=(70, 33), poison=True),
    _small("lengths_causal", q_lengths=(60, 0), kv_lengths=(48, 83), poison=True, causal=True),
    _small("lengths_padded", q_lengths=(60, 9), kv_lengths=(48, 70), segments="padded",
           poison=True, dtype="bfloat16", **_SQUARE),
    *(_small(f"bias_{p}", bias=p) for p in ("BNTS", "1NTS", "B1T1", "11TS", "1N1S", "B11S")),
    _small("bias_1111", bias="1111", T=20, S=30),
    _small("bias_bfloat16", bias="1NTS", dtype="bfloat16"),
    _small("bias_float16_gqa", bias="B1TS", dtype="float16", K=2),
    _small("bias_causal_offset", bias="1NTS", causal=True, q_offset=-20),
    _small("bias_infinite", bias="B1TS-inf"),
    _small("bias_infinite_softcap", bias="1NTS-causal", softcap=3.0, max_logit=True, **_SQUARE),
    _small("bias_infinite_score_mod", bias="BNTS-rows", score_mod="falling", dtype="bfloat16"),
    _small("bias_infinite_both", bias="B1TS-inf", softcap=3.0, score_mod="square", sinks=True),
    _small("bias_lengths", bias="BNTS", q_lengths=(51, 70), kv_lengths=(83, 50), poison=True),
    _small("bias_shared_lengths", bias="1NTS", q_lengths=(51, 40), kv_lengths=(23, 50),
           poison=True),
    _small("bias_padded", bias="B1TS", segments="padded", poison=True, softcap=3.0, **_SQUARE),
    *(_small(f"mask_{p}", mask=p) for p in ("BNTS", "1NTS", "B11S", "11T1")),
    _small("mask_causal_bfloat16", mask="B1TS", causal=True, dtype="bfloat16", **_SQUARE),
    _small("mask_bias", mask="1NTS", bias="B1TS"),
    _small("softcap", softcap=2.0, scale=1.0),
    _small("softcap_causal_bfloat16", softcap=5.0, causal=True, dtype="bfloat16", **_SQUARE),
    _small("softcap_bias", softcap=2.0, bias="1NTS"),
    _small("softcap_lengths", softcap=2.0, q_lengths=(70, 33), kv_lengths=(31, 83), poison=True),
    _small("alibi", alibi="N"),
    _small("alibi_per_entry", alibi="BN", K=2, dtype="bfloat16"),
    _small("alibi_causal_offset", alibi="N", causal=True, q_offset=13),
    _small("alibi_offset_array", alibi="BN", q_offset=(40, -15)),
    _small("alibi_bias_softcap", alibi="N", bias="B1TS", softcap=4.0),
    _small("sinks", sinks=True),
    _small("sinks_bfloat16_gqa", sinks=True, K=2, dtype="bfloat16", causal=True),
    _small("sinks_hidden_rows", sinks=True, causal=True, q_offset=-30),
    _small("sinks_padded", sinks=True, segments="padded", poison=True, **_SQUARE),
    _small("sinks_lengths", sinks=True, q_lengths=(70, 33), kv_lengths=(0, 83), poison=True),
    _small("sinks_window_softcap", sinks=True, window=(9, 0), softcap=3.0, **_SQUARE),
    _small("dropout", dropout_rate=0.3),
    _small("dropout_bfloat16_gqa", dropout_rate=0.1, K=2, dropout_seed=7, dtype="bfloat16"),
    _small("dropout_broadcast", dropout_rate=0.5, broadcast_dropout=True, causal=True),
    _small("dropout_offset_array", dropout_rate=0.25, causal=True, q_offset=(40, -15)),
    _small("dropout_sinks", dropout_rate=0.5, sinks=True),
    _small("dropout_bias", dropout_rate=0.5, bias="1N1S"),
    _small("dropout_padded", dropout_rate=0.2, segments="padded", poison=True, **_SQUARE),
    *(_small(f"score_mod_{name}", score_mod=name) for name in SCORE_MODS),
    _small("score_mod_bfloat16_causal", score_mod="relative", causal=True, dtype="bfloat16"),
    _small("score_mod_softcap_bias", score_mod="square", softcap=3.0, bias="11TS"),
    _small("score_mod_lengths", score_mod="square", q_lengths=(70, 33), kv_lengths=(31, 83),
           bias="BNTS", poison=True),
    _small("score_mod_dropout_offset", score_mod="per_entry", dropout_rate=0.3, q_offset=21),
    *(_small(f"mask_mod_{name}", mask_mod=name) for name in MASK_MODS),
    _small("mask_mod_offset_array", mask_mod="stripes", q_offset=(5, -9), dtype="bfloat16"),
    _small("mask_mod_padded_mask", mask_mod="prefix", segments="padded", mask="B11S", **_SQUARE),
    _small("max_logit", max_logit=True),
    _small("max_logit_hidden_rows", max_logit=True, causal=True, q_offset=-30, sinks=True),
    _small("max_logit_softcap_bias", max_logit=True, softcap=4.0, bias="1NTS", q_lengths=(50, 70)),
    _small("narrow_values_bias", H=24, Hv=16, bias="B1TS", N=2),
    _small("positions_causal", causal=True, q_positions="random", kv_positions="random", K=2),
    _small("positions_window", window=(20, 5), q_positions="gaps", kv_positions="gaps"),
    _small("positions_restart_packed", causal=True, q_positions="restart", kv_positions="restart",
           segments="packed", **_SQUARE),
    _small("positions_of_queries", causal=True, window=(30, 0), q_positions="shifted",
           kv_lengths=(83, 31), poison=True, dtype="bfloat16"),
    _small("positions_of_keys_offset", causal=True, kv_positions="gaps", q_offset=21, sinks=True),
    _small("positions_alibi", alibi="N", causal=True, q_positions="random", kv_positions="gaps"),
    _small("positions_alibi_unmasked", alibi="BN", kv_positions="random", softcap=4.0),
    _small("positions_mods", score_mod="relative", mask_mod="stripes", q_positions="shifted",
           kv_positions="gaps", dropout_rate=0.2, window=(50, 30)),
    _small("positions_empty_mean", window=(9, 4), q_positions="shifted", empty_rows="mean", K=2),
    _small("positions_padded", causal=True, q_positions="restart", segments="padded", poison=True,
           bias="1NTS", **_SQUARE),
    _small("window_array", window_arrays=((9, 40), (4, 0))),
    _small("window_array_left", window_arrays=((9, 40), None), causal=True, q_offset=(5, -9)),
    _small("window_array_alibi_dropout", window_arrays=((30, 8), (0, 12)), alibi="N",
           dropout_rate=0.2, q_offset=11, dtype="bfloat16"),
    _small("mean_of_window", window=(9, 4), q_offset=70, empty_rows="mean", K=2),
    _small("mean_of_lengths", q_lengths=(70, 33), kv_lengths=(0, 17), empty_rows="mean",
           poison=True),
    _small("mean_of_padded", segments="padded", window=(9, 0), empty_rows="mean", K=2),
    _small("mean_of_mask", mask="B1TS", bias="1NTS", empty_rows="mean", dtype="bfloat16"),
    _small("everything", causal=True, window=(40, 0), bias="1NTS", mask="B11S", softcap=4.0,
           alibi="N", sinks=True, dropout_rate=0.2, segments="padded", kv_lengths=(70, 60),
           q_lengths=(75, 52), score_mod="relative", mask_mod="stripes", max_logit=True,
           poison=True, K=2, **_SQUARE),
    _small("everything_bfloat16", window=(40, 30), bias="B1TS", mask="1NTS", softcap=4.0,
           alibi="BN", sinks=True, dropout_rate=0.2, segments="unsorted", kv_lengths=(70, 60),
           score_mod="per_entry", mask_mod="prefix", q_offset=(3, -8), K=2, dtype="bfloat16"),
)  # fmt: skip


_MOST = float(np.finfo(np.float32).max)
# Numbers that programs hide keys by, and what they could not mean; -inf hides without exception.
HIDING = (-1e4, -1e7, -1e8, -1e9, -1e10, -1e15, -1e30, -3e38, -_MOST,
          float(jnp.finfo(jnp.bfloat16).min), -np.inf)  # fmt: skip
ATTRACTING = tuple(-x for x in HIDING if np.isfinite(x))


def additive_cases(values=HIDING + ATTRACTING, **fields) -> tuple[Case, ...]:
    """Returns every pattern in every dtype, with one number per batch entry."""
    sizes = {"T": 70, "S": 70, "N": 2, "K": 1} | fields
    patterns = {"left_padding": True, "no_key": False, "one_key": False}
    return tuple(
        Case(f"{kind}_{dtype}", B=len(values), dtype=dtype, causal=causal,
             additive=(kind, tuple(values)), **sizes)
        for kind, causal in patterns.items()
        for dtype in ("float32", "bfloat16", "float16")
    )  # fmt: skip


ADDITIVE = additive_cases()

# Logits that are large without a bias: by their products, their slopes, sinks and users' functions.
LARGE = (
    *(Case(f"scores_of_2^{2 * m}", T=70, S=83, K=1, B=2, magnitude=m, dtype="bfloat16", causal=c)
      for m, c in ((5, False), (6, True), (9, False), (15, True), (30, False), (40, True))),
    # Some of the groups of heads are left to launches of their own.
    Case("far_entries", T=200, S=140, B=3, N=2, K=1, magnitude=(0, 15, 9), dtype="bfloat16",
         causal=True),
    Case("far_entries_128", T=130, S=200, B=2, N=2, K=1, H=128, magnitude=(15, 0),
         dtype="bfloat16", causal=True),
    Case("far_entries_96", T=130, S=200, B=2, N=2, K=1, H=96, magnitude=(15, 0), dtype="bfloat16",
         causal=True),
    Case("far_entries_96_full", T=130, S=128, B=2, N=2, K=1, H=96, magnitude=(0, 9),
         dtype="bfloat16"),
    Case("far_entries_of_blocks", T=200, S=140, B=2, N=2, K=1, magnitude=(0, 15), dtype="bfloat16",
         block_mask="small blocks"),
    Case("far_entries_float16", T=130, S=300, B=2, magnitude=(6, 0), dtype="float16"),
    *(Case(f"far_entries_{name}", T=200, S=140, B=3, N=2, K=1, magnitude=(0, 15, 9),
           dtype="bfloat16", **fields)
      for name, fields in (
          ("sinks", {"sinks": True, "causal": True}),
          ("lengths", {"kv_lengths": (140, 60, 100), "poison": True}),
          ("lengths_alibi", {"kv_lengths": (70, 0, 140), "alibi": "N", "causal": True}),
          ("dropout", {"dropout_rate": 0.3, "causal": True}),
          ("score_mod", {"score_mod": "relative", "causal": True}),
          ("mask_mod_lengths", {"mask_mod": "stripes", "kv_lengths": (70, 0, 140), "poison": True}),
          ("softcap_dropout", {"softcap": 5000.0, "dropout_rate": 0.3, "causal": True}),
          ("everything", {"alibi": "BN", "sinks": True, "kv_lengths": (140, 60, 100),
                          "dropout_rate": 0.2, "score_mod": "relative", "mask_mod": "stripes",
                          "causal": True}))),
    Case("scores_of_2^30_float32", T=70, S=83, magnitude=15),
    Case("scores_of_2^12_float16", T=70, S=83, magnitude=6, dtype="float16"),
    Case("scores_and_sinks", T=70, S=83, magnitude=9, sinks=True, dtype="bfloat16"),
    Case("sinks_beside_additive", T=70, S=70, B=3, sinks=True, dtype="bfloat16",
         additive=("no_key", (-1e4, -1e10, 1e10))),
    Case("additive_softcap", T=70, S=70, B=2, softcap=30.0, additive=("no_key", (-1e9, -1e4))),
    Case("additive_dropout", T=70, S=70, B=2, dropout_rate=0.3, additive=("no_key", (-1e9, -3e38)),
         dtype="bfloat16"),
    Case("additive_segments", T=75, S=75, B=2, segments="padded", poison=True,
         additive=("left_padding", (-1e9, -_MOST)), causal=True, dtype="bfloat16"),
    Case("additive_lengths_window", T=75, S=75, B=2, kv_lengths=(75, 30), q_lengths=(75, 60),
         window=(20, 3), additive=("left_padding", (-1e10, -1e30)), poison=True),
    Case("additive_alibi", T=75, S=75, B=2, alibi="N", additive=("left_padding", (-1e9, -1e15)),
         causal=True, dtype="bfloat16"),
    Case("additive_max_logit", T=70, S=70, B=2, max_logit=True,
         additive=("no_key", (-1e9, 1e4)), dtype="bfloat16"),
    Case("additive_deterministic", T=70, S=70, B=3, deterministic=True, dtype="bfloat16",
         additive=("left_padding", (-1e4, -1e9, -_MOST)), causal=True),
    Case("additive_128", T=70, S=70, B=3, H=128, dtype="bfloat16", causal=True,
         additive=("left_padding", (-1e7, -1e10, -_MOST))),
    Case("additive_256", T=70, S=70, B=2, N=1, K=1, H=256, dtype="bfloat16",
         additive=("no_key", (-1e9, -_MOST))),
)  # fmt: skip


def named(*names: str) -> tuple[Case, ...]:
    """Returns the cases of these names."""
    table = {case.name: case for case in (*CASES, *FEATURES)}
    return tuple(table[name] for name in names)
