"""Random calls, traced and lowered for a GPU that need not be there.

    python -m tests.lowering_fuzz --gpu hopper --count 100

Whatever a call holds, the backend either lowers it or says in an error of its own why it does not:
shared memory never overflows, and no error comes from inside. Some calls also change the tiles, as
`blocks=` and autotuning do; tiles that pass validation must lower too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

import flash_pallas as fp
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.backends.hopper.backward.paired.tiles import PairedBlocks
from flash_pallas.backends.portable import PortableBackend
from flash_pallas.devices import DEVICES, Device

from . import fuzzing
from .random_calls import RandomCall, random_blocks, random_call


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU to lower for.

    Attributes:
        backend: name of the backend whose kernels are lowered.
        device: the GPU.
    """

    backend: str
    device: Device

    def make(self):
        """Returns the backend as it is on this GPU."""
        kind = HopperBackend if self.backend == "hopper" else PortableBackend
        return kind(num_sms=self.device.sms, capability=self.device.capability)


GPUS = {
    "hopper": Gpu("hopper", DEVICES["h200"]),
    "portable-163": Gpu("portable", DEVICES["a100"]),
    "portable-99": Gpu("portable", DEVICES["l40s"]),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one call: "lowered", "refused" or "failed", and the error's text."""

    number: int
    kind: str
    call: str
    error: str = ""


@contextlib.contextmanager
def on(gpu: Gpu) -> Iterator[None]:
    """Makes programs for this GPU, as users do; Mosaic GPU refuses what its memory cannot hold."""
    from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit

    limit = artificial_shared_memory_limit(gpu.device.shared_memory)
    with fp.target(gpu.device.kind), limit:
        yield


def try_call(gpu: Gpu, seed: int, number: int) -> Outcome:
    """Lowers one call; must run within `on`."""
    call = random_call(seed, number)
    # Under x64 mods compare positions with captured int64, which a user's strict promotion refuses.
    promotion = "standard" if call.x64 else jax.config.jax_numpy_dtype_promotion
    try:
        with jax.enable_x64(call.x64), jax.numpy_dtype_promotion(promotion):
            call = _with_blocks(gpu, call, seed, number)
            traced = jax.jit(call.run(gpu.backend)).trace(*call.arguments)
            traced.lower(lowering_platforms=("cuda",))
    except fp.UnsupportedByBackend as error:
        return Outcome(number, "refused", str(call), str(error))
    except Exception as error:  # whatever stage it comes from, the user would see it
        said = f"{type(error).__name__}: {error}".strip()
        if isinstance(error, ValueError) and said.startswith("ValueError: blocks["):
            return Outcome(number, "refused", str(call), said)
        return Outcome(number, "failed", str(call), said + "\n" + traceback.format_exc(limit=-4))
    return Outcome(number, "lowered", str(call))


def _with_blocks(gpu: Gpu, call: RandomCall, seed: int, number: int) -> RandomCall:
    """Replaces the tiles of some calls of flash_attention by others that a user might try."""
    if call.function is not fp.flash_attention:
        return call
    wanted, others = call.arguments

    def ask(wanted, others):
        return dataclasses.replace(call, wanted=()).run(gpu.backend)(wanted, others)

    (asked,) = fp.explain(ask, wanted, others).calls
    chosen = _by_kernel(gpu.make().attention.plan(asked.problem))
    changed = random_blocks(seed, number, chosen)
    if changed is None:
        return call
    return dataclasses.replace(call, options=call.options | {"blocks": changed})


def _by_kernel(blocks) -> dict[str, Any]:
    """Returns tile sizes under their names in `blocks=`."""
    parts: dict[str, Any] = {"forward": blocks.forward}
    split = hasattr(blocks.backward, "dkv")
    alone = "paired" if isinstance(blocks.backward, PairedBlocks) else "fused"
    parts |= vars(blocks.backward) if split else {alone: blocks.backward}
    if scores := getattr(blocks, "scores", None):
        parts |= {"score_tiles": scores.tile, "score_lines": scores.lines}
    return {name: each for name, each in parts.items() if each is not None}


def attempt(gpu: Gpu, seed: int, number: int) -> list[Outcome]:
    """Lowers a call; prints a failure at once."""
    with on(gpu):
        found = try_call(gpu, seed, number)
    if found.kind == "failed":
        print(f"FAILED seed {seed} call {number}: {found.call}", flush=True)
        print(found.error, flush=True)
    return [found]


def summary(gpu: Gpu, started: float, outcomes: list[Outcome]) -> dict[str, Any]:
    """Returns the figures of a run: counts, frequent refusals, failures, seconds."""
    kinds = collections.Counter(each.kind for each in outcomes)
    refused = (x.error.split(": ", 1)[-1][:60] for x in outcomes if x.kind == "refused")
    return {
        "gpu": dataclasses.asdict(gpu),
        **{kind: kinds[kind] for kind in ("lowered", "refused", "failed")},
        "under_x64": sum(each.call.endswith("under x64") for each in outcomes),
        "most_refused": dict(collections.Counter(refused).most_common(5)),
        "failures": [dataclasses.asdict(each) for each in outcomes if each.kind == "failed"],
        "seconds": round(time.monotonic() - started),
    }


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = fuzzing.parser("lowering_fuzz", __doc__, os.cpu_count() or 1)
    parser.add_argument("--gpu", choices=GPUS, required=True, help="whose kernels are lowered")
    arguments = parser.parse_args()
    gpu, seed = GPUS[arguments.gpu], arguments.seed
    print(f"{arguments.gpu}: seed {seed}, calls from {arguments.first} on", flush=True)
    figures = functools.partial(summary, gpu, time.monotonic())
    found = fuzzing.run(functools.partial(attempt, gpu, seed), arguments, figures)
    print(json.dumps({k: v for k, v in found.items() if k != "failures"}, indent=2))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
