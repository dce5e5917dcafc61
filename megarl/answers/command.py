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
    if args.target.is_dir() or not args.target.parent.is_dir():
        raise ValueError(f"{args.target}: no place for a file; name one in a folder that exists")
    answer_row = _VERBS[args.verb]
    # beside the target until it is complete: a bad row, a full disk or Ctrl-C leaves no half of a file
    partial = args.target.with_name(args.target.name + ".partial")
    try:
        with args.source.open("rb") as source, partial.open("w", encoding="utf-8") as out:
            for number, line in enumerate(source, 1):
                if line.strip():
                    out.write(_answered(line, answer_row, f"{args.source}:{number}") + "\n")
        partial.replace(args.target)
    finally:
        partial.unlink(missing_ok=True)
    return 0


def _answered(line: bytes, answer_row: Callable[[Row], Row], where: str) -> str:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("is no object")
        return json.dumps({"id": row.get("id"), **answer_row(row)})
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is no UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise ValueError(f"{where}: brackets nested too deeply for a row") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _judge(row: Row) -> Row:
    found = judge(_text(row, "a"), _text(row, "b"))
    return {"equal": found.outcome.value, "reason": found.reason}


def _extract(row: Row) -> Row:
    task = row.get("task") or "math"
    if not isinstance(task, str) or task not in _TASKS:
        raise ValueError(f"task={task!r}: one of {', '.join(_TASKS)}")
    cfg = _TASKS[task]
    options = row.get("options")
    if task == "mcq" and options:
        if not isinstance(options, str | list | dict) or not all(isinstance(o, str) and len(o) == 1 for o in options):
            raise ValueError(f'options={options!r:.80}: the letters, such as "ABCD" or ["A", "B"]')
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
