"""The one numerical check: no worse than twice plain jnp attention in the same dtype.

For outputs the error may be twice that of plain jnp, for gradients three times, in the maximum and
in the root mean square, both measured against the oracle in float64 on the same (rounded) inputs.
Where plain jnp happens to be exact (one key: its dq is 0) that bound would be 0, so each gets a
floor: part of a rounding of the sum of the absolute values of the terms that are added.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_pallas import dispatch, reference, validate, vjp
from flash_pallas.arguments import Arguments

from .cases import Case

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# In units of eps, half an eps being one rounding, of the sum of absolute values. Rounding errors
# differ in sign and mostly cancel, so half of one rounding is much.
FLOOR = 0.25
# exp2 and log2 of the kernels are the GPU's approximate ones, right to about one float32 eps.
LSE_FLOOR = 1.0


class Results(NamedTuple):
    """Both outputs and the three gradients, as float64 numpy arrays."""

    o: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


def bind(backend, blocks: dict[str, int] | None = None):
    """(q, k, v, **arguments) -> (o, lse) on this backend, an object or a name."""
    if isinstance(backend, str):
        backend = dispatch.BACKENDS[backend]

    def call(q, k, v, **arguments):
        call = validate.canonicalize(q, k, v, Arguments(**arguments))
        assert backend.unsupported(call.problem) is None, backend.unsupported(call.problem)
        tiles = backend.blocks(call.problem, blocks)
        return call.unfold(*vjp.attend(backend, call.spec, tiles, call.operands))[:2]

    return call


def run(call, case: Case, seed: int = 0) -> Results:
    """What `call` makes of the case: jitted, outputs and gradients in one."""
    if case.deterministic:
        call = partial(call, deterministic=True)
    return _widen(_jit(partial(_outputs_and_gradients, call, case))(*case.inputs(seed)))


def _jit(function):
    """jax.jit; without optimisation on a CPU, where compiling is most of what the tests do."""
    if jax.default_backend() != "cpu":
        return jax.jit(function)
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)


def _outputs_and_gradients(call, case, q, k, v, do, dlse):
    outputs, pull = jax.vjp(partial(call, **case.arguments), q, k, v)
    return *outputs, *pull((do, dlse))


def _widen(results) -> Results:
    return Results(*(np.asarray(x).astype(np.float64) for x in results))


@lru_cache(maxsize=256)
def oracle(case: Case, seed: int = 0) -> Results:
    """The case in float64, from the inputs as rounded to its dtype."""
    exact = [np.asarray(x).astype(np.float64) for x in case.inputs(seed)]
    with jax.enable_x64(True):
        call = partial(reference.attention, full_precision=True)
        return _widen(_jit(partial(_outputs_and_gradients, call, case))(*exact))


def plain(q, k, v, *, causal, scale, q_offset):
    """Attention as one would write it in jnp: float32 softmax, everything else in q's dtype."""
    batch, q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = v.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    q = q.reshape(batch, q_len, kv_heads, q_heads // kv_heads, head_dim)
    s = scale * jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    if causal:
        offset = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))[:, None, None]
        position = offset + jnp.arange(q_len, dtype=jnp.int32)[None, :, None]
        keep = jnp.arange(kv_len, dtype=jnp.int32)[None, None, :] <= position
        s = jnp.where(keep[:, None, None], s, -1e30)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - lse[..., None])
    if causal:
        p = jnp.where(keep[:, None, None], p, 0.0)
        lse = jnp.where(jnp.any(keep, -1)[:, None, None], lse, -jnp.inf)
    p = p.astype(v.dtype)
    o = jnp.einsum("bkgts,bskh->btkgh", p, v, preferred_element_type=jnp.float32)
    o = o.astype(v.dtype).reshape(batch, q_len, q_heads, v.shape[-1])
    return o, lse.reshape(batch, q_heads, q_len)


@lru_cache(maxsize=256)
def bounds(case: Case, seed: int = 0) -> Results:
    """For each result the largest allowed (maximum, root mean square) of its error."""
    exact, terms = oracle(case, seed), _absolute_terms(case, seed)
    found = _widen(_jit(partial(_outputs_and_gradients, plain, case))(*case.inputs(seed)))
    limits = {}
    for name in Results._fields:
        error = _sizes(_error(getattr(found, name), getattr(exact, name)))
        floor = _sizes(getattr(terms, name))
        factor = OUTPUT_FACTOR if name in ("o", "lse") else GRADIENT_FACTOR
        is_lse = name == "lse"
        unit = float(jnp.finfo(jnp.float32 if is_lse else case.dtype).eps)
        unit *= LSE_FLOOR if is_lse else FLOOR
        limits[name] = tuple(factor * e + unit * f for e, f in zip(error, floor, strict=True))
    return Results(**limits)


def assert_matches_oracle(call, case: Case, seed: int = 0):
    """Both outputs and all gradients of `call` are within the bounds of this module.

    Args:
        call: (q, k, v, causal=, scale=, q_offset=) -> (o, lse), differentiable; see `bind`.
        case: on what.
        seed: of the inputs.
    """
    assert_results_match(run(call, case, seed), case, seed)


def assert_results_match(found: Results, case: Case, seed: int = 0):
    """The same for results already at hand."""
    exact, limits = oracle(case, seed), bounds(case, seed)
    failures = []
    for name in Results._fields:
        error = _sizes(_error(getattr(found, name), getattr(exact, name)))
        for kind, e, limit in zip(("max", "rms"), error, getattr(limits, name), strict=True):
            if not e <= limit:  # A NaN fails too.
                failures.append(f"{name}: {kind} error {e:.3g}, allowed {limit:.3g}")
    assert not failures, f"{case}: " + "; ".join(failures)


def _absolute_terms(case: Case, seed: int) -> Results:
    """For each result the sum of the absolute values of what is added up to make it."""
    q, k, v, do, dlse = (np.abs(np.asarray(x).astype(np.float64)) for x in case.inputs(seed))
    exact, scale = oracle(case, seed), abs(case.H**-0.5 if case.scale is None else case.scale)
    k, v = (np.repeat(x, case.N // case.K, axis=2) for x in (k, v))
    p, exponents = _weights(case, seed)
    # The backward recomputes p = exp(s - lse) in float32: it inherits the rounding of s and of lse.
    relative = float(jnp.finfo(jnp.float32).eps / jnp.finfo(case.dtype).eps)
    p_again = p * (1.0 + relative * exponents)
    delta = np.einsum("btnh,btnh->bnt", np.abs(exact.o), do) + dlse
    ds = scale * p_again * (np.einsum("btnh,bsnh->bnts", do, v) + delta[..., None])
    over_group = lambda x: x.reshape(case.B, case.S, case.K, -1, x.shape[-1]).sum(3)
    lse = np.where(np.isfinite(exact.lse), np.abs(exact.lse), 0.0)
    return Results(
        o=np.einsum("bnts,bsnh->btnh", p, v),
        lse=1.0 + lse + scale * np.einsum("btnh,bsnh->bnts", q, k).max(-1),
        dq=np.einsum("bnts,bsnh->btnh", ds, k),
        dk=over_group(np.einsum("bnts,btnh->bsnh", ds, q)),
        dv=over_group(np.einsum("bnts,btnh->bsnh", p_again, do)),
    )


def _weights(case: Case, seed: int):
    """The softmax from the oracle's log-sum-exp, and |s| + |lse|; float64[B, N, T, S]."""
    q, k, *_ = (np.asarray(x).astype(np.float64) for x in case.inputs(seed))
    k = np.repeat(k, case.N // case.K, axis=2)
    s = np.einsum("btnh,bsnh->bnts", q, k) * (case.H**-0.5 if case.scale is None else case.scale)
    if case.causal:
        offset = np.broadcast_to(np.asarray(case.q_offset), (case.B,))[:, None, None, None]
        position = offset + np.arange(case.T)[:, None]
        s = np.where(np.arange(case.S) <= position, s, -np.inf)
    lse = oracle(case, seed).lse
    lse = np.where(np.isfinite(lse), lse, 0.0)[..., None]
    return np.exp(s - lse), np.where(np.isfinite(s), np.abs(s), 0.0) + np.abs(lse)


def _error(found, exact):
    """Elementwise |found - exact|, where two equal infinities differ by 0."""
    with np.errstate(invalid="ignore"):
        return np.where(found == exact, 0.0, np.abs(found - exact))


def _sizes(x) -> tuple[float, float]:
    return float(np.max(x)), float(np.sqrt(np.mean(np.square(x))))
