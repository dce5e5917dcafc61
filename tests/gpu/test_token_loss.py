"""The Triton token loss on a CUDA device; tests/kernels/interpreted holds the same checks without one."""

import pytest
import torch

from megarl_kernels import grpo_token_loss
from megarl_kernels.dispatch import pick
from megarl_kernels.token_loss_terms import METRICS
from tests.kernels.packs import by_definition, pack_of, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(pack):
    return {k: v.cuda() for k, v in pack.items()}


def test_auto_picks_triton():
    assert pick("grpo_token_loss", torch.empty(1, device="cuda"))[0] == "triton"
    assert pick("grpo_token_loss", torch.empty(1, device="cuda", dtype=torch.float64))[0] == "torch"


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("aggregation", ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))
@pytest.mark.parametrize("tokens", (1, 1000, 16384, 100_003))
def test_agrees_with_the_definition(tokens, level, aggregation):
    pack = pack_of(tokens, 13, seed=tokens, spread=0.3 if level == "token" else 0.05)
    options = {
        "num_tokens": tokens, "num_sequences": 13, "ratio_level": level, "aggregation": aggregation, "kl_coef": 0.1,
        "dual_clip": 3.0, "clip_high": 0.28,
    }  # fmt: skip
    want, want_grad = by_definition(pack, **options)
    loss, metrics, grad = run(on_device(pack), "triton", **options)
    scale = 1 + metrics["ratio_sum"].item() / tokens
    torch.testing.assert_close(loss.double().cpu(), want, atol=2e-6 * scale, rtol=1e-5)
    torch.testing.assert_close(grad.double().cpu(), want_grad, atol=1e-30, rtol=5e-5)
    _, again, _ = run(on_device(pack), "torch", **options)
    for name, value in metrics.items():
        torch.testing.assert_close(value.double(), again[name], atol=1e-4, rtol=1e-4, msg=name)


def test_repeats_bit_for_bit_and_waits_for_nothing():
    pack = on_device(pack_of(100_000, 31, seed=1))
    options = {"num_tokens": torch.tensor(100_000, device="cuda"), "num_sequences": 31, "ratio_level": "sequence"}
    first = run(pack, "triton", **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(pack, "triton", **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    assert all(torch.equal(first[1][k], second[1][k]) for k in METRICS)


def test_one_launch_forward_and_one_backward():
    pack = on_device(pack_of(16384, 9, seed=2))
    logprob = pack.pop("logprob").requires_grad_()
    upstream = torch.ones((), device="cuda")

    def launches(call):
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]

    def forward():
        return grpo_token_loss(logprob, **pack, num_tokens=9, num_sequences=9, kl_coef=0.1)[0]

    assert len(launches(forward)) == 1
    loss = forward()
    assert len(launches(lambda: torch.autograd.grad(loss, logprob, upstream, retain_graph=True))) == 1


def test_an_id_outside_is_never_a_plausible_number():
    pack = on_device(pack_of(5000, 4, seed=3))
    at = int(pack["mask"].nonzero()[11])
    for wrong in (-1, 4, 1 << 40):
        pack["sequence_ids"][at] = wrong
        for level in ("token", "sequence"):
            assert run(pack, "triton", num_tokens=1, num_sequences=1, ratio_level=level)[0].isnan()


def test_more_than_2_to_the_31_tokens():
    tokens, last = (1 << 31) + 5000, 4000
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free device memory")
    tail = on_device(pack_of(last, 1, seed=4))
    del tail["reference_logprob"], tail["tis_weight"]
    want, want_metrics, _ = run(tail, "triton", num_tokens=last, num_sequences=1)
    whole = {"advantage": tail["advantage"]}
    for name in ("logprob", "old_logprob", "sequence_ids", "mask"):
        whole[name] = torch.zeros(tokens, dtype=tail[name].dtype, device="cuda")
        whole[name][-last:] = tail[name]
    loss, metrics = grpo_token_loss(**whole, num_tokens=last, num_sequences=1, backend="triton")
    torch.testing.assert_close(loss, want, atol=1e-5, rtol=1e-5)
    assert metrics["tokens"] == want_metrics["tokens"]
