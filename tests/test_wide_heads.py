"""Head dims above 256 on Hopper: what is refused, what is chosen, and that every chunk arrives."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.wide.kernel import WideKernel
from flash_pallas.backends.hopper.wide.launch import choose_wide
from flash_pallas.backends.hopper.wide.tiles import KERNELS, WideBlocks, wide_problem
from flash_pallas.core.problem import AttentionSpec, Operands, describe

from .checks import explain_on

BACKEND = HopperBackend(capability="9.0")
WIDTHS = [(512, 512), (384, 384), (320, 288), (512, 64), (64, 512), (448, 256)]


def _problem(head_dim: int, v_head_dim: int, dtype=jnp.bfloat16):
    q, v = (jax.ShapeDtypeStruct((1, 1000, 4, width), dtype) for width in (head_dim, v_head_dim))
    return describe(Operands(q, q, v), AttentionSpec(scale=1.0))


@dataclasses.dataclass(frozen=True)
class _Recorder(WideKernel):
    """A kernel whose copies are written down: (step, position in it) by slot."""

    slots: dict = dataclasses.field(default_factory=dict)

    def copy(self, cta, n, later, place):
        """Puts the chunk into its slot, which must be free."""
        slot = ((n + later) * self.chunks.total + place) % self.blocks.chunks
        assert slot not in self.slots, "overwritten before it was read"
        self.slots[slot] = n + later, place

    def read(self, cta, n, place):
        """Takes the chunk out of its slot, where it must be, and loads the next."""
        slot = (n * self.chunks.total + place) % self.blocks.chunks
        assert self.slots.pop(slot, None) == (n, place)
        self.reload(cta, n, place)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("role", sum(KERNELS.values(), ()), ids=lambda role: role.name)
def test_every_chunk_arrives_once_in_its_slot(role, widths):
    problem = wide_problem(_problem(*widths))
    for width in (64, 128, 192):
        total = WideKernel(problem, WideBlocks(width, 2), role, True).chunks.total
        for chunks in range(2, min(16, total) + 1):
            for steps in (1, 2, 3, 7):
                blocks = WideBlocks(width, chunks)
                kernel = _Recorder(problem, blocks, role, True)
                _go_through(kernel, steps)


def _go_through(kernel: _Recorder, steps: int):
    cta = types.SimpleNamespace(tiles=types.SimpleNamespace(total=steps))
    for position in range(kernel.blocks.chunks):
        kernel.copy(cta, 0, 0, position)
    for n in range(steps):
        for place in range(kernel.chunks.total):
            kernel.read(cta, n, place)
    for place in kernel.chunks.summed:
        kernel.read(cta, steps, place)
    assert not kernel.slots, "loaded and never read"


def test_chosen_options():
    chosen = choose_wide(_problem(512, 512))
    assert {name: (x.width, x.chunks) for name, x in chosen.items()} == {
        "forward": (128, 4),
        "dq": (64, 5),
        "dkv": (128, 4),
    }
    assert choose_wide(_problem(384, 384))["forward"] == WideBlocks(192, 3, lazy_rescale=8.0)


@pytest.mark.parametrize(
    ("widths", "dtype", "reason"),
    [
        ((576, 512), "bfloat16", "takes head dims up to 512, not 576"),
        ((512, 520), "float16", "takes head dims up to 512, not 520"),
        ((512, 512), "float32", "takes float32 with head dims up to 128, not 512"),
    ],
    ids=str,
)
def test_what_is_refused(widths, dtype, reason):
    assert reason in BACKEND.attention.refusal(_problem(*widths, jnp.dtype(dtype)))


def test_small_blocks_of_a_mask_are_refused():
    x = jax.ShapeDtypeStruct((1, 512, 2, 512), jnp.bfloat16)
    visible = jnp.ones((1, 1, 512, 512), bool)

    def explained(block):
        mask = fp.BlockMask.from_dense(visible, block=block)
        return explain_on("H200", fp.flash_attention, x, x, x, block_mask=mask)

    assert explained((128, 128)).backend == "hopper"
    found = explained((64, 64))
    assert found.backend == "portable"
    assert "blocks of a block_mask in multiples of 128" in found.reasons["hopper"]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"fused": {"stages": 2}}, "runs the kernels 'forward', 'dq', 'dkv'"),
        ({"forward": {"block_kv": 64}}, "a dict with keys of"),
        ({"dq": {"chunks": 0}}, "at least 1"),
        ({"dq": {"chunks": 1}}, "'chunks' is from 2 to"),
        ({"dkv": {"width": 96}}, "'width' is 64, 128 or 192"),
        ({"forward": {"chunks": 8}}, "no room for that in shared memory"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(blocks, message):
    with pytest.raises(ValueError, match=message):
        BACKEND.attention.plan(_problem(512, 512), blocks)


def test_candidates_of_autotune_fit():
    candidates = BACKEND.attention.candidates(_problem(512, 512))
    assert set(candidates) == set(KERNELS) and all(len(x) > 1 for x in candidates.values())


def test_derivatives_beyond_the_gradient_are_left_to_jnp():
    problem = _problem(512, 512)
    blocks, qkv = BACKEND.attention.plan(problem), frozenset("qkv")
    assert "above 256" in BACKEND.jvp.refusal(problem, blocks, qkv, primal=True)
    assert "above 256" in BACKEND.jvp_of_vjp.refusal(problem, qkv, qkv)
