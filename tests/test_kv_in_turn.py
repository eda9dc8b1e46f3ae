"""A CTA of the fused backward that takes two KV tiles, one after the other."""

import dataclasses
import pytest
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.common import far_rows
from . import checks
from .cases import Case
from .interpreter import race_checked

HOPPER = HopperBackend(interpret=True, num_sms=2)
T = {"kv_in_turn": 2, "kv_stages": 2}
U = {"kv_in_turn": 2}
CASES = [
    (Case("c64", T=300, S=256, N=2, K=1, dtype="bfloat16", causal=True), T),
    (Case("f64", T=200, S=512, N=1, K=1, B=2, dtype="bfloat16"), T),
    (Case("c64u", T=256, S=256, N=1, K=1, dtype="bfloat16", causal=True), U),
    (Case("c96", T=256, S=256, N=2, K=1, H=96, dtype="bfloat16", causal=True), T),
    (Case("c128", T=256, S=512, N=1, K=1, H=128, dtype="bfloat16", causal=True, q_offset=200), U),
    (Case("f128", T=130, S=256, N=1, K=1, H=128, dtype="bfloat16"), U),
    (
        Case(
            "far64", T=256, S=256, N=2, K=1, B=2, dtype="bfloat16", causal=True, magnitude=(0, 15)
        ),
        T,
    ),
]


@pytest.mark.interpret
@pytest.mark.parametrize(("case", "blocks"), CASES, ids=[c.name for c, _ in CASES])
def test_it(case, blocks, monkeypatch):
    if case.name.startswith("far"):
        monkeypatch.setattr(far_rows, "ENOUGH", 1)
    with race_checked():
        checks.assert_matches_oracle(checks.bind(HOPPER, {"fused": blocks}), case, kernels=True)
