"""Replacement of functions of a library, after a check of the signatures that are expected."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from ..core.problem import DERIVATIVES
from ..typing import Differentiable


class Client(NamedTuple):
    """A library with which this package was tested.

    Attributes:
        package: name under which it is installed.
        module: name under which it is imported.
        tested: version that was tested.
    """

    package: str
    module: str
    tested: str

    def imported(self, name: str) -> Any:
        """Imports a module of the library.

        Raises:
            ImportError: the library is not installed, or has no module of this name.
        """
        try:
            return importlib.import_module(name)
        except ImportError as error:
            version = self._version()
            state = "is not installed" if version is None else f"{version} is installed"
            raise ImportError(
                f"flash_pallas.integrations.{self.module} was tested with {self.package} "
                f"{self.tested}; {self.package} {state}, and {name} cannot be imported: {error}. "
                f"Run pip install {self.package}=={self.tested}"
            ) from error

    def named(self, owner: Any, name: str, *parameters: str) -> Any:
        """Returns a function or class of the library after a check of its parameters.

        Args:
            owner: module or class that has it.
            name: its name there.
            *parameters: names of all its parameters in order. Without any, there is no check.

        Raises:
            ImportError: it is missing or has other parameters.
        """
        path = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
        attribute = vars(owner).get(name)
        if attribute is None:
            raise self.differs(f"has no {path}.{name}")
        actual = tuple(inspect.signature(attribute).parameters) if parameters else ()
        if actual != parameters:
            raise self.differs(
                f"has {path}.{name}({', '.join(actual)}), not ({', '.join(parameters)})"
            )
        return attribute

    def differs(self, difference: str) -> ImportError:
        """Returns an error that says how the installed version differs."""
        return ImportError(
            f"flash_pallas.integrations.{self.module} was tested with {self.package} "
            f"{self.tested}; {self.package} {self._version()} {difference}. Install "
            f"{self.package}=={self.tested}, or a version of flash_pallas that knows this one"
        )

    def _version(self) -> str | None:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


class Hook(NamedTuple):
    """One attribute to replace.

    Attributes:
        owner: module or class that has it.
        name: its name there.
        new: the replacement.
        everywhere: also replace it where other modules have imported it by this name.
    """

    owner: Any
    name: str
    new: Any
    everywhere: bool = False


class Patch:
    """Hooks that are installed together and removed together.

    JAX's caches are cleared each time. Otherwise a function that was traced before, or a model that
    is jitted as a whole, would keep the attention with which it was traced.

    Args:
        hooks: called by `install` with its arguments; returns the hooks.

    Attributes:
        differentiable: value that the new attention passes to `flash_attention`.
    """

    def __init__(self, hooks: Callable[..., list[Hook]]):
        self._hooks = hooks
        self.differentiable: Differentiable = "reverse"
        self._put_in: list[tuple[Hook, Any]] = []

    def install(self, *args, differentiable: Differentiable = "reverse") -> None:
        """Installs the hooks. If they are installed already, the new arguments replace the old."""
        if differentiable not in DERIVATIVES:
            raise ValueError(
                f"differentiable is {differentiable!r}: choose 'reverse', or 'any' for forward "
                "mode and every order, as in flash_attention"
            )
        self.uninstall()
        self.differentiable = differentiable
        for hook in self._hooks(*args):
            old = vars(hook.owner)[hook.name]
            self._put_in.append((hook, old))
            _replace(hook, old, hook.new)
        jax.clear_caches()

    def uninstall(self) -> None:
        """Restores what the library had. Without installed hooks nothing happens."""
        if self._put_in:
            jax.clear_caches()
        while self._put_in:
            hook, old = self._put_in.pop()
            _replace(hook, hook.new, old)

    @contextmanager
    def installed(self, *args, differentiable: Differentiable = "reverse") -> Iterator[None]:
        """Installs the hooks for the body of a `with` statement."""
        self.install(*args, differentiable=differentiable)
        try:
            yield
        finally:
            self.uninstall()


def _replace(hook: Hook, old: Any, new: Any) -> None:
    setattr(hook.owner, hook.name, new)
    for module in list(sys.modules.values()) if hook.everywhere else ():
        if getattr(module, "__dict__", {}).get(hook.name) is old:
            setattr(module, hook.name, new)
