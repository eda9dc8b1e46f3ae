"""Chooses the test of the library that is here: FLASH_PALLAS_CLIENT, set by `make test-clients`."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

from . import parity

CLIENT = os.environ.get("FLASH_PALLAS_CLIENT")
ALL = {path.stem.removeprefix("test_"): path.name for path in Path(__file__).parent.glob("test_*")}
# Each library needs an environment of its own; `make test` has none of them.
collect_ignore = [name for client, name in ALL.items() if client != CLIENT]

if CLIENT is not None:
    os.environ["KERAS_BACKEND"] = "jax"
    # Strict promotion is for this package; the others mix dtypes and ranks.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    # Their time is mostly compilation.
    jax.config.update("jax_disable_most_optimizations", True)
    if CLIENT not in ALL:
        raise pytest.UsageError(f"FLASH_PALLAS_CLIENT={CLIENT}: choose one of {', '.join(ALL)}")


@pytest.fixture(scope="session", autouse=True)
def results():
    """Results of the session, written to the file that FLASH_PALLAS_CLIENTS_JSON names."""
    yield
    if path := os.environ.get("FLASH_PALLAS_CLIENTS_JSON"):
        parity.write(Path(path), CLIENT)
