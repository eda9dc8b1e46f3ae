"""Setup of the compile check's own tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _as_users_compile(optimized):
    pass
