"""FlashAttention as a flax.linen module."""

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
    from flax import linen as nn
except ImportError as error:
    raise ImportError(
        "flash_pallas.nn.linen needs Flax: pip install 'flash_pallas[flax]'."
    ) from error


class FlashAttention(nn.Module):
    """Multi-head attention: projections, optional QK-norm and RoPE, exact attention, projection.

    Parameters and output are those of `flash_pallas.nn.nnx.FlashAttention`. Names and shapes are
    Flax's, so weights of MultiHeadDotProductAttention load: query/key/value kernels
    [features, heads, head_dim], out kernel [heads, head_dim, out_features], and biases. qk_norm
    adds scales [head_dim], named query_norm/key_norm ("rms") or query_ln/key_ln ("layer").
    use_sinks adds sinks [num_heads]. The parameters carry the logical axis names embed, heads,
    kv_heads and kv.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of KV heads, a divisor of num_heads; None means num_heads.
        head_dim: size of a head; None means features / num_heads.
        out_features: number of features of the output; None means that of the input.
        causal: a query sees the keys up to its own index, whatever `positions` are.
        rope_theta: base of the rotary embedding; None means no rotation.
        qk_norm: "rms" or "layer" normalizes each query and key head before the rotation. None does
            not.
        scale: factor of the logits; None means 1 / sqrt(head_dim).
        window: (left, right): the number of keys that a query sees on either side of its own index.
            None on a side is unbounded; an int is both sides.
        softcap: logits become softcap * tanh(logits / softcap).
        alibi: True for the slopes of `flash_pallas.nn.alibi_slopes`, or one slope per head.
        use_sinks: add a parameter "sinks" [num_heads]: one additional logit per query, without a
            value.
        dropout_rate: fraction of the attention weights that is dropped in training.
        broadcast_dropout: use one dropout mask for all batch entries and heads.
        deterministic: True switches dropout off. Set it here or in the call, not in both.
        use_qkv_bias: add a bias to query, key and value.
        use_out_bias: add a bias to the output.
        dtype: dtype of the computation; None means the promoted dtype of input and parameters.
        param_dtype: dtype of the parameters.
        kernel_init: called on each kernel as a matrix [inputs, outputs].
        bias_init: initializer of the biases.
        precision: precision of float32 matmuls in attention, as in flash_attention.
        backend: as in flash_attention.
        deterministic_backward: make gradients bit-identical from run to run.
        differentiable: "reverse" or "any", as in flash_attention; applies to calls without a cache.
        num_splits: number of ranges into which the keys are split in calls with a cache, as in
            flash_decode.
        context_parallel: a `flash_pallas.parallel.ContextParallel`, which names the mesh axis that
            shards the sequences. None means that the sequences are not sharded.
        attention: function that replaces flash_attention. It is called as attention(q, k, v,
            causal=, scale=, deterministic=, backend=), with only those other keywords of
            flash_attention that are in use.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    causal: bool = False
    rope_theta: float | None = None
    qk_norm: QkNorm | None = None
    scale: float | None = None
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool | Sequence[float] = False
    use_sinks: bool = False
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    deterministic: bool | None = None
    use_qkv_bias: bool = True
    use_out_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = _heads.KERNEL_INIT
    bias_init: Callable[..., Any] = _heads.BIAS_INIT
    precision: Precision | None = None
    backend: BackendName = "auto"
    deterministic_backward: bool = False
    differentiable: Differentiable = "reverse"
    num_splits: NumSplits = "auto"
    context_parallel: ContextParallel | None = None
    attention: Callable[..., jax.Array] = flash_attention

    @overload
    def __call__(
        self,
        inputs: AnyArray,
        inputs_kv: AnyArray | None = None,
        *,
        cache: None = None,
        **options: Unpack[_options.CallOptions],
    ) -> Array: ...
    @overload
    def __call__[C: Cache](
        self,
        inputs: AnyArray,
        inputs_kv: None = None,
        *,
        cache: C,
        **options: Unpack[_options.CallOptions],
    ) -> tuple[Array, C]: ...
    @nn.compact
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
        cache: Cache | None = None,
        new_lengths: Int[AnyArray, " B"] | None = None,
        page_table: Int[AnyArray, "B max_pages"] | None = None,
    ) -> Array | tuple[Array, Cache]:
        """Computes attention of `inputs` over `inputs_kv`, or over itself.

        In self-attention, arguments for the queries (positions, segment_ids, lengths) also apply to
        the keys.

        Args:
            inputs: [*batch, q_length, features].
            inputs_kv: [*batch, kv_length, kv_features]; None means self-attention.
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
            ValueError: fields or arguments contradict each other.
        """
        _options.check_inputs(inputs, inputs_kv)
        heads = _heads.resolve(self, inputs.shape[-1])
        slopes = _options.alibi(self.alibi, self.num_heads)
        call = _options.CallArguments(
            positions, kv_positions, segment_ids, kv_segment_ids, lengths, kv_lengths, mask, bias
        )
        new, cross = _cached.New(new_lengths, page_table), inputs_kv is not None
        if not cross:
            inputs_kv = inputs
            call = call.of_self_attention() if cache is None else call
        key_value = (heads.key_value, heads.dim)
        query = self._project("query", (heads.query, heads.dim), _heads.QUERY_AXES)(inputs)
        key = self._project("key", key_value, _heads.KEY_VALUE_AXES)(inputs_kv)
        value = self._project("value", key_value, _heads.KEY_VALUE_AXES)(inputs_kv)
        if self.qk_norm is not None:
            suffix = _heads.NORM_SUFFIX[self.qk_norm]
            query = _Norm(self.qk_norm, self.param_dtype, name=f"query_{suffix}")(query)
            key = _Norm(self.qk_norm, self.param_dtype, name=f"key_{suffix}")(key)
        sinks, dropout_key = self._sinks(), self._dropout_key(deterministic)
        out = self._project("out", (heads.out_features,), _heads.OUT_AXES, contracted=2)
        if cache is not None:
            _cached.check(self, cache, call, cross, dropout_key, inputs.shape)
            qkv = _cached.rotated(self, cache, call, (query, key, value))
            attended, cache = _cached.attend(self, cache, qkv, new, slopes, sinks)
            return out(attended, inputs), cache
        _cached.check_absent(new)
        qkv = query, key, value
        attended = _options.attend(self, call, qkv, slopes, sinks, dropout_key)
        return out(attended, inputs)

    def _sinks(self):
        if not self.use_sinks:
            return None
        init = nn.with_logical_partitioning(nn.initializers.zeros_init(), _heads.SINK_AXES)
        return self.param("sinks", init, (self.num_heads,), self.param_dtype)

    def _dropout_key(self, deterministic):
        if self.dropout_rate == 0.0:
            return None
        if nn.merge_param("deterministic", self.deterministic, deterministic):
            return None
        return self.make_rng("dropout")

    def _project(self, name: str, outputs: tuple[int, ...], axes, contracted: int = 1):
        return _Projection(
            outputs=outputs,
            axes=axes,
            contracted=contracted,
            use_bias=self.use_out_bias if name == "out" else self.use_qkv_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            name=name,
        )


class _Projection(nn.Module):
    outputs: tuple[int, ...]
    axes: tuple[str, ...]
    contracted: int
    use_bias: bool
    dtype: Any
    param_dtype: Any
    kernel_init: Callable[..., Any]
    bias_init: Callable[..., Any]

    @nn.compact
    def __call__(self, x, sharded_like=None):
        kernel_init = nn.with_logical_partitioning(
            _heads.flat_init(self.kernel_init, self.contracted), self.axes
        )
        shape = (*x.shape[-self.contracted :], *self.outputs)
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias_init = nn.with_logical_partitioning(self.bias_init, self.axes[self.contracted :])
            bias = self.param("bias", bias_init, self.outputs, self.param_dtype)
        return _heads.project(x, kernel, bias, self.contracted, self.dtype, sharded_like)


class _Norm(nn.Module):
    kind: str
    param_dtype: Any

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones_init(), _heads.NORM_AXES)
        scale = self.param("scale", init, x.shape[-1:], self.param_dtype)
        return _heads.normalize(x, scale, self.kind)
