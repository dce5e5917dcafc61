import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl_kernels import logprob as module
from megarl_kernels import vocab_parallel_logprob

ALL = ("entropy", "self_certainty", "top1_probability", "sum_p2")


def reference(logits, target, temperature=1.0, vocab_size=None, softcap=0.0, scale=1.0):
    """All five quantities in float64 by the plain definition."""
    z = logits.double()[:, :vocab_size] * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    z = z / torch.as_tensor(temperature, dtype=torch.float64).expand(z.shape[0])[:, None]
    logp = z.log_softmax(1)
    p = logp.exp()
    plogp = torch.where(p == 0, torch.zeros_like(p), p * logp)
    out = {
        "logprob": logp.gather(1, target.clamp(min=0)[:, None])[:, 0],
        "entropy": -plogp.sum(1),
        "self_certainty": -math.log(z.shape[1]) - logp.mean(1),
        "top1_probability": p.max(1).values,
        "sum_p2": p.square().sum(1),
    }
    return {k: torch.where(target == -100, torch.zeros_like(v), v) for k, v in out.items()}


def check(logits, target, tolerance=2e-6, **options):
    got = vocab_parallel_logprob(logits, target, stats=ALL, **options)
    scale = options.pop("logit_scale", 1.0)
    want = reference(logits, target, scale=scale, **options)
    for name, value in {"logprob": got.logprob, **got.stats}.items():
        torch.testing.assert_close(
            value.double(), want[name], atol=tolerance, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    return got


def test_case_c1_temperature():
    logits, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    assert vocab_parallel_logprob(logits, target, temperature=0.5).logprob.item() == pytest.approx(-0.1429, abs=1e-4)
    assert vocab_parallel_logprob(logits, target).logprob.item() == pytest.approx(-0.4076, abs=1e-4)
    each = vocab_parallel_logprob(logits.repeat(2, 1), target.repeat(2), temperature=torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(each.logprob, torch.tensor([-0.1429, -0.4076]), atol=1e-4, rtol=0)


def test_case_c15_padded_columns_take_no_part():
    for pad in (50.0, 0.0, float("inf"), float("nan")):
        logits = torch.tensor([[1.0, 2.0, 0.5, pad]], requires_grad=True)
        got = vocab_parallel_logprob(logits, torch.tensor([1]), vocab_size=3, stats=ALL)
        bare = vocab_parallel_logprob(logits[:, :3], torch.tensor([1]), stats=ALL)
        assert got.logprob.item() == pytest.approx(-0.4644, abs=1e-4)
        assert all(torch.equal(got.stats[s], bare.stats[s]) for s in ALL)
        (got.logprob + got.stats["entropy"] + got.stats["self_certainty"]).backward()
        assert logits.grad[0, 3] == 0 and torch.isfinite(logits.grad).all() and logits.grad.any()


def test_v15_entropy_and_certainty():
    got = vocab_parallel_logprob(torch.tensor([[0.0] * 4, [2.0, 0, 0, 0]]), torch.tensor([0, 0]), stats=ALL)
    torch.testing.assert_close(got.stats["entropy"], torch.tensor([1.386294361, 0.918283765]))
    torch.testing.assert_close(got.stats["self_certainty"], torch.tensor([0.0, 0.454458593]), atol=1e-6, rtol=1e-6)
    shifted = vocab_parallel_logprob(torch.tensor([[102.0, 100, 100, 100]]), torch.tensor([0]), stats=ALL)
    torch.testing.assert_close(shifted.stats["self_certainty"], torch.tensor([0.454458593]))


def test_against_float64():
    torch.manual_seed(0)
    logits, target = 4 * torch.randn(33, 257), torch.randint(0, 250, (33,))
    target[5] = -100
    check(logits, target)
    check(logits, target, temperature=torch.rand(33) + 0.3, vocab_size=250)
    check(logits, target, softcap=3.0, logit_scale=0.5, temperature=0.7)
    check(logits.t().contiguous().t(), target)  # strided rows


def test_case_h1_bfloat16_logits_are_read_exactly():
    torch.manual_seed(0)
    logits = (6 * torch.randn(16, 20011)).to(torch.bfloat16)
    target = torch.randint(0, 20011, (16,))
    check(logits, target, temperature=0.9, tolerance=1e-5)
    naive = logits.div(0.9).log_softmax(1).gather(1, target[:, None])[:, 0].double()
    assert (naive - reference(logits, target, 0.9)["logprob"]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "logits",
    [
        torch.full((2, 7), -3.0),
        torch.tensor([[1e4, -1e4, 0, 5]] * 2),
        torch.tensor([[-1e4, -1e4 - 1, -1e4 + 1, -1e4]] * 2),
        torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]] * 2),
    ],
)
def test_case_h11_extreme_logits(logits):
    logits = logits.clone().requires_grad_()
    got = vocab_parallel_logprob(logits, torch.tensor([2, 1]))
    want = reference(logits.detach(), torch.tensor([2, 1]))
    torch.testing.assert_close(got.logprob.double(), want["logprob"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.stats["entropy"].double(), want["entropy"], atol=1e-6, rtol=1e-6)
    assert (got.logprob <= 0).all()
    (got.logprob.sum() + got.stats["entropy"].sum()).backward()
    assert torch.isfinite(logits.grad).all()


def test_nearly_certain_tokens_keep_their_gradient():
    # 1 - p = 1e-3 and 1e-6
    for gap in (8.3, 15.2):
        logits = torch.tensor([[gap, 0.0, 0.0, 0.0, 0.0]], requires_grad=True)
        vocab_parallel_logprob(logits, torch.tensor([0])).logprob.backward()
        exact = logits.detach().double().requires_grad_()
        exact.log_softmax(1)[0, 0].backward()
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradients_are_exact(softcap):
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, -100, 9, 4, 9])
    temperature = torch.rand(6, dtype=torch.float64) + 0.5

    def f(x):
        out = vocab_parallel_logprob(
            x, target, vocab_size=10, temperature=temperature, softcap=softcap, logit_scale=0.7,
            stats=("entropy", "self_certainty"),
        )  # fmt: skip
        return out.logprob, out.stats["entropy"], out.stats["self_certainty"]

    assert torch.autograd.gradcheck(f, (logits,))
    sum(x.sum() for x in f(logits)).backward()
    assert not logits.grad[2].any() and not logits.grad[:, 10].any()


def test_statistics_without_a_gradient_say_so():
    out = vocab_parallel_logprob(torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1]), stats=ALL)
    assert not out.stats["sum_p2"].requires_grad and not out.stats["top1_probability"].requires_grad
    assert out.logprob.requires_grad and out.stats["entropy"].requires_grad


def test_chunks_do_not_show_and_the_input_is_not_written(monkeypatch):
    torch.manual_seed(0)
    target = torch.randint(0, 50, (20,))

    def run():
        logits = base.clone().requires_grad_()
        out = vocab_parallel_logprob(logits, target, stats=ALL)
        (out.logprob.sum() + out.stats["entropy"].sum()).backward()
        assert torch.equal(logits, base)
        return out.logprob.detach(), out.stats["entropy"].detach(), logits.grad

    base = torch.randn(20, 50)
    whole = run()
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 3 * 50 * 4 * module._CHUNK_COPIES)
    assert len(module._chunks(20, 50, torch.float32)) == 7
    assert all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))


def test_case_h5_targets():
    logits = torch.randn(3, 5, requires_grad=True)
    out = vocab_parallel_logprob(logits, torch.tensor([1, -100, 4]), stats=ALL)
    assert out.logprob[1] == 0 and all(v[1] == 0 for v in out.stats.values())
    out.logprob.sum().backward()
    assert not logits.grad[1].any() and logits.grad[0].any()
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=rf"target {wrong} is outside the vocabulary \[0, 5\)"):
            vocab_parallel_logprob(logits, torch.tensor([1, -100, wrong]))
    with pytest.raises(ValueError, match="target 4"):
        vocab_parallel_logprob(logits, torch.tensor([1, -100, 4]), vocab_size=4)


def test_case_h9_empty():
    logits = torch.zeros(0, 5, requires_grad=True)
    out = vocab_parallel_logprob(logits, torch.zeros(0, dtype=torch.int64), stats=ALL)
    out.logprob.sum().backward()
    assert out.logprob.shape == (0,) and logits.grad.shape == (0, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "triton"}, "backend='triton'.*auto, torch"),
        ({"stats": ("varentropy",)}, "varentropy.*entropy, self_certainty"),
        ({"vocab_size": 9}, "vocab_size=9"),
        ({"temperature": torch.ones(3)}, "temperature"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        vocab_parallel_logprob(torch.zeros(2, 4), torch.tensor([0, 1]), **options)


# tensor-parallel vocabulary: each rank holds Vl columns, the last rank the padding


def problem(vocab=10, padded=12):
    torch.manual_seed(0)
    logits = 3 * torch.randn(8, padded)
    logits[:, vocab:] = 40.0
    logits[6, 0:6] = -torch.inf  # a whole shard of -inf
    return logits, torch.tensor([0, 5, 9, -100, 3, 7, 8, 2]), vocab, torch.rand(8) + 0.5


def run_problem(logits, target, vocab, temperature, group=None):
    logits = logits.clone().requires_grad_()
    out = vocab_parallel_logprob(
        logits, target, vocab_size=vocab, temperature=temperature, softcap=20.0, tp_group=group, stats=ALL
    )
    finite = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 1])  # row 6 has infinite self-certainty
    loss = (out.logprob * torch.arange(8)).sum() + out.stats["entropy"].sum()
    (loss + torch.where(finite > 0, out.stats["self_certainty"], 0.0).sum()).backward()
    return [out.logprob.detach(), *(out.stats[s].detach() for s in ALL)], logits.grad


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def tp_rank(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for offset in (0.0, -100.0):
        compare(dist.group.WORLD, 12, offset)
        for padded in (10, 12, 20):
            compare(pairs[rank // 2], padded, offset)
    dist.destroy_process_group()


def compare(group, padded, offset):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    logits, target, vocab, temperature = problem(padded=padded)
    logits[:, :vocab] += offset
    want, grad = run_problem(logits, target, vocab, temperature)
    width = padded // ranks
    here = slice(rank * width, (rank + 1) * width)
    got, shard_grad = run_problem(logits[:, here], target, vocab, temperature, group)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(shard_grad, grad[:, here], atol=1e-6, rtol=1e-5)
    # the same bits on every rank: a loss computed twice must not differ
    mine = torch.stack(got)
    both = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(both, mine, group=group)
    assert all(torch.equal(mine, x) for x in both)
    # negative control: a shard that believes it stands alone disagrees
    alone = vocab_parallel_logprob(logits[:, here].clamp(min=-1e4), torch.zeros(8, dtype=torch.int64)).logprob
    assert (alone - want[0]).abs().max() > 0.1


def test_case_h7_tensor_parallel_equals_one_rank():
    """Four ranks, and pairs of them. Vocabulary 10; padded to 20, the second of a pair holds padding alone."""
    mp.spawn(tp_rank, args=(free_port(),), nprocs=4)
