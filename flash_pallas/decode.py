"""Public functions of decoding: attention of a few new tokens to a KV cache."""

from __future__ import annotations

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
    """Arguments of `flash_decode` that have no influence on the type of its result."""

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

    For generation: a step of one token, or the proposals of speculative decoding. Append their keys
    and values first (`append_kv`); the last query is then the last key. Queries are causal, among
    themselves too, or see of each other what `draft_mask` says. The keys may be read in several
    ranges at once, each with an output and a log-sum-exp of its own, which are then merged
    (split-KV, as in https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    The result is the same in every run, and for every number of ranges up to rounding. Works under
    jit and vmap; has no gradient. A query that sees no key returns zeros.

    Args:
        q: queries [B, T, N, H], T from 1 to 64; bfloat16, float16, float32 or float64.
        k: keys in q's dtype: [B, S, K, H], or with `page_table` pages [P, page_size, K, H], where
            page_size is a multiple of 16 from 16 to 256. Or both in float8_e4m3fn or int8, see
            `k_scale`. N is a multiple of K: query head n reads KV head
            n // (N // K), which is never repeated in memory (GQA, grouped-query attention).
        v: values [B, S, K, Hv], or pages [P, page_size, K, Hv], in q's dtype. None: the values are
            the first `v_head_dim` columns of k, as in multi-head latent attention, and are read
            once for both.
        v_head_dim: number of columns of k that are the values, 1 to H, where v is None; None is H.
        kv_lengths: int32 [B] or a scalar: number of keys of each sequence, its new tokens included;
            may be traced. Keys beyond it may hold anything. None is S; pages need it. Where new
            tokens found no room, it counts them all the same, as positions come from it; there are
            keys as far as the room goes. Such lengths are an error where they are computed.
        kv_starts: int32 [B] or a scalar: the first key of each sequence, where caches are padded on
            the left; may be traced. Keys before it may hold anything, and blocks of them are not
            loaded. None is 0. Positions and lengths count from key 0 of
            the cache all the same. A sequence that starts at its length or later has no keys.
        q_offset: int, or int32 [B] or a scalar: position of query 0, where key 0 has position 0.
            Query t sees keys up to q_offset + t. None is kv_lengths - T.
        window: (left, right), or an int for both: the query at position i sees the keys from
            i - left on; None is all of them. As in `flash_attention` with causal=True, nothing to
            the right is seen. Keys outside are not loaded. An int32 scalar or [B] may be traced, so
            that layers with different windows share one compiled program; one that is at least S
            hides nothing. An int is faster: the number of splits then suits it.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [N] or [B, N]: a further score of every query, without a value.
        alibi_slopes: [N] or [B, N]: slope * |i - j| is subtracted from scores.
        scale: multiplies the scores, a Python number; None is 1 / sqrt(H).
        num_splits: number of ranges in which the keys are read, 1 to 128. "auto" is 1 on xla, and
            on hopper as many as keep the SMs busy if the sequences are as long as the cache.
        page_table: int32 [B, max_pages]: key j of sequence b is row j % page_size of page
            page_table[b, j // page_size]. Pages may be in any order, shared and repeated. Entries
            beyond a sequence's length are not used. Ids out of range are clipped, so that nothing
            is read that does not belong to the cache; `check_pages` finds them.
        kv_blocks: int32 [B, 1 or K, M]: the blocks of keys that the query of each sequence reads,
            one list for all KV heads or one for each. Block i has kv_block_size keys from key
            i * kv_block_size on. No other is loaded. Numbers may be in any order and repeated; -1,
            or a block beyond the length, is nothing. For T = 1, without `q_offset`, `window`,
            `kv_starts` and `alibi_slopes`. Sparse attention chooses them: MoBA, NSA, Quest.
        kv_block_size: keys of a block of `kv_blocks`, a multiple of 16 from 16 to 256 that divides
            S; with `page_table` a multiple of page_size, which is the default.
        shared_prefix: "auto" reads leading pages that several sequences have in common, as those of
            a system prompt, once for all of them: sequences whose page tables begin with the same
            page are a group, and share the pages at the front in which all of them agree. An int32
            [B] or a scalar instead says how many keys that is, 0 for none, and spares the
            comparison of page tables; members of a group are then trusted to agree. Whole pages
            before the first new token are shared. It pays where a prefix is long and many have it;
            results are those without, up to rounding. For a `page_table` and T up to 32, without
            `q_offset`, `window`, `kv_starts`, `alibi_slopes` and `kv_blocks`. None shares nothing.
        draft_mask: bool [T, T] or [B, T, T], for trees of drafts in speculative decoding: the query
            of new token t sees new token u, which is key kv_lengths - T + u, only where
            draft_mask[b, t, u]. In a tree these are t and its ancestors. Keys before the new tokens
            are visible as ever. A window and ALiBi take a draft to be at position kv_lengths - T +
            depth, where depth is the number of other new tokens that it sees, whether or not it
            sees itself; rotate its query and key by the same. `q_offset` must be None.
        k_scale: scale of a cache in float8_e4m3fn or int8: a key is k * k_scale. One number per
            head [K], or per sequence and head [B, K], or with `page_table` per page and head
            [P, K]; None is 1. `append_kv` divides by the same numbers.
        v_scale: scale of the values, of the same shapes; without v they have that of the keys.
        backend: "auto" takes the fastest that can run the call; "hopper", "portable" or "xla" takes
            this one or raises.
        return_lse: also return the log-sum-exp.

    Returns:
        o [B, T, N, Hv] in q's dtype. Sums are float32 inside (float64 for float64). With
        `return_lse` the pair of o and lse [B, N, T] in float32, the natural logarithm; -inf for a
        query that sees no key (its sink, where there are sinks).

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: shapes that do not fit together, or a value out of range, such as a v_head_dim
            above H, or another than that of v; lengths or starts that are computed and negative or
            beyond the room.
        UnsupportedByBackend: the backend asked for by name cannot run this call, and why.
        NotImplementedError: a dtype that no backend takes; a derivative.

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
    problem = _described(spec, operands)
    plan = dispatch.plan(problem, backend, (q, k, v))
    o, lse = _decode(plan.backend, spec, operands)
    return (o, lse) if with_lse else o


def _described(spec: DecodeSpec, operands: DecodeOperands) -> DecodeProblem:
    """Returns the problem that a backend gets: with pages in place of `kv_blocks`."""
    if operands.kv_blocks is None:
        return decode.describe(operands, spec)
    found = {}

    def shapes(operands):
        found["spec"], operands = kv_blocks_.as_pages(spec, operands)
        return operands

    plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # however it is sharded
    operands = jax.eval_shape(shapes, jax.tree.map(plain, operands))
    return decode.describe(operands, found["spec"])


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(backend: Backend, spec: DecodeSpec, operands: DecodeOperands):
    if 0 in (operands.q.shape[0], operands.k.shape[1]):
        return decode.of_nothing(operands, spec)
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
        blocks = backend.decode_blocks(decode.describe(operands, spec))
        return _foldable(backend, spec, blocks)(operands)


def _foldable(backend: Backend, spec: DecodeSpec, blocks: Any):
    """Returns operands -> Outputs; vmap folds its axis into the batch, and blocks fit that."""

    @custom_vmap
    def call(operands):
        with own_width(operands):
            return backend.decode(spec, blocks, operands)

    @call.def_vmap
    def fold(size, is_batched, operands):
        if not size:
            out = derivatives.of_no_members(call, is_batched, (operands,))
            return out, jax.tree.map(lambda _: True, out)
        folded = derivatives.fold_decode(size, is_batched[0], operands)
        blocks = backend.decode_blocks(decode.describe(folded, spec))
        out = _foldable(backend, spec, blocks)(folded)
        apart = lambda x: x.reshape(size, -1, *x.shape[1:])
        return jax.tree.map(apart, out), jax.tree.map(lambda _: True, out)

    return call


@_attend.defjvp
def _no_derivative(backend, spec, primals, given):
    out = _attend(backend, spec, *primals)
    return out, undifferentiable.tangents(out, given, NO_DERIVATIVE)


NO_DERIVATIVE = (
    "flash_decode has no derivative: use flash_attention(q, k, v, causal=True, q_offset=..., "
    "kv_lengths=...), or jax.lax.stop_gradient on its arguments or its result"
)


# One jit for the whole program: an eager call finds its compiled version instead of tracing anew.
_decode = jax.jit(_attend, static_argnums=(0, 1))
