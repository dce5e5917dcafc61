"""What is particular to the reference backends; what they share with the others is in tests/contracts."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from megarl.backends.buckets import write_buckets
from megarl.backends.reference import ReferenceEngine, ReferencePolicy, draw
from megarl.chat import open_chat
from megarl.settings import AgentConfig, SamplingConfig
from megarl.types import Message, Prompt, Seed
from tests import tiny

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])


def drawn(uniform: float, logits=LOGITS, **sampling) -> tuple[int, float]:
    tokens, logprobs = draw(logits, torch.tensor([uniform], dtype=torch.float64), SamplingConfig(**sampling))
    return int(tokens), float(logprobs)


@pytest.mark.parametrize(("temperature", "logprob"), [(0.5, -0.1429), (1.0, -0.4076), (1.5, -0.5749)])
def test_draw_at_a_temperature(temperature, logprob):
    """case-C1"""
    assert drawn(0.0, temperature=temperature) == (0, pytest.approx(logprob, abs=5e-5))


def test_draw_from_a_cut_distribution():
    """case-C3: logprobs are of the distribution that was drawn from, so renormalised."""
    assert drawn(0.0, top_p=0.8) == (0, pytest.approx(-0.3133, abs=5e-5))
    assert drawn(0.999, top_p=0.8)[0] == 1  # token 2 was cut
    assert drawn(0.999, top_p=0.6) == (0, 0.0)
    assert drawn(0.999, top_k=2) == (1, pytest.approx(-1.3133, abs=5e-5))
    assert drawn(0.999, top_k=9)[0] == 2


def test_draw_inverts_the_cumulated_probabilities():
    p = LOGITS[0].double().softmax(0).tolist()
    assert [drawn(u)[0] for u in (0.0, p[0] - 1e-6, p[0] + 1e-6, p[0] + p[1] + 1e-6, 1 - 2**-53)] == [0, 0, 1, 2, 2]


def test_draw_never_gives_what_has_no_probability():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    assert [drawn(u, logits)[0] for u in (0.0, 0.49, 0.51, 1 - 2**-53)] == [1, 1, 3, 3]


def test_draw_follows_the_probabilities():
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).expand(20_000, 6)
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, _ = draw(logits, uniforms, SamplingConfig(temperature=0.7))
    got = torch.bincount(tokens, minlength=6) / 20_000
    torch.testing.assert_close(got, (logits[0] / 0.7).softmax(0), atol=0.012, rtol=0)  # over three standard errors


@pytest.fixture
def agent(tmp_path) -> AgentConfig:
    return AgentConfig(model=str(tiny.write(tmp_path / "m", "llama")), dtype="float32", backend="reference")


def test_a_response_ends_at_the_last_position(agent):
    engine = ReferenceEngine(agent, open_chat(agent.model))
    engine.begin_refit()
    for bucket in write_buckets(AutoModelForCausalLM.from_pretrained(agent.model).named_parameters(), 1 << 20):
        engine.load_weights(bucket)
    engine.finish_refit(0)
    prompt = Prompt(agent="a", uid="7", role="solve", messages=(Message("user", "x" * 240),), n=8)
    wide = SamplingConfig(max_tokens=99, temperature=0.5)
    seen = engine.generate([prompt], Seed(run=0, step=0), wide)
    assert {len(r.prompt_ids) + len(r.token_ids) for r in seen if r.stop == "length"} == {256}
    with pytest.raises(ValueError, match=r"prompt 7 of a has 259 tokens, its model 256 positions"):
        engine.generate([replace(prompt, messages=(Message("user", "x" * 256),))], Seed(run=0, step=0), wide)


def test_a_wrong_shape_is_named(agent):
    engine = ReferenceEngine(agent, open_chat(agent.model))
    engine.begin_refit()
    bucket = next(buckets := write_buckets([("model.norm.weight", torch.zeros(3))], 1 << 20))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\], the engine wants \[64\]"):
        engine.load_weights(bucket)
    buckets.close()
    assert not bucket.path.exists()


def test_models_that_cap_their_logits_are_refused(tmp_path):
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=3.0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="changes logits after the head"):
        ReferencePolicy(AgentConfig(model=str(tmp_path), dtype="float32"), temperature=1.0)


def test_another_models_checkpoint_is_refused(agent, tmp_path):
    policy = ReferencePolicy(agent, temperature=1.0)
    policy.save(tmp_path / "s")
    weights = load_file(tmp_path / "s" / "weights.safetensors")
    weights["model.norm.other"] = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "s" / "weights.safetensors")
    with pytest.raises(ValueError, match=r"another model's checkpoint; 2 weights differ, e\.g\. model\.norm\.other"):
        policy.load(tmp_path / "s")


def test_buckets_are_bounded_and_vanish(monkeypatch, tmp_path):
    weights = {f"w{i}": torch.full((n,), float(i)) for i, n in enumerate([10, 10, 100, 1])}
    seen = []
    for bucket in write_buckets(weights.items(), 80):
        assert bucket.path.exists() and [s for s in seen if s.path.exists()] == []
        assert load_file(bucket.path).keys() == set(bucket.names)
        seen.append(bucket)
    assert [(b.names, b.nbytes) for b in seen] == [(("w0", "w1"), 80), (("w2",), 400), (("w3",), 4)]
    # without shared memory: the temporary directory
    monkeypatch.setattr("megarl.backends.buckets.SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for bucket in write_buckets(weights.items(), 1 << 20):
        assert bucket.path.is_relative_to(tmp_path)
    assert not list(tmp_path.iterdir())


def test_bfloat16_master_weights_are_saved_whole(agent, tmp_path):
    policy = ReferencePolicy(agent.model_copy(update={"dtype": "bfloat16"}), temperature=1.0)
    policy.save(tmp_path / "s")
    assert {w.dtype for w in load_file(tmp_path / "s" / "weights.safetensors").values()} == {torch.float32}
    assert {w.dtype for b in policy.weights(1 << 30) for w in load_file(b.path).values()} == {torch.bfloat16}
