"""Breaks one line at a time, in a copy, and expects the test named with it to fail.

The default run leaves this out, because it takes ten minutes on two cores:

    python -m pytest tests/mutations.py -n 2

The list is in mutation_list.py and portable_mutations.py, and in tests/README.md; test_mutations.py
keeps them together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .mutation_list import SHARED_AND_HOPPER
from .portable_mutations import PORTABLE

ROOT = Path(__file__).parent.parent
MUTATIONS = (*SHARED_AND_HOPPER, *PORTABLE)


@pytest.fixture
def copy(tmp_path):
    """Copy of package and tests that can be broken without harm."""
    for name in ("flash_pallas", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_is_noticed(mutation, copy):
    path = copy / "flash_pallas" / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1
    path.write_text(text.replace(mutation.old, mutation.new))
    test = f"tests/{mutation.test}"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: a test failed. Anything else is a mistake in the list: 4 no such test, 2 no such module.
    assert found.returncode == 1, found.stdout[-3000:] + found.stderr[-1000:]
    broken_import = "ImportError" in found.stdout or "SyntaxError" in found.stdout
    assert not broken_import, found.stdout[-3000:]
