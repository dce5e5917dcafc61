"""Rings of any size, seats that share a policy, and what may cross between them."""

import re
from copy import deepcopy
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from megarl.agents import fitting, seats
from megarl.algos import AnyAlgorithm
from megarl.algos.common import tally
from megarl.algos.corewarding import CoRewarding
from megarl.algos.corl import CoRL
from megarl.algos.coverrl import Requests, verify_prompt
from megarl.chat import open_chat
from megarl.config import validate
from megarl.deck import Seat, open_deck
from megarl.settings import BatchConfig, DataConfig
from tests import cohort, tiny
from tests.unit.records import rollouts

SEATED = {
    "algo": {"name": "corewarding", "views": ["plain", "reworded"]},
    "agents": {"one": {"model": "none/one", "seats": {"plain": "original", "reworded": "rewrite"}}},
    "data.views": {"original": {}, "rewrite": {"column": "rewrite"}},
}


def raw(**changes):
    run = {
        "steps": 2,
        "data": {"path": "d.jsonl", "gold": "answer", "max_prompt_tokens": 24},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_microbatch": 64},
        "sampling": {"max_tokens": 8},
    }
    return cohort.changed(run, deepcopy(SEATED) | deepcopy(changes))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rings_of_any_size(size):
    """Each is taught by the one before it, agents with different sample counts too; own answers change nothing."""
    names = tuple(f"agent{i}" for i in range(size))
    answers = {name: [str(i)] * (3 + i) + ["99"] * 2 for i, name in enumerate(names)}
    seen = [r for name in names for r in rollouts(name, "q", answers[name])]
    algo = CoRL(ring=names)
    labels = algo.label(seen, None)
    assert [labels[name, "q"].answer for name in names] == [str((i - 1) % size) for i in range(size)]
    assert [labels[name, "q"].total for name in names] == [5 + (i - 1) % size for i in range(size)]
    groups = {g.key[0]: g.rewards for g in algo.reward(seen, labels, {})}
    assert [len(groups[name]) for name in names] == [5 + i for i in range(size)]  # case-I3
    assert not any(any(rewards) for rewards in groups.values())
    backwards = CoRL(teacher={name: names[(i + 1) % size] for i, name in enumerate(names)})
    assert [backwards.label(seen, None)[n, "q"].answer for n in names] == [str((i + 1) % size) for i in range(size)]
    assert (backwards.label(seen, None) == labels) == (size == 2)  # V13c
    for name in names:
        own = [r for r in seen if r.prompt.agent != name] + rollouts(name, "q", ["42"] * 4)
        changed = {key for key, ballot in algo.label(own, None).items() if ballot != labels[key]}
        assert changed == {(names[(names.index(name) + 1) % size], "q")}  # V13b: the student's label alone


def test_corewarding_is_the_other_views_vote():
    seen = rollouts("plain", "q", ["3", "3", "9"]) + rollouts("reworded", "q", ["9", "9", "3", "9"])
    algo = CoRewarding(views=("plain", "reworded"))
    labels = algo.label(seen, None)
    own = tally(seen)
    assert labels["plain", "q"] == own["reworded", "q"] and labels["reworded", "q"] == own["plain", "q"]
    assert [g.rewards for g in algo.reward(seen, labels, {})] == [(0, 0, 1), (0, 0, 1, 0)]
    corl = CoRL(ring=("plain", "reworded"))
    assert corl.reward(seen, corl.label(seen, None), {}) == algo.reward(seen, labels, {})
    with pytest.raises(ValueError, match="not aligned"):
        algo.label(
            [r for uid in ("x", "y") for r in rollouts("plain", uid, ["1"])]
            + [r for uid in ("y", "x") for r in rollouts("reworded", uid, ["1"])],
            None,
        )


def test_seats_of_one_policy():
    cfg = validate(raw())
    assert cfg.seats == ("plain", "reworded")
    assert cfg.agent_at("reworded") is cfg.agents["one"]
    assert cfg.agents["one"].slots == 1
    plain = {
        "agents": {"a": {"model": "none/a"}, "b": {"model": "none/b"}},
        "algo": {"name": "corl", "ring": ["a", "b"]},
    }
    assert validate(raw(**plain)).seats == ("a", "b")
    # a cohort may hold seated agents as well: here two views of one policy and another policy in one ring
    mixed = raw(**{"algo": {"name": "corl", "ring": ["plain", "reworded", "two"]}, "agents.two": {"model": "none/two"}})
    assert validate(mixed).seats == ("plain", "reworded", "two")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"agents.two": {"model": "none/two"}}, "trains one policy, but there are agents one, two: keep one agent"),
        ({"algo.views": ["plain", "plain"]}, "algo.views=['plain', 'plain']"),
        ({"algo.views": ["plain"]}, "algo.corewarding.views"),
        ({"agents.one.seats": {"plain": "original"}}, "the run has ['plain']"),
        ({"agents.one.seats": {}}, "the run has ['one']"),
        (
            {"agents.one.seats": {"plain": "original", "reworded": "x"}},
            "agents.one.seats.reworded=x is none of data.views",
        ),
        (
            {"algo": {"name": "ttrl"}, "agents.plain": {"model": "none/two"}},
            "agents.plain and agents.one both answer to plain",
        ),
        ({"algo": {"name": "coverrl"}}, "a sequence may have algo.max_prompt_tokens + max_tokens = 8200"),
        ({"batch.samples_per_update": 4, "batch.updates_per_step": 2}, "give one of the two"),
        (
            {"batch.samples_per_update": 4, "agents.one.optimizer": {"schedule": {"per": "update"}}},
            "agents.one.optimizer.schedule.per=update",
        ),
    ],
)
def test_cohorts_that_are_refused(changes, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        validate(raw(**changes))


def test_two_policies_cannot_hold_the_seats_of_corewarding():
    two = {"one": {"model": "none/one", "seats": {"plain": "original"}}, "two": {"model": "none/two"}}
    with pytest.raises(ValueError, match="trains one policy"):
        validate(raw(**{"agents": two, "algo.views": ["plain", "two"]}))


def test_samples_per_update():
    assert [BatchConfig(samples_per_update=256).updates(n) for n in (0, 1, 256, 257, 2466)] == [1, 1, 1, 2, 10]
    assert [BatchConfig(updates_per_step=3).updates(n) for n in (0, 2466)] == [3, 3]


def test_the_deck_deals_every_seat_its_own_view(tmp_path):
    chat = open_chat(str(tiny.write(tmp_path / "m", "qwen2", num_hidden_layers=1)))
    (tmp_path / "d.jsonl").write_text('{"prompt": "one", "rewrite": "two", "id": "u"}\n')
    views = {"original": {}, "rewrite": {"column": "rewrite"}}
    cfg = DataConfig.model_validate({"path": str(tmp_path / "d.jsonl"), "id": "id", "views": views})
    deck = open_deck(cfg, {"plain": ("original", chat), "reworded": ("rewrite", chat)}, 0)
    dealt = deck.everything({"plain": Seat("original", 3), "reworded": Seat("rewrite", 3)})
    assert [(p.agent, p.uid, p.messages[-1].content) for p in dealt] == [
        ("plain", "u", "one"),
        ("reworded", "u", "two"),
    ]


def test_case_i1_a_follow_up_is_written_with_its_own_agents_template(tmp_path):
    """Two families: the same conversation has other ids, and each is within its own vocabulary."""
    chats = [open_chat(str(tiny.write(tmp_path / f, f, num_hidden_layers=1))) for f in ("qwen2", "llama")]
    (answer,) = rollouts("a", "q", ["7"], text="it is \\boxed{7}")
    messages = verify_prompt(answer, 1).messages
    for chat in chats:
        ids = chat.render(messages)
        assert ids.max() < chat.vocab_size and "it is \\boxed{7}" in chat.tokenizer.decode(ids)


def test_options_reach_the_chat_template(tmp_path):
    chat = open_chat(str(tiny.write(tmp_path / "m", "qwen2", num_hidden_layers=1)))
    chat.tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %}!{% endif %}"
    messages = rollouts("a", "q", ["7"])[0].prompt.messages
    on = type(chat)(tokenizer=chat.tokenizer, stop_ids=(2,), vocab_size=128, options={"enable_thinking": True})
    assert chat.decode(on.render(messages)) == "q!" and chat.decode(chat.render(messages)) == "q"


def test_follow_ups_that_are_too_long_are_counted_and_not_asked(tmp_path):
    chat = open_chat(str(tiny.write(tmp_path / "m", "qwen2", num_hidden_layers=1)))
    agent = cohort.agent("one", None, None, chat, seats={"plain": Seat("original", 2)})  # neither is asked
    agents = {"one": agent}
    assert list(seats(agents)) == ["plain"]
    short, long_ = rollouts("plain", "q", ["7", "8"], text="7")
    long_ = replace(long_, text="7" * 40)
    asks = [verify_prompt(r, 1, Requests(verify="?")) for r in (short, long_)]
    lengths = [len(chat.render(p.messages)) for p in asks]
    assert lengths[0] <= 40 < lengths[1]
    too_long = set()
    assert fitting(agents, asks, too_long) == asks[:1]
    assert too_long == {("one", long_.key)}
    assert fitting(agents, asks, too_long) == asks[:1] and len(too_long) == 1  # asked again: counted once


def test_unknown_methods_and_options():
    with pytest.raises(ValidationError, match="corewarding"):
        TypeAdapter(AnyAlgorithm).validate_python({"name": "coreward"})
