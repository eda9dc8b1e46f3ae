"""The GPU fuzz has run with today's kernels: gpu_fuzz.json.

`make fuzz-gpu` writes that file on an H200, and `make coverage-check` runs this one.
"""

from __future__ import annotations

import json
from pathlib import Path

from . import kernel_digest

PATH = Path(__file__).parent.parent / "benchmarks" / "results" / "gpu_fuzz.json"
FUNCTIONS = (
    "append_kv",
    "dot_product_attention",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_lse",
    "flash_attention_with_max_logit",
    "flash_decode",
    "ragged_paged_attention",
)


def test_the_committed_run_is_of_these_kernels():
    found = json.loads(PATH.read_text())
    assert found["kernels"] == kernel_digest.of_sources(), (
        "gpu_fuzz.json is older than the kernels: run make fuzz-gpu COUNT=1800 on an H100 or H200"
    )
    assert found["wrong"] == [] and found["calls"] >= 1500
    right = lambda table, key: found[table][key].get("right", 0)
    assert right("by backend", "portable") >= 500 and right("by x64", "x64") >= 300
    tiles = {"portable of this GPU", "portable 8.0", "portable 8.9"}
    assert all(right("by tiles", name) for name in tiles)
    assert all(right("by function", name) for name in FUNCTIONS)
