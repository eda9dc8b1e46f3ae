"""A first call compiles kernels ahead of their program, and the same ones in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import constraints
from jax.experimental.mosaic.gpu import core as mosaic_gpu

from flash_pallas.backends.gpu import ahead, jax_compat
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.core.problem import AttentionSpec, Cotangents, Operands, describe

BACKEND = HopperBackend(capability="9.0", num_sms=132)


def lower(gradient=False):
    """Lowers a forward, or a gradient, for a GPU; returns the text of the program."""
    q = jax.ShapeDtypeStruct((1, 512, 1, 64), jnp.bfloat16)
    operands, spec = Operands(q, q, q, None), AttentionSpec(scale=1.0)
    blocks = BACKEND.attention.plan(describe(operands, spec))

    def run(o):
        found = BACKEND.attention.run(spec, blocks, o)
        if not gradient:
            return found
        given = Cotangents(found.lse_log2, o.q, found.lse_log2)
        return found, BACKEND.vjp.run(spec, blocks, o, given, frozenset("qkv"))

    return jax.jit(run).trace(operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def known(monkeypatch):
    """A function that returns JAX's kernels by digest, none at first."""
    monkeypatch.setattr(mosaic_gpu, jax_compat.KERNELS, {})
    monkeypatch.setattr(ahead, "_thread", threading.local())
    monkeypatch.setenv(ahead.VARIABLE, "1")
    return lambda: getattr(mosaic_gpu, jax_compat.KERNELS)


class Recorder:
    """A pool of no threads that notes what it is given."""

    def __init__(self):
        self.given = []

    def submit(self, function, *arguments):
        self.given.append((function, *arguments))


def watch_on_gpu(monkeypatch):
    with monkeypatch.context() as there:
        there.setattr(jax, "default_backend", lambda: "gpu")
        ahead.watch()


def compiled_ahead(recorder, monkeypatch) -> list[str]:
    """Runs what a recorder was given; returns the digests of the kernels that it compiles."""
    found = []
    monkeypatch.setattr(ahead, "compiled", lambda digest, _: found.append(digest))
    for function, *arguments in recorder.given:
        function(*arguments)
    return found


@pytest.fixture
def recorder(known, monkeypatch):
    """A recorder of what JAX's kernels are given to, watched as on a GPU."""
    recorder = Recorder()
    monkeypatch.setattr(ahead, "_threads", lambda: recorder)
    watch_on_gpu(monkeypatch)
    return recorder


def test_kernels_of_a_gradient_are_compiled_ahead_once(known, recorder, monkeypatch):
    watch_on_gpu(monkeypatch)
    lower(gradient=True)
    first = list(known())
    lower(gradient=True)
    assert list(known()) == first == compiled_ahead(recorder, monkeypatch) and len(first) > 1
    assert all(hashlib.sha256(known()[digest]).digest() == digest for digest in known())
    known()[b"digest"] = b"a kernel of another package"
    assert len(recorder.given) == len(known()) - 1


def test_the_only_kernel_of_a_program_is_left_to_it(known, recorder, monkeypatch):
    """Checks that no thread compiles it at the same time, unless the program goes on."""
    lower()
    assert len(known()) == 1 and compiled_ahead(recorder, monkeypatch) == []
    recorder.given.clear()
    known().clear()

    monkeypatch.setattr(ahead, "LOWERED", "an event that this jax does not have")
    lower()
    assert len(compiled_ahead(recorder, monkeypatch)) == 1


@pytest.mark.parametrize(
    ("given", "cores", "watched"),
    [("0", 32, False), ("", 3, False), ("", 4, True), ("1", 1, True)],
)
def test_where_kernels_are_compiled_ahead(known, given, cores, watched, monkeypatch):
    lower()
    ahead.watch()  # there is no GPU
    assert type(known()) is dict and len(known()) == 1
    monkeypatch.setenv(ahead.VARIABLE, given)
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda _: set(range(cores)))
    watch_on_gpu(monkeypatch)
    assert type(known()) is (ahead.Kernels if watched else dict) and len(known()) == 1


def test_another_value_of_the_variable_is_refused(known, monkeypatch):
    monkeypatch.setenv(ahead.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"FLASH_PALLAS_COMPILE_AHEAD is 'yes'; set it to 1"):
        watch_on_gpu(monkeypatch)


def test_what_fails_ahead_is_left_to_the_program(known, monkeypatch, caplog):
    watch_on_gpu(monkeypatch)
    threads = ahead._threads()
    with caplog.at_level("DEBUG", "flash_pallas"):
        known()[b"digest"] = ahead.OURS  # there is no such custom call on a CPU
        ahead.wait()
    assert "was not compiled ahead" in caplog.text
    monkeypatch.setattr(ahead, "_threads", lambda: threads)  # which take nothing any more
    known()[b"other"] = ahead.OURS
    assert len(known()) == 2


def test_equal_variables_are_found_in_order_of_appearance():
    of = constraints.Variable
    equal = lambda left, right: constraints.Equals(left, right)
    other = constraints.Relayout(of("a"), of("z"), 32, strict=False)
    pairs = [("d", "c"), ("a", "b"), ("c", "a"), ("y", "x"), ("b", "d")]
    system = constraints.ConstraintSystem(
        constraints=[other, *(equal(of(left), of(right)) for left, right in pairs)]
    )
    found = jax_compat.equal_variables(system)
    keys = {v.key: "".join(o.key for o in others) for v, others in found.items()}
    assert keys == {"d": "cab", "c": "dab", "a": "dcb", "b": "dca", "y": "x", "x": "y"}


@pytest.mark.skipif(not jax_compat.NEEDED, reason="jax 0.12 sorts without printing")
def test_jax_0_11_is_repaired_where_it_can_be(known, monkeypatch):
    assert hasattr(constraints, jax_compat.SORTING)  # else nothing would be faster
    monkeypatch.setattr(constraints, jax_compat.SORTING, None)
    lower()
    assert getattr(constraints, jax_compat.SORTING) is jax_compat.equal_variables
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    kernel = lambda: None
    assert jax_compat.repaired(kernel) is kernel  # whose files have numbers


def printed(program, seed, **variables):
    """Runs a program in a process of its own; returns what it prints."""
    variables |= {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, seed]
    return subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, check=True, text=True
    ).stdout


PROGRAM = """
import hashlib, sys, jax, jax.numpy as jnp
from flash_pallas import flash_attention
from flash_pallas.backends.hopper import HopperBackend
from flash_pallas.frontend import dispatch
dispatch.BACKENDS["hopper"] = HopperBackend(capability="9.0", num_sms=132)
x = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
attend = lambda q, k, v: flash_attention(q, k, v, causal=True, backend="hopper")
if sys.argv[1] == "1":  # other kernels before
    y = jax.ShapeDtypeStruct((1, 512, 1, 64), jnp.bfloat16)
    jax.jit(attend).trace(y, y, y).lower(lowering_platforms=("cuda",))
loss = lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum()
run = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",))
text = run.as_text()
print(text.count("mosaic_gpu_v2"), len(text), hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.thorough
def test_processes_lower_the_same_program():
    """Checks what JAX's persistent cache needs.

    No address is in a program, no order of a set, no number of what a process has lowered before.
    """
    (only,) = {printed(PROGRAM, seed) for seed in "01"}
    # Forward, fused backward, and that of far rows; without a producer zeros in place of these.
    assert int(only.split()[0]) == 3


CACHED = """
import collections, jax
from flash_pallas import flash_attention
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
x = jax.random.normal(jax.random.key(0), (1, 24, 2, 40))
events.clear()
jax.grad(lambda x: flash_attention(x, x, x, causal=True).sum())(x).block_until_ready()
print(events["cache_hits"] > 0, events["cache_misses"])
"""


def test_the_second_process_finds_programs_in_the_persistent_cache(tmp_path):
    """Checks what docs/first-call.md says of the variable."""
    variables = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    variables |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    variables |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
    hit, missed = printed(CACHED, "0", **variables).split()
    assert hit == "False" and int(missed) > 0
    assert printed(CACHED, "1", **variables).split() == ["True", "0"]
