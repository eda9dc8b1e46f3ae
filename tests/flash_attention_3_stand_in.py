"""A stand-in for the package dew_flash_attn: its functions, computed by this package's fallback."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import flash_pallas
from flash_pallas import devices


def _ours(is_causal: bool, window_size: tuple[int, int], sinks) -> dict[str, Any]:
    window = tuple(None if side < 0 else side for side in window_size)
    asked = {"causal": is_causal, "backend": "xla", "sinks": sinks}
    return asked | ({} if window == (None, None) else {"window": window})


def install(monkeypatch, capability: str = "9.0") -> list[dict[str, Any]]:
    """Puts the stand-in in the place of the package, on a GPU of this compute capability.

    Returns:
        What is recorded of each call: the name of the function, shapes and arguments.
    """
    calls: list[dict[str, Any]] = []

    def record(name: str, q, k, v, **others) -> None:
        calls.append({"name": name, "shapes": [x.shape for x in (q, k, v)]} | others)

    def flash_mha(
        query, key, value, softmax_scale=None, is_causal=False, window_size=(-1, -1), sinks=None
    ):
        record("flash_mha", query, key, value, causal=is_causal, window=window_size)
        asked = _ours(is_causal, window_size, sinks)
        return flash_pallas.flash_attention(query, key, value, scale=softmax_scale, **asked)

    def flash_mha_varlen(
        query, key, value, cu_seqlens, max_seqlen, softmax_scale=None, is_causal=False,
        window_size=(-1, -1), sinks=None, key_cu_seqlens=None, key_max_seqlen=None,
    ):  # fmt: skip
        seen = {"causal": is_causal, "window": window_size, "longest": max_seqlen}
        record("flash_mha_varlen", query, key, value, **seen, starts=cu_seqlens.shape)
        asked = _ours(is_causal, window_size, sinks) | {"scale": softmax_scale}
        return flash_pallas.flash_attention_varlen(
            query, key, value, cu_seqlens_q=cu_seqlens, **asked
        )

    module = types.ModuleType("dew_flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("dew_flash_attn", None)
    module.flash_mha, module.flash_mha_varlen = flash_mha, flash_mha_varlen
    monkeypatch.setitem(sys.modules, "dew_flash_attn", module)
    monkeypatch.setattr(devices, "capability_here", lambda: capability)
    return calls
