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

    @property
    def attention(self) -> Any:
        """Attention, which is refused without a GPU, as are the next two."""
        return UnloadedOperation(self, "attention")

    @property
    def decode(self) -> Any:
        """Attention to a cache."""
        return UnloadedOperation(self, "decode")

    @property
    def ragged(self) -> Any:
        """Attention over pages."""
        return UnloadedOperation(self, "ragged")


@dataclasses.dataclass(frozen=True)
class UnloadedOperation:
    """An operation of a backend that is loaded where there is a GPU to run it.

    Attributes:
        backend: the backend.
        name: the operation's name.
    """

    backend: UnloadedBackend
    name: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(self.backend.loaded, self.name), name)

    def refusal(self, problem: Any) -> str | None:
        """Returns why the backend cannot run `problem` here, or None."""
        if reason := no_gpu(self.backend.needs):
            return reason
        return getattr(self.backend.loaded, self.name).refusal(problem)


@functools.cache
def _load(name: str, kind: str) -> Backend:
    return getattr(importlib.import_module(f".{name}", __package__), kind)()
