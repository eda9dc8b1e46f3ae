"""FlashAttention as a flax.nnx module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from ..api import flash_attention
from ..parallel import ContextParallel
from ..typing import (
    AnyArray,
    Array,
    BackendName,
    Bool,
    Differentiable,
    Float,
    Int,
    NumSplits,
    Precision,
    QkNorm,
)
from . import _cached, _heads, _options
from ._cached import Cache

try:
    from flax import nnx
    from flax.core.spmd import get_logical_axis_rules
except ImportError as error:
    raise ImportError(
        "flash_pallas.nn.nnx needs Flax: pip install 'flash_pallas[flax]'."
    ) from error


class FlashAttention(nnx.Module):
    """Multi-head attention: projections, optional QK-norm and RoPE, exact attention, projection.

    Parameters and output are those of `flash_pallas.nn.linen.FlashAttention`. Names and shapes are
    Flax's, so weights of nnx.MultiHeadAttention load: query/key/value kernels
    [features, heads, head_dim], out kernel [heads, head_dim, out_features], and biases. qk_norm
    adds scales [head_dim], named query_norm/key_norm ("rms") or query_ln/key_ln ("layer").
    use_sinks adds sinks [num_heads]. As `out_sharding`, the parameters carry the logical axis names
    embed, heads, kv_heads and kv. They are placed on the mesh at creation only under
    `nnx.logical_axis_rules`, which give these names a meaning. Without rules, no mesh is needed.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        in_kv_features: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        causal: bool = False,
        rope_theta: float | None = None,
        qk_norm: QkNorm | None = None,
        scale: float | None = None,
        window: int | tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        alibi: bool | Sequence[float] = False,
        use_sinks: bool = False,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = False,
        deterministic: bool | None = None,
        use_qkv_bias: bool = True,
        use_out_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = _heads.KERNEL_INIT,
        bias_init: Callable[..., Any] = _heads.BIAS_INIT,
        precision: Precision | None = None,
        backend: BackendName = "auto",
        deterministic_backward: bool = False,
        differentiable: Differentiable = "reverse",
        num_splits: NumSplits = "auto",
        context_parallel: ContextParallel | None = None,
        attention: Callable[..., jax.Array] = flash_attention,
        rngs: nnx.Rngs | jax.Array | int,
    ):
        """Makes the parameters.

        Args:
            num_heads: number of query heads.
            in_features: number of features of the input.
            in_kv_features: number of features of inputs_kv; None means in_features.
            num_kv_heads: number of KV heads, a divisor of num_heads; None means num_heads.
            head_dim: size of a head; None means in_features / num_heads.
            out_features: number of features of the output; None means in_features.
            causal: a query sees the keys up to its own index, whatever `positions` are.
            rope_theta: base of the rotary embedding; None means no rotation.
            qk_norm: "rms" or "layer" normalizes each query and key head before the rotation. None
                does not.
            scale: factor of the logits; None means 1 / sqrt(head_dim).
            window: (left, right): the number of keys that a query sees on either side of its own
                index. None on a side is unbounded; an int is both sides.
            softcap: logits become softcap * tanh(logits / softcap).
            alibi: True for the slopes of `flash_pallas.nn.alibi_slopes`, or one slope per head.
            use_sinks: add a parameter "sinks" [num_heads]: one additional logit per query, without
                a value.
            dropout_rate: fraction of the attention weights that is dropped in training.
            broadcast_dropout: use one dropout mask for all batch entries and heads.
            deterministic: True switches dropout off. Set it here or in the call; the call takes
                precedence.
            use_qkv_bias: add a bias to query, key and value.
            use_out_bias: add a bias to the output.
            dtype: dtype of the computation; None means the promoted dtype of input and parameters.
            param_dtype: dtype of the parameters.
            kernel_init: called on each kernel as a matrix [inputs, outputs].
            bias_init: initializer of the biases.
            precision: precision of float32 matmuls in attention, as in flash_attention.
            backend: as in flash_attention.
            deterministic_backward: make gradients bit-identical from run to run.
            differentiable: "reverse" or "any", as in flash_attention; applies to calls without a
                cache.
            num_splits: number of ranges into which the keys are split in calls with a cache, as in
                flash_decode.
            context_parallel: a `flash_pallas.parallel.ContextParallel`, which names the mesh axis
                that shards the sequences. None means that the sequences are not sharded.
            attention: function that replaces flash_attention. It is called as attention(q, k, v,
                causal=, scale=, deterministic=, backend=), with only those other keywords of
                flash_attention that are in use.
            rngs: an nnx.Rngs, or a key or seed for one. Its `params` stream makes the parameters.
                With a dropout_rate, a fork of its `dropout` stream is kept for the calls.

        Raises:
            ValueError: arguments contradict each other.
        """
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.out_features, self.causal, self.scale = out_features, causal, scale
        self.window, self.softcap = window, softcap
        self.rope_theta, self.qk_norm = rope_theta, qk_norm
        self.dropout_rate, self.broadcast_dropout = dropout_rate, broadcast_dropout
        self.deterministic, self.precision = deterministic, precision
        self.backend, self.deterministic_backward = backend, deterministic_backward
        self.differentiable = differentiable
        self.attention, self.num_splits = attention, num_splits
        self.context_parallel = context_parallel

        heads = _heads.resolve(self, in_features)
        self.slopes = _options.alibi(alibi, num_heads)
        kv_features = in_features if in_kv_features is None else in_kv_features
        query, key_value = (heads.query, heads.dim), (heads.key_value, heads.dim)
        rngs = _as_rngs(rngs)
        make = _ProjectionMaker(dtype, param_dtype, kernel_init, bias_init, rngs)
        self.query = make((in_features,), query, _heads.QUERY_AXES, use_qkv_bias)
        self.key = make((kv_features,), key_value, _heads.KEY_VALUE_AXES, use_qkv_bias)
        self.value = make((kv_features,), key_value, _heads.KEY_VALUE_AXES, use_qkv_bias)
        self.out = make(query, (heads.out_features,), _heads.OUT_AXES, use_out_bias)
        if qk_norm is not None:
            suffix = _heads.NORM_SUFFIX[qk_norm]
            setattr(self, f"query_{suffix}", _Norm(qk_norm, heads.dim, param_dtype))
            setattr(self, f"key_{suffix}", _Norm(qk_norm, heads.dim, param_dtype))
        sinks = _param(jnp.zeros(num_heads, param_dtype), _heads.SINK_AXES) if use_sinks else None
        self.sinks = nnx.data(sinks)
        self.rngs = nnx.data(rngs.dropout.fork() if dropout_rate != 0.0 else None)

    @overload
    def __call__(
        self,
        inputs: AnyArray,
        inputs_kv: AnyArray | None = None,
        *,
        rngs: nnx.Rngs | nnx.RngStream | Array | int | None = None,
        cache: None = None,
        **options: Unpack[_options.CallOptions],
    ) -> Array: ...
    @overload
    def __call__[C: Cache](
        self,
        inputs: AnyArray,
        inputs_kv: None = None,
        *,
        rngs: nnx.Rngs | nnx.RngStream | Array | int | None = None,
        cache: C,
        **options: Unpack[_options.CallOptions],
    ) -> tuple[Array, C]: ...
    def __call__(
        self,
        inputs: Float[AnyArray, "*B T features"],
        inputs_kv: Float[AnyArray, "*B S kv_features"] | None = None,
        *,
        positions: Int[AnyArray, "*#B T"] | None = None,
        kv_positions: Int[AnyArray, "*#B S"] | None = None,
        segment_ids: Int[AnyArray, "*B T"] | None = None,
        kv_segment_ids: Int[AnyArray, "*B S"] | None = None,
        lengths: Int[AnyArray, "*B"] | None = None,
        kv_lengths: Int[AnyArray, "*B"] | None = None,
        mask: Bool[AnyArray, "*#B #N #T #S"] | None = None,
        bias: Float[AnyArray, "*#B #N #T #S"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | int | None = None,
        cache: Cache | None = None,
        new_lengths: Int[AnyArray, " B"] | None = None,
        page_table: Int[AnyArray, "B max_pages"] | None = None,
    ) -> Array | tuple[Array, Cache]:
        """Computes attention of `inputs` over `inputs_kv`, or over itself.

        In self-attention, arguments for the queries (positions, segment_ids, lengths) also apply to
        the keys.

        Args:
            inputs: [*batch, q_length, in_features].
            inputs_kv: [*batch, kv_length, in_kv_features]; None means self-attention.
            positions: positions of the queries for RoPE, [q_length] or [*batch, q_length]; None
                counts from 0. For packed documents, see `flash_pallas.nn.segment_positions`.
            kv_positions: positions of the keys, [kv_length] or [*batch, kv_length].
            segment_ids: int32 [*batch, q_length]: a query sees the keys with its own id. A negative
                id is padding.
            kv_segment_ids: int32 [*batch, kv_length]: ids of the keys.
            lengths: int32 [*batch]: number of queries; later queries see nothing.
            kv_lengths: int32 [*batch]: number of keys; later keys are hidden.
            mask: hides keys where it is False or 0. It broadcasts to
                [*batch, num_heads, q_length, kv_length] and is never expanded.
            bias: floats added to the scaled logits, of the same shapes as mask.
            deterministic: True switches dropout off; needed only with a dropout_rate.
            rngs: an nnx.Rngs, a stream or a key for dropout, used instead of the layer's own.
            cache: a `flash_pallas.KVCache`, or from `flash_pallas.nn` a `RingCache`, or an 8-bit
                `ScaledCache`. The inputs are then any number of new tokens that follow those in the
                cache. Their positions follow too, unless `positions` is given. Requires
                causal=True.
            new_lengths: with a cache, int32 [batch]: number of new tokens. Later ones are padding,
                which is not stored and whose outputs are meaningless.
            page_table: with a cache of pages, int32 [batch, max_pages]; see `append_kv`.

        Returns:
            [*batch, q_length, out_features]. With a cache, the pair of this array and the new
            cache.

        Raises:
            ValueError: arguments contradict each other or the parameters.
        """
        sizes = self.query.kernel.shape[0], self.key.kernel.shape[0]
        _options.check_inputs(inputs, inputs_kv, sizes)
        call = _options.CallArguments(
            positions, kv_positions, segment_ids, kv_segment_ids, lengths, kv_lengths, mask, bias
        )
        new, cross = _cached.New(new_lengths, page_table), inputs_kv is not None
        if not cross:
            inputs_kv = inputs
            call = call.of_self_attention() if cache is None else call
        query, key, value = self.query(inputs), self.key(inputs_kv), self.value(inputs_kv)
        if self.qk_norm is not None:
            suffix = _heads.NORM_SUFFIX[self.qk_norm]
            query = getattr(self, f"query_{suffix}")(query)
            key = getattr(self, f"key_{suffix}")(key)
        sinks = None if self.sinks is None else self.sinks[...]
        dropout_key = self._dropout_key(deterministic, rngs)
        if cache is not None:
            _cached.check(self, cache, call, cross, dropout_key, inputs.shape)
            qkv = _cached.rotated(self, cache, call, (query, key, value))
            attended, cache = _cached.attend(self, cache, qkv, new, self.slopes, sinks)
            return self.out(attended, inputs), cache
        _cached.check_absent(new)
        qkv = query, key, value
        attended = _options.attend(self, call, qkv, self.slopes, sinks, dropout_key)
        return self.out(attended, inputs)

    def set_view(self, deterministic: bool | None = None):
        """Sets `deterministic`; called by `nnx.view`.

        Args:
            deterministic: True switches dropout off; None leaves the setting unchanged.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _dropout_key(self, deterministic, rngs):
        if self.dropout_rate == 0.0:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                "FlashAttention has a dropout_rate: say deterministic=, in the call or before"
            )
        if deterministic:
            return None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("FlashAttention was made without dropout: pass rngs= to the call")
        if isinstance(rngs, nnx.Rngs):
            return rngs.dropout()
        return rngs() if callable(rngs) else _as_rngs(rngs).dropout()


class _Projection(nnx.Module):
    def __init__(self, kernel: nnx.Param, bias: nnx.Param | None, contracted: int, dtype):
        self.kernel, self.bias = kernel, nnx.data(bias)
        self.contracted, self.dtype = contracted, dtype

    def __call__(self, x, sharded_like=None):
        bias = None if self.bias is None else self.bias[...]
        return _heads.project(x, self.kernel[...], bias, self.contracted, self.dtype, sharded_like)


class _ProjectionMaker:
    """Makes projections that differ only in their shapes and axes."""

    def __init__(self, dtype, param_dtype, kernel_init, bias_init, rngs):
        self.dtype, self.param_dtype, self.rngs = dtype, param_dtype, rngs
        self.kernel_init, self.bias_init = kernel_init, bias_init

    def __call__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], axes, use_bias: bool):
        contracted = len(inputs)
        init = _heads.flat_init(self.kernel_init, contracted)
        kernel = init(self.rngs.params(), (*inputs, *outputs), self.param_dtype)
        bias = None
        if use_bias:
            bias = self.bias_init(self.rngs.params(), outputs, self.param_dtype)
            bias = _param(bias, axes[contracted:])
        return _Projection(_param(kernel, axes), bias, contracted, self.dtype)


class _Norm(nnx.Module):
    def __init__(self, kind: str, dim: int, param_dtype):
        self.kind = kind
        self.scale = _param(jnp.ones((dim,), param_dtype), _heads.NORM_AXES)

    def __call__(self, x):
        return _heads.normalize(x, self.scale[...], self.kind)


def _as_rngs(rngs) -> nnx.Rngs:
    """Returns an nnx.Rngs as it is, or makes one of a key of jax.random or a seed."""
    if isinstance(rngs, nnx.Rngs):
        return rngs
    if isinstance(rngs, bool) or not isinstance(rngs, (int, jax.Array)):
        raise TypeError(
            f"rngs must be an nnx.Rngs, a key or a seed, got {type(rngs).__name__}: pass "
            "nnx.Rngs(0)"
        )
    return nnx.Rngs(rngs)


def _param(value, axes: tuple[str, ...]) -> nnx.Param:
    # By default nnx places a named parameter at once and fails where there is no mesh. Without
    # rules the names mean nothing yet, so there is nothing to place.
    eager = nnx.using_eager_sharding() and bool(get_logical_axis_rules())
    return nnx.Param(value, out_sharding=axes, eager_sharding=eager)
