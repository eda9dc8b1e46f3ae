"""Random calls of attention with values: the call, and what is right, from dense_reference.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flash_pallas as fp

from . import dense_reference, rounding_bounds
from .dense_reference import Dense
from .mods import MASK_MODS, SCORE_MODS, blockwise
from .random_calls import Draw
from .rounding_bounds import Unit

MOST_PAIRS = 1_000_000  # logits of a call: the reference takes a second or two
# Of many entries too: from 1,056 tiles of keys on a backward has a launch for rows of large logits.
BATCHES = ((), (1,), (2,), (3,), (2, 2), (1, 3), (3, 1), (400,), (4, 90))
BLOCKS = ((64, 64), (64, 128), (128, 64), (128, 128), (192, 64))
INTEGERS = ("int32", "int32", "uint32", "int16")
MODES = ("grad", "grad", "grad", "grad", "grad", "forward", "forward", "tangent", "hessian")
ANY_ORDER = ("tangent", "hessian")
FLOATS = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "captured")
# Hide keys like a number of a model's own would; the sum with a score is the number itself.
FAR = (-1e9, -1e10, -1e30, -3e38)


@dataclasses.dataclass
class Call:
    """One call of a public function with its arrays.

    Attributes:
        function: its name.
        text: all that was drawn, to read.
        x64: whether it runs with jax_enable_x64.
        arrays: what its program is given, numpy arrays by name.
        program: name of a backend -> function of `arrays` -> results by name.
        expected: whether kernels run it -> (exact, deviation) by name.
    """

    function: str
    text: str
    x64: bool
    arrays: dict[str, Any]
    program: Callable[[str], Callable]
    expected: Callable[[bool], dict[str, tuple[Any, Any]]]


def normal(draw: Draw, shape, dtype, size: float = 1.0):
    """Draws normal numbers, rounded to this dtype."""
    return (size * draw.rng.standard_normal(shape)).astype(jnp.dtype(dtype))


def exact(x):
    """Returns the numbers as float64, those of padding that are none as 0."""
    return None if x is None else np.nan_to_num(np.asarray(x).astype(np.float64), posinf=0.0)


def head_dim(draw: Draw, widest: int) -> int:
    """Draws a head dim: common ones, any multiple of 8 to 256, or a wide one."""
    kind = draw.rng.random()
    if kind < 0.35:
        return draw.one_of([n for n in (32, 64, 96, 128, 128, 256) if n <= widest])
    if kind < 0.92 or widest <= 256:
        return 8 * draw.between(1, min(widest, 256) // 8)
    return 16 * draw.between(17, widest // 16)


@dataclasses.dataclass
class _Attention:
    """A drawn call: arrays and static options by the names of arguments, and recipes."""

    function: str
    mode: str
    x64: bool
    batch: tuple[int, ...]
    sizes: tuple[int, int, int, int]  # T, S, N, K
    dtype: str
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    score_mod: str | None = None
    mask_mod: str | None = None
    blocks: tuple[str, tuple[int, int]] | None = None
    visible: Any = None  # what the block mask shows, [B or 1, N, K or 1, T, S]
    seed: Any = None  # (number, type)
    rounded: bool = False

    @property
    def float_side(self) -> str:
        return "float64" if self.x64 else "float32"

    @property
    def entries(self) -> int:
        return math.prod(self.batch)

    def ints(self, draw: Draw, x):
        """Returns integers in a dtype that holds them, int64 too under x64."""
        x = np.asarray(x)
        kind = draw.one_of(("int64", *INTEGERS) if self.x64 else INTEGERS)
        held = np.iinfo(kind)
        fits = x.size == 0 or (held.min <= x.min() and x.max() <= held.max)
        return x.astype(kind if fits else "int32")

    def flat(self, x, trailing: int):
        """Returns an array [*B or fewer, ...] with one axis of the batch in front."""
        x = np.asarray(x)
        shape = x.shape[x.ndim - trailing :] if trailing else ()
        if x.ndim == trailing or all(n == 1 for n in x.shape[: x.ndim - trailing]):
            return x.reshape(1, *shape)
        return np.broadcast_to(x, self.batch + shape).reshape(self.entries, *shape)

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(n for n in FLOATS if n in self.arrays)

    def text(self) -> str:
        shown = {n: f"{x.dtype}{list(x.shape)}" for n, x in self.arrays.items()}
        more = {"score_mod": self.score_mod, "mask_mod": self.mask_mod, "block_mask": self.blocks}
        more |= {"seed": self.seed, "rounded": self.rounded}
        more = {name: x for name, x in more.items() if x}
        return f"{self.function} {self.mode} {shown} {self.options | more}"


def attention(draw: Draw, backend: str, *, x64: bool) -> Call:
    """Draws a call of flash_attention and what goes by its side."""
    names = ("flash_attention", "flash_attention_with_lse", "flash_attention_with_max_logit")
    function = draw.one_of((*names, *names, "dot_product_attention"))
    a = _shapes(draw, backend, function, x64=x64)
    _hide(draw, a)
    _move(draw, a)
    if function == "dot_product_attention":
        a.mode = draw.one_of(("grad", "forward"))
    elif draw.chance(0.2):
        a.options["empty_rows"] = "mean"
    return _finished(draw, a)


def varlen(draw: Draw, backend: str, *, x64: bool) -> Call:
    """Draws a call of flash_attention_varlen."""
    a = _shapes(draw, backend, "flash_attention_varlen", x64=x64)
    q_len, kv_len, *_ = a.sizes
    same, documents = draw.chance(0.5), draw.between(1, 6)
    if same:
        kv_len = q_len
        a.sizes = (q_len, q_len, *a.sizes[2:])
        for name in "kv":
            width = a.arrays[name].shape[1:]
            a.arrays[name] = normal(draw, (q_len, *width), a.dtype)
    cuts = lambda n: np.concatenate([[0], np.sort(draw.rng.integers(0, n + 1, documents))])
    a.arrays["cu_seqlens_q"] = a.ints(draw, cuts(q_len))
    if not same:
        a.arrays["cu_seqlens_kv"] = a.ints(draw, cuts(kv_len))
        a.options["alignment"] = draw.one_of(("start", "end"))
    a.options["causal"] = draw.chance(0.6)
    if draw.chance(0.3):
        a.options["window"] = tuple(draw.one_of((None, 0, 40, 130)) for _ in range(2))
    if draw.chance(0.2):
        a.mask_mod = draw.one_of(sorted(MASK_MODS))
        a.arrays["prefix"] = draw.rng.integers(0, kv_len, 1, np.int32)
    if draw.chance(0.2):
        a.arrays["mask"] = draw.rng.random(_pattern(draw, a)) < 0.7
    _move(draw, a)
    return _finished(draw, a)


def _shapes(draw: Draw, backend: str, function: str, *, x64: bool) -> _Attention:
    batch = () if function == "flash_attention_varlen" else draw.one_of(BATCHES)
    kv_heads = draw.between(1, 3)
    heads = kv_heads * draw.between(1, 4)
    lengths = [draw.one_of((draw.between(1, 64), draw.between(1, 700))) for _ in range(2)]
    if draw.chance(0.3):
        lengths[1] = lengths[0]
    while math.prod(batch) * heads * lengths[0] * lengths[1] > MOST_PAIRS:
        lengths = [max(1, 2 * n // 3) for n in lengths]
    dtype = draw.one_of(("bfloat16", "bfloat16", "float16"))
    if backend != "portable" and draw.chance(0.2):
        dtype = "float32"
    widest = 128 if dtype == "float32" and backend == "hopper" else 512
    width = head_dim(draw, widest)
    of_v = width if draw.chance(0.75) else head_dim(draw, widest)
    mode = draw.one_of(MODES)
    q_len, kv_len = lengths
    a = _Attention(function, mode, x64, batch, (q_len, kv_len, heads, kv_heads), dtype)
    shapes = {"q": (q_len, heads, width), "k": (kv_len, kv_heads, width)}
    shapes |= {"v": (kv_len, kv_heads, of_v)}
    a.arrays = {name: normal(draw, batch + x, dtype) for name, x in shapes.items()}
    return a


def _pattern(draw: Draw, a: _Attention) -> tuple[int, ...]:
    q_len, kv_len, heads, _ = a.sizes
    return draw.shape(*a.batch, heads, q_len, kv_len)


def _hide(draw: Draw, a: _Attention) -> None:
    """Draws what hides keys."""
    q_len, kv_len, *_ = a.sizes
    rng, plain = draw.rng, a.function == "dot_product_attention"
    a.options["is_causal" if plain else "causal"] = draw.chance(0.5)
    if draw.chance(0.33):
        _window(draw, a)
    prefix = ("query_seq", "key_value_seq") if plain else ("q", "kv")
    for name, longest in zip(prefix, (q_len, kv_len), strict=True):
        if draw.chance(0.3) and (a.batch or not plain):
            shape = a.batch if plain or draw.chance(0.7) else ()
            a.arrays[f"{name}_lengths"] = a.ints(draw, rng.integers(0, longest + 1, shape))
    if draw.chance(0.33):
        a.arrays["mask"] = rng.random(_pattern(draw, a)) < 0.7
    if plain:
        return
    if draw.chance(0.3):
        _segments(draw, a)
    _places(draw, a)
    if draw.chance(0.25):
        a.mask_mod = draw.one_of(sorted(MASK_MODS))
        a.arrays["prefix"] = rng.integers(0, kv_len, a.entries, np.int32)
    if draw.chance(0.2):
        _block_mask(draw, a)


def _window(draw: Draw, a: _Attention) -> None:
    """Draws a window, known or an array of one number or one for each entry."""
    side = lambda: draw.one_of((None, 0, draw.between(0, 100)))
    sides = (side(), side())
    if a.function == "dot_product_attention":
        a.options["local_window_size"] = tuple(0 if x is None else x for x in sides)
    elif draw.chance(0.6):
        a.options["window"] = sides
    else:
        for name, x in zip(("window_left", "window_right"), sides, strict=True):
            shape = draw.one_of(((), a.batch))
            if x is not None:
                a.arrays[name] = a.ints(draw, draw.rng.integers(0, 100, shape))


def _segments(draw: Draw, a: _Attention) -> None:
    kind = draw.one_of(("packed", "unsorted", "padded"))
    for name, n in zip(("q_segment_ids", "kv_segment_ids"), a.sizes[:2], strict=False):
        ids = draw.rng.integers(0, 4, (*a.batch, n))
        ids = ids if kind == "unsorted" else np.sort(ids, axis=-1)
        if kind == "padded":
            ids = np.where(np.arange(n) >= n - draw.between(0, n // 2), -1, ids)
        if name == "kv_segment_ids" and a.sizes[0] == n:
            ids = a.arrays["q_segment_ids"]
        a.arrays[name] = a.ints(draw, ids)


def _places(draw: Draw, a: _Attention) -> None:
    """Draws an offset or positions."""
    q_len, kv_len, *_ = a.sizes
    rng = draw.rng
    kinds = {
        "gaps": lambda n: np.cumsum(rng.integers(0, 4, (*a.batch, n)), axis=-1),
        "random": lambda n: rng.integers(0, 2 * n, (*a.batch, n)),
        "restart": lambda n: np.broadcast_to(np.arange(n) % draw.between(1, n), (*a.batch, n)),
        "shifted": lambda n: np.arange(n) + rng.integers(-50, 50, (*a.batch, 1)),
    }
    make = lambda n: a.ints(draw, kinds[draw.one_of(sorted(kinds))](n))
    if draw.chance(0.25):
        a.arrays["q_positions"] = make(q_len)
    elif draw.chance(0.5):
        offset = rng.integers(-q_len, kv_len + 1, a.batch if draw.chance(0.5) else ())
        a.arrays["q_offset"] = a.ints(draw, offset)
    else:
        a.options["q_offset"] = draw.one_of((0, kv_len - q_len))
    if draw.chance(0.15):
        a.arrays["kv_positions"] = make(kv_len)


def _block_mask(draw: Draw, a: _Attention) -> None:
    """Draws a block mask; what it shows is [B or 1, N, K or 1, T, S]."""
    q_len, kv_len, heads, kv_heads = a.sizes
    at_zero = a.options.get("q_offset") == 0 and "kv_positions" not in a.arrays
    kind = draw.one_of(("dense", "indices", "mask_mod") if at_zero else ("dense", "indices"))
    block = draw.one_of(BLOCKS)
    leading = draw.one_of((1, a.entries)), draw.one_of((1, heads, kv_heads))
    a.blocks = kind, block
    if kind == "mask_mod":
        grids = np.meshgrid(*map(np.arange, (*leading, q_len, kv_len)), indexing="ij", sparse=True)
        a.visible = blockwise(*grids)
        return
    shape = [-(-n // size) for n, size in zip((q_len, kv_len), block, strict=True)]
    states = draw.rng.integers(0, 3, (*leading, *shape))
    states[..., 0, 0] = 1  # a list is never empty in all rows
    shown = lambda x: np.repeat(np.repeat(x, block[0], 2), block[1], 3)[..., :q_len, :kv_len]
    if kind == "dense":
        partly = draw.rng.random((*leading, q_len, kv_len)) < 0.6
        a.visible = (shown(states) == 2) | ((shown(states) == 1) & partly)
        a.arrays["visible"] = a.visible
        return
    a.visible = shown(states > 0)
    last = shape[1] - 1
    numbers = np.where(states[..., ::-1] > 0, last - np.arange(shape[1]), -1)
    a.arrays["kv_indices"] = numbers.astype(np.int64 if a.x64 else np.int32)


def _move(draw: Draw, a: _Attention) -> None:
    """Draws what changes logits and weights."""
    heads, plain = a.sizes[2], a.function == "dot_product_attention"
    if draw.chance(0.33):
        a.options["scale"] = draw.one_of((1.0, -0.3, 0.05))
    _bias(draw, a)
    if plain:
        return
    if draw.chance(0.25) and not a.rounded:
        a.options["softcap"] = draw.one_of((1.0, 5.0, 20.0))
    for name, size in (("alibi_slopes", 0.05), ("sinks", 2.0)):
        if draw.chance(0.25) and not a.rounded:
            lead = a.batch if draw.chance(0.4) else ()
            x = normal(draw, (*lead, heads), a.float_side, size)
            a.arrays[name] = np.abs(x) if name == "alibi_slopes" else x
    if draw.chance(0.25) and not a.rounded:
        a.score_mod = draw.one_of(sorted(SCORE_MODS))
        sizes = {"B": a.entries, "N": heads}
        shape = tuple(sizes[axis] for axis in SCORE_MODS[a.score_mod].captured)
        a.arrays["captured"] = normal(draw, shape, a.float_side, 0.5)
    if draw.chance(0.25):
        _dropout(draw, a)
    if a.mode == "grad" and draw.chance(0.25):
        a.options["deterministic"] = True
    if a.mode in ANY_ORDER:
        a.options["differentiable"] = "any"


def _bias(draw: Draw, a: _Attention) -> None:
    """Draws a bias: of any size, with -inf in it, or so large that it hides keys alone."""
    if draw.chance(0.35):
        dtype = draw.one_of((a.dtype, a.float_side))
        bias = normal(draw, _pattern(draw, a), dtype)
        if draw.chance(0.4):
            bias[draw.rng.random(bias.shape) < 0.2] = -np.inf
        a.arrays["bias"] = bias
    elif draw.chance(0.1) and a.mode not in ANY_ORDER and a.dtype != "float16":
        first = draw.rng.random((*[1] * (len(a.batch) + 2), a.sizes[1])) < 0.4
        a.arrays["bias"] = np.where(first, draw.one_of(FAR), 0.0).astype(np.float32)
        a.rounded = True


def _dropout(draw: Draw, a: _Attention) -> None:
    a.options |= {"dropout_rate": draw.one_of((0.1, 0.3, 0.5))}
    a.options |= {"broadcast_dropout": draw.chance(0.4)}
    kind = draw.one_of(("int", "numpy", "traced", "key"))
    a.seed = draw.between(0 if kind == "key" else -3, 2**31 - 1), kind
    if kind == "traced":
        a.arrays["dropout_seed"] = np.int32(a.seed[0])


def _finished(draw: Draw, a: _Attention) -> Call:
    """Draws cotangents and tangents, puts NaN into padding, and returns the call."""
    arrays, (q_len, kv_len, heads, _) = a.arrays, a.sizes
    padding = [_padding(a, axis) for axis in (0, 1)]
    padded = padding[0].reshape(*a.batch, q_len), padding[1].reshape(*a.batch, kv_len)
    arrays["do"] = normal(draw, (*a.batch, q_len, heads, arrays["v"].shape[-1]), a.dtype)
    dlse = normal(draw, (*a.batch, heads, q_len), "float32")
    arrays["dlse"] = np.where(padded[0][..., None, :], 0.0, dlse).astype(np.float32)
    mean = a.options.get("empty_rows") == "mean" or a.function == "dot_product_attention"
    if a.mode in ANY_ORDER:
        for name in a.wanted:
            x = arrays[name]
            arrays[f"to {name}"] = normal(draw, x.shape, x.dtype, 0.5)
    elif draw.chance(0.5):
        for name in ("q", "do"):
            arrays[name][padded[0]] = np.nan
        if not mean:
            arrays["k"][padded[1]], arrays["v"][padded[1]] = np.inf, np.nan
    text = a.text()
    problem = functools.partial(_problem, a, padding, mean=mean)
    return Call(
        a.function,
        text,
        a.x64,
        arrays,
        functools.partial(_program, a),
        functools.partial(_expected, a, problem),
    )


def _padding(a: _Attention, axis: int):
    """Returns bool [B, T] or [B, S]: beyond a length, with a negative id, in no document."""
    n, one = a.sizes[axis], ("q", "kv")[axis]
    found = np.zeros((a.entries, n), bool)
    for name in (f"{one}_lengths", f"{('query', 'key_value')[axis]}_seq_lengths"):
        if name in a.arrays:
            found |= np.arange(n) >= a.flat(a.arrays[name], 0).reshape(-1, 1)
    if f"{one}_segment_ids" in a.arrays:
        found |= a.flat(a.arrays[f"{one}_segment_ids"], 1) < 0
    if "cu_seqlens_q" in a.arrays:
        name = f"cu_seqlens_{one}"
        found |= np.arange(n) >= int(a.arrays.get(name, a.arrays["cu_seqlens_q"])[-1])
    return found


def _documents(a: _Attention):
    """Returns (ids, places in the document) of queries and of keys of packed arrays."""
    of_q = a.arrays["cu_seqlens_q"].astype(int)
    of_kv = a.arrays.get("cu_seqlens_kv", of_q).astype(int)
    found = []
    for cu, n in ((of_q, a.sizes[0]), (of_kv, a.sizes[1])):
        ids, place = np.full(n, -1), np.zeros(n, int)
        for d in range(len(cu) - 1):
            ids[cu[d] : cu[d + 1]] = d
            place[cu[d] : cu[d + 1]] = np.arange(cu[d + 1] - cu[d])
        found.append((ids, place))
    if a.options.get("alignment") == "end":
        shift = np.append(np.diff(of_kv) - np.diff(of_q), 0)  # padding, of id -1, stays
        ids, place = found[0]
        found[0] = ids, place + shift[ids]
    return found


def _seen(a: _Attention):
    """Returns what is visible, bool [B, N, T, S] with axes of 1, and positions of both sides."""
    q_len, kv_len, heads, kv_heads = a.sizes
    arrays, flat = a.arrays, a.flat
    seen = ~_padding(a, 0)[:, None, :, None] & ~_padding(a, 1)[:, None, None, :]
    offset = arrays.get("q_offset", a.options.get("q_offset", 0))
    i = flat(offset, 0).reshape(-1, 1).astype(np.int64) + np.arange(q_len)
    j = np.arange(kv_len)[None]
    ids = None
    if "cu_seqlens_q" in arrays:
        (q_ids, i), (kv_ids, j) = _documents(a)
        ids, i, j = (q_ids[None], kv_ids[None]), i[None], j[None]
    if "q_segment_ids" in arrays:
        ids = flat(arrays["q_segment_ids"], 1), flat(arrays["kv_segment_ids"], 1)
    if ids is not None:
        seen = seen & (ids[0].astype(int)[:, None, :, None] == ids[1].astype(int)[:, None, None])
    i = flat(arrays["q_positions"], 1).astype(np.int64) if "q_positions" in arrays else i
    j = flat(arrays["kv_positions"], 1).astype(np.int64) if "kv_positions" in arrays else j
    behind = i[:, None, :, None] - j[:, None, None, :]
    if a.options.get("causal") or a.options.get("is_causal"):
        seen = seen & (behind >= 0)
    left, right = a.options.get("window") or a.options.get("local_window_size") or (None, None)
    left, right = arrays.get("window_left", left), arrays.get("window_right", right)
    side = lambda x: flat(x, 0).reshape(-1, 1, 1, 1).astype(np.int64)
    seen = seen if left is None else seen & (behind <= side(left))
    seen = seen if right is None else seen & (-behind <= side(right))
    if "mask" in arrays:
        seen = seen & flat(arrays["mask"], 3)
    if a.mask_mod:
        b, n = np.arange(a.entries).reshape(-1, 1, 1, 1), np.arange(heads).reshape(1, -1, 1, 1)
        mod = MASK_MODS[a.mask_mod](arrays["prefix"])
        seen = seen & mod(b, n, i[:, None, :, None], j[:, None, None, :])
    if a.visible is not None:
        shown = a.visible
        if shown.shape[1] == kv_heads:
            shown = np.repeat(shown, heads // kv_heads, axis=1)
        seen = seen & shown
    return seen, i, j


def _problem(a: _Attention, padding, *, mean: bool) -> Dense:
    """Returns the call as the reference takes it."""
    q_len, kv_len, heads, _ = a.sizes
    arrays = a.arrays
    seen, i, j = _seen(a)
    side = lambda name, n: a.flat(exact_side(arrays[name]), n) if name in arrays else None
    d = Dense(
        *(exact(a.flat(arrays[name], 3)) for name in "qkv"),
        seen=seen,
        scale=a.options.get("scale", arrays["q"].shape[-1] ** -0.5),
        i=i,
        j=j,
        bias=side("bias", 3),
        slopes=side("alibi_slopes", 1),
        sinks=side("sinks", 1),
        softcap=a.options.get("softcap"),
        mod=a.score_mod,
        captured=exact_side(arrays["captured"]) if a.score_mod else None,
        padding=padding[0],
        mean=mean,
        rounded=a.rounded or a.score_mod == "hiding",
    )
    if a.score_mod == "hiding":
        d.rounded = False
    if "dropout_rate" in a.options:
        rate, shared = a.options["dropout_rate"], a.options["broadcast_dropout"]
        leading = (1, 1) if shared else (a.entries, heads)
        first = a.flat(arrays.get("q_offset", a.options.get("q_offset", 0)), 0)
        d.kept = dense_reference.kept(_words(a.seed), (*leading, q_len, kv_len), first, rate)
        d.gain = 2**15 / (2**15 - dense_reference.dropped_levels(rate))
    return d


def exact_side(x):
    """Returns float64 of an array in which -inf means something; as float32 has it."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float32).astype(np.float64)


def _words(seed) -> tuple[int, ...]:
    number, kind = seed
    if kind == "key":  # of threefry: the high half, and the low one
        return number >> 32, number & 0xFFFFFFFF
    return number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF


def _program(a: _Attention, backend: str) -> Callable:
    """Returns arrays -> results by name."""
    function = getattr(fp, a.function)

    def outputs(wanted, others):
        given = dict(others | wanted)
        q, k, v = (given.pop(name) for name in "qkv")
        options = a.options | _made(a, given, q, k)
        name = "implementation" if a.function == "dot_product_attention" else "backend"
        if a.function == "flash_attention_varlen":
            options["return_lse"] = True
        found = function(q, k, v, **options, **given, **{name: backend})
        return found if isinstance(found, tuple) else (found,)

    def program(arrays):
        do, dlse = arrays["do"], arrays["dlse"]
        wanted = {name: arrays[name] for name in a.wanted}
        others = {n: x for n, x in arrays.items() if n not in (*wanted, "do", "dlse")}
        moved = {n: others.pop(f"to {n}") for n in wanted if f"to {n}" in others}
        main = lambda wanted: outputs(wanted, others)[:2]

        def gradients(wanted):
            out, pull = jax.vjp(main, wanted)
            pairs = zip((do, dlse), out, strict=False)
            found = pull(tuple(x.astype(y.dtype) for x, y in pairs))[0]
            return {f"d{name}": x for name, x in found.items()}

        if a.mode == "tangent":
            out, tangents = jax.jvp(main, (wanted,), (moved,))
            return _named(out) | dict(zip(("to", "tlse"), tangents, strict=False))
        if a.mode == "hessian":
            found, change = jax.jvp(gradients, (wanted,), (moved,))
            return found | {f"h{name[1:]}": x for name, x in change.items()}
        found = _named(outputs(wanted, others))
        return found | gradients(wanted) if a.mode == "grad" else found

    return program


def _named(out) -> dict[str, Any]:
    return dict(zip(("o", "lse", "max_logit"), out, strict=False))


def _made(a: _Attention, given: dict[str, Any], q, k) -> dict[str, Any]:
    """Takes from `given` what is no argument; returns the arguments made from it."""
    made: dict[str, Any] = {}
    sides = [given.pop(f"window_{name}", None) for name in ("left", "right")]
    if any(x is not None for x in sides):
        made["window"] = tuple(sides)
    captured, prefix = given.pop("captured", None), given.pop("prefix", None)
    if a.score_mod:
        made["score_mod"] = SCORE_MODS[a.score_mod].make(captured)
    if a.mask_mod:
        made["mask_mod"] = MASK_MODS[a.mask_mod](prefix)
    if a.seed and a.seed[1] != "traced":
        number, kind = a.seed
        makes = {"int": int, "numpy": np.int64, "key": jax.random.key}
        made["dropout_seed"] = makes[kind](number)
    if a.blocks:
        kind, block = a.blocks
        sizes = {"q_len": a.sizes[0], "kv_len": a.sizes[1], "block": block}
        make = fp.BlockMask
        if kind == "mask_mod":
            made["block_mask"] = make.from_mask_mod(blockwise, *a.visible.shape[:2], **sizes)
        elif kind == "dense":
            made["block_mask"] = make.from_dense(given.pop("visible"), block=block)
        else:
            made["block_mask"] = make.from_indices(given.pop("kv_indices"), **sizes)
    return made


def _expected(a: _Attention, problem, kernels: bool) -> dict[str, tuple[Any, Any]]:
    """Returns (exact, deviation) of each result, in the caller's shapes."""
    d, unit, arrays = problem(), Unit.of(a.dtype, kernels), a.arrays
    f = dense_reference.forward(d)
    bounds = rounding_bounds.of_forward(d, f, unit)
    values = {"o": f.o.swapaxes(1, 2), "lse": f.lse, "max_logit": f.most}
    if d.sinks is not None:  # what LSE padding has is not said
        bounds["lse"] = np.where(d.padding[:, None], np.inf, bounds["lse"])
    has_lse = a.function not in ("flash_attention", "dot_product_attention")
    names = ["o"] + ["lse"] * has_lse + ["max_logit"] * a.function.endswith("max_logit")
    if a.mode == "hessian":
        names = []
    if a.mode == "tangent":
        names = names[:2]
    found = {name: (values[name], bounds[name]) for name in names}
    do, dlse = exact(a.flat(arrays["do"], 3)), exact(a.flat(arrays["dlse"], 2))
    dlse = dlse if has_lse else 0.0 * dlse
    if a.mode in ("grad", "hessian"):
        b = dense_reference.backward(d, f, do, dlse)
        limits = rounding_bounds.of_backward(d, f, b, do, unit)
        found |= {name: (x, limits[name]) for name, x in b.gradients.items()}
    if a.mode in ANY_ORDER:
        there = dense_reference.moved(d, _tangents(a))
        f = dense_reference.forward(there)
    if a.mode == "tangent":
        more = dense_reference.tangent(f)
        limits = rounding_bounds.of_tangent(there, f, unit)
        limits["tlse"] = np.where(np.isinf(bounds["lse"]), np.inf, limits["tlse"])
        found |= {name: (more[name], limits[name]) for name in ("to", "tlse")[: 1 + has_lse]}
    elif a.mode == "hessian":
        b = dense_reference.backward(there, f, do, dlse)
        limits = rounding_bounds.of_hessian(there, f, b, do, unit)
        more = dense_reference.hessian_vector(b)
        found |= {name: (x, limits[name]) for name, x in more.items()}
    return {name: _as_given(a, name, *x) for name, x in found.items()}


def _tangents(a: _Attention) -> dict[str, Any]:
    fields = {"alibi_slopes": "slopes"}
    ranks = {"bias": 3, "alibi_slopes": 1, "sinks": 1}
    found = {}
    for name in a.wanted:
        x = np.nan_to_num(exact_side(a.arrays[f"to {name}"]))
        x = x if name == "captured" else a.flat(x, ranks.get(name, 3))
        found[fields.get(name, name)] = x
    return found


def _as_given(a: _Attention, name: str, value, deviation) -> tuple[Any, Any]:
    """Returns both in the shape of the array that the result is of."""
    base = {"to": "do", "tlse": "dlse", "o": "do", "lse": "dlse", "max_logit": "dlse"}.get(name)
    shape = a.arrays[base or name[1:]].shape
    deviation = np.broadcast_to(deviation, value.shape)
    if value.shape != shape and value.size > math.prod(shape):
        rank = len(shape) - (value.ndim - 1)  # axes of the batch that this array has
        full = a.batch + value.shape[1:]
        whole = (1,) * (len(a.batch) - rank) + shape
        axes = tuple(n for n, (x, y) in enumerate(zip(full, whole, strict=True)) if y < x)
        value = value.reshape(full).sum(axes)
        deviation = np.sqrt(np.square(deviation).reshape(full).sum(axes))
    return value.reshape(shape), deviation.reshape(shape)
