"""The wheel holds everything a run needs, and runs from any directory."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built without a network and without isolation."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("megarl-*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The wheel unpacked, which is all that installing a pure wheel without its dependencies does."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the unpacked wheel before anything installed, and the checkout nowhere on the path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_every_source_is_in_the_wheel_once(site):
    places = {
        "megarl": "megarl",
        "kernels/megarl_kernels": "megarl_kernels",
        "configs": "megarl/configs",
        "launch": "megarl/launch",
    }
    wanted = {
        f"{place}/{path.relative_to(ROOT / folder)}"
        for folder, place in places.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {
        str(p.relative_to(site))
        for p in site.rglob("*")
        if p.is_file() and ".dist-info" not in p.parts[len(site.parts)]
    }
    assert found == wanted
    assert any(p.startswith("megarl/configs/experiment/") for p in found)
    assert "megarl/configs/train.yaml" in found and "megarl/launch/environment.py" in found
    assert "megarl_kernels/logprob.py" in found


def test_metadata(site):
    (info,) = site.glob("megarl-*.dist-info")
    assert "megarl = megarl.cli:main" in (info / "entry_points.txt").read_text()
    metadata = (info / "METADATA").read_text()
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.12" in metadata
    assert list(info.rglob("LICENSE"))


def test_imports_come_from_the_wheel(site, tmp_path):
    code = "import megarl, megarl_kernels; print(megarl.__file__, megarl_kernels.__file__)"
    done = run(site, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(Path(path).is_relative_to(site) for path in done.stdout.split()), done.stdout


def test_prints_a_resolved_run_from_another_directory(site, tmp_path):
    done = run(site, tmp_path, "-m", "megarl", "train", "+experiment=smollm2_math", "--cfg", "job", "steps=3")
    assert done.returncode == 0, done.stderr
    assert "steps: 3" in done.stdout and "algo:" in done.stdout
    assert not list(tmp_path.iterdir())  # nothing is written by asking
