"""Which ranks share a node, and how fast bytes travel between them."""

from dataclasses import dataclass
from typing import Literal

from megarl.planning.devices import DEVICES, Device

Tier = Literal["local", "nvlink", "network"]
_BITS = {name: round(device.network_bytes_per_s * 8 / 1e9) for name, device in DEVICES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Bandwidths in bytes per second, per GPU and direction, as reached.

    Ranks fill nodes one after the other, unless ``nodes`` names every rank's.
    """

    name: str
    gpus_per_node: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    nodes: tuple[int, ...] | None = None

    def node(self, rank: int) -> int:
        return rank // self.gpus_per_node if self.nodes is None else self.nodes[rank]

    def tier(self, source: int, destination: int) -> Tier:
        if source == destination:
            return "local"
        return "nvlink" if self.node(source) == self.node(destination) else "network"

    def bandwidth(self, tier: Tier) -> float:
        """Of a wire; bytes that stay are paced by memory."""
        speeds = {
            "local": self.memory_bytes_per_s,
            "nvlink": self.nvlink_bytes_per_s,
            "network": self.network_bytes_per_s,
        }
        return speeds[tier]

    @property
    def forwards(self) -> bool:
        """Is it cheaper to send what several GPUs of a node need to one of them, and pass it on there?"""
        return self.nvlink_bytes_per_s > self.network_bytes_per_s


PRESETS = tuple(f"{name}-8x-ib{bits}" for name, bits in _BITS.items())


def read_topology(preset: str, gpus_per_node: int, link_efficiency: float) -> Topology:
    """A preset such as h100-8x-ib400: device, GPUs per node, Gb/s of network per GPU.

    Raises ValueError for one that is not known, and for nodes larger than the preset's.
    """
    if preset not in PRESETS:
        raise ValueError(f"--topology {preset}: not one of {', '.join(PRESETS)}")
    if gpus_per_node > 8:
        raise ValueError(f"cluster.gpus_per_node={gpus_per_node}: a node of {preset} has 8")
    device: Device = DEVICES[preset.partition("-")[0]]
    return Topology(
        name=preset,
        gpus_per_node=gpus_per_node,
        memory_bytes_per_s=device.memory_bytes_per_s,
        nvlink_bytes_per_s=device.nvlink_bytes_per_s * link_efficiency,
        network_bytes_per_s=device.network_bytes_per_s * link_efficiency,
    )
