"""MaxText's attention and a model of it, with dot_product and with flash_pallas."""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # nothing of Google Cloud is needed

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from maxtext.common.common_types import MODEL_MODE_TRAIN, AttentionType
from maxtext.layers import attention_op

from benchmarks.maxtext_model import model_of
from flash_pallas.integrations import maxtext as integration

from . import parity

T = 64
IDS = jnp.asarray(np.repeat([[1, 2, 3, 0]], 16, 1).repeat(2, 0))  # 0 is padding
POSITIONS = jnp.arange(T)[None].repeat(2, 0)
LOCAL = {"attention_type": AttentionType.LOCAL_SLIDING, "sliding_window_size": 9}
MESH = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


@pytest.fixture(autouse=True)
def uninstalled():
    """MaxText as it was, whatever a test leaves behind."""
    yield
    integration.uninstall()


class Config(SimpleNamespace):
    """The fields of a configuration that attention reads; the rest is off."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 512 if "block" in name else "HEAD_DIM_MINOR" if "layout" in name else False


def op_of(kernel, **fields):
    config = Config(
        shard_mode=None, head_dim=16, attention=kernel, logical_axis_rules=[],
        context_parallel_strategy="all_gather", context_sharding="context", max_target_length=T,
        matmul_precision=None, attention_type="global", causal_block_size=12,
    )  # fmt: skip
    return attention_op.AttentionOp(
        config, MESH, kernel, T, 4, 2, float32_qk_product=True, float32_logits=True,
        dtype=jnp.float32, rngs=nnx.Rngs(0), **fields,
    )  # fmt: skip


CASES = {
    "causal": ({}, {}),
    "full": ({"attention_type": AttentionType.FULL}, {}),
    "packed segments": ({}, {"ids": IDS}),
    "softcap": ({"attn_logits_soft_cap": 20.0}, {}),
    "sliding window": (LOCAL, {}),
    "chunks": ({"attention_type": AttentionType.CHUNK, "chunk_attn_window_size": 12}, {}),
    "block diffusion": (
        {"attention_type": AttentionType.BLOCK_DIFFUSION},
        {},
    ),
    "sinks": ({}, {"sinks": True}),
    "window, sinks, segments": (LOCAL, {"sinks": True, "ids": IDS}),
    "indexer": ({}, {"indexer": True}),
}


def run(kernel, fields, call):
    """Returns (loss, gradients) of q, k, v and the sinks."""
    op, ids = op_of(kernel, **fields), call.get("ids")
    live = 1.0 if ids is None else (ids != 0)[..., None, None]
    chosen = jnp.where(parity.normal(5, 2, T, T) > -0.5, 0.0, -1e30)
    arrays = {"q": parity.normal(0, 2, T, 4, 16), "s": parity.normal(3, 4)}
    arrays |= {name: parity.normal(seed, 2, T, 2, 16) for seed, name in ((1, "k"), (2, "v"))}
    if "sinks" not in call:
        del arrays["s"]

    def loss(arrays):
        o = op(
            arrays["q"] / 4, arrays["k"], arrays["v"], ids, POSITIONS, MODEL_MODE_TRAIN,
            sinks=arrays.get("s"), indexer_mask=chosen if "indexer" in call else None,
        )  # fmt: skip
        return ((o * live) ** 2).sum()

    return jax.value_and_grad(loss)(arrays)


@pytest.mark.parametrize("case", CASES)
def test_attention(case):
    fields, call = CASES[case]
    theirs = run("dot_product", fields, call)
    with integration.installed():
        ours = run("flash", fields, call)
    parity.compare(case, theirs, ours)


def test_the_largest_logits():
    q, k, v = (parity.normal(i, 2, T, heads, 16) for i, heads in enumerate((4, 2, 2)))
    found = {}
    for kernel in ("dot_product", "flash"):
        op = op_of(kernel, attn_logits_soft_cap=20.0)
        with integration.installed():
            op(q, k, v, None, POSITIONS, MODEL_MODE_TRAIN, record_max_logits=True)
        found[kernel] = op.max_logits[...]
    assert found["flash"].shape == (2, 4)
    assert parity.difference(found["flash"], found["dot_product"]) <= parity.BOUND


@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        ({"attention_type": AttentionType.COMPRESSED}, {}, "attention_type compressed"),
        ({"dropout_rate": 0.1}, {}, "dropout_rate 0.1"),
        ({}, {"bidirectional_mask": jnp.ones((2, T), bool)}, "bidirectional_mask: set attention"),
        ({}, {"previous_chunk": jnp.ones((2, T))}, "previous_chunk: prefill in one chunk"),
    ],
)
def test_what_cannot_be_said_is_refused(fields, call, message):
    op, x = op_of("flash", **fields), parity.normal(0, 2, T, 4, 16)
    with integration.installed(), pytest.raises(NotImplementedError, match=message):
        op(x, x[:, :, :2], x[:, :, :2], None, POSITIONS, MODEL_MODE_TRAIN, **call)


def losses_of(kernel, steps, **sizes):
    """Returns the loss of each step and the gradients of the first."""
    model, loss = model_of(attention=kernel, **sizes)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.sgd(0.02, momentum=0.9)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p, rest, copy=True)))(
            params
        )
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value, grads

    state, found, first = optimizer.init(params), [], None
    for _ in range(steps):
        params, state, value, grads = step(params, state)
        first = grads if first is None else first
        found.append(float(value))
    return found, nnx.to_pure_dict(first)


def test_a_model():
    theirs, wanted = losses_of("dot_product", 50)
    with integration.installed():
        ours, found = losses_of("flash", 50)
    parity.compare("llama2 block", (theirs[0], wanted), (ours[0], found))
    parity.curves("llama2 block", theirs, ours)


def test_everything_is_put_back():
    before = attention_op.AttentionOp.apply_attention
    integration.install()
    assert attention_op.AttentionOp.apply_attention is not before
    integration.uninstall()
    assert attention_op.AttentionOp.apply_attention is before


def test_another_maxtext_is_refused(monkeypatch):
    monkeypatch.setattr(attention_op.AttentionOp, "apply_attention", lambda self, q: q)
    with pytest.raises(ImportError, match=r"was tested with maxtext 0[.]2[.]5; maxtext \S+ has"):
        integration.install()


def test_the_page():
    parity.run_the_page("maxtext")
