"""Setup before jax is imported: the devices that it has, and jax as strict as it can be."""

from __future__ import annotations

import os
import sys

from . import digest, gpus, selection

# 1: each process sees one GPU. "several": all processes see all of them.
ON_GPU = os.environ.get("FLASH_PALLAS_TEST_GPU") in ("1", "several")
SEVERAL = os.environ.get("FLASH_PALLAS_TEST_GPU") == "several"

if ON_GPU and not SEVERAL:
    gpus.take(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))
if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Most of the tests' time is compilation, in programs that they start too. Ten of the slowest
    # take 0.74 of the time so, of which three run interpreted kernels and take as long as before.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # Interpreted kernels multiply small tiles in numpy, where threads of OpenBLAS spend more on
    # waiting for each other than they save: test_hopper_interpreted.py took 118 s of CPU time with
    # two of them, 86 with one. numpy reads this once, when it is imported.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
# XLA's CPU client sizes its pool of threads by this. The Mosaic GPU interpreter blocks one thread
# for each that it simulates and hangs on a machine of few cores. A cluster takes up to 12; with 16
# in all one such kernel once made no progress for a minute, and with 32 they are 5 % faster.
os.environ["NPROC"] = "32"
FLAGS = ["--xla_force_host_platform_device_count=8"]
if ON_GPU:
    FLAGS.append("--xla_gpu_autotune_level=0")  # tuning the oracle's products took 15 s a case
else:
    # For each loop the newer emitters of jaxlib 0.11 set up MLIR anew: a program of outputs and
    # gradients compiles in 0.25 s with them and in 0.07 with the older ones. What is emitted is the
    # same HLO with the same plan of memory. jaxlib 0.12 ignores the option.
    FLAGS.append("--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

# No test may depend on what was tuned on this machine.
os.environ["FLASH_PALLAS_CACHE_DIR"] = os.path.join(os.path.dirname(__file__), "no_such_folder")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Of random calls and of the choice of thorough cases; FLASH_PALLAS_SEED repeats another run's.
SEED = digest.seed()


# Everything: `make test-all`, or tests that are named. Otherwise what selection.py says.
EVERYTHING = os.environ.get("FLASH_PALLAS_TESTS") == "all"


# A file of tests that need not run again on a GPU, to which those that pass are added: all of them
# take longer than a shared GPU may be at hand.
PASSED = os.environ.get("FLASH_PALLAS_PASSED", "")
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_report_header():
    part = f"part {SEED % selection.PARTS + 1} of {selection.PARTS}"
    cases = "all" if EVERYTHING else f"those of `make test`, of thorough ones {part}"
    return f"random calls: FLASH_PALLAS_SEED={SEED}; cases: {cases}"


@pytest.fixture
def seed_of_sources() -> int:
    return SEED


def pytest_collection_modifyitems(config, items):
    """Leaves out tests that need GPUs where there are none, and `thorough` ones as selected."""
    if ON_GPU:
        items[:] = [item for item in items if SEVERAL or not item.get_closest_marker("gpus")]
        passed = gpus.passed_before(PASSED)
        items[:] = [item for item in items if item.nodeid not in passed]
        # Side by side, several kernels' tests of a case share its oracle, which is compiled once.
        items.sort(key=lambda item: item.callspec.id if hasattr(item, "callspec") else "")
        return
    named = any("::" in str(name) for name in config.args)
    always = {item.nodeid: of_mark(item) for item in items}
    if not named:
        wanted = selection.NAMED.union(
            *(selection.cases_of(nodeid, names or ()) for nodeid, names in always.items())
        )
        if lost := selection.missing(wanted, always):
            raise pytest.UsageError(f"a mutation or a mark names cases that do not exist: {lost}")

    def runs(item) -> bool:
        if item.get_closest_marker("gpu") or item.get_closest_marker("gpus"):
            return False
        return EVERYTHING or named or selection.runs(item.nodeid, always[item.nodeid], SEED)

    skipped = [item for item in items if not runs(item)]
    items[:] = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=skipped)


def of_mark(item) -> tuple[str, ...] | None:
    """Returns the cases that the mark `thorough` of a test names, None without the mark."""
    mark = item.get_closest_marker("thorough")
    return None if mark is None else tuple(mark.kwargs.get("always", ()))


def pytest_runtest_logreport(report):
    """Names a failure at once: a run on a GPU may be cut off before pytest says which it was."""
    if PASSED and report.passed and report.when == "call" and not IN_WORKER:
        gpus.note_passed(PASSED, report.nodeid)
    if report.failed:
        told = str(getattr(report.longrepr, "reprcrash", report.longrepr)).strip().splitlines()
        sys.stdout.write(f"\nFAILED {report.nodeid} ({report.when}): {(told or [''])[-1]}\n")
        sys.stdout.flush()


def pytest_runtest_teardown(item, nextitem):
    """Clears jax's compilation caches after each interpreted kernel and each file.

    A kernel leaves some 600 mappings of memory and Linux gives a process 65,530. A process that had
    run a hundred of them died in XLA's compiler, by a segmentation fault: for want of mappings, it
    is assumed, as nobody had counted them by then.
    """
    if item.get_closest_marker("interpret") or nextitem is None or nextitem.fspath != item.fspath:
        jax.clear_caches()


@pytest.fixture
def devices():
    """Four of the devices that XLA simulates on a CPU."""
    return cpu_devices()[:4]


@pytest.fixture
def optimized(monkeypatch):
    """Compilation with all optimizations, for tests of what a compiler makes of a program."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", not ON_GPU)


@pytest.fixture
def eight_devices():
    """All devices that XLA simulates on a CPU."""
    return cpu_devices()


def cpu_devices():
    found = jax.devices("cpu")
    assert len(found) == 8, "XLA_FLAGS was set after jax started"
    return found
