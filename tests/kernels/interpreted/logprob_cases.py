"""The Triton kernels on CPU tensors, by Triton's interpreter; ``test_interpreted.py`` starts this file.

Not collected by itself: the interpreter is chosen when the kernels are imported, for the whole process.
"""

import pytest
import torch

from megarl_kernels import logprob_triton, vocab_parallel_logprob
from tests.kernels import logprob_problems as cases

CASES = cases.logits_cases()


def test_the_kernels_are_interpreted():
    assert logprob_triton.INTERPRETED


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_logits_against_float64(case):
    cases.check_logits(case, "triton")


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 20.0}, {"dtype": torch.bfloat16}])
def test_head_against_float64_and_torch(options):
    small = {"workspace_bytes": 1024 * 4 * 8} | options
    for a, b in zip(cases.check_head("triton", **small), cases.check_head("torch", **small), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-2 if a.dtype == torch.bfloat16 else 2e-5)


def test_offsets_beyond_31_bits():
    """An int32 product would leave the allocation, which ends the process."""
    cases.far_rows("triton")
    cases.far_gradient(logprob_triton)


def test_rows_do_not_depend_on_their_batch():
    case = CASES[2]
    temperature = case.options["temperature"]
    whole = vocab_parallel_logprob(case.logits, case.target, temperature=temperature, stats=cases.ALL, backend="triton")
    for i in (0, 6):
        one = slice(i, i + 1)
        alone = vocab_parallel_logprob(
            case.logits[one], case.target[one], temperature=temperature[one], stats=cases.ALL, backend="triton"
        )
        assert torch.equal(alone.logprob, whole.logprob[one])
        assert all(torch.equal(alone.stats[s], whole.stats[s][one]) for s in cases.ALL)


def test_any_subset_of_statistics_is_the_same():
    case = CASES[0]
    every = vocab_parallel_logprob(case.logits, case.target, stats=cases.ALL, backend="triton")
    for stats in ((), *((s,) for s in cases.ALL)):
        some = vocab_parallel_logprob(case.logits, case.target, stats=stats, backend="triton")
        assert torch.equal(some.logprob, every.logprob) and tuple(some.stats) == stats
        assert all(torch.equal(some.stats[s], every.stats[s]) for s in stats)
