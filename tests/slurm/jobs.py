"""Runs on an emulated Slurm cluster: written down, submitted by `megarl launch slurm`, waited for."""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.slurm.emulated import CONTROLLER, Slurm

SITE = {  # what an emulated node is
    "gpu_request": "none",
    "partition": "low",
    "time": "20",
    "warn_s": 300,
    "object_store_mib": 128,
    "form_timeout_s": 120,
    "beat_timeout_s": 30,
    "python": sys.executable,
}
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")


@dataclass(frozen=True)
class Launched:
    """A job of ours."""

    slurm: Slurm
    number: str
    name: str

    @property
    def run_dir(self) -> Path:
        return self.slurm.shared / "runs" / "tiny" / self.name

    @property
    def folder(self) -> Path:
        """Logs of all tries."""
        return self.slurm.shared / "runs" / "launch" / "tiny" / self.name

    @property
    def said(self) -> str:
        file = self.slurm.shared / f"megarl-{self.number}.out"
        return file.read_text() if file.is_file() else ""

    def rows(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def until(self, true, what: str, seconds: float = 240) -> None:
        """Wait; what the job said is the error's text."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.said}"
            time.sleep(0.2)

    def end(self, seconds: float = 240) -> str:
        """Slurm's word for how it ended."""
        self.until(lambda: self.slurm.state_of(self.number) in OVER, "the job's end", seconds)
        return self.slurm.state_of(self.number)

    def exit_code(self) -> int:
        out = self.slurm.on(CONTROLLER, "scontrol", "show", "job", self.number)
        found = re.search(r"ExitCode=(\d+):", out)
        assert found is not None, out
        return int(found[1])


def write_experiment(slurm: Slurm, raw: dict, **site: object) -> None:
    """``+experiment=tiny`` of the folder conf, and the site's file, with changes."""
    folder = slurm.shared / "conf" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    body = {key: value for key, value in raw.items() if key != "experiment"}
    (folder / "tiny.yaml").write_text("# @package _global_\n" + yaml.safe_dump(body))
    (slurm.shared / "site.yaml").write_text(yaml.safe_dump(SITE | site))


def launch(slurm: Slurm, name: str, *words: str) -> Launched:
    """Submit; AssertionError with what was said where nothing was."""
    out = try_launch(slurm, name, *words)
    found = re.match(r"job (\d+): ", out)
    assert found is not None, out
    return Launched(slurm, found[1], name)


def try_launch(slurm: Slurm, name: str, *words: str) -> str:
    """What `megarl launch slurm` says."""
    own = ["+experiment=tiny", f"name={name}", "--config-dir", "conf", "--site", "site.yaml"]
    return slurm.on(
        CONTROLLER, sys.executable, "-m", "megarl", "launch", "slurm", *own, *words, check=False, timeout=300
    )
