"""Tests that need two or four Hopper GPUs: `make test-gpus`."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from . import mesh_training
from .checks import GRADIENT_FACTOR
from .mesh_training import HALF, SEQUENCES
from .test_training_on_meshes import WAYS, name

pytestmark = pytest.mark.gpus

SIZES = {"layers": 2, "d_model": 256, "heads": 8, "kv_heads": 4, "head_dim": 64}
SETTING = mesh_training.Setting(SIZES, batch=8, length=384)
# A layer whose sequences are sharded takes no other attention than its own, in float32 here.
CASES = [
    (axes, attention)
    for attention in ("flash", HALF)
    for axes in WAYS
    if attention == "flash" or not set(axes) & set(SEQUENCES)
]


@pytest.fixture(autouse=True)
def full_precision():
    """Makes all matmuls but the kernels' full float32, so that errors are those of attention."""
    with jax.default_matmul_precision("highest"):
        yield


def label(x) -> str:
    return x if isinstance(x, str) else name(x)


@functools.cache
def on_one_gpu(attention: str, backend: str):
    """Trains on one GPU; returns parameters."""
    params, apply = SETTING.model(attention, backend)
    found, *_ = mesh_training.train(apply, params, SETTING.data())
    return jax.device_get(found)


def errors(found, exact) -> dict[str, float]:
    """Returns the largest error and the root mean square of each parameter."""
    sizes = {}
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(exact), strict=True)
    for (path, x), y in leaves:
        name = jax.tree_util.keystr(path)
        sizes |= {f"{name} most": np.abs(x - y).max()}
        sizes |= {f"{name} rms": np.sqrt(np.mean((x - y) ** 2))}
    return sizes


def times_one_gpu(axes, attention: str, types: str, backend: str):
    """Trains over a mesh; returns (its errors over those on one GPU, text of the compiled step)."""
    kinds, how = mesh_training.TYPES[types], {"attention": attention, "backend": backend}
    found, _, text = mesh_training.train_on(SETTING, axes, kinds, jax.devices(), **how)
    exact = on_one_gpu("flash", "xla")
    alone = errors(on_one_gpu(attention, backend), exact)
    mine = errors(jax.device_get(found), exact)
    # Of float32 attention on xla one GPU's errors are 0.
    return {name: mine[name] / max(alone[name], 1e-30) for name in alone}, text


@pytest.mark.parametrize("types", mesh_training.TYPES)
@pytest.mark.parametrize(("axes", "attention"), CASES, ids=label)
def test_five_steps(axes, attention, types, backend="hopper"):
    """Compares errors by the rule for gradients: three times those of one GPU with the kernels."""
    needed = int(np.prod(list(axes.values())))
    if jax.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs, there are {jax.device_count()}")
    ratios, text = times_one_gpu(axes, attention, types, backend)
    assert ("mosaic_gpu" in text) == (backend == "hopper")
    mesh_training.assert_local(SETTING, axes, text)
    wrong = {name: ratio for name, ratio in ratios.items() if not ratio <= GRADIENT_FACTOR}
    if not wrong:
        return
    # Whether it is the kernels or what XLA makes of the rest of the model.
    plain, _ = times_one_gpu(axes, attention, types, "xla")
    both = {name: (ratio, plain[name]) for name, ratio in wrong.items()}
    pytest.fail(f"times the errors on one GPU, with {backend} and with xla: {both}; all: {ratios}")
