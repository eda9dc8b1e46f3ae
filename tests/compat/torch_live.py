"""compat.torch_sdpa, compat.flex and their porting snippets against PyTorch itself, on a CPU.

    make test-compat

PyTorch runs in an interpreter of its own, which FLASH_PALLAS_TORCH names; nothing here is skipped
without it. pytest does not collect this file unless it is named.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_pallas.compat.torch_sdpa import scaled_dot_product_attention

from . import flex_cases, porting, sdpa_cases
from .formulas import assert_close, gradients
from .test_flex import called

SNIPPETS = [x for x in porting.snippets() if x.library in ("PyTorch SDPA", "FlexAttention")]
RANDOM_CALLS = 12
SEED = int(os.environ.get("FLASH_PALLAS_SEED", "0"))
SDPA = {
    **sdpa_cases.CASES,
    **{f"random {i}": sdpa_cases.random_case([SEED, i]) for i in range(RANDOM_CALLS)},
}


class Peer:
    """Requests to PyTorch, which one process answers all at once, as importing torch takes long."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.requests = {"sdpa": SDPA, "flex": flex_cases.CASES}
        for i, (name, case) in enumerate(SDPA.items()):
            arrays, options = case.drawn(i)
            self._ask(f"sdpa {name}", {"kind": "sdpa", "options": options}, arrays)
        for name, case in flex_cases.CASES.items():
            request = {"kind": "flex", "score": case.score, "mask": case.mask}
            self._ask(f"flex {name}", {**request, "options": case.options}, case.drawn())
        self.snippets = {}
        for x in SNIPPETS:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                names, _ = x.run()
            self.snippets[x.title] = names
            self._ask(
                f"code {x.title}", {"kind": "code", "code": x.theirs}, porting.arrays_of(names)
            )
        python = os.environ["FLASH_PALLAS_TORCH"]
        script = Path(__file__).parent / "torch_peer.py"
        (folder / "answers").mkdir()
        subprocess.run(
            [python, str(script), str(folder / "requests"), str(folder / "answers")], check=True
        )

    def _ask(self, name: str, request: dict[str, Any], arrays: dict[str, np.ndarray]):
        (self.folder / "requests").mkdir(exist_ok=True)
        file = self.folder / "requests" / f"{name.replace('`', '')}.json"
        file.write_text(json.dumps(request))
        np.savez(file.with_suffix(".npz"), **arrays)

    def answer(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / "answers" / f"{name.replace('`', '')}.npz") as stored:
            assert str(stored["version"]).startswith("2.13.")
            return {n: x for n, x in stored.items() if n != "version"}


@pytest.fixture(scope="session")
def peer(tmp_path_factory) -> Peer:
    """PyTorch's answers to everything below."""
    return Peer(tmp_path_factory.mktemp("torch"))


@pytest.mark.parametrize("name", SDPA)
def test_sdpa_and_its_gradients(name, peer):
    drawn, options = SDPA[name].drawn(list(SDPA).index(name))
    answer = peer.answer(f"sdpa {name}")
    with jax.enable_x64(True):
        arrays = {n: jnp.asarray(x) for n, x in drawn.items()}
        floats = [n for n, x in arrays.items() if x.dtype != bool]
        rest = {n: x for n, x in arrays.items() if n not in floats}
        call = lambda *x: scaled_dot_product_attention(
            **dict(zip(floats, x, strict=True)), **rest, **options
        )
        o, got = gradients(call, [arrays[n] for n in floats])
        o_formula = sdpa_cases.formula(**arrays, **options)
    assert_close(o, answer["o"])
    for n, x in zip(floats, got, strict=True):
        assert_close(x, answer[n])
    # The formula that `make test` uses is PyTorch's too.
    assert_close(o_formula, answer["o"])


@pytest.mark.parametrize("name", flex_cases.CASES)
def test_flex_attention(name, peer):
    case, answer = flex_cases.CASES[name], peer.answer(f"flex {name}")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        arrays = {n: jnp.asarray(x) for n, x in case.drawn().items()}
        found = called(case, **arrays)
        formula = flex_cases.formula(case, **arrays)
    for one, other, wanted in zip(found, formula, (answer["o"], answer["lse"]), strict=True):
        assert_close(one, wanted)
        assert_close(other, wanted)


@pytest.mark.parametrize("title", [x.title for x in SNIPPETS])
def test_a_snippet_gives_what_pytorch_gives(title, peer):
    porting.check_same(peer.snippets[title]["o"], peer.answer(f"code {title}")["out"])
