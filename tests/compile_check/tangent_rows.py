"""Rows of forward mode: with the forward, after it, and over the backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from flash_pallas.backends.gpu.ptx.online_softmax import far_of
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Cotangents, Operands, Outputs, describe
from flash_pallas.frontend import validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.transforms import equations

from ..cases import Case
from ..hopper_cases import ON_DEVICE

CASES = {case.name: case for case in ON_DEVICE}
# Path, and whether O is computed too; None: the tangents of gradients.
PATHS = {"jvp": True, "tangents": False, "second order": None}
SIZES = ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (128, "float16"), (128, "float32"))
# Where registers are tightest; of those of the first order alone.
MODIFIERS = ("packed_128", "window_causal_128", "dropout_causal_128", "alibi_256")
FIRST_ORDER = (
    *("bias_BNTS_128", "softcap_causal_128", "positions_mods", "blocks_listed_causal_128"),
    *("kv_lengths", "d64_32", "max_logit_256"),
)


def calls(backend) -> Iterator[tuple[tuple, AttentionSpec, Operands]]:
    """Yields ((head dim, dtype, mask), spec, shapes of the operands) of all calls."""
    for (head_dim, dtype), causal in itertools.product(SIZES, (False, True)):
        q = jax.ShapeDtypeStruct((3, 2048, 8, head_dim), dtype)
        kv = jax.ShapeDtypeStruct((3, 2048, 4, head_dim), dtype)
        spec = AttentionSpec(scale=head_dim**-0.5, mask=Mask(right=0) if causal else Mask())
        if backend.attention.refusal(describe(Operands(q, kv, kv), spec)) is None:
            yield (head_dim, dtype, "causal" if causal else "full"), spec, Operands(q, kv, kv)
    for name in (*MODIFIERS, *FIRST_ORDER):
        yield _of_case(CASES[name])


def _of_case(case: Case):
    x = case.inputs()
    call = validate.canonicalize(x.q, x.k, x.v, Arguments(**case.arguments(x)))
    shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    return (case.H, case.dtype, case.name), call.spec, jax.tree.map(shape, call.operands)


def tangent_rows(backend) -> Iterator[tuple]:
    """Yields (path, head dim, dtype, mask, function, arguments) of what a backend compiles."""
    for name, spec, operands in calls(backend):
        problem, given = describe(operands, spec), equations.apart(operands)[0]
        blocks, moves = backend.attention.plan(problem), equations.moves_of(given)
        q, v = operands.q, operands.v
        o = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
        shift = rows if far_of(spec, q.dtype) else None
        for path, primal in PATHS.items():
            if primal is None:
                if name[2] in FIRST_ORDER or backend.jvp_of_vjp.refusal(problem, moves, moves):
                    continue
                run = lambda *args, spec=spec: backend.jvp_of_vjp.run(spec, *args)
                both = Cotangents(rows, o, rows, shift), Cotangents(rows, o, rows)
                arguments = operands, both[0], given, both[1]
            elif not backend.jvp.refusal(problem, blocks, moves, primal=primal):
                run = lambda *args, spec=spec: backend.jvp.run(spec, *args)
                arguments = operands, given, None if primal else Outputs(o, rows, shift)
            else:
                continue
            yield path, *name, run, arguments
