"""flash_decode with a draft mask: trees of proposals and other masks, on every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla import decode as xla_decode
from flash_pallas.core import decode, softmax

from . import draft_masks
from .hopper_decode_cases import Step, assert_matches_oracle

XLA = XlaBackend()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(xla_decode, "BLOCK", 64)


def drawn(seed: int) -> Step:
    """Draws a step whose drafts lie anywhere among blocks, some of them before key 0."""
    rng = np.random.default_rng(seed)
    one = lambda *values: values[rng.integers(len(values))]
    tokens, batch = int(one(1, 5, 13, 32, 33, 64)), 3
    some = lambda most: tuple(int(one(0, 1, 63, 64, 65, rng.integers(most))) for _ in range(batch))
    return Step(
        f"drawn_{seed}",
        lengths=tuple(256 - n for n in some(250)),
        T=tokens,
        N=4,
        K=one(1, 2, 4),
        dtype=str(one("float16", "bfloat16", "float32")),
        page_size=one(None, 16, 64),
        num_splits=int(rng.integers(1, 6)),
        starts=some(300) if seed % 3 == 0 else None,
        window=int(one(0, 3, 20, 70)) if seed % 4 == 1 else None,
        windows=some(80) if seed % 4 == 2 else None,
        softcap=one(None, 3.0),
        sides=tuple(name for name in ("sinks", "slopes") if rng.integers(2)),
        drafts=draft_masks.KINDS[seed % 2],
    )


@pytest.mark.thorough(always=["drawn_2", "drawn_9"])
@pytest.mark.parametrize("step", [*map(drawn, range(16))], ids=str)
def test_xla(step):
    given, whole = step.operands()
    blocks = XLA.decode_blocks(decode.describe(given, step.spec))
    run = jax.jit(lambda x: XLA.decode(step.spec, blocks, x))
    found = run(jax.tree.map(jnp.asarray, given))
    assert_matches_oracle(step, whole, (found.o, softmax.natural(found.lse_log2, found.shift)))
