"""What every sampling engine owes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from megarl.types import Message, Rollout, Seed
from tests import tiny
from tests.contracts.backends import (
    MODEL,
    PROMPTS,
    SAMPLING,
    SEED,
    chat_of,
    logprob_gap,
    logprob_gaps,
    named_weights,
    oracle,
    oracle_logprobs,
    refit,
)

REFUSED = (RuntimeError, ValueError)


def tokens(rollouts: list[Rollout]) -> dict:
    return {r.key: r.token_ids.tolist() for r in rollouts}


def test_rollouts_come_complete_and_in_order(fitted, model):
    chat = chat_of(model)
    refit(fitted, named_weights(oracle(model)), version=7)
    seen = fitted.generate(PROMPTS, SEED, SAMPLING)
    assert [(r.prompt, r.index) for r in seen] == [(p, i) for p in PROMPTS for i in range(p.n)]
    for r in seen:
        assert r.version == 7 and fitted.version == 7
        assert r.prompt_ids.dtype == r.token_ids.dtype == np.int32 and r.logprobs.dtype == np.float32
        assert r.prompt_ids.tolist() == chat.render(r.prompt.messages).tolist()
        assert r.logprobs.shape == r.token_ids.shape and len(r.token_ids) > 0
        assert r.text == chat.decode(r.token_ids)
        assert r.answer is None and not r.well_formed
    assert len({tuple(t) for t in tokens(seen).values()}) == len(seen)  # no two samples share a seed


def test_same_seed_same_rollouts(fitted):
    once, again = (fitted.generate(PROMPTS, SEED, SAMPLING) for _ in range(2))
    assert tokens(once) == tokens(again)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(once, again, strict=True))
    other = fitted.generate(PROMPTS, Seed(run=SEED.run, step=SEED.step + 1), SAMPLING)
    assert tokens(other) != tokens(once)


def test_rollouts_do_not_depend_on_order_or_company(fitted):
    together = tokens(fitted.generate(PROMPTS, SEED, SAMPLING))
    assert tokens(fitted.generate(PROMPTS[::-1], SEED, SAMPLING)) == together
    apart = [r for p in PROMPTS for r in fitted.generate([p], SEED, SAMPLING)]
    assert tokens(apart) == together
    fewer = tokens(fitted.generate([replace(p, n=2) for p in PROMPTS], SEED, SAMPLING))
    assert fewer == {k: t for k, t in together.items() if k.index < 2}


def test_batches_smaller_than_the_request(narrow, model):
    refit(narrow, named_weights(oracle(model)))
    narrow.wake()
    together = tokens(narrow.generate(PROMPTS, SEED, SAMPLING))
    assert tokens([r for p in PROMPTS for r in narrow.generate([p], SEED, SAMPLING)]) == together


def test_agents_sample_apart_unless_they_share_a_stream(narrow, fitted, model):
    refit(narrow, named_weights(oracle(model)))
    narrow.wake()

    def drawn(engine, agent):
        return list(tokens(engine.generate([replace(p, agent=agent) for p in PROMPTS], SEED, SAMPLING)).values())

    assert drawn(fitted, "ann") != drawn(fitted, "bob")
    assert drawn(narrow, "ann") == drawn(narrow, "bob")
    assert drawn(narrow, "ann") == drawn(fitted, "5")  # a stream stands for the agent's name


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_are_at_the_sampling_temperature(fitted, model, temperature):
    """case-C1"""
    plain = oracle(model)
    seen = fitted.generate(PROMPTS, SEED, SAMPLING.model_copy(update={"temperature": temperature}))
    gaps = logprob_gaps(plain, seen, temperature)
    assert gaps.mean() < 1e-5 and gaps.max() < 1e-4
    assert logprob_gap(plain, seen, 1.1 * temperature) > 1e-2


def test_samples_follow_the_distribution(fitted, model):
    """First tokens of many samples: their mean logprob is minus the entropy, within four standard errors."""
    (prompt, *_) = PROMPTS
    seen = fitted.generate([replace(prompt, n=1500)], SEED, SAMPLING.model_copy(update={"max_tokens": 1}))
    log_p = oracle_logprobs(oracle(model), seen[0].prompt_ids, seen[0].token_ids, 1.0)[0].double()
    mean = float((log_p.exp() * log_p).sum())
    error = float((log_p.exp() * (log_p - mean) ** 2).sum().sqrt()) / len(seen) ** 0.5
    got = np.mean([r.logprobs[0] for r in seen])
    assert abs(got - mean) < 4 * error
    assert abs(float(log_p.mean()) - mean) > 8 * error  # control: a uniform sampler would be caught


def test_every_stop_id_ends_a_response_and_stays_in_it(fitted, model):
    """case-C13: both ids of the generation config are known; case-C11: no token is dropped by its value."""
    stop_ids = chat_of(model).stop_ids
    assert len(stop_ids) == 2
    long = SAMPLING.model_copy(update={"max_tokens": 100, "temperature": 1.5})
    seen = fitted.generate([replace(p, n=24) for p in PROMPTS], SEED, long)
    ended = [r for r in seen if r.stop == "end"]
    cut = [r for r in seen if r.stop == "length"]
    assert len(ended) + len(cut) == len(seen)
    assert {int(r.token_ids[-1]) for r in ended} == set(stop_ids)
    assert cut and all(len(r.token_ids) == 100 and r.token_ids[-1] not in stop_ids for r in cut)
    assert not any(t in stop_ids for r in seen for t in r.token_ids[:-1])


def test_a_fresh_engine_on_a_model_full_of_traps(open_engine, tmp_path):
    """Nothing is sampled before the first refit. case-C9: a template that writes BOS and a tokenizer that adds it make
    one. case-C11: the real end token counts although it is the padding token's id too."""
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "<bos>" + tiny.TEMPLATE
    path = tiny.write(tmp_path / "m", "llama", **MODEL)
    tokenizer.save_pretrained(path)
    chat = chat_of(path)
    twice = chat.tokenizer.encode(
        chat.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    )
    assert twice.count(tokenizer.bos_token_id) == 2  # the trap is set
    engine = open_engine(path)
    with pytest.raises(REFUSED):
        engine.generate(PROMPTS, SEED, SAMPLING)
    refit(engine, named_weights(oracle(path)))
    long = SAMPLING.model_copy(update={"max_tokens": 100, "temperature": 1.5})
    seen = engine.generate([replace(p, n=24) for p in PROMPTS], SEED, long)
    for r in seen:
        assert r.prompt_ids.tolist().count(tokenizer.bos_token_id) == 1 and r.prompt_ids[0] == tokenizer.bos_token_id
    assert any(r.token_ids[-1] == tokenizer.pad_token_id for r in seen if r.stop == "end")


def test_sleep_and_wake(fitted, model):
    before = tokens(fitted.generate(PROMPTS, SEED, SAMPLING))
    fitted.wake()  # awake already: nothing to do
    fitted.sleep()
    with pytest.raises(REFUSED):
        fitted.generate(PROMPTS, SEED, SAMPLING)
    with pytest.raises(REFUSED):
        fitted.wake()  # sleeping gave the weights up
    # a refit reaches a sleeping engine, which sleeps on
    refit(fitted, named_weights(oracle(model)), version=3)
    with pytest.raises(REFUSED):
        fitted.generate(PROMPTS, SEED, SAMPLING)
    fitted.wake()
    assert fitted.generate([], SEED, SAMPLING) == []
    assert tokens(fitted.generate(PROMPTS, SEED, SAMPLING)) == before and fitted.version == 3


def test_nothing_but_weights_in_the_middle_of_a_refit(fitted, model):
    fitted.begin_refit()
    for step in (fitted.wake, fitted.sleep, lambda: fitted.generate(PROMPTS, SEED, SAMPLING)):
        with pytest.raises(REFUSED):
            step()
    refit(fitted, named_weights(oracle(model)))  # begun anew
    assert fitted.generate(PROMPTS[:1], SEED, SAMPLING)
    for late in (lambda: fitted.finish_refit(1), lambda: fitted.load_weights(None)):
        with pytest.raises(REFUSED):
            late()
    assert fitted.version == 0


def test_ids_of_another_vocabulary_are_refused(fitted, model, monkeypatch):
    """case-I1: a tokenizer that knows more than the model's 128 ids."""
    chat = chat_of(model)
    chat.tokenizer.add_tokens([f"<far{i}>" for i in range(40)])
    monkeypatch.setattr(fitted, "_chat", chat)
    last, first = (replace(PROMPTS[2], messages=(Message("user", f"x<far{i}>"),)) for i in (24, 25))
    assert chat.render(last.messages).max() == 127
    assert fitted.generate([last], SEED, SAMPLING)
    with pytest.raises(ValueError, match="agent ann: prompt 2 has token id 128, of another vocabulary"):
        fitted.generate([last, first], SEED, SAMPLING)


def test_a_missing_weight_is_named(fitted, model):
    weights = named_weights(oracle(model))
    with pytest.raises(ValueError, match="norm"):
        refit(fitted, [(n, w) for n, w in weights if n != "model.norm.weight"], version=9)
    with pytest.raises(REFUSED):
        fitted.generate(PROMPTS, SEED, SAMPLING)  # half-fitted
    assert fitted.version != 9
    refit(fitted, weights, version=9)
    assert fitted.generate(PROMPTS[:1], SEED, SAMPLING)[0].version == 9


def test_an_unknown_weight_is_named(fitted, model):
    weights = named_weights(oracle(model))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.surprise"):
        refit(fitted, [*weights, ("model.layers.0.surprise", torch.zeros(3))])


def test_new_weights_leave_nothing_of_the_old(fitted, model):
    """case-D9 (cached prefixes) and case-D13 (every tensor counts)."""
    fitted.generate(PROMPTS, SEED, SAMPLING)
    old, new = oracle(model), oracle(model)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for w in new.parameters():
            w.add_(0.05 * torch.randn(w.shape, generator=random))
    refit(fitted, named_weights(new), version=1)
    seen = fitted.generate(PROMPTS, SEED, SAMPLING)
    assert logprob_gap(new, seen, 1.0) < 1e-4
    assert logprob_gap(old, seen, 1.0) > 1e-2


def test_bfloat16(open_engine, model):
    """Weights come in the agent's dtype; logprobs stay near the float32 ones (0.03 to 0.04 is usual)."""
    engine = open_engine(dtype="bfloat16")
    plain = oracle(model)
    refit(engine, [(n, w.bfloat16()) for n, w in named_weights(plain)])
    assert 1e-5 < logprob_gap(plain, engine.generate(PROMPTS, SEED, SAMPLING), 1.0) < 6e-2
