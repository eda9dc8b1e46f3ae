"""Programs for a GPU that no test here runs there: what they list, and that their calls work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flash_pallas
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.frontend import dispatch

from . import hopper_decode_cases, sanitize

THREADS = "flash_pallas_compile"  # of backends/gpu/ahead.py


def test_every_kernel_is_listed():
    """Compares names in the source with the list, names that are put together by how they begin."""
    source = Path(flash_pallas.__file__).parent.rglob("backends/**/*.py")
    text = "\n".join(path.read_text() for path in source)
    names = set(re.findall(r'"(flash_pallas_[a-z_]+)', text)) - {THREADS}
    assert len(names) > 20
    listed = lambda name: any(kernel.startswith(name) for kernel in sanitize.KERNELS)
    assert not [name for name in names if not listed(name)]
    assert not [k for k in sanitize.KERNELS if not any(k.startswith(name) for name in names)]


@pytest.mark.parametrize("name", ["two_tiles_of_rows", "starts_of_int8", "drafts", "latent"])
def test_steps_run(name):
    assert hopper_decode_cases.decodes("xla", sanitize.STEP[name]) is None


def test_cases_name_what_there_is(monkeypatch):
    kinds = {"hopper": HopperBackend, "portable": PortableBackend}
    backends = {name: kind(interpret=True) for name, kind in kinds.items()}
    monkeypatch.setattr(dispatch, "BACKENDS", backends)
    cases = sanitize.cases()
    assert len(cases) == len(set(cases))
    names = {case.split("/")[1] for case in cases}
    assert names == {*sanitize.ATTENTION, *sanitize.STEP, *sanitize.OTHERS}
    assert {*sanitize.NAMES} <= sanitize.ATTENTION.keys()
    assert {*sanitize.DECODES} == sanitize.STEP.keys()
