"""Makes the table of tile sizes that the package ships, on the device it is for.

    python -m benchmarks.tune --out flash_pallas/tuned/nvidia_h200.json

It runs `flash_pallas.autotune` on the cells of the suite h200. Every change it would make has to
pass the gate of gate.py first.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import tempfile
import time

import jax.numpy as jnp

from flash_pallas import tuning
from flash_pallas.frontend import dispatch, tables
from flash_pallas.frontend.arguments import Arguments

from . import gate, providers, suites


def prepare(cell: suites.Cell, backend: str) -> tuning.Trial:
    """Compiles the candidates that are timed for a cell, on the inputs that run.py would take."""
    q, k, v, _ = gate.random_inputs(cell.shape)
    return tuning.prepare(q, k, v, Arguments(causal=cell.causal), backend)


def wrong(cell: suites.Cell, provider: str) -> list[str]:
    """Returns the names of the tensors that miss the oracle with the tile sizes now in force."""
    inputs = gate.random_inputs(cell.shape)
    runner = providers.prepare(provider, cell, jnp.dtype(jnp.bfloat16))(inputs)
    verdicts = gate.build_oracle(inputs, cell.causal).check(runner.results())
    return [name for name, verdict in verdicts.items() if not verdict.ok]


def main(
    argv: list[str] | None = None, backend: str = "hopper", provider: str = "flash_pallas"
) -> None:
    """Runs the command line; tests name a backend that runs without a GPU and who calls it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--suite", choices=list(suites.SUITES), default="h200")
    parser.add_argument("--only", default="", help='cells whose label has this, e.g. "causal"')
    arguments = parser.parse_args(argv)
    cells = [c for c in suites.SUITES[arguments.suite] if arguments.only in c.label]
    begin = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begin:5.0f} s  {text}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[tables.CACHE_VARIABLE] = folder
        # Everything is compiled before anything is timed.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            trials = list(pool.map(lambda cell: prepare(cell, backend), cells))
        say(f"compiled {sum(len(p) for t in trials for p in t.programs.values())} programs")
        changed = {}
        for cell, trial in zip(cells, trials, strict=True):
            found = trial.run()
            say(f"{cell.label}: {found.gain}\n{found}")
            if found.blocks:
                changed[cell] = trial
        with concurrent.futures.ThreadPoolExecutor() as pool:
            missed = pool.map(lambda cell: wrong(cell, provider), changed)
            refused = {cell: names for cell, names in zip(changed, missed, strict=True) if names}
        table = json.loads(tables.user_path().read_text())
    for cell, names in refused.items():
        say(f"{cell.label} is left out: {names} are wrong")
        del table["entries"][changed[cell].name]
    dispatch.forget_tiles()
    arguments.out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    say(f"{arguments.out}: {len(changed) - len(refused)} of {len(cells)} calls differ")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
