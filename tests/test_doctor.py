"""`python -m flash_pallas doctor`: what it finds wrong, what it prints, its exit status."""

from __future__ import annotations

import json
import subprocess
import types
from pathlib import Path

import jax
import pytest

import flash_pallas as fp
from flash_pallas import __main__, conformance, devices, doctor

VERSIONS = {"python": "3.12", "jax": "0.11.2", "jaxlib": "0.11.2"}
PLUGIN = {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"}
PLUGIN_12 = {"jax-cuda12-plugin": "0.11.2", "jax-cuda12-pjrt": "0.11.2"}
H100 = {"name": "NVIDIA H100", "driver_version": "580.65.06", "compute_cap": "9.0"}
OLD = {**H100, "driver_version": "550.54.14"}


class Device:
    """A device as JAX shows it."""

    def __init__(self, platform="gpu"):
        self.platform, self.device_kind = platform, "NVIDIA H100"


def wrong(versions, gpus, monkeypatch, platform="gpu"):
    """Returns what is wrong, by name."""
    monkeypatch.setattr(jax, "devices", lambda: [Device(platform)])
    return {x.name: x.detail for x in doctor.installed(versions, gpus) if not x.ok}


def test_a_machine_where_all_is_well(monkeypatch):
    assert not wrong(VERSIONS, [], monkeypatch, "cpu")
    assert not wrong(VERSIONS | PLUGIN, [H100], monkeypatch)
    assert not wrong(VERSIONS | PLUGIN_12, [OLD], monkeypatch)


def test_parts_of_another_version(monkeypatch):
    found = wrong({**VERSIONS, **PLUGIN, "jax-cuda13-pjrt": "0.11.1"}, [H100], monkeypatch)
    assert found == {
        "versions": "jaxlib is 0.11.2, but jax-cuda13-pjrt 0.11.1: install all of one version"
    }
    # The extra `hopper`: jax takes an older jaxlib, and its plugins are those of jaxlib.
    assert not wrong({**VERSIONS, **PLUGIN, "jax": "0.12.0.1"}, [H100], monkeypatch)
    assert set(wrong(VERSIONS | PLUGIN | PLUGIN_12, [H100], monkeypatch)) == {"CUDA"}


def test_a_gpu_that_jax_does_not_use(monkeypatch):
    found = wrong(VERSIONS, [H100], monkeypatch, "cpu")
    assert found["device"] == (
        "NVIDIA H100, but JAX runs on the CPU: pip install 'flash_pallas[hopper]'"
    )
    assert found.keys() == {"device"}
    for capability, extra in (("9.0", "hopper-cuda12"), ("8.0", "cuda12")):
        gpu = OLD | {"compute_cap": capability}
        assert f"flash_pallas[{extra}]" in wrong(VERSIONS, [gpu], monkeypatch, "cpu")["device"]
    assert "warnings" in wrong(VERSIONS | PLUGIN, [H100], monkeypatch, "cpu")["device"]


def test_a_driver_that_is_too_old(monkeypatch):
    found = wrong(VERSIONS | PLUGIN, [OLD], monkeypatch)
    assert found == {
        "driver": "550.54.14 for jax-cuda13-plugin, which is too old: it needs 580 or newer"
    }


@pytest.mark.parametrize(("version", "told"), [("0.11.2", "fastest"), ("0.12.0.1", "jaxlib<0.12")])
def test_the_form_of_the_hopper_kernels_is_told(version, told, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    found = dict.fromkeys(("jax", "jaxlib", *PLUGIN), version)
    (hopper,) = (x for x in doctor.installed(found, [H100]) if x.name == "jaxlib for Hopper")
    assert hopper.ok and told in hopper.detail


def test_the_driver_is_asked(monkeypatch):
    told = "NVIDIA H100, 580.65.06, 9.0\nNVIDIA H100, 580.65.06, 9.0\n"
    answer = subprocess.CompletedProcess([], 0, stdout=told)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert doctor.driver() == [H100, H100]

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert doctor.driver() == []


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(doctor, "SMOKE", ("window",))
    monkeypatch.setattr(doctor, "driver", list)


@pytest.mark.usefixtures("one_case")
def test_the_report(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", "doctor", "--json"])
    assert __main__.main() == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["versions"]["flash_pallas"] == fp.__version__
    assert set(report["runs"].values()) == {"xla"} and report["timing"]["ms"] > 0.0
    assert "device time" in report["timing"]["measured"] and report["timing"]["published"] is None
    assert [x["name"] for x in report["findings"]][-1] == "smoke test, window"


@pytest.mark.usefixtures("one_case")
def test_the_report_as_text(monkeypatch, capsys):
    right = conformance.Verdict("window", conformance.RIGHT, "", 1e-7, 1e-6)
    monkeypatch.setattr(conformance, "check", lambda *_: iter([right]))
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert f"flash_pallas {fp.__version__}, jax {jax.__version__}" in told
    assert "  ok     smoke test, window: right, error 1e-07, allowed 1e-06\n" in told
    assert "decoding: xla" in told and told.rstrip().endswith("All is well.")


@pytest.mark.usefixtures("one_case")
def test_a_wrong_result_is_an_exit_status(monkeypatch, capsys):
    wrong = conformance.Verdict("window", conformance.WRONG, "dk", 0.5, 1e-6)
    monkeypatch.setattr(conformance, "check", lambda *_: iter([wrong]))
    assert doctor.main([]) == 1
    told = capsys.readouterr().out
    assert "  WRONG  smoke test, window: wrong, error 0.5, allowed 1e-06 dk" in told
    assert told.rstrip().endswith("checks are wrong")


@pytest.mark.usefixtures("one_case")
def test_no_device_at_all(monkeypatch, capsys):
    def none():
        raise RuntimeError("Unable to initialize backend 'cuda'\nand more")

    monkeypatch.setattr(jax, "devices", none)
    assert doctor.main([]) == 1
    assert "JAX has none: Unable to initialize backend 'cuda'\n" in capsys.readouterr().out


CELL = {
    **{"batch": 4, "q_len": 4096, "q_heads": 16, "kv_heads": 16, "head_dim": 128, "causal": True},
    **{"direction": "forward", "provider": "flash_pallas"},
}
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def test_published_speeds_are_those_of_the_results():
    found = {}
    for path in (RESULTS / "h200.json", RESULTS / "h100.json"):
        results = json.loads(path.read_text())
        (row,) = (x for x in results["rows"] if x.items() >= CELL.items())
        found[results["device"]] = round(row["tflops"])
    published = {x.kind: x.tflops for x in devices.DEVICES.values() if x.tflops is not None}
    assert published == found


def test_the_time_of_a_call_has_nothing_of_the_host(monkeypatch):
    """Checks that neither what a program costs besides its calls counts, nor an outlier."""
    late = [9.0, 0.0, 5.0, 0.0, 3.0, 0.0, 0.0, 1.0]
    ends = [7.0 + 0.25 * calls + (calls == 2) * each for each in late for calls in (1, 2)]
    clock = iter([x for end in ends for x in (0.0, end)])
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    assert doctor.timing()["ms"] == 250.0


def test_the_published_speed_is_told(monkeypatch):
    h200 = types.SimpleNamespace(device_kind="NVIDIA H200", platform="cpu")
    monkeypatch.setattr(jax, "devices", lambda: [h200])
    assert doctor.timing()["published"] == 643


def test_smoke_cases_exist():
    assert set(doctor.SMOKE) <= {case.name for case in conformance.CASES}


def test_an_unknown_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", "docter"])
    assert __main__.main() == 2
    assert "usage: python -m flash_pallas {doctor,conformance}" in capsys.readouterr().err
