"""jax's ragged paged attention for TPUs, under the same name, on GPUs (jax 0.11 and 0.12).

It follows the module of this name of jax's Pallas ops for TPUs. Pages hold keys and values
together, and scores are not scaled by default.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax.numpy as jnp

from ..core import mesh_axes, softmax
from ..core.decode import QUANTISED
from ..frontend import validate
from ..frontend.arguments import valid_scale
from ..frontend.validate import suggested
from ..frontend.validate_ragged import RaggedArguments
from ..frontend.words import Words
from ..ragged import attended, prepared
from ..typing import AnyArray, Array, Float, Int
from ._refusal import refuse

WORDS = Words(
    {
        "k_pages": "kv_pages",
        "v_pages": "kv_pages",
        "kv_lengths": "kv_lens",
        "page_table": "page_indices",
        "scale": "sm_scale",
        "softcap": "soft_cap",
        "k": "kv_pages",
        "window": "sliding_window",
    }
)


@suggested
def ragged_paged_attention(
    q: Float[AnyArray, "tokens N H"],
    kv_pages: Float[AnyArray, "P page_size 2*K H"],
    kv_lens: Int[AnyArray, " S"],
    page_indices: Int[AnyArray, "S max_pages"],
    cu_q_lens: Int[AnyArray, " S+1"],
    num_seqs: Int[AnyArray, " 1"],
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> Float[Array, "tokens N H"]:
    """Computes attention of prompts and steps over pages, with the arguments of jax's TPU kernel.

    jax 0.11, the package ragged_paged_attention of its Pallas ops for TPUs. The pages are read
    without a copy. A query that sees no key returns zeros, and so do rows that belong to no
    sequence.

    Args:
        q: queries [tokens, N, H] of all sequences, one after the other.
        kv_pages: [P, page_size, 2 * K, H]: head 2 * i holds the keys of KV head i, and head 2 * i +
            1 its values. The dtype is q's, float8_e4m3fn or int8. page_size is a multiple of 16
            from 16 to 256.
        kv_lens: int32 [S], number of keys of each sequence, including those of its queries.
        page_indices: int32 [S, max_pages], pages of each sequence.
        cu_q_lens: int32 [S + 1], the first row of each sequence, and finally the end.
        num_seqs: int32 [1], number of sequences in use.
        sm_scale: factor of the scores.
        sliding_window: number of keys that a query sees, including its own; None means all.
        soft_cap: scores become cap * tanh(scores / cap).
        mask_value: refused, because hidden scores are -inf.
        k_scale: a number that multiplies the keys.
        v_scale: a number that multiplies the values.
        num_kv_pages_per_block: refused, like the next argument: these are tile sizes of another
            kernel.
        num_queries_per_block: refused.
        vmem_limit_bytes: refused.

    Returns:
        o [tokens, N, H] in q's dtype.

    Raises:
        ValueError: shapes do not match, or an argument has no counterpart.
        TypeError: an argument has the wrong kind or dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from flash_pallas.compat.ragged_paged_attention import ragged_paged_attention
        >>> q, kv_pages = jnp.ones((8, 4, 64)), jnp.ones((5, 16, 2 * 2, 64))
        >>> kv_lens, cu_q_lens = jnp.array([20, 7]), jnp.array([0, 1, 8])
        >>> page_indices, num_seqs = jnp.array([[4, 1], [2, 0]]), jnp.array([2])
        >>> o = ragged_paged_attention(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
        >>> o.shape
        (8, 4, 64)
    """
    no_tiles = "leave it out, the kernels choose their tiles"
    refuse("mask_value", mask_value, None, "leave it out, hidden scores are -inf")
    refuse("num_kv_pages_per_block", num_kv_pages_per_block, None, no_tiles)
    refuse("num_queries_per_block", num_queries_per_block, None, no_tiles)
    refuse("vmem_limit_bytes", vmem_limit_bytes, None, "leave it out, there is no VMEM")
    with WORDS:
        factor = valid_scale(sm_scale, 1)
    if (shape := validate.as_array("q", q).shape)[3:] or len(shape) < 3:
        raise ValueError(
            f"q has shape {shape}: it must be [tokens, heads, head_dim], the queries of all "
            "sequences one after the other"
        )
    pages = _side_by_side(validate.as_array("kv_pages", kv_pages))
    scales, o_scale = _scales(pages, k_scale, v_scale)
    arguments = RaggedArguments(
        kv_lengths=kv_lens,
        page_table=page_indices,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        scale=factor * scales.pop("factor"),
        window=_window(sliding_window),
        softcap=soft_cap,
        v_head_dim=pages.shape[-1] // 2,
        v_first=pages.shape[-1] // 2,
        **scales,
    )
    with WORDS:
        o, _ = attended(*prepared(q, pages, None, arguments, "auto"))
    return o if o_scale == 1.0 else (o.astype(softmax.sum_dtype(o.dtype)) * o_scale).astype(o.dtype)


def _side_by_side(kv_pages):
    """Returns the same pages as [P, page_size, K, 2 * H]: keys, then values. Nothing is copied."""
    shape = kv_pages.shape
    if len(shape) != 4 or shape[2] % 2:
        raise ValueError(
            f"kv_pages has shape {shape}: it must be [num_pages, page_size, 2 * heads, head_dim], "
            "with the keys of a head followed by its values"
        )
    view = lambda x: x.reshape(*shape[:2], shape[2] // 2, 2 * shape[3])
    return mesh_axes.compiled_as_auto(view, (kv_pages,), mesh_axes.spec_of(kv_pages))


def _scales(pages, k_scale, v_scale) -> tuple[dict[str, Any], float]:
    """Returns scale arguments with a factor of the scores, and a factor of the result.

    Pages in eight bits are scaled as they are read. Of others the scales are factors of all scores
    and of all values.
    """
    k, v = _number("k_scale", k_scale), _number("v_scale", v_scale)
    if pages.dtype.name not in QUANTISED:
        return {"factor": k}, v
    heads = pages.shape[2]
    return {"factor": 1.0, "k_scale": jnp.full(heads, k), "v_scale": jnp.full(heads, v)}, 1.0


def _number(name: str, value) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(
            f"{name} is {value!r}: it must be a finite Python number; flash_pallas."
            "ragged_paged_attention takes one for each head or page, which may be traced"
        )
    return float(value)


def _window(sliding_window) -> int | None:
    if sliding_window is None:
        return None
    if operator.index(sliding_window) < 1:
        raise ValueError(
            f"sliding_window is {sliding_window}: it must be at least 1, as it counts the query's "
            "own key; None is no window"
        )
    return operator.index(sliding_window) - 1
