"""What is particular to vLLM engines in Ray actors; what they owe as any engine does is in tests/contracts."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megarl.backends.buckets import write_buckets
from megarl.backends.cluster import connect
from megarl.backends.placement import place
from megarl.backends.reshard import reshard
from megarl.backends.vllm.engine import VllmEngine
from megarl.backends.vllm.worker import STOPS, Request, VllmWorker, check_overrides, process_env
from megarl.backends.workers import WorkerGroup
from megarl.chat import open_chat
from megarl.settings import AgentConfig, ClusterConfig, EngineConfig, SamplingConfig
from megarl.types import Seed
from tests import vllm_engines as ve

GREEDY = SamplingConfig(top_k=1, max_tokens=12)
SAMPLE = SamplingConfig(max_tokens=16)
SEED = Seed(run=1, step=3)


@pytest.fixture(scope="module")
def placements(tmp_path_factory):
    cluster = connect(ClusterConfig(device="cpu", gpus_per_node=4), tmp_path_factory.mktemp("run"))
    yield place(cluster, {"ann": 1, "bob": 1, "two": 2}, one_node={}, timeout_s=30)
    cluster.close()


@pytest.fixture(scope="module")
def engines(placements, tmp_path_factory):
    """ann: Qwen2, untied; bob: Qwen3, tied; two: ann's model on two replicas. They know nothing before a refit."""
    wanted = {"ann": ("qwen2", {}), "bob": ("qwen3", {}), "two": ("qwen2", {"replicas": 2})}
    made = ve.build(tmp_path_factory.mktemp("models"), placements, wanted)
    for engine in made.values():
        with pytest.raises(RuntimeError, match="a refit comes first"):
            engine.generate(ve.prompts(), SEED, GREEDY)
        assert engine.version == -1
    yield made
    for engine in made.values():
        engine.close()


def refit(engine, model, version=0):
    return reshard(ve.Weights(model), engine, version, ve.BUCKET)


@pytest.mark.parametrize("name, family", [("ann", "qwen2"), ("bob", "qwen3")])
def test_greedy_equals_transformers_after_every_refit(engines, name, family):
    """Equal prompts, so that a prefix kept from the weights before would be used."""
    said = []
    for version in (1, 2):
        model = ve.random_model(family, seed=version)
        report = refit(engines[name], model, version)
        assert report["buckets"] > 3
        assert report["bytes"] == sum(tensor.nbytes for tensor in ve.Weights(model).named.values())
        rollouts = engines[name].generate(ve.prompts(agent=name), SEED, GREEDY)
        assert [r.version for r in rollouts] == [version] * len(rollouts)
        said.append([r.token_ids.tolist() for r in rollouts])
        assert said[-1] == [ve.greedy(model, r.prompt_ids, 12, (2, 6)) for r in rollouts]
    assert all(one != other for one, other in zip(*said, strict=True)), "the refit changed nothing that shows"


def tokens(rollouts):
    return {rollout.key: rollout.token_ids.tolist() for rollout in rollouts}


def test_samples_depend_on_seeds_alone(engines):
    model = ve.random_model("qwen2", seed=4)
    for name in ("ann", "two"):
        refit(engines[name], model)
    asked = ve.prompts(n=8)
    once = engines["ann"].generate(asked, SEED, SAMPLE)
    assert [(r.prompt.uid, r.index) for r in once] == [(p.uid, i) for p in asked for i in range(8)]
    assert all(r.text == engines["ann"]._chat.decode(r.token_ids) for r in once)
    again = engines["ann"].generate(asked[::-1], SEED, SAMPLE)
    shared = engines["two"].generate(asked, SEED, SAMPLE)
    few = engines["two"].generate([dataclasses.replace(asked[3], n=1)], SEED, SAMPLE)
    assert tokens(again) == tokens(once) == tokens(shared)
    assert tokens(few).items() <= tokens(once).items()
    other = engines["ann"].generate(asked, Seed(run=1, step=4), SAMPLE)
    assert sum(tokens(other)[key] == sampled for key, sampled in tokens(once).items()) < 5
    assert len({tuple(r.token_ids) for r in once[:8]}) > 4, "samples of one prompt are alike"


def test_end_tokens_and_vocabulary(engines):
    """A nearly flat distribution: every real id is drawn, no padded row is, and either end token ends a response."""
    refit(engines["ann"], ve.random_model("qwen2", seed=5, scale=0.2))
    rollouts = engines["ann"].generate(ve.prompts(n=16), SEED, SamplingConfig(max_tokens=40))
    drawn = np.concatenate([r.token_ids for r in rollouts])
    assert drawn.max() < 130
    assert len(set(drawn.tolist())) > 120
    ended = [r for r in rollouts if r.stop == "end"]
    assert {int(r.token_ids[-1]) for r in ended} == {2, 6}
    assert not any({2, 6} & set(r.token_ids[:-1].tolist()) for r in rollouts)
    cut = [r for r in rollouts if r.stop == "length"]
    assert cut and all(len(r.token_ids) == 40 and r.token_ids[-1] not in (2, 6) for r in cut)
    assert len(ended) + len(cut) == len(rollouts)
    assert not any("<e" in r.text for r in ended)
    assert all(r.token_ids.dtype == np.int32 and r.logprobs.dtype == np.float32 for r in rollouts)
    assert all(len(r.token_ids) == len(r.logprobs) and (r.logprobs < 0).all() for r in rollouts)


def test_two_agents_sample_at_once(engines):
    models = {"ann": ve.random_model("qwen2", seed=6), "bob": ve.random_model("qwen3", seed=6)}

    def work(name):
        refit(engines[name], models[name])
        return engines[name].generate(ve.prompts(n=2, agent=name), SEED, SAMPLE)

    with ThreadPoolExecutor() as pool:
        answered = dict(zip(models, pool.map(work, models), strict=True))
    for name, model in models.items():
        assert ve.drift(model, answered[name], 1.0).mean() < 1e-5
    with pytest.raises(AssertionError):
        assert ve.drift(models["ann"], answered["bob"], 1.0).mean() < 1e-5


def test_every_weight_must_come_once(engines):
    engine, model = engines["ann"], ve.random_model("qwen2", seed=7)
    whole = ve.Weights(model)

    def refuses_to_generate():
        with pytest.raises(RuntimeError, match="in the middle of a refit"):
            engine.generate(ve.prompts(), SEED, GREEDY)
        return True

    lacking = ve.Weights(model)
    del lacking.named["model.layers.1.input_layernorm.weight"]
    with pytest.raises(ValueError, match=r"1 of 27 weights never came .*: model\.layers\.1\.input_layernorm\.weight"):
        reshard(lacking, engine, 5, ve.BUCKET)
    assert refuses_to_generate()

    strange = ve.Weights(model)
    strange.named["model.layers.2.mlp.up_proj.weight"] = strange.named["model.layers.1.mlp.up_proj.weight"].clone()
    with pytest.raises(ValueError, match=r"has no weight model\.layers\.2\.mlp\.up_proj\.weight"):
        reshard(strange, engine, 5, ve.BUCKET)
    assert refuses_to_generate()

    norm = ("model.norm.weight", whole.named["model.norm.weight"])
    engine.begin_refit()
    with pytest.raises(ValueError, match=r"weight model\.norm\.weight came twice"):
        for bucket in write_buckets([norm, norm], bucket_bytes=1):
            engine.load_weights(bucket)
    assert refuses_to_generate()

    reshard(whole, engine, 6, ve.BUCKET)  # what was left half-done does not get in the way
    rollouts = engine.generate(ve.prompts(), SEED, GREEDY)
    assert [r.token_ids.tolist() for r in rollouts] == [ve.greedy(model, r.prompt_ids, 12, (2, 6)) for r in rollouts]
    assert engine.version == 6


def test_prompts_that_cannot_be_sampled(engines):
    refit(engines["ann"], ve.random_model("qwen2", seed=9))
    with pytest.raises(ValueError, match=r"ann: prompt q0 of \d+ tokens and max_tokens=90 exceed the engine's 120"):
        engines["ann"].generate(ve.prompts(), SEED, SamplingConfig(max_tokens=90))


class Forgetful(VllmWorker):
    """Leaves out the last step of a refit."""

    def finish_refit(self) -> None:
        self._received = None
        self._llm.collective_rpc("megarl_finish_reload")


def test_prefixes_of_old_weights_would_be_used_if_they_were_kept(placements, engines, tmp_path):
    """The control of the first test: without the reset, the same prompts get other tokens."""
    model_dir = str(ve.tiny.write(tmp_path / "model", "qwen2", **ve.SHAPE))
    kwargs = {
        "model": model_dir,
        "dtype": "float32",
        "device": "cpu",
        "config": EngineConfig(kv_cache_gib=0.05, max_sequences=64),
        "max_model_len": ve.LONGEST,
        "stop_ids": (2, 6),
        "overrides": {},
    }
    group = WorkerGroup(
        placements["bob"], "bob/forgetful", Forgetful, [kwargs], env=process_env("cpu"), owns_slots=False
    )
    chat = open_chat(model_dir)
    requests = [Request(chat.render(prompt.messages), 0) for prompt in ve.prompts()]
    for version in (1, 2):
        model = ve.random_model("qwen2", seed=version)
        group.call_all("begin_refit")
        for bucket in ve.Weights(model).weights(ve.BUCKET):
            group.call_all("load_weights", bucket.path, bucket.names)
        group.call_all("finish_refit")
        said = [r.token_ids.tolist() for r in group.call_all("generate", requests, GREEDY)[0]]
        right = [ve.greedy(model, request.prompt_ids, 12, (2, 6)) for request in requests]
        assert (said == right) is (version == 1)
    group.close()


def test_vllms_own_words_are_checked_against_vllm(placements):
    from vllm.v1.engine import FINISH_REASON_STRINGS

    assert set(STOPS) == set(FINISH_REASON_STRINGS)
    check_overrides({"max_num_batched_tokens": 256, "block_size": 16})
    with pytest.raises(ValueError, match=r"vllm\.max_num_batch_tokens: .*did you mean vllm\.max_num_batched_tokens\?"):
        check_overrides({"max_num_batch_tokens": 256})
    with pytest.raises(ValueError, match=r"vllm\.tensor_parallel_size is set by agents\.<name>\.engine\.tp"):
        check_overrides({"tensor_parallel_size": 2})


def test_a_wrong_native_argument_ends_the_start(placements, tmp_path):
    model: Path = ve.tiny.write(tmp_path, "llama", **ve.SHAPE)
    agent = AgentConfig(model=str(model), dtype="float32")
    with pytest.raises(ValueError, match=r"vllm\.no_such_thing: vLLM has no such engine argument"):
        VllmEngine("eve", agent, placements["ann"], open_chat(str(model)), 64, {"no_such_thing": 1})
