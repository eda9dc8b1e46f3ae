"""Standards for the main table: a goal for each of its cells, and FlashAttention-4.

FlashAttention-4's Hopper kernels need a Python of their own, so they were measured in another
process: their speed relative to torch_cudnn of that process, on the same kind of card, by wall time
(its host work included, so they read a little low).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Goal(NamedTuple):
    """Speeds relative to torch_cudnn.

    Attributes:
        wanted: speed that ours should reach.
        flash_attention_4: measured speed of FlashAttention-4; None where it was not measured.
    """

    wanted: float
    flash_attention_4: float | None


_FORWARD = {
    ("4,4096,16,16,128", False): Goal(1.09, 1.06),
    ("4,4096,16,16,128", True): Goal(1.10, 1.03),
    ("1,16384,16,16,128", False): Goal(1.15, 1.12),
    ("1,16384,16,16,128", True): Goal(1.20, 1.13),
    ("16,1024,16,16,128", False): Goal(1.05, 0.93),
    ("16,1024,16,16,128", True): Goal(1.06, 0.87),
    ("4,4096,32,32,64", False): Goal(1.18, 1.14),
    ("4,4096,32,32,64", True): Goal(1.10, 0.95),
    ("4,4096,8,8,256", False): Goal(1.15, 1.12),
    ("4,4096,8,8,256", True): Goal(1.19, 1.15),
    ("2,8192,32,8,128", False): Goal(1.12, None),
    ("2,8192,32,8,128", True): Goal(1.17, None),
}
_BACKWARD = {
    ("4,4096,16,16,128", False): Goal(1.18, 1.15),
    ("4,4096,16,16,128", True): Goal(1.19, 1.15),
    ("1,16384,16,16,128", False): Goal(1.24, 1.21),
    ("1,16384,16,16,128", True): Goal(1.25, 1.22),
    ("16,1024,16,16,128", False): Goal(1.08, 1.04),
    ("16,1024,16,16,128", True): Goal(1.10, 1.06),
    ("4,4096,32,32,64", False): Goal(1.25, 1.22),
    ("4,4096,32,32,64", True): Goal(1.31, 1.29),
    ("4,4096,8,8,256", False): Goal(1.25, 0.72),
    ("4,4096,8,8,256", True): Goal(1.30, 0.78),
    ("2,8192,32,8,128", False): Goal(1.18, None),
    ("2,8192,32,8,128", True): Goal(1.20, None),
}
GOALS = {"forward": _FORWARD, "backward": _BACKWARD}


def goal(row: dict[str, Any]) -> Goal | None:
    """Returns the goal of a row's cell, whichever its provider is, or None."""
    sizes = ("batch", "q_len", "q_heads", "kv_heads", "head_dim")
    label = ",".join(str(row[name]) for name in sizes)
    return GOALS[row["direction"]].get((label, row["causal"]))
