import logging

import pytest
import torch

from megarl_kernels.dispatch import pick, resolve


def test_a_cpu_tensor_is_served_by_torch_and_the_reason_is_given_once(caplog):
    backend, reason = pick("some_kernel", torch.zeros(1))
    assert backend == "torch" and "cpu" in reason and "CUDA" in reason
    with caplog.at_level(logging.INFO, logger="megarl_kernels"):
        assert [resolve("some_kernel", "auto", torch.zeros(1)) for _ in range(3)] == ["torch"] * 3
    assert [r.getMessage() for r in caplog.records] == [f"some_kernel runs on torch: {reason}"]


def test_asking_for_a_backend():
    assert resolve("some_kernel", "torch", torch.zeros(1)) == "torch"
    with pytest.raises(ValueError, match="backend='cuda': there are auto, torch, triton"):
        resolve("some_kernel", "cuda", torch.zeros(1))
    with pytest.raises(ValueError, match=r"there are auto, torch$"):
        resolve("some_kernel", "triton", torch.zeros(1), known=("torch",))
