"""Public functions for ragged attention: prompts and decoding steps together, over pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .backends.base import Backend
from .cache import append_packed
from .core import mesh_axes, ragged, softmax, undifferentiable
from .core.problem import Outputs, own_width
from .core.ragged import RaggedOperands, RaggedSpec
from .frontend import arguments as checks
from .frontend import dispatch, validate_ragged
from .frontend.validate import suggested
from .frontend.validate_ragged import RaggedArguments
from .frontend.words import Words
from .transforms import derivatives, sharding
from .typing import AnyArray, Array, BackendName, Float, Int, Integer, NumSplits, Window

WORDS = Words({"k": "k_pages", "v": "v_pages"})


class RaggedOptions(TypedDict, total=False):
    """Arguments of `ragged_paged_attention` that do not affect the type of its result."""

    kv_lengths: Required[Int[AnyArray, " S"]]
    page_table: Required[Int[AnyArray, "S max_pages"]]
    cu_q_lens: Required[Int[AnyArray, " S+1"]]
    num_seqs: Integer | Int[AnyArray, ""] | Int[AnyArray, " 1"] | None
    step_tokens: int
    v_head_dim: int | None
    kv_starts: Integer | Int[AnyArray, "*#S"] | None
    window: Window | None
    softcap: float | None
    sinks: Float[AnyArray, "*#S N"] | None
    alibi_slopes: Float[AnyArray, "*#S N"] | None
    scale: float | None
    num_splits: NumSplits
    shared_prefix: Literal["auto"] | Integer | Int[AnyArray, "*#S"] | None
    k_scale: Float[AnyArray, "*#P K"] | None
    v_scale: Float[AnyArray, "*#P K"] | None
    backend: BackendName


@overload
def ragged_paged_attention(
    q: AnyArray,
    k_pages: AnyArray,
    v_pages: AnyArray | None,
    *,
    new_k: None = None,
    new_v: None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[RaggedOptions],
) -> Array: ...
@overload
def ragged_paged_attention(
    q: AnyArray,
    k_pages: AnyArray,
    v_pages: AnyArray | None,
    *,
    new_k: None = None,
    new_v: None = None,
    return_lse: Literal[True],
    **options: Unpack[RaggedOptions],
) -> tuple[Array, Array]: ...
@overload
def ragged_paged_attention(
    q: AnyArray,
    k_pages: AnyArray,
    v_pages: AnyArray | None,
    *,
    new_k: AnyArray,
    new_v: AnyArray,
    return_lse: Literal[False] = False,
    **options: Unpack[RaggedOptions],
) -> tuple[Array, tuple[Array, Array]]: ...
@overload
def ragged_paged_attention(
    q: AnyArray,
    k_pages: AnyArray,
    v_pages: AnyArray | None,
    *,
    new_k: AnyArray,
    new_v: AnyArray,
    return_lse: Literal[True],
    **options: Unpack[RaggedOptions],
) -> tuple[Array, Array, tuple[Array, Array]]: ...
@overload
def ragged_paged_attention(
    q: AnyArray,
    k_pages: AnyArray,
    v_pages: AnyArray | None,
    *,
    new_k: AnyArray,
    new_v: None = None,
    return_lse: Literal[False] = False,
    **options: Unpack[RaggedOptions],
) -> tuple[Array, tuple[Array, None]]: ...
@overload
def ragged_paged_attention(
    q: AnyArray,
    k_pages: AnyArray,
    v_pages: AnyArray | None,
    *,
    new_k: AnyArray | None = None,
    new_v: AnyArray | None = None,
    return_lse: bool,
    **options: Unpack[RaggedOptions],
) -> Any: ...
@suggested
def ragged_paged_attention(
    q: Float[AnyArray, "tokens N H"],
    k_pages: Float[AnyArray, "P page_size K H"],
    v_pages: Float[AnyArray, "P page_size K Hv"] | None,
    *,
    kv_lengths: Int[AnyArray, " S"],
    page_table: Int[AnyArray, "S max_pages"],
    cu_q_lens: Int[AnyArray, " S+1"],
    num_seqs: Integer | Int[AnyArray, ""] | Int[AnyArray, " 1"] | None = None,
    new_k: Float[AnyArray, "tokens K H"] | None = None,
    new_v: Float[AnyArray, "tokens K Hv"] | None = None,
    step_tokens: int = 1,
    v_head_dim: int | None = None,
    kv_starts: Integer | Int[AnyArray, "*#S"] | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Float[AnyArray, "*#S N"] | None = None,
    alibi_slopes: Float[AnyArray, "*#S N"] | None = None,
    scale: float | None = None,
    num_splits: NumSplits = "auto",
    shared_prefix: Literal["auto"] | Integer | Int[AnyArray, "*#S"] | None = None,
    k_scale: Float[AnyArray, "*#P K"] | None = None,
    v_scale: Float[AnyArray, "*#P K"] | None = None,
    backend: BackendName = "auto",
    return_lse: bool = False,
) -> Array | tuple[Any, ...]:
    """Computes attention of any mix of prompts and decoding steps over a paged KV cache.

    It serves engines with continuous batching. The new tokens of all sequences are packed one
    sequence after the other. A sequence may contribute a prompt, a chunk of a prompt, or a step of
    one or a few tokens. Each new token sees itself and the earlier tokens of its sequence. The
    number of new tokens per sequence is data, so one compiled program serves every mix with the
    same padded sizes.

    A sequence with at most `step_tokens` new tokens runs as in `flash_decode`, with its keys split
    into ranges. A sequence with more runs as a chunk of a prompt, in tiles of queries. The function
    works under jit and vmap, and has no gradient. A query that sees no key returns zeros.

    Args:
        q: queries [tokens, N, H]. Rows that belong to no sequence are padding. They may hold any
            values, and return zeros and a log-sum-exp of -inf.
        k_pages: keys [P, page_size, K, H], where page_size is a multiple of 16 from 16 to 256 and N
            is a multiple of K. Both kinds of pages have q's dtype, or both are float8_e4m3fn or
            int8 (see `k_scale`).
        v_pages: values [P, page_size, K, Hv]. If None, the values are the first `v_head_dim`
            columns of the keys, as in multi-head latent attention, and are read once for both
            purposes.
        kv_lengths: int32 [S]: number of keys of each sequence, including its new tokens. The last
            query of a sequence belongs to its last key. A length beyond the room still determines
            the positions of queries, but raises an error if its value is known.
        page_table: int32 [S, max_pages]: key j of sequence s is row j % page_size of page
            page_table[s, j // page_size], as in `flash_decode`. `check_pages` checks it.
        cu_q_lens: int32 [S + 1]: sequence s has the rows of q from cu_q_lens[s] up to, but not
            including, cu_q_lens[s + 1]; there may be none. It begins with 0 and does not decrease.
        num_seqs: number of sequences in use, an int or int32 [] or [1]. What the arrays say about
            the others is ignored. None means S.
        new_k: keys [tokens, K, H] of the queries' tokens, which are first written into the pages,
            as by `append_ragged_kv`. None means that they have been written already.
        new_v: values [tokens, K, Hv] of these tokens; given if both new_k and v_pages are given.
        step_tokens: largest number of queries of a sequence that runs as a decoding step, 1 to 64,
            static. Speculative decoding needs more than 1.
        v_head_dim: if v_pages is None, the number of columns of the keys that are the values; None
            means H.
        kv_starts: the first key of each sequence, int32 [S] or a scalar. Earlier keys may hold any
            values. None means 0.
        window: (left, right), or one int for both: the query at position i sees the keys from
            i - left on. None means all of them. The window or its left side may be an int32 scalar
            or [S], which may be traced, as in `flash_decode`.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [N] or [S, N]: one additional score per query, without a value.
        alibi_slopes: [N] or [S, N]: slope * |i - j| is subtracted from scores.
        scale: factor of the scores, a Python number; None is 1 / sqrt(H).
        num_splits: number of ranges into which the keys of steps are split, as in `flash_decode`.
        shared_prefix: "auto", or the number of keys that sequences share: leading pages that
            several steps have in common are read once, as in `flash_decode`. Requires step_tokens
            up to 32.
        k_scale: scale of pages in float8_e4m3fn or int8: a key is k * k_scale. It has shape [K] or
            [P, K]. None means 1.
        v_scale: scale of the values. Without v_pages, the values have the scale of the keys.
        backend: "auto" takes the fastest backend that can run the call. A name takes that backend,
            or raises.
        return_lse: also return the log-sum-exp.

    Returns:
        o [tokens, N, Hv] in q's dtype. With `return_lse`, the pair of o and lse [N, tokens] in
        float32 (float64 for float64), the natural logarithm. With `new_k`, the pair
        (k_pages, v_pages) with the new tokens is added at the end. The pages are updated in place
        if they are donated, as in `jax.jit(step, donate_argnums=...)`.

    Raises:
        TypeError: an argument has the wrong kind or dtype.
        ValueError: shapes do not match, or a value is out of range. Examples are known cu_q_lens
            that decrease, and known lengths or starts beyond the room.
        UnsupportedByBackend: the named backend cannot run this call; the message gives the reason.
        NotImplementedError: no backend supports the dtype, or a derivative is taken.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import ragged_paged_attention
        >>> pages = jnp.ones((8, 16, 2, 64))
        >>> places = {
        ...     "kv_lengths": jnp.array([40, 21]),  # a prompt of 40 tokens, and a step
        ...     "page_table": jnp.array([[0, 1, 2], [4, 3, 0]]),
        ...     "cu_q_lens": jnp.array([0, 40, 41]),
        ... }
        >>> ragged_paged_attention(jnp.ones((48, 8, 64)), pages, pages, **places).shape
        (48, 8, 64)
    """
    arguments = RaggedArguments(
        kv_lengths=kv_lengths,
        page_table=page_table,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        step_tokens=step_tokens,
        v_head_dim=v_head_dim,
        kv_starts=kv_starts,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        scale=scale,
        num_splits=num_splits,
        shared_prefix=shared_prefix,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    with_lse = checks.flag("return_lse", return_lse)
    chosen, spec, operands = prepared(q, k_pages, v_pages, arguments, backend)
    results: tuple[Any, ...] = ()
    if new_k is not None or new_v is not None:
        operands = _with_new(operands, arguments, (k_pages, v_pages), (new_k, new_v))
        results = ((operands.k, operands.v),)
    o, lse = attended(chosen, spec, operands)
    results = (o, lse, *results) if with_lse else (o, *results)
    return results if len(results) > 1 else o


def prepared(
    q, k_pages, v_pages, arguments: RaggedArguments, backend: str
) -> tuple[Backend, RaggedSpec, RaggedOperands]:
    """Returns a checked call: what `attended` takes. Raises as `ragged_paged_attention` does."""
    with WORDS:
        spec, operands = validate_ragged.canonicalize(q, k_pages, v_pages, arguments)
    problem = ragged.describe(operands, spec)
    chosen, _ = dispatch.plan(problem, backend, (q, k_pages, v_pages))
    return chosen, spec, operands


def _with_new(operands: RaggedOperands, a: RaggedArguments, pages, new) -> RaggedOperands:
    """Returns the operands with pages that the new keys and values are written into."""
    if new[0] is None:
        raise ValueError(
            "new_v is given and new_k is None: pass both to have them written into the pages, or "
            "neither"
        )
    if jnp.shape(new[0])[:1] != operands.q.shape[:1]:
        raise ValueError(
            f"new_k has shape {jnp.shape(new[0])} and q {operands.q.shape}: they must be of the "
            "same tokens, [tokens, heads, head_dim]"
        )
    names = {"k": ("new_k", "k_pages"), "v": ("new_v", "v_pages")}
    k, v = append_packed(pages, new, a, names)
    return operands._replace(k=k, v=v)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(backend: Backend, spec: RaggedSpec, operands: RaggedOperands):
    problem = ragged.describe(operands, spec)
    if problem.is_empty:
        return problem.empty_result()
    operands = mesh_axes.spread(operands, mesh_axes.varying(operands))
    unit = spec.decode.attention.unit(operands.alibi_slopes is not None)
    if mesh_axes.mesh_of(operands[:3]) is None:
        out = _fitted(backend, spec, operands)
    else:
        call: Callable = sharding.OnShards(partial(_packed, backend, spec), Outputs)
        out = jax.tree.map(lambda x: x[0], call(operands._replace(q=operands.q[None])))
    return out.o, softmax.natural(out.lse_log2, out.shift, unit)


def _packed(backend: Backend, spec: RaggedSpec, operands: RaggedOperands) -> Outputs:
    """Computes a shard, whose q and results have an axis of 1 in front, as of a batch."""
    out = _fitted(backend, spec, operands._replace(q=operands.q[0]))
    return jax.tree.map(lambda x: x[None], out)


def _fitted(backend: Backend, spec: RaggedSpec, operands: RaggedOperands) -> Outputs:
    """Computes Outputs with blocks that fit these operands: the whole ones, or those of a shard.

    Members of a vmap run one after the other: each has sequences and lengths of its own.
    """
    with own_width(operands):
        blocks = backend.ragged.plan(ragged.describe(operands, spec))

    @custom_vmap
    def call(operands):
        with own_width(operands):
            return backend.ragged.run(spec, blocks, operands)

    @call.def_vmap
    def each(size, is_batched, operands):
        if size:
            names = [name for name in operands._fields if getattr(is_batched[0], name)]
            member = lambda own: call(operands._replace(**own))
            out = lax.map(member, {name: getattr(operands, name) for name in names})
        else:
            out = derivatives.of_no_members(call, is_batched, (operands,))
        return out, jax.tree.map(lambda _: True, out)

    with own_width(operands):
        return call(operands)


@_attend.defjvp
def _no_derivative(backend, spec, primals, tangents):
    out = _attend(backend, spec, *primals)
    return out, undifferentiable.tangents(out, tangents, NO_DERIVATIVE)


NO_DERIVATIVE = (
    "ragged_paged_attention has no derivative: use flash_attention_varlen, or "
    "jax.lax.stop_gradient on its arguments or its result"
)

# One jit for the whole program: an eager call finds its compiled version instead of tracing anew.
attended = jax.jit(_attend, static_argnums=(0, 1))
