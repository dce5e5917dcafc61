"""The shipped presets of published settings: the numbers that matter, written down a second time."""

import pytest

from megarl.config import compose
from megarl.schedule import warmup_steps

VERL = {
    "advantage.mode": "grpo",
    "advantage.ddof": 1,
    "advantage.eps": 1e-6,
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.dual_clip": 3.0,
    "loss.kl": "k3",
    "loss.aggregation": "token-mean",
    "loss.tis_cap": None,
    "sampling.temperature": 1.0,
    "reward.overlong_buffer": None,
    "batch.refill_rounds": None,
    "agents.AGENT.optimizer.betas": (0.9, 0.999),
    "agents.AGENT.optimizer.weight_decay": 0.01,
    "agents.AGENT.optimizer.clip_grad": 1.0,
    "agents.AGENT.optimizer.schedule.per": "step",
}
TTRL = VERL | {
    "algo.name": "ttrl",
    "algo.min_majority_share": 0.0,
    "batch.samples_per_prompt": 64,
    "batch.train_samples_per_prompt": 32,
    "loss.kl_coef": 0.001,
    "agents.AGENT.optimizer.lr": 5e-7,
    "agents.AGENT.optimizer.schedule.decay": "cosine",
    "agents.AGENT.optimizer.schedule.warmup": 0.03,
    "agents.AGENT.optimizer.schedule.min_ratio": 0.0,
}
EXPECTED = {
    "ttrl_repo": TTRL
    | {
        "algo.format_reward": False,
        "agents.AGENT.model": "Qwen/Qwen2.5-Math-1.5B",
        "batch.prompts_per_step": 8,
        "batch.samples_per_update": 32,
        "data.max_prompt_tokens": 512,
        "sampling.max_tokens": 3072,
        "steps": 80 * (30 // 8),
    },
    "ttrl_coverrl": TTRL
    | {
        "algo.format_reward": True,
        "agents.AGENT.model": "Qwen/Qwen3-1.7B-Base",
        "batch.prompts_per_step": 64,
        "batch.samples_per_update": 256,
        "data.max_prompt_tokens": 8192,
        "sampling.max_tokens": 2048,
        "seed": 42,
        "steps": 2 * (7500 // 64),
    },
    "intuitor": VERL
    | {
        "algo.name": "intuitor",
        "batch.prompts_per_step": 128,
        "batch.samples_per_prompt": 8,
        "batch.updates_per_step": 1,
        "loss.kl_coef": 0.005,
        "data.max_prompt_tokens": 512,
        "sampling.max_tokens": 3072,
        "agents.AGENT.optimizer.lr": 3e-6,
        "agents.AGENT.optimizer.schedule.decay": "cosine",
        "agents.AGENT.optimizer.schedule.warmup": 0.1,
        "steps": 7500 // 128,
    },
    "rent": VERL
    | {
        "algo.name": "rent",
        "algo.unparseable_entropy": None,
        "batch.prompts_per_step": 500,
        "batch.samples_per_prompt": 5,
        "batch.updates_per_step": 1,
        "loss.kl_coef": 0.001,
        "data.max_prompt_tokens": 1024,
        "sampling.max_tokens": 3072,
        "agents.AGENT.optimizer.lr": 1e-6,
        "agents.AGENT.optimizer.schedule.decay": "constant",
    },
    "gt": {
        "algo.name": "rlvr",
        "batch.prompts_per_step": 128,
        "batch.samples_per_prompt": 12,
        "batch.updates_per_step": 1,
        "sampling.max_tokens": 3072,
        "sampling.temperature": 1.0,
        "advantage.ddof": 1,
        "advantage.eps": 1e-4,
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
        "loss.dual_clip": None,
        "loss.kl_coef": 0.0,
        "loss.tis_cap": None,
        "loss.aggregation": "token-mean",
        "agents.AGENT.optimizer.lr": 3e-6,
        "agents.AGENT.optimizer.betas": (0.9, 0.95),
        "agents.AGENT.optimizer.weight_decay": 0.0,
        "agents.AGENT.optimizer.schedule.min_ratio": 0.1,
        "agents.AGENT.optimizer.schedule.warmup": 0.03,
    },
    "demo_intuitor": {"algo.name": "intuitor", "name": "intuitor", "experiment": "demo"},
    "demo_rent": {"algo.name": "rent", "name": "rent", "experiment": "demo"},
}


def value(run, path):
    for part in path.split("."):
        run = run[part]
    return run


@pytest.mark.parametrize("name", EXPECTED)
def test_published_numbers(name):
    run = compose([f"+experiment={name}"]).model_dump()
    [run["agents"]["AGENT"], *others] = run["agents"].values()
    assert bool(others) == name.startswith("demo")
    assert {key: value(run, key) for key in EXPECTED[name]} == EXPECTED[name]


def test_v37_sequences_per_update():
    for name, updates, sequences in (("ttrl_repo", 8, 32), ("ttrl_coverrl", 8, 256), ("gt", 1, 1536)):
        batch = compose([f"+experiment={name}"]).batch
        trained = batch.prompts_per_step * (batch.train_samples_per_prompt or batch.samples_per_prompt)
        assert batch.updates(trained) == updates and trained == sequences * updates


def test_v32_warmup_of_coverrls_ttrl():
    cfg = compose(["+experiment=ttrl_coverrl"])
    assert (cfg.steps, warmup_steps(cfg.agents["solver"].optimizer.schedule, cfg.steps)) == (234, 7)


def test_recipes_change_what_they_name_and_nothing_else():
    plain = compose(["+experiment=gt"]).model_dump()
    dapo = compose(["+experiment=gt", "+recipe=dapo"]).model_dump()
    assert (value(dapo, "loss.clip_low"), value(dapo, "loss.clip_high")) == (0.2, 0.28)
    assert (value(dapo, "sampling.max_tokens"), value(dapo, "reward.overlong_buffer")) == (20480, 4096)
    assert value(dapo, "batch.refill_rounds") == 10 and value(dapo, "loss.aggregation") == "token-mean"
    doctor = compose(["+experiment=gt", "+recipe=dr_grpo"]).model_dump()
    assert value(doctor, "advantage.mode") == "dr_grpo"
    assert value(doctor, "loss.aggregation") == "seq-mean-token-sum-norm"
    assert value(doctor, "loss.max_tokens") == value(doctor, "sampling.max_tokens") == 3072
    gspo = compose(["+experiment=gt", "+recipe=gspo"]).model_dump()
    loss = gspo["loss"]
    assert (loss["ratio_level"], loss["clip_low"], loss["clip_high"]) == ("sequence", 3e-4, 4e-4)
    assert loss["aggregation"] == "seq-mean-token-mean" and loss["dual_clip"] is None
    assert {key for key in plain if plain[key] != gspo[key]} == {"loss"}
    for changed, parts in ((dapo, {"loss", "sampling", "reward", "batch"}), (doctor, {"advantage", "loss"})):
        assert {key for key in plain if plain[key] != changed[key]} == parts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["+experiment=intuitor", "batch.refill_rounds=2"], "batch.refill_rounds=2.*measures certainty"),
        (["+experiment=gt", "reward.overlong_buffer=4000"], "overlong_buffer=4000 is more than the 3072 tokens"),
        (["+experiment=gt", "reward.overlong_bufer=4"], "did you mean overlong_buffer"),
        (["+experiment=ttrl_repo", "algo.min_majority_share=2.0"], "algo.ttrl.min_majority_share"),
        (["+experiment=ttrl_repo", "batch.train_samples_per_prompt=65"], "more than samples_per_prompt=64"),
    ],
)
def test_refusals(changes, expected):
    with pytest.raises(ValueError, match=expected):
        compose(changes)
