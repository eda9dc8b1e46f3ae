"""Results that want another run on a GPU: this test belongs to test_gpu_results.py after it.

In gpu_coverage.json 125 rows of portable kernels are older, which a sample may find.
`make coverage-check` runs this file.
"""

from __future__ import annotations

import random

from flash_pallas.coverage import rows
from flash_pallas.coverage.rows import TARGETS

from . import digest
from .test_gpu_results import SAMPLE, check_digest


def test_a_sample_of_kernels_are_those_that_ran():
    rng = random.Random(digest.seed())
    name = rng.choice(sorted(TARGETS))
    makers = rows._gradients, rows._tangents, rows._varlen, rows._decodes, rows._ragged
    make = rng.choice(makers)
    listed = [row for row in make(name, TARGETS[name]) if rows.plan(row, TARGETS[name])]
    for row in rng.sample(listed, min(SAMPLE, len(listed))):
        check_digest(row)
