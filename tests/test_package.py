"""The package as it is built: version, extras, URLs, and the check of its contents."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
import tarfile
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

import flash_pallas as fp

from . import package_contents

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_version_is_the_newest_of_the_changelog():
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert fp.__version__ == newest and "version" in PROJECT["dynamic"]


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_each_cuda_has_an_extra_with_the_range_of_jax(cuda):
    (jax_range,) = (d.removeprefix("jax") for d in PROJECT["dependencies"] if d.startswith("jax>"))
    assert f"jax[cuda{cuda}]{jax_range}" in PROJECT["optional-dependencies"][f"cuda{cuda}"]


def test_compilers_that_miscompile_causal_kernels_are_excluded():
    # The wheel 12.9.86 has the ptxas of CUDA 12.9.1, where JAX's own kernels are right again.
    extras, groups = PROJECT["optional-dependencies"], PYPROJECT["dependency-groups"]
    for wanted in (extras["cuda12"], extras["hopper-cuda12"], groups["compile-cuda12"]):
        assert "nvidia-cuda-nvcc-cu12>=12.9.86" in wanted


def test_the_extra_for_hopper_has_one_jaxlib_and_its_plugins():
    for cuda, extra in (("13", "hopper"), ("12", "hopper-cuda12")):
        wanted = PROJECT["optional-dependencies"][extra]
        (jaxlib,) = (x.removeprefix("jaxlib==") for x in wanted if x.startswith("jaxlib"))
        assert tuple(map(int, jaxlib.split("."))) < (0, 12)
        plugin = f"jax-cuda{cuda}-plugin[with-cuda]=={jaxlib}"
        assert {plugin, f"jax-cuda{cuda}-pjrt=={jaxlib}"} <= set(wanted)


@pytest.fixture
def hook(monkeypatch):
    """Imports hatch_build.py; hatchling is only where packages are built."""
    interface = types.ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("repository", ["", "https://example.org/flash_pallas"])
def test_all_urls_come_from_one_constant(hook, monkeypatch, repository):
    monkeypatch.setattr(hook, "REPOSITORY", repository)
    metadata = {}
    hook.ProjectUrls().update(metadata)
    assert len(metadata["urls"]) == (4 if repository else 0)
    for url in metadata["urls"].values():
        assert url.startswith(repository)
        _, found, page = url.partition("/blob/main/")
        assert not found or (ROOT / page).is_file()


def _wheel(folder, names):
    path = folder / "flash_pallas-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, "x")
    return path


def _sdist(folder, names):
    path = folder / "flash_pallas-1.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            file.addfile(tarfile.TarInfo(f"flash_pallas-1/{name}"), io.BytesIO())
    return path


IN_WHEEL = package_contents.IN_BOTH | {"flash_pallas-1.dist-info/licenses/LICENSE"}
IN_SDIST = package_contents.IN_BOTH | package_contents.IN_SDIST


def test_whole_archives_have_no_faults(tmp_path, capsys):
    archives = [str(_wheel(tmp_path, IN_WHEEL)), str(_sdist(tmp_path, IN_SDIST))]
    assert package_contents.main(archives) == 0
    assert package_contents.main(archives[:1]) == 1
    assert "expected one wheel and one source" in capsys.readouterr().out
    assert {"flash_pallas/tuned/nvidia_h200.json", "flash_pallas/doctor.py"} < IN_WHEEL


@pytest.mark.parametrize(
    "lacking",
    ["flash_pallas/tuned/nvidia_h200.json", "flash_pallas/py.typed", "flash_pallas/api.py"],
)
def test_a_file_that_is_missing_is_found(lacking, tmp_path):
    for archive in (_wheel(tmp_path, IN_WHEEL - {lacking}), _sdist(tmp_path, IN_SDIST - {lacking})):
        (fault,) = package_contents.faults(archive)
        assert fault.endswith(f"lacks {lacking}")


@pytest.mark.parametrize("extra", ["tests/test_x.py", "benchmarks/run.py", "hatch_build.py"])
def test_a_wheel_has_the_package_alone(extra, tmp_path):
    (fault,) = package_contents.faults(_wheel(tmp_path, IN_WHEEL | {extra}))
    assert fault.endswith(f"has {extra}")


def test_what_was_left_by_a_run_is_found(tmp_path):
    name = "flash_pallas/__pycache__/api.pyc"
    (fault,) = package_contents.faults(_wheel(tmp_path, IN_WHEEL | {name}))
    assert name in fault
    assert list(package_contents.faults(_sdist(tmp_path, IN_SDIST | {name})))


def test_an_archive_that_is_too_large_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(package_contents, "LARGEST", {".whl": 10, ".gz": 10})
    (fault,) = package_contents.faults(_wheel(tmp_path, IN_WHEEL))
    assert "more than 10" in fault
