"""`explain`: which backend runs each attention call of a function, and why."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from ..backends.base import Backend
from ..backends.xla import XlaBackend
from ..core.decode import DecodeProblem
from ..core.problem import EXTRA_GRADS, Problem
from ..core.ragged import RaggedProblem
from ..devices import targeted
from . import dispatch
from .dispatch import AnyProblem


@dataclasses.dataclass(frozen=True)
class ExplainedCall:
    """The backend and tiles of one attention call, and why not others; `str()` returns a text.

    Attributes:
        problem: the shapes of the call.
        backend: name of the backend that would run, or "none" if there is nothing to compute.
        blocks: its tile sizes.
        reasons: for every other backend, a sentence that says why it would not run.
        sources: for every kernel, the source of its tile sizes: "caller", the user's cache or the
            shipped table with the name of the file, or "heuristic". "heuristic" is also used if a
            table says that the heuristic's tile sizes were the fastest of those timed.
        gpu: the GPU of the enclosing `target`; None means the GPU that is here.
        note: what runs if it is not a kernel of this package; otherwise None.
        orders: what runs for tangents and for second derivatives, if differentiable is "any".
    """

    problem: AnyProblem
    backend: str
    blocks: Any
    reasons: dict[str, str]
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    gpu: str | None = None
    note: str | None = None
    orders: str | None = None

    def __str__(self) -> str:
        problem = p = self.problem
        if isinstance(problem, RaggedProblem):
            p = problem.steps
        function, rows, length = "flash_attention", p.batch, p.kv_len
        queries = f"{p.batch}, {p.q_len}"
        if isinstance(p, DecodeProblem):
            function = "flash_decode"
            if p.num_pages is not None:
                rows, length = p.num_pages, p.spec.page_size
        if isinstance(problem, RaggedProblem):
            function, queries = "ragged_paged_attention", f"{problem.tokens}"
        lines = [
            f"{function} on q [{queries}, {p.q_heads}, {p.head_dim}], "
            f"k [{rows}, {length}, {p.kv_heads}, {p.head_dim}], "
            f"v [{rows}, {length}, {p.kv_heads}, {p.v_head_dim}], {p.dtype}"
            + (f", on {self.gpu}" if self.gpu else ""),
            f"  runs on: {self.backend}" + (f", {self.blocks}" if self.blocks is not None else ""),
        ]
        if isinstance(p, Problem) and p.is_listed:
            lines.append("  skips blocks of {} queries and {} keys".format(*p.list_block))
        if isinstance(p, DecodeProblem) and p.spec.shares_prefix:
            lines.append("  reads shared prefixes once")
        if self.orders:
            lines.append(f"  {self.orders}")
        if self.note:
            lines.append(f"  which is {self.note}")
        if self.sources:
            sources = (f"{kernel}: {source}" for kernel, source in self.sources.items())
            lines.append(f"  blocks from: {'; '.join(sources)}")
        return "\n".join(lines + [f"  not on {name}: {why}" for name, why in self.reasons.items()])


class Explanation:
    """The backends of the attention calls of a function, with reasons; its `repr` is readable text.

    It also has the attributes of an `ExplainedCall`, if all calls agree in them.

    Attributes:
        calls: an `ExplainedCall` for every traced call of this package, in order.
    """

    calls: tuple[ExplainedCall, ...]
    if TYPE_CHECKING:
        problem: AnyProblem
        backend: str
        blocks: Any
        reasons: dict[str, str]
        sources: dict[str, str]
        gpu: str | None
        note: str | None
        orders: str | None

    def __init__(self, calls: tuple[ExplainedCall, ...]):
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in ExplainedCall.__dataclass_fields__:
            raise AttributeError(f"an Explanation has no attribute {name!r}")
        if not self.calls:
            raise AttributeError(f"no attention call was traced, so there is no {name!r}")
        first, *rest = (getattr(call, name) for call in self.calls)
        if any(x != first for x in rest):
            raise AttributeError(
                f"the {len(self.calls)} attention calls differ in {name!r}: look at those in .calls"
            )
        return first

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Explanation) and self.calls == other.calls

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not self.calls:
            return "no call of flash_pallas was traced"
        counts = collections.Counter(map(str, self.calls))
        return "\n".join(
            text + (f"\n  {count} calls like this one" if count > 1 else "")
            for text, count in counts.items()
        )


# With the first, type checkers compare the arguments with the function's own, which are arrays.
@overload
def explain[**P](
    function: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs
) -> Explanation: ...
@overload
def explain(
    function: Callable[..., Any], /, *args: jax.ShapeDtypeStruct | None, **kwargs: Any
) -> Explanation: ...
def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Returns the backend and tiles that each attention call of a function would run, and why.

    The function is traced with the shapes of its arguments, as by `jax.eval_shape`, and nothing is
    run. The result covers all calls of this package in it, including those inside layers, jitted
    functions and gradients. The layers of a `scan` are traced and reported once, and so is a jitted
    function that is called again with the same shapes. Inside vmap and shard_map, the shapes are
    those that the call sees there. As under `jax.jit`, an nnx module that changes its state, as its
    dropout does, must be an argument or the function itself.

    Within a `flash_pallas.target`, the result is for that GPU.

    Args:
        function: any function that calls attention: `flash_attention`, `flash_decode`, a jitted
            function, `jax.grad(loss)`, an nnx module, or a linen module, which is initialized.
        *args: its arguments. A `jax.ShapeDtypeStruct` may replace any array.
        **kwargs: its keyword arguments, likewise.

    Returns:
        An `Explanation`; print it.

    Raises:
        TypeError: the first argument is not a function.
        Exception: the exceptions that `function` itself raises, such as the ValueError of an
            attention call.
        UnsupportedByBackend: a backend that a call names cannot run it; the message gives the
            reason.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import flash_pallas
        >>> from flash_pallas import explain, flash_attention
        >>> x = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)
        >>> with flash_pallas.target("H100"):
        ...     explanation = explain(flash_attention, x, x, x, causal=True)
        >>> explanation.backend
        'hopper'
    """
    # `functools.wraps` also copies the mark to wrappers of other packages.
    ours = getattr(function, "makes_one_call", None) is function
    # On a mesh tracing goes on after the plan, where the sharding of arrays is checked.
    first_only = ours and jax.sharding.get_abstract_mesh().empty
    return Explanation(tuple(_calls_of(function, args, kwargs, ours=ours, first_only=first_only)))


def first_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> ExplainedCall:
    """Returns what `explain` says about the first call. Nothing after that call is traced.

    Integers are passed to the function as they are, so that known lengths are checked.
    """
    calls = _calls_of(function, args, kwargs, ours=True, first_only=True)
    if not calls:
        raise ValueError(f"{function} made no attention call")
    return calls[0]


def _calls_of(
    function: Callable[..., Any], args, kwargs, *, ours: bool, first_only: bool
) -> list[ExplainedCall]:
    """Returns what `explain` says of the calls of a function.

    Args:
        function: as of `explain`.
        args: its arguments.
        kwargs: its keyword arguments.
        ours: whether integers are given to it as they are.
        first_only: whether the first call is enough.
    """
    listener = _Explainer(_platform((args, kwargs)), first_only=first_only)
    is_abstract = _is_only_shape if ours else lambda x: isinstance(x, _ARRAYS)
    with contextlib.suppress(_FirstCall):
        _trace(function, args, kwargs, listener, is_abstract)
    return listener.calls


_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def _trace(
    function: Callable[..., Any],
    args,
    kwargs,
    listener: _Explainer,
    is_abstract: Callable[[Any], bool],
) -> None:
    """Traces function(*args, **kwargs) with the listener.

    Args:
        function: the function, as in `explain`.
        args: its arguments.
        kwargs: its keyword arguments.
        listener: the object that is told about the calls.
        is_abstract: returns whether only the shape of an argument matters.
    """
    _check(function, kwargs)
    leaves, tree = jax.tree.flatten((_callable(function), args, kwargs))
    places = [i for i, x in enumerate(leaves) if is_abstract(x)]

    def traced(arrays):
        replaced = list(leaves)
        for place, x in zip(places, arrays, strict=True):
            replaced[place] = x
        function, args, kwargs = jax.tree.unflatten(tree, replaced)
        function(*args, **kwargs)

    with dispatch.heard_by(listener):
        jax.eval_shape(traced, [leaves[i] for i in places])


def _is_only_shape(x) -> bool:
    """Returns whether a function of this package reads nothing but the shape of an argument.

    It reads lengths where they are known. Queries, keys and caches are traced, as some of them
    would be copied: those of several batch dimensions, and caches that are appended to.
    """
    if isinstance(x, (jax.ShapeDtypeStruct, jax.core.Tracer)):
        return True
    return isinstance(x, _ARRAYS) and x.ndim > 2 and jnp.issubdtype(x.dtype, jnp.inexact)


def _check(function, kwargs) -> None:
    if not callable(function) and not hasattr(function, "init_with_output"):
        kind = repr(function)
        if isinstance(function, _ARRAYS):
            kind = f"an array of shape {function.shape}"
        raise TypeError(
            f"explain takes a function first, got {kind}: write "
            "explain(flash_attention, q, k, v, causal=True)"
        )
    if "gpu" in kwargs and getattr(function, "__module__", "").startswith("flash_pallas."):
        raise TypeError(
            f"explain has no argument 'gpu': write `with flash_pallas.target({kwargs['gpu']!r}):` "
            "around it"
        )


def _callable(function) -> Any:
    """Returns what is called: for a linen module, which has no parameters yet, its `init`.

    A method comes with its object as an argument, so that what it changes there is a copy.
    """
    if inspect.ismethod(function):
        return jax.tree_util.Partial(function.__func__, function.__self__)
    if hasattr(function, "init_with_output") and getattr(function, "scope", None) is None:
        key = jax.random.key(0)
        keys = {"params": key, "dropout": key}
        return lambda *args, **kwargs: function.init_with_output(keys, *args, **kwargs)
    return function


def _platform(tree) -> str | None:
    """Returns the platform of the arrays in a tree, which tracing does not see."""
    return dispatch.platform_of(jax.tree.leaves(tree))


class _FirstCall(Exception):
    """Ends tracing after the first call."""


class _Explainer:
    """Explains the calls that it hears, and lets them run on blockwise jnp.

    What is traced is not run, and jnp traces in a tenth of the time of a kernel. It takes every
    call, under every transformation.

    Attributes:
        platform: that of the caller's arrays.
        first_only: whether the first call is enough.
        calls: what it heard.
    """

    def __init__(self, platform: str | None, *, first_only: bool = False):
        self.platform = platform
        self.first_only = first_only
        self.calls: list[ExplainedCall] = []

    def plan(
        self, problem: AnyProblem, name: str, override: dict[str, Any] | None, platform: str | None
    ) -> tuple[Backend, Any]:
        """Notes a call; see `dispatch.Listener`."""
        self.calls.append(explained(problem, name, override, self.platform or platform))
        if self.first_only:
            raise _FirstCall
        if problem.is_empty:
            return XlaBackend(), None
        return dispatch.planned(problem, XlaBackend())


def explained(
    problem: AnyProblem, name: str, override: dict[str, Any] | None, platform: str | None
) -> ExplainedCall:
    """Returns what would run a call, and why. The arguments are those of `dispatch.plan`.

    Raises:
        ValueError: the backend name is unknown, or the backend cannot take the tile sizes.
        UnsupportedByBackend: as in `dispatch.select`.
    """
    dispatch.check_name(name)
    target = targeted()
    gpu = None if target is None else target.described
    if problem.is_empty:
        reasons = dict.fromkeys(
            dispatch.BACKENDS, "there is no query or no key, so nothing to compute"
        )
        return ExplainedCall(problem, "none", None, reasons, gpu=gpu)
    if target is not None:
        platform = None  # the GPU is not here, so the device of the arrays does not matter
    chosen = dispatch.choose(problem, name, platform, says=False)
    reasons = _reasons(chosen, problem, name, platform)
    if isinstance(problem, DecodeProblem):
        tile = chosen.decode.plan(problem)
        return ExplainedCall(problem, chosen.name, tile, reasons, gpu=gpu)
    if isinstance(problem, RaggedProblem):
        tile = chosen.ragged.plan(problem)
        note = dispatch.of_chunks(chosen, tile)
        return ExplainedCall(problem, chosen.name, tile, reasons, gpu=gpu, note=note)
    tile = dispatch.tiles(chosen, problem, override)
    sources = {} if tile is None else _sources(chosen, problem, override)
    orders = _orders(chosen, problem, tile) if problem.spec.differentiable == "any" else None
    return ExplainedCall(problem, chosen.name, tile, reasons, sources, gpu, chosen.note, orders)


def _reasons(
    chosen: Backend, problem: AnyProblem, name: str, platform: str | None
) -> dict[str, str]:
    """Returns why each other backend was not chosen, by its name."""
    auto = name == dispatch.AUTO
    not_needed = (
        f"{chosen.name!r} can run and is preferred" if auto else "another backend was asked for"
    )
    refusal = dispatch.passed_over if auto else dispatch.refusal
    return {
        other.name: refusal(other, problem, platform) or not_needed
        for other in dispatch.backends_of(targeted()).values()
        if other.name != chosen.name
    }


def _orders(chosen: Backend, problem: Problem, tile: Any) -> str:
    """Returns what runs for tangents of all operands and Hessian-vector products in q, k and v."""
    qkv = frozenset("qkv")
    moves = qkv | (problem.features & {*EXTRA_GRADS, "sinks"})
    refusals = (
        chosen.jvp.refusal(problem, tile, moves, primal=False),
        chosen.jvp_of_vjp.refusal(problem, qkv, qkv),
    )
    if chosen.name == XlaBackend.name:
        first = second = "blockwise jnp"
    else:
        why = lambda reason: f"blockwise jnp, as {chosen.name} {reason}"
        first, second = (why(reason) if reason else "kernels" for reason in refusals)
    return f"tangents: {first}; Hessian-vector products: {second}; other orders: blockwise jnp"


def _sources(chosen: Backend, problem: Problem, override: dict[str, Any] | None) -> dict[str, str]:
    """Returns, by kernel, the source of its tile sizes."""
    kernels = chosen.attention.candidates(problem)
    if not kernels:
        return {"all": "caller" if override else "heuristic"}
    tuned = dispatch.tuned_for(chosen, problem)
    sources = dict.fromkeys(kernels, "heuristic")
    if tuned is not None:
        sources |= {
            name: f"heuristic, fastest in {tuned.source}" for name in sources if name in tuned.timed
        }
        sources |= dict.fromkeys(tuned.blocks, tuned.source)
    return sources | dict.fromkeys(override or {}, "caller")
