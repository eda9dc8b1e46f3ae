"""One case of every kernel, for compute-sanitizer: `make sanitize-gpu`.

    compute-sanitizer --tool memcheck python -m tests.sanitize

Runs and checks the numbers; what memcheck or racecheck say of the kernels is theirs to print.
"""

from __future__ import annotations

import argparse
import sys
from unittest import mock

import jax

from flash_pallas import dispatch
from flash_pallas.backends.hopper import far_rows
from flash_pallas.backends.mosaic import launch

from . import checks, gpu_fuzz
from .cases import Case
from .hopper_cases import ON_DEVICE
from .hopper_decode_cases import STEPS

NAMES = (
    "d64_causal",
    "d128",
    "d64_split",
    "d256_causal",
    "bias_1NTS",
    "bias_1N1S",
    "bias_shared_32",
    "alibi",
    "everything",
    "packed_causal",
    "float32_bias",
)
DECODES = ("splits", "two_tiles_of_rows", "pages_of_64", "int8", "int8_as_rows")

HOPPER = """forward forward_far backward_fused backward_fused_far zeros backward_dkv backward_dq
backward_scores_tile backward_scores_rows backward_scores_columns decode decode_combine"""
PORTABLE = """forward fused narrow dkv dk dv dq scores_tile scores_rows scores_columns decode"""
KERNELS = {f"flash_pallas_{name}" for name in HOPPER.split()}
KERNELS |= {f"flash_pallas_portable_{name}" for name in PORTABLE.split()}

# Head dims of which dK and dV have a kernel each, where nothing is added up atomically.
APART = Case("apart", T=70, S=90, H=256, dtype="bfloat16", deterministic=True)
# Rows that are left to launches of their own.
FAR = Case("far", T=130, S=130, B=4, N=32, K=32, magnitude=(0, 15, 0, 9), dtype="bfloat16")


def _backend(kernel: str) -> str:
    return "portable" if "_portable_" in kernel else "hopper"


def main() -> int:
    """Runs everything; 1 if a kernel was never launched."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize", description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["hopper", "portable"])
    backends = parser.parse_args().backend
    launched: set[str] = set()
    kernel = launch.plgpu.kernel

    def spy(*arguments, kernel_name, **options):
        launched.add(kernel_name)
        return kernel(*arguments, kernel_name=kernel_name, **options)

    several = mock.patch.object(far_rows, "ENOUGH", 1)
    with mock.patch.object(launch.plgpu, "kernel", spy), several:
        cases = [case for case in ON_DEVICE if case.name in NAMES]
        for backend in backends:
            for case in (*cases, APART, FAR):
                if dispatch.BACKENDS[backend].unsupported(case.problem) is None:
                    checks.assert_matches_oracle(checks.bind(backend), case, kernels=True)
            for step in STEPS:
                if step.name in DECODES:
                    gpu_fuzz.decodes(backend, step)
    wanted = {name for name in KERNELS if _backend(name) in backends}
    missing = sorted(wanted - launched)
    print(f"{len(launched)} kernels on {jax.devices()[0].device_kind}; never launched: {missing}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
