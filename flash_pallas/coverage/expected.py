"""Results of a row in float64, and the largest errors that are right."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import calls, dense
from .calls import Row

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0  # of the error of the same computation, rounded
# Allowed besides: half a rounding of the largest element. Rounding errors of sums differ in sign.
FLOOR = 0.5
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# float32 is multiplied in two parts of bfloat16, with a relative error up to 2^-15.
EPS_IN_PARTS = 2.0**-15
# Allowed error of the log-sum-exp, relative to the largest score: scores are rounded to float32,
# and exp2 and log2 of a GPU are right to about one float32 eps. Tensor cores add 16 columns of a
# score at a time and truncate the sum.
EPS_LSE, COLUMNS = 2.0**-22, 96
SUMS = ("dalibi_slopes", "dsinks", "dstrength")  # over all rows, of which a head has one number
TANH_ERROR = 1.1e-5  # relative, of the GPU's MUFU.TANH


class Expected:
    """Results of a row by name, and the largest errors that are right.

    Attributes:
        exact: float64 arrays.
        allowed: largest error of each.
        allowed_rms: largest root mean square of the error of each.
    """

    def __init__(self, row: Row, arrays: dict[str, np.ndarray], moves: dict[str, np.ndarray]):
        call, x = described(row, arrays)
        in_parts = row.dtype == "float32"
        rounded = dense.to(row.dtype, in_parts=in_parts)
        self.exact = _results(row, call, x, moves)
        with np.errstate(invalid="ignore"):
            inputs = {n: rounded(a) if in_parts and n in "q k v do" else a for n, a in x.items()}
        model = _results(row, call, inputs, moves, rounded)
        eps = EPS_IN_PARTS if in_parts else EPS[row.dtype]
        self.allowed, self.allowed_rms = {}, {}
        for name, right in self.exact.items():
            off = error(model[name], right)
            if name in SUMS:
                # The errors of rows differ in sign: one sum of them may happen to be small.
                off = np.maximum(np.abs(off.sum((0, 2))), np.sqrt(np.square(off).sum((0, 2))))
                self.exact[name] = right = right.sum((0, 2))
            factor = OUTPUT_FACTOR if name in ("o", "lse") else GRADIENT_FACTOR
            limits = factor * np.asarray(sizes(off))
            unit = FLOOR * eps
            size = np.asarray(sizes(np.where(np.isfinite(right), right, 0.0)))
            if "softcap" in row.options:
                unit += TANH_ERROR * calls.SOFTCAP
            if name == "lse":
                unit, size = EPS_LSE * max(1.0, row.head_dim / COLUMNS), _logits(call, x)
                if "softcap" in row.options:
                    unit += TANH_ERROR
            self.allowed[name], self.allowed_rms[name] = (float(y) for y in limits + unit * size)


def error(computed, right):
    """Returns the differences; 0 where both are the same infinity, NaN where one is."""
    with np.errstate(invalid="ignore"):
        return np.where(computed == right, 0.0, computed - right)


def sizes(x) -> tuple[float, float]:
    """Returns the largest absolute value and the root mean square."""
    if not x.size:
        return 0.0, 0.0
    return float(np.abs(x).max()), float(np.sqrt(np.mean(np.square(x))))


def _logits(call: dense.Dense, x) -> np.ndarray:
    """Returns a bound of all scores: the largest sum of the absolute values of their terms."""
    group = x["q"].shape[2] // x["k"].shape[2]
    k = np.repeat(np.abs(x["k"]), group, 2)
    largest = call.scale * np.einsum("btnh,bsnh->bnts", np.abs(x["q"]), k).max(initial=1.0)
    if "bias" in x:
        largest += np.abs(x["bias"]).max()
    if "alibi_slopes" in x:
        largest += x["alibi_slopes"].max() * call.distance.max()
    return np.asarray((max(largest, 1.0),) * 2)


def _results(row: Row, call: dense.Dense, x, moves, rounded=dense.exactly) -> dict[str, Any]:
    results = dense.outputs(call, x, rounded)
    if row.wanted == "gradient":
        grads = dense.gradients(call, x, rounded, by_row=True)
        results |= {n: grads[n] for n in grads if n[1:] in calls.moving(row, x)}
    elif row.wanted in ("tangents", "linear"):
        results |= dense.tangents(dense.outputs, call, x, moves, rounded)
        if row.wanted == "linear":  # the O that mu multiplies has been stored
            o, mu = dense.outputs(call, x)["o"], results["lse_tangent"].swapaxes(1, 2)[..., None]
            results["o_tangent"] = results["o_tangent"] + mu * (o - rounded(o))
    elif row.wanted == "hessian":
        results = dense.tangents(dense.gradients, call, x, moves, rounded)
        results = {
            n: y for n, y in results.items() if n in ("dq_tangent", "dk_tangent", "dv_tangent")
        }
    return {name: np.asarray(y, np.float64) for name, y in results.items()}


def described(row: Row, arrays: dict[str, np.ndarray]) -> tuple[dense.Dense, dict[str, Any]]:
    """Returns a row's call as `dense` takes it: contiguous, with a batch axis, and its floats."""
    if row.function == "attention":
        return _attention(row, arrays)
    if row.function == "varlen":
        return _attention(row, *_documents(row, arrays))
    return _decode(row, arrays)


# --- Attention ------------------------------------------------------------------------------------


def _floats(arrays) -> dict[str, Any]:
    names = (*calls.WANTED, "do", "dlse")
    return {n: np.asarray(arrays[n]).astype(np.float64) for n in names if n in arrays}


def _attention(row: Row, arrays, places=None) -> tuple[dense.Dense, dict[str, Any]]:
    sizes, named = calls.sizes_of(row), calls.static(row)
    x = _floats(arrays)
    (B, T, N, H), S = x["q"].shape, x["k"].shape[1]
    offset = np.asarray(arrays.get("q_offset", named.get("q_offset", 0))).reshape(-1, 1)
    i = np.broadcast_to(offset + np.arange(T), (B, T))
    j = np.broadcast_to(np.arange(S), (B, S))
    kept = None
    if "dropout" in row.options:
        kept = dense.kept(calls.SEED, calls.DROPOUT, B, N, (i, j))
    i, j = arrays.get("q_positions", i), arrays.get("kv_positions", j)
    seen, rows = np.ones((B, N, T, S), bool), np.ones((B, 1, T), bool)
    if places is not None:
        i, j = places.q_positions, places.kv_positions
        exists = places.q_ids >= 0
        seen &= (places.q_ids[:, None] == places.kv_ids) & exists[:, None]
        rows &= exists
    difference = (j[:, None] - i[..., None])[:, None]
    seen &= _band(row, arrays, difference)
    if "q_segment_ids" in arrays:
        q_ids, kv_ids = arrays["q_segment_ids"], arrays["kv_segment_ids"]
        seen &= ((q_ids[:, :, None] == kv_ids[:, None]) & (q_ids >= 0)[..., None])[:, None]
    if "q_lengths" in arrays:
        rows &= (np.arange(T) < arrays["q_lengths"][:, None])[:, None]
        seen &= (np.arange(S) < arrays["kv_lengths"][:, None])[:, None, None]
    if "mask" in arrays:
        seen &= arrays["mask"]
    if "bias" in x:
        seen &= np.isfinite(x["bias"])
        x["bias"] = np.where(np.isfinite(x["bias"]), x["bias"], 0.0)
    if "mask_mod" in row.options:
        heads = np.arange(sizes.N)[:, None, None]
        seen &= calls.mask_mod(None, heads, i[:, None, :, None], j[:, None, None])
    if "kv_indices" in arrays:
        blocks = np.zeros((-(-T // calls.BLOCK), -(-S // calls.BLOCK)), bool)
        for q_block, listed in enumerate(arrays["kv_indices"][0, 0]):
            blocks[q_block, listed[listed >= 0]] = True
        seen &= blocks[np.arange(T)[:, None] // calls.BLOCK, np.arange(S) // calls.BLOCK]
    seen = seen & rows[..., None]
    return dense.Dense(H**-0.5, seen, rows, (i, j), named.get("softcap"), kept), x


def _band(row: Row, arrays, difference):
    """Returns what causal and window show; `difference` is the key's position minus the query's."""
    seen = np.ones_like(difference, bool)
    if calls.static(row).get("causal"):
        seen &= difference <= 0
    if "window" in row.options:
        seen &= (difference >= -calls.WINDOW[0]) & (difference <= calls.WINDOW[1])
    if "window_left" in arrays:
        seen &= difference >= -arrays["window_left"][:, None, None, None]
        seen &= difference <= calls.WINDOW[1]
    return seen


class _Places:
    """Document and position of each packed query and key."""

    def __init__(self, row: Row, arrays, totals: tuple[int, int]):
        ends_q = arrays["cu_seqlens_q"]
        ends_kv = arrays.get("cu_seqlens_kv", ends_q)
        self.q_ids, of_q = _ids(ends_q, totals[0])
        self.kv_ids, of_kv = _ids(ends_kv, totals[1])
        if "cu_seqlens_kv" in arrays:  # alignment "end"
            more = np.diff(ends_kv) - np.diff(ends_q)
            of_q = of_q + np.where(self.q_ids >= 0, more[self.q_ids], 0)
        self.q_positions, self.kv_positions = of_q[None], of_kv[None]


def _ids(ends, total: int):
    index = np.arange(total)
    ids = np.searchsorted(ends, index, side="right") - 1
    ids = np.where(index < ends[-1], ids, -1)
    return ids, index - ends[np.maximum(ids, 0)]


def _documents(row: Row, arrays):
    """Returns the arrays of packed documents with a batch axis, and their places."""
    packed = ("q", "k", "v", "do", "dlse", "bias", "mask")
    places = _Places(row, arrays, (len(arrays["q"]), len(arrays["k"])))
    return {n: a[None] if n in packed else a for n, a in arrays.items()}, places


# --- Caches ---------------------------------------------------------------------------------------


def _decode(row: Row, arrays) -> tuple[dense.Dense, dict[str, Any]]:
    x, tokens = _contiguous(row, arrays), None
    if row.function == "ragged":
        tokens = np.diff(arrays["cu_q_lens"])
        queries = np.zeros((len(tokens), tokens.max(), *x["q"].shape[1:]))
        for s, first in enumerate(arrays["cu_q_lens"][:-1]):
            queries[s, : tokens[s]] = x["q"][first : first + tokens[s]]
        x["q"] = queries
    B, T, N, H = x["q"].shape
    S, lengths = x["k"].shape[1], arrays["kv_lengths"]
    first = arrays.get("q_offset", lengths - (T if tokens is None else tokens))
    i = first[:, None] + np.arange(T)
    j = np.broadcast_to(np.arange(S), (B, S)).copy()
    seen = np.broadcast_to((j < lengths[:, None])[:, None], (B, T, S)).copy()
    drafts = arrays.get("draft_mask")
    if drafts is None:
        seen &= j[:, None] <= i[..., None]
    else:
        i, j, seen = _of_drafts(drafts, first, j, seen)
    if "kv_starts" in arrays:
        seen &= (j >= arrays["kv_starts"][:, None])[:, None]
    left = arrays.get("window")
    left = np.full(B, calls.WINDOW[0]) if left is None and "window" in row.options else left
    if left is not None:
        seen &= i[..., None] - j[:, None] <= left[:, None, None]
    if "kv_blocks" in arrays:
        size = calls.static(row)["kv_block_size"]
        seen &= np.isin(j // size, arrays["kv_blocks"][0, 0])[:, None]
    rows = np.ones((B, T), bool) if tokens is None else np.arange(T) < tokens[:, None]
    seen = np.broadcast_to((seen & rows[..., None])[:, None], (B, N, T, S))
    return dense.Dense(H**-0.5, seen, rows[:, None], (i, j), calls.static(row).get("softcap")), x


def _contiguous(row: Row, arrays) -> dict[str, Any]:
    """Returns the floats of a call, its keys and values in order and multiplied by their scales."""
    x = _floats(arrays)
    x["v"] = x.get("v", x["k"][..., : row.v_head_dim])
    for name in "kv":
        scale = arrays.get(f"{name}_scale", arrays.get("k_scale"))
        if scale is not None:
            scale = np.broadcast_to(scale, (len(x[name]), scale.shape[-1]))
            x[name] = x[name] * scale[:, None, :, None]
        if "page_table" in arrays:
            pages = x[name][arrays["page_table"]]
            x[name] = pages.reshape(len(pages), -1, *pages.shape[3:])
    return x


def _of_drafts(drafts, first, j, seen):
    """Returns positions of queries and keys, and who sees what, by a mask of new tokens."""
    B, T, _ = drafts.shape
    others = (drafts & ~np.eye(T, dtype=bool)).sum(-1)
    i = first[:, None] + others
    for b in range(B):
        for t in range(T):
            if first[b] + t < 0:
                continue
            j[b, first[b] + t] = i[b, t]
            seen[b, :, first[b] + t] &= drafts[b, :, t]
    return i, j, seen


def packed(row: Row, arrays, computed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns results in the layout of `dense`: with a batch axis, sequences apart."""
    if row.function == "varlen":
        return {n: y if n in SUMS else y[None] for n, y in computed.items()}
    if row.function != "ragged":
        return computed
    ends = arrays["cu_q_lens"]
    tokens = np.diff(ends)
    o = np.zeros((len(tokens), tokens.max(), *computed["o"].shape[1:]))
    lse = np.full((len(tokens), computed["lse"].shape[0], tokens.max()), -np.inf)
    for s, first in enumerate(ends[:-1]):
        o[s, : tokens[s]] = computed["o"][first : first + tokens[s]]
        lse[s, :, : tokens[s]] = computed["lse"][:, first : first + tokens[s]]
    return {"o": o, "lse": lse}
