"""FlashAttention-4 in the main table: its speed relative to torch_cudnn.

FlashAttention-4's Hopper kernels need a Python of their own, so they were measured in another
process: their speed relative to torch_cudnn of that process, on the same kind of card, by wall time
(its host work included, so they read a little low).
"""

from __future__ import annotations

from typing import Any

_FORWARD = {
    ("4,4096,16,16,128", False): 1.06,
    ("4,4096,16,16,128", True): 1.03,
    ("1,16384,16,16,128", False): 1.12,
    ("1,16384,16,16,128", True): 1.13,
    ("16,1024,16,16,128", False): 0.93,
    ("16,1024,16,16,128", True): 0.87,
    ("4,4096,32,32,64", False): 1.14,
    ("4,4096,32,32,64", True): 0.95,
    ("4,4096,8,8,256", False): 1.12,
    ("4,4096,8,8,256", True): 1.15,
}
_BACKWARD = {
    ("4,4096,16,16,128", False): 1.15,
    ("4,4096,16,16,128", True): 1.15,
    ("1,16384,16,16,128", False): 1.21,
    ("1,16384,16,16,128", True): 1.22,
    ("16,1024,16,16,128", False): 1.04,
    ("16,1024,16,16,128", True): 1.06,
    ("4,4096,32,32,64", False): 1.22,
    ("4,4096,32,32,64", True): 1.29,
    ("4,4096,8,8,256", False): 0.72,
    ("4,4096,8,8,256", True): 0.78,
}
RATIOS = {"forward": _FORWARD, "backward": _BACKWARD}


def ratio(row: dict[str, Any]) -> float | None:
    """Returns FlashAttention-4's speed in a row's cell, or None where it was not measured."""
    sizes = ("batch", "q_len", "q_heads", "kv_heads", "head_dim")
    label = ",".join(str(row[name]) for name in sizes)
    return RATIOS[row["direction"]].get((label, row["causal"]))
