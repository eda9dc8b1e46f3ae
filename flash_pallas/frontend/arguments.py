"""The optional arguments of `flash_attention`, checked and in the form that a backend reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import dropout, mesh_axes, width
from ..core.block_mask import BlockMask
from ..core.mask import Mask

# Positions are int32 inside the kernels, and sums of an offset and a length must not wrap.
MAX_OFFSET = 2**30
# Stands for a sink of +inf, which takes all of the weight: finite in base 2 and divided by a scale.
LARGEST_SINK = 1e30
WINDOWS = (
    "it must be an int, (left, right) or None, how many keys are visible on either side of a "
    "query; a side is an int, an integer array (one number, or one per batch entry), or None for "
    "unbounded, as in (128, 0)"
)
EMPTY_ROWS = ("zero", "mean")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The optional arguments of `flash_attention`, with their defaults.

    All but q, k, v, `backend` and `blocks`. Only `flash_attention_with_max_logit` sets max_logit,
    and only `flash_attention_varlen` within: the positions, (first, last) int32[B, T] each, of the
    keys of a query's document.
    """

    causal: bool = False
    window: Any = None
    scale: Any = None
    q_offset: Any = None
    q_positions: Any = None
    kv_positions: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    bias: Any = None
    mask: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_rate: Any = 0.0
    dropout_seed: Any = None
    broadcast_dropout: bool = False
    shard_axes: Any = None
    score_mod: Any = None
    mask_mod: Any = None
    block_mask: Any = None
    empty_rows: str = "zero"
    deterministic: bool = False
    precision: Any = None
    differentiable: Any = "reverse"
    max_logit: bool = False
    within: Any = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one call: the user's batch dimensions, lengths and heads."""

    batch_shape: tuple[int, ...]
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    dtype: np.dtype
    first: tuple[Any, Any] = (0, 0)  # numbers of entry 0 and head 0 in the whole arrays

    @property
    def batch(self) -> int:
        """Number of entries of all batch dimensions together."""
        return math.prod(self.batch_shape)

    @property
    def score_dtype(self):
        """Dtype of scores, sums and everything per row."""
        return jnp.float64 if self.dtype == jnp.float64 else jnp.float32


def flag(name: str, value) -> bool:
    """Checks that `value` is a static bool and returns it as a Python bool."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{name} is an array, but it must be static, a Python bool: under jax.jit list it in "
            "static_argnames"
        )
    raise TypeError(f"{name} must be a bool, got {value!r} of type {type(value).__name__}")


def band(causal, window) -> tuple[Any, Any]:
    """Returns (left, right), how many keys are visible on either side: ints, arrays or None."""
    left, right = _window(window)
    return left, 0 if flag("causal", causal) else right


def static_band(causal, window) -> Mask:
    """Returns `causal` and `window` as one mask of ints.

    Raises:
        TypeError: a side of the window is an array.
    """
    sides = band(causal, window)
    if any(map(is_array, sides)):
        raise TypeError(
            "window is an array, but here it must be static, a Python int: under jax.jit list it "
            "in static_argnames"
        )
    return Mask(*sides)


def window_is_data(window) -> bool:
    """Returns whether a side of a window is an array."""
    return any(map(is_array, _window(window)))


def _window(window) -> tuple[Any, Any]:
    if window is None:
        return None, None
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window is {window!r}: {WINDOWS}")
    return _side(window, sides[0]), _side(window, sides[1])


def _side(window, side) -> Any:
    """Checks one side of a window; returns an int, an array as it is, or None."""
    if side is None or isinstance(side, jax.Array) or np.ndim(side):
        return side
    try:
        size = operator.index(side)
    except TypeError:
        size = None
    if size is None or isinstance(side, (bool, np.bool_)):
        raise TypeError(f"window is {window!r}: {WINDOWS}")
    if size < 0:
        raise ValueError(
            f"window is {window!r}: its entries must be at least 0; use None for unbounded, as in "
            "(None, 0)"
        )
    return min(size, MAX_OFFSET)


def offset(q_offset, sizes: Sizes, causal: bool = False):
    """Returns (int, None) for an offset known now, (0, int32[B]) for an array.

    Positions beyond 2**30 would wrap: such an int, or one in a numpy array, is refused; in a jax
    array it is clipped, which hides and shows the same keys.
    """
    if q_offset is None:
        if causal and sizes.q_len == 1 < sizes.kv_len:
            # A decoding step written for another alignment of causal masks.
            raise ValueError(
                f"q has one query, k {sizes.kv_len} keys, and causal=True (or window=(.., 0)) "
                "without q_offset puts the query at position 0, where it sees key 0 alone: pass "
                f"q_offset={sizes.kv_len - 1} if it is the last token, or q_offset=0 if it is "
                "meant to be the first; for a cache call flash_decode, or a layer with cache="
            )
        return 0, None
    if isinstance(q_offset, (jax.Array, np.ndarray)):
        if isinstance(q_offset, np.ndarray) and np.issubdtype(q_offset.dtype, np.integer):
            for extreme in (q_offset.min(initial=0), q_offset.max(initial=0)):
                _check_offset(int(extreme))
        traced = _per_entry("q_offset", q_offset, sizes)
        return 0, jax.lax.clamp(jnp.int32(-MAX_OFFSET), traced, jnp.int32(MAX_OFFSET))
    try:
        static = operator.index(q_offset)
    except TypeError:
        static = None
    if static is None or isinstance(q_offset, (bool, np.bool_)):
        expected = f"an int, or an integer array of shape {sizes.batch_shape} or ()"
        raise TypeError(_no_array("q_offset", expected, q_offset))
    _check_offset(static)
    return static, None


def _check_offset(q_offset: int):
    if abs(q_offset) > MAX_OFFSET:
        raise ValueError(f"q_offset is {q_offset}: its magnitude must be at most 2**30")


def is_unplaced(a: Arguments) -> bool:
    """Returns whether a call is causal and has no argument that places its queries."""
    names = ("q_offset", "q_positions", "kv_positions", "q_lengths", "kv_lengths", "q_segment_ids")
    right = band(a.causal, a.window)[1]
    is_causal = isinstance(right, int) and right == 0
    return is_causal and all(getattr(a, name) is None for name in names)


def positions(name: str, value, length: int, sizes: Sizes):
    """Returns int32[B, length] clipped to 2**30 either way, or None."""
    if value is None:
        return None
    unclipped = _ids(name, value, length, sizes)
    return lax.clamp(jnp.int32(-MAX_OFFSET), unclipped, jnp.int32(MAX_OFFSET))


def check_positions(a: Arguments) -> None:
    """Raises ValueError where the positions of queries are given twice."""
    if a.q_positions is not None and a.q_offset is not None:
        raise ValueError(
            f"q_offset is {a.q_offset!r} and q_positions is given too: each says where the queries "
            "are; add the offset to q_positions and leave q_offset out"
        )


def visible_keys(sides, of_queries, has_positions: bool, within, sizes: Sizes):
    """Returns (static Mask, q_first, q_last): the keys that each query sees, by their positions.

    Args:
        sides: result of `band`.
        of_queries: function that returns the positions of queries, int32[B, T].
        has_positions: whether arrays give any position.
        within: (first, last), int32[B, T] or None each, beyond which no key is visible; or None.
        sizes: sizes of the call.

    Returns:
        The mask as it is and `within` where the mask is static and indices are positions. Otherwise
        no mask, and int32[B, T] for each side that is bounded.
    """
    within = within or (None, None)
    if not has_positions and not any(map(is_array, sides)):
        return Mask(*sides), *within
    left, right = (_distance(sizes, side) for side in sides)
    first = None if left is None else of_queries() - left
    last = None if right is None else of_queries() + right
    return Mask(), _inner(jnp.maximum, first, within[0]), _inner(jnp.minimum, last, within[1])


def _inner(choose, *bounds):
    """Returns the tighter of two bounds, each of which may be None."""
    known_bounds = [bound for bound in bounds if bound is not None]
    return functools.reduce(choose, known_bounds) if known_bounds else None


def without_padding(first, last, q_lengths):
    """Returns (q_first, q_last) with an empty interval for queries beyond their length.

    So their output is 0 as a kernel writes it, and no pass over it is needed.
    """
    if q_lengths is None:
        return first, last
    within = lambda x: jnp.arange(x.shape[1], dtype=jnp.int32)[None] < q_lengths[:, None]
    beyond = jnp.iinfo(jnp.int32).max // 2  # kernels subtract the index of a key from it
    if last is not None:
        return first, jnp.where(within(last), last, -beyond)
    return None if first is None else jnp.where(within(first), first, beyond), None


def _distance(sizes: Sizes, side):
    """Returns one side of a window as int32[B, 1], at least 0, or None."""
    if side is None:
        return None
    return window_side(side, sizes)[:, None]


def window_side(side, sizes: Sizes):
    """Returns one side of a window, an int or an array, as int32[B], at least 0."""
    entries = _per_entry("window", jnp.asarray(side) if not is_array(side) else side, sizes)
    if is_known(side) and np.min(known(side), initial=0) < 0:
        raise ValueError(
            f"window is {side!r}: its entries must be at least 0; use None for unbounded, as in "
            "(None, 0), or more than the length of the keys"
        )
    # One less than the largest, so that sums with a position do not wrap.
    return jnp.clip(entries, 0, MAX_OFFSET - 1)


def empty_rows(value) -> str:
    """Checks what rows that see no key return."""
    if value not in EMPTY_ROWS:
        raise ValueError(
            f"empty_rows is {value!r}: choose 'zero', or 'mean' for the mean of all values, which "
            "jax.nn and keras return"
        )
    return value


def lengths(name: str, value, room: int | None, sizes: Sizes, clips: bool = True):
    """Returns int32[B], or None; with `clips`, clipped to [0, room].

    `room` is None where the caller checks the values.

    Raises:
        TypeError: no integers.
        ValueError: a wrong shape, or a computed value that is not in [0, room].
    """
    if value is None:
        return None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int32 array {sizes.batch_shape}, got {value!r}")
    entries = as_int32(name, value) if isinstance(value, int) else value
    entries = _per_entry(name, entries, sizes)
    if room is None:
        return entries
    check_room(name, value, room)
    return jnp.clip(entries, 0, room) if clips else entries


def check_room(name: str, value, room: int, rule: str = "the places that there are") -> None:
    """Checks lengths, starts or counts whose values are computed; waits for no others.

    Args:
        name: name of the argument, for the message.
        value: an int or integers of any shape.
        room: the most that one may be.
        rule: what `room` is, for the message.

    Raises:
        ValueError: one is negative, or more than `room`.
    """
    if not is_computed(value):
        return
    entries = known(value)
    bad = (entries < 0) | (entries > room)
    if bad.any():
        index = tuple(np.argwhere(bad)[0].tolist())
        subscript = f"[{', '.join(map(str, index))}]" if index else ""
        raise ValueError(
            f"{name}{subscript} is {entries[index]}: it must be 0 to {room}, {rule}; where more "
            f"than all of them, or fewer than none, are meant, pass jnp.clip({name}, 0, {room})"
        )


def _per_entry(name: str, value, sizes: Sizes):
    """Returns int32[B] from one integer per batch entry, or from one for all."""
    value = _integers(name, value, sizes.batch_shape)
    if value.shape not in ((), sizes.batch_shape):
        raise ValueError(
            f"{name} has shape {value.shape}: it must be one per batch entry, {sizes.batch_shape}, "
            "or a scalar for all"
        )
    return mesh_axes.folded(jnp.broadcast_to(value, sizes.batch_shape), 0)


def segments(q_ids, kv_ids, sizes: Sizes):
    """Returns (int32[B, T], int32[B, S]) with -1 and -2 for padding, or (None, None)."""
    if (q_ids is None) != (kv_ids is None):
        missing = "q_segment_ids" if q_ids is None else "kv_segment_ids"
        raise ValueError(
            f"{missing} is None: q_segment_ids and kv_segment_ids must be given together; in "
            "self-attention they are the same array"
        )
    if q_ids is None:
        return None, None
    q = _ids("q_segment_ids", q_ids, sizes.q_len, sizes)
    kv = _ids("kv_segment_ids", kv_ids, sizes.kv_len, sizes)
    return jnp.where(q < 0, -1, q), jnp.where(kv < 0, -2, kv)


def _ids(name: str, ids, length: int, sizes: Sizes):
    shape = (*sizes.batch_shape, length)
    ids = _integers(name, ids, shape)
    if ids.shape != shape:
        raise ValueError(f"{name} has shape {ids.shape}: it must be [*batch, length], {shape}")
    return mesh_axes.folded(ids, 1)


def bias(value, sizes: Sizes):
    """Checks a bias; returns [Bb, N or 1, T or 1, S or 1] of a float dtype, or None.

    It is float64 next to such a q alone.
    """
    if value is None:
        return None
    value = _array("bias", value, "that broadcasts to [*batch, heads, q_length, kv_length]")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"bias has dtype {value.dtype}: it must be a float; use mask for booleans")
    value = value if sizes.dtype == jnp.float64 else width.narrowed(value)
    return _pairwise("bias", value, sizes)


def mask(value, sizes: Sizes, block_mask: BlockMask | None = None):
    """Checks a mask; returns bool [Bb, N or 1, T or 1, S or 1], or None.

    That of a block mask is joined to it.
    """
    of_blocks = None
    if block_mask is not None and block_mask.mask is not None:
        of_blocks = per_query_head(block_mask.mask, sizes)
    if value is None:
        return of_blocks
    value = _array("mask", value, "that broadcasts to [*batch, heads, q_length, kv_length]")
    if value.dtype != jnp.bool_:
        raise TypeError(
            f"mask has dtype {value.dtype}: it must be bool (True is visible); cast a mask of 0 "
            "and 1 with mask.astype(bool), and pass what is added to the scores as bias"
        )
    value = _pairwise("mask", value, sizes)
    if of_blocks is None:
        return value
    if value.shape[0] != of_blocks.shape[0]:
        value, of_blocks = (
            mesh_axes.repeated(x, sizes.batch // len(x), axis=0) for x in (value, of_blocks)
        )
    return value & of_blocks


def _pairwise(name: str, x, sizes: Sizes):
    """Folds the batch dimensions of x [*B, N, T, S], whose axes are each full or 1."""
    full = (*sizes.batch_shape, sizes.q_heads, sizes.q_len, sizes.kv_len)
    fits = x.ndim == len(full) and all(a in (1, b) for a, b in zip(x.shape, full, strict=True))
    if not fits:
        hint = missing_axes(name, x.shape, full)
        if x.ndim == len(full) and x.shape[-3] == sizes.kv_heads != sizes.q_heads:
            hint = f"; heads are those of q: repeat each {sizes.q_heads // sizes.kv_heads} times"
        raise ValueError(
            f"{name} has shape {x.shape}: it must be [*batch, heads, q_length, kv_length], each as "
            f"in {full} or 1{hint}"
        )
    batch = x.shape[:-3]
    # Entry b of the batch reads entry b // (B // Bb), so what is shared must come last.
    split = next((i for i, n in enumerate(batch) if n != sizes.batch_shape[i]), len(batch))
    if any(n > 1 for n in batch[split:]):
        x = jnp.broadcast_to(x, (*sizes.batch_shape, *x.shape[-3:]))
    return mesh_axes.folded(x, 3)


def check_broadcasts(name: str, x, full: tuple[int, ...]) -> None:
    """Raises ValueError unless x, also of fewer axes, broadcasts to scores of this shape."""
    room = full[len(full) - x.ndim :]
    if x.ndim > len(full) or any(a not in (1, b) for a, b in zip(x.shape, room, strict=True)):
        raise ValueError(
            f"{name} has shape {x.shape}: it must broadcast to [*batch, heads, q_length, "
            f"kv_length], {full}{missing_axes(name, x.shape, full)}"
        )


def missing_axes(name: str, shape, full) -> str:
    """Returns the ways in which axes of 1 make a mask or bias fit, as the end of a message.

    Args:
        name: name of the argument.
        shape: shape of the array that does not fit; a layer has put axes of 1 in front.
        full: [*batch, heads, q_length, kv_length].
    """
    few = tuple(shape)
    if len(few) == len(full):
        few = few[next((i for i, n in enumerate(few) if n > 1), len(few)) :]
    labels = (*["batch"] * (len(full) - 3), "heads", "q_length", "kv_length")
    ways = []
    for before in itertools.combinations(range(len(full) - 1), max(len(few) - 1, 0)):
        places = (*before, len(full) - 1)  # a mask has an axis of keys
        fits = len(few) == len(places) < len(full) and all(
            n in (1, full[i]) for n, i in zip(few, places, strict=True)
        )
        if fits:
            index = ", ".join(":" if i in places else "None" for i in range(len(full)))
            ways.append(f"{name}[{index}] if it is [{', '.join(labels[i] for i in places)}]")
    return f"; add axes, as in {' or '.join(ways[:3])}" if ways else ""


def slopes(value, sizes: Sizes):
    """Returns ALiBi slopes, [B, N] in the dtype of scores, or None."""
    return None if value is None else _per_head("alibi_slopes", value, sizes)


def sinks(value, sizes: Sizes):
    """Returns sink logits, [B, N] in the dtype of scores, or None."""
    if value is None:
        return None
    # In the sums an infinite logit would be subtracted from itself.
    return jnp.minimum(_per_head("sinks", value, sizes), LARGEST_SINK)


def _per_head(name: str, value, sizes: Sizes):
    shapes = (sizes.q_heads,), (*sizes.batch_shape, sizes.q_heads)
    value = _array(name, value, shapes[0])
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {value.dtype}: it must be a float; cast with "
            f"{name}.astype(jnp.float32)"
        )
    if value.shape not in shapes:
        raise ValueError(
            f"{name} has shape {value.shape}: it must be one per query head, {shapes[0]}, or one "
            f"per batch entry and head, {shapes[1]}"
        )
    return mesh_axes.folded(jnp.broadcast_to(value.astype(sizes.score_dtype), shapes[1]), 1)


def dropout_rate(value) -> float:
    """Checks the share of weights that is dropped; returns it as a float."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError("dropout_rate is traced, but it must be static: list it in static_argnames")
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"dropout_rate must be a Python number, got {value!r}")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"dropout_rate is {value}: it must be in [0, 1)")
    return float(value)


def dropout_keys(rate: float, seed, broadcast, sizes: Sizes):
    """Returns uint32[B, N], the dropout key of each batch entry and head; None without dropout."""
    shared = flag("broadcast_dropout", broadcast)
    if rate == 0.0:
        return None
    if seed is None:
        raise ValueError(
            f"dropout_rate is {rate} and dropout_seed is None: pass a key, as in "
            "dropout_seed=jax.random.key(0), a new one for every call. Where Flax has "
            "deterministic=True, pass dropout_rate=0.0: here it is about gradients"
        )
    batch, heads = (1, 1) if shared else (sizes.batch, sizes.q_heads)
    first = (0, 0) if shared else sizes.first
    keys = dropout.call_keys(seed_words(seed), batch, heads, first)
    return jnp.broadcast_to(keys, (sizes.batch, sizes.q_heads))


def per_query_head(x, sizes: Sizes):
    """Repeats x [B or 1, heads, ...] for the query heads of a group, where it has one per KV head.

    One head is for all.
    """
    if x.shape[1] in (1, sizes.q_heads):
        return x
    return mesh_axes.repeated(x, sizes.q_heads // sizes.kv_heads, axis=1)


def _no_array(name: str, expected: str, x) -> str:
    """Returns the message for what is no array, with the way out for a list or a number."""
    way_out = ""
    if isinstance(x, (list, tuple)):
        way_out = f"; pass jnp.array({x if len(str(x)) < 60 else '...'})"
    return f"{name} must be {expected}, got {type(x).__name__}: {reprlib.repr(x)}{way_out}"


def _array(name: str, x, shape):
    if not is_array(x):
        raise TypeError(_no_array(name, f"an array {shape}", x))
    return jnp.asarray(x)


def _integers(name: str, x, shape):
    """Converts an array of any integer dtype to int32."""
    if not is_array(x):
        raise TypeError(_no_array(name, f"an array {shape}", x))
    return as_int32(name, x)


# --- Static numbers among the arguments of `flash_attention`, checked -----------------------------

# Beyond these, scale / softcap and what is computed with it leave the range of float32.
MAX_SCALE, SOFTCAPS = 1e30, (1e-6, 1e30)


def valid_scale(value, head_dim: int) -> float:
    """Checks the factor of the scores; None becomes 1 / sqrt(head_dim)."""
    if value is None:
        return 1.0 / math.sqrt(head_dim)
    factor = _number("scale", value)
    if abs(factor) > MAX_SCALE:
        raise ValueError(f"scale is {value}: its magnitude must be at most {MAX_SCALE}")
    return factor


def valid_softcap(value) -> float | None:
    """Checks the bound of the logits; None is no bound."""
    if value is None:
        return None
    cap = _number("softcap", value)
    if cap <= 0.0:
        raise ValueError(f"softcap must be finite and positive, got {value}; None is no cap")
    if not SOFTCAPS[0] <= cap <= SOFTCAPS[1]:
        raise ValueError(
            f"softcap is {value}: it must be in [{SOFTCAPS[0]}, {SOFTCAPS[1]}], because float32 "
            "loses scores divided by one that is larger; None is no cap"
        )
    return cap


def _number(name: str, value) -> float:
    if isinstance(value, jax.core.Tracer):
        way_out = "multiply q by it instead and pass scale=1.0, or " if name == "scale" else ""
        raise TypeError(
            f"{name} is traced, but it must be static: {way_out}list it in static_argnames"
        )
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    if not is_number or isinstance(value, bool) or np.ndim(value) or not np.isrealobj(value):
        raise TypeError(f"{name} must be a Python number or None, got {value!r}")
    if not math.isfinite(value):
        default = "None is 1 / sqrt(head_dim)" if name == "scale" else "None is no cap"
        raise ValueError(f"{name} must be finite, got {value}; {default}")
    return float(value)


INT32 = jnp.iinfo(jnp.int32)


def as_int32(name: str, value) -> jax.Array:
    """Converts an integer, or an array of any integer dtype, to an int32 array.

    Values out of range raise where they are known; where they are traced they are clipped, so that
    a length or an offset keeps its meaning.

    Args:
        name: name of the argument, for messages.
        value: an int, or a numpy or jax array.

    Raises:
        TypeError: neither an int nor an array of integers.
        ValueError: a known value that does not fit int32.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        _refuse_wide(f"{name} is", value)
        return jnp.asarray(value, jnp.int32)
    if not is_array(value) or isinstance(value, (bool, np.bool_)):
        raise TypeError(_no_array(name, "an integer or an array of integers", value))
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{name} has dtype {value.dtype}: it must be int32; cast with {name}.astype(jnp.int32)"
        )
    limits = jnp.iinfo(value.dtype)
    if INT32.min <= limits.min and limits.max <= INT32.max:
        return jnp.asarray(value).astype(jnp.int32)
    if is_known(value):
        host = known(value)
        if host.size:
            _refuse_wide(f"{name} contains", int(host.min()))
            _refuse_wide(f"{name} contains", int(host.max()))
        return jnp.asarray(host.astype(np.int32))
    value = jnp.asarray(value)
    low, high = (np.asarray(x, value.dtype) for x in (max(limits.min, INT32.min), INT32.max))
    return lax.clamp(low, value, high).astype(jnp.int32)


def is_array(value) -> bool:
    """Returns True for an array, or for what has `__jax_array__`, as parameters of Flax do."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic)) or hasattr(value, "__jax_array__")


def is_known(value) -> bool:
    """Returns True if an array's values can be read: not traced, and all in this process."""
    if isinstance(value, jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def is_computed(value) -> bool:
    """Returns True if an array `is_known` and reading it does not wait for the device."""
    return is_known(value) and (not isinstance(value, jax.Array) or value.is_ready())


def known(value) -> np.ndarray:
    """Returns the values of an array for which `is_known`; waits for a jax array to be computed."""
    return np.asarray(jax.device_get(value))


def _refuse_wide(subject: str, value: int):
    if not INT32.min <= value <= INT32.max:
        raise ValueError(
            f"{subject} {value}: integers must fit int32, from -2**31 to 2**31 - 1; number segment "
            "ids from 0, and clip lengths and positions to the arrays"
        )


def seed_words(seed) -> jax.Array:
    """Returns the uint32[words] of `dropout_seed`: the same for equal numbers of any type.

    Raises:
        TypeError: neither an integer, nor integers, nor a key.
        ValueError: an int of more than 64 bits, or no number at all.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer, np.ndarray, jax.Array)):
        raise TypeError(f"dropout_seed must be an int, an integer array or a key, got {seed!r}")
    if isinstance(seed, (jax.Array, np.ndarray)):
        is_key = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        if not (is_key or jnp.issubdtype(seed.dtype, jnp.integer)):
            raise TypeError(
                f"dropout_seed has dtype {seed.dtype}: it must be an integer or a key of jax.random"
            )
        if not seed.size:
            raise ValueError(
                f"dropout_seed has shape {seed.shape} and no number in it: pass an int or a key"
            )
    elif not -(2**63) <= operator.index(seed) < 2**64:
        raise ValueError(f"dropout_seed is {seed}: it must fit 64 bits; pass a key of jax.random")
    return dropout.seed_words(seed)
