"""How fast answers are read, judged and voted on, against math-verify in the same run.

    python -m tests.bench.answers [--answers 100000] [--file FILE] [--json FILE]

Answers are made from true ones in the formats of MATH, GSM8K and AMC (or from FILE: rows with "answer", as JSON, JSONL
or parquet): per prompt one true answer in several spellings, and wrong ones around it, K = 64 in a group. math-verify
clusters a sample of the groups as graders do: an answer is held against the first member of every cluster so far.
It parses a spelling once and judges a pair once, and so do we.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from megarl.answers import solvers
from megarl.answers.equal import _judge, canonical
from megarl.answers.form import read_form
from megarl.answers.vote import vote

K = 64
TRUE = (
    *(
        "18", "3", "70000", "540", "20", "64", "260", "160", "45", "460", "366", "694", "13", "1,080", "104", "109",
        "27", "1250.5", "5.75",
    ),
    *(
        r"\frac{3}{8}", r"-\frac{7}{12}", r"\frac{9}{7}", r"\frac{14}{3}", r"\frac{1}{576}", r"\frac{243}{625}",
        r"\frac{13}{204}", r"\dfrac{4}{3}",
    ),
    *(
        r"\sqrt{51}", r"2\sqrt{5}", r"3\sqrt{13}", r"12\sqrt{3}", r"\frac{\sqrt{3}}{2}", r"\frac{3\sqrt{3}}{4}",
        r"1+\sqrt{2}", r"10-5\sqrt{2}", r"\sqrt{2}+\sqrt{3}",
    ),
    *(
        r"\frac{\pi}{3}", r"27\pi", r"8\pi", r"\frac{5\pi}{6}", r"144\pi", r"\left( 3, \frac{\pi}{2} \right)",
        r"(6,31,-1)", r"(-2,1)", r"\left(\frac{3}{5},\frac{8}{3}\right]",
    ),
    *(
        r"x^5 - x^4 + x^3 - x^2 + x - 1", r"2k+2", r"-50x^4+5x^3", r"x^3+3x-6", r"6r^2-4r-24", r"3x^2-7", r"(x-2)^2",
        r"-4x^4+x^3+3x^2+2",
    ),
    *(
        "p - q", r"\frac{x+2}{7}", r"\frac{1}{x+1}", r"\frac{2}{x-3}", r"y = 2x + 3", r"5x - 7y + 11z + 4 = 0",
        r"x+1", r"2^{n}-1", r"3n(n+1)", r"\frac{a^2}{4b}",
    ),
    *(
        r"(-\infty, 2) \cup (3, \infty)", r"[-2,7]", r"(0,9)\cup (9,36)", r"[0,\infty)", r"x \le 4", r"\{1,3,5\}",
        "1, -2", r"\pm 3", r"2, 3", r"4, 6, 14, 15", r"-2, 1",
    ),
    *(
        r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}",
        r"\begin{pmatrix} 2 & 0 \\ 5 & -2 \end{pmatrix}",
    ),
    *(
        r"\text{Evelyn}", r"\text{even}", r"\text{(B)}", r"\text{east}", r"\text{June 20}", "C", "D",
        r"\text{Navin}", r"\text{ellipse}", "Yes",
    ),
    *(
        r"90^\circ", r"28\%", r"\$36", r"10 \text{ cm}", r"145^\circ", r"15\text{ square inches}", r"4210_{5}",
        r"2516_8", r"6+9i", r"1-12i", r"e^{2}", r"\ln 2",
    ),
    *(
        r"\sin x", r"\cot x", r"\log_2 5", r"\sqrt[3]{4}", r"3\sqrt[3]{2}", r"2^{2024}", r"\frac{1}{2^{98}}",
        r"11,\! 111,\! 111,\! 100", r"1.36", r"0.0000672", r"6.72 \times 10^{-5}",
    ),
)  # fmt: skip

Verify = Callable[[str, str], bool]


def spellings(answer: str, rng: random.Random) -> list[str]:
    """Ways in which a model writes the answer: the plain one most often."""
    ways = [answer] * 6 + [
        f"${answer}$",
        answer.replace("frac", "dfrac"),
        answer.replace(" ", ""),
        f" {answer} ",
        answer + ".",
        f"\\({answer}\\)",
    ]
    if answer.isdigit():
        ways += [
            f"{answer}.0",
            f"{int(answer):,}",
            f"\\text{{{answer}}}",
            f"{answer} \\text{{ units}}",
            f"x = {answer}",
            f"**{answer}**",
        ]
    if "," not in answer and "\\text" not in answer and "=" not in answer and "%" not in answer:
        ways += [f"x={answer}"]
    return [rng.choice(ways) for _ in range(8)]


def wrong(answer: str, rng: random.Random) -> str:
    """A wrong answer near a true one: a digit changed, a sign, or another problem's answer."""
    digits = [i for i, c in enumerate(answer) if c.isdigit()]
    way = rng.random()
    if digits and way < 0.6:
        i = rng.choice(digits)
        return answer[:i] + str(rng.randint(1, 9)) + answer[i + 1 :]
    if way < 0.8:
        return f"-{answer}" if not answer.startswith("-") else answer[1:]
    return rng.choice(TRUE)


def groups(true: Sequence[str], number: int, seed: int = 0) -> list[list[str | None]]:
    """``number`` groups of K answers."""
    rng = random.Random(seed)
    out: list[list[str | None]] = []
    for g in range(number):
        answer = true[g % len(true)] if g < len(true) else wrong(rng.choice(true), rng)
        right, others = spellings(answer, rng), [wrong(answer, rng) for _ in range(rng.randint(1, 12))]
        share = rng.uniform(0.1, 0.95)
        out.append(
            [None if rng.random() < 0.03 else rng.choice(right if rng.random() < share else others) for _ in range(K)]
        )
    return out


def forget() -> None:
    """Empty every cache of ours; the workers go on running, as they do in training."""
    read_form.cache_clear()
    _judge.cache_clear()
    solvers.forget()


def cluster(answers: Sequence[str | None], same: Verify) -> list[list[int]]:
    """Greedy clusters by a pairwise relation."""
    out: list[list[int]] = []
    for i, answer in enumerate(answers):
        if answer is None:
            continue
        for members in out:
            head = answers[members[0]]
            if head == answer or (head is not None and same(head, answer)):
                members.append(i)
                break
        else:
            out.append([i])
    return out


def math_verify() -> Verify:
    """math-verify with every parse and every verdict remembered."""
    from math_verify import parse, verify

    parsed: dict[str, list[Any]] = {}
    verdicts: dict[tuple[str, str], bool] = {}

    def read(text: str) -> list[Any]:
        if text not in parsed:
            parsed[text] = parse(text if "$" in text else f"${text}$")
        return parsed[text]

    def same(a: str, b: str) -> bool:
        if (a, b) not in verdicts:
            verdicts[a, b] = bool(verify(read(a), read(b)))
        return verdicts[a, b]

    return same


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(true: Sequence[str], number: int, sample: int) -> dict[str, float]:
    """Seconds and ratios."""
    every = groups(true, max(number // K, 128))
    vote(["\\sin x", "\\cos x", "\\int_0^1 x dx", "\\int_0^2 x dx"])  # workers up
    forget()
    cold = timed(lambda: [vote(g) for g in every])
    step = groups(true, 128, seed=1)
    for g in step:
        vote(g)
    warm = timed(lambda: [vote(g) for g in step])
    forget()
    fresh = timed(lambda: [vote(g) for g in step])
    some = random.Random(2).sample(every, sample)
    forget()
    ours = timed(lambda: [vote(g) for g in some])
    same = math_verify()
    theirs = timed(lambda: [cluster(g, same) for g in some])
    spelt = list(dict.fromkeys(a for g in every for a in g if a is not None))
    forget()
    forms = timed(lambda: [canonical(a) for a in spelt])
    return {
        "answers": len(every) * K,
        "distinct_spellings": len(spelt),
        "cold_answers_per_second": len(every) * K / cold,
        "step_128x64_warm_seconds": warm,
        "step_128x64_cold_seconds": fresh,
        "sample_groups": sample,
        "ours_sample_seconds": ours,
        "math_verify_sample_seconds": theirs,
        "ratio_to_math_verify": theirs / ours,
        "forms_per_second": len(spelt) / forms,
    }


def read_true(path: Path) -> list[str]:
    """True answers of a file."""
    if path.suffix == ".parquet":
        rows = parquet.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    else:
        rows = json.loads(path.read_text("utf-8"))
    found = [r.get("answer") or (r.get("reward_model") or {}).get("ground_truth") for r in rows]
    return [str(a).rpartition("####")[2].strip() for a in found if a]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.answers", description=__doc__)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--sample", type=int, default=24, help="groups that math-verify clusters")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    figures = measure(read_true(args.file) if args.file else TRUE, args.answers, args.sample)
    for name, value in figures.items():
        print(f"{name:28} {value:>14,.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
