"""What a backend is."""

from __future__ import annotations

from typing import Any, Protocol

from ..core.decode import DecodeOperands, DecodeProblem, DecodeSpec
from ..core.problem import AttentionSpec, Cotangents, Grads, Operands, Outputs, Problem


class UnsupportedByBackend(NotImplementedError):
    """A backend that was asked for by name cannot run this call; the message says why."""


class Backend(Protocol):
    """One implementation of attention and its gradient."""

    name: str

    @property
    def partitionable(self) -> bool:
        """XLA's partitioner may run it on parts of the batch and of the heads; see sharding.py."""
        ...

    def unsupported(self, problem: Problem) -> str | None:
        """None if this backend runs `problem` here; else one sentence saying why not."""
        ...

    def blocks(self, problem: Problem, override: dict[str, Any] | None) -> Any:
        """The tile sizes that would run, a frozen (hashable) dataclass; `override` replaces fields.

        Raises ValueError for an unknown field or a size the kernels cannot take.
        """
        ...

    def candidates(self, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        """For each kernel, tile sizes worth timing as dicts of all fields, those of `blocks` first.

        `blocks` takes each of them as its `override`. Empty where there is nothing to choose.
        """
        ...

    def forward(self, spec: AttentionSpec, blocks: Any, operands: Operands) -> Outputs:
        """Attention.

        What kv_lengths or a negative segment id hides may hold NaN, which must not spread. Outputs
        of queries beyond q_lengths may be anything, those of a negative segment id are of a row
        without keys.
        """
        ...

    def backward(
        self,
        spec: AttentionSpec,
        blocks: Any,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Grads:
        """Gradients of q, k, v and of the operands named in `wanted` (of core.problem.EXTRA_GRADS).

        Queries whose outputs were discarded (beyond a length, padding) have EMPTY_ROW in lse_log2
        and 0 in delta. Their q and do may hold NaN, as may k and v of padding, and none of it must
        spread: the gradients of padding are 0, unless score_mod's derivative is not finite.
        """
        ...

    def unsupported_decode(self, problem: DecodeProblem) -> str | None:
        """None if this backend decodes `problem` here; else one sentence saying why not."""
        ...

    def decode_blocks(self, problem: DecodeProblem) -> Any:
        """How `problem` would run, a frozen dataclass; its `num_splits` is an int.

        Not called where `unsupported_decode` has a reason.
        """
        ...

    def decode(self, spec: DecodeSpec, blocks: Any, operands: DecodeOperands) -> Outputs:
        """Attention of a few queries to a cache; lengths, offsets and page ids are in their ranges.

        o [B, T, N, Hv] in q's dtype and lse_log2 f32[B, N, T]. The same bits in every run.
        """
        ...
