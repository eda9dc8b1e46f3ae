"""Flax models of transformers with Flax's attention and with flash_pallas."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers

from flash_pallas.integrations import transformers as integration

from . import parity

rng = np.random.default_rng(0)
IDS = rng.integers(3, 100, (2, 40)).astype("int32")
RIGHT = (np.arange(40)[None] < np.array([40, 29])[:, None]).astype("int32")
LEFT = RIGHT[:, ::-1].copy()
TINY = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
GPT = {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS = {
    "gpt2": ("FlaxGPT2LMHeadModel", "GPT2Config", GPT),
    "gptj": ("FlaxGPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 8}),
    "llama": ("FlaxLlamaForCausalLM", "LlamaConfig", TINY | {"num_key_value_heads": 2}),
    "gemma": (
        "FlaxGemmaForCausalLM",
        "GemmaConfig",
        TINY | {"num_key_value_heads": 1, "head_dim": 16, "hidden_activation": "gelu"},
    ),
    "mistral": (
        "FlaxMistralForCausalLM",
        "MistralConfig",
        TINY | {"num_key_value_heads": 2, "sliding_window": 8},
    ),
    "gpt_neo": (
        "FlaxGPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 100, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
            "max_position_embeddings": 64, "window_size": 8,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "bert": ("FlaxBertForMaskedLM", "BertConfig", TINY),
    "t5": (
        "FlaxT5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2,
            "num_heads": 4, "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "FlaxBartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 100, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96, "max_position_embeddings": 64,
        },
    ),
}  # fmt: skip
CAUSAL = ("gpt2", "gptj", "llama", "gemma", "mistral")
DECODERS = ("t5", "bart")


@pytest.fixture(autouse=True)
def uninstalled():
    """Models as they were, whatever a test leaves behind."""
    yield
    integration.uninstall()


def model_of(name, **options):
    model, config, sizes = MODELS[name]
    module = f"transformers.models.{name}"
    importlib.import_module(f"{module}.modeling_flax_{name}")
    config = getattr(transformers, config)(**(sizes | options))
    return getattr(transformers, model)(config, seed=0, dtype=jnp.float32)


def with_clip(name, monkeypatch):
    """Gives T5 an argument that jax has no more; `install` does so too."""
    if name == "t5":
        clip = jnp.clip

        def old(x, *args, a_max=None, **options):
            return clip(x, *args, **(options if a_max is None else options | {"max": a_max}))

        monkeypatch.setattr(jnp, "clip", old)


def gradient(model, name, mask=RIGHT, key=None):
    more = {"decoder_input_ids": IDS} if name in DECODERS else {}

    def loss(params):
        logits = model(
            IDS, attention_mask=mask, params=params, train=key is not None, dropout_rng=key, **more
        ).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], IDS[:, 1:])
        # Padding predicts nothing, not even the first token.
        return (losses * mask[:, 1:] * mask[:, :-1]).mean()

    return jax.jit(jax.value_and_grad(loss))(model.params)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name, monkeypatch):
    with_clip(name, monkeypatch)
    model = model_of(name)
    theirs = gradient(model, name)
    seen = parity.calls(monkeypatch, integration)
    with integration.installed(name):
        ours = gradient(model, name)
    parity.compare(name, theirs, ours)
    assert len(seen) >= 2
    for call in seen:
        # No array of [T, S] for each batch entry: T5's own bias has one for all, and layers of
        # GPT-Neo whose window is local write their masks out.
        assert call["mask"] is None or (name == "gpt_neo" and call["mask"].shape == (1, 1, 40, 40))
        assert call["bias"] is None or (name == "t5" and call["bias"].shape == (1, 4, 40, 40))
        if name in CAUSAL:
            assert call["causal"] is True and call["kv_segment_ids"].shape == (2, 40)
        assert call["window"] == ((8, None) if name == "mistral" else None)
    if name in DECODERS:
        assert [call["causal"] for call in seen].count(True) == 2  # self-attention of the decoder


def test_padding_on_the_left():
    model = model_of("llama")
    theirs = gradient(model, "llama", LEFT)
    with integration.installed("llama"):
        ours = gradient(model, "llama", LEFT)
    parity.compare("llama, padding on the left", theirs, ours)


def test_mistral_without_a_window_sees_itself_alone():
    model = model_of("mistral", sliding_window=None)  # so says the mask of their Flax model
    theirs = gradient(model, "mistral")
    with integration.installed("mistral"):
        ours = gradient(model, "mistral")
    parity.compare("mistral, no window", theirs, ours)


def test_training():
    model = model_of("llama")
    optimizer = optax.sgd(0.01, momentum=0.9)

    def losses():
        def loss(params):
            logits = model(IDS, attention_mask=RIGHT, params=params).logits
            found = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], IDS[:, 1:])
            return (found * RIGHT[:, 1:]).mean()

        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        params, found = model.params, []
        state = optimizer.init(params)
        for _ in range(50):
            params, state, value = step(params, state)
            found.append(float(value))
        return found

    theirs = losses()
    with integration.installed("llama"):
        ours = losses()
    parity.curves("llama", theirs, ours)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "t5", "bart"])
def test_generation(name, monkeypatch):
    with_clip(name, monkeypatch)
    model = model_of(name)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": 1}
    call = lambda: model.generate(IDS[:, :8], attention_mask=LEFT[:, -8:], **options).sequences
    theirs = call()
    seen = parity.calls(monkeypatch, integration)
    with integration.installed(name):
        np.testing.assert_array_equal(call(), theirs)
    # Neither the filled part of the cache nor padding of the prompt is a mask of [T, S].
    assert len(seen) >= 4 and all(call["mask"] is None for call in seen)


def test_dropout_has_the_mean():
    model = model_of("bert", attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0)
    undropped = gradient(model, "bert")[0]
    with integration.installed("bert"):
        found = [float(gradient(model, "bert", key=jax.random.key(n))[0]) for n in range(2)]
    assert found[0] != found[1] and all(abs(x / undropped - 1) < 0.05 for x in found)


def test_a_head_mask():
    model = model_of("bert")
    heads = jnp.asarray([[1.0, 0.0, 0.5, 1.0], [0.0, 1.0, 1.0, 2.0]])
    call = lambda: model(IDS, attention_mask=RIGHT, head_mask=heads).logits
    theirs = call()
    with integration.installed("bert"):
        assert parity.difference(call(), theirs) <= parity.BOUND


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_attention_weights_are_refused(name):
    model = model_of(name)
    call = lambda ids: model(ids, attention_mask=RIGHT, output_attentions=True).attentions
    refused = pytest.raises(NotImplementedError, match="output_attentions=True")
    with integration.installed(name):
        with refused:
            jax.jit(call)(IDS)
        weights = call(IDS)[0]  # without jit nothing can be refused before it is used
    for use in (np.asarray, len, jnp.sum, lambda x: x.shape, lambda x: x[0]):
        with refused:
            use(weights)


def test_everything_is_put_back():
    from transformers.models.llama import modeling_flax_llama as module

    hooks = lambda: (module.dot_product_attention_weights, module.jnp, module.combine_masks)
    before = hooks()
    integration.install()  # those that are imported
    assert all(a is not b for a, b in zip(hooks(), before, strict=True))
    integration.uninstall()
    assert hooks() == before


def test_models_without_this_attention_are_refused():
    with pytest.raises(ImportError, match="regnet"):
        integration.install("regnet")
    with pytest.raises(ImportError, match="cannot be imported"):
        integration.install("no_such_model")


def test_the_page():
    parity.run_the_page("transformers")
