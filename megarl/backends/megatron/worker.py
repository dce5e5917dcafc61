"""One rank of a Megatron policy: a plain class; whoever runs it in a process of its own calls its methods.

All ranks of an agent get the same calls in the same order: every method but ``coordinates`` is collective.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarl.backends.exchange import Moved, Piece
from megarl.backends.megatron import checkpoint, cpu
from megarl.backends.megatron.forward import Consume, Pack, run
from megarl.backends.megatron.head import Differences, describe
from megarl.backends.megatron.model import Optimizer, build_model, process_groups
from megarl.backends.megatron.planned import PlannedExport
from megarl.backends.megatron.records import Coordinates, UpdateResult
from megarl.backends.scratch import Scratch, hold
from megarl.backends.shards.layout import Layout
from megarl.backends.shards.topology import Topology
from megarl.loss import TokenBatch, pg_loss
from megarl.settings import AgentConfig, KernelsConfig, LossConfig
from megarl.types import Microbatch, Need
from megarl_kernels import LogprobOutput

STATS: dict[Need, str] = {"entropy": "entropy", "certainty": "self_certainty"}


class MegatronWorker:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, as torch.distributed does."""

    def __init__(
        self,
        *,
        agent: AgentConfig,
        temperature: float,
        keep_reference: bool = False,
        threads: int = 1,
        overrides: Mapping[str, object] | None = None,
        kernels: KernelsConfig | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        torch.set_num_threads(threads)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it under tensor parallelism
        cpu.enable()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        else:
            torch.use_deterministic_algorithms(True)
        if int(os.environ["WORLD_SIZE"]) != agent.layout.world:
            raise ValueError(f"layout {agent.layout} has {agent.layout.world} ranks, not {os.environ['WORLD_SIZE']}")
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
        self.groups = process_groups(agent.layout)
        self.model = build_model(agent, self.groups, self.device, overrides or {})
        self.optimizer = Optimizer(agent.optimizer, self.model)
        self.temperature = temperature
        self.kernels = kernels or KernelsConfig()
        if dist.get_rank() == 0:
            parameter = self.model.parameters()[0]
            print(describe(parameter, self.kernels, fusible=self.model.plain_head), flush=True)
        self._differences = Differences()
        self._reference = [p.detach().cpu().clone() for p in self.model.parameters()] if keep_reference else None
        self._export: Iterator[tuple[str, torch.Tensor]] | None = None
        self._pending: tuple[str, torch.Tensor] | None = None
        self._bucket: Scratch | None = None  # where this rank has written what it exports
        self._planned: PlannedExport | None = None
        self._saving: checkpoint.Saving | None = None
        self._resident = True

    def coordinates(self) -> Coordinates:
        g = self.groups
        return Coordinates(dp=g.dp.rank(), pp=g.pp.rank(), cp=g.cp.rank(), tp=g.tp.rank())

    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def _answers(self) -> bool:
        """Last pipeline stage, first tensor-parallel rank: what it computes is handed back."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1 and self.groups.tp.rank() == 0

    def measure(self, microbatches: Sequence[Microbatch], needs: frozenset[Need]) -> list[dict[str, np.ndarray]]:
        """Per microbatch float32[T / cp] ``logprobs``, ``entropy``, ``certainty``, ``reference`` at this rank's tokens.

        Empty on ranks that compute no logprobs or repeat those of their tensor-parallel neighbour.
        """
        self._check_resident("measure")
        stats = {need: STATS[need] for need in sorted(needs & STATS.keys())}

        def keep(output: LogprobOutput, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
            found = {"logprobs": output.logprob} | {need: output.stats[name] for need, name in stats.items()}
            return output.logprob.sum(), {name: value.float().cpu().numpy() for name, value in found.items()}

        packs = [Pack.of(m, self.model, self.device) for m in microbatches]
        found = self._run(packs, keep, stats=tuple(stats.values()), train=False)
        if "reference" in needs:
            stats = {}
            with self._reference_weights():
                reference = self._run(packs, keep, stats=(), train=False)
            for here, there in zip(found, reference, strict=True):
                here["reference"] = there["logprobs"]
        return found if self._answers else []

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """The initial weights in place of the present ones, which come back bit for bit."""
        if self._reference is None:
            raise ValueError("reference logprobs need the initial weights, kept only where kl_coef > 0")
        parameters = self.model.parameters()
        present = [p.detach().cpu().clone() for p in parameters]
        _fill(parameters, self._reference)
        try:
            yield
        finally:
            _fill(parameters, present)

    def update(
        self,
        microbatches: Sequence[Microbatch],
        loss: LossConfig,
        num_tokens: int,
        num_sequences: int,
        lr: float,
    ) -> UpdateResult:
        """One optimizer step; the counts are of the whole step, over all ranks. A bad gradient leaves the weights."""
        self._check_resident("update")
        self.model.chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()

        def share(output: LogprobOutput, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return pg_loss(
                output.logprob,
                batch,
                loss,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                kl_coef=loss.kl_coef,
                context_sum=self._context_sum if self.groups.cp.size() > 1 else None,
            )

        packs = [Pack.of(m, self.model, self.device) for m in microbatches]
        sums = self._run(packs, share, stats=(), train=True)
        grad_norm, applied = self.optimizer.step(lr)
        return UpdateResult(_added(sums) if self._answers else {}, grad_norm, applied, self._differences.take())

    def _run(self, packs: Sequence[Pack], consume: Consume, *, stats: Sequence[str], train: bool) -> list[Any]:
        return run(
            self.model,
            packs,
            consume,
            temperature=self.temperature,
            stats=stats,
            train=train,
            kernels=self.kernels,
            differences=self._differences,
        )

    def _context_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Added up over the ranks that hold pieces of the same sequences."""
        values = values.clone()
        dist.all_reduce(values, group=self.groups.cp)
        return values

    def begin_export(self) -> int:
        """Start over with the first weight; returns the bytes of the largest."""
        self._check_resident("export")
        self.remove_bucket()  # of an export that was given up
        self._export = self.model.exported()
        self._pending = None
        return self.model.largest_weight()

    def next_bucket(self, path: str, bucket_bytes: int, writes: bool) -> tuple[tuple[str, ...], int]:
        """Names and bytes of the next weights, up to ``bucket_bytes`` or one tensor; no names: there are no more.

        Every rank gathers them; those that ``write`` put them into the safetensors file ``path``.
        """
        if self._export is None:
            raise RuntimeError("next_bucket before begin_export")
        taken: dict[str, torch.Tensor] = {}
        names: list[str] = []
        size = 0
        while (item := self._pending or next(self._export, None)) is not None:
            name, tensor = item
            nbytes = tensor.numel() * self.model.dtype.itemsize
            self._pending = item if names and size + nbytes > bucket_bytes else None
            if self._pending:
                break
            names.append(name)
            size += nbytes
            if writes:
                # a copy: what comes may be a view of a parameter or of a larger tensor
                taken[name] = tensor.detach().to("cpu", self.model.dtype, copy=True).contiguous()
        if not names:
            self._export = None
        elif writes:
            self._bucket = hold(Path(path).parent)
            save_file(taken, path)
        return tuple(names), size

    def remove_bucket(self) -> None:
        """Delete the file that this rank wrote last, if it did."""
        if self._bucket is not None:
            self._bucket.close()
            self._bucket = None

    def open_plan(self, training: Layout, engine: Layout, topology: Topology, bucket_bytes: int) -> str:
        """Make the plan of refits to that engine; returns what is equal where two ranks made the same one."""
        self._planned = PlannedExport(self.model, training, engine, topology, bucket_bytes, self.device)
        return self._planned.key

    def begin_plan(self) -> None:
        self._check_resident("export")
        assert self._planned is not None, "begin_plan before open_plan"
        self._planned.begin()

    def next_round(self, folder: str) -> tuple[list[tuple[str, list[Piece]]] | None, Moved]:
        """Files of what has arrived for the engine on this GPU, and the counts so far; None: the refit is over."""
        assert self._planned is not None, "next_round before open_plan"
        return self._planned.next_round(folder), self._planned.moved

    def remove_round(self) -> None:
        if self._planned is not None:
            self._planned.remove()

    def begin_save(self, path: str, version: int) -> None:
        """Copy what is to be saved; it is written while this rank goes on."""
        self._check_resident("save")
        if self._saving is not None:
            raise RuntimeError("begin_save: the last save has not been ended")
        self._saving = checkpoint.Saving(Path(path), self.model, self.optimizer, version)

    def end_save(self) -> None:
        """Wait until what was begun is on disk."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.end()

    def load(self, path: str) -> int:
        """The saved version. The reference weights stay those of the model directory."""
        self._check_resident("load")
        return checkpoint.load(Path(path), self.model, self.optimizer)

    def offload(self) -> None:
        """Leave the accelerator: gradients are dropped, weights and optimizer state wait in host memory."""
        self._check_resident("offload")
        self._resident = False
        if self.device.type == "cuda":
            self.optimizer.to_host()
            for buffer in self.model.buffers():
                buffer.offload_to_cpu(move_params=True, move_grads=True)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo ``offload``."""
        if self._resident:
            raise RuntimeError("onload: the policy is on its device already")
        if self.device.type == "cuda":
            for buffer in self.model.buffers():
                buffer.reload_from_cpu(move_params=True, move_grads=True)
            self.optimizer.to_device(self.device)
            torch.cuda.synchronize()
        self._resident = True

    def _check_resident(self, doing: str) -> None:
        if not self._resident:
            raise RuntimeError(f"{doing}: the policy is off its device; onload it first")


@torch.no_grad()
def _fill(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _added(sums: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    if not sums:
        return {}
    return {name: float(torch.stack([s[name].double() for s in sums]).sum()) for name in sums[0]}
