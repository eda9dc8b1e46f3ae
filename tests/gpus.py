"""Test runs on GPUs: which GPU a process has, and what need not run again."""

from __future__ import annotations

import glob
import os


def take(worker: int) -> None:
    """Lets this process see one GPU only, chosen by its number among the processes.

    It works before jax has looked for devices. A machine of one GPU, or of none, is left as it is.
    """
    count = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    if len(visible) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[worker % len(visible)]


def passed_before(path: str) -> set[str]:
    """Returns the names of tests that have passed, one a line of a file; none without a file."""
    if not os.path.exists(path):
        return set()
    with open(path) as file:
        return set(file.read().splitlines())


def note_passed(path: str, name: str) -> None:
    """Adds a test that has passed to such a file, at once: the run may be cut off."""
    with open(path, "a") as file:
        file.write(name + "\n")
