"""A wrong edit that a test must notice; see mutations.py."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One wrong edit.

    Attributes:
        feature: feature that it breaks.
        file: path in flash_pallas/.
        old: text that occurs once in the file.
        new: its replacement.
        test: test that must fail, relative to tests/.
    """

    feature: str
    file: str
    old: str
    new: str
    test: str

    def __str__(self):
        return f"{self.feature}: {self.old}"
