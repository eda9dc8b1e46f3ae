"""Canonical form of a user's call. Wrong operands and options raise here or in arguments.py.

Layout: q [*B, T, N, H], k [*B, S, K, H], v [*B, S, K, Hv], any number of leading batch dimensions.
Positions: query i sits at q_offset + i, key j at j, so q_offset = 0 aligns the first query with the
first key and q_offset = S - T the last query with the last key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..core import mesh_axes, padding
from ..core.problem import DERIVATIVES, PRECISIONS, AttentionSpec, Operands, Problem, describe
from ..transforms import sharding
from . import arguments as checks
from . import functions
from .arguments import Arguments

DTYPES = ("bfloat16", "float16", "float32", "float64")
MANY_HEADS = 256  # more than any model of note has


@dataclasses.dataclass(frozen=True)
class Call:
    """One call in canonical form.

    Attributes:
        spec: static parameters, everything but the arrays.
        operands: the arrays, their batch dimensions folded into one.
        problem: the shapes and dtypes of the operands, with the spec.
        batch_shape: the user's batch dimensions, to be restored by `unfold`.
        empty_rows: "zero" or "mean", what rows that see no key return.
        queries: the user's queries, whose batch dimensions say how those of the outputs are
            sharded.
    """

    spec: AttentionSpec
    operands: Operands
    problem: Problem
    batch_shape: tuple[int, ...]
    queries: Any
    empty_rows: str = "zero"

    def empty_result(self):
        """Returns (o, lse, max_logit or None) of an empty call, unfolded: rows without keys."""
        o, lse = self.problem.empty_result(self.operands.sinks)
        within = padding.queries_within(self.operands)
        if within is not None:
            lse = jnp.where(within[:, None], lse, -jnp.inf)
        max_logit = jnp.full_like(lse, -jnp.inf) if self.spec.max_logit else None
        return self.unfold(o, lse, max_logit)

    def with_empty_rows(self, o, lse):
        """Returns o [B, T, N, Hv] with the mean of all values in rows that see no key, if asked to.

        Rows with a sink see that, and padding, by its length or a negative id, stays 0. Values that
        are padding count as they are, those that are NaN or infinite as 0.
        """
        operands = self.operands
        if self.empty_rows == "zero" or operands.sinks is not None or not self._may_be_empty:
            return o
        without_pairwise = operands._replace(bias=None, mask=None, block_lists=None)
        return mesh_axes.compiled_as_auto(
            _with_means, (without_pairwise, o, lse), mesh_axes.spec_of(o)
        )

    @property
    def _may_be_empty(self) -> bool:
        """False if it is known that every query sees a key."""
        problem, spec = self.problem, self.spec
        hiding = {"bias", "mask", "kv_lengths", "block_lists"} & problem.features
        if hiding or spec.mask_mod or problem.hides_by_arrays:
            return True
        if problem.traced_offset:
            return not spec.mask.is_trivial
        for query in (spec.q_offset, spec.q_offset + problem.q_len - 1):
            first, last = spec.mask.keys_of(query, problem.kv_len)
            if last < (0 if first is None else max(first, 0)):
                return True
        return False

    def unfold(self, o, lse, max_logit=None):
        """Returns the outputs with the user's batch dimensions."""
        if len(self.batch_shape) == 1:  # reshapes that do nothing cost an eager call 30 us
            return o, lse, max_logit
        restore = lambda x: mesh_axes.unfolded(x, self.batch_shape, self.queries)
        return restore(o), restore(lse), None if max_logit is None else restore(max_logit)


def _with_means(operands: Operands, o, lse):
    """Returns o with the mean of all values in rows whose log-sum-exp is -inf."""
    empty = (lse == -jnp.inf).swapaxes(1, 2)
    valid = padding.valid_queries(operands)
    empty = empty if valid is None else empty & valid[..., None]
    values = padding.finite(operands, operands.v).astype(lse.dtype)
    values = values.mean(axis=1, keepdims=True)
    mean = jnp.repeat(values, o.shape[2] // values.shape[2], axis=2)
    # Broadcast before the cast, so that the transpose sums cotangents of rows in lse's dtype.
    mean = jnp.broadcast_to(mean, o.shape).astype(o.dtype)
    return jnp.where(empty[..., None], mean, o)


def canonicalize(q, k, v, arguments: Arguments) -> Call:
    """Checks the arguments of `flash_attention` and puts them in canonical form.

    Raises:
        TypeError: an argument of the wrong kind or dtype, or traced where it must be static.
        ValueError: shapes that do not fit together, or a value out of range.
        NotImplementedError: a floating dtype that no backend takes.
    """
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    check_dtypes(q, k, v)
    check_shapes(q, k, v)
    batch_shape, (q_len, q_heads, head_dim) = q.shape[:-3], q.shape[-3:]
    first = sharding.first_of_shard(arguments.shard_axes, math.prod(batch_shape), q_heads)
    sizes = checks.Sizes(batch_shape, q_len, k.shape[-3], q_heads, k.shape[-2], q.dtype, first)
    queries = q
    q, scale = positive_scale(q, checks.valid_scale(arguments.scale, head_dim))
    fold = lambda x: x if len(batch_shape) == 1 else mesh_axes.folded(x, 3)
    spec, operands = _features(arguments, sizes, scale, Operands(fold(q), fold(k), fold(v)))
    empty_rows = checks.empty_rows(arguments.empty_rows)
    return Call(spec, operands, describe(operands, spec), batch_shape, queries, empty_rows)


def _features(a: Arguments, sizes: checks.Sizes, scale: float, operands: Operands):
    """Returns (spec, operands) with everything optional in them."""
    rate = checks.dropout_rate(a.dropout_rate)
    mask, offsets, vectors, positions = _positions(a, sizes)
    spec_of_mods: dict[str, Any] = {}
    arrays_of_mods: dict[str, Any] = {}
    if any(x is not None for x in (a.score_mod, a.mask_mod, a.block_mask)):
        spec_of_mods, arrays_of_mods = functions.of_call(a, sizes, positions)
    q_segments, kv_segments = checks.segments(a.q_segment_ids, a.kv_segment_ids, sizes)
    slopes = checks.slopes(a.alibi_slopes, sizes)
    reads = slopes is not None or "score_mod" in spec_of_mods or "mask_mod" in spec_of_mods
    static_offset, traced_offset = offsets
    if mask.is_trivial and not reads and not rate:
        # Nothing reads a position, and one compiled call serves every offset.
        static_offset, traced_offset = 0, None
    spec = AttentionSpec(
        scale=scale,
        mask=mask,
        q_offset=static_offset,
        softcap=checks.valid_softcap(a.softcap),
        dropout_rate=rate,
        deterministic=checks.flag("deterministic", a.deterministic),
        precision=_precision(a.precision, sizes.dtype),
        differentiable=_differentiable(a.differentiable),
        max_logit=checks.flag("max_logit", a.max_logit),
        **spec_of_mods,
    )
    q_lengths = checks.lengths("q_lengths", a.q_lengths, sizes.q_len, sizes)
    first, last = checks.without_padding(vectors["q_first"], vectors["q_last"], q_lengths)
    has_bounds = first is not None or last is not None
    return spec, operands._replace(
        q_offset=traced_offset,
        q_lengths=q_lengths,
        kv_lengths=checks.lengths("kv_lengths", a.kv_lengths, sizes.kv_len, sizes),
        q_segments=q_segments,
        kv_segments=kv_segments,
        q_first=first,
        q_last=last,
        q_positions=vectors["q_positions"] if reads else None,
        kv_positions=vectors["kv_positions"] if reads or has_bounds else None,
        bias=checks.bias(a.bias, sizes),
        mask=checks.mask(a.mask, sizes, a.block_mask),
        alibi_slopes=slopes,
        sinks=checks.sinks(a.sinks, sizes),
        dropout_keys=checks.dropout_keys(rate, a.dropout_seed, a.broadcast_dropout, sizes),
        **arrays_of_mods,
    )


def _positions(a: Arguments, sizes: checks.Sizes):
    """Returns where queries and keys are.

    Where positions are arrays, or a side of the window is one, each query sees an interval of
    positions that XLA computes: [B, T] integers, from which backends tell which blocks they read.

    Returns:
        (the static part of the mask, (static, traced) q_offset, positions that arrays give and the
        intervals by the names of Operands, a function that returns the positions of queries and of
        keys, given or not, int32 [B or 1, length]).
    """
    checks.check_positions(a)
    sides = checks.band(a.causal, a.window)
    q = checks.positions("q_positions", a.q_positions, sizes.q_len, sizes)
    kv = checks.positions("kv_positions", a.kv_positions, sizes.kv_len, sizes)
    causal = isinstance(sides[1], int) and sides[1] == 0 and q is None
    offsets = checks.offset(a.q_offset, sizes, causal=causal)

    def of_queries():
        if q is not None:
            return q
        static, traced = offsets
        index = jnp.broadcast_to(
            jnp.arange(sizes.q_len, dtype=jnp.int32), (sizes.batch, sizes.q_len)
        )
        return index + (static if traced is None else traced[:, None])

    has_positions = q is not None or kv is not None
    mask, first, last = checks.visible_keys(sides, of_queries, has_positions, a.within, sizes)
    of_keys = lambda: jnp.arange(sizes.kv_len, dtype=jnp.int32)[None] if kv is None else kv
    vectors = {"q_positions": q, "kv_positions": kv, "q_first": first, "q_last": last}
    return mask, offsets, vectors, lambda: (of_queries(), of_keys())


def _differentiable(value) -> str:
    if not isinstance(value, str) or value not in DERIVATIVES:
        raise ValueError(
            f"differentiable is {value!r}: 'reverse' has the gradient, 'any' has forward mode and "
            "every order too"
        )
    return value


def _precision(value, dtype) -> str:
    """Returns one of PRECISIONS; always "high" if the dtype leaves no choice."""
    name = value.name.lower() if isinstance(value, jax.lax.Precision) else value
    if name is not None and (not isinstance(name, str) or name not in PRECISIONS):
        raise ValueError(
            f"precision is {value!r}: choose one of {', '.join(map(repr, PRECISIONS))}, the same "
            "of jax.lax.Precision, or None for 'high'"
        )
    return "high" if name is None or dtype != jnp.float32 else name


def positive_scale(q, scale: float):
    """Returns (q, scale) with a positive scale and the same scores.

    The running row max is taken before scaling.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (jnp.zeros_like(q), 1.0)


def check_blocks(blocks) -> dict[str, Any] | None:
    """Returns the tile sizes asked for, as a dict.

    Raises:
        TypeError: not a mapping from field names.
    """
    if blocks is None:
        return None
    if not isinstance(blocks, Mapping) or not all(isinstance(name, str) for name in blocks):
        raise TypeError(
            f"blocks must be None or a dict such as {{'block_q': 128}}, got {blocks!r}; "
            "flash_pallas.explain(flash_attention, q, k, v) shows the fields and what would run"
        )
    return dict(blocks)


def as_array(name: str, x):
    """Converts x to a jax array.

    Raises:
        TypeError: not an array.
    """
    is_array = isinstance(x, (jax.Array, np.ndarray, np.generic)) or hasattr(x, "__jax_array__")
    if not is_array:
        raise TypeError(
            f"{name} must be an array, got {type(x).__name__}: convert it with jnp.array({name})"
        )
    # jnp.asarray of a tracer may add an operation, where debug_nans reports NaNs in padding.
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def check_dtypes(q, k, v):
    """Checks that q, k and v have one floating dtype that some backend takes.

    Raises:
        TypeError: not floats, or different ones.
        NotImplementedError: a float that no backend takes.
    """
    dtypes = {"q": q.dtype, "k": k.dtype, "v": v.dtype}
    for name, dtype in dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{name} has dtype {dtype}: attention takes {', '.join(DTYPES)}; "
                f"cast with {name}.astype(jnp.bfloat16)"
            )
        if dtype.name not in DTYPES:
            raise NotImplementedError(
                f"{name} has dtype {dtype}: supported are {', '.join(DTYPES)}; "
                f"cast with {name}.astype(jnp.bfloat16)"
            )
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"q, k and v must have one dtype, got {listed}: cast them to the same")


def check_shapes(q, k, v):
    """Checks that three arrays [*batch, length, heads, head_dim] fit together.

    Raises:
        ValueError: they do not fit together.
    """
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            f"q, k and v must have the same rank, got {q.ndim}, {k.ndim} and {v.ndim} ({shapes}): "
            "add the missing batch dimensions, as in k[None]"
        )
    if q.ndim < 3:
        raise ValueError(
            f"q has shape {q.shape}: expected [*batch, length, heads, head_dim], at least rank 3; "
            "for one head insert its axis, as in q[:, None, :]"
        )
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"the batch dimensions differ ({shapes}): repeat the smaller with jnp.broadcast_to, "
            "or share it between calls with jax.vmap(..., in_axes=(0, None, None))"
        )
    check_sizes(q.shape[-3:], k.shape[-3:], v.shape[-3:])
    _warn_of_swapped_axes(q.shape[-3:], k.shape[-3:])


def _warn_of_swapped_axes(q, k) -> None:
    """Warns if [length, heads, head_dim] of q and k look like PyTorch's [heads, length, dim]."""
    (q_len, q_heads, _), (kv_len, kv_heads, _) = q, k
    if q_heads == kv_heads > max(MANY_HEADS, 4 * q_len, 4 * kv_len):
        warnings.warn(
            f"q has {q_heads} heads and length {q_len}: the layout is [*batch, length, heads, "
            "head_dim]. If the arrays are [batch, heads, length, head_dim], as in PyTorch, pass "
            "jnp.swapaxes(x, -3, -2) of each",
            UserWarning,
            skip_file_prefixes=(os.path.dirname(os.path.dirname(__file__)),),
        )


def check_sizes(q, k, v):
    """Checks the last three dimensions of q, k and v: length, heads, head_dim.

    Raises:
        ValueError: they do not fit together.
    """
    for name, (length, heads, head_dim) in {"q": q, "k": k, "v": v}.items():
        for kind, size in (("length", length), ("head_dim", head_dim)):
            if not isinstance(size, int):
                raise ValueError(
                    f"{name} has a symbolic {kind}, {size}: tiles are cut by numbers, so export a "
                    "program for every length, or one for the longest that takes q_lengths and "
                    "kv_lengths; the batch may be symbolic"
                )
        if heads < 1 or head_dim < 1:
            raise ValueError(
                f"{name} has {heads} heads of head_dim {head_dim}: both must be positive; "
                "its layout is [*batch, length, heads, head_dim]"
            )
    if k[0] != v[0]:
        raise ValueError(f"k has length {k[0]} and v length {v[0]}: each key needs its value")
    if k[1] != v[1]:
        raise ValueError(f"k has {k[1]} heads and v {v[1]}: the number of heads must be the same")
    if q[1] % k[1]:
        raise ValueError(
            f"q has {q[1]} heads and k {k[1]}: the first must be a multiple of the second "
            "(grouped-query attention); the layout is [*batch, length, heads, head_dim]"
        )
    if q[2] != k[2]:
        raise ValueError(
            f"q has head_dim {q[2]} and k head_dim {k[2]}: they must be equal (v may differ)"
        )


def of_rank(x, rank: int):
    """Prepends axes of 1 to x up to this rank, or drops one from an x with one too many."""
    if x is None:
        return None
    x = x if isinstance(x, (jax.Array, np.ndarray)) else jnp.asarray(x)
    if x.ndim == rank + 1 and x.shape[0] == 1:
        return x[0]
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def lengths_of_rank(x, rank: int, room: int) -> Any:
    """Brings lengths to this rank as `of_rank` does; one for all entries stays one.

    They are clipped to [0, room], as jax.nn takes any integers.
    """
    if not isinstance(x, int) and not checks.is_array(x):
        return x
    if isinstance(x, bool) or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        return x
    x = of_rank(x, rank) if np.ndim(x) else x
    return min(max(x, 0), room) if isinstance(x, int) else jnp.clip(x, 0, room)


# --- Names of arguments: one signature for several functions, and hints for wrong names -----------

# Synonyms: the name here, then those of jax.nn, Flax, PyTorch, flash-attn, Tokamax, splash
# attention, transformers, kvax and MaxText.
SYNONYMS = (
    "q query",
    "k key",
    "v value",
    "causal is_causal",
    "window local_window_size window_size sliding_window sliding_window_size",
    "scale sm_scale softmax_scale logits_scale query_scale scaling",
    "softcap soft_cap logit_cap logits_soft_cap attn_logits_soft_cap logits_softcap",
    "mask attn_mask attention_mask key_padding_mask",
    "bias attn_bias attention_bias ab",
    "q_segment_ids query_segment_ids segment_ids decoder_segment_ids",
    "kv_segment_ids key_segment_ids segment_ids decoder_segment_ids",
    "q_lengths query_seq_lengths q_seqlen seqused_q",
    "kv_lengths key_value_seq_lengths kv_seqlen seqused_k cache_seqlens lengths kv_lens",
    "cu_q_lens cu_seqlens_q cu_seqlens query_start_loc",
    "sinks s_aux softmax_aux learnable_sink attention_sink",
    "alibi_slopes slopes alibi",
    "dropout_rate dropout dropout_p",
    "dropout_seed dropout_rng dropout_key rng",
    "q_offset query_offset q_start",
    "q_positions query_positions position_ids positions segment_pos",
    "kv_positions key_positions position_ids positions segment_pos",
    "cu_seqlens_q cu_seqlens",
    "cu_seqlens_kv cu_seqlens_k",
    "block_mask mask_mod",
    "return_lse return_residual return_residuals return_softmax_lse return_attn_probs",
    "page_table block_table block_tables page_indices",
    "blocks block_sizes kernel_options",
    "backend implementation impl",
)
_SEGMENTS = "pass the one array twice; negative ids are padding, and an id of 0 is not"
_PACKED = "flash_attention_varlen takes q [total, N, H] with cu_seqlens_q and cu_seqlens_kv"
_LONGEST = "leave it out: no kernel asks for the longest sequence"
_SLIDING = "{} leaves out the query's own key: (sliding_window - 1, 0)"
_LSE = "flash_attention_with_lse returns the log-sum-exp, float32 [*B, N, T]"
_NO_WEIGHTS = "the weights never lie in memory, so they cannot be returned"
_MATMULS = "the kernels have matmuls of their own: leave it out; see precision"
_CAUSAL = "its queries are always causal: leave it out"
_PAGES = "flash_decode reads pages of a cache"
# Names that mean something else in another library, with the meaning here; {} is our name.
MEANINGS = {
    "query": "the layout is [*batch, length, heads, head_dim], where PyTorch has heads first",
    "is_causal": "positions count from the first query and the first key; see q_offset",
    "window_size": "{} is (left, right), and None, not -1, is unbounded",
    "sliding_window": _SLIDING,
    "sliding_window_size": _SLIDING,
    "attn_mask": "{} is bool, True is visible; floats to be added to the scores are bias",
    "attention_mask": "{} is bool [*B, N, T, S], each axis full or 1, True is visible; for "
    "padding [*B, S], flash_attention has kv_lengths and kv_segment_ids",
    "key_padding_mask": "True is visible in {}, and hidden in PyTorch: pass "
    "~key_padding_mask[:, None, None, :]",
    "ab": "{} is added after the scale; the TPU kernel scales it too: multiply it by sm_scale",
    "sm_scale": "None is 1 / sqrt(head_dim), where TPU kernels have 1",
    "position_ids": "causal, window and ALiBi compare positions in place of indices",
    "attn_bias": "{} is [*B, N, T, S], each axis full or 1, and has a gradient",
    "attention_bias": "{} is [*B, N, T, S], each axis full or 1, and has a gradient",
    "segment_ids": _SEGMENTS,
    "decoder_segment_ids": _SEGMENTS,
    "dropout": "{} is the share that is dropped, and needs dropout_seed",
    "dropout_p": "{} is the share that is dropped, and needs dropout_seed",
    "dropout_rng": "an int or a key of jax.random; it drops other weights than jax.random would",
    "dropout_key": "an int or a key of jax.random; it drops other weights than jax.random would",
    "block_mask": "{} is the function that makes a BlockMask; it hides keys and skips none",
    "implementation": "the choices are 'auto', 'hopper', 'cudnn', 'portable' and 'xla'",
    "query_scale": "{} multiplies the scores, and None is 1 / sqrt(head_dim)",
    "logits_soft_cap": "{} acts after scale, bias and ALiBi and before masks",
    "attn_logits_soft_cap": "{} acts after scale, bias and ALiBi and before masks",
    "cache_seqlens": "{} counts the new tokens too",
}
# Arguments that the called function does not have, with what to do instead.
INSTEAD = {
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    "cu_seqlens": _PACKED,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "cu_seqlens_kv": _PACKED,
    "max_seqlen_q": _LONGEST,
    "max_seqlen_k": _LONGEST,
    "max_seqlen_kv": _LONGEST,
    "return_lse": _LSE,
    "return_residual": _LSE,
    "return_residuals": _LSE,
    "return_softmax_lse": _LSE,
    "return_attn_probs": f"{_NO_WEIGHTS}; {_LSE}",
    "need_weights": _NO_WEIGHTS,
    "enable_gqa": "k and v may always have fewer heads than q: leave it out",
    "deterministic": "leave it out; to drop nothing, as with Flax's, leave dropout_rate at 0",
    "promote_dtype": "cast q, k and v to one dtype",
    "force_fp32_for_softmax": "the softmax is float32 always: leave it out",
    "qk_attn_weights_einsum": _MATMULS,
    "attn_weights_value_einsum": _MATMULS,
    "q_sharding": "sharded arrays are computed where they lie: leave it out",
    "layout": "it is [*batch, length, heads, head_dim]: leave it out",
    "input_layout": "it is [*batch, length, heads, head_dim]: leave it out",
    "block_table": _PAGES,
    "block_tables": _PAGES,
    "page_indices": _PAGES,
    "block_mask": "flash_attention has it, for whole sequences: shard the batch and the heads",
    "kv_pages": "k_pages and v_pages are two arrays; flash_pallas.compat.ragged_paged_attention "
    "takes one",
    "pack_gqa": "the kernels choose it by themselves: leave it out",
    "dtype": "the result has q's dtype: cast q, k and v",
    "module": "Flax's attention modules take flash_pallas.nn.attention_fn",
    "einsum_dot_general": "Flax's attention modules take flash_pallas.nn.attention_fn",
    "training": "leave dropout_rate at 0 where nothing is to be dropped",
    "rotary_cos": "rotate q and k before the call: apply_rope",
    "rotary_sin": "rotate q and k before the call: apply_rope",
}


def unexpected(function: str, wrong: Collection[str], names: Collection[str]) -> str:
    """Returns the message of a TypeError for unknown arguments, which says what was meant.

    Args:
        function: name of the function.
        wrong: the arguments that it does not have.
        names: those that it has.
    """
    listed = ", ".join(map(repr, sorted(wrong)))
    plural = "s" if len(wrong) > 1 else ""
    meant = {name: _meant(name, names) for name in sorted(wrong)}
    suggestions = dict.fromkeys(ours for group in meant.values() for ours in group)
    hint = f"; did you mean {' and '.join(map(repr, suggestions))}?" if suggestions else ""
    notes = dict.fromkeys(filter(None, (_note(name, ours) for name, ours in meant.items())))
    note = f"{' ' if hint else ': '}{'; '.join(notes)}" if notes else ""
    return f"{function}() got an unexpected keyword argument{plural} {listed}{hint}{note}"


def _meant(name: str, names: Collection[str]) -> list[str]:
    """Returns those of `names` that are synonyms of `name`, else the one most like it."""
    groups = [group.split() for group in SYNONYMS if name in group.split()]
    synonyms = [other for group in groups for other in group if other in names]
    if synonyms or groups or name in INSTEAD:
        return synonyms
    return difflib.get_close_matches(name, names, 1)


def _note(name: str, meant: list[str]) -> str | None:
    """Returns what differs from another library's argument of this name, or what replaces it."""
    if meant:
        return MEANINGS[name].format(meant[0]) if name in MEANINGS else None
    if name in INSTEAD:
        return INSTEAD[name]
    ours = [group.split()[0] for group in SYNONYMS if name in group.split()]
    options = [option for option in ours if option in _OPTIONS]
    return f"flash_attention has {' and '.join(map(repr, options))}" if options else None


_OPTIONS = frozenset(field.name for field in dataclasses.fields(Arguments))


def suggested[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Wraps `function` so that TypeErrors for unknown arguments, or too many, say what to do."""
    parameters = inspect.signature(function).parameters
    names = frozenset(parameters)
    by_place = [x.name for x in parameters.values() if x.kind == x.POSITIONAL_OR_KEYWORD]
    bounded = all(x.kind != x.VAR_POSITIONAL for x in parameters.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if bounded and len(args) > len(by_place):
            raise TypeError(
                f"{function.__name__}() takes {len(by_place)} arguments by position, "
                f"{', '.join(by_place)}, and got {len(args)}: pass the others by name, as in "
                f"{(sorted(names.difference(by_place)) or by_place)[0]}=..."
            )
        if not names.issuperset(kwargs):
            raise TypeError(unexpected(function.__name__, kwargs.keys() - names, names))
        return function(*args, **kwargs)

    checked.makes_one_call = checked  # pyright: ignore
    return checked


class _SameArguments[**P](Protocol):
    """Decorator: a function keeps what it returns, and takes the arguments P."""

    def __call__[R](self, function: Callable[..., R], /) -> Callable[P, R]: ...


def same_arguments[**P](original: Callable[P, Any]) -> _SameArguments[P]:
    """Returns a decorator that gives a (q, k, v, **options) the signature of `original`.

    Both at run time and to type checkers and editors, which show every name, type and default.
    """
    signature = inspect.signature(original)

    def decorate[R](function: Callable[..., R], /) -> Callable[P, R]:
        returns = inspect.signature(function).return_annotation
        return _with_signature(signature.replace(return_annotation=returns), function)

    return decorate


def _with_signature(signature: inspect.Signature, function):
    """Wraps `function` so that it takes what `signature` says, by position too."""

    @functools.wraps(function)
    def bound(*args, **kwargs):
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(**arguments)

    bound.__signature__ = signature  # pyright: ignore
    return suggested(bound)
