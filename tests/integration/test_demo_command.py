"""The demo command from end to end, on reference backends and with a warm start too short to learn from."""

import json

from megarl.demo import command
from megarl.demo.warmstart import Recipe

SMALL = [
    *(f"agents.{name}.{part}=reference" for name in ("qwen", "llama") for part in ("backend", "engine.backend")),
    "agents.qwen.layout.tp=1",
    "agents.llama.layout.pp=1",
    "steps=2",
    "batch.prompts_per_step=4",
    "batch.samples_per_prompt=4",
    "evaluation.every_steps=1",
    "evaluation.data.limit=8",
    "evaluation.samples_per_prompt=1",
]


def test_three_runs_a_table_and_a_picture_and_all_of_it_again(tmp_path):
    args = ["--output", str(tmp_path), *SMALL]
    command.run(args, Recipe(steps=2, batch=8))
    folder = tmp_path / "demo"
    assert {path.name for path in folder.iterdir()} == {
        "models", "problems", "ttrl", "corl", "rlvr", "summary.json", "curves.png",
    }  # fmt: skip
    first = json.loads((folder / "summary.json").read_text())
    assert list(first) == ["start", "ttrl", "corl", "rlvr", "layout", "seconds"]
    assert all(set(first[part]) == {"qwen", "llama"} for part in first if part != "seconds")
    for method in command.METHODS:
        rows = [json.loads(line) for line in (folder / method / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "agent/qwen/eval/accuracy" in row] == [0, 1, 2]

    made = (folder / "models/manifest.json").stat().st_mtime_ns
    command.run(args, Recipe(steps=2, batch=8))
    second = json.loads((folder / "summary.json").read_text())
    assert {**second, "seconds": 0} == {**first, "seconds": 0}
    assert (folder / "models/manifest.json").stat().st_mtime_ns == made
