"""Mixes of prompts and steps over pages, and what the dense oracle makes of them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import ragged_paged_attention, reference

from . import checks
from .test_decode import assert_close, terms

PAGE, COLUMNS = 16, 8
ROOM = PAGE * COLUMNS
# (queries, keys) of each sequence: chunks with and without keys before them, a whole prompt, steps,
# none, more queries than keys. The first two share pages.
SEQUENCES = ((37, 80), (1, 128), (0, 30), (20, 20), (3, 3), (17, 120), (1, 1), (4, 70), (5, 2))
PADDING = 8  # rows at the end
SHARED = 3  # most pages that the first two sequences have in common
STARTS = {3: 5, 5: 70}  # padding on the left, by sequence


@dataclasses.dataclass(frozen=True)
class Mix:
    """A ragged call. `sides` are arrays that it has: "alibi", "sinks", "starts", "windows".

    `cache` is the dtype of the pages, that of q if None. With `shared`, values are columns of keys.
    There is room for one sequence more, about which the arrays say nonsense.
    """

    sequences: tuple[tuple[int, int], ...] = SEQUENCES
    N: int = 4
    K: int = 2
    H: int = 32
    Hv: int = 32
    dtype: str = "float32"
    cache: str | None = None
    shared: bool = False
    sides: tuple[str, ...] = ()
    step_tokens: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def tokens(self) -> int:
        """Number of rows of q."""
        return sum(count for count, _ in self.sequences) + PADDING

    def draw(self, seed: int = 5):
        """Draws (q, keys, values or None, arguments), numpy arrays; NaN where nobody may look."""
        rng = np.random.default_rng(seed)
        normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        count, length = np.array(self.sequences).T
        seqs = len(count) + 1
        number = COLUMNS * seqs
        table = rng.permutation(number).reshape(seqs, COLUMNS)
        both = min(SHARED, *length[:2] // PAGE)
        table[1, :both] = table[0, :both]
        starts = np.array([STARTS.get(s, 0) for s in range(seqs)], np.int32)
        filled = np.zeros((number, PAGE), bool)
        for s, end in enumerate(length):
            key = np.arange(starts[s] if "starts" in self.sides else 0, end)
            filled[table[s, key // PAGE], key % PAGE] = True
        widths = (self.H,) if self.shared else (self.H, self.Hv)
        pages = [normal(number, PAGE, self.K, width) for width in widths]
        arguments: dict[str, Any] = {}
        if self.cache is not None:
            most = float(jnp.iinfo("int8").max if self.cache == "int8" else 448.0)
            for name, x in zip(("k_scale", "v_scale"), pages, strict=False):
                scale = (4.0 / most * rng.uniform(0.5, 1.0, (number, self.K))).astype(np.float32)
                x[:] = np.clip(x / scale[:, None, :, None], -most, most)
                arguments[name] = scale
        if self.cache != "int8":
            for x in pages:
                x[~filled] = np.nan
        pages = [x.astype(jnp.dtype(self.cache or self.dtype)) for x in pages]
        q = normal(self.tokens, self.N, self.H).astype(jnp.dtype(self.dtype))
        ends = np.cumsum([0, *count])
        q[ends[-1] :] = np.nan
        unused = np.arange(COLUMNS)[None] * PAGE >= np.append(length, 0)[:, None]
        table[unused] = rng.choice([-1, -(2**31), 2**31 - 1, number], size=unused.sum())
        arguments |= {
            "kv_lengths": np.append(length, 2**31 - 1).astype(np.int32),
            "page_table": table.astype(np.int32),
            "cu_q_lens": np.append(ends, -7).astype(np.int32),
            "num_seqs": np.array([seqs - 1], np.int32),
        }
        if "alibi" in self.sides:
            arguments["alibi_slopes"] = rng.uniform(0.0, 0.2, self.N).astype(np.float32)
        if "sinks" in self.sides:
            arguments["sinks"] = normal(seqs, self.N)
        if "starts" in self.sides:
            arguments["kv_starts"] = starts
        if "windows" in self.sides:
            arguments["window"] = np.resize(np.int32([3, 0, 4, 9, 1, 40, 2, 200, 7, 1]), seqs)
        return q, pages[0], None if self.shared else pages[1], arguments


MIXES = {
    "one": Mix(),
    "steps of four": Mix(step_tokens=4, sides=("sinks",), N=2, K=1),
    "steps alone": Mix(step_tokens=16, dtype="bfloat16"),
    "window": Mix(options=(("window", 9),), step_tokens=3, dtype="float16"),
    "softcap": Mix(options=(("softcap", 2.0), ("scale", -0.7)), Hv=16),
    "starts and windows": Mix(sides=("starts", "windows"), step_tokens=4),
    "bfloat16": Mix(dtype="bfloat16", N=8, K=1, sides=("alibi",), options=(("num_splits", 3),)),
    "int8": Mix(cache="int8", step_tokens=2),
    "float8": Mix(cache="float8_e4m3fn", dtype="bfloat16"),
    "latent": Mix(shared=True, K=1, Hv=16),
    "latent float8": Mix(shared=True, Hv=24, cache="float8_e4m3fn", sides=("sinks",)),
    "together": Mix(
        step_tokens=3,
        N=6,
        Hv=48,
        sides=("alibi", "sinks", "starts", "windows"),
        options=(("softcap", 3.0), ("num_splits", 2)),
    ),
}


def attend(mix: Mix, q, k, v, arguments, **options):
    """Calls ragged_paged_attention as the mix says; returns (o, lse), and pages with new tokens."""
    options |= dict(mix.options) | {"return_lse": True, "step_tokens": mix.step_tokens}
    if mix.shared:
        options["v_head_dim"] = mix.Hv
    return ragged_paged_attention(q, k, v, **options, **arguments)


def rows(mix: Mix, q, k, v, arguments):
    """Returns ((sequence, query) of each row, q, k, v, arguments) with a batch of sequences.

    The arguments are those of the dense functions; keys and values are those in pages, unscaled,
    q the rows of each sequence, filled up.
    """
    a = dict(arguments)
    count = np.array([count for count, _ in mix.sequences])
    lengths, ends, table = (a.pop(x) for x in ("kv_lengths", "cu_q_lens", "page_table"))
    seqs, longest = a.pop("num_seqs")[0], max(count)
    scales = [a.pop(name, None) for name in ("k_scale", "v_scale")]
    table = np.clip(table[:seqs], 0, len(k) - 1)

    def sequence(x, scale):
        x = np.asarray(x).astype(np.float32 if mix.cache else x.dtype)
        x = x if scale is None else x * scale[:, None, :, None]
        return x[table].reshape(seqs, ROOM, *x.shape[2:])

    keys = sequence(k, scales[0])
    values = keys[..., : mix.Hv] if v is None else sequence(v, scales[1])
    own = np.repeat(np.arange(seqs), count), np.concatenate([np.arange(c) for c in count])
    queries = np.zeros((seqs, longest, *q.shape[1:]), q.dtype)
    queries[own] = q[: ends[seqs]]
    starts = a.pop("kv_starts", None)
    a = {name: x if np.ndim(x) != 2 else x[:seqs] for name, x in a.items()}
    a |= {"kv_lengths": lengths[:seqs], "q_offset": (lengths[:seqs] - count).astype(np.int32)}
    if "windows" in mix.sides:
        a["window"] = jnp.asarray(arguments["window"][:seqs])
    if starts is not None:
        hidden = np.arange(ROOM)[None] < starts[:seqs, None]
        a["kv_segment_ids"] = jnp.where(hidden, -1, 0).astype(jnp.int32)
        a["q_segment_ids"] = jnp.zeros((seqs, longest), jnp.int32)
    options = {name: x for name, x in mix.options if name != "num_splits"}
    a = {name: jnp.asarray(x) for name, x in a.items()}
    return own, queries, keys, values, {"causal": True, **options, **a}


def assert_right(mix: Mix, drawn, found, *, kernels: bool = False):
    """Checks (o, lse) of a call against the oracle, as checks.py has it, and its padding.

    Args:
        mix: what was drawn.
        drawn: what `Mix.draw` returned.
        found: (o, lse) of the call.
        kernels: it ran in kernels, whose tanh is that of the GPU.
    """
    own, q, k, v, arguments = rows(mix, *drawn)
    last = len(own[0])
    packed = lambda o, lse: (np.asarray(o)[own], np.asarray(lse).swapaxes(1, 2)[own])
    rounded = (x.astype(jnp.dtype(mix.dtype)) for x in (q, k, v))
    plain = packed(*jax.jit(partial(checks.plain, **arguments))(*rounded))
    with jax.enable_x64(True):
        wide = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
        calls = (reference.attention, partial(terms, jnp.dtype(mix.dtype)))
        both = jax.jit(lambda *arrays: [call(*arrays, **arguments) for call in calls])
        exact, floors = (packed(*x) for x in both(*wide))
    o, lse = map(np.asarray, found)
    assert o.dtype == jnp.dtype(mix.dtype) and lse.dtype == np.float32
    assert o.shape == (mix.tokens, mix.N, mix.Hv) and lse.shape == (mix.N, mix.tokens)
    assert (o[last:] == 0).all() and (lse[:, last:] == -np.inf).all()
    got = o[:last], lse[:, :last].T
    if kernels:
        of_tanh = checks.TANH_ERROR * (dict(mix.options).get("softcap") or 0.0)
        floors = floors[0], floors[1] + of_tanh
    for each in zip(got, plain, exact, floors, strict=True):
        assert_close(*each)
