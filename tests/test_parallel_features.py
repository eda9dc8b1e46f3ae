"""Every strategy with every feature on eight devices: as right as plain attention on one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from flash_pallas.backends.gpu import auxiliary_arrays
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.core.problem import describe
from flash_pallas.frontend import dispatch, validate
from flash_pallas.frontend.arguments import Arguments
from flash_pallas.parallel import context_parallel_attention, from_zigzag, to_zigzag

from .cases import Case
from .checks import assert_matches_oracle

SIZES: dict[str, Any] = {"B": 2, "T": 32, "S": 32, "N": 8, "K": 2, "H": 8}
TRAINING: dict[str, Any] = {
    "causal": True,
    "segments": "padded",
    "dropout_rate": 0.3,
    "sinks": True,
}
CASES = {
    # With everything that goes together, so that each strategy is compiled few times.
    "all": Case("all", **SIZES, **TRAINING, softcap=5.0, Hv=16),
    "nothing": Case("nothing", **SIZES),
    "window": Case("window", **SIZES, window=(9, 3)),
    "short_window": Case("short_window", **SIZES, window=(5, 0), scale=-0.3),
    "bfloat16": Case("bfloat16", **SIZES, causal=True, dtype="bfloat16"),
    # Documents that each count from 0, in an order of their own, and the dropout of the whole.
    "positions": Case("positions", **SIZES, q_positions="restart", kv_positions="gaps", **TRAINING),
    "q_positions": Case("q_positions", **SIZES, q_positions="random", window=(9, 3)),
    "kv_positions": Case("kv_positions", **SIZES, kv_positions="random", causal=True),
    "uneven_positions": Case(
        "uneven_positions",
        **(SIZES | {"T": 29, "S": 29}),
        causal=True,
        q_positions="shifted",
        kv_positions="shifted",
    ),
    "uneven": Case("uneven", **(SIZES | {"T": 29, "S": 29}), causal=True, window=(11, None)),
}
ROWS = [
    ("all", "ring", "contiguous"),
    ("all", "ring", "zigzag"),
    ("all", "all_gather", "contiguous"),
    ("all", "all_gather", "zigzag"),
    ("all", "ulysses", "contiguous"),
    ("all", "ulysses", "zigzag"),
    ("nothing", "ring", "contiguous"),
    ("window", "ring", "contiguous"),
    ("window", "ring", "zigzag"),
    ("window", "all_gather", "zigzag"),
    ("window", "ulysses", "zigzag"),
    ("short_window", "ring", "contiguous"),
    ("bfloat16", "ring", "contiguous"),
    ("positions", "ring", "contiguous"),
    ("positions", "ring", "zigzag"),
    ("positions", "ulysses", "zigzag"),
    ("q_positions", "all_gather", "contiguous"),
    ("q_positions", "ring", "zigzag"),
    ("kv_positions", "all_gather", "zigzag"),
    ("kv_positions", "ring", "contiguous"),
    ("uneven_positions", "ring", "contiguous"),
    ("uneven", "ring", "contiguous"),
    ("uneven", "ulysses", "contiguous"),
]


def in_order(call, layout, shards):
    """Wraps `call`, which takes arrays of this layout, as a function of arrays in order."""
    there, back = (lambda x: x), (lambda x, axis=1: x)
    if layout == "zigzag":
        there, back = partial(to_zigzag, shards=shards), partial(from_zigzag, shards=shards)

    def run(q, k, v, *, q_offset=0, **arguments):
        assert q_offset == 0
        rows = ("ids", "positions")
        moved = {name: there(x) for name, x in arguments.items() if name.endswith(rows)}
        o, lse = call(*map(there, (q, k, v)), layout=layout, **(arguments | moved))
        return back(o), back(lse, axis=2)

    return run


@pytest.mark.thorough(always=["window-ulysses-zigzag"])
@pytest.mark.parametrize(("case", "strategy", "layout"), ROWS)
def test_strategies(eight_devices, case, strategy, layout):
    types = AxisType.Explicit if layout == "contiguous" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("context",), axis_types=(types,), devices=eight_devices)
    call = partial(
        context_parallel_attention, mesh=mesh, axis="context", strategy=strategy, return_lse=True
    )
    assert_matches_oracle(in_order(call, layout, 8), CASES[case])


def test_hopper_kernels_drop_by_places_in_the_whole():
    """Compares dropout keys of parts of longer sequences with those of the whole."""
    case = Case("dropped", B=2, T=64, S=64, N=4, K=2, H=64, dropout_rate=0.3, dtype="bfloat16")
    x = case.inputs()
    call = validate.canonicalize(x.q, x.k, x.v, Arguments(**case.arguments(x)))
    rows, columns = slice(40, 64), slice(8, 32)
    places = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None], (2, 64))
    part = call.operands._replace(
        q=x.q[:, rows],
        k=x.k[:, columns],
        v=x.v[:, columns],
        q_places=places[:, rows],
        kv_places=places[:, columns],
    )
    for q_axis in (0, 1):
        whole = auxiliary_arrays.gmem(call.problem, q_axis, call.operands)
        found = auxiliary_arrays.gmem(describe(part, call.spec), q_axis, part)
        cuts = (rows, columns)[:: -1 if q_axis else 1]
        for name, cut in zip(("row_keys", "column_keys"), cuts, strict=True):
            ours, theirs = getattr(found, name)[..., :24], getattr(whole, name)[..., cut]
            assert ours.shape == theirs.shape and bool((ours == theirs).all())


@pytest.mark.thorough
def test_the_hopper_kernels_lower_in_a_ring(monkeypatch, devices):
    """Lowers a ring for Hopper: Pallas refuses types that vary, which xla would not show."""
    monkeypatch.setattr(dispatch, "select", lambda problem, name: HopperBackend(num_sms=132))
    mesh = jax.make_mesh((2,), ("context",), devices=devices[:2])
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    place = {"mesh": mesh, "axis": "context", "layout": "zigzag"}
    call = partial(context_parallel_attention, causal=True, **place)
    loss = lambda q, k, v, seed: jnp.sum(
        call(q, k, v, dropout_rate=0.1, dropout_seed=seed).astype(jnp.float32)
    )
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x, jnp.uint32(0))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
