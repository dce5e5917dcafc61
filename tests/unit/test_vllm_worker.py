"""The parts of the vLLM backend that need no vLLM."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megarl.backends.vllm.engine import split
from megarl.backends.vllm.worker import Request, _response, checkpoint_names, sampled_logprobs


def logprob(value: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank)


@pytest.mark.parametrize("order", [(382, 13), (13, 382)])
def test_a_logprob_is_looked_up_by_token_not_by_place(order):
    table = {382: logprob(-4.20, 4), 13: logprob(-0.70, 1)}
    found = sampled_logprobs([382], [{token: table[token] for token in order}])
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([-4.20])


def test_every_position_has_its_own_table():
    tables = [{1: logprob(-0.1, 1)}, {1: logprob(-0.2, 2), 0: logprob(-0.3, 1)}]
    assert sampled_logprobs([1, 0], tables).tolist() == pytest.approx([-0.1, -0.3])
    with pytest.raises(ValueError):
        sampled_logprobs([1, 0], tables[:1])


def test_a_request_that_failed_has_no_answer():
    response = _response(SimpleNamespace(token_ids=[], logprobs=None, finish_reason="error"))
    assert (response.token_ids.tolist(), response.logprobs.tolist(), response.stop) == ([], [], "abort")
    caught = _response(SimpleNamespace(token_ids=[3], logprobs=[{3: logprob(-0.1, 1)}], finish_reason="repetition"))
    assert (len(caught.logprobs), caught.stop) == (1, "abort")


@pytest.mark.parametrize("count, replicas, sizes", [(7, 3, [3, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0]), (4, 1, [4])])
def test_shares_are_contiguous_and_even(count, replicas, sizes):
    requests = [Request(np.zeros(1, dtype=np.int32), seed) for seed in range(count)]
    shares = split(requests, replicas)
    assert [len(share) for share in shares] == sizes
    assert [request.seed for share in shares for request in share] == list(range(count))


def write(folder, config: dict, **files: tuple[str, ...]):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for stem, names in files.items():
        tensors = {name: torch.zeros(1) for name in names}
        save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_weights_are_named_by_the_models_own_files(tmp_path):
    parts = {"one": ("model.a.weight", "model.a.rotary_emb.inv_freq"), "two": ("lm_head.weight",)}
    untied = write(tmp_path / "untied", {}, **parts)
    assert checkpoint_names(untied) == {"model.a.weight", "lm_head.weight"}
    tied = write(tmp_path / "tied", {"tie_word_embeddings": True}, **parts)
    assert checkpoint_names(tied) == {"model.a.weight"}
    with pytest.raises(ValueError, match="no safetensors files there"):
        checkpoint_names(write(tmp_path / "none", {}))
