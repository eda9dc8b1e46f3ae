"""Levanter's models and functions with their own attention and with flash_pallas."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from levanter.grug import attention as grug
from levanter.layers import attention as layers
from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

from flash_pallas.integrations import levanter as integration

from . import parity

T, S = 24, 24
Pos, Batch, Vocab = hax.Axis("position", 32), hax.Axis("batch", 2), hax.Axis("vocab", 64)
B, K, G, D = (hax.Axis(n, s) for n, s in (("batch", 2), ("kv", 2), ("group", 3), ("head_size", 16)))
QPos, KPos = hax.Axis("position", T), hax.Axis("key_position", S)
IDS = jnp.asarray(np.repeat([[0, 1, 2, -1], [0, 0, 1, 1]], 6, 1))  # -1 is padding


@pytest.fixture(autouse=True)
def uninstalled():
    """Levanter as it was, whatever a test leaves behind."""
    yield
    integration.uninstall()


def attend(case):
    """Calls the function of named axes; returns a loss of the output and all gradients."""
    q = hax.named(parity.normal(0, 2, 2, 3, T, 16), (B, K, G, QPos, D))
    k, v = (hax.named(parity.normal(i, 2, 2, S, 16), (B, K, KPos, D)) for i in (1, 2))
    extra = {
        "bias": {"bias": hax.named(parity.normal(3, 3, T, S), (G, QPos, KPos))},
        "sinks": {"attn_sink": hax.named(parity.normal(3, 2, 3), (K, G))},
    }.get(case, {})
    causal = layers.AttentionMask.causal
    ids = hax.named(IDS, (B, QPos))
    mask, options = {
        "causal": (causal(), {}),
        "window": (causal(sliding_window=5), {}),
        "window, GQA, sinks": (causal(sliding_window=5), {}),
        "both sides": (layers.AttentionMask.bidirectional_sliding_window(4), {}),
        "both windows": (dataclasses.replace(causal(sliding_window=6), bidirectional_window=4), {}),
        "segments": (causal().with_segment_ids(ids), {}),
        "offset": (causal(offset=3), {}),
        "offsets": (causal(offset=hax.named(jnp.array([2, 5]), (B,))), {}),
        "dense": (hax.named(parity.normal(5, 2, T, S) > -1, (B, QPos, KPos)), {}),
        "dense and causal": (
            causal() & layers.AttentionMask.explicit(hax.arange(KPos).broadcast_axis(QPos) > 3),
            {},
        ),
        "soft cap, scale": (causal(), {"logits_soft_cap": 3.0, "scaling_factor": 0.4}),
        "nothing": (None, {"attention_dtype": jnp.float32}),
    }.get(case, (causal(), {}))
    if case == "window, GQA, sinks":
        extra = {"attn_sink": hax.named(parity.normal(3, 3), (G,))}
    live = (ids >= 0).array[:, None, None, :, None] if case == "segments" else 1.0

    def loss(arrays):
        q, k, v, extra = arrays
        o = layers.dot_product_attention(
            QPos, KPos, D, q, k, v, mask, **extra, **options,
            **({} if ours else {"attn_backend": layers.AttentionBackend.VANILLA}),
        )  # fmt: skip
        return ((o.rearrange((B, K, G, QPos, D)).array * live) ** 2).sum()

    ours = layers.dot_product_attention.__module__.startswith("flash_pallas")
    return jax.jit(jax.value_and_grad(loss))((q, k, v, extra))


NAMED = [
    "causal", "window", "window, GQA, sinks", "both sides", "both windows", "segments", "offset",
    "offsets", "dense", "dense and causal", "bias", "sinks", "soft cap, scale", "nothing",
]  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_the_function_of_named_axes(case, monkeypatch):
    theirs = attend(case)
    (seen,) = [parity.calls(monkeypatch, integration)]
    with integration.installed():
        ours = attend(case)
    parity.compare(f"named axes, {case}", theirs, ours)
    assert ("mask" in seen[0]) == ("dense" in case)


def grug_loss(mask, implementation, live=1.0):
    q, k, v = (parity.normal(i, 2, T, heads, 16) for i, heads in enumerate((6, 2, 2)))
    call = lambda q, k, v: grug.attention(q, k, v, mask, implementation=implementation)
    loss = lambda arrays: ((call(*arrays) * live) ** 2).sum()
    return jax.jit(jax.value_and_grad(loss))((q, k, v))


GRUG = {
    "causal": grug.AttentionMask.causal(),
    "window": grug.AttentionMask.causal(sliding_window=5),
    "window of the past": grug.AttentionMask(sliding_window=5),
    "segments": grug.AttentionMask.causal(sliding_window=5).with_segment_ids(IDS),
    "one row of segments": grug.AttentionMask.causal().with_segment_ids(IDS[0]),
    "dense": parity.normal(5, 2, T, S) > -1,
    "dense of two axes": jnp.tril(jnp.ones((T, S), bool)),
    "bias": parity.normal(5, 2, T, S),
    "nothing": None,
}


@pytest.mark.parametrize("case", GRUG)
def test_the_function_of_arrays(case):
    live = 1.0
    if "segments" in case:
        live = (jnp.broadcast_to(IDS[0] if "row" in case else IDS, (2, T)) >= 0)[..., None, None]
    theirs = grug_loss(GRUG[case], "reference", live)
    with integration.installed():
        ours = grug_loss(GRUG[case], None, live)
        other = grug_loss(GRUG[case], "reference", live)
    parity.compare(f"grug, {case}", theirs, ours)
    jax.tree.map(np.testing.assert_array_equal, other, theirs)


def llama(**options):
    sizes = {"hidden_dim": 32, "intermediate_dim": 64, "num_heads": 4, "num_kv_heads": 2}
    config = LlamaConfig(
        max_seq_len=Pos.size, num_layers=2, gradient_checkpointing=False, **sizes, **options
    )
    return LlamaLMHeadModel.init(Vocab, config, key=jax.random.key(0))


def gpt2():
    config = Gpt2Config(
        max_seq_len=Pos.size, hidden_dim=32, num_layers=2, num_heads=4, attn_pdrop=0.0,
        embed_pdrop=0.0, resid_pdrop=0.0, gradient_checkpointing=False,
    )  # fmt: skip
    return Gpt2LMHeadModel.init(Vocab, config, key=jax.random.key(0))


TOKENS = hax.named(jax.random.randint(jax.random.key(1), (2, 32), 0, 64), (Batch, Pos))


def model_loss(model, mask):
    logits = model(TOKENS, attn_mask=mask, key=None).rearrange((Batch, Pos, Vocab)).array
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS.array[:, 1:])
    return losses.mean()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_loss_and_gradients_of_models(name, monkeypatch):
    model = llama() if name == "llama" else gpt2()
    run = lambda: eqx.filter_jit(eqx.filter_value_and_grad(model_loss))(
        model, layers.AttentionMask.causal()
    )
    theirs = run()
    seen = parity.calls(monkeypatch, integration)
    with integration.installed():
        ours = run()
    parity.compare(name, theirs, ours)
    assert seen and all(call["causal"] and "mask" not in call for call in seen)


def test_training():
    optimizer = optax.sgd(0.02, momentum=0.9)

    def losses(model):
        @eqx.filter_jit
        def step(model, state):
            value, grads = eqx.filter_value_and_grad(model_loss)(
                model, layers.AttentionMask.causal()
            )
            updates, state = optimizer.update(grads, state)
            return eqx.apply_updates(model, updates), state, value

        state, found = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []
        for _ in range(50):
            model, state, value = step(model, state)
            found.append(float(value))
        return found

    theirs = losses(llama())
    with integration.installed():
        ours = losses(llama())
    parity.curves("llama", theirs, ours)


def test_dropout_keeps_the_mean():
    q = hax.named(parity.normal(0, 2000, 6, 2, 16)[:1].repeat(2000, 0), ("many", "p", "h", "d"))
    k = q.rename({"p": "kp"})
    call = lambda **options: layers.dot_product_attention("p", "kp", "d", q, k, k, **options).array
    wanted = call()[0]
    with integration.installed():
        found = np.asarray(call(dropout=0.3, inference=False, prng=jax.random.key(1)))
    spread = found.std(0) / np.sqrt(len(found))
    assert (spread > 0).all() and (np.abs(found.mean(0) - wanted) <= 6 * spread).all()


def test_a_named_backend_stays():
    q = hax.named(parity.normal(0, 8, 2, 16), ("p", "h", "d"))
    call = lambda **options: (
        layers.dot_product_attention(
            "p", "kp", "d", q, q.rename({"p": "kp"}), q.rename({"p": "kp"}), **options
        ).array
    )
    for options in ({"use_flash": False}, {"attn_backend": layers.AttentionBackend.VANILLA}):
        theirs = call(**options)
        with integration.installed():
            np.testing.assert_array_equal(call(**options), theirs)


def test_what_cannot_be_said_is_refused():
    q = parity.normal(0, 2, T, 2, 16)
    bounds = jnp.zeros((2, T), jnp.int32), jnp.ones((2, T), bool)
    named = hax.named(q, ("b", "p", "h", "d"))
    keys = named.rename({"p": "kp"})
    shifted = layers.AttentionMask.causal(offset=2, sliding_window=4)
    with integration.installed():
        with pytest.raises(NotImplementedError, match="fa4_bounds"):
            grug.attention(q, q, q, grug.AttentionMask.causal().with_fa4_bounds(*bounds))
        with pytest.raises(ValueError, match="sliding_window is 0"):
            grug.attention(q, q, q, grug.AttentionMask.causal(sliding_window=0))
        with pytest.raises(NotImplementedError, match="causal_offset together with a window"):
            layers.dot_product_attention("p", "kp", "d", named, keys, keys, shifted)
        with pytest.raises(NotImplementedError, match="other is no axis"):
            mask = hax.ones((hax.Axis("other", 2), named.resolve_axis("p")), dtype=bool)
            layers.dot_product_attention("p", "kp", "d", named, keys, keys, mask)


def test_everything_is_put_back_wherever_it_was_imported():
    import levanter.models.gpt2 as model

    before = layers.dot_product_attention, grug.attention
    integration.install()
    assert model.dot_product_attention is layers.dot_product_attention is not before[0]
    assert grug._core.attention is grug.attention is not before[1]
    integration.uninstall()
    assert (model.dot_product_attention, grug.attention) == before


def test_another_levanter_is_refused(monkeypatch):
    monkeypatch.setattr(grug._core, "attention", lambda q, k: q)
    with pytest.raises(ImportError, match=r"was tested with marin-levanter 0[.]2[.]227"):
        integration.install()


def test_the_page():
    parity.run_the_page("levanter")
