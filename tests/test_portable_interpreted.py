"""The portable kernels themselves, on CPU: right, and no tile read before it has arrived."""

from __future__ import annotations

import pytest

from flash_pallas.backends.portable import PortableBackend

from . import checks
from .hopper_cases import INTERPRETED, MAXIMA, MODIFIERS
from .interpreter import race_checked

BACKEND = PortableBackend(interpret=True, capability="8.0")
CASES = (*INTERPRETED, *MODIFIERS, *MAXIMA)


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case):
    with race_checked():
        checks.assert_matches_oracle(checks.bind(BACKEND), case, kernels=True)
