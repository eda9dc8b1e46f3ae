"""Each porting snippet runs, and gives what the other library or its formula gives."""

from __future__ import annotations

import jax
import pytest

from . import porting
from .stand_ins import NAMES

SNIPPETS = {f"{x.library}: {x.title}": x for x in porting.snippets()}


@pytest.mark.thorough(
    always=[
        "flash-attn: Packed sequences, more keys than queries",
        "PyTorch SDPA: A padding mask",
        "Splash attention: Heads with masks of their own",
        "jax.nn and Flax: Lengths and a local window",
        "Tokamax, keras and xFormers: Tokamax",
        "openpi and AlphaFold 3: openpi's `mask_ar`",
        "openpi and AlphaFold 3: AlphaFold 3's pair bias with a mask",
    ]
)
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_gives_what_it_replaces(name):
    snippet = SNIPPETS[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        names, told = snippet.run()
        wanted = snippet.run_theirs(NAMES[snippet.library], names)
    assert told == snippet.printed
    porting.check_same(names["o"], wanted)


def test_every_snippet_is_found():
    text = porting.PAGE.read_text()
    assert len(SNIPPETS) == text.count("```python") == text.count("```py\n") >= 25
    assert set(NAMES) == {x.library for x in SNIPPETS.values()}
