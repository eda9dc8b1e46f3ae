"""The ragged kernel on CPU: right, free of races and deadlocks, for every mix of prompts."""

from __future__ import annotations

import pytest

from .hopper_ragged_cases import MIXES, assert_matches_oracle, run
from .interpreter import race_checked


@pytest.mark.interpret
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_chunks(mix):
    with race_checked():
        found, whole = run(mix)
    assert_matches_oracle(mix, found, whole)
