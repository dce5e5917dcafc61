"""The result of an evaluation: typed, as JSON, as a Markdown table and as a table for the terminal."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from megarl.algos.coverrl import Requests
from megarl.evaluation.estimate import Estimate
from megarl.evaluation.score import Scores
from megarl.settings import AnswersConfig, SamplingConfig

_COUNTS = ("tokens",)  # metrics that are no shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Who was examined."""

    model: str
    weights: str  # "as published", "step 40 of runs/...", "recorded, version 3"
    template: str  # which one wrote its prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One problem set's outcome. ``left_out`` problems were too long, ``too_long`` follow-up turns likewise."""

    name: str
    path: str
    problems: int
    left_out: int
    samples: int
    answers: AnswersConfig
    requests: Requests
    prompts: dict[str, str]  # view -> the wording around a problem, which stands as {}
    too_long: int
    scores: Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a result depends on stands beside it."""

    version: str  # of megarl
    subjects: dict[str, Subject]
    sampling: SamplingConfig | None  # None: recorded rollouts do not say
    seed: int
    revise: bool
    confidence: float
    resamples: int
    sets: tuple[SetResult, ...]

    def to_json(self) -> str:
        out = {
            "megarl": self.version,
            "subjects": {name: asdict(s) for name, s in self.subjects.items()},
            "sampling": self.sampling and self.sampling.model_dump(),
            "seed": self.seed,
            "verified_and_revised": self.revise,
            "interval": {"of": "percentile bootstrap over problems", "confidence": self.confidence}
            | {"resamples": self.resamples},
            "sets": {
                s.name: {
                    "path": s.path,
                    "problems": s.problems,
                    "left_out": s.left_out,
                    "samples": s.samples,
                    "answers": s.answers.model_dump(),
                    "prompts": s.prompts | (s.requests.model_dump() if self.revise else {}),
                    "follow_ups_too_long": s.too_long,
                    "scores": {
                        agent: {metric: asdict(found) for metric, found in metrics.items()}
                        for agent, metrics in s.scores.items()
                    },
                }
                for s in self.sets
            },
        }
        return json.dumps(out, indent=1, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """One table per set, and the facts below."""
        blocks = []
        for s in self.sets:
            header, rows = _grid(s)
            lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
            table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
            blocks.append(f"### {_title(s)}\n\n{table}")
        return "\n\n".join([*blocks, "\n".join(f"- {fact}" for fact in self.facts())]) + "\n"

    def tables(self) -> list[Table]:
        """One table per set for the terminal."""
        out = []
        for s in self.sets:
            header, rows = _grid(s)
            table = Table(title=_title(s))
            for i, title in enumerate(header):
                table.add_column(title, justify="left" if i == 0 else "right")
            for row in rows:
                table.add_row(*row)
            out.append(table)
        return out

    def facts(self) -> list[str]:
        """What the numbers depend on, one line each."""
        out = [
            f"{name}: {subject.model}, weights {subject.weights}, {subject.template}"
            for name, subject in self.subjects.items()
        ]
        templates = {subject.template for subject in self.subjects.values()}
        if len(templates) > 1:
            out.append("agents were asked in different templates: part of a difference between them is the template")
        if self.sampling:
            s = self.sampling
            out.append(
                f"temperature {s.temperature:g}, top-p {s.top_p:g}, top-k {s.top_k or 'off'}, at most {s.max_tokens} "
                f"tokens, seed {self.seed}"
            )
        if self.revise:
            rules = ", ".join(dict.fromkeys(s.answers.verdict for s in self.sets))
            out.append(
                "answers verified once, and revised once where called wrong; verdicts read by "
                f"answers.verdict={rules}, and without one the answer stands"
            )
        level = f"{self.confidence:.0%}"
        out.append(f"in brackets: {level} interval, {self.resamples} bootstrap resamples over problems")
        return out


def write_report(report: Report, folder: Path) -> None:
    """``results.json`` and ``results.md`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(report.to_markdown(), encoding="utf-8")
    partial = folder / "results.json.partial"  # its presence says that the results are complete
    partial.write_text(report.to_json(), encoding="utf-8")
    partial.replace(folder / "results.json")


def _title(s: SetResult) -> str:
    left_out = f", {s.left_out} left out as too long" if s.left_out else ""
    return f"{s.name}: {s.problems} problems x {s.samples} samples{left_out}"


def _grid(s: SetResult) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a column per agent, a row per metric."""
    metrics = list(dict.fromkeys(metric for found in s.scores.values() for metric in found))
    rows = [[metric, *(_cell(metric, found.get(metric)) for found in s.scores.values())] for metric in metrics]
    return ["%", *s.scores], rows


def _cell(metric: str, found: Estimate | None) -> str:
    if found is None:
        return "-"
    if metric in _COUNTS:
        return f"{found.value:.0f} [{found.low:.0f}, {found.high:.0f}]"
    return f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"
