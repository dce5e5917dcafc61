"""The set-up script: pure parts, and its refusals."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "environment.py"
CACHE = {key: os.environ[key] for key in ("MEGARL_CACHE", "XDG_CACHE_HOME") if key in os.environ}


def call(*args, **env):
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, env=env, timeout=60)


def test_interpreter_path_is_keyed_by_the_lock(tmp_path):
    cpu, gpu = (call("python", kind, MEGARL_CACHE=str(tmp_path)).stdout.strip() for kind in ("cpu", "gpu"))
    assert cpu.startswith(str(tmp_path / "venv-cpu-"))
    assert gpu.startswith(str(tmp_path / "venv-gpu-"))
    assert cpu.endswith("/bin/python")


def test_missing_python_is_a_clear_message(tmp_path):
    # a Python that is not 3.12 plays the one that runs the script; nothing else is to be found
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 3 11\n")
    fake.chmod(0o755)
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); sys.executable = {str(fake)!r}\n"
        "import environment; environment.find_python()"
    )
    env = {"PATH": "/nonexistent", "HOME": str(tmp_path), "PYTHON": str(fake)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert "Python 3.12 was not found" in done.stderr
    assert "pyenv install 3.12" in done.stderr


def test_unknown_kind_is_refused(tmp_path):
    done = call("setup", "tpu", MEGARL_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "known: cpu, gpu" in done.stderr


def test_locks_name_every_dependency_once():
    for kind in ("cpu", "gpu"):
        lines = (ROOT / "launch" / f"{kind}.lock").read_text().splitlines()
        names = [line.split("==")[0].lower() for line in lines if line and not line.startswith("#")]
        assert len(names) == len(set(names))
        assert {"torch", "megatron-core", "megatron-bridge", "ray", "transformers"} <= set(names)
        assert "apex" not in names  # PyPI's apex is an unrelated package
        assert all("==" in line for line in lines if line and not line.startswith("#"))


def test_every_checkout_runs_its_own_code(tmp_path):
    """Two checkouts share the packages; neither ever imports the other's modules."""
    ours = call("python", "cpu", HOME=os.environ.get("HOME", ""), **CACHE).stdout.strip()
    if Path(sys.executable) != Path(ours):
        pytest.skip("needs the environment that make setup builds")
    other = tmp_path / "other"
    for name in ("launch", "configs", "megarl", "kernels"):
        shutil.copytree(ROOT / name, other / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, other / name)
    script = [sys.executable, other / "launch" / "environment.py"]
    subprocess.run([*script, "setup", "cpu"], check=True, capture_output=True, timeout=60)
    theirs = subprocess.run([*script, "python", "cpu"], check=True, capture_output=True, text=True).stdout.strip()
    assert theirs != ours
    code = "import megarl, megarl_kernels, numpy; print(megarl.__file__, megarl_kernels.__file__)"
    for python, root in ((theirs, other), (ours, ROOT)):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={})
        assert done.stdout.split() == [
            str(root / "megarl/__init__.py"),
            str(root / "kernels/megarl_kernels/__init__.py"),
        ]
    shutil.rmtree(other)
    subprocess.run([sys.executable, SCRIPT, "setup", "cpu"], check=True, capture_output=True, timeout=60)
    assert not Path(theirs).exists()  # a deleted checkout leaves nothing behind


def test_packages_are_compiled_where_python_may_not(tmp_path):
    """Else every process compiles again, half of a rank's start; a file that is no Python 3 is passed by."""
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (site / "sound.py").write_text("x = 1\n")
    (site / "template.py").write_text("print {{ name }}\n")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"import environment, pathlib; environment.compile_packages(pathlib.Path({str(tmp_path)!r}))"
    )
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=env, timeout=60)
    assert [file.name.split(".")[0] for file in (site / "__pycache__").glob("*.pyc")] == ["sound"]
    assert (tmp_path / "COMPILED").is_file()
