"""Published settings, composed: the numbers that decide a run, and the arithmetic that follows from them."""

import pytest

from megarl.algos.coverrl import SOLVE, CoVerRL
from megarl.config import compose
from megarl.schedule import learning_rate, warmup_steps

PAIR = ("Qwen/Qwen2.5-3B", "meta-llama/Llama-3.2-3B-Instruct")
COHORTS = {
    "corl_llm_paper_3b": PAIR,
    "corl_llm_paper_7b_8b": ("Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B-Instruct"),
    "corl_llm_paper_ring3": (*PAIR, "Qwen/Qwen3-1.7B-Base"),
}


def test_coverrl_paper():
    cfg = compose(["+experiment=coverrl_paper"])
    assert isinstance(cfg.algo, CoVerRL)
    assert (cfg.algo.positives, cfg.algo.revisions, cfg.algo.choose, cfg.algo.pairs(1)) == (8, 6, "random", 1)
    assert (cfg.algo.filter, cfg.algo.anchor, cfg.algo.negative) == (True, "answer", "least-frequent")
    assert (cfg.batch.prompts_per_step, cfg.batch.samples_per_prompt, cfg.batch.train_samples_per_prompt) == (
        64,
        32,
        16,
    )
    assert (cfg.sampling.temperature, cfg.sampling.max_tokens, cfg.max_prompt_tokens) == (1.0, 2048, 8192)
    assert (cfg.loss.clip_low, cfg.loss.clip_high, cfg.loss.dual_clip) == (0.2, 0.28, 3.0)
    assert (cfg.loss.kl_coef, cfg.loss.kl, cfg.loss.aggregation, cfg.loss.tis_cap) == (0.001, "k3", "token-mean", None)
    assert (cfg.advantage.mode, cfg.advantage.ddof, cfg.advantage.eps) == ("grpo", 1, 1e-6)
    assert (cfg.answers.style, cfg.answers.verdict, cfg.data.views["original"].after) == ("boxed", "keywords", SOLVE)
    assert cfg.agents["solver"].model == "Qwen/Qwen3-1.7B-Base"
    assert cfg.agents["solver"].template == {"enable_thinking": True}
    assert cfg.seed == 42


def test_v32_v37_coverrl_schedule_and_counts():
    cfg = compose(["+experiment=coverrl_paper"])
    optimizer = cfg.agents["solver"].optimizer
    assert cfg.steps == 2 * (7500 // cfg.batch.prompts_per_step) == 234
    assert warmup_steps(optimizer.schedule, cfg.steps) == 7
    rates = [learning_rate(optimizer, step, cfg.steps) for step in (3, 7, 117, 234)]
    assert rates == pytest.approx([2.142857e-7, 5e-7, 2.621049e-7, 0], rel=1e-6)
    assert cfg.batch.updates(64 * 32) == 8 and cfg.batch.updates(2466) == 10 and cfg.batch.updates(0) == 1
    assert 64 * cfg.batch.train_samples_per_prompt == 64 * 2 * cfg.algo.positives == 1024


def test_coverrl_release_is_the_paper_but_for():
    paper, release = (compose([f"+experiment=coverrl_{which}"]) for which in ("paper", "release"))
    assert isinstance(release.algo, CoVerRL)
    changed = {"choose": "first", "even_pairs": True, "unverified": "keep", "revisions": 4}
    assert release.algo == paper.algo.model_copy(update=changed)
    assert release.model_copy(update={"algo": paper.algo, "experiment": paper.experiment}) == paper


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("algo.filter=false", "filter", False),
        ("algo.train_verifier=false", "train_verifier", False),
        ("algo.revisions=0", "revisions", 0),
        ("algo.anchor=prefix", "anchor", "prefix"),
        ("algo.negative=random", "negative", "random"),
        ("algo.min_majority_share=0.2", "min_majority_share", 0.2),
        ("algo.negative_samples=32", "negative_samples", 32),
    ],
)
def test_every_ablation_is_one_override(override, field, value):
    assert getattr(compose(["+experiment=coverrl_paper", override]).algo, field) == value
    others = compose(
        ["+experiment=coverrl_paper", "loss.clip_high=0.2", "agents.solver.template.enable_thinking=false"]
    )
    assert others.loss.clip_high == 0.2 and others.agents["solver"].template == {"enable_thinking": False}


@pytest.mark.parametrize(("name", "models"), COHORTS.items())
def test_corl_llm_paper(name, models):
    cfg = compose([f"+experiment={name}"])
    assert tuple(agent.model for agent in cfg.agents.values()) == models
    names = tuple(cfg.agents)
    assert cfg.algo.name == "corl" and cfg.algo.ring == names
    assert cfg.algo.teachers == {name: names[i - 1] for i, name in enumerate(names)}
    assert cfg.batch.prompts_per_step * cfg.batch.samples_per_prompt == 128 * 12 == 1536
    assert (cfg.batch.updates(1536), cfg.sampling.max_tokens, cfg.sampling.temperature) == (1, 3072, 1.0)
    assert (cfg.loss.clip_low, cfg.loss.clip_high, cfg.loss.dual_clip, cfg.loss.kl_coef) == (0.2, 0.2, None, 0.0)
    assert (cfg.advantage.eps, cfg.advantage.ddof) == (1e-4, 1)
    for agent in cfg.agents.values():
        assert (agent.optimizer.lr, agent.optimizer.betas, agent.optimizer.weight_decay) == (3e-6, (0.9, 0.95), 0.0)
        rates = [learning_rate(agent.optimizer, step, 100) for step in (3, 50, 100)]
        assert rates == pytest.approx([3e-6, 1.715559e-6, 3e-7], rel=1e-6)


def test_same_family_and_the_second_view():
    start = ["+experiment=corl_llm_paper_3b"]
    same = compose([*start, "agents.llama.model=Qwen/Qwen2.5-3B"])
    assert {agent.model for agent in same.agents.values()} == {"Qwen/Qwen2.5-3B"}
    plus = compose([*start, "data.views.rewrite={path: math_rewrite.parquet}", "agents.llama.view=rewrite"])
    assert [agent.view for agent in plus.agents.values()] == ["original", "rewrite"]
    with pytest.raises(ValueError, match=r"agents.llama.view=rewrite is none of data.views: original"):
        compose([*start, "agents.llama.view=rewrite"])


@pytest.mark.parametrize("name", ["demo_coverrl", "demo_corewarding", "demo_ring3"])
def test_demo_experiments_compose(name):
    cfg = compose([f"+experiment={name}"])
    assert cfg.run_dir.parts[:2] == ("runs", "demo") and cfg.run_dir.name == name.removeprefix("demo_")
    assert cfg.steps == 20
