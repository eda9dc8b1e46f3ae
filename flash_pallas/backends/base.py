"""What a backend is."""

from __future__ import annotations

from typing import Any, Protocol

from ..core.problem import AttentionSpec, Grads, Operands, Problem


class UnsupportedByBackend(NotImplementedError):
    """A backend that was asked for by name cannot run this call; the message says why."""


class Backend(Protocol):
    """One implementation of attention and its gradient."""

    name: str

    def unsupported(self, problem: Problem) -> str | None:
        """None if this backend runs `problem` here; else one sentence saying why not."""
        ...

    def blocks(self, problem: Problem, override: dict[str, Any] | None) -> Any:
        """The tile sizes that would run, a frozen (hashable) dataclass; `override` replaces fields.

        Raises ValueError for an unknown field or a size the kernels cannot take.
        """
        ...

    def forward(self, spec: AttentionSpec, blocks: Any, operands: Operands) -> tuple[Any, Any]:
        """(o [B, T, N, Hv] in q's dtype, lse_log2 f32[B, N, T] as core/softmax.py defines it)."""
        ...

    def backward(
        self, spec: AttentionSpec, blocks: Any, operands: Operands, lse_log2, do, delta
    ) -> Grads:
        """Gradients from do [B, T, N, Hv] and delta = rowsum(o * do) - dlse, f32[B, N, T]."""
        ...
