"""Results that want another run on a GPU: these tests belong to test_gpu_results.py after it.

In gpu_coverage.json 125 rows of portable kernels are older, which a sample may find; gpu_fuzz.json
has a call that its bounds of then called wrong, and no digests of kernels. `make coverage-check`
runs this file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from flash_pallas.coverage import rows
from flash_pallas.coverage.rows import TARGETS

from . import digest, gpu_fuzz
from .test_gpu_results import check_digest

PATH = Path(__file__).parent.parent / "benchmarks" / "results" / "gpu_fuzz.json"
SAMPLE = 8
FUNCTIONS = (
    "RingCache",
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
    hint = f"run make fuzz-gpu COUNT=1500 SEED={found['seed']} on an H100 or H200"
    ran, rng = found["kernels"], random.Random(digest.seed())
    assert isinstance(ran, dict), f"gpu_fuzz.json does not say which kernels ran: {hint}"
    for number in rng.sample(sorted(ran), SAMPLE):
        now = gpu_fuzz.kernels(found["seed"], tuple(found["backends"]), int(number))
        assert now == ran[number], f"the kernels of call {number} have changed since: {hint}"
    assert found["wrong"] == [] and found["calls"] >= 1500
    right = lambda table, key: found[table][key].get("right", 0)
    assert right("by backend", "portable") >= 500 and right("by x64", "x64") >= 300
    tiles = {"portable of this GPU", "portable 8.0", "portable 8.9"}
    assert all(right("by tiles", name) for name in tiles)
    assert all(right("by function", name) for name in FUNCTIONS)


def test_a_sample_of_kernels_are_those_that_ran():
    rng = random.Random(digest.seed())
    name = rng.choice(sorted(TARGETS))
    makers = rows._gradients, rows._tangents, rows._varlen, rows._decodes, rows._ragged
    make = rng.choice(makers)
    listed = [row for row in make(name, TARGETS[name]) if rows.plan(row, TARGETS[name])]
    for row in rng.sample(listed, min(SAMPLE, len(listed))):
        check_digest(row)
