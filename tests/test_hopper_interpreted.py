"""The Hopper kernels themselves, on CPU: right, free of races and deadlocks."""

from __future__ import annotations

import pytest

from flash_pallas.backends.hopper import HopperBackend

from . import checks
from .hopper_cases import FLOAT32, INTERPRETED, MODIFIERS
from .interpreter import race_checked

BACKEND = HopperBackend(interpret=True, num_sms=2)


@pytest.mark.interpret
@pytest.mark.parametrize("case", (*INTERPRETED, *MODIFIERS, *FLOAT32), ids=str)
def test_kernels(case):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, in_parts=True)


@pytest.mark.interpret
def test_float32_is_as_precise_as_documented():
    with race_checked():
        checks.assert_precision_of_float32(checks.bind(BACKEND))
