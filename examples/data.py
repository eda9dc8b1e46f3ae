"""Text that is on every machine with Python: the source of its standard library, as bytes."""

from __future__ import annotations

import os
import pathlib

import numpy as np

# Not source of the library itself: installed packages and, for size, tests and generated tables.
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "encodings",
    "__pycache__",
}

# Every 20th file is held out: whole files, so that no validation text is near training text.
_HOLD_OUT = 20


def standard_library(max_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Source bytes of the standard library, the same on every run of one Python installation.

    Args:
        max_bytes: stop at the file that reaches this many, but not before both parts have a file.

    Returns:
        (training, validation), uint8 arrays.

    Raises:
        FileNotFoundError: this Python has no standard library in source form.
    """
    root = pathlib.Path(os.__file__).parent
    files = [p for p in sorted(root.rglob("*.py")) if not _SKIPPED & set(p.relative_to(root).parts)]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, path in enumerate(files):
        text = path.read_bytes()
        parts[index % _HOLD_OUT == _HOLD_OUT - 1].append(text)
        total += len(text)
        if total >= max_bytes and index >= _HOLD_OUT:
            break
    if not all(parts):
        raise FileNotFoundError(f"found too few .py files of the standard library under {root}.")
    training, validation = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return training, validation


class Windows:
    """Random windows of length + 1 bytes: inputs and, shifted by one, targets."""

    def __init__(self, text: np.ndarray, batch: int, length: int, seed: int):
        self._text, self._batch, self._length = text, batch, length
        self._random = np.random.default_rng(seed)

    def next(self) -> np.ndarray:
        """int32[batch, length + 1]."""
        starts = self._random.integers(0, len(self._text) - self._length, self._batch)
        return self._text[starts[:, None] + np.arange(self._length + 1)].astype(np.int32)
