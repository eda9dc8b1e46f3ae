"""FlashAttention-3, called from JAX through the wheels dew-flash-attn-cu12 and -cu13.

The package is `dew_flash_attn`. It chooses the kernels by the GPU: FlashAttention-3 at compute
capability 9.0, FlashAttention-2 elsewhere. It has GQA, causal masks, windows, sinks and packed
sequences; it has no softcap, no bias and no deterministic backward.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from flash_pallas import devices

PACKAGE = "dew_flash_attn"
CAPABILITY = "9.0"
MOST_HEAD_DIM = 256
DTYPES = ("bfloat16", "float16")
# Arguments of ours that `attention` takes.
ARGUMENTS = frozenset(("causal", "window", "sinks", "cu_seqlens_q"))


def missing() -> str | None:
    """Returns why FlashAttention-3 cannot run on this machine, or None."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "dew-flash-attn is not installed"
    found = devices.capability_here()
    if found != CAPABILITY:
        return f"FlashAttention-3 needs compute capability {CAPABILITY}, not {found}"
    return None


def unsupported(q, k, v, arguments: Mapping[str, Any]) -> str | None:
    """Returns why FlashAttention-3 cannot compute a call of flash_attention, or None.

    Args:
        q: array or shape [B, T, N, H].
        k: array or shape [B, S, K, H].
        v: array or shape [B, S, K, Hv].
        arguments: the other arguments of flash_attention or flash_attention_varlen, by name.
    """
    dtypes = {str(x.dtype) for x in (q, k, v)}
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    unknown = sorted(set(arguments) - ARGUMENTS)
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        return f"FlashAttention-3 takes {' or '.join(DTYPES)}, not {', '.join(sorted(dtypes))}"
    if head_dim > MOST_HEAD_DIM:
        return f"FlashAttention-3 takes head dims up to {MOST_HEAD_DIM}, not {head_dim}"
    if v_head_dim != head_dim:
        return f"this build takes one head dim for q, k and v, not {head_dim} and {v_head_dim}"
    if unknown:
        return f"this build of FlashAttention-3 has no {', '.join(unknown)}"
    if not isinstance(arguments.get("window"), tuple | None):
        return "FlashAttention-3 takes a window as two Python integers"
    if "cu_seqlens_q" in arguments and q.shape[0] != 1:
        return "packed sequences are one entry of the batch"
    return None


def attention(
    q, k, v, *, causal=False, window=None, sinks=None, cu_seqlens_q=None, longest: int | None = None
):
    """Computes attention with arguments of ours, those in ARGUMENTS.

    With `cu_seqlens_q` the batch is one entry of packed sequences, none longer than `longest`.
    """
    package = importlib.import_module(PACKAGE)
    sides = tuple(-1 if side is None else side for side in window or (None, None))  # -1: no bound
    options = {"is_causal": causal, "window_size": sides, "sinks": sinks}
    if cu_seqlens_q is None:
        return package.flash_mha(q, k, v, **options)
    return package.flash_mha_varlen(q[0], k[0], v[0], cu_seqlens_q, longest, **options)[None]
