"""User functions score_mod(score, b, n, i, j) and mask_mod(b, n, i, j), traced into a `Mod`.

A traced function is cut in two. What depends on b and n alone, and on whatever arrays the function
captured, is evaluated outside the kernels for all batch entries and heads: one [B, N] array for
every value that the rest needs, differentiable like anything else in JAX. What depends on the score
or on i and j is the Mod: elementwise arithmetic on those scalars, which a kernel traces into its
tiles. So an array may be indexed by b and n, but not by i or j.

A mask_mod may also index arrays of integers or bools by i or by j, and by b: what it makes of them
before the two meet is evaluated outside as well, one int32 for every query or key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from . import mesh_axes, width
from .apart import apart
from .elementwise import CONTROL_FLOW, ELEMENTWISE, Tape, fill


class NotElementwise(ValueError):
    """Error: the user's function does something that cannot be traced into a tile."""


@dataclasses.dataclass(frozen=True)
class Mod:
    """A traced function of one score and its position; two are equal if they compute the same.

    Attributes:
        text: the computation as text.
        primitives: names of the primitives it uses.
        step: function (tile, params, score) -> result; not compared, as the text says it.
        vectors: for each of the last params, whether it has a value for each query (0) or key (1);
            all others have one for each batch entry and head.
        keeps_nan: where the score is NaN, so is the result.
    """

    text: str
    primitives: frozenset[str]
    step: Callable = dataclasses.field(compare=False, repr=False)
    vectors: tuple[int, ...] = ()
    keeps_nan: bool = False

    def __call__(self, tile, params, score=None):
        """Applies the function to a whole tile.

        Args:
            tile: gives the positions of queries (i) and keys (j).
            params: the per-head values, spread over the tile.
            score: the tile of scores; None for a mask_mod.
        """
        return self.step(tile, params, score)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["params", "vectors"], meta_fields=["mod"]
)
@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function and the arrays that it reads, a pytree of these.

    Attributes:
        mod: the function.
        params: [B, N] each.
        vectors: int32 [B or 1, T] or [B or 1, S] each, as mod.vectors says.
    """

    mod: Mod
    params: tuple
    vectors: tuple = ()


def trace(
    function: Callable,
    batch: int,
    heads: int,
    score_dtype=None,
    first=(0, 0),
    positions=None,
    wide: bool = False,
) -> Traced:
    """Traces a user's function.

    Args:
        function: score_mod(score, b, n, i, j) or, without score_dtype, mask_mod(b, n, i, j); called
            with traced scalars, int32 except the score.
        batch: number of entries of the (flattened) batch.
        heads: number of query heads.
        score_dtype: dtype of scores, for a score_mod.
        first: numbers of the first entry and of the first head, int or int32.
        positions: function that returns those of queries and of keys, int32 [B or 1, length] each,
            called if a mask_mod indexes arrays by i or j; None where it must not.
        wide: False if numbers of 64 bits, of a program with `jax_enable_x64`, become such of 32
            before they meet the score, i or j.

    Raises:
        NotElementwise: the part that depends on score, i or j is not elementwise arithmetic.
        TypeError: the function takes other arguments, or its result is not one float (score_mod) or
            one bool (mask_mod).
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    leading = () if score_dtype is None else (jax.ShapeDtypeStruct((), score_dtype),)
    closed = _closed(function, (*leading, *(index,) * 4))
    _check_result(closed, score_dtype)
    tape = Tape()
    arguments = [object() for _ in closed.jaxpr.invars]
    (result,) = tape.inline(closed.jaxpr, closed.consts, arguments)
    *score, b, n, i, j = arguments
    kind = "score_mod" if score else "mask_mod"
    tiled, known = {*score, i, j}, []
    tile_equations = []
    for equation in tape.equations:
        _, _, operands, results = equation
        if tiled.isdisjoint(x for x in operands if not isinstance(x, Literal)):
            known.append(equation)
        else:
            tiled.update(results)
            tile_equations.append(equation)
    known, literals = _constants(known)
    put = lambda x: x if isinstance(x, Literal) else literals.get(x, x)
    with_literals = lambda equations: [
        (primitive, params, [*map(put, operands)], results)
        for primitive, params, operands, results in equations
    ]
    known, tile_equations, result = with_literals(known), with_literals(tile_equations), put(result)
    if not wide:
        tile_equations, result = _narrowed(tile_equations, result)
    vectors = []
    if positions is not None:
        vectors, tile_equations = _vectors(tile_equations, (i, j), result, _made_of(n, known))
    _check_elementwise(tile_equations, kind)
    of_positions = [value for value, _ in vectors]
    needed = [x for x in _needed(tile_equations, result, tiled) if x not in of_positions]
    numbers = [
        jnp.arange(size, dtype=jnp.int32) + start
        for size, start in zip((batch, heads), first, strict=True)
    ]
    arrays = _evaluate_known(tape, known, needed, (b, n), numbers, kind)
    places = positions() if positions is not None and vectors else ()
    vector_arrays = [
        _evaluate_vector(tape, known, vector, (b, n, (i, j)[vector.side]), numbers[0], places)
        for _, vector in vectors
    ]
    arrays = arrays if wide else [*map(width.narrowed, arrays)]
    vector_arrays = [*map(width.narrowed, vector_arrays)]
    dtypes = [x.dtype for x in (*arrays, *vector_arrays)]
    sides = tuple(vector.side for _, vector in vectors)
    mod = _mod(tile_equations, [*needed, *of_positions], (score, i, j, result), dtypes, sides)
    return Traced(
        mod, tuple(map(_storable, arrays)), tuple(x.astype(jnp.int32) for x in vector_arrays)
    )


def _constants(known: list) -> tuple[list, dict[Any, Literal]]:
    """Evaluates the equations that depend on numbers in the source alone, such as those of i % 3.

    Returns:
        (the equations that are left, Literals of the values).
    """
    left, constant, literals = [], [], {}
    for equation in known:
        _, _, operands, results = equation
        of_numbers = all(isinstance(x, Literal) or x in literals for x in operands)
        if of_numbers and operands and equation[0].name in ELEMENTWISE:
            constant.append(equation)
            literals.update(dict.fromkeys(results))
        else:
            left.append(equation)
    if not constant:
        return known, {}

    def evaluate():
        for primitive, params, operands, results in constant:
            arguments = [x.val if isinstance(x, Literal) else literals[x].val for x in operands]
            value = np.asarray(primitive.bind(*arguments, **params))
            literals.update(dict.fromkeys(results, Literal(value, jax.typeof(value))))

    apart(evaluate)
    return left, literals


def _narrowed(equations: list, result) -> tuple[list, Any]:
    """Returns the equations and the result with numbers of 32 bits in place of those of 64."""

    def put(x):
        if isinstance(x, Literal) and x.aval.dtype in width.NARROW:
            value = width.narrowed(np.asarray(x.val, x.aval.dtype))
            return Literal(value, jax.typeof(value))
        return x

    narrow = lambda p: width.NARROW.get(p, p) if isinstance(p, np.dtype) else p
    narrowed = []
    for primitive, params, operands, results in equations:
        params = {name: narrow(p) for name, p in params.items()}
        narrowed.append((primitive, params, [*map(put, operands)], results))
    return narrowed, put(result)


class _Vector(NamedTuple):
    """A value that depends on i alone, or on j alone, and on captured arrays.

    Attributes:
        value: what stands for it on the tape.
        side: 0 if it depends on i, 1 if on j.
        equations: those that it takes, besides those that depend on neither.
    """

    value: Any
    side: int
    equations: list


def _made_of(value, equations: list) -> set:
    """Returns a value and those that equations make of it."""
    made = {value}
    for _, _, operands, results in equations:
        if not made.isdisjoint(x for x in operands if not isinstance(x, Literal)):
            made.update(results)
    return made


def _vectors(tile_equations: list, places, result, of_heads: set) -> tuple[list, list]:
    """Cuts what is no arithmetic, but depends on one of i and j alone, out of the equations.

    Args:
        tile_equations: those that depend on i or j.
        places: what stands for i and j.
        result: what stands for the function's result.
        of_heads: values that depend on n, with which arithmetic is left to the tile.

    Returns:
        ([(value, _Vector)], the equations that are left).
    """
    sides = {place: {side} for side, place in enumerate(places)}
    apart: set = set()  # values of one side that are not elementwise arithmetic of i or j
    for primitive, _, operands, results in tile_equations:
        read = [x for x in operands if not isinstance(x, Literal)]
        read_sides = set().union(*(sides.get(x, set()) for x in read))
        one_sided = len(read_sides) == 1 and primitive.name not in CONTROL_FLOW
        follows = not apart.isdisjoint(read) and of_heads.isdisjoint(read)
        is_apart = one_sided and (primitive.name not in ELEMENTWISE or follows)
        for x in results:
            sides[x] = read_sides
            if is_apart:
                apart.add(x)
    left = [equation for equation in tile_equations if apart.isdisjoint(equation[3])]
    left = _used(left, [result])
    wanted = dict.fromkeys(
        x
        for operands in (*(e[2] for e in left), [result])
        for x in operands
        if not isinstance(x, Literal) and x in apart
    )
    vectors = []
    for value in wanted:
        (side,) = sides[value]
        vectors.append((value, _Vector(value, side, _used(tile_equations, [value]))))
    return vectors, left


def _used(equations: list, results: list) -> list:
    """Returns the equations that the results depend on."""
    return Tape(equations).needed(results)


def _evaluate_vector(tape: Tape, known, vector: _Vector, indices, entries, positions) -> Any:
    """Evaluates a vector for every batch entry and position, [B or 1, length]."""
    b, n, place = indices
    captured = list(tape.constants)
    equations = [*known, *vector.equations]
    equations = _used(equations, [vector.value])
    if any(x is n for _, _, operands, _ in equations for x in operands):
        raise NotElementwise(
            "it indexes a captured array by n together with i or j: arrays may be indexed by b and "
            "n, by b and i, or by b and j; pass what depends on all as mask="
        )

    def one(constants, entry, position):
        values = dict(zip(captured, constants, strict=True)) | {b: entry, place: position}
        read = lambda x: x.val if isinstance(x, Literal) else values[x]
        for primitive, params, operands, results in equations:
            arguments = [read(x) for x in operands]
            arguments = mesh_axes.spread(arguments, mesh_axes.varying(arguments))
            _bind(values, primitive, params, arguments, results)
        mark = values[vector.value]
        if jnp.shape(mark) or not _is_discrete(mark.dtype):
            raise NotElementwise(
                f"it makes {mark.dtype}{list(jnp.shape(mark))} of a captured array and i or j: "
                "what is looked up by a position must be one integer or bool"
            )
        return mark

    of_side = positions[vector.side]
    shared = len(of_side) == 1
    rows = jax.vmap(one, (None, None, 0))
    call = jax.vmap(rows, (None, 0, None if shared else 0))
    constants = mesh_axes.whole(list(tape.constants.values()))
    with _whole_arrays_asked_for():
        return call(constants, entries, of_side[0] if shared else of_side)


def _is_discrete(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_


def joined(join: Callable, one: Traced, other: Traced) -> Traced:
    """Returns two traced mask_mods joined by `join`, operator.and_ or operator.or_."""
    count, of_one = len(one.params), len(one.vectors)
    params, vectors = one.params + other.params, one.vectors + other.vectors
    first, second = one.mod, other.mod

    def step(tile, tile_params, score):
        scalars, of_positions = tile_params[: len(params)], tile_params[len(params) :]
        of_first = *scalars[:count], *of_positions[:of_one]
        of_second = *scalars[count:], *of_positions[of_one:]
        return join(first(tile, of_first, score), second(tile, of_second, score))

    text = f"({first.text}) {join.__name__} ({second.text}) from h{count}"
    used = first.primitives | second.primitives | {join.__name__.strip("_")}
    return Traced(Mod(text, used, step, first.vectors + second.vectors), params, vectors)


ARGUMENTS = {"score_mod": "score, b, n, i, j", "mask_mod": "b, n, i, j"}
# What JAX raises where a function wants the value of a traced number, and what to write instead.
_INSTEAD = {
    jax.errors.TracerBoolConversionError: "it asks whether a traced value is true, as `if`, `and`, "
    "`or`, `not`, a < b < c, min and max do: write jnp.where(condition, x, y), &, |, ~, "
    "(a < b) & (b < c), jnp.minimum and jnp.maximum",
    jax.errors.TracerArrayConversionError: "it hands a traced value to numpy: write jnp.tanh where "
    "it has np.tanh, and index jnp.asarray(array) where it indexes a numpy array",
    jax.errors.TracerIntegerConversionError: "it uses a traced value as a Python integer, as "
    "list[i] and range(i) do: index jnp.array(list), made outside of the function",
    jax.errors.ConcretizationTypeError: "it makes a Python number of a traced value, as float(x), "
    "int(x) and math.exp(x) do: write x.astype(jnp.float32), x.astype(jnp.int32) and jnp.exp(x)",
}


def _closed(function: Callable, arguments: tuple) -> Any:
    """Returns the jaxpr of a user's function of scalars of these shapes and dtypes."""
    kind = "mask_mod" if len(arguments) == 4 else "score_mod"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        signature = None
    if signature is not None:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise TypeError(
                f"{kind} takes {signature} and is called as {kind}({ARGUMENTS[kind]}), with the "
                f"{'score, ' * (kind == 'score_mod')}entry of the batch, query head, position of "
                f"the query and of the key ({error}): write lambda {ARGUMENTS[kind]}: ..."
            ) from None
    with _whole_arrays_asked_for():
        try:
            return jax.make_jaxpr(function)(*arguments)
        except tuple(_INSTEAD) as error:
            # The first match counts: the last entry is a base class of some others.
            advice = next(
                words for error_type, words in _INSTEAD.items() if isinstance(error, error_type)
            )
            raise NotElementwise(advice) from error


@contextlib.contextmanager
def _whole_arrays_asked_for():
    """Translates JAX's error about an array that an Explicit mesh axis cuts."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":  # JAX has no public name for it
            raise
        raise NotElementwise(
            "it indexes a captured array that an Explicit mesh axis cuts: capture it whole, as in "
            f"w = jax.sharding.reshard(w, jax.P()), outside of the function ({error})"
        ) from error


def _check_result(closed, score_dtype):
    outputs = [x.str_short() for x in closed.out_avals]
    if outputs and len(outputs) == 1 and closed.out_avals[0].shape == ():
        dtype = closed.out_avals[0].dtype
        if score_dtype is None and dtype == jnp.bool_:
            return
        if score_dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            return
    got = ", ".join(outputs) or "nothing (is a `return` missing?)"
    if score_dtype is None:
        raise TypeError(
            f"mask_mod must return one bool, a scalar, got {got}; True is visible, as of j <= i, "
            "and what is added to scores belongs into a score_mod"
        )
    raise TypeError(
        f"score_mod must return one float, a scalar, got {got}; pass what says whether a key is "
        "visible as mask_mod, and index captured arrays by b and n"
    )


# Primitives that look a number up, and primitives that make vectors of scalars.
_LOOKUPS = frozenset({"gather", "dynamic_slice"})
_VECTORS = frozenset({"argmax", "broadcast_in_dim", "concatenate", "reshape", "sort", "stack"})


def _indices(kind: str) -> str:
    """Returns, for a message, by what a mod may index arrays, and the way out."""
    if kind == "score_mod":
        return (
            "captured arrays may be indexed by b and n; pass what depends on positions as bias= or "
            "mask="
        )
    return (
        "captured arrays may be indexed by b and n, those of integers and bools also by b and i "
        "or by b and j; pass what depends on i and j together as mask="
    )


def _check_elementwise(equations: list, kind: str) -> None:
    """Raises NotElementwise for what cannot run inside a tile."""
    args = "the score, i or j" if kind == "score_mod" else "i or j"
    names = [primitive.name for primitive, *_ in equations]
    names = [name for name in names if name not in ELEMENTWISE]
    # Of several, report the primitive that says most about what the function does.
    for name in sorted(names, key=lambda name: (name not in CONTROL_FLOW, name not in _LOOKUPS)):
        if name in CONTROL_FLOW:
            raise NotElementwise(
                f"it applies {name!r} to {args}, and a tile takes one way for all its scores: "
                "compute both and choose with jnp.where; jnp.piecewise has such a choice inside"
            )
        if name in _LOOKUPS:
            raise NotElementwise(f"it indexes an array by {args}: {_indices(kind)}")
        if name in _VECTORS:
            raise NotElementwise(
                f"it makes a vector of {args} ({name!r}), as jnp.select, jnp.piecewise, jnp.stack "
                "and jnp.array([...]) do, and a tile has scalars: nest jnp.where, as in "
                "jnp.where(a, x, jnp.where(b, y, z))"
            )
        raise NotElementwise(
            f"it applies {name!r} to {args}, which is not elementwise arithmetic on real numbers: "
            f"make it of jnp functions of each number by itself. And {_indices(kind)}"
        )


def _needed(tile_equations, result, tiled) -> list:
    """Returns the values from outside that the tiles read, each once, in order of first use."""
    needed: dict[Any, None] = {}
    for x in [x for _, _, operands, _ in tile_equations for x in operands] + [result]:
        if not isinstance(x, Literal) and x not in tiled:
            needed[x] = None
    return list(needed)


def _evaluate_known(tape: Tape, known, needed, indices, numbers, kind: str) -> Any:
    """Evaluates what a `kind` of mod needs for every batch entry and head, [B, N] each."""
    captured = list(tape.constants)

    def one(constants, b, n):
        values = dict(zip(captured, constants, strict=True))
        values |= dict(zip(indices, (b, n), strict=True))
        read = lambda x: x.val if isinstance(x, Literal) else values[x]
        for primitive, params, operands, results in known:
            arguments = [read(x) for x in operands]
            arguments = mesh_axes.spread(arguments, mesh_axes.varying(arguments))
            _bind(values, primitive, params, arguments, results)
        needed_values = [values[x] for x in needed]
        for x in needed_values:
            if jnp.shape(x):
                raise NotElementwise(
                    f"it uses a whole array of shape {jnp.shape(x)}: {_indices(kind)}"
                )
        return [jnp.asarray(x) for x in needed_values]

    call = jax.vmap(jax.vmap(one, (None, None, 0)), (None, 0, None))
    with _whole_arrays_asked_for():  # raised here only within loops and branches
        return call(mesh_axes.whole(list(tape.constants.values())), *numbers)


def _bind(values, primitive, params, operands, results):
    outputs = primitive.bind(*operands, **mesh_axes.whole_params(params))
    outputs = outputs if primitive.multiple_results else [outputs]
    values.update(zip(results, outputs, strict=True))


def _storable(x):
    """Casts x to the dtype in which kernels hold it: float32 (float64 under x64) or int32."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    return x.astype(jnp.int32)


def _mod(tile_equations, needed, places, dtypes, vectors=()) -> Mod:
    """Builds the Mod of the elementwise part."""
    score, i, j, result = places

    def step(tile, params, x):
        values = dict(zip(needed, map(_restore, params, dtypes), strict=True)) | {
            **({score[0]: x} if score else {}),
            i: tile.q_pos,
            j: tile.kv_pos,
        }
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        for primitive, parameters, operands, results in tile_equations:
            arguments = [fill(read(v), tile.shape) for v in operands]
            # A constant varies over no axis of a shard_map around, and primitives want one type.
            arguments = mesh_axes.spread(arguments, mesh_axes.varying(arguments))
            _bind(values, primitive, parameters, arguments, results)
        result_tile = fill(read(result), tile.shape)
        if x is None:
            return result_tile
        result_tile = mesh_axes.spread(result_tile, mesh_axes.varying(x))
        return lax.convert_element_type(result_tile, x.dtype)

    text = _text(tile_equations, needed, places, dtypes)
    used = frozenset(p.name for p, *_ in tile_equations)
    return Mod(
        text, used, step, vectors, bool(score) and _keeps_nan(tile_equations, score[0], result)
    )


# Primitives whose result is NaN where one of their operands is.
_ARITHMETIC_NAMES = """
abs add add_any copy cos div exp exp2 expm1 log log1p logistic mul neg sin sqrt square stop_gradient
sub tanh
"""
_ARITHMETIC = frozenset(_ARITHMETIC_NAMES.split())


def _keeps_nan(equations: list, score, result) -> bool:
    spoiled = {score}
    for primitive, params, operands, results in equations:
        kept = primitive.name in _ARITHMETIC
        if primitive.name == "convert_element_type":
            kept = jnp.issubdtype(params["new_dtype"], jnp.floating)
        if kept and any(x in spoiled for x in operands if not isinstance(x, Literal)):
            spoiled.update(results)
    return not isinstance(result, Literal) and result in spoiled


def _restore(x, dtype):
    """Casts a spread value back to the dtype that the function computed it in."""
    return x != 0 if dtype == jnp.bool_ else lax.convert_element_type(x, dtype)


def _text(tile_equations, needed, places, dtypes) -> str:
    score, i, j, result = places
    names = {x: f"h{k}:{d}" for k, (x, d) in enumerate(zip(needed, dtypes, strict=True))}
    names |= {i: "i", j: "j"} | ({score[0]: "score"} if score else {})
    name = lambda x: f"{x.val}:{x.aval}" if isinstance(x, Literal) else names[x]
    lines = []
    for primitive, params, operands, results in tile_equations:
        names.update({x: f"v{len(names) + k}" for k, x in enumerate(results)})
        made, reads = ([f(x) for x in xs] for f, xs in ((names.get, results), (name, operands)))
        lines.append(f"{made} = {primitive.name} {sorted(params.items())} {reads}")
    return "; ".join([*lines, name(result)])
