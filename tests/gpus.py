"""Spreads the processes of a test run over the GPUs of a machine."""

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
