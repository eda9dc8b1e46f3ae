"""Random combinations of features, shapes, dtypes and groups on xla, by the one numerical check.

FLASH_PALLAS_EXAMPLES=500 looks further than the few of the default run; what it draws is the same
every time.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
from hypothesis import strategies as st

from . import checks
from .cases import Case
from .mods import MASK_MODS, SCORE_MODS

PARTS = 5  # tests that may run side by side
EXAMPLES = int(os.environ.get("FLASH_PALLAS_EXAMPLES", "30"))

# A third of the draws have a feature, so that most have several of them and few have all.
rarely = lambda values: st.one_of(st.none(), st.none(), values)
pattern = st.tuples(*(st.sampled_from([letter, "1"]) for letter in "BNTS")).map("".join)


@st.composite
def lengths(draw, batch: int, longest: int):
    """One length per batch entry, 0 and the whole among them."""
    return tuple(draw(st.integers(0, longest)) for _ in range(batch))


@st.composite
def cases(draw):
    batch, kv_heads, group = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
    )
    q_len, kv_len = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    offset = st.integers(-q_len, kv_len)
    fields = {
        "causal": draw(st.booleans()),
        "window": draw(rarely(st.tuples(*(st.one_of(st.none(), st.integers(0, 100)),) * 2))),
        "q_offset": draw(st.one_of(st.just(0), offset, st.tuples(*(offset,) * batch))),
        "scale": draw(rarely(st.sampled_from([1.0, -0.3]))),
        "bias": draw(rarely(pattern)),
        "mask": draw(rarely(pattern)),
        "segments": draw(rarely(st.sampled_from(["packed", "unsorted", "padded"]))),
        "q_lengths": draw(rarely(lengths(batch, q_len))),
        "kv_lengths": draw(rarely(lengths(batch, kv_len))),
        "poison": draw(st.booleans()),
        "softcap": draw(rarely(st.sampled_from([1.0, 20.0]))),
        "alibi": draw(rarely(st.sampled_from(["N", "BN"]))),
        "sinks": bool(draw(rarely(st.just(True)))),
        "dropout_rate": draw(rarely(st.sampled_from([0.1, 0.5]))) or 0.0,
        "dropout_seed": draw(st.integers(0, 3)),
        "broadcast_dropout": draw(st.booleans()),
        "score_mod": draw(rarely(st.sampled_from(sorted(SCORE_MODS)))),
        "mask_mod": draw(rarely(st.sampled_from(sorted(MASK_MODS)))),
        "max_logit": draw(st.booleans()),
    }
    return Case(
        "drawn",
        T=q_len,
        S=kv_len,
        B=batch,
        N=kv_heads * group,
        K=kv_heads,
        H=draw(st.sampled_from([1, 8, 24, 64])),
        Hv=draw(st.sampled_from([None, 8, 40])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        **fields,
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_any_combination_matches_the_oracle(part):
    @hypothesis.seed(part)
    @hypothesis.settings(
        max_examples=-(-EXAMPLES // PARTS),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases(), st.sampled_from([32, 64, 100]), st.sampled_from([16, 64, 100]))
    def check(case, block_q, block_kv):
        hypothesis.note(repr(case))
        blocks = {"block_q": block_q, "block_kv": block_kv}
        checks.assert_matches_oracle(checks.bind("xla", blocks), case)

    check()
