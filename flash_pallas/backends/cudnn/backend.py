"""cuDNN as a backend: what it takes, and what its results need to keep this package's promises.

It is called through `jax.nn.dot_product_attention(implementation="cudnn")`, which is public;
`residuals` makes a forward and a backward of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core import padding, softmax
from ...core.problem import (
    AttentionSpec,
    Cotangents,
    Operands,
    Outputs,
    Problem,
    describe,
)
from ...devices import capability_here, takes_first
from .. import base
from . import empty_rows, residuals

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# Older ones have errors: a gradient of S that 128 does not divide reads beyond its arrays in a CUDA
# graph (notes of cudnn-frontend 1.16.0), 9.10.0 and 9.10.1 have a wrong backward, as cudnn-frontend
# says, and some lack compute capability 10.3 (9.11) or the gradient of a bias per batch entry.
OLDEST = 91501
# The widest heads by compute capability. Beyond 128 the backward needs cuDNN 9.23 on 10.x
# (TransformerEngine #3056), and jax.nn asks for 9.0.
WIDEST = {"9.0": 256}
WIDEST_ELSEWHERE = 128
# Where cuDNN has a gradient of a bias: not below 9.0 (openxla/xla #12199).
BIAS_ON = ("9.0", "10.0", "10.3")
# A bias below these counts as these: cuDNN is wrong where it subtracts two that are larger, says
# jax, whose own masks are these numbers.
LOWEST = {DTYPES[0]: -(2.0**41), DTYPES[1]: -(2.0**15)}
MOST_ELEMENTS, MOST_ENTRIES = 2**31 - 1, 2**16 - 1  # 32-bit offsets; CTAs along an axis of a grid

# Fields of AttentionSpec that are honoured whatever they are, or have a rule of their own below.
_HONOURED = ("scale", "mask", "q_offset", "precision")
_TAKEN = frozenset({"q_offset", "q_lengths", "kv_lengths", "bias", "mask"})
_SPELLED = {
    "q_segments": "segment ids",
    "kv_segments": "segment ids",
    "q_first": "mask by positions or by a window that is data",
    "q_last": "mask by positions or by a window that is data",
    "block_shape": "block_mask",
    "alibi_slopes": "ALiBi",
    "dropout_keys": "dropout of this package, which cuDNN would draw otherwise",
    "dropout_rate": "dropout of this package, which cuDNN would draw otherwise",
    "max_logit": "largest logit",
    "deterministic": "deterministic=True, as its gradients may differ in their last bits",
}


@dataclasses.dataclass(frozen=True)
class CudnnBackend:
    """Backend that calls cuDNN through jax.nn.

    Attributes:
        capability: compute capability to answer for; None asks the device.
        version: version of cuDNN to answer for, as 91900 is 9.19.0; None asks the installed one.
    """

    capability: str | None = None
    version: int | None = None
    name = "cudnn"
    partitionable = True
    jvp = base.Refused("has no forward mode")
    jvp_of_vjp = base.Refused("has no tangents of gradients")
    decode = base.Refused("does not decode: jax.nn.dot_product_attention takes no cache")
    ragged = base.Refused("reads no pages: jax.nn.dot_product_attention takes no cache")

    @property
    def capability_there(self) -> str:
        """Compute capability of the GPU."""
        return self.capability or capability_here()

    @property
    def preferred(self) -> bool:
        """True on compute capability 10.x, where kernels of this package use mma.sync."""
        return takes_first(self.capability_there) == self.name

    @property
    def note(self) -> str | None:
        """Name of what runs, with the installed version, and on 10.x why it is preferred."""
        installed = _version() if self.version is None else None
        number = "" if installed is None else f" {_spelled(installed)}"
        why = ", as this package's kernels here use mma.sync" if self.preferred else ""
        return f"cuDNN{number} through jax.nn.dot_product_attention{why}"

    @property
    def attention(self) -> CudnnAttention:
        """Attention by cuDNN."""
        return CudnnAttention(self)

    @property
    def vjp(self) -> CudnnVjp:
        """Gradients by cuDNN."""
        return CudnnVjp(self)

    @property
    def device_refusal(self) -> str | None:
        """The reason why the GPU or the software there does not run cuDNN's attention, or None."""
        capability = self.capability_there
        if self.capability is None and jax.default_backend() != "gpu":
            return (
                "needs an NVIDIA GPU of compute capability 8.0 or above; "
                f"the default backend is {jax.default_backend()}"
            )
        if not capability.replace(".", "").isdigit() or float(capability) < 8.0:
            return f"needs an NVIDIA GPU of compute capability 8.0 or above, not {capability}"
        version = self.version or _version()
        if version is None:
            return (
                f"needs cuDNN {_spelled(OLDEST)} or later, and found none that jax's CUDA plugin "
                "has loaded: install jax[cuda13]"
            )
        if version < OLDEST:
            return (
                f"needs cuDNN {_spelled(OLDEST)} or later, not {_spelled(version)}, whose "
                "attention has known errors: pip install -U nvidia-cudnn-cu13"
            )
        if self.capability is None and not residuals.known():
            return (
                f"knows jax.nn.dot_product_attention of jax 0.11 and 0.12, not of {jax.__version__}"
            )
        return None


class _Operation:
    def __init__(self, backend: CudnnBackend):
        self.backend = backend


class CudnnAttention(_Operation, base.Attention):
    """Attention by cuDNN's forward."""

    def not_automatic(self, problem: Problem) -> str | None:
        """Returns None on compute capability 10.x without a bias; else why "auto" passes it over.

        cuDNN's backward takes P from one float32 log-sum-exp: with a bias of -1e7 that has no
        digits left for the scores, and gradients of rows that it hides whole are wrong.
        """
        if problem.bias_shape is not None:
            return (
                "'auto' leaves a bias to others, as gradients lose digits next to numbers such as "
                "-1e7: ask for it by name"
            )
        if self.backend.preferred:
            return None
        return "'auto' takes it on compute capability 10.x alone: ask for it by name"

    def refusal(self, problem: Problem) -> str | None:
        """Returns why cuDNN, or jax.nn, cannot run `problem` as promised here, or None."""
        if reason := self.backend.device_refusal:
            return reason
        capability = self.backend.capability_there
        reasons = (*_of_shapes(problem, capability), *_of_features(problem))
        return next(iter((*reasons, *_of_masks(problem), *_of_bias(problem, capability))), None)

    def plan(self, problem: Problem, override: dict[str, Any] | None = None) -> None:
        """Returns None, as cuDNN chooses by itself.

        Raises:
            ValueError: the caller's tile sizes, which nothing would read.
        """
        if override:
            raise ValueError(
                f"blocks has fields {sorted(override)}: backend 'cudnn' has no tile sizes, as "
                "cuDNN chooses its own; leave blocks out"
            )

    def run(self, spec: AttentionSpec, blocks: None, operands: Operands) -> Outputs:
        """Computes attention; a query without keys gets 0, where cuDNN gives a mean or a NaN."""
        sees = empty_rows.seeing(spec, operands)
        o, lse = residuals.forward(*_call(spec, _prepared(operands)))
        lse_log2 = lse * softmax.LOG2E
        if sees is not None:
            lse_log2 = jnp.where(sees, lse_log2, softmax.EMPTY_ROW)
        return Outputs(empty_rows.cleared(sees, o), lse_log2)


class CudnnVjp(_Operation, base.Vjp):
    """Gradients by cuDNN's backward, which runs once more for a dlse."""

    reads_output = True

    def run(
        self,
        spec: AttentionSpec,
        blocks: None,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Operands:
        """Computes the gradients.

        The weights of a query without keys are 0, as its log-sum-exp is EMPTY_ROW. cuDNN computes
        the gradient of a bias whether it is wanted or not.
        """
        prepared = _prepared(operands)
        attention, arrays = _call(spec, prepared)
        lse = softmax.LN2 * cotangents.lse_log2
        if cotangents.shift is not None:
            lse += cotangents.shift * describe(operands, spec).unit
        sees = empty_rows.seeing(spec, operands)
        do = padding.cleared_queries(operands, empty_rows.cleared(sees, cotangents.do))
        grads = residuals.backward(attention, arrays, (cotangents.o, lse), do)
        if cotangents.dlse is not None:
            seen = cotangents.lse_log2 < softmax.EMPTY_ROW / 2
            dlse = jnp.where(seen, padding.cleared_rows(operands, cotangents.dlse), 0.0)
            arrays, do = _of_lse(arrays, dlse)
            dq, dk, _, *rest = residuals.backward(attention, arrays, (jnp.zeros_like(do), lse), do)
            added = (dq, dk, None, *rest)
            grads = [g if x is None else _sum(g, x) for g, x in zip(grads, added, strict=True)]
        dq, dk, dv, *dbias = grads
        bias = None
        if "bias" in wanted:
            bias = _of_shared(_visible(spec, dbias[0]), operands.bias)
        # cuDNN need not write what lies beyond a length.
        return padding.cleared(operands, Operands(dq, dk, dv, bias=bias))


def _of_shapes(problem: Problem, capability: str) -> Iterator[str]:
    """Yields what cuDNN has against dtypes and sizes."""
    p = problem
    if p.dtype not in DTYPES:
        yield f"takes bfloat16 and float16, not {p.dtype}: cast q, k and v"
    widest = WIDEST.get(capability, WIDEST_ELSEWHERE)
    if p.head_dim > widest or p.head_dim % 8:
        yield (
            f"takes head dims that are multiples of 8, up to {widest} on compute capability "
            f"{capability}, not {p.head_dim}"
        )
    if p.v_head_dim != p.head_dim:
        yield f"takes values as wide as keys, not {p.v_head_dim} and {p.head_dim}"
    if p.q_len % 2 or p.kv_len % 2:
        # check_is_flash_attention of jax 0.11 and 0.12 asks this of every gradient.
        yield (
            f"takes even numbers of queries and of keys, not {p.q_len} and {p.kv_len}: pad them, "
            "with q_lengths and kv_lengths"
        )
    if max(p.batch, p.q_heads) > MOST_ENTRIES:
        yield f"takes at most {MOST_ENTRIES} batch entries and heads, not {p.batch} and {p.q_heads}"
    rows = max(p.q_len * p.q_heads, p.kv_len * p.kv_heads)
    shapes = (p.bias_shape or (0,)), (p.mask_shape or (0,)), (p.batch, rows, p.head_dim)
    if max(map(math.prod, shapes)) > MOST_ELEMENTS:
        yield f"takes arrays of at most {MOST_ELEMENTS} elements: split the batch"


def _of_features(problem: Problem) -> Iterator[str]:
    """Yields arguments that cuDNN has no counterpart of, new ones of this package included."""
    spec = problem.spec
    unread = [
        field.name
        for field in dataclasses.fields(spec)
        if field.name not in _HONOURED and getattr(spec, field.name) != field.default
    ]
    for name in (*unread, *sorted(problem.features - _TAKEN)):
        yield f"takes no {_SPELLED.get(name, name)}"


def _of_masks(problem: Problem) -> Iterator[str]:
    """Yields what cuDNN, or jax.nn, has against masks by position, and lengths with others."""
    spec, features = problem.spec, problem.features
    left, right = spec.mask.left, spec.mask.right
    lengths = {"q_lengths", "kv_lengths"} & features
    if spec.mask.is_trivial:
        pass
    elif right != 0:
        yield (
            "takes a window that ends at the query, as in causal=True or window=(left, 0), not "
            f"window=({left}, {right})"
        )
    elif spec.q_offset or "q_offset" in features:
        yield "aligns the first query with the first key, so it takes no q_offset with a mask"
    elif problem.q_len > problem.kv_len:
        yield (
            "takes a causal mask or a window with at most as many queries as keys, not "
            f"{problem.q_len} and {problem.kv_len}"
        )
    if left is not None and (lengths or {"bias", "mask"} & features):
        yield "takes a window without lengths, bias or mask"
    if lengths and {"bias", "mask"} & features:
        yield "takes lengths without a bias or a mask: hide padding in the mask"


def _of_bias(problem: Problem, capability: str) -> Iterator[str]:
    """Yields what cuDNN has against a bias or a mask, which reaches it as a bias."""
    if {"bias", "mask"} <= problem.features:
        yield "takes a bias or a mask, not both: add -inf to the bias where the mask is False"
    for name, shape in (("bias", problem.bias_shape), ("mask", problem.mask_shape)):
        if shape is None:
            continue
        if shape[2:] != (problem.q_len, problem.kv_len):
            yield (
                f"takes a {name} of every query and key, not {name} {list(shape)}, which would "
                "have to be written out; kv_lengths hides the keys of padding"
            )
        if shape[0] not in (1, problem.batch):
            yield f"takes a {name} with 1 or {problem.batch} batch entries, not {shape[0]}"
    if problem.bias_shape is None:
        return
    if capability not in BIAS_ON:
        yield f"takes a bias on compute capabilities {', '.join(BIAS_ON)}, not {capability}"
    if problem.bias_shape[1] != problem.q_heads:
        yield f"takes a bias of every head, as its gradient is, not bias {list(problem.bias_shape)}"
    if problem.bias_dtype != problem.dtype:
        # The gradient of a float32 bias is NaN: jax #32242.
        yield f"takes a bias in q's dtype, {problem.dtype}, not {problem.bias_dtype}: cast it"


def _call(spec: AttentionSpec, prepared: Operands):
    """Returns jax.nn's function, and its arrays: q, k, v and a bias if there is one.

    Args:
        spec: static parameters.
        prepared: operands that `_prepared` made.
    """
    causal, left = spec.mask.right == 0, spec.mask.left
    if left is not None and left >= prepared.q.shape[1] - 1:
        left = None  # no key lies that far back
    attention = partial(
        jax.nn.dot_product_attention,
        mask=prepared.mask,
        scale=float(spec.scale),
        # Without is_causal, jax.nn forgets the right end of a window (L, 0): jax #39576.
        is_causal=causal,
        local_window_size=None if left is None else (left, 0),
        query_seq_lengths=prepared.q_lengths,
        key_value_seq_lengths=prepared.kv_lengths,
        implementation="cudnn",
    )
    return attention, prepared[:3] if prepared.bias is None else (*prepared[:3], prepared.bias)


def _prepared(operands: Operands) -> Operands:
    """Returns operands as jax.nn wants them: finite padding, lengths >= 1, biases of all entries.

    Where a length is 0, the one key that cuDNN sees is cleared padding: O is 0, and so are the
    gradients. A bias or a mask that several batch entries share, which only `jax.vmap` makes, is
    repeated; one that all share is not.
    """
    batch, q_len = operands.q.shape[:2]
    within = lambda lengths, most: None if lengths is None else jnp.clip(lengths, 1, most)
    repeated = lambda x: (
        x if x is None or len(x) in (1, batch) else jnp.repeat(x, batch // len(x), axis=0)
    )
    bias = operands.bias
    if bias is not None:
        bias = jnp.maximum(bias, jnp.asarray(LOWEST[jnp.dtype(bias.dtype)], bias.dtype))
    return padding.cleared(operands)._replace(
        bias=repeated(bias),
        mask=repeated(operands.mask),
        q_lengths=within(operands.q_lengths, q_len),
        kv_lengths=within(operands.kv_lengths, operands.k.shape[1]),
    )


def _of_lse(arrays, dlse):
    """Returns (arrays, do) whose gradients are those of the log-sum-exp, if O is said to be 0.

    The gradient of lse with respect to the scores is P, so it adds P * dlse to P * (dP - delta):
    what values of 1 in one column give, and dlse in that column of do, rounded as do is.
    """
    q, k, v, *rest = arrays
    do = padding.pad_axis(jnp.swapaxes(dlse, 1, 2)[..., None].astype(q.dtype), 3, v.shape[3])
    ones = padding.pad_axis(jnp.ones_like(v[..., :1]), 3, v.shape[3])
    return (q, k, ones, *rest), do


def _sum(x, y):
    """Adds two arrays of 16 bits in float32."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


def _visible(spec: AttentionSpec, dbias):
    """Returns the gradient of a bias with 0 for hidden pairs, whose tiles cuDNN may skip."""
    row, column = (lax.broadcasted_iota(jnp.int32, dbias.shape, axis) for axis in (2, 3))
    keep = spec.mask.visible(row, column)
    return dbias if keep is None else jnp.where(keep, dbias, jnp.zeros_like(dbias))


def _of_shared(dbias, bias):
    """Sums the gradient of a repeated bias over the entries that share one, in float32."""
    if dbias.shape == bias.shape:
        return dbias
    parts = dbias.astype(jnp.float32).reshape(len(bias), -1, *bias.shape[1:])
    return parts.sum(1).astype(bias.dtype)


@functools.cache
def _version() -> int | None:
    """Returns the version of the cuDNN that jax's CUDA plugin has loaded; None if there is none."""
    for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        try:
            return int(importlib.import_module(f"{plugin}._versions").cudnn_get_version())
        except (ImportError, RuntimeError):  # no such plugin; it finds no cuDNN
            continue
    return None


def _spelled(version: int) -> str:
    """Returns 9.15.1 for 91501."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
