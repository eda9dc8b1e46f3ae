"""Times the training step of run_training.py over 1, 2 and 4 GPUs of a host.

    python -m benchmarks.run_sharded_training --out results/sharded_training.json --devices 1,2

The batch is sharded over "data" or "fsdp" (which shards parameters, too), heads and hidden units
over "model", the sequence over "context" (a ring) or "sequence" (Ulysses), on meshes whose axes are
Auto and Explicit. A step has as many sequences for each GPU ("weak" scaling: training of a larger
batch), or the same ones on any number of them ("strong"). Programs of the same sharding run in
turns on one state. Times are wall times, as the GPUs wait for each other; CUPTI says how
long a GPU communicates and how much of it nothing else overlaps. What a step sends is counted in
the compiled program, and its time reckoned from rates that collectives reach by themselves in the
same run. The file is saved after every row, and rows of earlier runs stay in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import pathlib
import time
from typing import Any

import jax

from . import context, cupti, flops, llama, results, sharded, steps, suites, tables, timing
from .run import prepare_process
from .run_training import ALLOWED
from .sharded import Job

REMAT = {"all": None, "kept": llama.keeps_attention}


def jobs(arguments) -> list[list[Job]]:
    """Returns groups of jobs of one shape and number of GPUs, in order; --only chooses among them.

    One GPU comes first, as others are compared with it. Explicit axes come last in a group and have
    the first provider only.
    """
    found = []
    for (batch, length), devices in itertools.product(arguments.shapes, arguments.devices):
        batch *= devices if arguments.scaling == "weak" else 1
        ways = [way for way in sharded.ways(devices) if way.fits(batch, length)]
        asked = itertools.product(arguments.types, ways, arguments.providers)
        group = [
            Job(way, types, provider, batch, length)
            for types, way, provider in asked
            if types == "auto" or (provider == arguments.providers[0] and way.axes)
        ]
        found.append([job for job in group if any(text in job.name for text in arguments.only)])
    return [group for group in found if group]


class Run:
    """One run of the benchmark: its rows so far, and what they are compared with."""

    def __init__(self, arguments) -> None:
        self.arguments, self.rows = arguments, []
        self.links = sharded.Links()
        self.begin = time.monotonic()
        self.alone: dict[tuple[str, int], float] = {}  # tokens a second of one GPU
        self.first: dict[tuple[int, int], tuple[float, float]] = {}  # loss and norm, by shape
        self.recorder = None
        try:
            self.recorder = cupti.Recorder()
            with self.recorder.record():  # there may be a library and no GPU
                pass
        except (OSError, cupti.CuptiError) as error:
            self.recorder = None
            print(f"no profile: {error}", flush=True)

    def late(self) -> bool:
        """Says whether time is up."""
        return time.monotonic() - self.begin > self.arguments.time_limit

    def compile(self, group: list[Job]) -> tuple[dict[Job, Any], dict[Job, str]]:
        """Compiles all programs of a group in parallel; returns them, and reasons of the others."""
        begin, waiting, programs, refused = time.monotonic(), {}, {}, {}
        policy = REMAT[self.arguments.remat]
        with concurrent.futures.ThreadPoolExecutor(self.arguments.workers) as pool:
            for job in group:
                try:
                    found, layout = sharded.lowered(job, self.arguments.config, policy)
                    waiting[job] = pool.submit(found.compile), layout
                except Exception as error:  # One's failure must not cost the others their numbers.
                    refused[job] = steps.reason(error)
            for job, (future, layout) in waiting.items():
                try:
                    programs[job] = future.result(), layout
                except Exception as error:
                    refused[job] = steps.reason(error)
        print(f"compiled {len(programs)} in {time.monotonic() - begin:.0f} s", flush=True)
        return programs, refused

    def group(self, group: list[Job], save) -> None:
        """Adds the rows of a group: those of the same sharding in turns."""
        programs, refused = self.compile(group)
        for job, reason in refused.items():
            self.add(job, {"refused": reason}, save)
        for _, same in itertools.groupby(programs, key=lambda job: (job.way, job.types)):
            same = list(same)
            if self.late():
                return
            try:
                found = self.measure({job: programs[job] for job in same})
            except Exception as error:
                found = {job: {"refused": steps.reason(error)} for job in same}
            for job in same:
                self.add(job, found[job], save)

    def measure(self, programs: dict[Job, Any]) -> dict[Job, dict[str, Any]]:
        """Returns the fields of the rows of programs that share a sharding."""
        (one, (_, layout)), *_ = programs.items()
        config, found, pilots, running = self.arguments.config, {}, {}, {}
        with sharded.within(layout):
            make = llama.state_maker(config, layout)
            batch = llama.batch_of(config, one.batch, one.length, layout)
            for job, (program, _) in programs.items():
                state, (loss, norm) = program(make(), batch)
                found[job] = {"refused": self.differs(job, float(loss), float(norm))}
                found[job] |= {"loss": float(loss), "norm": float(norm)}
                begin = time.perf_counter()
                state = jax.block_until_ready(program(state, batch))[0]
                pilots[job] = time.perf_counter() - begin
                if found[job]["refused"] is None:
                    running[job.provider] = program
            each = max(1, round(self.arguments.reading / max(pilots.values())))
            round_s = (each + 1) * sum(pilots.values())
            rounds = int(min(max(self.arguments.seconds / round_s, 2), self.arguments.rounds))
            seconds = steps.in_turns(running, state, batch, rounds, each)
            del state
            for job, (program, _) in programs.items():
                if found[job]["refused"] is None:
                    found[job] |= self.profile(program, make(), batch)
        # Links have a mesh of their own.
        for job, (program, _) in programs.items():
            if found[job]["refused"] is None:
                found[job] |= self.numbers(job, program, seconds[job.provider])
        return found

    def differs(self, job: Job, loss: float, norm: float) -> str | None:
        """Says how a first step differs from the first one of this shape, or None."""
        other = self.first.setdefault((job.batch, job.length), (loss, norm))
        for what, mine, theirs in zip(("loss", "norm"), (loss, norm), other, strict=True):
            if not abs(mine - theirs) <= ALLOWED * abs(theirs):
                return f"wrong result: {what} {mine:.6g}, {theirs:.6g} with what came first"
        return None

    def numbers(self, job: Job, program, seconds: list[float]) -> dict[str, Any]:
        """Returns times, memory and what is reckoned from the bytes that the program sends."""
        config, devices = self.arguments.config, job.way.devices
        middle, spread = timing.median_and_spread(seconds)
        sizes = config.heads, config.kv_heads, config.head_dim
        shape = suites.Shape(job.batch, job.length, *sizes)
        work = flops.training_flops(config.matmul_parameters, config.layers, shape)
        found = {"ms": middle * 1e3, "spread": spread, "rounds": len(seconds)}
        tokens = job.batch * job.length
        found |= {"tokens_per_s": tokens / middle}
        found |= {"tflops": work / middle / devices / 1e12}
        found |= context.planned_bytes(program)
        key = job.provider, job.length
        if devices == 1:
            self.alone[key] = tokens / middle
        else:
            found |= self.links.reckon(program.as_text(), devices)
        if key in self.alone:
            found["speedup"] = tokens / middle / self.alone[key]
            divided = tokens / self.alone[key] / devices
            found["reckoned_ms"] = divided * 1e3 + found.get("sending_ms", 0.0)
        return found

    def profile(self, program, state, batch) -> dict[str, Any]:
        """Returns how much of a step is communication, by CUPTI; nothing without it."""
        if self.recorder is None:
            return {}
        state, result = program(state, batch)
        jax.block_until_ready((state, result))
        with self.recorder.record() as intervals:
            state, result = program(state, batch)
            jax.block_until_ready((state, result))
        if not intervals:
            return {}
        return {"profile": context.overlap(intervals), "kernels": context.longest(intervals)}

    def add(self, job: Job, fields: dict[str, Any], save) -> None:
        """Keeps a row, prints it and saves the file."""
        row = {"what": "step", "gpus": job.way.devices, "way": job.way.name, "types": job.types}
        row |= {"provider": job.provider, "batch": job.batch, "length": job.length}
        row |= {"remat": self.arguments.remat, "size": self.arguments.size} | fields
        self.rows.append(row)
        seen = f"{job.name}: {row['refused']}"
        if row["refused"] is None:
            seen = f"{job.name}: {row['ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s"
            seen += f", times one GPU {row.get('speedup') or 0:.2f}"
            seen += f", {row['planned_bytes'] / 2**30:.1f} GiB, profile {row.get('profile')}"
        print(f"{time.monotonic() - self.begin:.0f} s: {seen}", flush=True)
        save()


def identity(row: dict[str, Any]) -> tuple:
    """Returns what a row is about."""
    if row["what"] == "link":
        return row["gpus"], row["name"], row["sent_bytes"]
    names = ("gpus", "way", "types", "provider", "batch", "length", "remat", "size")
    return (*(row[name] for name in names),)


def merged(path: pathlib.Path, found: dict[str, Any]) -> dict[str, Any]:
    """Returns `found` with those rows of the file that are about something else."""
    both = results.with_earlier(path, found, identity)
    rank = lambda row: (row["what"], row.get("length") or 0, row["gpus"])
    return both | {"rows": sorted(both["rows"], key=rank)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = lambda text: text.split(",")
    numbers = lambda text: [int(x) for x in text.split(",")]
    shapes = lambda text: [tuple(map(int, x.split("x"))) for x in text.split(",")]
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, a .json file")
    parser.add_argument("--devices", type=numbers, default=[1, 2, 4], help="so many GPUs")
    parser.add_argument("--shapes", type=shapes, default=[(4, 8192), (1, 32_768)], help="BxT,BxT")
    parser.add_argument("--scaling", choices=("weak", "strong"), default="weak")
    parser.add_argument("--types", type=words, default=list(sharded.TYPES), help="of mesh axes")
    default = list(sharded.PROVIDERS[:2])
    parser.add_argument("--providers", type=words, default=default, help=f"{sharded.PROVIDERS}")
    told = 'programs whose name has one of these, as in "model 2;fsdp 2"'
    parser.add_argument("--only", type=lambda text: text.split(";"), default=[""], help=told)
    parser.add_argument("--size", choices=llama.SIZES, default="1b")
    parser.add_argument("--remat", choices=REMAT, default="kept", help="kept: not attention's o")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--seconds", type=float, default=10, help="of readings of a sharding")
    parser.add_argument("--reading", type=float, default=0.7, help="seconds of one reading")
    parser.add_argument("--workers", type=int, default=6, help="programs compiled side by side")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds; nothing after")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.types) - set(sharded.TYPES)
    unknown |= set(arguments.providers) - set(sharded.PROVIDERS)
    if unknown:
        known = [*sharded.TYPES, *sharded.PROVIDERS]
        parser.error(f"unknown {sorted(unknown)}; there are {known}")
    present = jax.device_count()
    arguments.devices = [count for count in arguments.devices if count <= present]
    arguments.config = llama.SIZES[arguments.size]
    return arguments


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures all groups; saves the file after every row, and returns it."""
    config = arguments.config
    summary = (
        f"training steps of {config.layers} layers, {config.width} wide, "
        f"{config.matmul_parameters / 1e9:.2f} billion parameters in matmuls, bfloat16, float32 "
        "AdamW, remat of each layer; wall time, medians of interleaved rounds."
    )
    method = {"summary": summary, "flags": os.environ.get("XLA_FLAGS", "")}
    header, this = results.header("sharded_training", method), Run(arguments)

    def save() -> dict[str, Any]:
        found = merged(arguments.out, header | {"rows": this.rows + this.links.rows})
        results.save(arguments.out, found)
        return found

    for group in jobs(arguments):
        if this.late():
            print("time is up", flush=True)
            break
        this.group(group, save)
    return save()


if __name__ == "__main__":
    prepare_process(3600)
    print(tables.render(main(parse(None))))
