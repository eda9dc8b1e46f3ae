"""Public attention functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp

from .core.block_mask import BlockMask
from .frontend import arguments as checks
from .frontend import dispatch, validate
from .frontend.arguments import Arguments
from .frontend.validate import same_arguments, suggested
from .frontend.words import LONG_NAMES, Words
from .transforms import any_order, derivatives
from .typing import (
    AnyArray,
    Array,
    BackendName,
    Bool,
    Differentiable,
    EmptyRows,
    Float,
    Int,
    Integer,
    MaskMod,
    MeshAxes,
    Precision,
    ScoreMod,
    Window,
)

# What jax.nn calls the arguments of `flash_attention`.
JAX_WORDS = Words(
    {
        **LONG_NAMES,
        "causal": "is_causal",
        "window": "local_window_size",
        "q_lengths": "query_seq_lengths",
        "kv_lengths": "key_value_seq_lengths",
        "backend=": "implementation=",
        "backend is": "implementation is",
        "default backend is": "default backend is",  # which is JAX's
    }
)
# One jit for the whole program: an eager call finds its compiled version instead of tracing anew.
_ATTEND = {
    "reverse": jax.jit(derivatives.attend, static_argnums=(0, 1, 2)),
    "any": jax.jit(any_order.attend, static_argnums=(0, 1, 2)),
}


@suggested
def flash_attention(
    q: Float[AnyArray, "*B T N H"],
    k: Float[AnyArray, "*B S K H"],
    v: Float[AnyArray, "*B S K Hv"],
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    q_offset: Integer | Int[AnyArray, "*B"] | None = None,
    q_positions: Int[AnyArray, "*B T"] | None = None,
    kv_positions: Int[AnyArray, "*B S"] | None = None,
    q_segment_ids: Int[AnyArray, "*B T"] | None = None,
    kv_segment_ids: Int[AnyArray, "*B S"] | None = None,
    q_lengths: Integer | Int[AnyArray, "*B"] | None = None,
    kv_lengths: Integer | Int[AnyArray, "*B"] | None = None,
    bias: Float[AnyArray, "*#B #N #T #S"] | None = None,
    mask: Bool[AnyArray, "*#B #N #T #S"] | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[AnyArray, "*#B N"] | None = None,
    sinks: Float[AnyArray, "*#B N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Integer | AnyArray | None = None,
    broadcast_dropout: bool = False,
    shard_axes: tuple[MeshAxes, MeshAxes] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    empty_rows: EmptyRows = "zero",
    deterministic: bool = False,
    precision: Precision | None = None,
    differentiable: Differentiable = "reverse",
    backend: BackendName = "auto",
    blocks: Mapping[str, Any] | None = None,
) -> Float[Array, "*B T N Hv"]:
    """Computes exact attention, softmax(scale * q @ k^T) @ v, in memory linear in T and S.

    FlashAttention-2 (https://arxiv.org/abs/2307.08691). By default it is differentiable once, in
    reverse mode; `differentiable` lifts that limit. It works under jit, vmap, scan, checkpoint (see
    `save_attention`) and shard_map. Arrays may be sharded over batch and heads; each device then
    computes its own shard.

    A score is modified in this order: scale, + bias, ALiBi, softcap, score_mod. Masking comes last.
    A query that sees no key returns zeros, has zero gradients and never causes a NaN.
    `jax.nn.dot_product_attention` returns the mean of `v` there; `empty_rows` does the same.

    Integers may have any integer dtype. A known value that does not fit int32 raises an error. A
    traced one is clipped to the range of int32, so all traced ids from 2**31 - 1 on count as one
    document.

    Args:
        q: queries [*B, T, N, H] in bfloat16, float16, float32 or float64. There may be any number
            of leading batch dimensions, including none. Numpy arrays are accepted.
        k: keys [*B, S, K, H] in q's dtype. N is a multiple of K: query head n reads KV head
            n // (N // K), and KV heads are never repeated in memory (GQA, grouped-query attention).
        v: values [*B, S, K, Hv] in q's dtype.
        causal: the query at position i sees the keys at positions up to and including i.
        window: (left, right): the query at position i sees the keys from i - left to i + right,
            both included. None means unbounded, and a single int applies to both sides. Keys
            outside the window are never loaded. A side may also be an integer array, either one
            number or one per batch entry [*B]. It may be traced, so that one compiled program
            serves every window. A traced negative number counts as 0.
        scale: factor of the scores, a Python number; None is 1 / sqrt(H).
        q_offset: position of query 0, where key 0 has position 0. It is an int, or an integer array
            [] or [*B], which may be traced and may change without recompiling. The default None
            means 0: the first query is aligned with the first key, as in `jax.nn`. S - T aligns the
            last query with the last key, as FlashAttention does. A single causal query of several
            keys must pass q_offset. If several causal queries with more keys than queries do not
            pass it, they start at position 0, and a warning is logged. Positions beyond 2**30 in
            either direction raise an error; those in a jax array are clipped instead.
        q_positions: integers [*B, T]: the position of every query, which replaces its index plus
            q_offset. causal, window, ALiBi and the i of mods compare positions, which may be in any
            order and may repeat. Dropout still counts indices. No array of [T, S] is formed. A
            block of keys is skipped if its range of positions lies outside what a block of queries
            sees. Positions are clipped to 2**30 in either direction.
        kv_positions: integers [*B, S]: the position of every key (the j of mods). None means its
            index.
        q_segment_ids: integers [*B, T]. A query sees the keys with its own id. A negative id marks
            padding, which neither sees nor is seen, and may hold any values. Ids need not be sorted
            or contiguous, but blocks of keys are skipped only where they are.
        kv_segment_ids: integers [*B, S]: the ids of the keys. Must be given together with
            q_segment_ids.
        q_lengths: number of queries, as integers [*B] or one integer. Later queries see nothing and
            may hold any values.
        kv_lengths: number of keys, as integers [*B] or one integer. Later keys are hidden and may
            hold any values. Both kinds of length raise an error if their values are known and
            negative or beyond the arrays; otherwise they are clipped.
        bias: floats [*B, N, T, S] that are added to the scaled scores; each axis is full or 1.
            float64 is cast to float32 unless q is float64. A bias of -inf hides the key, even with
            a softcap or a score_mod. The gradient has the bias's own shape. The kernel itself sums
            it over broadcast axes, but not over axes of vmap: a bias shared by the members of a
            vmap is repeated if its gradient is needed.
        mask: bool of the same shapes as bias; True means visible.
        softcap: scores become softcap * tanh(scores / softcap).
        alibi_slopes: [N] or [*B, N]: slope * |i - j| is subtracted from scores
            (https://arxiv.org/abs/2108.12409). Differentiable.
        sinks: [N] or [*B, N]: one additional score per query, without a value
            (https://arxiv.org/abs/2309.17453). It counts in the log-sum-exp, and is the log-sum-exp
            of a query that sees no key. Differentiable. A sink of -inf has no effect; one of +inf
            counts as 1e30, which leaves no weight for the keys.
        dropout_rate: fraction of the weights that is dropped, in [0, 1), rounded to a multiple of
            2^-15. The other weights are divided by the fraction that is kept.
        dropout_seed: an int, an integer array or a key of jax.random; may be traced. The dropout
            mask depends only on the seed, the batch entry, the head and the positions of query and
            key, and not on backend, tiles or vmap. The type of a number makes no difference: 3,
            np.int64(3) and a traced jnp.uint32(3) are the same seed.
        broadcast_dropout: use one dropout mask for all batch entries and heads.
        shard_axes: inside `jax.shard_map`, the mesh axes that shard the first batch dimension and
            the heads. Each is a name, a tuple of names or None. Dropout and the b and n of mods
            then use indices of the whole arrays.
        score_mod: (score, b, n, i, j) -> score, elementwise JAX on scalars: the score, the index in
            the flattened batch, the query head, and the positions of query and key. It may capture
            arrays indexed by b and n, which are differentiable. 64-bit numbers are converted to 32
            bits unless q is float64.
        mask_mod: (b, n, i, j) -> bool, written like a score_mod; True means visible. It may also
            index arrays of integers or bools, such as document ids, by b and i or by b and j.
        block_mask: a `BlockMask`. Its empty blocks cost nothing, forward and backward. All other
            masks of the call apply as well. If it was made from a mask_mod, the i and j of that
            function count from 0, so q_offset and positions must be left out.
        empty_rows: what a query that sees no key returns. "zero" returns zeros. "mean" returns the
            mean of all S values, including hidden values and padding, as in jax.nn and keras; a NaN
            or infinity in padding counts as 0. The log-sum-exp is -inf in both cases. Queries that
            are padding return zeros. With `sinks`, a query sees its sink and therefore returns
            zeros.
        deterministic: make gradients bit-identical from run to run, at some cost in speed.
        precision: precision of float32 matmuls, as a name or a jax.lax.Precision. "highest" is full
            float32, which hopper refuses. None means "high". On hopper, "high" is three matmuls of
            bfloat16 parts, each accurate to 2^-15 (2^-18 in the root mean square); on xla it is
            full float32. "default" is the same as "high" on hopper; on xla it is XLA's default
            (TF32 on GPUs).
        differentiable: "reverse" allows one derivative in reverse mode, as jax.grad and jax.vjp
            compute it. "any" adds forward mode (jax.jvp, jax.jacfwd) and derivatives of every order
            (jax.hessian, gradients of gradients). The gradient itself runs the same kernels with
            both. hopper and portable also have kernels for tangents, and hopper has one for most
            Hessian-vector products. Everything else runs in blockwise jnp, which is slower, with
            memory linear in T and S. `explain` reports which one runs. Attention is linear in v,
            but `jax.linear_transpose` has no rule for it: use `jax.vjp`, or with "any" transpose
            the function that `jax.linearize` returns.
        backend: "auto" takes the fastest backend that can run the call. "hopper", "cudnn",
            "portable" or "xla" takes that backend, or raises. "auto" chooses for the device that
            holds the arrays, or for `jax.default_device`. Under jit for a device other than the
            default one, pass "xla".
        blocks: tile sizes by field name, to use instead of the tuned ones; see `explain`.

    Returns:
        o [*B, T, N, Hv] in q's dtype. Sums are accumulated in float32 (float64 for float64).

    Raises:
        TypeError: an argument has the wrong kind or dtype.
        ValueError: shapes do not match, a value is out of range, or a sequence axis is sharded.
        UnsupportedByBackend: the named backend cannot run this call; the message gives the reason.
        NotImplementedError: no backend supports the dtype, or a second derivative is taken without
            `differentiable="any"`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flash_pallas import flash_attention
        >>> q = jnp.ones((2, 128, 8, 64), jnp.bfloat16)
        >>> k = v = jnp.ones((2, 128, 2, 64), jnp.bfloat16)
        >>> flash_attention(q, k, v, causal=True, window=(32, 0)).shape
        (2, 128, 8, 64)
    """
    arguments = Arguments(
        causal=causal,
        window=window,
        scale=scale,
        q_offset=q_offset,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        bias=bias,
        mask=mask,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        broadcast_dropout=broadcast_dropout,
        shard_axes=shard_axes,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        empty_rows=empty_rows,
        deterministic=deterministic,
        precision=precision,
        differentiable=differentiable,
    )
    return run(q, k, v, backend, blocks, arguments)[0]


@same_arguments(flash_attention)
def flash_attention_with_lse(
    q, k, v, *, backend="auto", blocks=None, **options
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T"]]:
    """Computes `flash_attention`, and the log-sum-exp (LSE) of the scores of every query.

    FlashAttention-2, section 3.1.1 (https://arxiv.org/abs/2307.08691). The LSE lets you merge
    attention over parts of the keys into attention over all of them. Both outputs are
    differentiable.

    Args:
        q: as in `flash_attention`, as are all the others.
        k: keys.
        v: values.
        backend: name of the backend.
        blocks: tile sizes.
        **options: every other argument of `flash_attention`.

    Returns:
        o [*B, T, N, Hv] in q's dtype, and lse [*B, N, T] in float32 (float64 for float64). lse is
        the natural logarithm, and -inf for a query that sees no key. With `sinks`, it is the sink
        for such a query and for one that a negative id marks as padding, but -inf for a query
        beyond `q_lengths`.

    Raises:
        Exception: the same exceptions as `flash_attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import flash_attention_with_lse
        >>> x = jnp.ones((16, 4, 64))
        >>> [y.shape for y in flash_attention_with_lse(x, x, x)]
        [(16, 4, 64), (4, 16)]
    """
    return run(q, k, v, backend, blocks, Arguments(**options))[:2]


@same_arguments(flash_attention)
def flash_attention_with_max_logit(
    q, k, v, *, backend="auto", blocks=None, **options
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T"], Float[Array, "*B N T"]]:
    """Computes `flash_attention_with_lse`, and the largest visible logit of every query.

    QK-clip (Kimi K2, https://arxiv.org/abs/2507.20534, section 2.1) needs the maximum of max_logit
    over queries and batch, as in `max_logit.max((0, 2))`. The kernel computes the largest logit of
    each query anyway.

    Args:
        q: as in `flash_attention`, as are all the others.
        k: keys.
        v: values.
        backend: name of the backend.
        blocks: tile sizes.
        **options: every other argument of `flash_attention`.

    Returns:
        o and lse as from `flash_attention_with_lse`, and max_logit [*B, N, T] in the dtype of lse:
        the largest logit after bias, softcap and score_mod, without sinks. It is -inf for a query
        that sees no key, and has no gradient.

    Raises:
        Exception: the same exceptions as `flash_attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import flash_attention_with_max_logit
        >>> x = jnp.ones((2, 16, 4, 64))
        >>> print(flash_attention_with_max_logit(x, x, x)[2].max((0, 2)))
        [8. 8. 8. 8.]
    """
    return run(q, k, v, backend, blocks, Arguments(**options, max_logit=True))


def run(q, k, v, backend, blocks, arguments: Arguments) -> tuple[Any, Any, Any]:
    """Computes (o, lse, max_logit or None) of one call."""
    override = validate.check_blocks(blocks)
    call = validate.canonicalize(q, k, v, arguments)
    if call.problem.is_empty:
        dispatch.plan_nothing(call.problem, backend)
        return call.empty_result()
    chosen, tiles = dispatch.plan(call.problem, backend, (q, k, v), override)
    if arguments.within is None:  # flash_attention_varlen has no block_mask
        dispatch.tell_of_cost(call.problem)
        if checks.is_unplaced(arguments):
            dispatch.tell_of_place(call.problem)
    attend = _ATTEND[call.spec.differentiable]
    try:
        outputs = attend(chosen, call.spec, tiles, call.operands)
    except TypeError as error:
        if "forward-mode autodiff" not in str(error):
            raise
        # JAX's own message names neither the function nor a way out.
        raise TypeError(
            "flash_attention has no forward-mode derivative (jax.jvp, jacfwd, hessian) where "
            "differentiable is 'reverse': pass differentiable='any'. Or use jax.grad, jax.vjp or "
            "jax.jacrev, or flash_pallas.reference.attention, which is plain jnp"
        ) from error
    o, *statistics = outputs
    return call.unfold(call.with_empty_rows(o, statistics[0]), *statistics)


class JaxOptions(TypedDict, total=False):
    """Arguments of `dot_product_attention` that have no influence on the type of its result."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Integer | Int[AnyArray, "*B"] | None
    key_value_seq_lengths: Integer | Int[AnyArray, "*B"] | None
    local_window_size: int | tuple[int, int] | None
    implementation: BackendName | None


@overload
def dot_product_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[JaxOptions],
) -> Array: ...
@overload
def dot_product_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[JaxOptions],
) -> tuple[Array, Array]: ...
@overload
def dot_product_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    *,
    return_residual: bool,
    **options: Unpack[JaxOptions],
) -> Array | tuple[Array, Array]: ...
@suggested
def dot_product_attention(
    query: Float[AnyArray, "*B T N H"],
    key: Float[AnyArray, "*B S K H"],
    value: Float[AnyArray, "*B S K Hv"],
    bias: Float[AnyArray, "*#B #N #T #S"] | None = None,
    mask: Bool[AnyArray, "*#B #N #T #S"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Integer | Int[AnyArray, "*B"] | None = None,
    key_value_seq_lengths: Integer | Int[AnyArray, "*B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: BackendName | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes `flash_attention` with the signature of `jax.nn.dot_product_attention`.

    FlashAttention-2 (https://arxiv.org/abs/2307.08691). It differs from `jax.nn` as follows:

    - A query that sees no key has a log-sum-exp of -inf, not of about -2.4e38. Its output is the
      mean of `value`, as in `jax.nn`; queries beyond `query_seq_lengths` return zeros.
    - Only one derivative in reverse mode is supported. `jax.nn` also has forward mode and higher
      orders; so does `flash_attention` with `differentiable="any"`.
    - `scale` must be static. For a traced scale, which `jax.nn` accepts, multiply `query` by it.
    - Matmuls of float32 arrays do not use TF32; see `precision` of `flash_attention`.
    - Array lengths must be known while tracing, so there is no export with symbolic lengths.
    - A sharded sequence axis is refused instead of being gathered.
    - `implementation` has other choices. "cudnn" runs cuDNN through `jax.nn`, and only for calls
      where it keeps the rules above.

    As in `jax.nn`, `is_causal` counts queries and keys from the start of both, so a single query
    with a longer cache sees only key 0. For decoding, see `q_offset` of `flash_attention`.

    Args:
        query: [*B, T, N, H], or [T, N, H].
        key: [*B, S, K, H]; N is a multiple of K.
        value: [*B, S, K, Hv]; unlike in `jax.nn`, Hv may differ from H.
        bias: added to the scaled scores. Its shape is [*B, N, T, S], where each axis is full or 1
            and leading axes may be omitted. With [T, N, H] arrays it may also have a batch axis of
            1, as in `jax.nn`.
        mask: bool of the same shapes as bias; True means visible.
        scale: factor of the scores, a Python number; None is 1 / sqrt(H).
        is_causal: query i sees the keys up to and including i.
        query_seq_lengths: number of queries, [B] or one for all; later queries return zeros.
        key_value_seq_lengths: number of keys, [B] or one for all; later keys are hidden.
        local_window_size: (left, right), both included, or one int for both.
        implementation: None, or `backend` of `flash_attention`: "auto", "hopper", "cudnn",
            "portable" or "xla".
        return_residual: also return the log-sum-exp, in `key`'s dtype and without a gradient, as
            `jax.nn` does. `flash_attention_with_lse` returns it in float32 and differentiable.

    Returns:
        o [*B, T, N, Hv] in query's dtype. With `return_residual`, the pair of o and the natural
        log-sum-exp [*B, T, N] in key's dtype; heads are last, as in `jax.nn`.

    Raises:
        Exception: the same exceptions as `flash_attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas import dot_product_attention
        >>> x = jnp.ones((2, 16, 4, 64))
        >>> dot_product_attention(x, x, x, is_causal=True).shape
        (2, 16, 4, 64)
    """
    shapes = [validate.as_array(*x).shape for x in (("query", query), ("key", key))]
    rank = len(shapes[0])
    q_len, kv_len = (shape[-3] if len(shape) > 2 else 0 for shape in shapes)
    with JAX_WORDS:
        if 3 <= rank == len(shapes[1]):
            for name, x in (("bias", bias), ("mask", mask)):
                if x is not None and checks.is_array(x) and jnp.shape(x)[:-rank] != (1,):
                    full = *shapes[0][:-3], shapes[0][-2], q_len, kv_len
                    checks.check_broadcasts(name, x, full)
        o, lse = flash_attention_with_lse(
            query,
            key,
            value,
            bias=validate.of_rank(bias, rank),
            mask=validate.of_rank(mask, rank),
            causal=is_causal,
            window=local_window_size,
            scale=scale,
            q_offset=0,
            q_lengths=validate.lengths_of_rank(query_seq_lengths, rank - 3, q_len),
            kv_lengths=validate.lengths_of_rank(key_value_seq_lengths, rank - 3, kv_len),
            empty_rows="mean",
            backend="auto" if implementation is None else implementation,
        )
    if not return_residual:
        return o
    return o, jax.lax.stop_gradient(jnp.swapaxes(lse, -1, -2)).astype(o.dtype)
