"""The portable kernels themselves, on CPU: right, and no tile read before it has arrived."""

from __future__ import annotations

import pytest

from flash_pallas.backends.portable import PortableBackend

from . import checks
from .hopper_cases import INTERPRETED, MAXIMA, MODIFIERS
from .interpreter import race_checked

BACKEND = PortableBackend(interpret=True, capability="8.0")

# Cases that differ from others in which Hopper kernels run, and are one kernel here; they all run
# on a GPU.
SAME_KERNEL = (
    *("_split", "document_", "long_", "bias_shared", "softcap_saturated", "softcap_wide"),
    *("softcap_small", "softcap_straddles", "softcap_scale", "rising_", "whole_key_blocks"),
)
CASES = [
    case
    for case in (*INTERPRETED, *MODIFIERS, *MAXIMA)
    if not any(part in case.name for part in SAME_KERNEL)
]


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, kernels=True)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["everything", "packed_causal", "d64"])
def test_other_tiles(name):
    """Sizes that a caller may ask for: everything is as it was."""
    (case,) = (case for case in CASES if case.name == name)
    blocks = {
        "forward": {"rows": 64, "columns": 48, "slots": 2},
        "dkv": {"rows": 128, "columns": 16},
        "dq": {"rows": 128, "columns": 32},
    }
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND, blocks), case, kernels=True)
