"""Continues prompts with the demo's model and a KV cache.

    python examples/generate.py --prompts "def " "import " "class A"

Prompts of any lengths are read at once; then every step adds a byte to each. The model is that of
`make demo`, which is trained first if there is none yet, or one in `--model-dir`. Prints what was
written and the bytes per second, with the keys read in one range and in as many as flash_decode
chooses (split-KV).

The benefit of split-KV shows in long contexts. Speed does not depend on what a model has learnt:

    python examples/generate.py --random 8 2048 16 4 128 --prompt-bytes 65536 --json generate.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from data import standard_library
from flax import nnx
from jax import lax
from model import ModelConfig, Transformer

from flash_pallas import explain, flash_decode

TRAINING = pathlib.Path(__file__).with_name("train_transformer.py")
DEMO = pathlib.Path("demo")
ROOM_MULTIPLE = 128


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", nargs="+", default=["def ", "import ", "class A", "if "])
    parser.add_argument("--bytes", type=int, default=200, help="to add to each prompt")
    parser.add_argument("--room", type=int, default=0, help="of the cache; default: what is needed")
    parser.add_argument("--temperature", type=float, default=0.8)
    backends = ("auto", "hopper", "portable", "xla")
    parser.add_argument("--backend", choices=backends, default="auto", help="of flash_pallas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model-dir", type=pathlib.Path, help="of train_transformer.py; default: that of the demo"
    )
    parser.add_argument(
        "--random",
        type=int,
        nargs=5,
        metavar=("LAYERS", "WIDTH", "HEADS", "KV_HEADS", "HEAD_DIM"),
        help="a model of this size that knows nothing",
    )
    parser.add_argument(
        "--prompt-bytes", type=int, help="one prompt of so many bytes of Python, not printed"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the speeds to this file")
    return parser.parse_args()


@functools.partial(jax.jit, static_argnames=("graph",))
def read(graph, params, caches, prompts, lengths):
    """Prefills the caches with the prompts.

    Args:
        graph: graph of the model, from nnx.split.
        params: parameters of the model, from nnx.split.
        caches: empty caches, one for each layer.
        prompts: int32 [batch, length], each filled up to the longest.
        lengths: int32 [batch], lengths of the prompts.

    Returns:
        The caches, and the logits [batch, 256] of the byte after each prompt.
    """
    logits, caches = nnx.merge(graph, params)(prompts, caches, lengths)
    return caches, jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("graph", "count"))
def generate(graph, params, caches, logits, count: int, key, temperature):
    """Generates `count` bytes after what is in the caches.

    Args:
        graph: graph of the model, from nnx.split.
        params: parameters of the model, from nnx.split.
        caches: filled caches, one for each layer.
        logits: [batch, 256], logits of the next byte.
        count: number of bytes to add to each sequence.
        key: a jax.random key.
        temperature: below 1 favours likely bytes.

    Returns:
        int32 [batch, count].
    """
    model = nnx.merge(graph, params)
    draw = lambda step, logits: jax.random.categorical(
        jax.random.fold_in(key, step), logits / temperature
    )

    def add(carry, step):
        caches, logits = carry
        bytes_ = draw(step, logits).astype(jnp.int32)
        logits, caches = model(bytes_[:, None], caches)
        return (caches, logits[:, 0]), bytes_

    _, found = lax.scan(add, (caches, logits), jnp.arange(count))
    return found.T


def timed(model, num_splits, state, arguments):
    """Generates twice, first to compile; returns (bytes, bytes per second of all sequences)."""
    for block in model.blocks:
        block.attention.num_splits = num_splits
    graph, params = nnx.split(model)
    key = jax.random.key(arguments.seed)
    call = lambda: generate(graph, params, *state, arguments.bytes, key, arguments.temperature)
    call().block_until_ready()
    begin = time.perf_counter()
    found = call().block_until_ready()
    return found, found.size / (time.perf_counter() - begin)


def load_or_train(arguments: argparse.Namespace) -> Transformer:
    """Loads the model of `make demo`, or trains it where there is none yet."""
    import checkpoint  # needs Orbax, which a model without training does not

    trained = arguments.model_dir or DEMO
    folder = trained / "checkpoint"
    if not checkpoint.exists(folder):
        if arguments.model_dir is not None:
            raise SystemExit(
                f"--model-dir {trained}: there is no model in it; leave it out for that of the "
                f"demo, or train one: python examples/train_transformer.py --out-dir {trained}"
            )
        subprocess.run([sys.executable, TRAINING, "--out-dir", trained], check=True)
    return checkpoint.load(folder, arguments.backend)


def untrained(sizes: list[int], arguments: argparse.Namespace) -> Transformer:
    """Makes a model of these sizes with random parameters, all in the dtype it computes in."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    config = ModelConfig(*sizes, dtype=dtype, backend=arguments.backend, attention="flash")

    @nnx.jit
    def make():
        model = Transformer(config, nnx.Rngs(arguments.seed))
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), params))
        return model

    return make()


def encode(arguments: argparse.Namespace) -> list[bytes]:
    """Returns the prompts as bytes."""
    if arguments.prompt_bytes is None:
        return [text.encode() for text in arguments.prompts]
    text, _ = standard_library(20 * arguments.prompt_bytes)
    return [text[: arguments.prompt_bytes].tobytes()]


def describe(model: Transformer, caches) -> dict:
    """Describes how a step reads the caches."""
    k, v = caches[0].k, caches[0].v
    attention = model.blocks[0].attention
    q = jax.ShapeDtypeStruct((len(k), 1, attention.num_heads, k.shape[-1]), k.dtype)
    found = explain(flash_decode, q, k, v, backend=attention.backend)
    return {"backend": found.backend, "blocks": dataclasses.asdict(found.blocks)}


def main() -> None:
    """Loads or trains a model, generates twice, and prints."""
    arguments = parse_arguments()
    sizes = arguments.random
    model = load_or_train(arguments) if sizes is None else untrained(sizes, arguments)
    texts = encode(arguments)
    lengths = jnp.array([len(text) for text in texts], jnp.int32)
    prompts = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(prompts, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    needed = prompts.shape[1] + arguments.bytes
    room = max(arguments.room, -(-needed // ROOM_MULTIPLE) * ROOM_MULTIPLE)
    caches = model.empty_caches(len(prompts), room)
    state = read(*nnx.split(model), caches, prompts, lengths)
    rates = {}
    for num_splits, name in ((1, "one range of keys"), ("auto", "split-KV")):
        found, rates[name] = timed(model, num_splits, state, arguments)
    for text, added in zip(texts, np.asarray(found), strict=True):
        whole = added.astype(np.uint8).tobytes()
        whole = text + whole if arguments.prompt_bytes is None else whole
        print(f"--- {whole.decode(errors='replace')}")
    print(f"\n{len(texts)} sequences, a cache with room for {room} bytes of each")
    for name, rate in rates.items():
        print(f"{rate:,.0f} bytes/s with {name}")
    if arguments.json is not None:
        said = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "random": sizes}
        said |= {"prompts": list(map(len, texts)), "room": room, "bytes": arguments.bytes}
        said |= {"step": describe(model, caches), "bytes_per_second": rates}
        arguments.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
