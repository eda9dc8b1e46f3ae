"""Public functions of attention."""

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

    FlashAttention-2 (https://arxiv.org/abs/2307.08691). Differentiable once, in reverse mode, or as
    `differentiable` says; works under jit, vmap, scan, checkpoint (see `save_attention`) and
    shard_map, and on arrays that are sharded over batch and heads, each shard where it lies.

    The order on a score: scale, + bias, ALiBi, softcap, score_mod; then whatever hides it.
    A query that sees no key returns zeros, has zero gradients and never makes a NaN; for the mean
    of `v`, which `jax.nn.dot_product_attention` returns there, see `empty_rows`.

    Integers may have any integer dtype. A known value that does not fit int32 raises; a traced one
    is clipped to it, so ids from 2**31 - 1 on are then one document.

    Args:
        q: queries [*B, T, N, H], bfloat16, float16, float32 or float64. Any number of leading batch
            dimensions, none included. Numpy arrays are taken too.
        k: keys [*B, S, K, H] in q's dtype. N is a multiple of K: query head n reads KV head
            n // (N // K), which is never repeated in memory (GQA, grouped-query attention).
        v: values [*B, S, K, Hv] in q's dtype.
        causal: the query at position i sees the keys at positions up to and including i.
        window: (left, right): the query at position i sees the keys at i - left to i + right, both
            included; None is unbounded, an int is both sides. Keys outside are never loaded. A side
            may be an integer array, one number or one per batch entry [*B], which may be traced:
            then one compiled program serves every window. A traced negative number counts as 0.
        scale: multiplies the scores, a Python number; None is 1 / sqrt(H).
        q_offset: position of query 0, where key 0 has position 0. The default None means 0, which
            aligns the first query with the first key as `jax.nn` does; S - T aligns the last with
            the last as FlashAttention does. A single causal query of several keys must pass it;
            several of more keys that do not are placed at 0, with a warning in the log. An int, or
            integers [*B] (or one), which may be traced and change without recompiling. Positions
            beyond 2**30 either way raise; those of a jax array are clipped to it.
        q_positions: integers [*B, T]: position of every query, in place of its index and q_offset.
            causal, window, ALiBi and the i of mods compare positions, which may be in any order and
            repeat; dropout still counts indices. No array of [T, S] is made: a block of keys is
            skipped if its range of positions lies outside what a block of queries sees. Clipped to
            2**30 either way.
        kv_positions: integers [*B, S]: the same for keys (the j of mods); None is their index.
        q_segment_ids: integers [*B, T]. A query sees the keys with its own id; negative ids are
            padding, which sees and is seen by nothing and may hold anything. Ids need be neither
            sorted nor contiguous, but blocks of keys are skipped only where they are.
        kv_segment_ids: integers [*B, S], the same for keys; given together with q_segment_ids.
        q_lengths: integers [*B] or one: queries from there on see nothing and may hold anything.
        kv_lengths: integers [*B] or one: keys from there on are hidden and may hold anything. Both
            are an error where they are computed and negative or beyond the arrays, else clipped.
        bias: added to the scaled scores, any float dtype, [*B, N, T, S], where each axis is full or
            1; float64 is cast to float32 unless q is float64. Where it is -inf it hides the key,
            under a softcap and a score_mod too. Its gradient has its own shape: the kernel itself
            sums over broadcast axes, but not over those of vmap: a bias that members share is
            repeated if its gradient is wanted.
        mask: bool of the same shapes, True is visible.
        softcap: scores become softcap * tanh(scores / softcap).
        alibi_slopes: [N] or [*B, N]: slope * |i - j| is subtracted from scores
            (https://arxiv.org/abs/2108.12409). Differentiable.
        sinks: [N] or [*B, N]: a further score of every query (https://arxiv.org/abs/2309.17453),
            without a value. It counts in the log-sum-exp, which equals it if no key is seen.
            Differentiable. A sink of -inf is none; one of +inf counts as 1e30, which leaves no
            weight to the keys.
        dropout_rate: share of the weights that is dropped, in [0, 1), rounded to 2^-15 parts; the
            others are divided by the share that is kept.
        dropout_seed: an int, integer array or key of jax.random; may be traced. The dropout mask
            depends on it, batch entry, head and positions alone: not on backend, tiles or vmap, nor
            on the type of a number: 3, np.int64(3) and a traced jnp.uint32(3) are one seed.
        broadcast_dropout: share the dropout mask between all batch entries and heads.
        shard_axes: inside `jax.shard_map`, the mesh axes that shard the first batch dimension and
            the heads, each a name, a tuple or None: with them, dropout and the b and n of mods
            count in the whole arrays.
        score_mod: (score, b, n, i, j) -> score, elementwise JAX on scalars: entry of the flattened
            batch, query head, positions. It may capture arrays, differentiable, indexed by b and n.
            Numbers of 64 bits become such of 32, unless q is float64.
        mask_mod: (b, n, i, j) -> bool, of the same kind; True is visible. It may also index arrays
            of integers or bools by b and i, or by b and j, as ids of documents.
        block_mask: a `BlockMask`: blocks that it leaves empty cost nothing, forward and backward.
            Everything else that hides keys does so besides. The i and j of a mask_mod that it was
            made from count from 0, so with one q_offset and positions must be left out.
        empty_rows: what a query that sees no key returns: "zero", or "mean", the mean of all S
            values, hidden ones and padding included, as in jax.nn and keras; a NaN or infinity in
            padding counts as 0. Its log-sum-exp is -inf in any case. Queries that are padding
            return zeros. With `sinks` a query sees its sink, and returns zeros.
        deterministic: gradients must be bit-identical from run to run, at some cost in speed.
        precision: precision of float32 matmuls, a name or a jax.lax.Precision. "highest" is full
            float32, which hopper refuses. "high", which None means, is three matmuls of bfloat16
            parts on hopper, each right to 2^-15 (2^-18 in the root mean square), and full float32
            on xla. "default" is the same as "high" on hopper, and what XLA does (TF32 on GPUs) on
            xla.
        differentiable: "reverse", once, as jax.grad and jax.vjp do; or "any", which has forward
            mode (jax.jvp, jax.jacfwd) and derivatives of every order (jax.hessian, gradients of
            gradients) besides. With "any" the gradient runs the same kernels. hopper and portable
            have kernels for tangents too, and hopper for most Hessian-vector products; the rest is
            blockwise jnp: slower, in memory linear in T and S. `explain` says which. Attention is
            linear in v, but `jax.linear_transpose` has no rule for it: take `jax.vjp`, or with
            "any" transpose the function that `jax.linearize` returns.
        backend: "auto" takes the fastest that can run the call; "hopper", "cudnn", "portable" or
            "xla" takes this one or raises. "auto" chooses for the device that the arrays were put
            on, or `jax.default_device`; for other devices than the default ones, under jit say
            "xla".
        blocks: tile sizes to use instead of the tuned ones, by field name; see `explain`.

    Returns:
        o [*B, T, N, Hv] in q's dtype. Sums are float32 inside (float64 for float64).

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: shapes that do not fit, a value out of range, a sharded sequence axis.
        UnsupportedByBackend: the backend asked for by name cannot run this call, and why.
        NotImplementedError: a dtype that no backend takes; a second derivative.

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

    FlashAttention-2, section 3.1.1 (https://arxiv.org/abs/2307.08691). With it, attention over
    parts of the keys can be merged into attention over all. Both outputs are differentiable.

    Args:
        q: as in `flash_attention`, as are all the others.
        k: keys.
        v: values.
        backend: name of the implementation.
        blocks: tile sizes.
        **options: every other argument of `flash_attention`.

    Returns:
        o [*B, T, N, Hv] in q's dtype, and lse [*B, N, T] in float32 (float64 for float64), the
        natural logarithm; -inf for a query that sees no key. With `sinks`, such a query and one
        that a negative id makes padding have their sink; one beyond `q_lengths` has -inf.

    Raises:
        TypeError: and others, as `flash_attention` lists them.

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

    For QK-clip (Kimi K2, https://arxiv.org/abs/2507.20534, section 2.1), which wants its maximum
    over queries and batch, as in `max_logit.max((0, 2))`. The kernel has the number anyway.

    Args:
        q: as in `flash_attention`, as are all the others.
        k: keys.
        v: values.
        backend: name of the implementation.
        blocks: tile sizes.
        **options: every other argument of `flash_attention`.

    Returns:
        o and lse of `flash_attention_with_lse`, and max_logit [*B, N, T] in the dtype of lse, after
        bias, softcap and score_mod, sinks left out; -inf for a query that sees no key. It is not
        differentiated.

    Raises:
        TypeError: and others, as `flash_attention` lists them.

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
    if call.is_empty:
        dispatch.plan_nothing(call.problem, backend)
        return call.empty_result()
    plan = dispatch.plan(call.problem, backend, (q, k, v), override)
    if arguments.within is None:  # flash_attention_varlen has no block_mask
        dispatch.tell_of_cost(call.problem)
        if checks.is_unplaced(arguments):
            dispatch.tell_of_place(call.problem)
    attend = _ATTEND[call.spec.differentiable]
    try:
        found = attend(plan.backend, call.spec, plan.blocks, call.operands)
    except TypeError as error:
        if "forward-mode autodiff" not in str(error):
            raise
        # JAX's own words do not say whose custom_vjp it is, nor what to do.
        raise TypeError(
            "flash_attention has no forward-mode derivative (jax.jvp, jacfwd, hessian) where "
            "differentiable is 'reverse': pass differentiable='any'. Or use jax.grad, jax.vjp or "
            "jax.jacrev, or flash_pallas.reference.attention, which is plain jnp"
        ) from error
    o, *others = found
    return call.unfold(call.with_empty_rows(o, others[0]), *others)


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

    FlashAttention-2 (https://arxiv.org/abs/2307.08691). Differences from `jax.nn`:

    - a query that sees no key has a log-sum-exp of -inf, not of about -2.4e38. It returns the mean
      of `value` as in `jax.nn`, and beyond `query_seq_lengths` zeros;
    - derivatives are one reverse pass; `jax.nn` has forward mode and higher orders, as
      `flash_attention` has with `differentiable="any"`;
    - `scale` is static, and `jax.nn` takes a traced one: multiply `query` by it;
    - matmuls of float32 arrays are not TF32, see `precision` of `flash_attention`;
    - lengths are known while tracing: there is no export with symbolic shapes;
    - a sequence axis that is sharded is refused, and no device gathers it;
    - `implementation` names other choices; "cudnn" runs cuDNN through `jax.nn`, where it keeps what
      is said here.

    Like `jax.nn`, `is_causal` counts queries and keys from the start of both: a single query of a
    longer cache sees key 0 alone. For decoding see `q_offset` of `flash_attention`.

    Args:
        query: [*B, T, N, H], or [T, N, H].
        key: [*B, S, K, H]; N is a multiple of K.
        value: [*B, S, K, Hv]; unlike in `jax.nn`, Hv may differ from H.
        bias: added to the scaled scores; [*B, N, T, S], each axis full or 1; leading axes may be
            left out. With [T, N, H] arrays it may also have a batch of 1, as in `jax.nn`.
        mask: bool of the same shapes, True is visible.
        scale: multiplies the scores, a Python number; None is 1 / sqrt(H).
        is_causal: query i sees the keys up to and including i.
        query_seq_lengths: [B], or one for all; queries from there on return zeros.
        key_value_seq_lengths: [B], or one for all; keys from there on are hidden.
        local_window_size: (left, right), both included, or an int for both.
        implementation: None, or `backend` of `flash_attention`: "auto", "hopper", "cudnn",
            "portable" or "xla".
        return_residual: also return the log-sum-exp, without a gradient and in `key`'s dtype as
            `jax.nn` does; `flash_attention_with_lse` has it in float32 and differentiable.

    Returns:
        o [*B, T, N, Hv] in query's dtype; with `return_residual` the pair of o and the natural
        log-sum-exp [*B, T, N] in key's dtype, heads last as in `jax.nn`.

    Raises:
        TypeError: and others, as `flash_attention` lists them.

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
