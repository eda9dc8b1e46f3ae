"""The choice of the backend, and what is said about the others."""

from __future__ import annotations

import copy
import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest

import flash_pallas as fp
from flash_pallas import devices
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.launch import SplitBlocks
from flash_pallas.backends.xla import XlaBackend
from flash_pallas.backends.xla.backend import XlaAttention
from flash_pallas.core.mask import Mask
from flash_pallas.core.problem import AttentionSpec, Operands, describe
from flash_pallas.devices import DEVICES
from flash_pallas.frontend import dispatch, tables

from .checks import explain_on

Q = jnp.ones((1, 8, 2, 16), jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Picky(XlaBackend):
    """A backend that runs whatever xla runs, unless it has a reason not to."""

    reason: str | None = None
    name = "picky"

    @property
    def attention(self):
        return PickyAttention(self)


class PickyAttention(XlaAttention):
    def refusal(self, problem):
        return self.backend.reason


@pytest.fixture
def registry(monkeypatch):
    def install(reason):
        backends = {"picky": Picky(reason=reason), "xla": XlaBackend()}
        monkeypatch.setattr(dispatch, "BACKENDS", backends)
        dispatch._log_once.cache_clear()

    return install


def problem():
    return fp.explain(fp.flash_attention, Q, Q, Q, backend="xla").problem


def test_auto_takes_the_first_that_can(registry):
    registry(None)
    assert dispatch.select(problem(), "auto").name == "picky"
    registry("it is Monday")
    assert dispatch.select(problem(), "auto").name == "xla"


def test_a_named_backend_never_falls_back(registry):
    registry("it is Monday")
    message = "backend='picky': it is Monday; backend='auto' or 'xla' can run this call"
    with pytest.raises(fp.UnsupportedByBackend, match=message):
        fp.flash_attention(Q, Q, Q, backend="picky")
    with pytest.raises(NotImplementedError, match=message):
        fp.explain(fp.flash_attention, Q, Q, Q, backend="picky")


def test_an_unknown_name_lists_the_choices(registry):
    registry(None)
    with pytest.raises(ValueError, match="'fast': choose one of 'auto', 'picky', 'xla'"):
        dispatch.select(problem(), "fast")


def test_passing_over_is_logged_once_and_only_on_a_gpu(registry, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="flash_pallas")
    registry("it is Monday")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    dispatch.select(problem(), "auto")
    assert not caplog.records
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for _ in range(3):
        dispatch.select(problem(), "auto")
    passed, warned = caplog.records
    assert passed.message == "backend 'picky' was passed over: it is Monday"
    assert passed.levelno == logging.INFO and warned.levelno == logging.WARNING
    assert warned.message == (
        "attention in bfloat16 runs as blockwise jnp on this GPU, which is slow: 'picky' it is "
        "Monday"
    )


def test_a_mask_mod_that_skips_nothing_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="flash_pallas")
    prefix = lambda b, n, i, j: (j <= i) | (j < 100 * n)
    call = lambda x, **options: jax.eval_shape(lambda x: fp.flash_attention(x, x, x, **options), x)
    x, short = (jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32) for n in (4096, 512))
    mask = fp.BlockMask.from_indices(jnp.zeros((1, 1, 32, 1), int), q_len=4096, kv_len=4096)
    call(short, mask_mod=prefix)
    call(x, mask_mod=prefix, block_mask=mask)
    call(x, mask_mod=prefix, q_offset=3)  # with which from_mask_mod would be refused
    assert not caplog.records
    for _ in range(3):
        call(x, mask_mod=prefix)
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "of 4096 x 4096 pairs" in record.message
    assert "BlockMask.from_mask_mod(mask_mod, 1, 1, 4096, 4096)" in record.message


def test_arrays_that_were_put_on_another_platform_take_no_kernel_of_the_default(
    registry, monkeypatch
):
    """Explains calls on arrays on the CPU of a machine with a GPU: kernels answer for the GPU."""
    registry(None)
    (cpu,) = jax.devices("cpu")[:1]
    here = jax.device_put(Q, cpu)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    decode = lambda q: fp.explain(fp.flash_decode, q[:, :1], Q, Q)
    for explained in (lambda q: fp.explain(fp.flash_attention, q, Q, Q), decode):
        assert explained(Q).backend == "picky"
        found = explained(here)
        assert found.backend == "xla"
        assert "the arrays are on the cpu" in found.reasons["picky"]
        with jax.default_device(cpu):
            assert explained(Q).backend == "xla"
    with pytest.raises(fp.UnsupportedByBackend, match=r"on the cpu.*the gpu; .*or 'xla' can"):
        fp.flash_attention(Q, here, Q, backend="picky")
    assert fp.flash_attention(Q, here, Q).shape == Q.shape


def test_explain(registry):
    registry("it is Monday")
    found = fp.explain(fp.flash_attention, Q, Q, Q, blocks={"block_q": 4})
    assert found.backend == "xla" and found.blocks.block_q == 4
    assert found.reasons == {"picky": "it is Monday"}
    text = str(found)
    assert "runs on: xla, XlaBlocks(block_q=4, block_kv=8)" in text
    assert "not on picky: it is Monday" in text
    registry(None)
    assert "preferred" in fp.explain(fp.flash_attention, Q, Q, Q).reasons["xla"]
    assert "asked for" in fp.explain(fp.flash_attention, Q, Q, Q, backend="xla").reasons["picky"]


def test_hopper_comes_first_and_kernels_refuse_a_cpu():
    assert list(dispatch.BACKENDS) == ["hopper", "cudnn", "portable", "xla"]
    if jax.default_backend() == "cpu":
        for name, capability in (("hopper", r"9\.0"), ("cudnn", r"8\.0"), ("portable", r"8\.0")):
            with pytest.raises(
                fp.UnsupportedByBackend, match=f"compute capability {capability}.*cpu"
            ):
                fp.flash_attention(Q, Q, Q, backend=name)
            assert "compute capability" in fp.explain(fp.flash_attention, Q, Q, Q).reasons[name]
    assert copy.deepcopy(dispatch.BACKENDS) == dispatch.BACKENDS


@pytest.mark.parametrize(
    ("capability", "chosen", "hopper", "portable"),
    [
        ("9.0", "hopper", None, None),
        *((of, "portable", "9.0", None) for of in ("8.0", "8.6", "8.9", "10.0", "10.3", "12.0")),
        ("7.5", "xla", "9.0", "8.0"),
    ],
)
def test_which_gpus_the_kernels_take(capability, chosen, hopper, portable, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability)
    described = problem()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    for name, reason in (("hopper", hopper), ("portable", portable)):
        found = dispatch.BACKENDS[name].attention.refusal(described)
        assert (found is None) == (reason is None) and (reason or "") in (found or "")
    assert dispatch.select(described, "auto").name == chosen


@pytest.mark.parametrize(
    ("capability", "dtype", "way_out"),
    [
        ("8.0", "float32", "'portable' takes bfloat16 and float16, not float32: cast q, k and v"),
        ("9.0", "float64", "'hopper' takes bfloat16, float16 and float32, not float64: cast q, k"),
        ("10.0", "float32", "'portable' takes bfloat16 and float16, not float32: cast q, k and v"),
        ("8.0", "bfloat16", None),
        ("9.0", "float32", None),
    ],
)
def test_jnp_on_a_gpu_is_a_warning_with_the_way_out(
    capability, dtype, way_out, monkeypatch, caplog
):
    device = types.SimpleNamespace(compute_capability=capability)
    shapes = problem()
    described = dataclasses.replace(shapes, dtype=jnp.dtype(dtype))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    dispatch._log_once.cache_clear()
    for _ in range(3):
        dispatch.select(described, "auto")
        dispatch.select(described, "auto", platform="cpu")  # arrays that were put there
        dispatch.select(described, "xla")
    warned = [x.message for x in caplog.records if x.levelno == logging.WARNING]
    assert len(warned) == (way_out is not None)
    for message in warned:
        assert way_out in message and "compute capability" not in message
        assert f"attention in {dtype} runs as blockwise jnp" in message and "Flax" in message


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_producer_where_registers_are_not_traded(head_dim, monkeypatch):
    x = jax.ShapeDtypeStruct((1, 256, 1, head_dim), jnp.bfloat16)
    described = describe(Operands(x, x, x, None), AttentionSpec(scale=1.0))

    def producers(**fields):
        blocks = HopperBackend(**fields).attention.plan(described)
        split = isinstance(blocks.backward, SplitBlocks)
        backward = vars(blocks.backward).values() if split else [blocks.backward]
        return {kernel.producer for kernel in (blocks.forward, *backward)}

    assert producers(trades_registers=True) == {True}
    assert producers(trades_registers=False) == {False}
    for version, trades in (((0, 11, 2), True), ((0, 12, 0, 1), False)):
        monkeypatch.setattr(jaxlib.version, "__version_info__", version)
        assert producers() == {trades}
    asked = HopperBackend(trades_registers=True).attention.plan(
        described, {"forward": {"producer": False}}
    )
    assert not asked.forward.producer


def test_modifiers_take_two_warpgroups_without_a_producer():
    x = jax.ShapeDtypeStruct((4, 4096, 8, 64), jnp.bfloat16)
    alone = HopperBackend(trades_registers=False)
    warpgroups = lambda **given: (
        alone.attention.plan(
            describe(Operands(x, x, x, None)._replace(**given), AttentionSpec(scale=1.0)), None
        ).forward.warpgroups
    )
    assert warpgroups() == 3
    assert warpgroups(bias=jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.bfloat16)) == 2


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_dq_is_added_after_the_turn_without_a_producer(head_dim):
    x = jax.ShapeDtypeStruct((4, 4096, 8, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4, 4096), jnp.int32)

    def tiles(trades, spec=None, **given):
        operands = Operands(x, x, x, None)._replace(**given)
        spec = spec or AttentionSpec(scale=1.0, mask=Mask(right=0))
        return (
            HopperBackend(trades_registers=trades).attention.plan(describe(operands, spec)).backward
        )

    if head_dim == 64:  # it would spill
        assert tiles(False) == dataclasses.replace(tiles(True), producer=False)
        return
    assert tiles(False).late_handover and not tiles(True).late_handover
    assert tiles(False).stages == (3 if head_dim == 128 else tiles(True).stages)
    assert tiles(False, q_segments=ids, kv_segments=ids).late_handover
    # Not timed: they need registers of their own.
    assert not tiles(False, AttentionSpec(scale=1.0, mask=Mask(right=0), softcap=9.0)).late_handover
    assert not tiles(
        False, bias=jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.float32)
    ).late_handover


@pytest.mark.parametrize("slots", ["stages", "do_stages", "ds_stages"])
def test_ping_pong_takes_two_slots(slots):
    """Checks that one slot is refused: each of the warpgroups would wait for the other for ever."""
    x = jax.ShapeDtypeStruct((1, 256, 1, 128), jnp.bfloat16)
    described = describe(Operands(x, x, x, None), AttentionSpec(scale=1.0))
    with pytest.raises(ValueError, match=rf"'{slots}': 1.*two 'stages'.*'ping_pong': False"):
        HopperBackend().attention.plan(described, {"fused": {slots: 1}})
    chosen = HopperBackend().attention.plan(described, {"fused": {slots: 1, "ping_pong": False}})
    assert not chosen.backward.ping_pong


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": 1}, "stages of the paired backward is 1: at least 2"),
        ({"stages": 3}, "bytes of shared memory"),
    ],
)
def test_what_pairs_of_ctas_cannot_do(fields, message):
    x = jax.ShapeDtypeStruct((1, 256, 1, 256), jnp.bfloat16)
    spec = AttentionSpec(scale=1.0, mask=Mask(right=0))
    with pytest.raises(ValueError, match=message):
        backend = HopperBackend(trades_registers=True)
        backend.attention.plan(describe(Operands(x, x, x, None), spec), {"paired": fields})


@pytest.mark.parametrize(
    ("head_dim", "right", "length", "staggered"),
    [
        (256, None, 4096, True),
        (200, None, 4096, True),
        (192, None, 4096, False),
        (256, 0, 4096, False),
        (256, None, 4000, False),
    ],
)
def test_which_pairs_of_ctas_are_staggered(head_dim, right, length, staggered):
    x = jax.ShapeDtypeStruct((4, length, 8, head_dim), jnp.bfloat16)
    spec = AttentionSpec(scale=1.0, mask=Mask(right=right))
    backend = HopperBackend(trades_registers=True)
    plan = backend.attention.plan(describe(Operands(x, x, x, None), spec))
    assert plan.backward.stagger == staggered


SHAPE = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
ELSEWHERE = {"h100": "hopper", "h200": "hopper", "a100": "portable", "b200": "portable"}


@pytest.mark.parametrize(("name", "backend"), ELSEWHERE.items())
def test_explain_answers_for_a_gpu_that_is_not_here(name, backend):
    found = explain_on(name, fp.flash_attention, SHAPE, SHAPE, SHAPE, causal=True)
    assert found.backend == backend and found.gpu == DEVICES[name].kind
    assert f", on {found.gpu}\n" in str(found)
    there = "asks the cuDNN that is here; on that GPU itself 'auto' takes it"
    assert found.reasons["cudnn"].endswith(there) == (name == "b200")
    if backend != "hopper":
        assert found.reasons["hopper"].startswith("needs compute capability 9.0 (H100, H200); this")
        message = rf"this GPU has \d+\.0; .*'{backend}' can"
        with pytest.raises(fp.UnsupportedByBackend, match=message):
            explain_on(name, fp.flash_attention, SHAPE, SHAPE, SHAPE, backend="hopper")
    token = jax.ShapeDtypeStruct((4, 1, 16, 128), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    decoded = explain_on(name, fp.flash_decode, token, SHAPE, SHAPE, kv_lengths=lengths)
    kernels = "hopper" if backend == "hopper" else "portable"  # cuDNN does not decode
    assert decoded.backend == kernels and decoded.gpu == found.gpu
    assert decoded.blocks.num_splits > 1


def test_explain_elsewhere_reads_the_tables_of_that_device(monkeypatch, tmp_path):
    monkeypatch.setenv(tables.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(tables, "_jaxlib", lambda: "0.11")  # that of the shipped table
    tables._read.cache_clear()  # it may have been read as that of another jaxlib
    dispatch.forget_tiles()
    found = explain_on("H200", fp.flash_attention, SHAPE, SHAPE, SHAPE)
    table = "shipped table nvidia_h200.json"
    assert found.sources == {"forward": f"heuristic, fastest in {table}", "fused": table}
    assert set(explain_on("a100", fp.flash_attention, SHAPE, SHAPE, SHAPE).sources.values()) == {
        "heuristic"
    }
    tables._read.cache_clear()
    dispatch.forget_tiles()


def test_gpus_are_known_by_any_spelling_of_their_name():
    for name in ("rtx5090", "RTX 5090", "RTX-5090", "NVIDIA GeForce RTX 5090"):
        assert devices.named(name) is DEVICES["rtx5090"]
    with pytest.raises(TypeError, match=r'gpu must be the name of a GPU, as in "H100", got 90'):
        explain_on(90, fp.flash_attention, Q, Q, Q)


def test_explain_of_an_unknown_gpu():
    with pytest.raises(
        ValueError, match=r"gpu is 'v100': write the name of .*'A100', .*'RTX5090'.*'8.0'"
    ):
        explain_on("v100", fp.flash_attention, Q, Q, Q)


def test_explain_takes_shapes_in_place_of_any_array():
    q, bias = jax.ShapeDtypeStruct(Q.shape, Q.dtype), jnp.ones((1, 1, 1, Q.shape[1]))
    options = {"window": [3, 0], "score_mod": lambda s, b, n, i, j: s * 2.0}
    given = {"bias": jax.ShapeDtypeStruct(bias.shape, bias.dtype), "q_offset": 2, **options}
    found = fp.explain(fp.flash_attention, q, q, q, **given)
    assert found == fp.explain(fp.flash_attention, Q, Q, Q, bias=bias, q_offset=2, **options)
    with pytest.raises(TypeError, match="bias has dtype int32"):
        fp.explain(fp.flash_attention, q, q, q, bias=jax.ShapeDtypeStruct(bias.shape, jnp.int32))
