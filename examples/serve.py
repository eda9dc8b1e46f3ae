"""Serves a load of simulated requests with the engine of engine.py, and says how fast.

    python examples/serve.py --requests 500 --seed 0

Requests arrive at random times (`--rate`), or all at once. Prompts are pieces of the Python
standard library, of random lengths; a share of them begins with the same system prompt, some
requests are cancelled on the way, some end at a newline, and half are sampled. The exit status is 1
if a request or a page is lost, and with `--verify` if a token is not what the model, run on the
request alone, would have chosen.

The model has random parameters, as speed does not depend on what it has learnt; `--checkpoint demo`
takes that of `make demo`. Few pages show what happens when the cache is full:

    python examples/serve.py --requests 100 --new-bytes 100 400 --pages 40 --verify
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from data import standard_library
from engine import Engine, Request, noise
from flax import nnx
from generate import untrained
from model import ATTENTIONS, Transformer

_SIZES = {"cpu": (2, 64, 4, 2, 16), "gpu": (12, 768, 12, 4, 64)}
_SLOTS = {"cpu": (32, 128), "gpu": (256, 1024)}  # sequences and tokens of a step
_STOP = (10,)  # newline
_STATES = ("length", "stop", "cancelled")


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line, or what is given in its place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "gpu" if jax.default_backend() == "gpu" else "cpu"
    seqs, tokens = _SLOTS[device]
    number = functools.partial(parser.add_argument, type=int)
    share = functools.partial(parser.add_argument, type=float)
    number("--requests", default=500)
    number("--seed", default=0)
    share("--rate", default=np.inf, help="requests per second; default: all at once")
    number("--prompt-bytes", nargs=2, default=(8, 400), metavar=("LEAST", "MOST"))
    number("--new-bytes", nargs=2, default=(8, 100), metavar=("LEAST", "MOST"))
    number("--system-bytes", default=200, help="length of the common system prompt")
    share("--system-share", default=0.5, help="share of requests that begin with it")
    share("--stop-share", default=0.1, help="share of requests that end at a newline")
    share("--cancel-share", default=0.05, help="share of requests that are cancelled")
    number("--pages", default=2048, help="of the cache")
    number("--page-size", default=64, help="tokens of a page")
    number("--max-seqs", default=seqs, help="sequences of a step; default %(default)s")
    number("--max-tokens", default=tokens, help="tokens of a step; default %(default)s")
    parser.add_argument("--no-sharing", action="store_true", help="do not share prefixes")
    told = "begin the next batch when all of one have ended, to compare with"
    parser.add_argument("--batch-by-batch", action="store_true", help=told)
    parser.add_argument("--verify", action="store_true", help="recompute each request alone")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="folder of `make demo`")
    parser.add_argument(
        "--random",
        type=int,
        nargs=5,
        default=_SIZES[device],
        metavar=("LAYERS", "WIDTH", "HEADS", "KV_HEADS", "HEAD_DIM"),
        help="sizes of the model without a checkpoint; default %(default)s",
    )
    backends = ("auto", "hopper", "portable", "xla")
    parser.add_argument("--backend", choices=backends, default="auto", help="of flash_pallas")
    parser.add_argument("--json", type=pathlib.Path, help="write the statistics to this file")
    return parser.parse_args(given)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A simulated request.

    Attributes:
        at: when it comes, in seconds after the start.
        prompt: int32 [length].
        options: what else `Engine.submit` takes.
        cancel_after: number of new tokens after which it is cancelled; None is never.
    """

    at: float
    prompt: np.ndarray
    options: dict
    cancel_after: int | None


def load(arguments: argparse.Namespace) -> list[Arrival]:
    """Draws the requests, in the order in which they arrive."""
    random = np.random.default_rng(arguments.seed)
    text, _ = standard_library(1_000_000)
    system = text[: arguments.system_bytes]
    draw = lambda bounds: int(random.integers(bounds[0], bounds[1] + 1))
    arrivals, at = [], 0.0
    for number in range(arguments.requests):
        at += random.exponential(1 / arguments.rate)
        length, count = draw(arguments.prompt_bytes), draw(arguments.new_bytes)
        start = random.integers(len(text) - length)
        prompt = text[start : start + length]
        if random.random() < arguments.system_share:
            prompt = np.concatenate([system, prompt])
        options = {
            "max_new_tokens": count,
            "temperature": float(random.choice([0.0, 0.8])),
            "seed": number,
            "stop": _STOP if random.random() < arguments.stop_share else (),
        }
        cancelled = random.random() < arguments.cancel_share
        cancel_after = draw((0, count - 1)) if cancelled else None
        arrivals.append(Arrival(at, prompt.astype(np.int32), options, cancel_after))
    return arrivals


def serve(engine: Engine, arrivals: list[Arrival]) -> dict[str, float]:
    """Submits requests as they arrive, cancels some, and steps the engine until all have ended.

    Returns:
        The engine's statistics, and "most_pages_held".
    """
    begin, most_held, waiting, cancelled_after = time.perf_counter(), 0, list(arrivals[::-1]), {}
    progress = Progress(len(arrivals))
    while waiting or not engine.idle:
        now = time.perf_counter() - begin
        while waiting and waiting[-1].at <= now:
            arrival = waiting.pop()
            number = engine.submit(arrival.prompt, **arrival.options)
            if arrival.cancel_after is not None:
                cancelled_after[number] = arrival.cancel_after
        if engine.idle and waiting:
            time.sleep(max(0.0, waiting[-1].at - now))
        for number, after in list(cancelled_after.items()):
            if len(engine.requests[number].new_tokens) >= after:
                engine.cancel(number)
                del cancelled_after[number]
        engine.step()
        held = engine.pool.num_pages - engine.pool.available
        most_held = max(most_held, held)
        progress.show(engine, held)
    progress.show(engine, 0, last=True)
    return engine.statistics() | {"most_pages_held": most_held}


class Progress:
    """A line about the requests served so far, which a terminal overwrites and a log repeats."""

    def __init__(self, total: int):
        """Starts the clock; `total` is the number of requests to come."""
        self._total, self._begin = total, time.perf_counter()
        self._terminal = sys.stderr.isatty()
        self._every, self._next = (0.2, 0.0) if self._terminal else (5.0, 5.0)

    def show(self, engine: Engine, held: int, last: bool = False) -> None:
        """Prints the line if it is time to, or if it is the last one."""
        seconds = time.perf_counter() - self._begin
        if seconds < self._next and not last:
            return
        self._next = seconds + self._every
        requests = engine.requests.values()
        ended = sum(request.finished for request in requests)
        tokens = sum(len(request.times) - 1 for request in requests)
        line = (
            f"{ended}/{self._total} requests, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, "
            f"{held}/{engine.pool.num_pages} pages held"
        )
        end = "\n" if last or not self._terminal else ""
        start = "\r\033[K" if self._terminal else ""
        print(start + line, end=end, file=sys.stderr, flush=True)


def lost(engine: Engine, arrivals: list[Arrival]) -> list[str]:
    """Returns what is wrong once all has been served: requests, tokens or pages that are lost."""
    faults = []
    if len(engine.requests) != len(arrivals):
        faults.append(f"{len(engine.requests)} of {len(arrivals)} requests were submitted")
    for request, arrival in zip(engine.requests.values(), arrivals, strict=False):
        count, wanted = len(request.new_tokens), arrival.options["max_new_tokens"]
        right = {
            "length": count == wanted,
            "stop": count <= wanted and request.new_tokens[-1:] == [*_STOP],
            "cancelled": arrival.cancel_after is not None and count < wanted,
        }
        if not right.get(request.state, False):
            faults.append(f"request {request.id} is {request.state} with {count}/{wanted} tokens")
    if engine.pool.available < engine.pool.num_pages:
        faults.append(f"{engine.pool.num_pages - engine.pool.available} pages are still held")
    try:
        engine.check()
    except RuntimeError as fault:
        faults.append(str(fault))
    return faults


# Each request alone.


def dense(model: Transformer, dtype) -> Transformer:
    """Returns a copy of the model that computes in a dtype, with dense attention."""
    graph, params = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), params))
    for _, module in nnx.iter_graph(copy):
        if isinstance(module, nnx.Module) and hasattr(module, "dtype"):
            module.dtype = dtype
    for block in copy.blocks:
        block.attention.attention = ATTENTIONS["xla-jax"]
    return copy


@functools.partial(jax.jit, static_argnums=0)
def scores(graph, params, tokens, temperature, gumbel):
    """Returns what `engine.sample` takes the largest of, at each token [length, VOCABULARY]."""
    logits = nnx.merge(graph, params)(tokens[None])[0]
    return logits + temperature * gumbel


def verify(model: Transformer, requests: list[Request]) -> tuple[int, list[str]]:
    """Compares each token with what the model, run on the request alone, would choose.

    The oracle is the model in a wider dtype (float64 for float32, else float32) with dense
    attention, given the same tokens. With dense attention in its own dtype, the model's scores
    differ from the oracle's by at most some e; the engine's may differ by twice as much. So the
    oracle's score of a token that the engine chose may be up to 4 e less than that of its own
    choice: 2 e for either of the two tokens.

    Returns:
        Number of tokens that are not the oracle's choice, and the requests of which one is further
        from it.
    """
    dtype = model.cache_sizes[2]
    wide = jnp.float64 if dtype == jnp.float32 else jnp.float32
    plain = nnx.split(dense(model, dtype))
    with jax.enable_x64(True):
        oracle = nnx.split(dense(model, wide))
    draw = jax.jit(jax.vmap(noise, (None, 0)))
    size = -(-max(request.known for request in requests) // 128) * 128  # one, for one program
    different, wrong = 0, []
    for request in requests:
        chosen = np.asarray(request.new_tokens, np.int32)
        tokens = np.zeros(size, np.int32)
        tokens[: request.known] = request.tokens[: request.known]
        gumbel = draw(request.seed, np.arange(1, size + 1, dtype=np.int32))
        given = tokens, np.float32(request.temperature), gumbel
        rows = slice(request.prompt - 1, request.known - 1)
        ours = np.asarray(scores(*plain, *given))[rows]
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            exact = np.asarray(scores(*oracle, *given))[rows]
        error = np.abs(ours - exact).max(initial=0.0)
        short = exact.max(axis=1) - exact[np.arange(len(chosen)), chosen]
        different += int((short > 0).sum())
        if np.any(short > 4 * error):
            wrong.append(f"request {request.id} is {short.max():.2e} short, error {error:.2e}")
    return different, wrong


def table(engine: Engine, found: dict[str, float]) -> str:
    """Returns the statistics as lines of text."""
    states = [request.state for request in engine.requests.values()]
    ended = ", ".join(f"{states.count(state)} {state}" for state in _STATES)
    times = lambda name: " / ".join(f"{1e3 * found[f'{name}_p{p}']:.1f}" for p in (50, 90, 99))
    rows = {
        "requests": f"{len(states)}: {ended}",
        "tokens": f"{found['tokens']:,} in {found['steps']:,} steps",
        "steps that read common pages once": f"{found['shared_steps']:,}",
        "tokens/s": f"{found['tokens_per_second']:,.0f}",
        "ms to the first token (p50 / p90 / p99)": times("ttft"),
        "ms from token to token (p50 / p90 / p99)": times("tpot"),
        "most pages held": f"{found['most_pages_held']} of {found['pages']}",
        "preemptions": f"{found['preemptions']}",
        "prompt tokens from shared pages": f"{found['prefix_reused']:.0%}",
        "compiled programs": f"{len(engine.token_sizes) * len(engine.programs)}",
    }
    return "\n".join(f"{name:42}{value}" for name, value in rows.items())


def load_model(arguments: argparse.Namespace) -> Transformer:
    """Loads the model of `make demo` in the dtype that it computes in, or makes one untrained."""
    if arguments.checkpoint is None:
        return untrained(arguments.random, arguments)
    import checkpoint  # needs Orbax, which a model without training does not

    model = checkpoint.load(arguments.checkpoint / "checkpoint", arguments.backend)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x.astype(model.cache_sizes[2]), params))
    return model


def main(given: list[str] | None = None) -> int:
    """Serves the load and prints statistics; returns 1 if a request, a token or a page is wrong."""
    arguments = parse_arguments(given)
    model, arrivals = load_model(arguments), load(arguments)
    engine = Engine(
        model,
        num_pages=arguments.pages,
        page_size=arguments.page_size,
        max_context=arguments.system_bytes + arguments.prompt_bytes[1] + arguments.new_bytes[1],
        max_seqs=arguments.max_seqs,
        max_tokens_per_step=arguments.max_tokens,
        share_prefixes=not arguments.no_sharing,
        batch_by_batch=arguments.batch_by_batch,
    )
    print(f"device: {jax.devices()[0].device_kind}\nattention runs on: {engine.explain()}")
    engine.warm_up()
    found = serve(engine, arrivals)
    print(table(engine, found))
    faults = lost(engine, arrivals)
    if arguments.verify:
        different, wrong = verify(model, list(engine.requests.values()))
        faults += wrong
        near = "" if wrong else ", all within rounding"
        print(f"{different} of {found['tokens']:,} tokens are not the oracle's choice{near}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join([*faults[:20], f"{len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
