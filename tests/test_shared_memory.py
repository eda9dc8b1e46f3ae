"""Tiles fit into shared memory: the usage of a launch is known before it is lowered."""

from __future__ import annotations

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit

import flash_pallas as fp
from flash_pallas.backends.gpu import launch
from flash_pallas.backends.hopper.backward.dbias.tiles import Sums
from flash_pallas.backends.hopper.backward.dbias.tiles import scratch as scores_scratch
from flash_pallas.backends.hopper.backward.launch import choose_backward, native_backward_problem
from flash_pallas.backends.hopper.common.pipeline import SMEM_LIMIT
from flash_pallas.backends.hopper.forward import tiles
from flash_pallas.backends.portable import tiling as portable_blocks
from flash_pallas.backends.portable.backward.tiles import SplitSizes
from flash_pallas.backends.portable.common.tiles import RESERVED, memory_of
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe

from .lowering_fuzz import GPUS, on, try_call

WIDTHS = (8, 16, 24, 32, 64, 72, 96, 128, 136, 192, 256)


def _shape(*sizes, dtype="int32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def _call(width: int, v_width: int, dtype: str, length: int, **arrays):
    q = _shape(2, length, 4, width, dtype=dtype)
    k = _shape(2, length, 2, width, dtype=dtype)
    return {"q": q, "k": k, "v": _shape(2, length, 2, v_width, dtype=dtype), **arrays}


def _everything(length: int, bias_dtype: str) -> dict:
    """Returns all operands that take shared memory besides Q, K and V."""
    per_token = _shape(2, length)
    return {
        "bias": _shape(2, 4, length, length, dtype=bias_dtype),
        "mask": _shape(2, 4, length, length, dtype="bool"),
        "q_segment_ids": per_token,
        "kv_segment_ids": per_token,
        "dropout_seed": _shape(),
    }


def _gradients(arrays, options, backend):
    def total(arrays):
        found = fp.flash_attention(**arrays, **options, backend=backend)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(found))

    grad = jax.grad(lambda wanted, rest: total(wanted | rest))
    wanted = {n: x for n, x in arrays.items() if n in ("q", "k", "v", "bias")}
    rest = {n: x for n, x in arrays.items() if n not in wanted}
    return jax.jit(grad).trace(wanted, rest)


def _lower(traced):
    return traced.lower(lowering_platforms=("cuda",))


# --- the figure ----------------------------------------------------------------------------------

CALLS = {
    "plain": (_call(128, 128, "bfloat16", 256), {}),
    "everything": (
        _call(64, 64, "bfloat16", 130, **_everything(130, "bfloat16")),
        {"dropout_rate": 0.1, "causal": True},
    ),
    "deterministic": (_call(192, 128, "float16", 130), {"deterministic": True}),
    "float32": (
        _call(64, 64, "float32", 130, bias=_shape(1, 4, 1, 130, dtype="float32")),
        {"softcap": 5.0},
    ),
}


@pytest.mark.thorough(always=["deterministic-hopper"])
@pytest.mark.parametrize("gpu", ["hopper", "portable-163"])
@pytest.mark.parametrize("name", CALLS)
def test_the_figure_is_that_of_mosaic(gpu, name):
    """Lowers a call with as much shared memory as its largest launch takes; a byte less fails."""
    arrays, options = CALLS[name]
    if gpu != "hopper" and name == "float32":
        arrays = {n: _shape(*x.shape, dtype="bfloat16") for n, x in arrays.items()}
    taken = []
    counted = mock.patch.object(
        launch.plgpu,
        "kernel",
        side_effect=_spy(launch.plgpu.kernel, taken),
    )
    with on(GPUS[gpu]), counted:
        traced = _gradients(arrays, options, GPUS[gpu].backend)
        assert len(taken) >= 2
        with artificial_shared_memory_limit(max(taken)):
            _lower(traced)
        jax.clear_caches()
        traced = _gradients(arrays, options, GPUS[gpu].backend)
        with (
            artificial_shared_memory_limit(max(taken) - 1),
            pytest.raises(ValueError, match=f"smem_bytes={max(taken)}"),
        ):
            _lower(traced)


def _spy(kernel, taken: list):
    def counting(*arguments, scratch_types, **options):
        taken.append(launch.shared_memory(scratch_types))
        return kernel(*arguments, scratch_types=scratch_types, **options)

    return counting


# --- tiles step down -----------------------------------------------------------------------------


def _problems(count: int):
    """Yields every head dim with so many of the operands that take shared memory."""
    sides = ("bias", "mask", "segments", "dropout", "slopes", "max_logit")
    for pair, dtype in itertools.product(
        itertools.product(WIDTHS, WIDTHS), ("bfloat16", "float32")
    ):
        if dtype == "float32" and max(pair) > 128:
            continue
        for bias_dtype in (dtype, "float32"):
            chosen = sides[:count]
            arrays = _everything(77, bias_dtype)
            operands = Operands(
                **_call(*pair, dtype, 77),
                bias=arrays["bias"] if "bias" in chosen else None,
                mask=arrays["mask"] if "mask" in chosen else None,
                q_segments=arrays["q_segment_ids"] if "segments" in chosen else None,
                kv_segments=arrays["kv_segment_ids"] if "segments" in chosen else None,
                dropout_keys=_shape(2, 4, dtype="uint32") if "dropout" in chosen else None,
                alibi_slopes=_shape(2, 4, dtype="float32") if "slopes" in chosen else None,
            )
            spec = AttentionSpec(
                scale=1.0,
                mask=Mask(left=50, right=0),
                dropout_rate=0.1 if "dropout" in chosen else 0.0,
                max_logit="max_logit" in chosen,
                deterministic=count == 3,
            )
            yield describe(operands, spec)


@pytest.mark.thorough(always=["6"])
@pytest.mark.parametrize("count", [0, 3, 6])
def test_every_call_has_tiles(count):
    for problem in _problems(count):
        _assert_hopper_tiles_fit(problem)
        if problem.dtype.itemsize == 2:
            for capability in ("8.0", "8.9", "9.0"):
                _assert_portable_tiles_fit(problem, capability)


def _assert_hopper_tiles_fit(problem):
    native = tiles.native_problem(problem)
    taken = {"forward": tiles.choose_forward(problem, 132).smem_bytes(native)}
    for name, blocks in choose_backward(problem, 132).items():
        native = native_backward_problem(problem, name if name in ("fused", "paired") else "split")
        taken[name] = blocks.smem_bytes(native)
    native = native_backward_problem(problem, "split")
    for axes in ("rows", "columns", "tile") if problem.bias_shape else ("rows",):
        sums = Sums(native, axes, ("bias",))
        taken[axes] = launch.shared_memory(scores_scratch(sums, sums.blocks()))
    assert max(taken.values()) <= SMEM_LIMIT, (problem, taken)


def _assert_portable_tiles_fit(problem, capability: str):
    found = portable_blocks.choose_blocks(problem, None, capability)
    kernels = {"forward": found.forward}
    if isinstance(found.backward, SplitSizes):
        kernels |= {"dkv": found.backward.dkv, "dq": found.backward.dq}
    else:
        kernels["fused"] = found.backward
    scores = {"score_tiles": found.scores.tile, "score_lines": found.scores.lines}
    kernels |= {name: tile for name, tile in scores.items() if tile is not None}
    for name, tile in kernels.items():
        taken = portable_blocks.bytes_of(name, tile, problem)
        assert taken <= memory_of(capability) - RESERVED, (
            problem,
            name,
            taken,
        )


# --- tiles that a caller asks for ----------------------------------------------------------------

WRONG_ON_HOPPER = (
    ({"forward": {"speculates": 200.0}}, "from 0.0 to 60.0"),
    ({"forward": {"speculates": float("nan")}}, "from 0.0 to 60.0"),
    ({"forward": {"speculates": 20}}, "of type float"),
    ({"forward": {"stages": 33}}, "from 1 to 32"),
    ({"forward": {"stages": 0}}, "from 1 to 32"),
    ({"forward": {"stages": True}}, "of type int"),
    ({"forward": {"warpgroups": 4}}, "from 1 to 3"),
    ({"forward": {"block_kv": 64.0}}, "a multiple of 16 up to 256"),
    ({"forward": {"block_kv": "64"}}, "a multiple of 16 up to 256"),
    ({"forward": {"persistent": 1}}, "True or False"),
    ({"forward": {"stages": 30}}, "bytes of shared memory"),
    ({"forward": 5}, "a dict with keys of"),
    ({"forward": {"polynomials": 3.0}}, "from 0.0 to 1.0"),
    ({"backward": {}}, "this call runs the kernels 'forward', 'fused'"),
)
WRONG_ON_PORTABLE = (
    ({"forward": {"rows": "64"}}, "a positive int"),
    ({"forward": {"rows": 64.0}}, "a positive int"),
    ({"forward": {"slots": True}}, "a positive int"),
    ({"forward": {"columns": float("nan")}}, "a positive int"),
    ({"forward": {"shared_weights": 1}}, "True or False"),
    ({"forward": {"columns": 8}}, "a multiple of 16"),
    ({"forward": 5}, "a dict with keys of"),
    ({"backward": {}}, "this call runs the kernels 'forward', 'fused'"),
)


@pytest.mark.parametrize(
    ("gpu", "blocks", "said"),
    [("hopper", *each) for each in WRONG_ON_HOPPER]
    + [("portable-163", *each) for each in WRONG_ON_PORTABLE],
    ids=str,
)
def test_tiles_that_are_refused(gpu, blocks, said):
    q = _shape(1, 256, 2, 128, dtype="bfloat16")
    call = lambda q: fp.flash_attention(q, q, q, backend=GPUS[gpu].backend, blocks=blocks)
    with on(GPUS[gpu]), pytest.raises(ValueError, match="blocks") as caught:
        jax.eval_shape(call, q)
    assert said in str(caught.value)


def test_three_warpgroups_beside_segment_ids():
    """Refuses 3 warpgroups with segment ids, 232,584 bytes: autotuning leaves out such tiles."""
    ids = _shape(2, 512)
    arrays = _call(128, 128, "bfloat16", 512, q_segment_ids=ids, kv_segment_ids=ids)
    options = {"blocks": {"forward": {"warpgroups": 3}}}
    with on(GPUS["hopper"]), pytest.raises(ValueError, match="bytes of shared memory"):
        _gradients(arrays, options, "hopper")


# --- random calls --------------------------------------------------------------------------------

SAMPLE = 2  # of each GPU; `make fuzz-lowering` tries thousands


@pytest.mark.parametrize("gpu", GPUS)
def test_random_calls_are_lowered(gpu, seed_of_sources):
    with on(GPUS[gpu]):
        found = [try_call(GPUS[gpu], seed_of_sources, number) for number in range(SAMPLE)]
    failed = [f"{each.call}\n{each.error}" for each in found if each.kind == "failed"]
    assert not failed, f"seed {seed_of_sources}: " + "\n".join(failed)


def test_dropout_without_a_mask():
    """Lowers dropout at head dim 128: the second loop keeps predicates next to rounded tiles."""
    arrays = _call(128, 128, "bfloat16", 512, dropout_seed=_shape(), q_lengths=_shape(2))
    with on(GPUS["hopper"]):
        _lower(_gradients(arrays, {"dropout_rate": 0.1}, "hopper"))


@pytest.mark.thorough
def test_every_form_of_a_bias():
    """Lowers the bias, its gradient too, with every other operand present."""
    for shape in ((2, 4, 77, 77), (1, 4, 1, 77)):
        arrays = _call(64, 64, "bfloat16", 77, **_everything(77, "float32"))
        arrays["bias"] = _shape(*shape, dtype="float32")
        with on(GPUS["hopper"]):
            _lower(_gradients(arrays, {"dropout_rate": 0.1, "softcap": 3.0}, "hopper"))
