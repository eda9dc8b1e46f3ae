"""Tests that options of tile records are timed, and that those that the tables choose pay."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from benchmarks import run_options
from flash_pallas.backends.hopper import backend
from flash_pallas.backends.hopper.backward.fused.tiles import FusedBlocks
from flash_pallas.backends.hopper.backward.paired.tiles import PairedBlocks
from flash_pallas.backends.hopper.forward.tiles import ForwardBlocks

RECORDS = {"forward": ForwardBlocks, "fused": FusedBlocks, "paired": PairedBlocks}
SIZES = {"block_q", "block_kv", "warpgroups", "stages", "do_stages", "ds_stages"}
# Without it kernels run where warpgroups cannot trade registers, and these run other kernels.
NEEDED = {"producer", "packed"}
LEAST = 1.05
RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
FOUND = [
    row
    for name in ("options", "options_kept")
    for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]
]


OF_RECORDS = [option for option in run_options.OPTIONS if not option.module]


@pytest.mark.parametrize("option", OF_RECORDS, ids=lambda option: option.name)
def test_what_the_tables_choose_can_be_left_out(option):
    """Checks that each row has the option, and that the kernel runs without it."""
    for row in option.rows:
        problem = run_options.problem_of(row)
        chosen, without = (
            backend.choose_blocks(problem, override, True, backend.H200_SMS)
            for override in (None, {option.kernel: option.off})
        )
        assert chosen != without


@pytest.mark.parametrize("option", run_options.OPTIONS, ids=lambda option: option.name)
def test_options_pay(option):
    """Checks that without the option some row takes at least 1.05 of the time."""
    earned = [
        row["without_over_with"]
        for row in FOUND
        if row["kernel"] == option.kernel and option.off.items() <= row["off"].items()
    ]
    assert max(earned) >= LEAST, earned


@pytest.mark.parametrize("kernel", RECORDS)
def test_every_option_is_timed(kernel):
    names = {field.name for field in dataclasses.fields(RECORDS[kernel])} - SIZES - NEEDED
    timed = {
        name for option in run_options.OPTIONS if option.kernel == kernel for name in option.off
    }
    assert names <= timed
    assert len(names) <= 10
