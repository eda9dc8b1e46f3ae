"""Times context parallelism.

    python -m benchmarks.run_parallel --out results/parallel.json

One causal forward and backward of a sequence that is sharded over the GPUs of a host, by every
strategy, in interleaved rounds. Times are wall times, as the GPUs of a step wait for each other.
Every strategy must first pass the gate. Collectives are timed alone at the very sizes that the
programs use (or estimated from published rates, `--rates published`), and CUPTI says how much of
them was overlapped with attention. Runs on different numbers of GPUs, or at other lengths, are
parts of one file.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from . import collectives, context, cupti, gate, longest, results, tables, timing
from .collectives import RATES, REPEATS, Message
from .context import KINDS, Kind, Setting
from .run import prepare_process

GATE_LENGTH = 1024  # of each device
READING_MS = 200.0
LONG_MS = 1000.0  # what takes longer is not repeated for an estimate
AVAILABLE = 0.95  # of the memory: the rest is CUDA's and NCCL's


def reading(executable, args, iterations: int) -> float:
    """Returns the milliseconds of one run by the host's clock, the mean of `iterations` runs."""
    outputs = None
    begin = time.perf_counter()
    for _ in range(iterations):
        outputs = executable(*args)
    jax.block_until_ready(outputs)
    return (time.perf_counter() - begin) * 1e3 / iterations


class Run:
    """One run of the benchmark: its rows so far, and the methods that add more."""

    def __init__(self, setting: Setting, kinds: list[Kind], most_s: float) -> None:
        self.setting, self.kinds, self.most_s = setting, kinds, most_s
        self.shop = context.Workshop(setting)
        self.rows: list[dict[str, Any]] = []
        self.refused: dict[Kind, str] = {}
        self.used: dict[Kind, float] = {}
        self.sent: dict[tuple[Kind, int], tuple[float, float | None]] = {}  # bytes, milliseconds
        self.alone_rate: tuple[int, float] | None = None  # length, FLOP/ms of one GPU

    def announce(self, length: int) -> None:
        """Starts compiling the programs of a length."""
        for kind in self.kinds:
            self.shop.step(kind, length)

    def row(self, what: str, **fields) -> None:
        """Keeps a row and prints it."""
        self.rows.append({"what": what, "gpus": self.setting.devices, **fields})
        print(line(self.rows[-1]), flush=True)

    def judge(self) -> None:
        """Checks every kind against the oracle; one that misses it gets no number."""
        length = GATE_LENGTH * self.setting.devices
        inputs = self.setting.draw(KINDS[context.ALONE], length)
        oracle = gate.build_oracle(inputs, True)
        for kind in self.kinds:
            try:
                outputs = self.shop.step(kind, length).result()(*self.setting.moved(kind, inputs))
                verdicts = oracle.check(self.setting.named(kind, outputs))
            except Exception as error:  # One's failure must not cost the others their numbers.
                self.refused[kind] = context.said(error)
                continue
            self.used[kind] = max(verdict.used for verdict in verdicts.values())
            if not self.used[kind] <= 1.0:
                self.refused[kind] = f"wrong result: {self.used[kind]:.3g} times the allowed error"
        print(f"gate: { {k.name: self.refused.get(k, self.used.get(k)) for k in self.kinds} }")

    def judge_features(self) -> None:
        """Adds a row per kind and feature: its distance from one device's result in float32."""
        length = GATE_LENGTH * self.setting.devices
        for kind, name in itertools.product(self.kinds, context.FEATURES):
            if kind.strategy is None or kind in self.refused:
                continue
            fields: dict[str, Any] = {"kind": kind.name, "q_len": length, "feature": name}
            fields |= dict.fromkeys(("refused", "gate"))
            try:
                fields["gate"] = self.setting.feature_error(kind, name, length)
            except Exception as error:  # One's failure must not cost the others their numbers.
                fields["refused"] = context.said(error)
            self.row("feature", **fields)

    def send(self, length: int, measured: bool = True) -> None:
        """Finds each kind's bytes sent at this length and their time, measured or published."""
        listed = {
            kind: collectives.messages(self.setting.step(kind), self.setting.like(kind, length))
            for kind in self.kinds
            if kind.strategy is not None and kind not in self.refused
        }
        every = {m.key: m for found in listed.values() for m, _ in found}
        if measured:
            times = self._sending(every, length)
        else:
            times = {key: m.published_ms(self.setting.devices) for key, m in every.items()}
        for kind, found in listed.items():
            sent = sum(count * m.sent(self.setting.devices) for m, count in found)
            ms = sum(count * times[m.key] for m, count in found)
            self.sent[kind, length] = sent, None if math.isnan(ms) else ms

    def _sending(self, every: dict[Any, Message], length: int) -> dict[Any, float]:
        """Times collectives by themselves in ms, with a row for each; NaN where XLA cut some."""
        made = {key: m.program(self.setting.mesh, context.AXIS) for key, m in every.items()}
        futures = {key: self.shop.other(function, like) for key, (function, like) in made.items()}
        times = {}
        for (key, (_, like)), message in zip(made.items(), every.values(), strict=True):
            executable = futures[key].result()
            sent = message.sent(self.setting.devices)
            fields = {"q_len": length, "name": key[0], "of": key[1], "sent_bytes": sent}
            if (left := collectives.kept(executable.as_text())) < REPEATS:
                times[key] = math.nan
                self.row("collective", **fields, refused=f"XLA left {left} of {REPEATS}", ms=None)
                continue
            x = jnp.ones(like.shape, like.dtype, device=like.sharding)
            reading(executable, (x,), 1)
            rounds = [reading(executable, (x,), 2) for _ in range(5)]
            times[key] = statistics.median(rounds) / REPEATS
            rate = sent / times[key] / 1e6
            self.row("collective", **fields, refused=None, ms=times[key], gb_per_s=rate)
        return times

    def time(self, length: int, alone: bool) -> None:
        """Adds a row for each kind; one GPU by itself computes this length only if `alone`."""
        contestants = {}
        for kind in self.kinds:
            if kind in self.refused or (kind.strategy is None and not alone):
                continue
            try:
                contestants[kind] = self.shop.step(kind, length).result()
            except Exception as error:
                self.refused[kind] = context.said(error)
        samples = self._samples(contestants, length)
        for kind in self.kinds:
            self.row("step", **self._step(kind, length, samples.get(kind)))

    def _samples(self, contestants: dict[Kind, Any], length: int) -> dict[Kind, list[float]]:
        """Takes interleaved readings in ms: as many rounds as `most_s` seconds allow, 1 to 7."""
        inputs = {}
        for kind in contestants:
            if kind.strategy is None or not any(k.strategy for k in inputs):
                inputs[kind] = self.setting.draw(kind, length)
        cut = next((x for kind, x in inputs.items() if kind.strategy), None)
        args = {kind: inputs[kind] if kind.strategy is None else cut for kind in contestants}
        pilots = {}
        for kind, executable in contestants.items():
            try:
                pilots[kind] = reading(executable, args[kind], 1)  # loads kernels, too
                if pilots[kind] < LONG_MS:
                    pilots[kind] = reading(executable, args[kind], 1)
            except Exception as error:
                self.refused[kind] = context.said(error)
        counts = {kind: max(1, round(READING_MS / ms)) for kind, ms in pilots.items()}
        round_s = sum(counts[kind] * ms for kind, ms in pilots.items()) / 1e3
        rounds = int(min(max(self.most_s / max(round_s, 1e-6), 1), 7))
        samples: dict[Kind, list[float]] = {kind: [] for kind in pilots}
        for _ in range(rounds):
            for kind in pilots:
                samples[kind].append(reading(contestants[kind], args[kind], counts[kind]))
        return samples

    def _step(self, kind: Kind, length: int, samples: list[float] | None) -> dict[str, Any]:
        """Returns the fields of one row."""
        refused = self.refused.get(kind)
        found: dict[str, Any] = {"kind": kind.name, "q_len": length, "refused": refused}
        names = ("gate", "ms", "spread", "rounds", "tflops", "share", "share_of", "sent_bytes")
        found |= dict.fromkeys((*names, "sending_ms", "bound"))
        if refused is not None:
            return found
        found |= context.planned_bytes(self.shop.step(kind, length).result())
        found["gate"] = self.used[kind]
        if not samples:
            return found
        ms, spread = timing.median_and_spread(samples)
        devices = 1 if kind.strategy is None else self.setting.devices
        rate = self.setting.flops(length) / ms / devices
        if kind.strategy is None:
            self.alone_rate = length, rate
        found |= {"ms": ms, "spread": spread, "rounds": len(samples), "tflops": rate / 1e9}
        if self.alone_rate is not None:
            found |= {"share": rate / self.alone_rate[1], "share_of": self.alone_rate[0]}
        if (kind, length) in self.sent:
            found["sent_bytes"], found["sending_ms"] = self.sent[kind, length]
            if self.alone_rate is not None and found["sending_ms"] is not None:
                compute = self.setting.flops(length) / self.alone_rate[1] / devices
                found["bound"] = context.bound(kind, devices, compute, found["sending_ms"])
        return found

    def profile(self, length: int) -> None:
        """Adds a row for each kind: how much sending of one step was overlapped with attention."""
        try:
            recorder = cupti.Recorder()
            with recorder.record():  # there may be a library and no GPU
                pass
        except (OSError, cupti.CuptiError) as error:
            print(f"no profile: {error}", flush=True)
            return
        kinds = [k for k in self.kinds if k.strategy is not None and k not in self.refused]
        args = self.setting.draw(kinds[0], length) if kinds else ()
        for kind in kinds:
            executable = self.shop.step(kind, length).result()
            jax.block_until_ready(executable(*args))
            with recorder.record() as intervals:
                jax.block_until_ready(executable(*args))
            if intervals:
                fields = context.overlap(intervals) | {"kernels": context.longest(intervals)}
                self.row("overlap", kind=kind.name, q_len=length, **fields)

    def fill(self, lengths: list[int], memory: float) -> None:
        """Adds a row for each kind: the longest sequence that fits by XLA's plan, and that plan."""
        if len(lengths) < 2:
            return
        kinds = [kind for kind in self.kinds if kind not in self.refused]
        multiple = GATE_LENGTH * self.setting.devices
        searches = [longest.Search(self.shop, kind, lengths, memory, multiple) for kind in kinds]
        for search in searches:
            self.row("longest", kind=search.kind.name, available_bytes=memory, **search.row())


def line(row: dict[str, Any]) -> str:
    """Formats one row for a terminal."""
    head = f"{row['gpus']} GPUs {row['what']:<10} T={row['q_len']:<8} {row.get('kind', ''):<20}"
    if row.get("refused"):
        return f"{head} {row['refused']}"[:200]
    shown = {k: v for k, v in row.items() if isinstance(v, (int, float, str)) and k not in _IN_HEAD}
    parts = []
    for name, value in shown.items():
        if name.endswith("_bytes"):
            parts.append(f"{name.removesuffix('_bytes')} {value / 2**30:.3f} GiB")
        else:
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return f"{head} {'  '.join(parts)}"


_IN_HEAD = ("gpus", "what", "q_len", "kind")


def merged(path: pathlib.Path, found: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Returns `found` with the file's rows of other lengths, or of other numbers of GPUs.

    Each run in the file lists the lengths whose rows are still its own.

    Raises:
        ValueError: the file's rows were taken on another kind of device.
    """
    lengths = sorted({row["q_len"] for row in found["rows"]})
    ran = {name: found[name] for name in ("date", "commit", "versions")}
    ran |= {"gpus": gpus, "rates": found["method"]["rates"], "lengths": lengths}
    rows, runs = found["rows"], [ran]
    if path.exists():
        old = results.load(path)
        if old["device"] != found["device"]:
            raise ValueError(f"{path} is of {old['device']}, not {found['device']}")
        stays = lambda row_gpus, length: row_gpus != gpus or length not in lengths
        rows = [row for row in old["rows"] if stays(row["gpus"], row["q_len"])] + rows
        for run in old["runs"]:
            left = [length for length in run["lengths"] if stays(run["gpus"], length)]
            runs += [run | {"lengths": left}] if left else []
    by_gpus = lambda x: x["gpus"]
    return found | {"rows": sorted(rows, key=by_gpus), "runs": sorted(runs, key=by_gpus)}


def run(arguments) -> dict[str, Any]:
    """Measures all lengths; saves the file after each of them."""
    begin = time.monotonic()
    devices = jax.devices()[: arguments.gpus or None]
    setting = Setting.of(devices, arguments.sizes, arguments.backend)
    lengths = sorted(arguments.lengths)
    this = Run(setting, [KINDS[name] for name in arguments.kinds], arguments.seconds)
    this.announce(GATE_LENGTH * setting.devices)
    this.announce(lengths[0])
    summary = (
        "one causal forward and backward of one sequence, "
        f"{setting.sizes[0]} query and {setting.sizes[1]} key heads of {setting.sizes[2]}, "
        "bfloat16; wall time, median of interleaved rounds."
    )
    flags = os.environ.get("XLA_FLAGS", "")
    method = {"summary": summary, "flags": flags, "rates": RATES[arguments.rates]}
    header = results.header("parallel", method)

    def save():
        found = merged(arguments.out, header | {"rows": this.rows}, setting.devices)
        results.save(arguments.out, found)
        return found

    this.judge()
    if arguments.features:
        this.judge_features()
    done = []
    for length, following in itertools.zip_longest(lengths, lengths[1:]):
        if time.monotonic() - begin > arguments.time_limit:
            print(f"time is up before T={length}")
            break
        this.send(length, measured=arguments.rates == "measured")
        if following is not None:
            this.announce(following)
        this.time(length, alone=length <= arguments.longest_alone)
        done.append(length)
        if length == arguments.profile:
            this.profile(length)
        print(f"{time.monotonic() - begin:.0f} s", flush=True)
        save()
    if arguments.memory and time.monotonic() - begin < arguments.time_limit:
        this.fill(done, arguments.memory * 1e9 * AVAILABLE)
        print(f"{time.monotonic() - begin:.0f} s", flush=True)
    return save()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = lambda text: text.split(",")
    numbers = lambda text: [int(x) for x in text.split(",")]
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    parser.add_argument("--gpus", type=int, default=0, help="so many of them; 0: all")
    parser.add_argument("--lengths", type=numbers, default=[2**15, 2**17, 2**19])
    parser.add_argument("--kinds", type=names, default=list(KINDS), help="with commas between")
    parser.add_argument("--sizes", type=numbers, default=[32, 8, 128], help="N,K,H")
    parser.add_argument("--seconds", type=float, default=35, help="of readings at every length")
    parser.add_argument("--longest-alone", type=int, default=2**17, help="that one GPU computes")
    parser.add_argument("--profile", type=int, default=2**17, help="the length that is profiled")
    parser.add_argument("--memory", type=float, default=141, help="of a GPU, GB; 0: do not ask")
    parser.add_argument("--features", action="store_true", help="check dropout, windows, documents")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds; no length after")
    parser.add_argument("--rates", choices=RATES, default="measured")
    parser.add_argument("--backend", default="hopper")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.kinds) - set(KINDS)
    if unknown:
        parser.error(f"unknown kinds {sorted(unknown)}; there are {list(KINDS)}")
    return arguments


if __name__ == "__main__":
    given = parse(None)
    prepare_process(given.time_limit + 120)
    print(tables.render(run(given)))
