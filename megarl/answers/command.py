"""``megarl answers judge|extract|vote IN.jsonl OUT.jsonl``: the readers and the vote that training uses, on files.

judge    {id, a, b} -> {id, equal, reason}; equal is null where the budget did not decide
extract  {id, text, task, options} -> {id, answer}; task: math (default), mcq, verdict or verdict_sentence
vote     {id, answers} -> {id, answer, count, parsed, total, tie, undecided, clusters}; a null answer does not vote;
         clusters lists the positions of equal answers, undecided the pairs of clusters that may be equal
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.answers.equal import judge
from megarl.answers.read import read_answer
from megarl.answers.vote import clusters, vote
from megarl.settings import AnswersConfig

Row = Mapping[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run one of the three on a file."""
    parser = argparse.ArgumentParser(
        prog="megarl answers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=sorted(_VERBS))
    parser.add_argument("source", type=Path, metavar="IN.jsonl")
    parser.add_argument("target", type=Path, metavar="OUT.jsonl")
    args = parser.parse_args(argv)
    if not args.source.is_file():
        raise ValueError(f"{args.source}: no such file")
    answer_row = _VERBS[args.verb]
    with args.source.open(encoding="utf-8") as source:
        lines = [(number, line) for number, line in enumerate(source, 1) if line.strip()]
    with args.target.open("w", encoding="utf-8") as target:
        for number, line in lines:
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("is no object")
                out = answer_row(row)
            except ValueError as error:
                raise ValueError(f"{args.source}:{number}: {error}") from error
            target.write(json.dumps({"id": row.get("id"), **out}) + "\n")
    return 0


def _judge(row: Row) -> Row:
    found = judge(_text(row, "a"), _text(row, "b"))
    return {"equal": found.outcome.value, "reason": found.reason}


def _extract(row: Row) -> Row:
    task = row.get("task") or "math"
    if task not in _TASKS:
        raise ValueError(f"task={task!r}: one of {', '.join(_TASKS)}")
    cfg = _TASKS[task]
    options = row.get("options")
    if task == "mcq" and options:
        cfg = AnswersConfig(style="letter", options="".join(options))
    return {"answer": read_answer(_text(row, "text"), cfg)}


def _vote(row: Row) -> Row:
    answers = row.get("answers")
    if not isinstance(answers, list) or not all(a is None or isinstance(a, str) for a in answers):
        raise ValueError(f"answers={answers!r:.80}: a list of strings and nulls")
    ballot = vote(answers)
    return {
        "answer": ballot.answer,
        "count": ballot.count,
        "parsed": ballot.parsed,
        "total": ballot.total,
        "tie": ballot.tie,
        "undecided": ballot.undecided,
        "clusters": clusters(answers)[0],
    }


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key}={value!r:.80}: a string")
    return value


# a math answer is in the last box; where there is none, in the explicit marks of other formats
_TASKS = {
    "math": AnswersConfig(fallback=("tag", "mark")),
    "mcq": AnswersConfig(style="letter"),
    "verdict": AnswersConfig(style="verdict_boxed"),
    "verdict_sentence": AnswersConfig(style="verdict_sentence"),
}
_VERBS: dict[str, Callable[[Row], Row]] = {"judge": _judge, "extract": _extract, "vote": _vote}
