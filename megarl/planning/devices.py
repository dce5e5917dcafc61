"""What a GPU and a node can do. Figures are the vendors' own; what is reached of them is the calibration's business.

Sources: NVIDIA data sheets "H100 Tensor Core GPU" (SXM5), "H200 Tensor Core GPU", "A100 Tensor Core GPU" (SXM4 80GB)
and "DGX B200" (per GPU), all dense BF16 without sparsity; DGX user guides for host memory and network ports per GPU.
"""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU and its share of a node. Bandwidths are per GPU and direction."""

    name: str
    memory_gib: float  # what the driver reports as total
    bf16_flops: float  # dense, per second
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    host_link_bytes_per_s: float  # PCIe
    host_gib: float  # of a node of eight

    @property
    def memory(self) -> float:
        return self.memory_gib * GIB


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="a100",
            memory_gib=79.2,
            bf16_flops=312e12,
            memory_bytes_per_s=2.039e12,
            nvlink_bytes_per_s=300e9,
            network_bytes_per_s=25e9,
            host_link_bytes_per_s=32e9,
            host_gib=1007,
        ),
        Device(
            name="h100",
            memory_gib=79.6,
            bf16_flops=989e12,
            memory_bytes_per_s=3.35e12,
            nvlink_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_link_bytes_per_s=64e9,
            host_gib=2014,
        ),
        Device(
            name="h200",
            memory_gib=139.8,
            bf16_flops=989e12,
            memory_bytes_per_s=4.8e12,
            nvlink_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_link_bytes_per_s=64e9,
            host_gib=2014,
        ),
        Device(
            name="b200",
            memory_gib=178.0,
            bf16_flops=2250e12,
            memory_bytes_per_s=8.0e12,
            nvlink_bytes_per_s=900e9,
            network_bytes_per_s=50e9,
            host_link_bytes_per_s=64e9,
            host_gib=2014,
        ),
    )
}
