"""Public functions for decoding: attention of a few new tokens to a KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.custom_batching import custom_vmap

from .backends.base import Backend
from .core import decode, mesh_axes, softmax, undifferentiable
from .core import kv_blocks as kv_blocks_
from .core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from .core.problem import Outputs, own_width
from .frontend import arguments as checks
from .frontend import dispatch, validate_decode
from .frontend.validate import suggested
from .frontend.validate_decode import DecodeArguments
from .transforms import derivatives, sharding
from .typing import (
    AnyArray,
    Array,
    BackendName,
    Bool,
    Float,
    Int,
    Integer,
    NumSplits,
    Window,
)


class DecodeOptions(TypedDict, total=False):
    """Arguments of `flash_decode` that do not affect the type of its result."""

    v_head_dim: int | None
    kv_lengths: Integer | Int[AnyArray, "*#B"] | None
    kv_starts: Integer | Int[AnyArray, "*#B"] | None
    q_offset: Integer | Int[AnyArray, "*#B"] | None
    window: Window | None
    softcap: float | None
    sinks: Float[AnyArray, "*#B N"] | None
    alibi_slopes: Float[AnyArray, "*#B N"] | None
    scale: float | None
    num_splits: NumSplits
    page_table: Int[AnyArray, "B max_pages"] | None
    kv_blocks: Int[AnyArray, "B heads M"] | None
    kv_block_size: int | None
    shared_prefix: Literal["auto"] | Integer | Int[AnyArray, "*#B"] | None
    draft_mask: Bool[AnyArray, "*#B T T"] | None
    k_scale: Float[AnyArray, "*#rows K"] | None
    v_scale: Float[AnyArray, "*#rows K"] | None
    backend: BackendName


@overload
def flash_decode(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> Array: ...
@overload
def flash_decode(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Array, Array]: ...
@overload
def flash_decode(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray | None = None,
    *,
    return_lse: bool,
    **options: Unpack[DecodeOptions],
) -> Array | tuple[Array, Array]: ...
@suggested
def flash_decode(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"] | Float[AnyArray, "P page_size K H"],
    v: Float[AnyArray, "B S K Hv"] | Float[AnyArray, "P page_size K Hv"] | None = None,
    *,
    v_head_dim: int | None = None,
    kv_lengths: Integer | Int[AnyArray, "*#B"] | None = None,
    kv_starts: Integer | Int[AnyArray, "*#B"] | None = None,
    q_offset: Integer | Int[AnyArray, "*#B"] | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Float[AnyArray, "*#B N"] | None = None,
    alibi_slopes: Float[AnyArray, "*#B N"] | None = None,
    scale: float | None = None,
    num_splits: NumSplits = "auto",
    page_table: Int[AnyArray, "B max_pages"] | None = None,
    kv_blocks: Int[AnyArray, "B heads M"] | None = None,
    kv_block_size: int | None = None,
    shared_prefix: Literal["auto"] | Integer | Int[AnyArray, "*#B"] | None = None,
    draft_mask: Bool[AnyArray, "*#B T T"] | None = None,
    k_scale: Float[AnyArray, "*#rows K"] | None = None,
    v_scale: Float[AnyArray, "*#rows K"] | None = None,
    backend: BackendName = "auto",
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes attention of 1 to 64 new tokens of each sequence to its KV cache.

    It serves generation: a step of one token, or the proposals of speculative decoding. First
    append the keys and values of the new tokens (`append_kv`), so that the last query belongs to
    the last key. Queries are causal, also among themselves, unless `draft_mask` says which new
    tokens each of them sees. The keys may be split into several ranges that are read in parallel.
    Each range yields an output and a log-sum-exp, and these are then merged (split-KV, as in
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    The result is the same in every run, and does not depend on the number of ranges except for
    rounding. It works under jit and vmap, and has no gradient. A query that sees no key returns
    zeros.

    Args:
        q: queries [B, T, N, H], T from 1 to 64, in bfloat16, float16, float32 or float64.
        k: keys [B, S, K, H], or with `page_table` pages [P, page_size, K, H], where page_size is a
            multiple of 16 from 16 to 256. k and v have q's dtype, or are both float8_e4m3fn or both
            int8 (see `k_scale`). N is a multiple of K: query head n reads KV head n // (N // K),
            and KV heads are never repeated in memory (GQA, grouped-query attention).
        v: values [B, S, K, Hv], or pages [P, page_size, K, Hv], in k's dtype. If None, the values
            are the first `v_head_dim` columns of k, as in multi-head latent attention, and are read
            once for both purposes.
        v_head_dim: if v is None, the number of columns of k that are the values, from 1 to H; None
            means H.
        kv_lengths: number of keys of each sequence, including its new tokens, as int32 [B] or a
            scalar; may be traced. Later keys may hold any values. None means S; with pages it is
            required. If new tokens found no room in the cache, the length still counts them,
            because positions are derived from it; only the keys that fit exist. Such a length
            raises an error if its value is known.
        kv_starts: the first key of each sequence, as int32 [B] or a scalar, for caches that are
            padded on the left; may be traced. Earlier keys may hold any values, and blocks of them
            are not loaded. None means 0. Positions and lengths still count from key 0 of the cache.
            A sequence whose start is at its length or beyond has no keys.
        q_offset: position of query 0, where key 0 has position 0, as an int, int32 [B] or a scalar.
            Query t sees the keys up to q_offset + t. None means kv_lengths - T.
        window: (left, right), or one int for both: the query at position i sees the keys from
            i - left on. None means all of them. Nothing to the right of a query is seen, as in
            `flash_attention` with causal=True. Keys outside the window are not loaded. The window
            or its left side may be an int32 scalar or [B], which may be traced, so that layers with
            different windows share one compiled program; a window of at least S hides nothing. A
            Python int is faster, because the number of splits can be chosen for it.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [N] or [B, N]: one additional score per query, without a value.
        alibi_slopes: [N] or [B, N]: slope * |i - j| is subtracted from scores.
        scale: factor of the scores, a Python number; None is 1 / sqrt(H).
        num_splits: number of ranges into which the keys are split, 1 to 128. On xla, "auto" is 1.
            On hopper, "auto" takes as many as keep the SMs busy if the sequences are as long as the
            cache.
        page_table: int32 [B, max_pages]: key j of sequence b is row j % page_size of page
            page_table[b, j // page_size]. Pages may be in any order, shared and repeated. Entries
            beyond a sequence's length are not used. Ids out of range are clipped, so that nothing
            outside the cache is read; `check_pages` finds them.
        kv_blocks: int32 [B, 1 or K, M]: the blocks of keys that the query of each sequence reads,
            as one list for all KV heads or one per head. Block i has kv_block_size keys, starting
            at key i * kv_block_size. No other block is loaded. Block numbers may be in any order
            and may repeat. A block that is -1 or lies beyond the length is ignored. It requires
            T = 1, and no `q_offset`, `window`, `kv_starts` or `alibi_slopes`. Methods of sparse
            attention such as MoBA, NSA and Quest choose these blocks.
        kv_block_size: number of keys in a block of `kv_blocks`, a multiple of 16 from 16 to 256
            that divides S. With `page_table` it is a multiple of page_size, and page_size is the
            default.
        shared_prefix: with "auto", leading pages that several sequences share, such as those of a
            system prompt, are read once for all of them. Sequences whose page tables begin with the
            same page form a group, and share the leading pages in which all of them agree. An int32
            [B] or a scalar instead gives the number of shared keys, 0 for none. This avoids the
            comparison of page tables, and the members of a group are assumed to agree. Only whole
            pages before the first new token are shared. Sharing pays if the prefix is long and many
            sequences have it; results change only by rounding. It requires a `page_table` and T up
            to 32, and no `q_offset`, `window`, `kv_starts`, `alibi_slopes` or `kv_blocks`. None
            shares nothing.
        draft_mask: bool [T, T] or [B, T, T], for trees of drafts in speculative decoding. The query
            of new token t sees new token u, which is key kv_lengths - T + u, only where
            draft_mask[b, t, u] is True. In a tree, these are t and its ancestors. Keys before the
            new tokens remain visible. For a window and for ALiBi, a draft is at position
            kv_lengths - T + depth, where depth is the number of other new tokens that it sees;
            whether it sees itself makes no difference. Rotate its query and key by the same
            position. `q_offset` must be None.
        k_scale: scale of a cache in float8_e4m3fn or int8: a key is k * k_scale. It is one number
            per head [K], per sequence and head [B, K], or with `page_table` per page and head
            [P, K]. None means 1. `append_kv` divides by the same numbers.
        v_scale: scale of the values, of the same shapes. Without v, the values have the scale of
            the keys.
        backend: "auto" takes the fastest backend that can run the call. "hopper", "portable" or
            "xla" takes that backend, or raises.
        return_lse: also return the log-sum-exp.

    Returns:
        o [B, T, N, Hv] in q's dtype. Sums are accumulated in float32 (float64 for float64). With
        `return_lse`, the pair of o and lse [B, N, T] in float32, the natural logarithm. lse is -inf
        for a query that sees no key; with sinks, it is the sink there.

    Raises:
        TypeError: an argument has the wrong kind or dtype.
        ValueError: shapes do not match, or a value is out of range. Examples are a v_head_dim above
            H or different from that of v, and known lengths or starts that are negative or beyond
            the cache.
        UnsupportedByBackend: the named backend cannot run this call; the message gives the reason.
        NotImplementedError: no backend supports the dtype, or a derivative is taken.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import flash_decode
        >>> q = jnp.ones((2, 1, 8, 64), jnp.bfloat16)
        >>> k = v = jnp.ones((2, 1024, 2, 64), jnp.bfloat16)
        >>> flash_decode(q, k, v, kv_lengths=jnp.array([1000, 7])).shape
        (2, 1, 8, 64)
    """
    arguments = DecodeArguments(
        kv_lengths=kv_lengths,
        kv_starts=kv_starts,
        q_offset=q_offset,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        scale=scale,
        num_splits=num_splits,
        page_table=page_table,
        kv_blocks=kv_blocks,
        kv_block_size=kv_block_size,
        shared_prefix=shared_prefix,
        draft_mask=draft_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        v_head_dim=v_head_dim,
    )
    with_lse = checks.flag("return_lse", return_lse)
    spec, operands = validate_decode.canonicalize(q, k, v, arguments)
    o, lse = _run(spec, operands, backend)
    return (o, lse) if with_lse else o


def decode_from_ring(
    q, k, v, lengths, written, *, backend: BackendName, **options
) -> tuple[Array, Array]:
    """Computes attention of one new token of each sequence to the keys of a ring, for layers.

    Args:
        q: queries [B, 1, N, H].
        k: keys [B, S, K, H], S a multiple of 16: the key at position p is in row p % S.
        v: values [B, S, K, Hv].
        lengths: int32 [B], number of tokens that each sequence has, which may exceed S.
        written: int32 [B], number of tokens that have been written, of which the last S are there.
            No fewer than `lengths`; more where some were taken back.
        backend: as in `flash_decode`.
        options: window, softcap, sinks, alibi_slopes, scale and num_splits of `flash_decode`.

    Returns:
        (o [B, 1, N, Hv], lse [B, N, 1]), as `flash_decode` with `return_lse`.
    """
    spec, operands = validate_decode.canonicalize(q, k, v, DecodeArguments(**options))
    spec = dataclasses.replace(spec, ring=True)
    return _run(spec, operands._replace(kv_lengths=lengths, kv_starts=written), backend)


def _run(spec: DecodeSpec, operands: DecodeOperands, backend: BackendName):
    """Returns (o, lse) of operands in canonical form."""
    chosen, _ = dispatch.plan(_described(spec, operands), backend, tuple(operands[:3]))
    return _decode(chosen, spec, operands)


def _described(spec: DecodeSpec, operands: DecodeOperands) -> DecodeProblem:
    """Returns the problem that a backend gets: with pages in place of `kv_blocks`."""
    if operands.kv_blocks is None:
        return decode.describe(operands, spec)
    paged = {}

    def shapes(operands):
        paged["spec"], operands = kv_blocks_.as_pages(spec, operands)
        return operands

    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # without its sharding
    operands = jax.eval_shape(shapes, jax.tree.map(plain, operands))
    return decode.describe(operands, paged["spec"])


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(backend: Backend, spec: DecodeSpec, operands: DecodeOperands):
    problem = decode.describe(operands, spec)
    if problem.is_empty:
        return problem.empty_result(operands.sinks)
    operands = mesh_axes.spread(operands, mesh_axes.varying(operands))
    call: Callable = partial(_fitted, backend, spec)
    if mesh_axes.mesh_of(operands[:3]) is not None:
        call = sharding.OnShards(call, Outputs)
    out = call(operands)
    unit = spec.attention.unit(operands.alibi_slopes is not None)
    return out.o, softmax.natural(out.lse_log2, out.shift, unit)


def _fitted(backend: Backend, spec: DecodeSpec, operands: DecodeOperands):
    """Computes Outputs with blocks that fit these operands: the whole ones, or those of a shard."""
    with own_width(operands):
        spec, operands = kv_blocks_.as_pages(spec, operands)
        blocks = backend.decode.plan(decode.describe(operands, spec))
        return _foldable(backend, spec, blocks)(operands)


def _foldable(backend: Backend, spec: DecodeSpec, blocks: Any):
    """Returns operands -> Outputs; vmap folds its axis into the batch, and blocks fit that."""

    @custom_vmap
    def call(operands):
        with own_width(operands):
            return backend.decode.run(spec, blocks, operands)

    @call.def_vmap
    def fold(size, is_batched, operands):
        if not size:
            out = derivatives.of_no_members(call, is_batched, (operands,))
            return out, jax.tree.map(lambda _: True, out)
        folded = derivatives.fold_decode(size, is_batched[0], operands)
        blocks = backend.decode.plan(decode.describe(folded, spec))
        out = _foldable(backend, spec, blocks)(folded)
        unfolded = lambda x: x.reshape(size, -1, *x.shape[1:])
        return jax.tree.map(unfolded, out), jax.tree.map(lambda _: True, out)

    return call


@_attend.defjvp
def _no_derivative(backend, spec, primals, tangents):
    out = _attend(backend, spec, *primals)
    return out, undifferentiable.tangents(out, tangents, NO_DERIVATIVE)


NO_DERIVATIVE = (
    "flash_decode has no derivative: use flash_attention(q, k, v, causal=True, q_offset=..., "
    "kv_lengths=...), or jax.lax.stop_gradient on its arguments or its result"
)


# One jit for the whole program: an eager call finds its compiled version instead of tracing anew.
_decode = jax.jit(_attend, static_argnums=(0, 1))
