"""Runs the oracle's cases against any attention function.

    python -m flash_pallas.conformance jax.nn:dot_product_attention --with implementation=xla

The function takes (q, k, v, ...) in the layout [B, T, N, H], as `flash_attention` and
`jax.nn.dot_product_attention` do. Its signature shows which options it has, under the names of this
package or of other libraries. Output and gradients are compared with the oracle in float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import reference
from .frontend.validate import SYNONYMS

OUTPUT_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
RIGHT, WRONG, REFUSED, NOT_OFFERED = "right", "wrong", "refused", "not offered"
# Names of other libraries that mean something else than the option they stand for.
UNLIKE = {"ab", "block_mask", "key_padding_mask", "sliding_window", "sliding_window_size"}
# Options whose gradient is compared too, where a case has them.
DIFFERENTIABLE = ("bias", "alibi_slopes", "sinks")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of q [B, T, N, H], k [B, S, K, H] and v [B, S, K, H]."""

    B: int = 2
    T: int = 48
    S: int = 48
    N: int = 4
    K: int = 4
    H: int = 32

    def shape(self, axes: str) -> tuple[int, ...]:
        """Returns the shape that letters name, as in "BN1S"; "1" is an axis of one."""
        return tuple(1 if axis == "1" else getattr(self, axis) for axis in axes)


Recipe = Callable[[np.random.Generator, Sizes], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an attention function.

    Attributes:
        name: the feature that it tests.
        options: arguments, by their names in `flash_attention`. A function as a value draws an
            array.
        sizes: the sizes of q, k and v.
        dtype: the dtype of q, k and v; None means that of the run.
        changed: (q, k, v) -> (q, k, v) in numpy, applied to the arrays that were drawn.
        empty_rows: whether some queries see no key or lie beyond their length. Libraries return
            different values there, which are reported and not compared.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Sizes = Sizes()
    dtype: str | None = None
    changed: Callable | None = None
    empty_rows: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of one case.

    Attributes:
        case: name of the case.
        verdict: RIGHT, WRONG, REFUSED or NOT_OFFERED.
        detail: the result with the largest error, the first line of the exception, or the missing
            options.
        error: largest error of that result.
        allowed: largest error that counts as right.
    """

    case: str
    verdict: str
    detail: str = ""
    error: float | None = None
    allowed: float | None = None

    def __str__(self) -> str:
        text = f"{self.case:<34} {self.verdict:<12}"
        if self.error is not None:
            text += f" error {self.error:.2g}, allowed {self.allowed:.2g}"
        return f"{text} {self.detail}".rstrip()


# --- Cases ----------------------------------------------------------------------------------------


def _normal(axes: str) -> Recipe:
    return lambda rng, sizes: rng.normal(size=sizes.shape(axes)).astype(np.float32)


def _mask(axes: str) -> Recipe:
    """Draws a mask that hides half, and shows every query its first key."""

    def draw(rng, sizes):
        mask = rng.random(sizes.shape(axes)) < 0.5
        mask[..., 0] = True
        return mask

    return draw


def _additive_mask(rng, sizes):
    return np.where(_mask("B1TS")(rng, sizes), 0.0, -1e9).astype(np.float32)


def _infinite_mask(rng, sizes):
    return np.where(_mask("B1TS")(rng, sizes), 0.0, -np.inf).astype(np.float32)


def _blind_rows(rng, sizes):
    mask = _mask("B1TS")(rng, sizes)
    mask[:, :, :5] = False
    return mask


def _lengths(least: int, axis: str) -> Recipe:
    """Draws lengths [B], one of which is the whole length."""
    return lambda rng, sizes: np.asarray([getattr(sizes, axis), least], np.int32)[: sizes.B]


def _documents(rng, sizes):
    """Returns ids [B, T] of three documents."""
    ids = np.sum(np.arange(sizes.T)[:, None] >= np.asarray([0, 11, 30]), 1)
    return np.tile(ids, (sizes.B, 1)).astype(np.int32)


def _slopes(rng, sizes):
    return np.exp2(-8.0 * np.arange(1, sizes.N + 1) / sizes.N).astype(np.float32)


def _large_logits(q, k, v):
    return 30.0 * q, k, v


def _nan_keys(q, k, v):
    """Puts NaN where the case's kv_lengths hide keys and values of entry 1."""
    k, v = k.copy(), v.copy()
    k[1, 29:], v[1, 29:] = np.nan, np.nan
    return q, k, v


_PACKED = {"causal": True, "q_segment_ids": _documents, "kv_segment_ids": _documents}
_TOGETHER = {"causal": True, "mask": _mask("11TS"), "bias": _normal("1NTS")}
_LONGER = Sizes(T=40, S=72)
_GQA = Sizes(N=8, K=2)
_LONG_GQA = Sizes(T=512, S=512, K=2, H=64)
CASES: tuple[Case, ...] = (
    Case("full"),
    Case("causal", {"causal": True}),
    Case("T and S differ", sizes=_LONGER),
    Case("causal, T and S differ", {"causal": True}, _LONGER),
    Case("odd lengths, head dim 40", {"causal": True}, Sizes(T=37, S=37, H=40)),
    Case("GQA", {"causal": True}, _GQA),
    Case("MQA", sizes=Sizes(K=1)),
    Case("no batch axis", {"causal": True}, Sizes(B=0)),
    Case("scale", {"scale": 0.31}),
    Case("logits of 30 and more", changed=_large_logits),
    Case("window", {"window": (5, 3)}),
    Case("causal window", {"causal": True, "window": (8, 0)}),
    Case("bias", {"bias": _normal("BNTS")}),
    Case("bias of all entries and queries", {"bias": _normal("1N1S")}),
    Case("bias of -1e9", {"bias": _additive_mask}),
    Case("mask", {"mask": _mask("B1TS")}),
    Case("mask of keys", {"mask": _mask("B11S")}),
    Case("mask, queries without keys", {"mask": _blind_rows}, empty_rows=True),
    Case("causal, mask and bias, GQA", _TOGETHER, _GQA),
    Case("lengths of keys", {"kv_lengths": _lengths(29, "S")}),
    Case("lengths of keys, NaN beyond", {"kv_lengths": _lengths(29, "S")}, changed=_nan_keys),
    Case("lengths of queries", {"q_lengths": _lengths(17, "T")}, empty_rows=True),
    Case("packed documents", _PACKED),
    Case("softcap", {"softcap": 2.0}),
    Case("softcap, bias of -inf", {"softcap": 2.0, "bias": _infinite_mask}),
    Case("ALiBi", {"causal": True, "alibi_slopes": _slopes}),
    Case("sinks", {"sinks": _normal("N")}),
    Case("query offset", {"causal": True, "q_offset": 32}, _LONGER),
    Case("bfloat16", {"causal": True}, dtype="bfloat16"),
    Case("bfloat16, 512 keys, GQA", {"causal": True}, _LONG_GQA, "bfloat16"),
    Case("float16", {"causal": True}, dtype="float16"),
)


# --- Calls ----------------------------------------------------------------------------------------


def check(
    function: Callable[..., Any],
    cases: Iterable[Case] = CASES,
    *,
    dtype: str | None = None,
    **fixed: Any,
) -> Iterator[Verdict]:
    """Yields a verdict on what `function` does with each case.

    A result is right if its largest error, measured against the oracle in float64, stays within a
    bound. The bound is twice (for the output) or three times (for gradients) the error of plain
    `jnp` attention in the same dtype, plus the effect of rounding the largest element and the
    largest logit once.

    Args:
        function: (q, k, v, ...) -> o, or a tuple whose first element is o; q is [B, T, N, H] or
            [T, N, H].
        cases: cases from CASES.
        dtype: dtype of cases that have none of their own. None means float32, or bfloat16 on a GPU.
        **fixed: further arguments of every call, by the function's own names.

    Yields:
        A `Verdict` for each case, in the order of the cases.

    Example:
        >>> import jax
        >>> from flash_pallas import conformance
        >>> verdicts = conformance.check(jax.nn.dot_product_attention, conformance.CASES[:2])
        >>> [(each.case, each.verdict) for each in verdicts]
        [('full', 'right'), ('causal', 'right')]
    """
    dtype = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    parameters = _parameters(function)
    for case in cases:
        case = dataclasses.replace(case, dtype=case.dtype or dtype)
        arrays, options = _drawn(case)
        names, missing = _names(options, parameters)
        if missing:
            yield Verdict(case.name, NOT_OFFERED, ", ".join(missing))
        else:
            yield _verdict(_renamed(function, names, fixed), case, arrays, options)


def _verdict(call: Callable, case: Case, arrays, options) -> Verdict:
    """Runs one case and compares the results."""
    try:
        tested = _results(call, arrays, options)
    except Exception as error:  # any error means that it does not compute this case
        lines = str(error).strip().splitlines() or [""]
        return Verdict(case.name, REFUSED, f"{type(error).__name__}: {lines[0][:200]}")
    with jax.enable_x64(True):
        exact = _results(_oracle, _wide(arrays), _wide(options))
    plain = _results(_plain, arrays, options)
    if fault := _misshapen(tested, arrays):
        return Verdict(case.name, WRONG, fault)
    note = ""
    if case.empty_rows:
        empty = ~_seeing(case.sizes, options)
        note = _without_rows(empty, tested["o"], exact["o"], plain["o"], arrays["v"])
    unit = float(jnp.finfo(case.dtype).eps + jnp.finfo(jnp.float32).eps * _largest_logit(arrays))
    compared = [_compared(name, tested[name], exact[name], plain[name], unit) for name in exact]
    # NaN cannot be compared, so it counts as the largest error.
    error, allowed, name = max(compared, key=lambda x: x[0] / x[1] if x[0] >= 0.0 else np.inf)
    if error <= allowed:
        return Verdict(case.name, RIGHT, note, error, allowed)
    name, error = (name, error) if error >= 0.0 else (f"{name} has NaN", None)
    return Verdict(case.name, WRONG, "; ".join(filter(None, (name, note))), error, allowed)


def _parameters(function: Callable) -> set[str] | None:
    """Returns the names of a function's parameters; None if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


def _names(options, parameters: set[str] | None) -> tuple[dict[str, str], list[str]]:
    """Returns the function's name of every option, and the options that it lacks."""
    if parameters is None:
        return {name: name for name in options}, []
    synonyms = {group.split()[0]: group.split() for group in SYNONYMS}
    spelled = {}
    for name in options:
        spellings = synonyms.get(name, [name])
        spelled[name] = next(
            (spelling for spelling in spellings if spelling in parameters - UNLIKE), None
        )
    missing = [name for name, spelling in spelled.items() if spelling is None]
    return {name: spelling for name, spelling in spelled.items() if spelling}, missing


def _renamed(function: Callable, names: dict[str, str], fixed) -> Callable:
    def call(q, k, v, **options):
        outputs = function(q, k, v, **{names[name]: x for name, x in options.items()}, **fixed)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    return call


def _drawn(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws q, k, v and the cotangent of o, and the options; the same in every run."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    sizes = case.sizes if case.sizes.B else dataclasses.replace(case.sizes, B=1)
    q, k, v, do = (rng.normal(size=sizes.shape(axes)) for axes in ("BTNH", "BSKH", "BSKH", "BTNH"))
    if case.changed is not None:
        q, k, v = case.changed(q, k, v)
    arrays = {"q": q, "k": k, "v": v, "do": do}
    if not case.sizes.B:
        arrays = {name: x[0] for name, x in arrays.items()}
    options = {name: x(rng, sizes) if callable(x) else x for name, x in case.options.items()}
    options = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    if case.empty_rows:  # what a query without keys returns is not compared, nor its gradient
        arrays["do"] = np.where(_seeing(sizes, options)[..., None, None], arrays["do"], 0.0)
    return {name: jnp.asarray(x, case.dtype) for name, x in arrays.items()}, options


def _results(call: Callable, arrays, options) -> dict[str, np.ndarray]:
    """Computes the output of one call and its gradients, by name, with their dtypes."""
    primals = {name: arrays[name] for name in ("q", "k", "v")}
    primals |= {name: options[name] for name in DIFFERENTIABLE if name in options}
    constants = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in options.items() if n not in constants}

    def outputs(primals, constants):
        side = {name: primals.get(name, x) for name, x in constants.items()}
        return call(primals["q"], primals["k"], primals["v"], **side, **static)

    def run(primals, constants, do):
        o, pull = jax.vjp(lambda primals: outputs(primals, constants), primals)
        (grads,) = pull(do.astype(o.dtype).reshape(o.shape))
        return {"o": o} | {f"d{name}": x for name, x in grads.items()}

    o_and_gradients = _quick_jit(run)(primals, constants, arrays["do"])
    return {name: np.array(x) for name, x in o_and_gradients.items()}


def _quick_jit(function: Callable) -> Callable:
    """Calls jax.jit; on a CPU without optimization, as compiling takes most of the time there."""
    if jax.default_backend() != "cpu":
        return jax.jit(function)
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)


def _wide(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of floats as float64; under x64 only."""
    floats = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
    return {name: wide(x) if floats(x) else x for name, x in arrays.items()}


def _oracle(q, k, v, **options):
    batched = [x[None] if q.ndim == 3 else x for x in (q, k, v)]
    results = reference.attention(*batched, rounded_logits=True, full_precision=True, **options)
    return results[0].reshape(q.shape)


def _plain(q, k, v, **options):
    """Computes attention as one would write it in jnp: float32 softmax, the rest in q's dtype."""
    m, shape = reference.Modifiers(**options), q.shape
    q, k, v = (x[None] if q.ndim == 3 else x for x in (q, k, v))
    q, k, v = m.cleared_queries(q), m.cleared_keys(k), m.cleared_keys(v)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if m.scale is None else m.scale
    s = scale * jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    keep = m.visible(s.shape)
    p, _, _ = m.softmax(m.logits(s, keep), keep)
    o = jnp.einsum("bnts,bsnh->btnh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return m.cleared_queries(o.astype(v.dtype)).reshape(shape)


# --- Comparison -----------------------------------------------------------------------------------


def _misshapen(tested, arrays) -> str:
    """Returns a message about a result with the wrong shape or dtype, if there is one."""
    for name, x in (("o", arrays["q"]), ("dq", arrays["q"]), ("dk", arrays["k"])):
        if tested[name].shape != x.shape or tested[name].dtype != x.dtype:
            got = f"{tested[name].dtype}{list(tested[name].shape)}"
            return f"{name} is {got}, expected {x.dtype}{list(x.shape)}"
    return ""


def _seeing(sizes: Sizes, options) -> np.ndarray:
    """Returns bool[B, T], True for the queries that see a key."""
    visible = reference.Modifiers(**options).visible(sizes.shape("BNTS"))
    return np.asarray(visible.any((1, 3)))


def _without_rows(rows, tested, exact, plain, v) -> str:
    """Clears these rows [B, T] of three outputs, in place; returns what `tested` had in them."""
    values = tested.astype(np.float64)[rows]
    mean = np.asarray(v, np.float64).mean(1)[np.nonzero(rows)[0]]
    contents = "something else"
    if not values.any():
        contents = "0"
    elif values.shape == mean.shape and np.allclose(values, mean, atol=0.02):
        contents = "the mean of the values"
    elif not np.isfinite(values).all():
        contents = "NaN"
    for x in (tested, exact, plain):
        x[rows] = 0.0
    return f"queries without keys return {contents}"


def _largest_logit(arrays) -> float:
    """Returns the largest |q @ k^T| / sqrt(H) of one head with itself: float32 rounds those."""
    q, k = (np.asarray(arrays[name], np.float64) for name in ("q", "k"))
    logits = np.einsum("...th,...sh->...ts", q[..., 0, :], k[..., 0, :])
    return float(np.nanmax(np.abs(logits))) * q.shape[-1] ** -0.5


def _compared(name: str, tested, exact, plain, unit: float) -> tuple[float, float, str]:
    """Returns (largest error, largest that is allowed, name of the result)."""
    distance = lambda x: float(np.max(np.abs(x.astype(np.float64) - exact), initial=0.0))
    factor = OUTPUT_FACTOR if name == "o" else GRADIENT_FACTOR
    largest = float(np.max(np.abs(exact), initial=0.0))
    return distance(tested), factor * distance(plain) + unit * largest, name


# --- Command line ---------------------------------------------------------------------------------


def loaded(name: str) -> Callable:
    """Returns the function that "module:function" names.

    Raises:
        ValueError: the name has no colon, or there is no such function.
        ImportError: there is no such module.
    """
    module, colon, path = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} must be module:function, as in jax.nn:dot_product_attention")
    member: Any = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(member, part):
            raise ValueError(f"{name!r}: {member.__name__} has no {part!r}")
        member = getattr(member, part)
    return member


def _argument(text: str) -> tuple[str, Any]:
    """Reads "name=value"; the value is JSON, else a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a case was wrong."""
    parser = argparse.ArgumentParser(prog="python -m flash_pallas.conformance", description=__doc__)
    parser.add_argument("function", help="module:function, as in jax.nn:dot_product_attention")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--with", dest="fixed", action="append", default=[], type=_argument, metavar="NAME=VALUE"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"no case's name contains {options.only!r}")
    sys.path.insert(0, "")  # finds modules in the working directory, like `python -m`
    try:
        function = loaded(options.function)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    verdicts = []
    for verdict in check(function, cases, dtype=options.dtype, **dict(options.fixed)):
        verdicts.append(verdict)
        if not options.json:
            print(verdict, flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=1))
    else:
        counts = (f"{sum(v.verdict == x for v in verdicts)} {x}" for x in _VERDICTS)
        print(f"{options.function}: {', '.join(counts)}")
    return int(any(verdict.verdict == WRONG for verdict in verdicts))


_VERDICTS = (RIGHT, WRONG, REFUSED, NOT_OFFERED)


if __name__ == "__main__":
    sys.exit(main())
