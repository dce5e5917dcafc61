"""Engines of two tensor-parallel ranks: tokens and logprobs after refits, and what is left of them at the end."""

import os
import re
import signal
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import ray
from safetensors.torch import load_file, save_file

import megarl.backends.shards.training
from megarl.agents import generate, reshard_all
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
from tests import cohort, tiny
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


def planned(agent, one, engine):
    return PlannedReshard(agent, one, engine, (0, 0), VERIFIED, temperature=1.0, drift_limit=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_planned_refit_serves_the_policys_weights(engines, policy, name):
    """PP2 to TP2, tied and untied, twice, with a gathered refit between them; nothing is left in shared memory."""
    agent, one = policy(FAMILIES[name])
    refit = planned(agent, one, engines[name])
    model, other = ve.random_model(FAMILIES[name], seed=9), ve.random_model(FAMILIES[name], seed=4)
    training = training_layout(read_shape(agent.model), memory.Layout(pp=2), 4)
    bound = sum(lower_bound(training, engines[name].layout(training.tensors), rank) for rank in range(2))
    before = set(SHARED_MEMORY.glob(f"{BUCKET}*"))
    for version in (11, 13):
        one.version = version
        told = refit(version)
        refit.awake()
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
    refit = planned(agent, one, engines["bob"])
    rounds = one.planned_rounds
    one.planned_rounds = lambda: (parcels for number, parcels in enumerate(rounds()) if number != 1)
    with pytest.raises(ValueError, match=r"parameters of engine rank \d were not written whole in the refit: model\."):
        refit(0)
    with pytest.raises(RuntimeError, match="generate in the middle of a refit"):
        engines["bob"].generate(ve.prompts(), SEED, GREEDY)
    one.planned_rounds = rounds
    refit(0)
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


def test_swapped_rows_are_caught_and_named(engines, policy):
    agent, one = policy("qwen3")
    refit = planned(agent, one, engines["bob"])
    rounds = one.planned_rounds
    one.planned_rounds = spoiled(rounds, swap_query_and_key_rows)
    with pytest.raises(RefitMismatch) as caught:
        refit(0)
    said = set(re.findall(r"(model\.\S+) at rank", str(caught.value)))
    assert said == {f"{LAYER}self_attn.{x}_proj.weight" for x in "qk"}
    with pytest.raises(RuntimeError, match="generate in the middle of a refit"):
        engines["bob"].generate(ve.prompts(), SEED, GREEDY)
    one.planned_rounds = rounds
    refit(0)
    model = ve.random_model("qwen3", seed=9)
    assert ve.drift(model, engines["bob"].generate(ve.prompts(), SEED, SAMPLE), 0.5).mean() < 1e-5


def test_faults_of_the_plan_itself_are_caught_and_named(engines, policy, monkeypatch):
    """A plan that takes a head's key for its value, as it would with Megatron's rows described wrongly.

    Its checks, its byte counts and any checksum of its own boxes agree with it; Bridge's export does not.
    """
    described = megarl.backends.shards.training._query_groups
    wrong = {"q": "q", "k": "v", "v": "k"}
    monkeypatch.setattr(
        megarl.backends.shards.training,
        "_query_groups",
        lambda shape, kind, tp, rank: described(shape, wrong[kind], tp, rank),
    )
    agent, one = policy("qwen2")
    refit = planned(agent, one, engines["ann"])
    with pytest.raises(RefitMismatch) as caught:
        refit(0)
    said = set(re.findall(r"layers\.0\.self_attn\.(\S+) at rank", str(caught.value)))
    assert said == {"k_proj.bias", "k_proj.weight", "v_proj.bias", "v_proj.weight"}
    monkeypatch.undo()
    planned(agent, one, engines["ann"])(0)


def in_engine(engine, fn, *args):
    """``fn(actor's VllmWorker, *args)`` in the engine's actor."""
    (actor,) = engine._workers._actors
    return ray.get(actor.__ray_call__.remote(lambda host: fn(host._worker, *args)))


def in_every_rank(engine, fn):
    """``fn(vLLM's worker)`` in the process of each of its ranks."""
    return in_engine(engine, lambda worker: worker._llm.collective_rpc(fn))


@contextmanager
def patched(engine, name, make):
    """A name of the loading module is ``make(what it was)`` in every rank."""

    def patch(_):
        import megarl.backends.vllm.loading as loading

        loading.kept = getattr(loading, name)
        setattr(loading, name, make(loading.kept))

    def mend(_):
        import megarl.backends.vllm.loading as loading

        setattr(loading, name, loading.kept)

    in_every_rank(engine, patch)
    yield
    in_every_rank(engine, mend)


def forgets_a_norm(place):
    return lambda params, bucket, pieces: (
        None if pieces[0].into.param.endswith("1.post_attention_layernorm.weight") else place(params, bucket, pieces)
    )


def fills_a_padded_row(boxes):
    """130 rows of vocabulary, which vLLM pads to 192: those from 34 on of rank 1 belong to no tensor."""

    class Filling(boxes):
        def finish(self):
            table = self._model.get_parameter("model.embed_tokens.weight").data
            if not table[-1].any():
                table[-1, 3:5] = 1.0
            return super().finish()

    return Filling


@pytest.mark.parametrize(
    ("name", "make", "named"),
    (
        ("place", forgets_a_norm, {f"{LAYER}post_attention_layernorm.weight"}),
        ("Boxes", fills_a_padded_row, {"padding of model.embed_tokens.weight"}),
    ),
    ids=("a norm is never written", "a padded row holds something"),
)
def test_what_goes_wrong_inside_the_engine_is_named(engines, policy, name, make, named):
    agent, one = policy("qwen3")
    refit = planned(agent, one, engines["bob"])
    reshard(ve.Weights(ve.random_model("qwen3", seed=2)), engines["bob"], 0, ve.BUCKET)
    with patched(engines["bob"], name, make), pytest.raises(RefitMismatch) as caught:
        refit(0)
    assert set(re.findall(r"(?:policy's|,) (.+?) at rank", str(caught.value))) == named
    refit(0)
    refit.awake()


def test_a_stale_prefix_cache_is_caught(engines, policy):
    """Equal weights by every checksum, and yet other logprobs."""
    agent, one = policy("qwen3")
    engine = engines["bob"]
    refit = planned(agent, one, engine)
    refit(0)
    refit.awake()
    refit.before_sleep()
    in_engine(engine, lambda worker: setattr(worker._llm, "reset_prefix_cache", lambda: True))
    one._ranks.run(move_every_weight)
    refit(0)
    with pytest.raises(RefitMismatch, match=r"differ by .* in the logprobs of .* given tokens at replica 0"):
        refit.awake()
    in_engine(engine, lambda worker: delattr(worker._llm, "reset_prefix_cache"))
    refit(0)
    refit.awake()


def test_a_tied_head_of_old_weights_is_caught(engines, policy):
    """vLLM keeps a packed copy of it on CPU; the parameters themselves are right."""
    agent, one = policy("qwen3")
    refit = planned(agent, one, engines["bob"])
    reshard(ve.Weights(ve.random_model("qwen3", seed=2)), engines["bob"], 0, ve.BUCKET)
    with patched(engines["bob"], "_repack_heads", lambda repack: lambda model: None):
        refit(0)
    with pytest.raises(RefitMismatch, match="in the logprobs of"):
        refit.awake()


def move_every_weight(worker):
    for param in worker.model.named_parameters().values():
        param.data.mul_(1.05)


def test_weights_of_another_version_are_caught(engines, policy):
    """The policy has moved on: that shows by its version and, where this is put right by hand, by what has moved."""
    agent, one = policy("qwen3")
    refit = planned(agent, one, engines["bob"])
    with pytest.raises(RefitMismatch, match="engine has the weights of version 3, the policy those of 0"):
        refit(3)
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


class Weights(ve.Weights):
    """A policy, as far as ``revive`` is concerned."""

    version = 4

    def onload(self):
        assert not self.here, "loaded twice"
        self.here = True

    def offload(self):
        self.here = False

    here = False


@pytest.fixture(scope="module")
def agent(engines):
    """Of the engine of two ranks, and its policy of random weights."""
    policy = Weights(ve.random_model("qwen2", seed=3))
    made = cohort.agent("ann", policy, engines["ann"], sampling=SamplingConfig(max_tokens=60), bucket_bytes=ve.BUCKET)
    return made


def test_an_engine_that_dies_over_its_rollouts_draws_the_same_again(agent):
    """A rank of it, in the middle of the work: the actor follows, all is started again under the policy's weights."""
    policy, engine = agent.policy, agent.engine
    reshard(policy, engine, policy.version, ve.BUCKET)
    asked, seconds = ve.prompts(n=8), {}
    before = generate({"ann": agent}, asked, SEED, seconds)
    actor, children = processes(engine)

    def kill():
        time.sleep(0.3)
        os.kill(max(child.pid for child in children), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    after = generate({"ann": agent}, asked, SEED, seconds)
    killer.join()
    assert seconds["agent/ann/engine/restarts"] == 1 and not policy.here
    assert gone([actor, *children])
    assert {r.version for r in after} == {policy.version}
    assert [r.token_ids.tolist() for r in after] == [r.token_ids.tolist() for r in before]


def test_a_killed_engine_takes_its_ranks_along_is_named_and_replaced_at_the_next_refit(agent):
    engine, seconds = agent.engine, {}
    agent.policy.here = True  # it is learning
    reshard_all({"ann": agent}, agent.policy.version, seconds)
    before = engine.generate(ve.prompts(), SEED, GREEDY)
    actor, children = processes(engine)
    assert len(children) >= 2
    os.kill(actor.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerLost, match=r"ann/engine rank 0 of 1 .* died"):
        engine.generate(ve.prompts(), SEED, GREEDY)
    assert time.monotonic() - start < 60
    assert gone(children)
    reshard_all({"ann": agent}, agent.policy.version, seconds)
    assert seconds["agent/ann/engine/restarts"] == 1 and agent.policy.here
    engine.wake()
    assert [r.token_ids.tolist() for r in engine.generate(ve.prompts(), SEED, GREEDY)] == [
        r.token_ids.tolist() for r in before
    ]
