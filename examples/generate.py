"""Continues prompts with the demo's model and a cache of keys and values.

    python examples/generate.py --prompts "def " "import " "class A"

Prompts of any lengths are read at once; then every step adds a byte to each. The model is that of
`make demo`; where there is none yet it is trained first. Prints what was written and the bytes per
second, with the keys read in one range and in as many as flash_decode chooses (split-KV).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import subprocess
import sys
import time

import checkpoint
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

TRAINING = pathlib.Path(__file__).with_name("train_transformer.py")
ROOM_MULTIPLE = 128


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", nargs="+", default=["def ", "import ", "class A", "if "])
    parser.add_argument("--bytes", type=int, default=200, help="to add to each prompt")
    parser.add_argument("--room", type=int, default=0, help="of the cache; default: what is needed")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--backend", default="auto", help="of flash_pallas: auto, hopper or xla")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-dir", type=pathlib.Path, default=pathlib.Path("demo"))
    return parser.parse_args()


@functools.partial(jax.jit, static_argnames=("graph", "count"))
def generate(graph, params, caches, prompts, lengths, count: int, key, temperature):
    """`count` bytes after each of the prompts.

    Args:
        graph: of the model, from nnx.split.
        params: of the model, from nnx.split.
        caches: empty, one for each layer.
        prompts: int32 [batch, length], each filled up to the longest.
        lengths: int32 [batch], of the prompts.
        count: of bytes.
        key: a jax.random key.
        temperature: below 1 favours likely bytes.

    Returns:
        int32 [batch, count].
    """
    model = nnx.merge(graph, params)
    draw = lambda step, logits: jax.random.categorical(
        jax.random.fold_in(key, step), logits / temperature
    )
    logits, caches = model(prompts, caches, lengths)
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]

    def add(carry, step):
        caches, logits = carry
        bytes_ = draw(step, logits).astype(jnp.int32)
        logits, caches = model(bytes_[:, None], caches)
        return (caches, logits[:, 0]), bytes_

    _, found = lax.scan(add, (caches, last), jnp.arange(count))
    return found.T


def timed(model, num_splits, prompts, lengths, room, arguments):
    """(what is generated, bytes per second of all sequences); compiled before the clock starts."""
    for block in model.blocks:
        block.attention.num_splits = num_splits
    graph, params = nnx.split(model)
    caches = model.empty_caches(len(prompts), room)
    key = jax.random.key(arguments.seed)
    call = lambda: generate(
        graph, params, caches, prompts, lengths, arguments.bytes, key, arguments.temperature
    )
    call().block_until_ready()
    begin = time.perf_counter()
    found = call().block_until_ready()
    return found, found.size / (time.perf_counter() - begin)


def main() -> None:
    """Loads or trains, generates twice, and prints."""
    arguments = parse_arguments()
    folder = arguments.model_dir / "checkpoint"
    if not checkpoint.exists(folder):
        subprocess.run([sys.executable, TRAINING, "--out-dir", arguments.model_dir], check=True)
    model = checkpoint.load(folder, arguments.backend)
    texts = [text.encode() for text in arguments.prompts]
    lengths = jnp.array([len(text) for text in texts], jnp.int32)
    prompts = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(prompts, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    needed = prompts.shape[1] + arguments.bytes
    room = max(arguments.room, -(-needed // ROOM_MULTIPLE) * ROOM_MULTIPLE)
    rates = {}
    for num_splits, name in ((1, "one range of keys"), ("auto", "split-KV")):
        found, rates[name] = timed(model, num_splits, prompts, lengths, room, arguments)
    for text, added in zip(texts, np.asarray(found), strict=True):
        whole = text + added.astype(np.uint8).tobytes()
        print(f"--- {whole.decode(errors='replace')}")
    print(f"\n{len(texts)} sequences, a cache with room for {room} bytes of each")
    for name, rate in rates.items():
        print(f"{rate:,.0f} bytes/s with {name}")


if __name__ == "__main__":
    main()
