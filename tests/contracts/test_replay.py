"""The replay engine serves what an earlier run saved, and nothing else."""

from dataclasses import replace

import pytest

from megarl import rollouts
from megarl.backends.reference import ReferenceEngine
from megarl.backends.replay import ReplayEngine
from megarl.types import Message, Seed
from tests import tiny
from tests.contracts.backends import MODEL, PROMPTS, SAMPLING, SEED, agent_of, chat_of, named_weights, oracle, refit


@pytest.fixture
def saved(tmp_path_factory):
    path = tiny.write(tmp_path_factory.mktemp("model"), "llama", **MODEL)
    engine = ReferenceEngine(agent_of(path), chat_of(path))
    refit(engine, named_weights(oracle(path)))
    return [replace(r, answer="4", well_formed=True) for r in engine.generate(PROMPTS, SEED, SAMPLING)]


@pytest.fixture
def replay(saved, tmp_path):
    rollouts.write(rollouts.step_path(tmp_path, SEED.step), saved[::-1], step=SEED.step)
    engine = ReplayEngine(tmp_path)
    engine.begin_refit()
    engine.finish_refit(0)
    return engine


def test_serves_the_saved_rollouts_unread(replay, saved):
    served = replay.generate(PROMPTS, SEED, SAMPLING)
    assert [r.key for r in served] == [r.key for r in saved]
    for new, old in zip(served, saved, strict=True):
        assert new.token_ids.tolist() == old.token_ids.tolist() and new.logprobs.tobytes() == old.logprobs.tobytes()
        assert (new.text, new.stop, new.version) == (old.text, old.stop, old.version)
        assert new.answer is None and not new.well_formed
    fewer = [replace(p, n=2) for p in PROMPTS[::-1]]
    assert [(r.prompt, r.index) for r in replay.generate(fewer, SEED, SAMPLING)] == [
        (p, i) for p in fewer for i in range(2)
    ]


def test_what_was_not_saved_is_refused(replay):
    with pytest.raises(ValueError, match="step 1 was not saved"):
        replay.generate(PROMPTS, Seed(run=SEED.run, step=1), SAMPLING)
    with pytest.raises(ValueError, match=r'no rollout \["ann","0","solve",null,6\]'):
        replay.generate([replace(PROMPTS[0], n=7)], SEED, SAMPLING)
    with pytest.raises(ValueError, match="answered another prompt text"):
        replay.generate([replace(PROMPTS[0], messages=(Message("user", "2+3="),))], SEED, SAMPLING)


def test_phases(replay, tmp_path):
    with pytest.raises(RuntimeError, match="refit"):
        ReplayEngine(tmp_path).generate(PROMPTS, SEED, SAMPLING)
    replay.sleep()
    with pytest.raises(RuntimeError, match="wake without weights"):
        replay.wake()
    replay.begin_refit()
    replay.finish_refit(1)
    with pytest.raises(RuntimeError, match="asleep"):
        replay.generate(PROMPTS, SEED, SAMPLING)
    replay.wake()
    assert replay.generate(PROMPTS, SEED, SAMPLING)
    replay.begin_refit()
    with pytest.raises(RuntimeError, match="refit"):
        replay.generate(PROMPTS, SEED, SAMPLING)


def test_a_run_without_rollouts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no saved rollouts"):
        ReplayEngine(tmp_path / "nowhere")
