"""Checks whether the package works here: `python -m flash_pallas doctor`.

It prints the installed versions, which backend runs what, whether the output and gradients of a few
calls match the oracle, and the speed of one call next to the published speed. `--full` then runs
every kernel that can be chosen on this GPU, some thousands, compares each with float64 and writes a
report to send to the authors. The exit status is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import conformance
from . import devices as devices_
from ._version import __version__
from .api import flash_attention
from .coverage import command as coverage
from .coverage import run
from .decode import flash_decode
from .frontend.explain import explain

PACKAGES = ("jax", "jaxlib", "flax")
# By version of CUDA: packages of jax's plugin, and the oldest driver that runs it
# (docs.jax.dev, installation, 0.11).
PLUGINS = {
    "12": ("jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "13": ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
}
OLDEST_DRIVER = {"12": 525, "13": 580}
# What to install: on Hopper or not, with a driver for CUDA 13 or not.
_EXTRAS = {True: ("hopper-cuda12", "hopper"), False: ("cuda12", "cuda13")}
SMOKE = ("causal", "GQA", "window", "bias", "packed documents", "softcap", "sinks")
READINGS = 7
CALLS = 50  # in one program on a GPU: 40 ms on an H200, next to which the host's share is nothing


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: the subject of the check.
        ok: False if something is wrong.
        detail: the result, and the way out if something is wrong.
    """

    name: str
    ok: bool
    detail: str

    def __str__(self) -> str:
        return f"  {'ok' if self.ok else 'WRONG':<6} {self.name}: {self.detail}"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the relevant packages that are installed."""
    version_of = {"python": platform.python_version(), "flash_pallas": __version__}
    for name in (*PACKAGES, *(name for plugins in PLUGINS.values() for name in plugins)):
        try:
            version_of[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return version_of


def driver() -> list[dict[str, str]]:
    """Returns name, driver version and compute capability of each GPU that the driver reports."""
    fields = ("name", "driver_version", "compute_cap")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[part.strip() for part in line.split(",")] for line in process.stdout.splitlines()]
    return [dict(zip(fields, line, strict=True)) for line in lines if len(line) == len(fields)]


def installed(version_of: dict[str, str], gpus: list[dict[str, str]]) -> Iterator[Finding]:
    """Yields whether the versions fit each other and the driver, and whether JAX sees the GPUs."""
    plugins = [(cuda, names) for cuda, names in PLUGINS.items() if names[0] in version_of]
    # jax checks at import that it takes this jaxlib, which may be older.
    parts = [name for _, names in plugins for name in names]
    mismatched = [name for name in parts if version_of.get(name) != version_of["jaxlib"]]
    listed = ", ".join(f"{name} {version_of.get(name, 'missing')}" for name in mismatched)
    fix = f"jaxlib is {version_of['jaxlib']}, but {listed}: install all of one version"
    right = f"jax is {version_of['jax']}, jaxlib and its plugins {version_of['jaxlib']}"
    yield Finding("versions", not mismatched, fix if mismatched else right)
    if len(plugins) > 1:
        yield Finding("CUDA", False, "the plugins of both versions are installed: remove one")
    release = int(gpus[0]["driver_version"].partition(".")[0]) if gpus else 0
    for cuda, names in plugins if gpus else ():
        enough = release >= OLDEST_DRIVER[cuda]
        fix = "" if enough else f", which is too old: it needs {OLDEST_DRIVER[cuda]} or newer"
        yield Finding("driver", enough, f"{gpus[0]['driver_version']} for {names[0]}{fix}")
    yield _device(gpus, has_plugin=bool(plugins), newest=release >= OLDEST_DRIVER["13"])
    if gpus and devices_.takes_first(gpus[0]["compute_cap"]) == "hopper":
        slow = tuple(map(int, version_of["jaxlib"].split(".")[:2])) >= (0, 12)
        note = "the Hopper kernels run in a slower form; with 'jaxlib<0.12' they do not"
        yield Finding("jaxlib for Hopper", True, note if slow else "the fastest that is known")


def _device(gpus: list[dict[str, str]], *, has_plugin: bool, newest: bool) -> Finding:
    """Returns whether JAX has a device, and whether it runs on the GPU if there is one."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return Finding("device", False, f"JAX has none: {str(error).splitlines()[0]}")
    if gpus and devices[0].platform == "cpu":
        hopper = devices_.takes_first(gpus[0]["compute_cap"]) == "hopper"
        extra = _EXTRAS[hopper][newest]
        fix = "its warnings above say why" if has_plugin else f"pip install 'flash_pallas[{extra}]'"
        return Finding("device", False, f"{gpus[0]['name']}, but JAX runs on the CPU: {fix}")
    kind, platform = devices[0].device_kind, devices[0].platform
    return Finding("device", True, f"{len(devices)} x {kind}, platform {platform}")


def smoke() -> Iterator[Finding]:
    """Yields whether outputs and gradients of a few calls match the oracle."""
    cases = [case for case in conformance.CASES if case.name in SMOKE]
    for verdict in conformance.check(flash_attention, cases):
        detail = verdict.detail
        if verdict.error is not None:
            detail = f"error {verdict.error:.2g}, allowed {verdict.allowed:.2g} {detail}".rstrip()
        right = verdict.verdict == conformance.RIGHT
        yield Finding(f"smoke test, {verdict.case}", right, f"{verdict.verdict}, {detail}")


def runs() -> dict[str, str]:
    """Returns the backends of a few calls, by a description of each call."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    x, cache, wide = shape(4, 4096, 16, 128), shape(4, 32768, 4, 128), shape(1, 4096, 4, 512)
    single = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    token, lengths = shape(4, 1, 16, 128), jax.ShapeDtypeStruct((4,), jnp.int32)
    return {
        "bfloat16, head dim 128": explain(flash_attention, x, x, x, causal=True).backend,
        "bfloat16, head dim 512": explain(flash_attention, wide, wide, wide, causal=True).backend,
        "float32, head dim 128": explain(
            flash_attention, single, single, single, causal=True
        ).backend,
        "decoding": explain(flash_decode, token, cache, cache, kv_lengths=lengths).backend,
    }


def timing() -> dict[str, Any]:
    """Measures one forward pass on the device: the time that N more calls add to a program of N.

    So the time excludes the launch by the host and the wait for the result. `published` is the
    speed in this repository's benchmarks for this GPU, or None if it was not measured.
    """
    on_gpu = jax.default_backend() == "gpu"
    sizes = (4, 4096, 16, 128) if on_gpu else (1, 1024, 4, 64)
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    calls = CALLS if on_gpu else 1
    q, k, v = jax.random.normal(jax.random.key(0), (3, *sizes), dtype)

    def once(number):
        begin = time.perf_counter()
        jax.block_until_ready(_several(number, q, k, v))
        return (time.perf_counter() - begin) * 1e3

    readings = [(once(calls), once(2 * calls)) for _ in range(READINGS + 1)]
    fewer, more = zip(*readings[1:], strict=True)  # the first compiles
    # The minimum of each, because disturbances only make a reading longer.
    ms = (min(more) - min(fewer)) / calls
    batch, length, heads, head_dim = sizes
    flops = 4 * batch * heads * head_dim * length * (length + 1) / 2
    device = devices_.known(jax.devices()[0].device_kind)
    return {
        "call": f"causal forward, {jnp.dtype(dtype).name} {list(sizes)}",
        "measured": f"device time: {2 * calls} calls in one program less {calls}, per call",
        "ms": round(ms, 3),
        "tflops": round(flops / ms / 1e9, 2),
        "published": None if device is None else device.tflops,
    }


@partial(jax.jit, static_argnums=0)
def _several(number: int, q, k, v):
    """Computes this number of calls, one after the other."""

    def one(_, q):
        o = flash_attention(q, k, v, causal=True)
        # With one vector of O in q the next call depends on this one, and q stays random.
        return jax.lax.dynamic_update_slice(q, o[:1, :1, :1], (0, 0, 0, 0))

    return jax.lax.fori_loop(0, number, one, q)


def examined(say: Callable[[Any], None]) -> dict[str, Any]:
    """Runs all checks and returns the report; calls `say` with each line as soon as it is known."""
    version_of, gpus = versions(), driver()
    say(", ".join(f"{name} {version}" for name, version in version_of.items()))
    findings: list[Finding] = []
    report: dict[str, Any] = {"versions": version_of, "gpus": gpus, "findings": findings}
    for finding in installed(version_of, gpus):
        findings.append(finding)
        say(finding)
    if all(finding.ok for finding in findings if finding.name == "device"):
        report["runs"] = runs()
        say(
            "  runs on: "
            + "; ".join(f"{call}: {backend}" for call, backend in report["runs"].items())
        )
        for finding in smoke():
            findings.append(finding)
            say(finding)
        speed = report["timing"] = timing()
        say(f"  {speed['call']}: {speed['ms']} ms, {speed['tflops']} TFLOP/s ({speed['measured']})")
        if speed["published"] is not None:
            say(f"  published for this GPU: {speed['published']} TFLOP/s")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m flash_pallas doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--full", action="store_true", help="run every kernel; 20 minutes or more")
    coverage.add_options(parser.add_argument_group("options of --full"))
    options = parser.parse_args(arguments)
    if options.full:
        run.prepare()  # before jax takes most of the GPU's memory for this process
    report = examined((lambda line: None) if options.json else partial(print, flush=True))
    findings = report["findings"]
    wrong = sum(not finding.ok for finding in findings)
    if options.json:
        as_dicts = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": not wrong, **report, "findings": as_dicts}, indent=1))
    else:
        print(f"{wrong} of {len(findings)} checks are wrong" if wrong else "All is well.")
    return int(bool(wrong) or (options.full and not coverage.full(options)))
