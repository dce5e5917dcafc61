"""A tiny model that checks itself: the demo's Qwen-style one, taught two more turns for CoVerRL.

    python -m megarl.demo.verifier [OUT]

Asked to check an answer it does the sum again, as its school does it, and says a verdict; asked again it says what it
then found. It learns to take these turns and their exact sentences, and hardly to compare: after 400 steps it calls
39 % of right answers correct, and 31 % of answers that are off by 1 or 10 (60 % and 34 % after 1200).
"""

import argparse
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megarl.algos.coverrl import Requests
from megarl.answers.verdict import CORRECT, WRONG
from megarl.chat import Chat, open_chat
from megarl.demo.warmstart import PROBLEMS, SCHOOLS, Problem, Recipe, question, warm_start, write_problems
from megarl.types import Message

REQUESTS = Requests(verify="Check:", revise="Again:")
_SLIPS = (-10, -1, 1, 10)

Turn = tuple[list[int], list[int]]  # token ids and targets (-100: none) of a whole conversation


def teach(base: Path, folder: Path, recipe: Recipe) -> None:
    """Write ``folder``: the model of ``base``, trained on one thread to check its answers and to give another."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    chat = open_chat(str(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, recipe.steps)
    talk = conversations(chat, recipe)
    for _ in range(recipe.steps):
        tokens, targets = _padded([next(talk) for _ in range(recipe.batch)])
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    shutil.copytree(base, folder, dirs_exist_ok=True)
    model.save_pretrained(folder)


def conversations(chat: Chat, recipe: Recipe) -> Iterator[Turn]:
    """Conversations without end. Half of the answers are the school's, the others slips, which are not learnt."""
    draw, school = random.Random(recipe.seed), SCHOOLS["qwen"]

    def taught(problem: Problem) -> int:
        misled = school.misled(*problem) and draw.random() < recipe.wrong_share
        return school.rule(*problem) if misled else sum(problem)

    while True:
        problem = draw.choice(PROBLEMS)
        honest, found = draw.random() < 0.5, taught(problem)
        answer = taught(problem) if honest else abs(found + draw.choice(_SLIPS))
        turns = [
            (question(problem), str(answer), honest),
            (REQUESTS.verify, f"{found}. {CORRECT if found == answer else WRONG}", True),
            (REQUESTS.revise, str(found), True),
        ]
        yield _encode(chat, turns if found != answer else turns[:2])


def _encode(chat: Chat, turns: Sequence[tuple[str, str, bool]]) -> Turn:
    """(what the user says, the reply, is it learnt?) of every turn, as the chat template writes them."""
    messages: list[Message] = []
    targets: list[int] = []
    ids: list[int] = []
    for asked, reply, learnt in turns:
        messages += [Message("user", asked), Message("assistant", reply)]
        ids = chat.render(messages[:-1]).tolist()
        said = [*chat.tokenizer.encode(reply, add_special_tokens=False), int(str(chat.tokenizer.eos_token_id))]
        targets += [-100] * (len(ids) - len(targets)) + (said if learnt else [-100] * len(said))
        ids += said
    return ids, targets


def _padded(turns: Sequence[Turn]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and targets, int64[batch, L]. What is behind a conversation has no part in it."""
    length = max(len(ids) for ids, _ in turns)
    tokens = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in turns])
    targets = torch.tensor([own + [-100] * (length - len(own)) for _, own in turns])
    return tokens, targets


def main(argv: Sequence[str] | None = None) -> None:
    """Write ``OUT/models/verifier``, after the demo's own models and problems; OUT is runs/demo if not given."""
    parser = argparse.ArgumentParser(prog="megarl.demo.verifier", description=main.__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/demo"))
    out = parser.parse_args(argv).out
    write_problems(out / "problems")
    base = warm_start(out / "models")["qwen"]
    teach(base, out / "models/verifier", Recipe(steps=400, batch=64, lr=2e-3))
    print(out / "models/verifier")


if __name__ == "__main__":
    main()
