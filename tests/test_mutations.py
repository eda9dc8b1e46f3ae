"""The list of mutations: each entry is what it claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import CASES, FEATURES, LARGE
from .hopper_cases import FUSED_BLOCKS, MAXIMA, MODIFIERS, WITHOUT_PRODUCER
from .hopper_decode_cases import STEPS
from .mutations import MUTATIONS, ROOT
from .test_portable_interpreted import SUMS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_line_is_there(mutation):
    text = (ROOT / "flash_pallas" / mutation.file).read_text()
    assert text.count(mutation.old) == 1 and mutation.old != mutation.new
    file, _, name = mutation.test.partition("::")
    text = (Path(__file__).parent / file).read_text()
    function, _, case = name.partition("[")
    assert not name or f"def {function}(" in text
    own_blocks = (case for case, _ in FUSED_BLOCKS)
    cases = (
        *CASES,
        *FEATURES,
        *LARGE,
        *MODIFIERS,
        *MAXIMA,
        *WITHOUT_PRODUCER,
        *STEPS,
        *SUMS,
        *own_blocks,
    )
    names = {c.name for c in cases}
    assert not case or case.removesuffix("]") in names
