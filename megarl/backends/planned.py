"""Refits by a plan: every rank hands the engine on its own GPU what that engine holds, and no tensor is ever whole.

On CPU the hand-over is a file in shared memory per rank and round.
"""

from collections.abc import Sequence
from contextlib import closing

from megarl.backends.fingerprints import RefitMismatch, complain
from megarl.backends.megatron.policy import MegatronPolicy
from megarl.backends.probe import Probe
from megarl.backends.shards.plan import lower_bound
from megarl.backends.shards.topology import Topology
from megarl.backends.shards.training import training_layout
from megarl.backends.vllm.engine import VllmEngine
from megarl.planning.devices import DEVICES
from megarl.planning.models import read_shape
from megarl.planning.request import layout_of
from megarl.settings import AgentConfig, ReshardConfig
from megarl.types import Metrics


class PlannedReshard:
    """The refits of one agent: policy rank r and engine rank r (replica by replica) share a GPU, on node nodes[r].

    The first and every ``cfg.verify_every``-th are verified: by checksums against the policy's own export as vLLM
    loads it, and by a probe of logprobs once the engine is awake.
    """

    def __init__(
        self,
        agent: AgentConfig,
        policy: MegatronPolicy,
        engine: VllmEngine,
        nodes: Sequence[int],
        cfg: ReshardConfig,
        *,
        temperature: float,
        drift_limit: float,
    ) -> None:
        """Record the engine, make the plan. Raises ValueError, with a remedy, where there is none.

        ``temperature``: of the policy's logprobs; ``drift_limit``: most nats by which the probe may differ.
        """
        itemsize = 2 if agent.dtype == "bfloat16" else 4
        training = training_layout(read_shape(agent.model), layout_of(agent.layout), itemsize)
        self._policy, self._engine, self._cfg = policy, engine, cfg
        self._layout = engine.layout(training.tensors)
        self._layout.check()
        self._bound = sum(lower_bound(training, self._layout, rank) for rank in range(self._layout.world))
        self._refits = 0
        self._probe = Probe(policy, engine, temperature=temperature, limit=drift_limit)
        policy.open_plan(training, self._layout, topology_of(nodes), cfg.bucket_bytes)

    @property
    def _due(self) -> bool:
        """Is the next refit to be verified?"""
        return self._cfg.verify_every is not None and self._refits % self._cfg.verify_every == 0

    def __call__(self, version: int) -> Metrics:
        """As ``reshard``: bytes between GPUs, also over their lower bound, bytes that stayed, and rounds.

        Where it raises, the engine refuses to generate until a refit has succeeded. RefitMismatch names the tensors
        that the engine does not hold as the policy does, or the versions where they differ.
        """
        self._check_version(version)
        moved = []
        due = self._due
        self._engine.begin_boxes(self._layout, verify=due)
        with closing(self._policy.planned_rounds()) as rounds:
            for parcels in rounds:
                self._engine.take([parcel.files for parcel in parcels[: self._layout.world]])
                moved = [parcel.moved for parcel in parcels]
        self._engine.finish_boxes()
        if due:
            self._compare()
            self._probe.refitted()
        self._engine.admit(version)
        self._refits += 1
        wire = float(sum(m.received for m in moved))
        return {
            "bytes": wire,
            "bytes_over_bound": wire / self._bound if self._bound else 1.0 + wire,
            "stayed_bytes": float(sum(m.stayed for m in moved)),
            "buckets": float(max((m.rounds for m in moved), default=0)),
        }

    def awake(self) -> None:
        """The engine can generate: where the last refit was verified, raise RefitMismatch unless the probe agrees."""
        self._probe.check()

    def before_sleep(self) -> None:
        """The engine is about to sleep: where the next refit is verified, leave the probe's text in its cache."""
        if self._due:
            self._probe.remember()

    def reopen(self) -> None:
        """The engine was started again: record it anew. Raises ValueError where it has become another one."""
        if self._engine.layout(self._layout.tensors) != self._layout:
            raise ValueError("the engine that was started again holds its weights in another layout")
        self._refits = 0

    def verify(self) -> None:
        """Hold the engine, as the last verified refit has left it, against the policy as it is now.

        Raises RefitMismatch, naming tensors, or the versions where they differ.
        """
        self._check_version(self._engine.version)
        self._compare()

    def _check_version(self, version: int) -> None:
        if version != self._policy.version:
            raise RefitMismatch(
                f"the engine has the weights of version {version}, the policy those of {self._policy.version}"
            )

    def _compare(self) -> None:
        """The policy's whole export, tensor by tensor, goes where vLLM's loaders would put it; nothing is kept."""
        self._engine.begin_judging()
        with closing(self._policy.weights(self._cfg.bucket_bytes)) as weights:
            for bucket in weights:
                self._engine.judge(bucket)
        complain(self._engine.verdict())


def topology_of(nodes: Sequence[int]) -> Topology:
    """Of a plan that is carried out: what matters is who shares a node, and that a node's own links are the faster."""
    device = DEVICES["h100"]
    return Topology(
        name="run",
        gpus_per_node=len(nodes),
        memory_bytes_per_s=device.memory_bytes_per_s,
        nvlink_bytes_per_s=device.nvlink_bytes_per_s,
        network_bytes_per_s=device.network_bytes_per_s,
        nodes=tuple(nodes),
    )
