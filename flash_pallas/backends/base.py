"""Interface of a backend."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from ..core import shared_prefix
from ..core.decode import DecodeOperands, DecodeProblem, DecodeSpec, describe
from ..core.problem import (
    AttentionSpec,
    Cotangents,
    Grads,
    Operands,
    Outputs,
    Problem,
    Tangents,
)
from ..core.ragged import RaggedBlocks, RaggedOperands, RaggedProblem, RaggedSpec


class UnsupportedByBackend(NotImplementedError):
    """Error: a backend that was asked for by name cannot run this call; the message says why."""


class NoTangents:
    """Mixin of a backend without forward mode, which is jnp then (transforms/equations.py)."""

    def pushes(self, problem: Problem, blocks: Any, moves: frozenset[str], *, primal: bool) -> bool:
        """Returns False; see Backend.pushes."""
        return False

    def push(
        self, spec: AttentionSpec, operands: Operands, given: Operands, found: Outputs | None
    ) -> Tangents:
        """Raises, as `pushes` says that nobody may call it."""
        raise AssertionError("this backend has no forward mode")


class NoSecondOrder:
    """Mixin of a backend without forward mode of its backward, which is jnp then."""

    def pushes_backward(
        self, problem: Problem, moves: frozenset[str], wanted: frozenset[str]
    ) -> bool:
        """Returns False; see Backend.pushes_backward."""
        return False

    def push_backward(
        self,
        spec: AttentionSpec,
        operands: Operands,
        cotangents: Cotangents,
        given: Operands,
        moved: Cotangents,
    ) -> Grads:
        """Raises, as `pushes_backward` says that nobody may call it."""
        raise AssertionError("this backend has no forward mode of its backward")


def decode_shared(backend: Backend, spec: DecodeSpec, operands: DecodeOperands) -> Outputs:
    """Computes a decode call whose shared prefixes are read once, by two calls of `decode`."""

    def fitted(spec, operands, sequences):
        problem = dataclasses.replace(describe(operands, spec), batch=sequences)
        return backend.decode(spec, backend.decode_blocks(problem), operands)

    return shared_prefix.attend(fitted, spec, operands)


class Backend(Protocol):
    """One implementation of attention and its gradient."""

    name: str

    @property
    def partitionable(self) -> bool:
        """True if XLA's partitioner may cut batch and heads of it: transforms/sharding.py."""
        ...

    @property
    def reads_output(self) -> bool:
        """True if `backward` reads `o` and `dlse` and computes delta itself, which others get."""
        ...

    def not_automatic(self, problem: Problem | DecodeProblem | RaggedProblem) -> str | None:
        """Returns None if "auto" may take this backend here; else one sentence saying why not."""
        ...

    @property
    def note(self) -> str | None:
        """Name of what runs instead of kernels of this package, for `explain`; None if they do."""
        ...

    def unsupported(self, problem: Problem) -> str | None:
        """Returns None if this backend runs `problem` here; else one sentence saying why not."""
        ...

    def blocks(self, problem: Problem, override: dict[str, Any] | None) -> Any:
        """Returns the tile sizes that would run, a frozen (hashable) dataclass.

        `override` replaces fields. Raises ValueError for an unknown field or a size the kernels
        cannot take.
        """
        ...

    def candidates(self, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        """Returns, for each kernel, tile sizes worth timing as dicts of all fields.

        Those of `blocks` come first. `blocks` takes each of them as its `override`. Empty where
        there is nothing to choose.
        """
        ...

    def forward(self, spec: AttentionSpec, blocks: Any, operands: Operands) -> Outputs:
        """Computes attention.

        What kv_lengths or a negative segment id hides may hold NaN, which must not spread. Outputs
        of queries beyond q_lengths may be anything; those of a negative segment id are those of a
        row without keys.
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
        """Computes gradients of q, k, v and the operands in `wanted` (of core.problem.EXTRA_GRADS).

        Queries whose outputs were discarded (beyond a length, padding) have EMPTY_ROW in lse_log2
        and 0 in delta. Their q and do may hold NaN, as may k and v of padding, and none of it must
        spread: the gradients of padding are 0, unless score_mod's derivative is not finite.
        """
        ...

    def pushes(self, problem: Problem, blocks: Any, moves: frozenset[str], *, primal: bool) -> bool:
        """Returns whether `push` runs this problem; if not, forward mode is jnp.

        Args:
            problem: a problem that this backend runs.
            blocks: from `blocks`.
            moves: names of the operands that have tangents.
            primal: the forward is to be computed too.
        """
        ...

    def push(
        self, spec: AttentionSpec, operands: Operands, given: Operands, found: Outputs | None
    ) -> Tangents:
        """Computes the tangents of O and of the log-sum-exp.

        Those of q, k and v are all given, and those of sinks are ignored. What is padding may hold
        NaN as in `forward`; the tangents of padding may be anything.

        Args:
            spec: static parameters.
            operands: the arrays of the call.
            given: their tangents; None is 0.
            found: o, lse_log2 and shift of the forward; None: they are computed too, a shift where
                the forward has one.
        """
        ...

    def pushes_backward(
        self, problem: Problem, moves: frozenset[str], wanted: frozenset[str]
    ) -> bool:
        """Returns whether `push_backward` runs this problem; if not, second order is jnp.

        Args:
            problem: a problem that this backend runs.
            moves: names of the operands that have tangents.
            wanted: names of the operands whose gradients have tangents.
        """
        ...

    def push_backward(
        self,
        spec: AttentionSpec,
        operands: Operands,
        cotangents: Cotangents,
        given: Operands,
        moved: Cotangents,
    ) -> Grads:
        """Computes the tangents of the gradients of q, k and v.

        Args:
            spec: static parameters.
            operands: the arrays of the call.
            cotangents: what `backward` starts from.
            given: tangents of q, k and v.
            moved: tangents of the cotangents; that of the log-sum-exp is of the natural one.
        """
        ...

    def unsupported_decode(self, problem: DecodeProblem) -> str | None:
        """Returns None if this backend decodes `problem` here; else one sentence saying why not."""
        ...

    def decode_blocks(self, problem: DecodeProblem) -> Any:
        """Returns how `problem` would run, a frozen dataclass; its `num_splits` is an int.

        Not called where `unsupported_decode` has a reason.
        """
        ...

    def decode(self, spec: DecodeSpec, blocks: Any, operands: DecodeOperands) -> Outputs:
        """Computes attention of a few queries to a cache.

        The backend clips lengths and page ids, as `DecodeOperands` says. Returns o [B, T, N, Hv] in
        q's dtype and lse_log2 f32[B, N, T], the same bits in every run.
        """
        ...

    def unsupported_ragged(self, problem: RaggedProblem) -> str | None:
        """Returns None if this backend runs `problem` here; else one sentence saying why not."""
        ...

    def ragged_blocks(self, problem: RaggedProblem) -> RaggedBlocks:
        """Returns how `problem` would run. Not called where `unsupported_ragged` has a reason."""
        ...

    def ragged(self, spec: RaggedSpec, blocks: RaggedBlocks, operands: RaggedOperands) -> Outputs:
        """Computes ragged attention over pages; see core.ragged.attend.

        Returns o [tokens, N, Hv] in q's dtype, and lse_log2 and shift f32[N, tokens], the same bits
        in every run; rows of no sequence are those of a query without keys.
        """
        ...
