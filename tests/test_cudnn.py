"""The cuDNN backend: what it takes, what it makes of a call, and who is told. No GPU is needed.

Numbers are those of a stand-in for cuDNN (cudnn_stand_in.py); test_gpu.py runs cuDNN itself on the
same cases.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_pallas as fp
from flash_pallas.backends.cudnn import OLDEST, CudnnBackend, backend, residuals
from flash_pallas.core.problem import AttentionSpec
from flash_pallas.frontend import dispatch
from flash_pallas.parallel import context_parallel_attention, sharded_attention

from . import checks, cudnn_stand_in
from .cases import Case
from .checks import explain_on
from .cudnn_cases import CASES, WIDE

HOPPER = CudnnBackend(capability="9.0", version=OLDEST)
BLACKWELL = CudnnBackend(capability="10.0", version=OLDEST)
B, T, S, N, K, H = 2, 64, 128, 4, 2, 64
ROUNDING = 2.0**-7  # the unit in the last place of bfloat16


def arrays(q_len=T, kv_len=S, head_dim=H, v_head_dim=None, dtype=jnp.bfloat16, batch=B):
    shapes = (q_len, N, head_dim), (kv_len, K, head_dim), (kv_len, K, v_head_dim or head_dim)
    return [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape in shapes]


def described(*given, **options):
    return fp.explain(fp.flash_attention, *(given or arrays()), **options).problem


@pytest.fixture
def stand_in():
    with cudnn_stand_in.installed():
        yield


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_in")
@pytest.mark.thorough(always=["lengths_causal", "kv_lengths_zero", "bias_infinite_causal"])
@pytest.mark.parametrize("case", (*CASES, *WIDE), ids=str)
def test_the_oracle(case):
    checks.assert_matches_oracle(checks.bind(HOPPER), case)


def assert_close(found, expected):
    """Checks that none is off by more than a rounding of the largest: sums of rounded parts."""
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    assert np.abs(found - expected).max() <= ROUNDING * np.abs(expected).max()


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("shared", ["bias and kv", None], ids=str)
def test_vmap_is_a_loop(shared):
    """Members with biases of their own make a batch that several entries of share one."""
    q, k, v = draw(3, 2, 32, N, H), draw(3, 2, 48, K, H, seed=1), draw(3, 2, 48, K, H, seed=2)
    bias = draw(3, 1, N, 32, 48, seed=3)
    axes = [0, *([None if shared else 0] * 3)]
    args = [x[0] if axis is None else x for x, axis in zip((q, k, v, bias), axes, strict=True)]
    attend = lambda q, k, v, bias: checks.bind(HOPPER)(q, k, v, bias=bias)[0].astype(jnp.float32)
    loss = lambda *given: jnp.sum(attend(*given) ** 2)
    grad = jax.grad(loss, (0, 1, 2, 3))
    grads, one = jax.jit(jax.vmap(grad, axes))(*args), jax.jit(grad)
    for i in range(3):
        member = [x if axis is None else x[i] for x, axis in zip(args, axes, strict=True)]
        for found, expected in zip(grads, one(*member), strict=True):
            assert_close(found[i], expected)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.thorough(always=["auto"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shards_of_a_batch_and_heads(kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind, kind), devices=jax.devices()[:4])
    q, k, v = draw(2, 32, N, H), draw(2, 48, K, H, seed=1), draw(2, 48, K, H, seed=2)
    bias = draw(1, N, 32, 48, seed=3)
    attend = lambda q, k, v, bias: checks.bind(HOPPER)(q, k, v, bias=bias, causal=True)[0]
    loss = lambda *given: jnp.sum(attend(*given).astype(jnp.float32) ** 2)
    grads = jax.grad(loss, (0, 1, 2, 3))
    sharding = NamedSharding(mesh, P("data", None, "model"))
    put = [jax.device_put(x, sharding) for x in (q, k, v)]
    put.append(jax.device_put(bias, NamedSharding(mesh, P(None, "model"))))
    with jax.set_mesh(mesh):
        found = jax.jit(grads)(*put)
    for ours, expected in zip(found, jax.jit(grads)(q, k, v, bias), strict=True):
        assert_close(ours, expected)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("causal", "strategy"), [(True, "ring"), (False, "ring"), (True, "ulysses")]
)
def test_context_parallelism(causal, strategy, eight_devices, monkeypatch):
    """Runs rings, which hand the log-sum-exp and O of all keys to the backward of some."""
    monkeypatch.setitem(dispatch.BACKENDS, "cudnn", HOPPER)
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=eight_devices[:4])
    call = partial(
        context_parallel_attention, mesh=mesh, axis="context", strategy=strategy, return_lse=True
    )
    run = lambda q, k, v, q_offset, **options: call(q, k, v, backend="cudnn", **options)
    case = Case("ring", T=64, S=64, B=2, N=8, K=4, H=16, dtype="bfloat16", causal=causal)
    checks.assert_matches_oracle(run, case)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("strategy", ["none", "ring"])
def test_a_second_backward_is_of_the_log_sum_exp(strategy, eight_devices, monkeypatch):
    """Counts the backwards in a gradient: of a sum of O, and of a sum of O and the log-sum-exp."""
    monkeypatch.setitem(dispatch.BACKENDS, "cudnn", HOPPER)
    call = partial(fp.flash_attention_with_lse, backend="cudnn")
    if strategy == "ring":
        mesh = jax.make_mesh((4,), ("context",), (AxisType.Auto,), devices=eight_devices[:4])
        attend = partial(
            sharded_attention, axis="context", strategy="ring", backend="cudnn", return_lse=True
        )
        whole, rows = P(None, "context"), P(None, None, "context")
        call = jax.shard_map(attend, mesh=mesh, in_specs=(whole,) * 3, out_specs=(whole, rows))
    x = draw(1, 64, 2, 16)
    for wants, backwards in ((False, 1), (True, 2)):
        loss = lambda x, wants: sum(y.astype(jnp.float32).sum() for y in call(x, x, x)[: 1 + wants])
        text = str(jax.make_jaxpr(partial(jax.grad(loss), wants=wants))(x))
        assert len(re.findall(r"= dot_product_attention_bwd_wrapper\[", text)) == backwards


# --- What reaches cuDNN: jax's own lowering, of which a CPU is enough -----------------------------


@pytest.fixture
def lowering(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: OLDEST)


def calls(function, *args) -> list[str]:
    """Returns the lines of the lowered text that call cuDNN, less the names of their operands."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [re.sub(r".*@__cudnn\$|%\w+", "", x) for x in text.splitlines() if "@__cudnn$" in x]


def loss_of(**options):
    return lambda *x: checks.bind(BLACKWELL)(*x, **options)[0].astype(jnp.float32).sum()


@pytest.mark.usefixtures("lowering")
@pytest.mark.parametrize(
    ("options", "mask", "window"),
    [
        ({}, "NO_MASK", 0),
        ({"causal": True}, "CAUSAL", 0),
        ({"window": (7, 0)}, "CAUSAL", 8),
        ({"window": (7, 3), "causal": True}, "CAUSAL", 8),
        ({"window": (T - 2, 0)}, "CAUSAL", T - 1),
        ({"window": (T - 1, 0)}, "CAUSAL", 0),
        ({"kv_lengths": 3}, "PADDING", 0),
        ({"q_lengths": 3, "causal": True}, "PADDING_CAUSAL", 0),
    ],
    ids=str,
)
def test_masks_reach_cudnn(options, mask, window):
    (call,) = calls(loss_of(**options, scale=0.5), *arrays())
    assert f"mask_type\\22: \\22{mask}\\22" in call
    assert f"sliding_window_length\\22: {window}," in call
    assert "fmha_scale\\22: 0.5," in call


def layers(attend):
    """Returns a model that scans over two layers, so that its backward is another loop."""
    layer = lambda x, _: (attend(x, x[:, :, ::2], x[:, :, ::2]), None)
    return lambda x: jax.lax.scan(layer, x, length=2)[0].astype(jnp.float32).sum()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("lse", [False, True], ids=["o", "o_and_lse"])
@pytest.mark.parametrize("policy", ["plain", "save_attention", "nothing_saveable"])
def test_a_gradient_runs_the_forward_once(policy, lse):
    """Counts logarithms in the compiled program: the stand-in's forward has one, its backward none.

    Only a checkpoint that saves nothing has two. What the backward traces once more is dropped.
    """

    def attend(*x):
        o, rows = checks.bind(HOPPER)(*x, causal=True)
        return o + jnp.swapaxes(rows, 1, 2)[..., None].astype(o.dtype) if lse else o

    policies = jax.checkpoint_policies.nothing_saveable, fp.save_attention
    wrapped = attend
    if policy != "plain":
        wrapped = jax.checkpoint(attend, policy=policies[policy == "save_attention"])
    text = jax.jit(jax.grad(layers(wrapped))).lower(*arrays(T, T)[:1]).compile().as_text()
    assert len(re.findall(r"\blog\(", text)) == 1 + (policy == "nothing_saveable")


@pytest.mark.usefixtures("lowering")
def test_another_backward_of_jax_is_refused(monkeypatch):
    """Looks at a jax.nn whose backward keeps other arrays than O and a float32 log-sum-exp."""
    residuals.known.cache_clear()
    assert residuals.known()
    residuals.known.cache_clear()
    other = lambda q, k, v, implementation: q * k * v
    monkeypatch.setattr(jax.nn, "dot_product_attention", other)
    assert not residuals.known()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(backend, "capability_here", lambda: "10.0")
    monkeypatch.setattr(backend, "_version", lambda: 91900)
    reason = CudnnBackend().attention.refusal(described())
    assert reason is not None and reason.endswith(f"jax 0.11 and 0.12, not of {jax.__version__}")
    residuals.known.cache_clear()


@pytest.mark.usefixtures("lowering")
def test_a_mask_has_no_gradient_and_a_bias_has():
    bias = jax.ShapeDtypeStruct((1, N, T, S), jnp.bfloat16)
    loss = lambda q, k, v, bias: loss_of(bias=bias)(q, k, v)
    with_bias = calls(jax.grad(loss, (0, 3)), *arrays(), bias)[-1]
    masked = calls(jax.grad(loss_of(mask=jnp.ones((B, 1, T, S), bool))), *arrays())[-1]
    for line, number in ((with_bias, 5), (masked, 4)):  # dq, dk, dv, perhaps dbias; the workspace
        assert line.startswith("fmhaScaleBiasSoftmaxBackward(")
        assert line.rpartition("->")[2].count("tensor<") == number


# --- What it refuses ------------------------------------------------------------------------------

_BOTH = jnp.ones((B, 1, T, S), bool)
_BIAS = jnp.ones((1, N, T, S), jnp.bfloat16)
_IDS = {"q_segment_ids": jnp.zeros((B, T), int), "kv_segment_ids": jnp.zeros((B, S), int)}
REFUSED = [
    (arrays(dtype=jnp.float32), {}, "takes bfloat16 and float16, not float32"),
    (arrays(head_dim=68), {}, "multiples of 8, up to 256 on compute capability 9.0, not 68"),
    (arrays(head_dim=264), {}, "up to 256 .* not 264"),
    (arrays(v_head_dim=32), {}, "takes values as wide as keys, not 32 and 64"),
    (arrays(q_len=63), {}, "even numbers of queries and of keys, not 63 and 128"),
    (arrays(kv_len=127), {}, "even numbers of queries and of keys, not 64 and 127"),
    (arrays(batch=2**16), {}, "at most 65535 batch entries and heads, not 65536"),
    (arrays(q_len=2**21, batch=4), {}, "at most 2147483647 elements"),
    ([], {"softcap": 2.0}, "takes no softcap"),
    ([], {"sinks": jnp.ones(N)}, "takes no sinks"),
    ([], {"alibi_slopes": jnp.ones(N)}, "takes no ALiBi"),
    ([], _IDS, "takes no segment ids"),
    ([], {"dropout_rate": 0.1, "dropout_seed": 0}, "takes no dropout of this package"),
    ([], {"score_mod": lambda s, b, n, i, j: s + 1.0}, "takes no score_mod"),
    ([], {"mask_mod": lambda b, n, i, j: j <= i}, "takes no mask_mod"),
    ([], {"causal": True, "q_positions": jnp.zeros((B, T), int)}, "takes no mask by positions"),
    ([], {"window": jnp.array([3, 0])}, "by a window that is data"),
    ([], {"deterministic": True}, "takes no deterministic=True, as its gradients may differ"),
    ([], {"window": (3, 3)}, r"window that ends at the query.*not window=\(3, 3\)"),
    ([], {"window": (3, None)}, r"not window=\(3, None\)"),
    ([], {"causal": True, "q_offset": S - T}, "takes no q_offset with a mask"),
    ([], {"causal": True, "q_offset": jnp.zeros(B, int)}, "takes no q_offset with a mask"),
    (arrays(q_len=256), {"causal": True}, "at most as many queries as keys, not 256 and 128"),
    ([], {"window": (3, 0), "kv_lengths": 5}, "a window without lengths, bias or mask"),
    ([], {"window": (3, 0), "mask": _BOTH}, "a window without lengths, bias or mask"),
    ([], {"q_lengths": 5, "mask": _BOTH}, "lengths without a bias or a mask"),
    ([], {"bias": _BIAS, "mask": _BOTH}, "a bias or a mask, not both"),
    ([], {"mask": jnp.ones((B, 1, 1, S), bool)}, r"a mask of every query and key, not mask \[2, 1"),
    ([], {"bias": jnp.ones((1, N, T, 1), jnp.bfloat16)}, "a bias of every query and key"),
    ([], {"bias": jnp.ones((1, 1, T, S), jnp.bfloat16)}, "a bias of every head, as its gradient"),
    ([], {"bias": jnp.ones((1, N, T, S))}, "a bias in q's dtype, bfloat16, not float32: cast it"),
]


@pytest.mark.parametrize(("given", "options", "reason"), REFUSED, ids=[x[2] for x in REFUSED])
def test_what_it_refuses(given, options, reason):
    assert re.search(reason, HOPPER.attention.refusal(described(*given, **options)) or "taken")


def test_what_it_takes():
    for case in (*CASES, *WIDE):
        assert HOPPER.attention.refusal(case.problem) is None, case
    for case in CASES:
        assert BLACKWELL.attention.refusal(case.problem) is None, case
    for case in WIDE:
        assert "up to 128 on compute capability 10.0" in BLACKWELL.attention.refusal(case.problem)


def test_a_new_field_of_the_spec_or_of_the_operands_is_refused():
    problem = described()
    assert HOPPER.attention.refusal(problem) is None
    newer = dataclasses.make_dataclass(
        "Newer", [("fancy", bool, False)], bases=(AttentionSpec,), frozen=True
    )
    spec = newer(**vars(AttentionSpec(scale=1.0)), fancy=True)
    assert HOPPER.attention.refusal(dataclasses.replace(problem, spec=spec)) == "takes no fancy"
    features = problem.features | {"extras"}
    found = HOPPER.attention.refusal(dataclasses.replace(problem, features=features))
    assert found == "takes no extras"


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ("8.0", OLDEST, None),
        ("12.0", OLDEST, None),
        ("7.5", OLDEST, "needs an NVIDIA GPU of compute capability 8.0 or above, not 7.5"),
        ("gfx942", OLDEST, "compute capability 8.0 or above, not gfx942"),
        ("10.0", 91002, r"needs cuDNN 9\.15\.1 or later, not 9\.10\.2, whose attention has known"),
    ],
)
def test_which_gpus_and_versions(capability, version, reason):
    found = CudnnBackend(capability=capability, version=version).attention.refusal(described())
    assert found is None if reason is None else re.search(reason, found)


def test_a_bias_needs_a_gpu_that_has_its_gradient():
    on = lambda capability: CudnnBackend(capability=capability, version=OLDEST)
    found = on("8.0").attention.refusal(described(bias=_BIAS))
    assert found == "takes a bias on compute capabilities 9.0, 10.0, 10.3, not 8.0"
    assert on("10.3").attention.refusal(described(bias=_BIAS)) is None
    assert on("8.0").attention.refusal(described(mask=_BOTH)) is None


def test_no_tile_sizes():
    with pytest.raises(ValueError, match=r"\['block_q'\]: backend 'cudnn' has no tile sizes"):
        HOPPER.attention.plan(described(), {"block_q": 64})


# --- Who takes it, and who is told ----------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Makes the backends believe in a GPU of a compute capability, and in an installed cuDNN."""

    def install(capability: str, version: int | None = 91900):
        device = types.SimpleNamespace(compute_capability=capability, device_kind="a fake")
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda *_: [device])
        monkeypatch.setattr(backend, "_version", lambda: version)
        monkeypatch.setattr(residuals, "known", lambda: True)
        dispatch._log_once.cache_clear()

    return install


@pytest.mark.parametrize(
    ("capability", "options", "chosen"),
    [
        ("10.0", {}, "cudnn"),
        ("10.3", {"causal": True, "window": (8, 0)}, "cudnn"),
        ("10.0", {"softcap": 2.0}, "portable"),
        ("10.0", {"deterministic": True}, "portable"),
        ("9.0", {}, "hopper"),
        ("8.0", {}, "portable"),
        ("12.0", {}, "portable"),
    ],
)
def test_auto_takes_it_on_blackwell_alone(capability, options, chosen, gpu):
    gpu(capability)
    problem = described(**options)
    assert dispatch.select(problem, "auto").name == chosen
    assert dispatch.select(problem, "portable").name == "portable"
    if not options:
        assert dispatch.select(problem, "cudnn").name == "cudnn"


def test_decoding_is_refused(gpu):
    gpu("10.0")
    x = jnp.ones((2, 16, 2, 64), jnp.bfloat16)
    with pytest.raises(fp.UnsupportedByBackend, match="'cudnn': does not decode"):
        fp.flash_decode(x[:, :1], x, x, backend="cudnn")


def test_auto_leaves_a_bias_to_portable(gpu):
    gpu("10.0")
    explained = partial(fp.explain, fp.flash_attention, *arrays(), bias=_BIAS)
    found = explained()
    assert found.backend == "portable"
    assert found.reasons["cudnn"].startswith("'auto' leaves a bias to others, as gradients lose")
    assert explained(backend="cudnn").backend == "cudnn"


def test_a_refusal_names_what_auto_takes():
    with pytest.raises(fp.UnsupportedByBackend, match="backend='auto' or 'portable' can run this"):
        explain_on("a100", fp.flash_attention, *arrays(), backend="hopper")


@pytest.mark.usefixtures("stand_in")
def test_the_mean_in_empty_rows(gpu):
    """Looks at an entry without keys, and at queries of padding, which stay 0."""
    gpu("10.0")
    x = draw(2, 16, 2, 64)
    call = partial(fp.flash_attention, q_lengths=jnp.array([16, 6]), kv_lengths=jnp.array([9, 0]))
    found = call(x, x, x, empty_rows="mean", backend="cudnn")
    assert_close(found, call(x, x, x, empty_rows="mean", backend="xla"))
    assert_close(found[1, :6], jnp.broadcast_to(x[1].astype(jnp.float32).mean(0), (6, 2, 64)))
    assert not found[1, 6:].any()


@pytest.mark.usefixtures("stand_in")
def test_drop_in_runs_it(gpu):
    gpu("10.0")
    x = draw(2, 16, 2, 64)
    found = fp.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")
    expected = fp.flash_attention(x, x, x, causal=True, backend="xla")
    assert_close(found, expected)


def test_what_auto_takes_is_logged_once(gpu, caplog):
    caplog.set_level(logging.INFO, logger="flash_pallas")
    gpu("10.0")
    for _ in range(3):
        dispatch.select(described(), "auto")
    assert [r.message for r in caplog.records][1:] == [
        "backend 'cudnn' was taken: cuDNN 9.19.0 through jax.nn.dot_product_attention, as this "
        "package's kernels here use mma.sync"
    ]
    dispatch.select(described(softcap=2.0), "auto")
    assert caplog.records[-1].message == "backend 'cudnn' was passed over: takes no softcap"


def test_without_a_cudnn_portable_runs(gpu):
    gpu("10.0", version=None)
    found = fp.explain(fp.flash_attention, *arrays())
    assert found.backend == "portable"
    assert found.reasons["cudnn"].startswith("needs cuDNN 9.15.1 or later, and found none")


def test_explain_says_so(gpu):
    gpu("10.0")
    explained = partial(fp.explain, fp.flash_attention, *arrays())
    found = explained()
    assert found.backend == "cudnn" and found.blocks is None and not found.sources
    assert "preferred" in found.reasons["portable"]
    assert (
        "  runs on: cudnn\n"
        "  which is cuDNN 9.19.0 through jax.nn.dot_product_attention, as this package's kernels "
        "here use mma.sync\n  not on hopper: "
    ) in str(found)
    assert explained(softcap=2.0).reasons["cudnn"] == "takes no softcap"
    assert explained(causal=True, empty_rows="mean").backend == "cudnn"  # no row can be empty
    assert explained(kv_lengths=3, empty_rows="mean").backend == "cudnn"
    gpu("9.0")
    named = explained(backend="cudnn")
    assert "which is cuDNN 9.19.0 through jax.nn.dot_product_attention\n" in str(named)
    passed = explained()
    assert passed.backend == "hopper"
    assert "compute capability 10.x alone: ask for it by name" in passed.reasons["cudnn"]


def test_the_version_is_that_of_the_plugin(monkeypatch):
    backend._version.cache_clear()
    loaded = types.SimpleNamespace(cudnn_get_version=lambda: 92001)
    missing = {"jax_cuda13_plugin._versions"}

    def load(name):
        if name in missing:
            raise ImportError(name)
        return loaded

    monkeypatch.setattr(backend.importlib, "import_module", load)
    assert backend._version() == 92001 and backend._spelled(92001) == "9.20.1"
    backend._version.cache_clear()
    missing.add("jax_cuda12_plugin._versions")
    assert backend._version() is None
    backend._version.cache_clear()
