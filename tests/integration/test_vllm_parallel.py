"""Engines of two tensor-parallel ranks: tokens and logprobs after refits, and what is left of them at the end."""

import os
import re
import signal
import time

import psutil
import pytest
from safetensors.torch import load_file, save_file

from megarl.backends.cluster import WorkerLost, connect
from megarl.backends.fingerprints import RefitMismatch
from megarl.backends.megatron.policy import MegatronPolicy
from megarl.backends.placement import place
from megarl.backends.planned import PlannedReshard
from megarl.backends.reshard import reshard
from megarl.backends.scratch import BUCKET, SHARED_MEMORY
from megarl.backends.shards.plan import lower_bound
from megarl.backends.shards.training import training_layout
from megarl.planning import memory
from megarl.planning.models import read_shape
from megarl.settings import (
    AgentConfig,
    ClusterConfig,
    EngineConfig,
    LayoutConfig,
    OptimizerConfig,
    ReshardConfig,
    SamplingConfig,
)
from megarl.types import Seed
from tests import tiny
from tests import vllm_engines as ve
from tests.megatron.ranks import LocalRanks

GREEDY = SamplingConfig(top_k=1, max_tokens=12)
SAMPLE = SamplingConfig(temperature=0.5, max_tokens=16)
SEED = Seed(run=1, step=3)
VERIFIED = ReshardConfig(bucket_bytes=1 << 16, verify_every=1)
FAMILIES = {"ann": "qwen2", "bob": "qwen3"}  # untied, tied


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    cluster = connect(ClusterConfig(device="cpu", gpus_per_node=4), tmp_path_factory.mktemp("run"))
    placements = place(cluster, {"ann": 2, "bob": 2}, one_node={"ann": 2, "bob": 2}, timeout_s=30)
    wanted = {name: (family, {"tp": 2}) for name, family in FAMILIES.items()}
    made = ve.build(tmp_path_factory.mktemp("models"), placements, wanted)
    yield made
    for engine in made.values():
        engine.close()
    cluster.close()


def processes(engine):
    """The engine's actor and everything below it: all that writes to its log."""
    log = str(engine._workers.log_file(0))
    mine = [p for p in psutil.Process().children(recursive=True) if os.readlink(f"/proc/{p.pid}/fd/1") == log]
    (actor,) = [p for p in mine if p.ppid() not in {other.pid for other in mine}]
    return actor, [p for p in mine if p != actor]


def gone(processes, seconds=30.0):
    alive = psutil.wait_procs(processes, timeout=seconds)[1]
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logprobs_equal_transformers_after_every_refit(engines, name):
    said = []
    for version in (1, 2):
        model = ve.random_model(FAMILIES[name], seed=version)
        reshard(ve.Weights(model), engines[name], version, ve.BUCKET)
        rollouts = engines[name].generate(ve.prompts(agent=name), SEED, GREEDY)
        said.append([r.token_ids.tolist() for r in rollouts])
        assert said[-1] == [ve.greedy(model, r.prompt_ids, 12, (2, 6)) for r in rollouts]
        sampled = engines[name].generate(ve.prompts(n=2, agent=name), SEED, SAMPLE)
        assert ve.drift(model, sampled, 0.5).mean() < 1e-5
        assert max(int(r.token_ids.max()) for r in sampled) < 130
    assert all(one != other for one, other in zip(*said, strict=True)), "the refit changed nothing that shows"
    assert ve.drift(ve.random_model(FAMILIES[name], seed=1), sampled, 0.5).mean() > 0.1


@pytest.fixture
def policy(tmp_path):
    """A Megatron policy of two pipeline stages, of other weights than any before."""
    opened = []

    def make(family):
        model = tiny.write(tmp_path / family, family, seed=9, **ve.SHAPE)
        agent = AgentConfig(
            model=str(model),
            dtype="float32",
            layout=LayoutConfig(pp=2),
            engine=EngineConfig(tp=2),
            optimizer=OptimizerConfig(name="sgd", lr=0.02),
        )
        ranks = LocalRanks(agent=agent, temperature=1.0)
        opened.append(MegatronPolicy(agent, ranks, tokens_per_microbatch=512))
        return agent, opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_planned_refit_serves_the_policys_weights(engines, policy, name):
    """PP2 to TP2, tied and untied, twice, with a gathered refit between them; nothing is left in shared memory."""
    agent, one = policy(FAMILIES[name])
    refit = PlannedReshard(agent, one, engines[name], (0, 0), VERIFIED)
    model, other = ve.random_model(FAMILIES[name], seed=9), ve.random_model(FAMILIES[name], seed=4)
    training = training_layout(read_shape(agent.model), memory.Layout(pp=2), 4)
    bound = sum(lower_bound(training, engines[name].layout(training.tensors), rank) for rank in range(2))
    before = set(SHARED_MEMORY.glob(f"{BUCKET}*"))
    for version in (11, 13):
        one.version = version
        told = refit(version)
        refit.verify()
        assert told["buckets"] > 3 and told["bytes"] == bound > 0
        rollouts = engines[name].generate(ve.prompts(agent=name), SEED, GREEDY)
        said = [r.token_ids.tolist() for r in rollouts]
        assert said == [ve.greedy(model, r.prompt_ids, 12, (2, 6)) for r in rollouts]
        assert {r.version for r in rollouts} == {version}
        assert ve.drift(model, engines[name].generate(ve.prompts(n=2, agent=name), SEED, SAMPLE), 0.5).mean() < 1e-5
        reshard(ve.Weights(other), engines[name], version + 1, ve.BUCKET)
        assert ve.drift(other, engines[name].generate(ve.prompts(agent=name), SEED, SAMPLE), 0.5).mean() < 1e-5
    assert set(SHARED_MEMORY.glob(f"{BUCKET}*")) == before


def test_a_planned_refit_that_breaks_off_is_begun_anew(engines, policy):
    """An engine with half of its weights says what is missing, refuses to generate, and is mended by the next refit."""
    agent, one = policy("qwen3")
    refit = PlannedReshard(agent, one, engines["bob"], (0, 0), VERIFIED)
    rounds = one.planned_rounds
    one.planned_rounds = lambda: (parcels for number, parcels in enumerate(rounds()) if number != 1)
    with pytest.raises(ValueError, match=r"parameters of engine rank \d were not written whole in the refit: model\."):
        refit(5)
    with pytest.raises(RuntimeError, match="generate in the middle of a refit"):
        engines["bob"].generate(ve.prompts(), SEED, GREEDY)
    one.planned_rounds = rounds
    refit(6)
    model = ve.random_model("qwen3", seed=9)
    assert ve.drift(model, engines["bob"].generate(ve.prompts(), SEED, SAMPLE), 0.5).mean() < 1e-5


LAYER = "model.layers.1."


def spoiled(rounds, spoil):
    """A policy's rounds, with every bucket put through ``spoil(values, pieces)`` on its way."""

    def passed_on():
        for parcels in rounds():
            for path, pieces in (bucket for parcel in parcels for bucket in parcel.files):
                values = load_file(path)["bucket"]
                spoil(values, pieces)
                save_file({"bucket": values}, path)
            yield parcels

    return passed_on


def swap_query_and_key_rows(values, pieces):
    fused = [p for p in pieces if p.into.param == f"{LAYER}self_attn.qkv_proj.weight"]
    for key in (p for p in fused if p.shape == (32, 128) and p.into.offset == 64 * 128):
        query = next(p for p in fused if p.into.offset == 0)
        a, b = (values[p.start : p.start + 128] for p in (query, key))
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


def forget_a_norm(values, pieces):
    for piece in pieces:
        if piece.into.param == f"{LAYER}post_attention_layernorm.weight":
            values[piece.start : piece.start + 128] = 1.0


@pytest.mark.parametrize(
    ("fault", "named"),
    (
        (swap_query_and_key_rows, (f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.k_proj.weight")),
        (forget_a_norm, (f"{LAYER}post_attention_layernorm.weight",)),
    ),
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_planted_faults_are_caught_and_named(engines, policy, fault, named):
    agent, one = policy("qwen3")
    refit = PlannedReshard(agent, one, engines["bob"], (0, 0), VERIFIED)
    rounds = one.planned_rounds
    one.planned_rounds = spoiled(rounds, fault)
    with pytest.raises(RefitMismatch) as caught:
        refit(0)
    said = set(re.findall(r"(model\.\S+) at rank", str(caught.value)))
    assert said == set(named)
    with pytest.raises(RuntimeError, match="generate in the middle of a refit"):
        engines["bob"].generate(ve.prompts(), SEED, GREEDY)
    one.planned_rounds = rounds
    refit(0)
    model = ve.random_model("qwen3", seed=9)
    assert ve.drift(model, engines["bob"].generate(ve.prompts(), SEED, SAMPLE), 0.5).mean() < 1e-5


def test_weights_of_another_version_are_caught(engines, policy):
    """The policy has moved on: that shows by its version and, where this is put right by hand, by what has moved."""
    agent, one = policy("qwen3")
    refit = PlannedReshard(agent, one, engines["bob"], (0, 0), VERIFIED)
    refit(0)
    one.version = 1
    with pytest.raises(RefitMismatch, match="engine has the weights of version 0, the policy those of 1"):
        refit.verify()
    one.version = 0
    refit.verify()
    one._ranks.run(move_last_norm)
    with pytest.raises(RefitMismatch, match=r"policy's model\.norm\.weight at rank 0, model\.norm\.weight at rank 1$"):
        refit.verify()


def move_last_norm(worker):
    for name, param in worker.model.named_parameters().items():
        if name == "decoder.final_layernorm.weight":
            param.data[3] += 0.25


def test_a_missing_weight_raises_on_both_ranks_and_is_mended(engines):
    model = ve.random_model("qwen3", seed=3)
    lacking = ve.Weights(model)
    del lacking.named["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"never came .*: model\.layers\.0\.self_attn\.k_proj\.weight"):
        reshard(lacking, engines["bob"], 3, ve.BUCKET)
    reshard(ve.Weights(model), engines["bob"], 3, ve.BUCKET)
    assert ve.drift(model, engines["bob"].generate(ve.prompts(), SEED, SAMPLE), 0.5).mean() < 1e-5


def test_closing_leaves_no_process(engines):
    actor, children = processes(engines["bob"])
    assert len(children) >= 2
    engines["bob"].close()
    assert gone([actor, *children])


def test_a_killed_engine_takes_its_ranks_along_and_is_named(engines):
    actor, children = processes(engines["ann"])
    assert len(children) >= 2
    os.kill(actor.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerLost, match=r"ann/engine rank 0 of 1 .* died"):
        engines["ann"].generate(ve.prompts(), SEED, GREEDY)
    assert time.monotonic() - start < 60
    assert gone(children)
