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
    """Reads the source of the standard library, the same on every run of one Python installation.

    Args:
        max_bytes: stop at the file that reaches this many, but not before both parts have a file.

    Returns:
        (training, validation), uint8 arrays.

    Raises:
        FileNotFoundError: this Python has no standard library in source form.
    """
    training, validation = (np.frombuffer(b"".join(part), np.uint8) for part in _texts(max_bytes))
    return training, validation


def documents(max_bytes: int) -> list[np.ndarray]:
    """Returns the files to train on, uint8 arrays of at least two bytes.

    Args:
        max_bytes: as in `standard_library`.

    Raises:
        FileNotFoundError: as in `standard_library`.
    """
    return [np.frombuffer(text, np.uint8) for text in _texts(max_bytes)[0] if len(text) > 1]


def _texts(max_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """Reads the files; returns (training, validation)."""
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
    return parts


class Windows:
    """Random windows of length + 1 bytes: inputs and, shifted by one, targets."""

    def __init__(self, text: np.ndarray, batch: int, length: int, seed: int):
        self._text, self._batch, self._length = text, batch, length
        self._random = np.random.default_rng(seed)

    def next(self) -> np.ndarray:
        """Draws the next windows, int32[batch, length + 1]."""
        starts = self._random.integers(0, len(self._text) - self._length, self._batch)
        return self._text[starts[:, None] + np.arange(self._length + 1)].astype(np.int32)


class PackedDocuments:
    """Rows of one length, filled with documents in random order, none of which sees another.

    The rest of a document that does not fit begins the next row, as a document of its own.
    """

    def __init__(self, texts: list[np.ndarray], batch: int, length: int, seed: int):
        self._texts, self._batch, self._length = texts, batch, length
        self._random = np.random.default_rng(seed)
        self._rest = texts[0][:0]

    def next(self) -> dict[str, np.ndarray]:
        """Returns int32[batch, length] tokens, targets, segment_ids, and positions in documents."""
        rows = [self._row() for _ in range(self._batch)]
        return {name: np.stack([row[name] for row in rows]).astype(np.int32) for name in rows[0]}

    def _row(self) -> dict[str, np.ndarray]:
        pieces, room = [], self._length
        while room:
            if len(self._rest) < 2:
                self._rest = self._texts[self._random.integers(len(self._texts))]
            size = min(room, len(self._rest) - 1)
            pieces.append(self._rest[: size + 1])
            self._rest, room = self._rest[size:], room - size
        sizes = [len(piece) - 1 for piece in pieces]
        return {
            "tokens": np.concatenate([piece[:-1] for piece in pieces]),
            "targets": np.concatenate([piece[1:] for piece in pieces]),
            "segment_ids": np.repeat(np.arange(len(pieces)), sizes),
            "positions": np.concatenate([np.arange(size) for size in sizes]),
        }
