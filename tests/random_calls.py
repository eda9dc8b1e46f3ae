"""Random calls as users make them: shapes, dtypes, masks and modifiers, no values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp

from .mods import MASK_MODS, SCORE_MODS

GROUPS = (1, 1, 2, 3, 4, 8)
Q_LENGTHS = (1, 5, 64, 100, 129, 512, 1000, 1024, 2048, 4096, 8192)
KV_LENGTHS = (1, 16, 77, 128, 640, 2048, 5000, 8192)
HEAD_DIMS = (8, 16, 24, 32, 40, 48, 56, 64, 64, 64, 72, 80, 96, 112, 120, 128, 128, 128)
HEAD_DIMS += (136, 160, 192, 200, 224, 248, 256, 256, 264, 320, 384, 512, 512, 576)
V_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256, 320, 512)
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
WIDEST_FLOAT32 = 128  # of the Hopper kernels
PAGE_SIZES = (16, 48, 64, 128, 256)

# What `blocks` may hold: values of its fields that somebody might try.
_NUMBERS = (1, 2, 3, 4, 5, 6, 8, 16, 33)
_TILES = (16, 32, 48, 64, 96, 128, 160, 192, 256)


@dataclasses.dataclass(frozen=True)
class RandomCall:
    """One random call.

    Attributes:
        function: function of the package.
        arrays: jax.ShapeDtypeStruct by name of the argument; q, k and v among them, and perhaps
            kv_indices, of which a block mask is made.
        options: all other arguments, and the block of a block mask.
        captured: (recipe, shape) of each function argument and of the array that it captures.
        wanted: names of arrays whose gradients are computed; empty: the forward alone.
        derivative: "grad", or with differentiable="any" also "jvp" or "hvp", of the wanted arrays.
        x64: True if `jax_enable_x64` is on.
    """

    function: Callable
    arrays: dict[str, Any]
    options: dict[str, Any]
    captured: dict[str, tuple[str, Any]]
    wanted: tuple[str, ...]
    derivative: str = "grad"
    x64: bool = False

    def __str__(self) -> str:
        shapes = {name: f"{x.dtype}{list(x.shape)}" for name, x in self.arrays.items()}
        mods = {name: recipe for name, (recipe, _) in self.captured.items()}
        of = f"{self.derivative} of {self.wanted}{' under x64' if self.x64 else ''}"
        return f"{self.function.__name__}({shapes} {self.options | mods}) {of}"

    @property
    def arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The shapes of the arguments of `run`: (wanted, all others)."""
        captured = {name: x for name, (_, x) in self.captured.items()}
        everything = self.arrays | captured
        wanted = {name: x for name, x in everything.items() if name in self.wanted}
        return wanted, {name: x for name, x in everything.items() if name not in wanted}

    def run(self, backend: str) -> Callable:
        """Returns (wanted, others) -> the call's results, or the gradients of their sum."""

        def call(wanted, others):
            given = wanted | others
            options = dict(self.options)
            for name, (recipe, _) in self.captured.items():
                array = given.pop(name)
                make = SCORE_MODS[recipe].make if name == "score_mod" else MASK_MODS[recipe]
                options[name] = make(array)
            sides = [given.pop(f"window_{name}", None) for name in ("left", "right")]
            if any(x is not None for x in sides):
                options["window"] = tuple(sides)
            q, k, v = (given.pop(name, None) for name in "qkv")
            if "kv_indices" in given:
                sizes = {"q_len": q.shape[1], "kv_len": k.shape[1], "block": options.pop("block")}
                index = given.pop("kv_indices")
                options["block_mask"] = fp.BlockMask.from_indices(index, **sizes)
            return self.function(q, k, v, **options, **given, backend=backend)

        def total(wanted, others):
            leaves = jax.tree.leaves(call(wanted, others))
            return sum(x.astype(jnp.float32).sum() for x in leaves)

        def pushed(function):
            def moved(wanted, others):
                along = jax.tree.map(jnp.ones_like, wanted)
                return jax.jvp(lambda wanted: function(wanted, others), (wanted,), (along,))

            return moved

        gradient = jax.grad(total)
        ways = {"grad": gradient, "jvp": pushed(call), "hvp": pushed(gradient)}
        return ways[self.derivative] if self.wanted else call


class Draw:
    """A random generator and the small decisions that it makes."""

    def __init__(self, seed: int, number: int):
        self.rng = np.random.default_rng([seed, number])

    def one_of(self, values) -> Any:
        """Picks one of these values, as it is."""
        return values[int(self.rng.integers(len(values)))]

    def chance(self, p: float) -> bool:
        """Returns True with probability p."""
        return bool(self.rng.random() < p)

    def between(self, low: int, high: int) -> int:
        """Draws an integer, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def shape(self, *sizes: int) -> tuple[int, ...]:
        """Draws a shape with each size, or 1."""
        return tuple(self.one_of((1, size)) for size in sizes)


def random_call(seed: int, number: int) -> RandomCall:
    """Draws a call, the same for the same numbers.

    One in eight decodes, one in ten is packed, one in ten is ragged, and one in three has
    `jax_enable_x64`.
    """
    return _with_x64(Draw(seed + 5, number), _call(Draw(seed, number), seed, number))


def _call(draw: Draw, seed: int, number: int) -> RandomCall:
    if draw.chance(0.125):
        call = _with_kv_blocks(Draw(seed + 3, number), _decode(draw))
        call = _with_shared_prefix_or_drafts(Draw(seed + 6, number), call)
        return _without_values(Draw(seed + 4, number), call)
    if draw.chance(0.11):
        return _packed(draw)
    if draw.chance(0.11):
        return _without_values(Draw(seed + 4, number), _ragged(draw))
    call = _with_block_mask(Draw(seed + 2, number), _attention(draw))
    return _of_any_order(Draw(seed + 7, number), call)


def random_blocks(seed: int, number: int, chosen: dict[str, Any]) -> dict[str, Any] | None:
    """Changes `chosen`, the tiles by kernel, for about one call of three; None for the others."""
    draw = Draw(seed + 1, number)
    if not draw.chance(0.35):
        return None
    kernel = draw.one_of(sorted(chosen))
    fields = vars(chosen[kernel])
    found = {}
    for name in draw.rng.permutation(sorted(fields))[: 1 + int(draw.chance(0.5))]:
        value = fields[str(name)]
        if isinstance(value, bool):
            found[str(name)] = not value
        elif isinstance(value, float):
            found[str(name)] = draw.one_of((0.0, 0.25, 1.0, 20.0, 200.0))
        else:
            tiles = name in ("rows", "columns") or name.startswith("block")
            found[str(name)] = draw.one_of(_TILES if tiles else _NUMBERS)
    return {kernel: found}


def _attention(draw: Draw) -> RandomCall:
    kv_heads, group, batch = (draw.one_of(v) for v in ((1, 2, 4, 8), GROUPS, (1, 1, 2, 3, 8, 88)))
    heads, q_len = kv_heads * group, draw.one_of(Q_LENGTHS)
    kv_len = q_len if draw.chance(0.7) else draw.one_of(KV_LENGTHS)
    head_dim = draw.one_of(HEAD_DIMS)
    v_head_dim = head_dim if draw.chance(0.75) else draw.one_of(V_HEAD_DIMS)
    dtype = draw.one_of(DTYPES)
    if dtype == "float32" and max(head_dim, v_head_dim) > WIDEST_FLOAT32:
        dtype = "bfloat16"
    of = jax.ShapeDtypeStruct
    arrays = {
        "q": of((batch, q_len, heads, head_dim), dtype),
        "k": of((batch, kv_len, kv_heads, head_dim), dtype),
        "v": of((batch, kv_len, kv_heads, v_head_dim), dtype),
    }
    options: dict[str, Any] = {"q_offset": 0}
    if draw.chance(0.5):
        options["causal"] = True
    if draw.chance(0.25):
        options["window"] = tuple(int(x) for x in draw.rng.integers(0, 1200, 2))
    for name, value in (("softcap", 30.0), ("dropout_rate", 0.1), ("deterministic", True)):
        if draw.chance(0.2):
            options[name] = value
    if "dropout_rate" in options:
        arrays["dropout_seed"] = of((), "int32")
    captured = {}
    if draw.chance(0.15):
        recipe = draw.one_of(sorted(SCORE_MODS))
        sizes = {"B": batch, "N": heads}
        shape = tuple(sizes[axis] for axis in SCORE_MODS[recipe].captured)
        captured["score_mod"] = recipe, of(shape, "float32")
    if draw.chance(0.15):
        captured["mask_mod"] = draw.one_of(sorted(MASK_MODS)), of((batch,), "int32")
    arrays |= _side(draw, batch, heads, q_len, kv_len, dtype)
    replaced = {"q_offset": ("q_offset", "q_positions"), "window": ("window_left", "window_right")}
    for name, others in replaced.items():
        options = {n: x for n, x in options.items() if n != name or not set(others) & set(arrays)}
    if draw.chance(0.2):
        options["empty_rows"] = "mean"
    function = fp.flash_attention
    if draw.chance(0.3):
        function = draw.one_of((fp.flash_attention_with_lse, fp.flash_attention_with_max_logit))
    sides = [name for name in ("bias", "alibi_slopes", "sinks") if name in arrays]
    sides += [name for name in captured if name == "score_mod"]
    wanted = tuple("qkv") + tuple(name for name in sides if draw.chance(0.7))
    return RandomCall(function, arrays, options, captured, wanted if draw.chance(0.85) else ())


def _with_block_mask(draw: Draw, call: RandomCall) -> RandomCall:
    """Adds lists of visible blocks to one call of five."""
    if not draw.chance(0.2):
        return call
    (batch, q_len, heads, _), (_, kv_len, kv_heads, _) = (call.arrays[x].shape for x in "qk")
    block = draw.one_of((64, 128, 128, 192, 256, 1024)), draw.one_of((64, 128, 128))
    leading = draw.one_of((1, batch)), draw.one_of((1, kv_heads, heads))
    index = (*leading, -(-q_len // block[0]), draw.one_of((1, 3, -(-kv_len // block[1]))))
    arrays = call.arrays | {"kv_indices": jax.ShapeDtypeStruct(index, "int32")}
    return dataclasses.replace(call, arrays=arrays, options=call.options | {"block": block})


def _of_any_order(draw: Draw, call: RandomCall) -> RandomCall:
    """Makes a fifth of the calls differentiable to any order, and pushes two thirds of these."""
    if not draw.chance(0.2):
        return call
    options = call.options | {"differentiable": "any"}
    derivative = draw.one_of(("grad", "jvp", "hvp"))
    return dataclasses.replace(call, options=options, derivative=derivative)


def _with_x64(draw: Draw, call: RandomCall) -> RandomCall:
    """Turns `jax_enable_x64` on for a third of the calls, where numpy makes wide arrays.

    Half of the integers are int64 then, and half of what stands next to q, k and v is float64.
    """
    if not draw.chance(1 / 3):
        return call

    def wide(name: str, x):
        of_cache = {"q", "k", "v", "new_k", "new_v"}  # which have one dtype
        if name in of_cache or x.dtype == jnp.bool_ or draw.chance(0.5):
            return x
        kind = "int64" if jnp.issubdtype(x.dtype, jnp.integer) else "float64"
        return jax.ShapeDtypeStruct(x.shape, kind)

    arrays = {name: wide(name, x) for name, x in call.arrays.items()}
    captured = {name: (recipe, wide(name, x)) for name, (recipe, x) in call.captured.items()}
    options = call.options | {"scale": np.float64(0.3)} if draw.chance(0.3) else call.options
    return dataclasses.replace(call, arrays=arrays, captured=captured, options=options, x64=True)


def _side(draw: Draw, batch: int, heads: int, q_len: int, kv_len: int, dtype: str):
    of, found = jax.ShapeDtypeStruct, {}
    sizes = (batch, heads, q_len, kv_len)
    if draw.chance(0.3):
        shape = draw.shape(*sizes) if draw.chance(0.5) else (*draw.shape(batch, heads), *sizes[2:])
        found["bias"] = of(shape, draw.one_of((dtype, "float32")))
    if draw.chance(0.2):
        shape = draw.shape(*sizes) if draw.chance(0.5) else (*draw.shape(batch, heads), *sizes[2:])
        found["mask"] = of(shape, "bool")
    if draw.chance(0.25):
        found |= {"q_segment_ids": of((batch, q_len), "int32")}
        found |= {"kv_segment_ids": of((batch, kv_len), "int32")}
    for name, p in (("kv_lengths", 0.2), ("q_lengths", 0.15), ("q_offset", 0.15)):
        if draw.chance(p):
            found[name] = of((batch,), "int32")
    if draw.chance(0.2):
        found.pop("q_offset", None)  # positions say it
        found["q_positions"] = of((batch, q_len), "int32")
    if draw.chance(0.15):
        found["kv_positions"] = of((batch, kv_len), "int32")
    for name in ("alibi_slopes", "sinks"):
        if draw.chance(0.2):
            found[name] = of((heads,), "float32")
    if draw.chance(0.15):
        sides = draw.one_of((("left",), ("right",), ("left", "right")))
        shape = draw.one_of(((), (batch,)))
        found |= {f"window_{side}": of(shape, "int32") for side in sides}
    return found


def _with_kv_blocks(draw: Draw, call: RandomCall) -> RandomCall:
    """Adds chosen blocks to half of the decode calls that may have them."""
    arrays, others = call.arrays, ("window", "kv_starts", "alibi_slopes", "q_offset")
    given = {*arrays, *(name for name, x in call.options.items() if x is not None)}
    length, kv_heads = arrays["k"].shape[1:3]
    if arrays["q"].shape[1] > 1 or given & {*others} or draw.chance(0.5):
        return call
    sizes = [n for n in (16, 64, 128) if length % n == 0]
    if "page_table" in arrays:
        sizes = [length, 2 * length]
    if not sizes:
        return call
    shape = len(arrays["q"]), draw.one_of((1, kv_heads)), draw.one_of((1, 9, 200))
    blocks = {"kv_blocks": jax.ShapeDtypeStruct(shape, "int32")}
    size = {"kv_block_size": draw.one_of(sizes)}
    return dataclasses.replace(call, arrays=arrays | blocks, options=call.options | size)


def _with_shared_prefix_or_drafts(draw: Draw, call: RandomCall) -> RandomCall:
    """Adds a shared prefix, or a mask of drafts, to half of the decode calls that may have them."""
    arrays, options = dict(call.arrays), dict(call.options)
    batch, tokens = arrays["q"].shape[:2]
    given = {*arrays, *options}
    if {"q_offset", "kv_blocks"} & given or draw.chance(0.5):
        return call
    if tokens > 1 and draw.chance(0.5):
        shape = draw.one_of(((tokens, tokens), (batch, tokens, tokens)))
        arrays["draft_mask"] = jax.ShapeDtypeStruct(shape, "bool")
    elif "page_table" in given and not {"window", "kv_starts", "alibi_slopes"} & given:
        _share_prefix(draw, arrays, options, batch)
    return dataclasses.replace(call, arrays=arrays, options=options)


def _share_prefix(draw: Draw, arrays: dict, options: dict, batch: int):
    if draw.chance(0.5):
        options["shared_prefix"] = "auto"
    else:
        arrays["shared_prefix"] = jax.ShapeDtypeStruct((batch,), "int32")


def _without_values(draw: Draw, call: RandomCall) -> RandomCall:
    """Makes the values of a quarter of the decode calls columns of the keys."""
    if draw.chance(0.75):
        return call
    arrays = {name: x for name, x in call.arrays.items() if name not in ("v", "v_scale", "new_v")}
    width = min(call.arrays["k"].shape[-1], call.arrays["v"].shape[-1])
    options = call.options | {"v_head_dim": draw.one_of((width, width, None))}
    return dataclasses.replace(call, arrays=arrays, options=options)


def _packed(draw: Draw) -> RandomCall:
    """Draws a call of flash_attention_varlen."""
    kv_heads, group = draw.one_of((1, 2, 4, 8)), draw.one_of(GROUPS)
    heads, head_dim = kv_heads * group, draw.one_of(HEAD_DIMS)
    v_head_dim = head_dim if draw.chance(0.75) else draw.one_of(V_HEAD_DIMS)
    q_len, documents = draw.one_of(Q_LENGTHS), draw.one_of((1, 2, 5, 64))
    same = draw.chance(0.5)
    kv_len = q_len if same else draw.one_of(KV_LENGTHS)
    dtype = draw.one_of(("bfloat16", "bfloat16", "float16"))
    of = jax.ShapeDtypeStruct
    arrays = {
        "q": of((q_len, heads, head_dim), dtype),
        "k": of((kv_len, kv_heads, head_dim), dtype),
        "v": of((kv_len, kv_heads, v_head_dim), dtype),
        "cu_seqlens_q": of((documents + 1,), "int32"),
    }
    options: dict[str, Any] = {}
    if not same:
        arrays["cu_seqlens_kv"] = of((documents + 1,), "int32")
        options["alignment"] = draw.one_of(("start", "end"))
    if draw.chance(0.5):
        options["causal"] = True
    if draw.chance(0.3):
        options["window"] = tuple(int(x) for x in draw.rng.integers(0, 1200, 2))
    for name, value in (("softcap", 30.0), ("deterministic", True), ("return_lse", True)):
        if draw.chance(0.2):
            options[name] = value
    for name in ("alibi_slopes", "sinks"):
        if draw.chance(0.2):
            arrays[name] = of((heads,), "float32")
    captured = {}
    if draw.chance(0.2):
        captured["mask_mod"] = draw.one_of(sorted(MASK_MODS)), of((1,), "int32")
    sides = [name for name in ("alibi_slopes", "sinks") if name in arrays and draw.chance(0.7)]
    wanted = (*"qkv", *sides) if draw.chance(0.85) else ()
    return RandomCall(fp.flash_attention_varlen, arrays, options, captured, wanted)


def _hide_first_keys(draw: Draw, arrays: dict, options: dict, batch: int):
    """Adds a window, known or an array, and starts."""
    of = jax.ShapeDtypeStruct
    if draw.chance(0.3):
        options["window"] = (draw.one_of((0, 100, 1024)), None)
    elif draw.chance(0.2):
        arrays["window"] = of(draw.one_of(((), (batch,))), "int32")
    if draw.chance(0.2):
        arrays["kv_starts"] = of((batch,), "int32")


def _decode(draw: Draw) -> RandomCall:
    kv_heads, group, batch = (draw.one_of(v) for v in ((1, 2, 4, 8), GROUPS, (1, 1, 2, 16, 64)))
    heads, q_len = kv_heads * group, draw.one_of((1, 1, 1, 2, 4, 16))
    head_dim = draw.one_of((16, 32, 64, 64, 80, 96, 128, 128, 128, 192, 256, 304, 384, 512, 576))
    v_head_dim = head_dim if draw.chance(0.8) else draw.one_of((32, 64, 128, 256, 352, 384, 512))
    dtype = draw.one_of(("bfloat16", "bfloat16", "float16"))
    stored = draw.one_of((dtype, dtype, dtype, "int8", "float8_e4m3fn"))
    of = jax.ShapeDtypeStruct
    options: dict[str, Any] = {}
    arrays = {"kv_lengths": of((batch,), "int32")}
    rows, length = batch, draw.one_of((64, 256, 1000, 4096, 32768))
    if draw.chance(0.4):
        length, rows = draw.one_of(PAGE_SIZES), draw.one_of((1, 64, 3000))
        arrays["page_table"] = of((batch, draw.one_of((1, 16, 100))), "int32")
    if stored != dtype and draw.chance(0.7):
        for name in ("k_scale", "v_scale"):
            arrays[name] = of(draw.one_of(((kv_heads,), (rows, kv_heads))), "float32")
    arrays |= {
        "q": of((batch, q_len, heads, head_dim), dtype),
        "k": of((rows, length, kv_heads, head_dim), stored),
        "v": of((rows, length, kv_heads, v_head_dim), stored),
    }
    _hide_first_keys(draw, arrays, options, batch)
    if draw.chance(0.2):
        options["softcap"] = 30.0
    if draw.chance(0.3):
        options["num_splits"] = draw.one_of((1, 2, 7, 64))
    if draw.chance(0.3):
        options["return_lse"] = True
    for name in ("alibi_slopes", "sinks"):
        if draw.chance(0.2):
            arrays[name] = of((heads,), "float32")
    if draw.chance(0.2):
        arrays["q_offset"] = of((batch,), "int32")
    return RandomCall(fp.flash_decode, arrays, options, {}, ())


def _ragged(draw: Draw) -> RandomCall:
    """Draws a call of ragged_paged_attention; half of them write new tokens first."""
    kv_heads, group, seqs = (draw.one_of(v) for v in ((1, 2, 4, 8), GROUPS, (1, 2, 16, 64)))
    heads, tokens = kv_heads * group, draw.one_of((1, 5, 64, 300, 2048))
    head_dim = draw.one_of((16, 32, 64, 64, 80, 96, 128, 128, 128, 192, 256, 384, 512, 576))
    v_head_dim = head_dim if draw.chance(0.8) else draw.one_of((32, 64, 128, 256, 512))
    dtype = draw.one_of(("bfloat16", "bfloat16", "float16"))
    stored = draw.one_of((dtype, dtype, dtype, "int8", "float8_e4m3fn"))
    of, page_size, rows = jax.ShapeDtypeStruct, draw.one_of(PAGE_SIZES), draw.one_of((1, 64, 3000))
    options: dict[str, Any] = {"step_tokens": draw.one_of((1, 1, 2, 16))}
    arrays = {
        "q": of((tokens, heads, head_dim), dtype),
        "k": of((rows, page_size, kv_heads, head_dim), stored),
        "v": of((rows, page_size, kv_heads, v_head_dim), stored),
        "kv_lengths": of((seqs,), "int32"),
        "page_table": of((seqs, draw.one_of((1, 16, 100))), "int32"),
        "cu_q_lens": of((seqs + 1,), "int32"),
    }
    if draw.chance(0.5):
        arrays["num_seqs"] = of((), "int32")
    if stored != dtype and draw.chance(0.7):
        for name in ("k_scale", "v_scale"):
            arrays[name] = of(draw.one_of(((kv_heads,), (rows, kv_heads))), "float32")
    if draw.chance(0.5):
        new = dtype if "k_scale" in arrays else stored
        arrays["new_k"] = of((tokens, kv_heads, head_dim), new)
        arrays["new_v"] = of((tokens, kv_heads, v_head_dim), new)
    _hide_first_keys(draw, arrays, options, seqs)
    if draw.chance(0.2):
        options["softcap"] = 30.0
    for name in ("alibi_slopes", "sinks"):
        if draw.chance(0.2):
            arrays[name] = of((heads,), "float32")
    if not {"window", "kv_starts", "alibi_slopes"} & {*arrays, *options} and draw.chance(0.5):
        _share_prefix(draw, arrays, options, seqs)
    return RandomCall(fp.ragged_paged_attention, arrays, options, {}, ())
