"""Hostile answers by the thousand: python -m tests.fuzz.answers --count 100000

Each is read in every style and judged against itself, a number and its neighbour. Checked: nothing raises, an answer
equals itself exactly if it has a form, order of a pair does not matter, no answer costs more than its budget, and the
verdicts of a fixed table, judged anew between hostile ones, never change. Time is CPU time, of this process and of the
workers' children.
"""

import argparse
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.answers import equal as judging
from megarl.answers.equal import Judgement, Outcome, canonical, judge
from megarl.answers.form import read_form
from megarl.answers.read import read_answer
from megarl.answers.solver import CPU_SECONDS
from megarl.answers.solvers import Question, Reply, ask
from megarl.settings import AnswersConfig
from tests.unit.answer_pairs import DIFFERENT, EQUAL

DRIVER_SECONDS = 1.0  # of CPU, that one call may cost this process
STYLES = [
    AnswersConfig(style=s)
    for s in ("boxed", "tag", "mark", "letter", "verdict_boxed", "verdict_sentence", "last-number")
]
CONTROL = [
    ("1/2", "0.5"),
    (r"\sec^2 y", r"1+\tan^2 y"),
    ("28", "0.28"),
    ("(1,2)", "(2,1)"),
    (r"\sin 2x", r"2\sin x\cos x"),
    ("x<3", "2x<6"),
]

_PIECES = (
    *("0", "1", "2", "7", "10", "99999999999", "3.14", ".5", "1e9", "1e999999", "x", "y", "n", "e", "i", "f(", "A"),
    *(
        "+", "-", "*", "/", "^", "^{", "_", "_{", "!", "!!", "(", ")", "[", "]", "{", "}", "\\{", "\\}", "|", ",",
        ";", ":", "=",
    ),
    *(
        "<", ">", "\\le ", "\\ne ", "\\pm ", "\\mp ", "\\cup ", "\\in ", "\\frac{", "}{", "\\frac12", "\\sqrt{",
        "\\sqrt[", "\\sqrt",
    ),
    *(
        "\\pi ", "\\infty ", "\\sin ", "\\ln(", "\\log_", "\\tan^{-1}", "\\binom{", "\\text{", "\\boxed{", "\\left(",
        "\\right)",
    ),
    *(
        "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\ldots", "%", "\\%", "$", "\\$", "^\\circ", " ", "~",
        "\\,", "\\!", "\\",
    ),
    *(
        " and ", " or ", "million", "percent", "cm", "\\approx ", "\\overline{3}", "\\lfloor ", "\\rfloor ",
        "\\pmod{", "mod",
    ),
    *(
        "\u00bd", "\u221a", "\u00b2", "\u0663", "\uff11", "\u200b", "\u202e", "\x00", "\x1b[31m", "\ud800", "\u2211",
        "\u221e", "\u212b",
    ),
    *("<think>", "</think>", "<answer>", "</answer>", "```", "#### ", "<|im_end|>", "The answer is ", "correct."),
    *(
        "__import__('os').system('true')", "eval(", "lambda:", "None", "nan", "True", "';--", "{{7*7}}", "%s",
        "\\input{/etc/passwd}",
    ),
)  # fmt: skip
_HEAVY = (
    *(
        "\\sum_{k=1}^{10^{9}} \\frac{1}{k}",
        "\\int_0^{x} e^{t^{t}} dt",
        "\\prod_{k=1}^{n} k^k",
        "\\lim_{x\\to0} \\sin(1/x)",
    ),
    *(
        "\\int \\int \\int x^{y^{z}} dx",
        "\\gcd(10^{100},6^{200})",
        "\\sum_{k=1}^{10^{5}} \\sin(k^k)",
        "\\max(9^{9^{9}},1)",
    ),
)


def hostile(rng: random.Random) -> str:
    """One answer."""
    way = rng.random()
    if way < 0.40:
        return "".join(rng.choices(_PIECES, k=rng.randint(1, 14)))
    if way < 0.60:  # a good answer with something broken in it
        pairs = rng.choice([*EQUAL.values(), *DIFFERENT.values()])
        text = rng.choice(rng.choice(pairs))[:300]
        cut = rng.randint(0, len(text))
        return text[:cut] + rng.choice(_PIECES) + text[cut + rng.randint(0, 3) :]
    if way < 0.70:  # towers and factorials
        base = str(rng.randint(0, 99))
        return "^{".join([base] * rng.randint(2, 30)) + "}" * rng.randint(0, 30) + "!" * rng.randint(0, 4)
    if way < 0.82:  # deep
        opener, closer = rng.choice([
            ("(", ")"), ("\\sqrt{", "}"), ("\\frac{1}{", "}"), ("{", "}"), ("\\{", "\\}"), ("|", "|"), ("-", ""),
            ("\\sin(", ")"), ("f(", ")"), ("(x+", ")^{12}"),
        ])  # fmt: skip
        deep = rng.choice([5, 20, 60, 300])
        return opener * deep + rng.choice(("2", "x", "")) + closer * (deep + rng.choice((0, 0, 0, 1)))
    if way < 0.94:  # long
        piece = rng.choice(_PIECES)
        return piece * rng.choice((50, 200, 1000, 3000)) + rng.choice(_PIECES)
    if way < 0.96:
        return "".join(
            chr(rng.choice((rng.randrange(1, 0x500), rng.randrange(0x2000, 0x3000)))) for _ in range(rng.randint(1, 40))
        )
    if way < 0.962:
        return rng.choice(_PIECES) * (1_000_000 // rng.randint(1, 8))
    if way < 0.972:
        return rng.choice(_HEAVY) + rng.choice(("", "+1", "^{9}", "!", rng.choice(_PIECES)))
    return rng.choice(
        ("9" * rng.randint(300, 5000), "1/" * rng.randint(2, 900) + "7", "1,111," * 300, "1/3+" * 400 + "1")
    )


@dataclass
class Findings:
    """What a run saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    driver: tuple[float, str] = (0.0, "")  # the dearest answer
    worker: tuple[float, str] = (0.0, "")
    faults: list[str] = field(default_factory=list)


def run(count: int, seed: int = 0) -> Findings:
    """Judge ``count`` hostile answers."""
    rng = random.Random(seed)
    found = Findings()
    before = _control()
    neighbour = "12"
    for i in range(count):
        text = hostile(rng)
        _one(text, neighbour, found)
        neighbour = text
        if i % 500 == 499 and _control() != before:
            found.faults.append(f"control verdicts changed at {i}")
        if i % 5000 == 4999:
            print(f"{i + 1} {dict(found.outcomes)} faults {len(found.faults)}", file=sys.stderr, flush=True)
    if _control() != before:
        found.faults.append("control verdicts changed at the end")
    return found


def _control() -> list[Judgement]:
    """The fixed table, judged anew in this process."""
    read_form.cache_clear()
    judging._judge.cache_clear()
    return [judge(a, b) for a, b in CONTROL]


def _one(text: str, neighbour: str, found: Findings) -> None:
    used = 0.0

    def timed(work: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal used
        start = time.process_time()
        out = work(*arguments)
        used = max(used, time.process_time() - start)
        return out

    form = timed(read_form, text)
    for cfg in STYLES:
        timed(read_answer, text, cfg)
        timed(read_answer, f"so \\boxed{{{text}}}.", cfg)
    to_itself = timed(judge, text, text).outcome is Outcome.EQUAL
    there, back = timed(judge, text, "12"), timed(judge, "12", text)
    near, reversed_near = timed(judge, text, neighbour), timed(judge, neighbour, text)
    if to_itself != (form is not None) or (form is None) != (canonical(text) is None):
        found.faults.append(f"not itself: {text!r:.100}")
    if there != back or near != reversed_near:
        found.faults.append(f"not symmetric: {text!r:.100}")
    if used > DRIVER_SECONDS:
        found.faults.append(f"{used:.2f} s: {text!r:.100}")
    for verdict in (there, near):
        found.outcomes[verdict.outcome.name] += 1
        if verdict.outcome is Outcome.UNDECIDED:
            found.reasons[verdict.reason] += 1
    found.driver = max(found.driver, (used, f"{text!r:.80}"))
    for question, reply in _asked(text):
        found.worker = max(found.worker, (reply["cpu"], f"{question[1]!r:.80}"))
        if reply["cpu"] > CPU_SECONDS + 0.5:
            found.faults.append(f"worker {reply['cpu']:.2f} s: {question[1]!r:.100}")


def _asked(text: str) -> list[tuple[Question, Reply]]:
    form = read_form(text)
    if form is None or not form.open or form.kind != "value":
        return []
    questions = judging._questions(form)
    return list(zip(questions, ask(questions), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and exit with 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.answers", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    start = time.monotonic()
    found = run(args.count, args.seed)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{args.count} hostile answers in {time.monotonic() - start:.0f} s, {memory} MiB")
    print(f"verdicts   {dict(found.outcomes)}")
    print(f"undecided  {dict(found.reasons.most_common(12))}")
    for name, (seconds, text) in {"driver": found.driver, "worker": found.worker}.items():
        print(f"dearest    {name} {seconds:.3f} CPU s {text}")
    for fault in found.faults[:20]:
        print(f"FAULT {fault}")
    print(f"faults     {len(found.faults)}")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
