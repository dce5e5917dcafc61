"""A vocabulary that is sharded over tensor-parallel ranks equals one that is not."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl_kernels import linear_logprob, vocab_parallel_logprob
from tests.kernels.logprob_problems import ALL


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
    for padded in (12, 20):
        for sequence_parallel in (False, True):
            compare_head(pairs[rank // 2], padded, sequence_parallel)
    compare_head(dist.group.WORLD, 12, sequence_parallel=True)
    count_collectives(dist.group.WORLD)
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


def head_problem(padded):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(8, 6), torch.randn(padded, 6), torch.randn(padded)
    hidden[3] = torch.nan  # its target is ignored
    bias[1], bias[10:] = -torch.inf, 40.0
    return hidden, weight, bias, torch.tensor([0, 5, 9, -100, 3, 7, 8, 2]), torch.rand(8) + 0.5


def run_head(hidden, weight, bias, target, temperature, **options):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    out = linear_logprob(
        *leaves[:2], target, bias=leaves[2], vocab_size=10, temperature=temperature, stats=ALL, **options
    )
    ((out.logprob * torch.arange(8)).sum() + out.stats["entropy"].sum()).backward()
    return [out.logprob.detach(), *(out.stats[s].detach() for s in ALL)], [x.grad for x in leaves]


def compare_head(group, padded, sequence_parallel):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    hidden, weight, bias, target, temperature = head_problem(padded)
    # 3 rows a chunk: chunks end elsewhere than the ranks' shares
    want, wanted = run_head(hidden, weight, bias, target, temperature, workspace_bytes=3 * 4 * padded)
    columns = slice(rank * padded // ranks, (rank + 1) * padded // ranks)
    rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks) if sequence_parallel else slice(None)
    shard = (hidden[rows], weight[columns], bias[columns], target, temperature)
    options = {"sequence_parallel": sequence_parallel, "workspace_bytes": 3 * 4 * padded // ranks}
    got, grads = run_head(*shard, tp_group=group, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    for a, b in zip(grads, (wanted[0][rows], wanted[1][columns], wanted[2][columns]), strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)
    assert not grads[1][max(0, 10 - columns.start) :].any()  # rows of padding
    mine = torch.stack(got)
    both = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(both, mine, group=group)
    assert all(torch.equal(mine, x) for x in both)


def collectives(call):
    """What rank 0 sees of them."""
    if dist.get_rank() != 0:
        return [], call()
    with torch.autograd.profiler.profile() as profile:
        result = call()
    return [e.name for e in profile.function_events if e.name.startswith("gloo:")], result


def count_collectives(group):
    """One all-gather per forward; in backward none for the softmax, and the one of hidden's gradient."""
    rank = dist.get_rank(group)
    columns = slice(rank * 3, rank * 3 + 3)
    logits, target, vocab, _ = problem()
    shard = logits[:, columns].clone().requires_grad_()
    found, out = collectives(lambda: vocab_parallel_logprob(shard, target, vocab_size=vocab, tp_group=group))
    assert found == (["gloo:all_gather"] if rank == 0 else []), found
    assert collectives(out.logprob.sum().backward)[0] == []
    hidden, weight, *_ = head_problem(12)
    part = weight[columns].clone().requires_grad_()
    hidden.nan_to_num_().requires_grad_()
    found, out = collectives(lambda: linear_logprob(hidden, part, target, vocab_size=vocab, tp_group=group))
    assert found == (["gloo:all_gather"] if rank == 0 else []), found
    assert collectives(out.logprob.sum().backward)[0] == (["gloo:all_reduce"] if rank == 0 else [])


def test_case_h7_tensor_parallel_equals_one_rank():
    """Four ranks, and pairs of them. Vocabulary 10; padded to 20, the second of a pair holds padding alone."""
    mp.spawn(tp_rank, args=(free_port(),), nprocs=4)
