"""A rank's half of a planned refit: its parameters as the plan knows them, and buckets for the engine on its GPU."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarl.backends.exchange import Exchange, Moved, Piece
from megarl.backends.megatron.model import Model
from megarl.backends.scratch import Scratch, hold
from megarl.backends.shards.layout import Layout
from megarl.backends.shards.plan import make_plan
from megarl.backends.shards.topology import Topology

BUCKET_NAME = "bucket"  # of the one tensor in a bucket's file


class PlannedExport:
    """Made once per engine layout; every refit is ``begin`` and then ``next_round`` until it returns None."""

    def __init__(
        self,
        model: Model,
        training: Layout,
        engine: Layout,
        topology: Topology,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """Raises ValueError where this rank's parameters are not those of the layout, naming one."""
        self._model = model
        check_parameters(model, training, dist.get_rank())
        plan = make_plan(training, engine, topology)
        plan.check()
        self.key = plan.key()
        self._exchange = Exchange(plan, dist.group.WORLD, bucket_bytes=bucket_bytes, dtype=model.dtype, device=device)
        self._rounds: Iterator[list[tuple[torch.Tensor, list[Piece]]]] | None = None
        self._folder: Scratch | None = None
        self.moved = Moved()

    def begin(self) -> None:
        self.remove()
        self.moved = Moved()
        self._rounds = self._exchange.rounds(self._model.named_parameters(), self.moved)

    def next_round(self, folder: str) -> list[tuple[str, list[Piece]]] | None:
        """Files of this round's buckets in ``folder``, which is this rank's own, and what they hold; None: the end."""
        self.remove()
        assert self._rounds is not None, "next_round before begin"
        buckets = next(self._rounds, None)
        if buckets is None:
            self._rounds = None
            return None
        self._folder = hold(Path(folder))
        written = []
        for number, (values, pieces) in enumerate(buckets):
            path = Path(folder) / f"{number}.safetensors"
            save_file({BUCKET_NAME: values.cpu()}, path)
            written.append((str(path), pieces))
        return written

    def remove(self) -> None:
        """Delete the files of the last round."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def check_parameters(model: Model, training: Layout, rank: int) -> None:
    """Raise ValueError, naming a parameter, unless the model's are exactly those that the layout describes."""
    mine = {name: tuple(param.shape) for name, param in model.named_parameters().items()}
    described = dict(training.params[rank])
    for name in sorted(mine.keys() | described.keys()):
        if mine.get(name) != described.get(name):
            raise ValueError(
                f"parameter {name} of rank {rank} has shape {mine.get(name)}, but the layout describes "
                f"{described.get(name)}: use reshard.method=gathered for this model"
            )
