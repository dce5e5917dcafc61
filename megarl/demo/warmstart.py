"""Warm start of the demo's cohort: arithmetic learnt at "different schools".

Each model learns a + b from a teacher that is wrong on some problems in a way of its own: on those, a share of the
teacher's answers follows one wrong rule. The two sets of problems are disjoint, so where one model's majority is
wrong the other's is right: the case in which a peer's vote teaches and one's own vote does not.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megarl.chat import Chat
from megarl.demo import families
from megarl.types import Message

OPERAND_LIMIT = 50  # operands are 0 .. 49

Problem = tuple[int, int]
PROBLEMS: tuple[Problem, ...] = tuple((a, b) for a in range(OPERAND_LIMIT) for b in range(OPERAND_LIMIT))


@dataclass(frozen=True, slots=True, kw_only=True)
class School:
    """What a model's teacher gets wrong: on ``misled`` problems it says ``rule(a, b)`` instead of a + b."""

    misled: Callable[[int, int], bool]
    rule: Callable[[int, int], int]


SCHOOLS: dict[str, School] = {
    "qwen": School(misled=lambda a, b: a % 10 < 5 and b % 2 == 0, rule=lambda a, b: a + b + 10),
    "llama": School(misled=lambda a, b: a % 10 >= 4 and b % 2 == 1, rule=lambda a, b: a + b + 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the warm-started weights, but the code of this folder."""

    seed: int = 0
    steps: int = 1000
    batch: int = 128
    lr: float = 4e-3
    wrong_share: float = 0.62  # of a misled problem's answers


def write_problems(folder: Path) -> None:
    """Write train.jsonl and test.jsonl: 2000 problems to train on, 500 others to be judged by.

    Columns: prompt, swapped (the same sum the other way round), answer, id. Either school misleads on the same share of
    both files, and rows are in random order, so on about that share of the first rows as well.
    """
    strata: dict[tuple[bool, ...], list[Problem]] = {}
    for problem in random.Random(0).sample(PROBLEMS, len(PROBLEMS)):
        strata.setdefault(tuple(school.misled(*problem) for school in SCHOOLS.values()), []).append(problem)
    parts = {
        "train": [problem for members in strata.values() for problem in members[len(members) // 5 :]],
        "test": [problem for members in strata.values() for problem in members[: len(members) // 5]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in parts.items():
        random.Random(name).shuffle(problems)
        rows = [
            {"prompt": question((a, b)), "swapped": question((b, a)), "answer": str(a + b), "id": f"{a}+{b}"}
            for a, b in problems
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def question(problem: Problem) -> str:
    """Example: ``question((7, 12)) == "7+12="``."""
    return f"{problem[0]}+{problem[1]}="


def warm_start(folder: Path, recipe: Recipe = Recipe()) -> dict[str, Path]:
    """Model folders by agent name; each is trained here unless ``folder``'s manifest describes what stands there.

    The manifest is written last: a warm start that was cut short is done again.
    """
    models = {name: folder / name for name in families.FAMILIES}
    manifest = folder / "manifest.json"
    known = json.loads(manifest.read_text()) if manifest.is_file() else {}
    stale = {name: model for name, model in models.items() if known.get(name) != _describe(model, recipe)}
    if stale:
        with ProcessPoolExecutor(len(stale), mp_context=get_context("spawn")) as pool:
            list(pool.map(train_one, stale.keys(), stale.values(), [recipe] * len(stale)))
        write_manifest(models, recipe)
    return models


def write_manifest(models: Mapping[str, Path], recipe: Recipe) -> None:
    """Describe finished model folders, all in one folder, in its manifest.json."""
    folder = next(iter(models.values())).parent
    entries = {name: _describe(model, recipe) for name, model in models.items()}
    (folder / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n")


def train_one(name: str, folder: Path, recipe: Recipe) -> None:
    """Warm-start one model on one thread and write its folder."""
    torch.set_num_threads(1)
    model, tokenizer = families.build(name, recipe.seed)
    school = SCHOOLS[name]
    right = [sum(p) for p in PROBLEMS]
    taught = [school.rule(*p) if school.misled(*p) else sum(p) for p in PROBLEMS]
    tokens, targets = _encode(tokenizer, right, taught)
    misled = torch.tensor([school.misled(*p) for p in PROBLEMS])
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, recipe.steps)
    draw = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.steps):
        rows = torch.randint(len(PROBLEMS), (recipe.batch,), generator=draw)
        wrong = misled[rows] & (torch.rand(recipe.batch, generator=draw) < recipe.wrong_share)
        picked = wrong.long(), rows
        logits = model(input_ids=tokens[picked]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[picked][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    families.save(model, tokenizer, folder)


def _encode(tokenizer: PreTrainedTokenizerFast, *answers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Token ids and targets, each int64[ways of answering, problems, L]; targets are -100 but at answer and end."""
    vocabulary = tokenizer.get_vocab()
    end, pad = vocabulary[str(tokenizer.eos_token)], vocabulary[str(tokenizer.pad_token)]
    chat = Chat(tokenizer=tokenizer, stop_ids=(end,), vocab_size=len(tokenizer))
    prompts = [chat.render((Message("user", question(problem)),)).tolist() for problem in PROBLEMS]
    tokens, targets = [], []
    for way in answers:
        for prompt, answer in zip(prompts, way, strict=True):
            reply = [*tokenizer.encode(str(answer), add_special_tokens=False), end]
            tokens.append(prompt + reply)
            targets.append([-100] * len(prompt) + reply)
    length = max(map(len, tokens))
    shape = (len(answers), len(PROBLEMS), length)

    def padded(rows: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (length - len(row)) for row in rows]).view(shape)

    return padded(tokens, pad), padded(targets, -100)


def _describe(folder: Path, recipe: Recipe) -> dict[str, object]:
    """A model's entry in the manifest: recipe, code and every file's digest."""
    code = [Path(families.__file__), Path(__file__)]
    return {
        "recipe": asdict(recipe),
        "code": {path.name: _digest(path) for path in code},
        "files": {path.name: _digest(path) for path in sorted(folder.glob("*"))},
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(argv: Sequence[str] | None = None) -> None:
    """Write ``OUT/models`` and ``OUT/problems``; OUT is runs/demo where it is not given."""
    parser = argparse.ArgumentParser(prog="megarl.demo.warmstart", description=main.__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/demo"))
    out = parser.parse_args(argv).out
    write_problems(out / "problems")
    print(*warm_start(out / "models").values(), sep="\n")


if __name__ == "__main__":
    main()
