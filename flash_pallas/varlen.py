"""Attention of sequences of different lengths, packed one after the other in the same arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import jax.numpy as jnp
import numpy as np

from . import api
from .frontend import arguments as checks
from .frontend import validate
from .frontend.arguments import Arguments
from .frontend.validate import suggested
from .typing import (
    Alignment,
    AnyArray,
    Array,
    BackendName,
    Bool,
    Differentiable,
    Float,
    Int,
    Integer,
    MaskMod,
    Precision,
    ScoreMod,
    Window,
)

ALIGNMENTS = ("start", "end")
_MOST = np.iinfo(np.int32).max


class VarlenOptions(TypedDict, total=False):
    """Arguments of `flash_attention_varlen` that do not affect the type of its result."""

    cu_seqlens_q: Required[Int[AnyArray, " documents+1"]]
    cu_seqlens_kv: Int[AnyArray, " documents+1"] | None
    alignment: Alignment | None
    causal: bool
    window: Window | None
    scale: float | None
    bias: Float[AnyArray, "#N #total_q #total_kv"] | None
    mask: Bool[AnyArray, "#N #total_q #total_kv"] | None
    softcap: float | None
    alibi_slopes: Float[AnyArray, " N"] | None
    sinks: Float[AnyArray, " N"] | None
    dropout_rate: float
    dropout_seed: Integer | AnyArray | None
    broadcast_dropout: bool
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    deterministic: bool
    precision: Precision | None
    differentiable: Differentiable
    backend: BackendName
    blocks: Mapping[str, Any] | None


@overload
def flash_attention_varlen(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Array: ...
@overload
def flash_attention_varlen(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Array, Array]: ...
@overload
def flash_attention_varlen(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Array | tuple[Array, Array]: ...
@suggested
def flash_attention_varlen(
    q: Float[AnyArray, "total_q N H"],
    k: Float[AnyArray, "total_kv K H"],
    v: Float[AnyArray, "total_kv K Hv"],
    *,
    cu_seqlens_q: Int[AnyArray, " documents+1"],
    cu_seqlens_kv: Int[AnyArray, " documents+1"] | None = None,
    alignment: Alignment | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    bias: Float[AnyArray, "#N #total_q #total_kv"] | None = None,
    mask: Bool[AnyArray, "#N #total_q #total_kv"] | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[AnyArray, " N"] | None = None,
    sinks: Float[AnyArray, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Integer | AnyArray | None = None,
    broadcast_dropout: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    deterministic: bool = False,
    precision: Precision | None = None,
    differentiable: Differentiable = "reverse",
    backend: BackendName = "auto",
    blocks: Mapping[str, Any] | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes `flash_attention` of every document in packed arrays, without padding between them.

    FlashAttention-2 (https://arxiv.org/abs/2307.08691). Documents may have any lengths. The numbers
    of queries and keys of a document may differ, and either may be 0. One compiled program serves
    all lengths with the same totals. It is differentiable as `flash_attention` is.

    The keys that a query sees form one interval of the packed keys. So no ids are compared, and
    tiles outside the interval are not read.

    Args:
        q: queries [total_q, N, H] of all documents, one after the other.
        k: keys [total_kv, K, H] of all documents, one after the other; N is a multiple of K.
        v: values [total_kv, K, Hv].
        cu_seqlens_q: integers [documents + 1], which may be traced: document d has the queries from
            cu_seqlens_q[d] up to, but not including, cu_seqlens_q[d + 1]. It begins with 0 and does
            not decrease. Rows beyond the last document are padding: they may hold any values and
            return zeros.
        cu_seqlens_kv: the same for keys; None means that it equals cu_seqlens_q.
        alignment: how the positions of a document's queries and keys are aligned if their numbers
            differ. This matters for causal, window, ALiBi and mods. "start" puts the first query at
            the first key, as in `jax.nn`; "end" puts the last query at the last key, as in
            flash-attn. It is required only if cu_seqlens_kv is given and something uses positions.
        causal: a query sees the keys of its document at positions up to and including its own.
        window: (left, right) as in `flash_attention`, within the document.
        scale: factor of the scores, a Python number; None is 1 / sqrt(H).
        bias: added to the scaled scores, [N, total_q, total_kv]; each axis is full or 1.
        mask: bool of the same shapes as bias; True means visible.
        softcap: scores become softcap * tanh(scores / softcap).
        alibi_slopes: [N], as in `flash_attention`.
        sinks: [N], as in `flash_attention`.
        dropout_rate: as in `flash_attention`; dropout counts indices in the packed queries and
            keys.
        dropout_seed: as in `flash_attention`.
        broadcast_dropout: as in `flash_attention`.
        score_mod: (score, b, n, i, j) -> score, where i and j are positions in the document and b
            is 0.
        mask_mod: (b, n, i, j) -> bool, with the same arguments.
        deterministic: as in `flash_attention`.
        precision: as in `flash_attention`.
        differentiable: as in `flash_attention`.
        backend: as in `flash_attention`.
        blocks: as in `flash_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        o [total_q, N, Hv] in q's dtype. With `return_lse`, the pair of o and lse [N, total_q] in
        float32 (float64 for float64); lse is -inf for a query that sees no key.

    Raises:
        TypeError: an argument has the wrong kind or dtype.
        ValueError: shapes do not match, known lengths do not ascend from 0 or exceed the arrays, or
            `alignment` is missing where it is required.
        UnsupportedByBackend: the named backend cannot run this call; the message gives the reason.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import flash_attention_varlen
        >>> q, k = jnp.ones((300, 8, 64)), jnp.ones((300, 2, 64))
        >>> cu_seqlens = jnp.array([0, 100, 120, 300])
        >>> flash_attention_varlen(q, k, k, cu_seqlens_q=cu_seqlens, causal=True).shape
        (300, 8, 64)
    """
    options = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "bias": bias,
        "mask": mask,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "dropout_rate": dropout_rate,
        "dropout_seed": dropout_seed,
        "broadcast_dropout": broadcast_dropout,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "deterministic": deterministic,
        "precision": precision,
        "differentiable": differentiable,
    }
    arrays, arguments = _as_one(q, k, v, (cu_seqlens_q, cu_seqlens_kv, alignment), options)
    with_lse = checks.flag("return_lse", return_lse)
    o, lse, _ = api.run(*arrays, backend, blocks, arguments)
    return (o[0], lse[0]) if with_lse else o[0]


def _as_one(q, k, v, places, options: dict[str, Any]) -> tuple[tuple[Any, Any, Any], Arguments]:
    """Returns q, k and v with a batch axis of 1, and the arguments that keep documents apart.

    Args:
        q: as in `flash_attention_varlen`.
        k: likewise.
        v: likewise.
        places: (cu_seqlens_q, cu_seqlens_kv, alignment).
        options: all others that say what to compute.
    """
    cu_seqlens_q, cu_seqlens_kv, alignment = places
    q, k, v = (validate.as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    _check_packed(q, k, v)
    of_q = _cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    of_kv = of_q if cu_seqlens_kv is None else _cu_seqlens("cu_seqlens_kv", cu_seqlens_kv, len(k))
    if cu_seqlens_kv is None and len(q) != len(k):
        raise ValueError(
            f"q has {len(q)} rows, k {len(k)}, and cu_seqlens_kv is None: then both must have the "
            "same documents; pass the lengths of keys as cu_seqlens_kv"
        )
    if of_q.shape != of_kv.shape:
        raise ValueError(
            f"cu_seqlens_q has {len(of_q) - 1} documents and cu_seqlens_kv {len(of_kv) - 1}: they "
            "must have the same number; one without queries or keys has length 0"
        )
    mods = any(options[name] is not None for name in ("score_mod", "mask_mod"))
    reads = mods or any(options[name] is not None for name in ("window", "alibi_slopes"))
    needed = (reads or options["causal"]) and cu_seqlens_kv is not None
    aligned = _alignment(alignment, needed=needed)
    # As the caller passed them: inside `explain`, arrays of ints are traced once converted.
    originals = cu_seqlens_q, cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    lengths = _length(originals[0], of_q, len(q)), _length(originals[1], of_kv, len(k))
    documents = _Documents.of(of_q, of_kv, (len(q), len(k)), aligned)._replace(lengths=lengths)
    if cu_seqlens_kv is None or cu_seqlens_kv is cu_seqlens_q:
        documents = documents._replace(q_positions=None)
    causal = bool(options["causal"])
    hidden = documents.by_ids() if mods else documents.by_intervals(causal=causal)
    arguments: dict[str, Any] = options | hidden
    for name in ("bias", "mask"):
        arguments[name] = _with_batch(name, arguments[name])
    return (q[None], k[None], v[None]), Arguments(**arguments)


class _Documents(NamedTuple):
    """Documents of packed arrays; per query int32[total_q], per key int32[total_kv]."""

    q_ids: Any  # -1 for padding
    kv_ids: Any
    q_positions: Any  # in the document, as `alignment` says; None: they are kv_positions
    kv_positions: Any
    first: Any  # index of the first key of each query's document
    stop: Any  # one past the last
    lengths: tuple[Any, Any] = (None, None)  # of what is no padding; None if all of it is none

    @classmethod
    def of(cls, of_q, of_kv, totals: tuple[int, int], alignment: str) -> _Documents:
        """Returns the documents of two arrays of cumulative lengths."""
        q_ids, kv_ids = _ids(of_q, totals[0]), _ids(of_kv, totals[1])
        start = lambda cu, ids: jnp.take(cu, ids, mode="clip")
        index = [jnp.arange(total, dtype=jnp.int32) for total in totals]
        first, stop = start(of_kv, q_ids), start(of_kv, q_ids + 1)
        q_positions = index[0] - start(of_q, q_ids)
        if alignment == "end":
            q_positions += (stop - first) - (start(of_q, q_ids + 1) - start(of_q, q_ids))
        stop = jnp.where(q_ids < 0, 0, stop)
        kv_positions = index[1] - start(of_kv, kv_ids)
        return cls(q_ids, kv_ids, q_positions, kv_positions, first, stop)

    def by_intervals(self, *, causal: bool) -> dict[str, Any]:
        """Returns arguments by which each query sees an interval of packed keys.

        Positions are counted in packed keys: their distances are those in the document. Where
        queries and keys have the same documents, a static mask stays one, and `causal` alone keeps
        a query from the documents after its own.
        """
        first, last = self.first[None], self.stop[None] - 1
        if self.q_positions is None:
            return self._lengths() | {"within": (first, None if causal else last)}
        positions = (self.first + self.q_positions)[None]
        return self._lengths() | {"q_positions": positions, "within": (first, last)}

    def by_ids(self) -> dict[str, Any]:
        """Returns arguments by which ids are compared, and positions are those in a document."""
        q_positions = self.kv_positions if self.q_positions is None else self.q_positions
        return self._lengths() | {
            "q_segment_ids": self.q_ids[None],
            "kv_segment_ids": self.kv_ids[None],
            "q_positions": q_positions[None],
            "kv_positions": self.kv_positions[None],
        }

    def _lengths(self) -> dict[str, Any]:
        return dict(zip(("q_lengths", "kv_lengths"), self.lengths, strict=True))


def _ids(cu_seqlens, total: int):
    """Returns the document of every row, int32[total]; -1 for padding."""
    index = jnp.arange(total, dtype=jnp.int32)
    # Up to 2**24 comparisons one kernel is faster than the steps of a binary search.
    method = "compare_all" if len(cu_seqlens) * total <= 1 << 24 else "scan"
    ids = jnp.searchsorted(cu_seqlens, index, side="right", method=method).astype(jnp.int32) - 1
    return jnp.where(index < cu_seqlens[-1], ids, -1)


def _length(original, cu_seqlens, total: int):
    """Returns int32[1], the number of rows that are no padding; None if that is known to be all."""
    if checks.is_known(original) and int(checks.known(original)[-1]) == total:
        return None
    return cu_seqlens[-1:]


def _alignment(value, *, needed: bool) -> str:
    if value is None and needed:
        raise ValueError(
            "alignment is None, and cu_seqlens_kv is given: say where a document's queries lie "
            "among its keys, 'start' (the first at the first, as jax.nn) or 'end' (the last at the "
            "last, as flash-attn)"
        )
    if value not in (None, *ALIGNMENTS):
        raise ValueError(f"alignment is {value!r}: choose one of 'start' and 'end'")
    return value or "start"


def _check_packed(q, k, v) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(
                f"{name} has shape {x.shape}: packed arrays are [total, heads, head_dim]; for a "
                "batch call flash_attention, or map with jax.vmap"
            )


def _cu_seqlens(name: str, value, total: int):
    """Checks cumulative lengths; returns them as int32[documents + 1]."""
    cu_seqlens = checks.as_int32(name, value)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"{name} has shape {cu_seqlens.shape}: it must be [documents + 1], as in jnp.array([0, "
            "100, 120]) for lengths 100 and 20"
        )
    if checks.is_known(value):  # `cu_seqlens` is traced under jit, even where `value` is known
        known = checks.known(value)
        if known[0] != 0 or np.any(np.diff(known) < 0) or known[-1] > total:
            raise ValueError(
                f"{name} is {known}: it must begin with 0, never decrease, and end at most at the "
                f"number of rows, {total}; it is the cumulative sum of lengths, with a 0 in front"
            )
    return cu_seqlens


def _with_batch(name: str, x):
    """Adds the batch axis to an array [N, total_q, total_kv]; None stays None."""
    if x is None:
        return None
    x = validate.as_array(name, x)
    if x.ndim != 3:
        raise ValueError(
            f"{name} has shape {x.shape}: it must be [heads, total_q, total_kv], each full or 1"
        )
    return x[None]
