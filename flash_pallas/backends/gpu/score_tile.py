"""Tiles of scores in registers: their logits, and in the backward P and dS recomputed from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...core import dropout, scores
from ...core.mask import Limits, Tile
from ...core.problem import AttentionSpec, Problem
from ...core.scores import Logits, TileInputs
from ...core.softmax import EMPTY_ROW, LOG2E
from . import stand_ins
from .auxiliary_arrays import AuxiliaryGmem
from .ptx import infinities, inline, modifiers, online_softmax
from .ptx.online_softmax import far_of

# Even the lowest float32 times this changes no logit relative to a cap; an infinity remains one.
_SMALLEST = 2.0**-149

# --- Tiles of scores whose positions cost one register, not one per element -----------------------


@dataclasses.dataclass(frozen=True)
class RegisterTile(Tile):
    """A Tile in the WGMMA register layout.

    Attributes:
        interpret: positions in plain jnp.
        precise: the GPU's tanh, accurate to 1.1e-5, does not suffice.
    """

    interpret: bool = False
    precise: bool = False

    def counted(self, axis: int, start):
        """Returns int32[shape]: start + index along the axis."""
        return modifiers.positions(self.shape, axis, start, self.interpret)

    def call(self, function: Callable, *args):
        """Calls function(*args), in primitives that can be lowered."""
        divide = lax.div if self.interpret else modifiers.quotient
        return stand_ins.call(function, self.shape, *args, divide=divide)

    def tanh(self, x):
        """Computes tanh; if `precise` accurate to 1.7e-7 (trial_tanh.txt at 20374d8)."""
        if not self.precise:
            return jnp.tanh(x)
        return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2.0 * LOG2E)))

    def with_infinite(self, x, capped):
        """Adds what is 0 but for an infinite x: one multiply-add, and no predicate over the cap."""
        if self.interpret:  # CPUs may flush _SMALLEST to 0
            return super().with_infinite(x, capped)
        return capped + x * _SMALLEST

    def distance(self, dtype):
        """Computes |query position - key position| of each element, exact below 2**24."""
        if self.positions[0] is not None or self.positions[1] is not None:
            return super().distance(dtype)
        starts = (self.q_start, self.kv_start)[:: -1 if self.q_axis else 1]
        shift = starts[0] - starts[1]
        return modifiers.distance(self.shape, shift, self.interpret).astype(dtype)

    def kept(self, q_keys, kv_keys, rate: float):
        """Returns the dropout mask, bool of the tile's shape: True where a weight is kept."""
        if self.interpret:
            return super().kept(q_keys, kv_keys, rate)
        rows, columns = self.by_axis(q_keys, kv_keys)
        return modifiers.kept(rows, columns, dropout.threshold(rate))

    def by_axis(self, q_values, kv_values):
        """Returns (what belongs to rows, what belongs to columns), spread over the tile."""
        q_values, kv_values = self.per_q(q_values), self.per_kv(kv_values)
        return (kv_values, q_values) if self.q_axis else (q_values, kv_values)


def alibi(position, key, falls):
    """Computes what ALiBi adds to scores whose rows have their own positions and slopes, f32.

    Args:
        position: int32, of each element's query.
        key: int32, of each element's key.
        falls: f32, minus the slope of each element's head.
    """
    distance = lax.abs(position - key)
    return lax.convert_element_type(distance, jnp.float32) * falls


def logits(
    spec: AttentionSpec,
    tile: RegisterTile,
    s,
    inputs: TileInputs,
    limits: Limits,
    hidden: float = -math.inf,
    *,
    relative: bool = False,
) -> Logits:
    """Computes core.scores.logits of s = q @ k^T, `hidden` where hidden, for all kernels."""
    inputs, some, again = look(tile, inputs)
    unmasked = scores.logits(spec, tile, s, inputs, hides=some is None, relative=relative)
    x = unmasked.x
    if some is not None:
        hide = lambda: jnp.where(again() == -math.inf, hidden, x)
        x = lax.cond(some > 0, hide, lambda: x)
    x = inline.hide(x, limits, tile.interpret, hidden)
    x, inputs = _within_interval(tile, x, inputs, hidden)
    visible = scores.visible(spec, tile, inputs)
    if visible is not None:
        x = jnp.where(visible, x, hidden)
    return unmasked._replace(x=x)


def look(tile: RegisterTile, inputs: TileInputs) -> tuple[TileInputs, Any, Any]:
    """Looks for -inf in a bias that can be read again, which hides keys whatever comes after it.

    To compare each element before a score_mod and to hide it after that takes two instructions, and
    a predicate of every element over the score_mod: 6 to 44 % of the forward on H200.

    Returns:
        (inputs with the bias in f32; i32, uniform over a warp: not 0 if some may be -inf; function
        that reads the bias again). The last two are None without such a bias.
    """
    bias, some, again = inputs.bias, None, None
    if inputs.bias_look is not None:
        bias, some, again = inputs.bias_look(tile.interpret)
    elif bias is not None:
        bias = infinities.widened(bias, tile.interpret)
    return inputs._replace(bias=bias, bias_look=None), some, again


def with_bias(problem: Problem, inputs: TileInputs, bias, again: Callable, some=None) -> TileInputs:
    """Returns the inputs with a bias, in the dtype of its array.

    Args:
        problem: what is computed.
        inputs: the other inputs.
        bias: the bias over the tile.
        again: function that reads it again.
        some: function of `interpret` that returns `look`'s i32; None: the tile is looked through.
    """
    if not problem.spec.score_modifiers:
        return inputs._replace(bias=bias.astype(jnp.float32))
    if problem.bias_shape[2:] == (1, 1) or problem.spec.only_caps:
        return inputs._replace(bias=bias)

    def look_at_bias(interpret: bool):
        if some is None:
            return *infinities.looked_at(bias, interpret), again
        return bias, some(interpret), again

    return inputs._replace(bias=bias, bias_look=look_at_bias)


def _within_interval(tile: RegisterTile, x, inputs: TileInputs, hidden: float):
    """Hides what lies outside of each query's interval of key indices, in rows that are queries.

    Bounds of rows are compared with columns that the program knows: one instruction a bound and
    element, and no register for positions. Returns (x, the inputs that are still to hide keys).
    """
    low, high = inputs.q_first, inputs.q_last
    if (low is None and high is None) or inputs.kv_positions is not None or tile.q_axis:
        return x, inputs
    low, high = (None if bound is None else bound - tile.kv_start for bound in (low, high))
    x = inline.hide_outside(x, low, high, tile.interpret, hidden)
    return x, inputs._replace(q_first=None, q_last=None)


# --- Recomputes P from S and the log-sum-exp, and dS from P, as every backward kernel does --------
# With C = keep * gain * dP - delta (`keep` and `gain` are dropout's) the gradient of the logits is
# P * C, and that of scale * q @ k^T is pull(P * C), where `pull` goes back through score_mod and
# softcap. It is linear and elementwise: pull(P) * C is the same, and pull(P) needs no dP.

# What hidden logits over the cap become: the square is finite, so that P = 0 times it is 0. P is 0
# with any cap of at least _LOWEST_CAP.
_HIDDEN = -1e18
_LOWEST_CAP = 1e-9


def row_shift(problem: Problem, auxiliary: AuxiliaryGmem, far, head, query, some=None) -> Callable:
    """Returns the function (tile, x) that subtracts from logits the shift of their query.

    Args:
        problem: what is computed.
        auxiliary: arrays in device memory, with the shift of all rows; see core/softmax.py.
        far: i32, of AuxiliaryGmem; not 0 where some row of the group of heads has a shift.
        head: query head.
        query: index of the first query of the tile.
        some: i32: 0 where all shifts are 0; None where it is known that they are not.
    """
    rows = auxiliary.shift.shape[0] // (problem.batch * problem.q_heads)
    member = lax.rem(jnp.int32(head), jnp.int32(problem.group))
    first = far - 1 + member * rows + query

    def subtract(tile: RegisterTile, x):
        shift, q_axis = auxiliary.shift, tile.q_axis
        less = lambda: online_softmax.less_shift(x, shift, first, q_axis, tile.interpret)
        return less() if some is None else lax.cond(some > 0, less, lambda: x)

    return subtract


class Weights(NamedTuple):
    """A tile of P, recomputed, with what dS is made of."""

    p: Any  # f32, 0 where hidden; without dropout. See also `marked`
    kept: Any  # bool, or None without dropout
    pull: Callable  # see core.scores.Logits
    marked: bool = False  # p is NaN for keys with a bias of -inf
    interpret: bool = False
    # Pull of a softcap alone next to a bias, which may make NaN of padding.
    capped: Callable | None = None


def marks_hidden(problem: Problem) -> bool:
    """Returns whether kernels of the backward may have NaN for keys with a bias of -inf.

    The bias of such a key is then NaN, and so is what softcap and score_mod make of it, and P. No
    predicate of each element is held over them: with predicates 240 bytes spill at head dim 64, and
    forward and backward take 1.17 of the time. A branch for tiles that have such keys, as in the
    forward, spills up to 5,000 bytes next to the accumulators (bias_forms_compile.txt).

    A NaN of the user's in q, k or the bias is taken for such a key in dV. In dQ and dK it remains,
    because delta is NaN then.
    """
    spec = problem.spec
    if problem.bias_shape is None or spec.only_caps:
        return problem.bias_shape is not None
    mod = spec.score_mod
    no_others = spec.score_modifiers <= {"softcap", "score_mod"}
    return mod is not None and no_others and mod.keeps_nan


def weights(
    problem: Problem,
    tile: RegisterTile,
    s,
    lse,
    inputs: TileInputs,
    limits: Limits,
    *,
    marks: bool = False,
) -> Weights:
    """Recomputes P of a tile.

    Args:
        problem: what is computed.
        tile: position of the tile.
        s: q @ k^T, f32.
        lse: log-sum-exp of each query, base 2.
        inputs: inputs of score modifiers.
        limits: what positions leave visible of the tile.
        marks: the caller accepts `marked` weights.
    """
    spec, marked, capped = problem.spec, False, None
    if problem.bias_shape is not None:
        marked = marks and marks_hidden(problem)
        inputs = inputs._replace(bias_look=None)
    if marked:
        s = infinities.with_marked(s, spec.scale, inputs.bias, tile.interpret)
        spec, inputs = dataclasses.replace(spec, scale=1.0), inputs._replace(bias=None)
    x, log2_scale, pull = logits(spec, tile, s, inputs, limits)
    x = x if inputs.shift is None else inputs.shift(tile, x)
    rows = tile.per_q(lse)
    p = jnp.exp2(x * log2_scale - rows)
    if problem.bias_shape is not None:
        # The bias of padding may be a NaN, or more than EMPTY_ROW. Hidden keys are -inf by now;
        # discarded queries and those past the last are not, and what is linear in P passes on a 0
        # where softcap and the like would make a NaN of it.
        if "q_lengths" in problem.features or problem.q_len % tile.shape[tile.q_axis]:
            p = jnp.where(rows < EMPTY_ROW / 2, p, 0.0)
        if spec.score_modifiers:
            capped = pull if spec.only_caps else None
            pull = _zero_where_hidden(p, pull, marked)
    kept = scores.kept(spec, tile, inputs) if spec.dropout_rate else None
    return Weights(p, kept, pull, marked, tile.interpret, capped)


def may_sign(problem: Problem) -> bool:
    """Checks that dropout is all that happens to weights, so that `signed` suffices.

    It has all that the gradients of the weights need.
    """
    spec = problem.spec
    return spec.dropout_rate > 0 and not spec.score_modifiers and problem.bias_shape is None


def sign_factor(problem: Problem) -> float:
    """Returns the factor of P in `signed`, which is the divisor of delta in `of_signed`."""
    return dropout.gain(problem.spec.dropout_rate) / 2.0


def signed(problem: Problem, tile: RegisterTile, s, lse, inputs: TileInputs, limits: Limits):
    """Computes P of a tile times sign_factor, f32, negative where dropout drops it.

    One tile holds what P, pull(P) and `kept` hold in three. Arguments are those of `weights`, but
    lse is less by log2(sign_factor).
    """
    spec = problem.spec
    x, log2_scale, _ = logits(spec, tile, s, inputs, limits)
    x = x if inputs.shift is None else inputs.shift(tile, x)
    rows = tile.per_q(lse)
    if tile.interpret:
        p = jnp.exp2(x * log2_scale - rows)
        return jnp.where(scores.kept(spec, tile, inputs), p, -p)
    keys = tile.by_axis(inputs.q_keys, inputs.kv_keys)
    return online_softmax.signed(x, rows, keys, log2_scale, dropout.threshold(spec.dropout_rate))


def of_signed(t, dp, delta):
    """Returns (keep * gain * P, gradient of the logits) from `signed`; delta is over sign_factor.

    t + |t| is exact, and an addition where a maximum takes the unit of comparisons, the busiest
    here; ptxas also needs 7 registers fewer with it, and spills none.
    """
    kept = t + jnp.abs(t)
    return kept, kept * dp - jnp.abs(t) * delta


def may_defer(problem: Problem) -> bool:
    """Checks that a cap is all that happens to logits, so that `capped` suffices.

    It has all that weights and gradients need. The cap must also be so low that no row has a shift.
    """
    spec = problem.spec
    if spec.softcap is None or spec.softcap < _LOWEST_CAP or far_of(spec, problem.dtype):
        return False
    other_modifiers = spec.modifiers - {"softcap", "mask_mod"}
    return not other_modifiers and problem.bias_shape is None


def capped(problem: Problem, tile: RegisterTile, s, inputs: TileInputs, limits: Limits):
    """Returns (logits of a tile over the cap, f32; their factor for logits in base 2).

    One tile holds what P and pull(P) hold in two.
    """
    over_cap = logits(problem.spec, tile, s, inputs, limits, hidden=_HIDDEN)
    return over_cap.x, over_cap.log2_scale


def of_capped(held, lse, dp, delta):
    """Returns (P, gradient of scale * q @ k^T) from `capped`; lse and delta are per element."""
    t, log2_scale = held
    p = jnp.exp2(t * log2_scale - lse)
    return p, p * (1.0 - t * t) * (dp - delta)


# --- Tangents, forward mode: how logits move with what they are made of ---------------------------


def pushed(problem: Problem, tile: RegisterTile, held: tuple[Any, Any], dqk, moved: TileInputs):
    """Computes P times the tangents of the natural logits of a tile, f32.

    Args:
        problem: what is computed.
        tile: position of the tile, as `core.scores.placed` returns it.
        held: (P without dropout, `pull` of core.scores.Logits).
        dqk: tangent of q @ k^T, f32.
        moved: tangents of the tile's inputs; None is 0.
    """
    p, pull = held
    spread = lambda scalar: lax.broadcast_in_dim(scalar, tile.shape, ())
    dz = dqk * problem.spec.scale
    if moved.bias is not None:  # that of padding may be anything
        dz = dz + jnp.where(p == 0.0, 0.0, moved.bias.astype(jnp.float32))
    if moved.slope is not None:
        dz = dz - tile.distance(dz.dtype) * spread(moved.slope)
    if not problem.spec.score_modifiers:
        return p * dz
    if problem.bias_shape is not None:
        pull = _zero_where_hidden(p, pull)
    dx, dparams = pull(p)
    tangents: Any = dx * dz
    for by_param, tangent in zip(dparams, moved.score_params, strict=False):
        if tangent is not None and by_param is not None:
            tangents = tangents + by_param * spread(tangent)
    return tangents


def _zero_where_hidden(p, pull, marked: bool = False):
    def clear(x):
        if x is None:
            return None
        return jnp.where(p > 0.0, x, 0.0) if marked else jnp.where(p == 0.0, 0.0, x)

    def through(d):
        dz, dparams = pull(d)
        return clear(dz), tuple(map(clear, dparams))

    return through


def pulled(w: Weights):
    """Returns pull(P), f32."""
    if w.capped is None:
        return w.pull(w.p)[0]
    # Never negative: a maximum clears what takes a comparison and a selection elsewhere.
    return infinities.numbers(w.capped(w.p)[0], w.interpret)


def operand(problem: Problem, w: Weights):
    """Returns keep * P in the 16 bits of the problem's dtype, for the matmul of dV."""
    p = dropped(problem, w._replace(marked=False)).astype(problem.dtype)
    return infinities.numbers(p, w.interpret) if w.marked else p


def dropped(problem: Problem, w: Weights):
    """Returns keep * P, f32; the gain is left to `gained`."""
    p = jnp.where(w.p > 0.0, w.p, 0.0) if w.marked else w.p
    return jnp.where(w.kept, p, 0.0) if problem.spec.dropout_rate else p


def gained(problem: Problem, dv):
    """Multiplies a matmul with keep * P by the gain that was left out of it."""
    return dv * dropout.gain(problem.spec.dropout_rate) if problem.spec.dropout_rate else dv


def centred(problem: Problem, kept, dp, delta):
    """Computes keep * gain * dP - delta, where delta is spread over the tile."""
    if not problem.spec.dropout_rate:
        return dp - delta
    return jnp.where(kept, dp * dropout.gain(problem.spec.dropout_rate), 0.0) - delta
