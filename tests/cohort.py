"""A small cohort to train in tests: two tiny random models of different families, and sums as prompts."""

import json
import subprocess
import time
from pathlib import Path

from megarl.agents import Agent
from megarl.backends.protocols import Engine, Policy
from megarl.chat import Chat
from megarl.deck import Seat
from megarl.settings import AgentConfig, LossConfig, SamplingConfig
from tests import tiny


def write_problems(path: Path, count: int = 24) -> Path:
    """Sums of two digits, with answers."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "id": f"{a}+{b}"} for a in range(1, 9) for b in range(1, 9)]
    path.write_text("\n".join(json.dumps(row) for row in rows[:count]) + "\n")
    return path


def raw(folder: Path, **changes) -> dict:
    """Configuration of a run of reference backends in float32; dotted keys change or (None) remove a value.

    Models and problems are made in ``folder`` once. The models emit noise, so answers are whatever digits occur.
    """
    models = {name: folder / f"model-{name}" for name in ("ann", "bob")}
    for (name, model), family in zip(models.items(), ("qwen2", "llama"), strict=True):
        if not model.is_dir():
            # heads of 32: the least that vLLM attends with on CPU
            tiny.write(model, family, seed=ord(name[0]), scale=1.0, hidden_size=128, num_hidden_layers=2)
    problems = folder / "problems.jsonl"
    if not problems.is_file():
        write_problems(problems)
    agent = {
        "backend": "reference",
        "dtype": "float32",
        "engine": {"backend": "reference"},
        "optimizer": {"lr": 1e-3, "schedule": {"decay": "cosine", "warmup": 1}},
    }
    run = {
        "experiment": "test",
        "output": str(folder / "runs"),
        "seed": 7,
        "steps": 4,
        "algo": {"name": "corl", "ring": ["ann", "bob"]},
        "data": {"path": str(problems), "gold": "answer", "id": "id", "max_prompt_tokens": 32},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 8, "tokens_per_microbatch": 128},
        "sampling": {"max_tokens": 6},
        "answers": {"style": "last-number", "truncated": "read"},
        "agents": {name: {"model": str(model), **json.loads(json.dumps(agent))} for name, model in models.items()},
        "checkpoint": {"every_steps": 2},
        "cluster": {"gpus_per_node": 8},
    }
    return changed(run, changes)


def agent(name: str, policy: Policy | None, engine: Engine | None, chat: Chat | None = None, **changes) -> Agent:
    """An agent of parts that are there already."""
    whole = {
        "name": name,
        "config": AgentConfig(model=f"none/{name}"),
        "chat": chat,
        "policy": policy,
        "engine": engine,
        "sampling": SamplingConfig(),
        "seat": Seat("original", 2),
        "seats": {name: Seat("original", 2)},
        "max_prompt_tokens": 40,
        "loss": LossConfig(),
        "device": "cpu",
        "bucket_bytes": 1 << 20,
    }
    return Agent(**{**whole, **changes})


def changed(run: dict, changes: dict) -> dict:
    """The run with values set, or (None) removed, at dotted keys."""
    for path, value in changes.items():
        section = run
        *parents, last = path.split(".")
        for part in parents:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return run


def comparable(rows: list[dict]) -> list[dict]:
    """Metric rows without what depends on the clock."""
    return [{key: value for key, value in row.items() if "/time/" not in key} for row in rows]


def wait_for_rows(file: Path, count: int, process: subprocess.Popen) -> None:
    """Until a run has logged so many steps, or has ended."""
    deadline = time.monotonic() + 400
    while process.poll() is None and time.monotonic() < deadline:
        if file.is_file() and len(file.read_text().splitlines()) >= count:
            return
        time.sleep(0.002)
