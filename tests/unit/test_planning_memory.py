"""Bytes of a phase: by hand, and against what Megarl's real Megatron ranks allocate."""

import pytest

from megarl.planning.devices import DEVICES, GIB
from megarl.planning.memory import (
    Layout,
    Overheads,
    Training,
    engine_weights,
    kv_tokens,
    layer_activations,
    measure_memory,
    policy_state,
    refit_memory,
    rollout_memory,
    train_memory,
)
from megarl.planning.models import read_shape
from megarl.settings import AgentConfig, LayoutConfig, OptimizerConfig
from tests import tiny
from tests.megatron.ranks import LocalRanks

LLAMA = read_shape("llama-3.1-8b")
OVER = Overheads()


def test_state_of_8b_on_one_gpu_is_18_bytes_per_parameter():
    state = policy_state(LLAMA, Layout(), Training(tokens_per_microbatch=1, microbatches=1), 0)
    assert (state.weights, state.gradients, state.optimizer) == tuple(8_030_261_248 * b for b in (2, 4, 12))
    spread = policy_state(LLAMA, Layout(dp=4, cp=2), Training(tokens_per_microbatch=1, microbatches=1), 0)
    assert spread.optimizer == 8_030_261_248 * 12 / 8 and spread.weights == state.weights
    full = policy_state(LLAMA, Layout(), Training(tokens_per_microbatch=1, microbatches=1, itemsize=4), 0)
    assert full.total == 8_030_261_248 * 16
    plain = policy_state(LLAMA, Layout(), Training(tokens_per_microbatch=1, microbatches=1, optimizer="sgd"), 0)
    assert plain.optimizer == 0


def test_experts_are_sharded_by_their_own_degree():
    """30B-A3B, EP8 of 32 ranks: 16 experts a rank, their optimizer over the 4 ranks that hold the same ones."""
    moe = read_shape("qwen3-30b-a3b")
    state = policy_state(moe, Layout(dp=32, ep=8), Training(tokens_per_microbatch=1, microbatches=1), 0)
    experts = 48 * 16 * 3 * 2048 * 768
    shared = 30_532_122_624 - 8 * experts
    assert state.weights == 2 * (shared + experts)
    assert state.optimizer == pytest.approx(12 * (shared / 32 + experts / 4))


def test_activations_of_a_layer_by_hand():
    """Llama-3.1-8B, bfloat16, per token: 4 rows of 4096, q k v o of 32+8+8+32 heads, 3 rows of 14336, 32 float32."""
    training = Training(tokens_per_microbatch=1, microbatches=1)
    whole = 2 * (4 * 4096 + 80 * 128 + 3 * 14336) + 4 * 32
    assert layer_activations(LLAMA, Layout(), training) == (whole, whole)
    sharded = layer_activations(LLAMA, Layout(tp=4, sp=True), training)
    assert sharded == (whole / 4, whole / 4)
    replicated = layer_activations(LLAMA, Layout(tp=4), training)[0]
    assert replicated == whole / 4 + 2 * 4 * 4096 * 3 / 4
    full = Training(tokens_per_microbatch=1, microbatches=1, recompute="full")
    assert layer_activations(LLAMA, Layout(), full) == (2 * 4096, whole)


def test_a_pipeline_keeps_as_many_microbatches_as_stages_follow():
    training = Training(tokens_per_microbatch=4096, microbatches=8)
    layout = Layout(pp=4)
    kept, whole = layer_activations(LLAMA, layout, training)
    for stage in range(4):
        there = train_memory(LLAMA, layout, training, stage, OVER)
        expected = 4096 * ((4 - stage) * 8 * kept + whole + 4 * 4096) * (1 + OVER.fragmentation)
        assert there.activations == pytest.approx(expected)
        assert (there.logits > 0) == (stage == 3)
    few = train_memory(LLAMA, layout, Training(tokens_per_microbatch=4096, microbatches=2), 0, OVER)
    assert few.activations < train_memory(LLAMA, layout, training, 0, OVER).activations


def test_logits_whole_or_chunked():
    whole = Training(tokens_per_microbatch=16384, microbatches=1)
    logits = train_memory(LLAMA, Layout(), whole, 0, OVER).logits
    assert logits == 2 * 2 * 16384 * 128256 + (512 << 20)
    chunked = Training(tokens_per_microbatch=16384, microbatches=1, logits="chunked", workspace_bytes=1 << 20)
    # the head's gradient in float32 and bfloat16, hidden states and their gradient
    by_hand = (1 << 20) + 6 * 128256 * 4096 + 2 * 2 * 16384 * 4096
    assert train_memory(LLAMA, Layout(), chunked, 0, OVER).logits == by_hand
    assert measure_memory(LLAMA, Layout(), chunked, 0, OVER).logits == (1 << 20) + 2 * 16384 * 4096


def test_the_engine_repeats_heads_that_are_fewer_than_ranks():
    qwen = read_shape("qwen2.5-7b")  # 28 heads, 4 of them for keys and values
    assert engine_weights(qwen, 1) == pytest.approx(2 * 7_615_616_512, rel=1e-3)
    assert engine_weights(qwen, 4) * 4 == pytest.approx(2 * 7_615_616_512, rel=1e-3)
    memory = rollout_memory(qwen, Layout(), DEVICES["h100"], 1, 0.6, 256, OVER)
    used = memory.engine_weights + memory.activations + memory.kv_cache + OVER.context * GIB
    assert used == pytest.approx(0.6 * DEVICES["h100"].memory)
    # 57,344 bytes a token: 28 layers x 4 heads x 128 x 2 x 2
    assert kv_tokens(qwen, 57_344 * 1000, 1) == 1000
    assert kv_tokens(qwen, 57_344 * 1000, 4) == 4000
    assert kv_tokens(qwen, 57_344 * 1000, 8) == 4000


def test_the_refit_holds_policy_and_engine_at_once():
    training = Training(tokens_per_microbatch=1, microbatches=1)
    state = policy_state(LLAMA, Layout(tp=2), training, 0)
    refit = refit_memory(LLAMA, Layout(tp=2), training, 0, 2, 256 << 20, OVER)
    assert refit.weights + refit.gradients + refit.optimizer == state.total
    assert refit.staging == 2 * 128256 * 4096 + (256 << 20)


# ---------------------------------------------------------------- real Megatron


def allocated(worker) -> dict[str, int]:
    """Bytes behind one rank's parameters, gradients and optimizer state."""
    buffers = worker.model.buffers()
    optimizers = worker.optimizer.torch_optimizers()
    state = sum(
        v.numel() * v.element_size() for o in optimizers for s in o.state.values() for v in s.values() if v.dim() > 0
    )
    weights = {p.untyped_storage().data_ptr() for p in worker.model.parameters()}
    masters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    state += sum(p.numel() * p.element_size() for p in masters if p.untyped_storage().data_ptr() not in weights)
    return {
        "stage": worker.groups.pp.rank(),
        "weights": sum(p.numel() * p.element_size() for p in worker.model.parameters()),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "optimizer": state,
    }


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2", Layout(tp=2, dp=2)), ("qwen3", Layout(pp=2, dp=2))],
    ids=["TP2xDP2", "PP2xDP2, tied"],
)
def test_state_is_what_megatron_allocates(family, layout, tmp_path):
    model = tiny.write(tmp_path / family, family, hidden_size=256, intermediate_size=512)
    agent = AgentConfig(
        model=str(model),
        dtype="bfloat16",
        layout=LayoutConfig(tp=layout.tp, pp=layout.pp, dp=layout.dp),
        optimizer=OptimizerConfig(),
    )
    ranks = LocalRanks(agent=agent, temperature=1.0)
    try:
        found = ranks.run(allocated)
    finally:
        ranks.close()
    for stage in range(layout.pp):
        planned = policy_state(read_shape(str(model)), layout, Training(tokens_per_microbatch=1, microbatches=1), stage)
        mine = [rank for rank in found if rank["stage"] == stage]
        assert [rank["weights"] for rank in mine] == [planned.weights] * len(mine)
        # Megatron pads its buffers to whole buckets
        assert [rank["gradients"] for rank in mine] == pytest.approx([planned.gradients] * len(mine), rel=0.01)
        assert sum(rank["optimizer"] for rank in mine) / len(mine) == pytest.approx(planned.optimizer, rel=0.01)
