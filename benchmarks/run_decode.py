"""Times the groups of decoding.py.

    python -m benchmarks.run_decode --out results/decode.json

Every call must first agree with attention in float32 on the same inputs, within twice the error of
plain jnp in bfloat16 (root mean square). Rates count k and v once, whatever is read; the ceiling is
the best of several plain readers in the same run. Every launch reads another cache than the one
before it, 512 MiB in all, so the L2 serves none. A group is compiled while the one before it is
timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

from . import readers, results, timing
from .decoders import PROVIDERS, reference
from .decoding import GROUPS, Call, Group, Sizes
from .run import prepare_process, probes

ROTATED_BYTES = 512 << 20
CEILING_BYTES = 4 << 30
# Other ceilings read these shares: starting and ending cost a plain reader, too.
SHARES = (4, 16, 32, 64)
ALLOWED = 2.0  # times the error of plain jnp


class Workshop:
    """Background compilation: programs are lowered when announced, then compiled in parallel."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._pool = concurrent.futures.ThreadPoolExecutor(8)
        self._made: dict[Any, concurrent.futures.Future] = {}

    def call(self, sizes: Sizes, call: Call) -> concurrent.futures.Future:
        """Returns the future (Decoder, executable) of a call; asked for twice, it is made once."""

        def lower():
            decoder = PROVIDERS[call.provider](sizes, call, self._backend)
            return decoder, decoder.lower(sizes, call)

        return self._make((sizes, call), lower)

    def other(self, function, *shapes) -> concurrent.futures.Future:
        """Returns the future (None, executable) of any function."""
        lower = lambda: (None, jax.jit(function).lower(*shapes))
        return self._make((function, *shapes), lower)

    def reference(self, sizes: Sizes, call: Call) -> concurrent.futures.Future:
        """Returns the future (None, executable) of decoders.reference."""
        return self.other(reference, *sizes.shapes(call.queries), *chosen_shapes(sizes, call))

    def announce(self, group: Group) -> None:
        """Starts compiling everything that a group needs."""
        for call in group.calls:
            self.reference(group.sizes, call)
            self.call(group.sizes, call)

    def _make(self, key, lower) -> concurrent.futures.Future:
        if key not in self._made:
            self._made[key] = self._start(lower)
        return self._made[key]

    def _start(self, lower) -> concurrent.futures.Future:
        try:
            decoder, lowered = lower()
        except Exception as error:  # Whoever asks for the result gets it.
            failed: concurrent.futures.Future = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        return self._pool.submit(lambda: (decoder, lowered.compile()))


def chosen_shapes(sizes: Sizes, call: Call) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape of the chosen blocks, if the call has some."""
    if not call.chosen:
        return []
    return [jax.ShapeDtypeStruct((sizes.batch, sizes.kv_heads, call.chosen), jnp.int32)]


def start_ceiling(shop: Workshop, size: int) -> tuple[Any, dict[str, concurrent.futures.Future]]:
    """Starts compiling the plain readers; returns (shape that they read, futures by name)."""
    shape = (size // (2 * readers.COLUMNS), readers.COLUMNS)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    functions = {readers.SUM: readers.xla_sum}
    if jax.default_backend() == "gpu":
        functions |= {reader.label: reader for reader in readers.READERS}
    return x, {name: shop.other(function, x) for name, function in functions.items()}


def ceiling(shape, made, timer: timing.Timer, rounds: int) -> list[dict[str, Any]]:
    """Times the plain readers and returns a row for each."""
    number = -(-ROTATED_BYTES // (shape.size * shape.dtype.itemsize))
    arrays = [jax.random.normal(jax.random.key(i), shape.shape, shape.dtype) for i in range(number)]
    x, turns = arrays[0], itertools.cycle(arrays)
    bind = lambda executable: timing.Launch(lambda: executable(next(turns)), "jax")
    contestants = {name: bind(future.result()[1]) for name, future in made.items()}
    samples, failures = timing.interleave(timer, contestants, rounds)
    rows = []
    for name in contestants:
        row = {"group": "ceiling", "shape": f"{x.nbytes >> 20} MiB", "provider": name, "call": name}
        rows.append(row | timed(samples.get(name), x.nbytes, failures.get(name)))
    return rows


def rate_at(rates: dict[int, float], size: int) -> float:
    """Returns the rate of the plain reader of the size that is nearest, as a ratio."""
    return rates[min(rates, key=lambda other: abs(math.log(other / size)))]


def timed(samples: list[timing.Sample] | None, size: int, refused: str | None) -> dict[str, Any]:
    """Returns what every row has: a time and the rate of reading `size` bytes, or a refusal."""
    if samples is None:
        return {"refused": refused, "ms": None}
    ms, spread = timing.median_and_spread([sample.ms for sample in samples])
    launches = samples[-1].launches
    rate = size / ms / 1e6
    return {"refused": None, "ms": ms, "spread": spread, "launches": launches, "gb_per_s": rate}


@jax.jit
def gate(found, exact, plain):
    """Computes the error as a share of what is allowed."""
    rms = lambda x: jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32) - exact)))
    return rms(found) / (ALLOWED * rms(plain) + 1e-12)


def admit(shop: Workshop, sizes: Sizes, call: Call, caches) -> tuple[timing.Launch, dict[str, Any]]:
    """Checks a call; returns the launch to time, and what the row says of it.

    Raises:
        ValueError: a wrong result.
    """
    decoder, executable = shop.call(sizes, call).result()
    _, both = shop.reference(sizes, call).result()
    q = sizes.queries(call.queries)
    chosen = [jnp.asarray(sizes.chosen(call.chosen))] if call.chosen else []
    inputs = [decoder.arrange(q, *kv) for kv in caches]
    used = float(gate(executable(*inputs[0]), *both(q, *caches[0], *chosen)))
    if not used <= 1.0:
        raise ValueError(f"wrong result: {used:.3g} times the allowed error")
    turns = itertools.cycle(inputs)
    launch = timing.Launch(lambda: executable(*next(turns)), "jax")
    return launch, {"gate": used, "chosen": decoder.chosen}


def run_group(
    shop: Workshop, group: Group, timer: timing.Timer, rounds: int, rates: dict[int, float]
) -> list[dict[str, Any]]:
    """Returns a row for each call of a group; `rates` are GB/s of plain readers by bytes read."""
    sizes = group.sizes
    caches = sizes.caches(ROTATED_BYTES)
    contestants, said, refused = {}, {}, {}
    for call in group.calls:
        try:
            contestants[call.label], said[call.label] = admit(shop, sizes, call, caches)
        except Exception as error:  # One's failure must not cost the others their numbers.
            refused[call.label] = f"{type(error).__name__}: {error}"[:300]
    samples, failures = timing.interleave(timer, contestants, rounds)
    first = samples.get(group.calls[0].label)
    rows = []
    for call in group.calls:
        name = call.label
        row = {"group": group.name, "shape": sizes.label, "provider": call.provider, "call": name}
        row |= {"queries": call.queries, "page_size": call.page_size, "cache": call.cache}
        row |= {"gate": None, "chosen": {}} | said.get(name, {})
        own = samples.get(name)
        row |= timed(own, sizes.read_bytes(call), refused.get(name) or failures.get(name))
        if own is not None:
            row["of_ceiling"] = row["gb_per_s"] / max(rates.values())
            row["of_reader"] = row["gb_per_s"] / rate_at(rates, sizes.read_bytes(call))
            row["speed"] = None if first is None else timing.speed_ratio(first, own)
            row["tflops"] = sizes.flops(call) / row["ms"] / 1e9
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """Formats one row for a terminal."""
    head = f"{row['group']:<10} {row['shape']:<20} {row['call']:<40}"
    if row["ms"] is None:
        return f"{head} {row['refused']}"[:200]
    text = f"{head} {row['ms'] * 1e3:9.1f} us  {row['gb_per_s']:5.0f} GB/s"
    if "of_ceiling" in row:
        chosen = row["chosen"].get("num_splits", "-")
        text += f"  {row['of_ceiling']:.2f} ({row['of_reader']:.2f} of its size)"
        text += f"  speed {row['speed'] or 0:5.2f}"
        text += f"  {row['tflops']:4.0f} TFLOP/s  splits {chosen:>3}  gate {row['gate']:.2f}"
    return text


def run(arguments, timer: timing.Timer, log: dict[str, Any], backend: str = "hopper") -> None:
    """Times all groups; the file is saved after each of them."""
    begin = time.monotonic()
    shop = Workshop(backend)
    whole = arguments.ceiling_bytes
    plain = {size: start_ceiling(shop, size) for size in (whole, *(whole // n for n in SHARES))}
    label = lambda group: f"{group.name} {group.sizes.label}"
    groups = [g for g in GROUPS if any(part in label(g) for part in arguments.only)]
    shop.announce(groups[0])
    summary = (
        "us of device time for one step, GB/s of k and v, and in parentheses their share of the "
        f"best plain reader and of the best that reads as much; bfloat16; {timer.name}; median of "
        f"{arguments.rounds} interleaved rounds."
    )
    method = {"summary": summary, "timer": timer.name, "timer_check": log}
    found = results.header("decode", method)
    found["rows"], rates = [], {}
    for size, (shape, made) in plain.items():
        rows = ceiling(shape, made, timer, arguments.rounds)
        rates[size] = max(row["gb_per_s"] for row in rows if row["ms"] is not None)
        found["rows"] += rows
        print("\n".join(map(line, rows)), flush=True)
    for group, following in itertools.zip_longest(groups, groups[1:]):
        if time.monotonic() - begin > arguments.time_limit:
            print(f"time is up before {group.name} {group.sizes.label}")
            break
        if following is not None:
            shop.announce(following)
        rows = run_group(shop, group, timer, arguments.rounds, rates)
        found["rows"] += rows
        print("\n".join(map(line, rows)), flush=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Parses the command line, chooses a timer and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="groups whose name and shape contain one of these"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds; no group after")
    parser.add_argument("--ceiling-bytes", type=int, default=CEILING_BYTES)
    arguments = parser.parse_args()
    # The reference's products may be slow; tuning them would take longer, on the device.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    prepare_process(arguments.time_limit + 300)
    timer, log = timing.choose("auto", probes())
    print(f"timer: {timer.name}\n{log}", flush=True)
    run(arguments, timer, log)


if __name__ == "__main__":
    main()
