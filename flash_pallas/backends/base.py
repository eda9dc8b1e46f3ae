"""Interface of a backend: a name, and one object for each operation that it offers.

An operation says whether it runs a problem, how it would, and runs it:

    refusal(problem) -> None, or one sentence saying why not
    plan(problem) -> the tile sizes that would run, a frozen (hashable) record
    run(spec, plan, operands) -> the results

The derivatives of attention have no plan of their own: Vjp.run and Jvp.refusal take that of
attention. A problem that attention refuses never reaches them.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Protocol

from ..core import shared_prefix
from ..core.decode import DecodeOperands, DecodeProblem, DecodeSpec, describe
from ..core.problem import (
    AttentionSpec,
    Cotangents,
    Operands,
    Outputs,
    Problem,
    Tangents,
)
from ..core.ragged import RaggedBlocks, RaggedOperands, RaggedProblem, RaggedSpec


class UnsupportedByBackend(NotImplementedError):
    """Error: a backend that was asked for by name cannot run this call; the message says why."""


class Operation:
    """Base class of what "auto" chooses a backend for."""

    def not_automatic(self, problem: Any) -> str | None:
        """Returns None if "auto" may take this backend here; else one sentence saying why not."""
        return None


class Attention(Operation, abc.ABC):
    """Attention: q, k and v in, O and the log-sum-exp out."""

    @abc.abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Returns None if this backend runs `problem` here; else one sentence saying why not."""

    @abc.abstractmethod
    def plan(self, problem: Problem, override: dict[str, Any] | None = None) -> Any:
        """Returns the tile sizes of the forward and of the backward that would run.

        Args:
            problem: a problem that this backend runs.
            override: fields to be replaced.

        Raises:
            ValueError: an unknown field, or a size that the kernels cannot take.
        """

    def candidates(self, problem: Problem) -> dict[str, list[dict[str, Any]]]:
        """Returns, for each kernel, tile sizes worth timing as dicts of all fields.

        Those of `plan` come first. `plan` takes each of them as its `override`. Empty where there
        is nothing to choose.
        """
        return {}

    @abc.abstractmethod
    def run(self, spec: AttentionSpec, blocks: Any, operands: Operands) -> Outputs:
        """Computes attention.

        What kv_lengths or a negative segment id hides may hold NaN, which must not spread. Outputs
        of queries beyond q_lengths may be anything; those of a negative segment id are those of a
        row without keys.
        """


class Vjp(abc.ABC):
    """Reverse mode of attention."""

    # True if `run` reads `o` and `dlse` and computes delta itself, which others get.
    reads_output = False

    @abc.abstractmethod
    def run(
        self,
        spec: AttentionSpec,
        blocks: Any,
        operands: Operands,
        cotangents: Cotangents,
        wanted: frozenset[str],
    ) -> Operands:
        """Computes gradients of q, k, v and the operands in `wanted` (of core.problem.EXTRA_GRADS).

        Queries whose outputs were discarded (beyond a length, padding) have EMPTY_ROW in lse_log2
        and 0 in delta. Their q and do may hold NaN, as may k and v of padding, and none of it must
        spread: the gradients of padding are 0, unless score_mod's derivative is not finite.
        """


class Jvp(abc.ABC):
    """Forward mode of attention. What it refuses is computed in jnp: transforms/equations.py."""

    @abc.abstractmethod
    def refusal(
        self, problem: Problem, blocks: Any, moves: frozenset[str], *, primal: bool
    ) -> str | None:
        """Returns None if `run` takes this problem; else one sentence saying why not.

        Args:
            problem: a problem that this backend runs.
            blocks: from `Attention.plan`.
            moves: names of the operands that have tangents.
            primal: the forward is to be computed too.
        """

    @abc.abstractmethod
    def run(
        self, spec: AttentionSpec, operands: Operands, tangents: Operands, outputs: Outputs | None
    ) -> Tangents:
        """Computes the tangents of O and of the log-sum-exp.

        Those of q, k and v are all given, and those of sinks are ignored. What is padding may hold
        NaN as in `Attention.run`; the tangents of padding may be anything.

        Args:
            spec: static parameters.
            operands: the arrays of the call.
            tangents: their tangents; None is 0.
            outputs: o, lse_log2 and shift of the forward; None: they are computed too, a shift
                where the forward has one.
        """


class JvpOfVjp(abc.ABC):
    """Forward mode of the gradients, as of a Hessian-vector product. Else it is computed in jnp."""

    @abc.abstractmethod
    def refusal(
        self, problem: Problem, moves: frozenset[str], wanted: frozenset[str]
    ) -> str | None:
        """Returns None if `run` takes this problem; else one sentence saying why not.

        Args:
            problem: a problem that this backend runs.
            moves: names of the operands that have tangents.
            wanted: names of the operands whose gradients have tangents.
        """

    @abc.abstractmethod
    def run(
        self,
        spec: AttentionSpec,
        operands: Operands,
        cotangents: Cotangents,
        tangents: Operands,
        cotangents_tangents: Cotangents,
    ) -> Operands:
        """Computes the tangents of the gradients of q, k and v.

        Args:
            spec: static parameters.
            operands: the arrays of the call.
            cotangents: what `Vjp.run` starts from.
            tangents: tangents of q, k and v.
            cotangents_tangents: tangents of the cotangents; that of the log-sum-exp is of the
                natural one.
        """


class Decode(Operation, abc.ABC):
    """Attention of a few queries to a cache."""

    @abc.abstractmethod
    def refusal(self, problem: DecodeProblem) -> str | None:
        """Returns None if this backend decodes `problem` here; else one sentence saying why not."""

    @abc.abstractmethod
    def plan(self, problem: DecodeProblem) -> Any:
        """Returns how `problem` would run; its `num_splits` is an int.

        Not called where `refusal` has a reason.
        """

    @abc.abstractmethod
    def run(self, spec: DecodeSpec, blocks: Any, operands: DecodeOperands) -> Outputs:
        """Computes attention of a few queries to a cache.

        The backend clips lengths and page ids, as `DecodeOperands` says. Returns o [B, T, N, Hv] in
        q's dtype and lse_log2 f32[B, N, T], the same bits in every run.
        """

    def run_shared(self, spec: DecodeSpec, operands: DecodeOperands) -> Outputs:
        """Computes a call whose shared prefixes are read once, by two calls of `run`."""

        def fitted(spec, operands, sequences):
            problem = dataclasses.replace(describe(operands, spec), batch=sequences)
            return self.run(spec, self.plan(problem), operands)

        return shared_prefix.attend(fitted, spec, operands)


class Ragged(Operation, abc.ABC):
    """Attention of sequences of any length to their pages."""

    @abc.abstractmethod
    def refusal(self, problem: RaggedProblem) -> str | None:
        """Returns None if this backend runs `problem` here; else one sentence saying why not."""

    @abc.abstractmethod
    def plan(self, problem: RaggedProblem) -> RaggedBlocks:
        """Returns how `problem` would run. Not called where `refusal` has a reason."""

    @abc.abstractmethod
    def run(self, spec: RaggedSpec, blocks: RaggedBlocks, operands: RaggedOperands) -> Outputs:
        """Computes ragged attention over pages; see core.ragged.attend.

        Returns o [tokens, N, Hv] in q's dtype, and lse_log2 and shift f32[N, tokens], the same bits
        in every run; rows of no sequence are those of a query without keys.
        """


class Refused:
    """An operation that a backend does not offer: it refuses every problem with one reason."""

    def __init__(self, reason: str):
        self.reason = reason

    def refusal(self, *_, **__) -> str:
        """Returns the reason."""
        return self.reason

    def plan(self, problem: Any) -> Any:
        """Raises AssertionError, as `refusal` has a reason."""
        raise AssertionError(self.reason)

    def run(self, *_) -> Any:
        """Raises AssertionError, as `refusal` has a reason."""
        raise AssertionError(self.reason)


class Backend(Protocol):
    """One implementation of attention and of its derivatives."""

    name: str

    @property
    def partitionable(self) -> bool:
        """True if XLA's partitioner may cut batch and heads of it: transforms/sharding.py."""
        ...

    @property
    def note(self) -> str | None:
        """Name of what runs instead of kernels of this package, for `explain`; None if they do."""
        ...

    @property
    def attention(self) -> Attention:
        """Attention of whole sequences."""
        ...

    @property
    def vjp(self) -> Vjp:
        """The gradients of attention."""
        ...

    @property
    def jvp(self) -> Jvp | Refused:
        """The tangents of attention."""
        ...

    @property
    def jvp_of_vjp(self) -> JvpOfVjp | Refused:
        """The tangents of the gradients."""
        ...

    @property
    def decode(self) -> Decode | Refused:
        """Attention to a cache."""
        ...

    @property
    def ragged(self) -> Ragged | Refused:
        """Attention over pages."""
        ...
