"""The examples run as scripts and write what they promise."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from flash_pallas.frontend import dispatch

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
TINY = {
    "steps": 3,
    "batch": 2,
    "seq-len": 16,
    "layers": 1,
    "d-model": 16,
    "heads": 2,
    "kv-heads": 1,
    "head-dim": 8,
    "max-bytes": 100_000,
    "sample-bytes": 20,
}
LONG = {name: x for name, x in TINY.items() if name != "sample-bytes"} | {"steps": 2, "seq-len": 64}


def run(script, *arguments, cwd):
    """Returns a script's output; examples import this checkout, and warnings are errors."""
    return finished(start(script, *arguments, cwd=cwd))


def start(script, *arguments, cwd):
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=cwd, **pipes)


def finished(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output


def train(tmp_path, *more):
    flags = [part for name, value in TINY.items() for part in (f"--{name}", value)]
    return run("train_transformer.py", *flags, "--out-dir", tmp_path / "out", *more, cwd=tmp_path)


def read_losses(tmp_path):
    with (tmp_path / "out" / "loss.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_quickstart(tmp_path):
    output = run("quickstart.py", cwd=tmp_path)
    assert "gradients [(2, 512, 8, 64), (2, 512, 2, 64), (2, 512, 2, 64)]" in output
    assert "runs on:" in output


@pytest.mark.thorough
def test_packed_documents(tmp_path):
    output = run("packed_documents.py", cwd=tmp_path)
    assert "12 documents in 6 rows of 256" in output
    # Two float32 computations of sums of order one, over at most 256 keys and 64 features.
    assert float(output.split()[-1]) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "decodes"),
    [
        ("train_transformer", False),
        ("train_long_context", False),
        ("generate", True),
        ("serve", True),
    ],
)
def test_the_backends_to_choose_from(script, decodes, tmp_path):
    process = start(f"{script}.py", "--backend", "cuda", cwd=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2
    wanted = ["auto", *dispatch.BACKENDS]
    if decodes:
        wanted.remove("cudnn")  # it has no decode
    choices = errors.splitlines()[-1].partition("choose from ")[2]
    assert choices.rstrip(")").replace("'", "").split(", ") == wanted


@pytest.mark.thorough
def test_cudnn_on_a_cpu_is_refused_with_a_way_out(tmp_path):
    process = start("train_transformer.py", "--attention", "cudnn", cwd=tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 2
    message = (
        "--attention cudnn needs an NVIDIA GPU and JAX runs on cpu here: take --attention flash"
    )
    assert message in errors


def test_training_writes_its_files(tmp_path):
    output = train(tmp_path, "--backend", "xla")
    assert "runs on: xla" in output
    assert "bits/byte on held-out files" in output
    rows = read_losses(tmp_path)
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    bits = np.array([[float(row["train_bits"]), float(row["validation_bits"])] for row in rows])
    assert np.all(bits > 0) and np.all(bits < 12)  # A uniform guess costs 8 bits.
    assert bits[-1, 1] < bits[0, 1]
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (tmp_path / "out" / "sample.txt").read_bytes()
    assert sample.startswith(b"def ") and len(sample) == len(b"def ") + TINY["sample-bytes"]


@pytest.mark.thorough
def test_long_documents_on_many_devices_and_in_two_processes(tmp_path):
    """Compares four devices of one process with a ring of two processes of one device each."""
    flags = [part for name, value in LONG.items() for part in (f"--{name}", value)]
    script = "train_long_context.py"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = [*flags, "--cpu-devices", 1, "--coordinator", f"localhost:{port}", "--processes", 2]
    both = [start(script, *together, "--process", i, cwd=tmp_path) for i in (0, 1)]
    first, second = map(finished, both)
    alone = run(script, *flags, cwd=tmp_path)
    assert "4 devices in 1 processes: {'data': 2, 'context': 2}" in alone
    assert "2 devices in 2 processes: {'data': 1, 'context': 2}" in first
    assert "bits/byte" not in second
    size, local = (
        int(x.replace(",", "")) for x in re.findall(r"([\d,]+) parameters, ([\d,]+)", alone)[0]
    )
    assert local == size / 4
    bits = lambda text: [float(x) for x in re.findall(r"([\d.]+) bits/byte", text)]
    # Printed to four digits, of which the last may be rounded either way.
    np.testing.assert_allclose(bits(first), bits(alone), rtol=0.0, atol=1.5e-4)
    assert all(0 < x < 12 for x in bits(alone))  # A uniform guess costs 8 bits.


@pytest.mark.thorough
def test_same_loss_as_with_attention_of_jax(tmp_path):
    losses = []
    for attention in ("flash", "xla-jax"):
        output = train(tmp_path, "--attention", attention, "--steps", 1)
        assert ("runs on:" in output) == (attention == "flash")
        losses.append(float(read_losses(tmp_path)[0]["train_bits"]))
    # Parameters and data are equal; only attention differs, whose sums have at most seq-len terms.
    eps = float(np.finfo(np.float32).eps)
    assert abs(losses[0] - losses[1]) <= TINY["seq-len"] * eps * losses[0]


@pytest.mark.thorough
def test_generation_goes_on_from_the_checkpoint(tmp_path):
    train(tmp_path)
    flags = ("--model-dir", "out", "--bytes", 5, "--prompts", "def f(", "x" * 20)
    output = run("generate.py", *flags, cwd=tmp_path)
    assert "--- def f(" in output and f"--- {'x' * 20}" in output
    assert "2 sequences, a cache with room for 128 bytes of each" in output
    assert output.count("bytes/s with") == 2


@pytest.mark.thorough
def test_generation_does_not_train_in_a_folder_that_was_named(tmp_path):
    process = start("generate.py", "--model-dir", "typo", cwd=tmp_path)
    _, errors = process.communicate()
    assert process.returncode and "--model-dir typo: there is no model in it" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_generation_without_training(tmp_path):
    flags = ("--random", 1, 16, 2, 1, 8, "--prompt-bytes", 300, "--bytes", 5, "--json", "said.json")
    output = run("generate.py", *flags, cwd=tmp_path)
    assert "1 sequences, a cache with room for 384 bytes of each" in output
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["random"] == [1, 16, 2, 1, 8] and said["prompts"] == [300]
    assert said["step"]["backend"] == "xla" and said["step"]["blocks"]["num_splits"] == 1
    assert list(said["bytes_per_second"]) == ["one range of keys", "split-KV"]


def test_plot_of_several_runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = "step,train_bits,validation_bits,tokens_per_second\n1,8.0,,0\n2,7.5,7.6,100\n"
        (tmp_path / name / "loss.csv").write_text(text)
    run("plot.py", "a/loss.csv", "b/loss.csv", "--out", "both.png", cwd=tmp_path)
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
