"""Backends of kernels, imported when a GPU is there to run them.

They and Mosaic GPU take longer to import than the rest of the package, and a CPU never runs them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from ..devices import no_gpu
from .base import Backend


@dataclasses.dataclass(frozen=True)
class UnloadedBackend:
    """Stands for a backend until it is asked something that needs its code.

    Attributes:
        name: its name, and that of its package.
        kind: the name of its class.
        needs: what it says without a GPU; see `devices.no_gpu`.
    """

    name: str
    kind: str
    needs: str

    @property
    def loaded(self) -> Backend:
        """The backend itself."""
        return _load(self.name, self.kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies ask for these before there are fields
            raise AttributeError(name)
        return getattr(_load(self.name, self.kind), name)

    def unsupported(self, problem) -> str | None:
        """Returns why it cannot run `problem` here, as the next two do."""
        return no_gpu(self.needs) or self.loaded.unsupported(problem)

    def unsupported_decode(self, problem) -> str | None:
        """Returns the same for decoding."""
        return no_gpu(self.needs) or self.loaded.unsupported_decode(problem)

    def unsupported_ragged(self, problem) -> str | None:
        """Returns the same for ragged attention."""
        return no_gpu(self.needs) or self.loaded.unsupported_ragged(problem)


@functools.cache
def _load(name: str, kind: str) -> Backend:
    return getattr(importlib.import_module(f".{name}", __package__), kind)()
