"""Peak rates of GPUs, by name: the roofs of the roofline model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fastserve_backend.errors import ConfigError

GPUS_PER_NODE = 8
"""GPUs that NVLink connects: a DGX or HGX board with any of the types below."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of one GPU. Rates of links are for one direction; datasheets add up both."""

    name: str
    tensor_flops: float
    """Dense FLOP/s of the tensor cores in float16 or bfloat16."""
    hbm_bytes_s: float
    """Bytes/s that the GPU reads from its memory."""
    hbm_bytes: int
    """Size of that memory. What datasheets call GB are GiB."""
    pcie_bytes_s: float
    """Bytes/s to the host, and as many back at the same time."""
    nvlink_bytes_s: float
    """Bytes/s to the other GPUs of the node, and as many back at the same time."""


_GIB = 2**30

# SXM modules. Dense FLOP/s are half of those that the Hopper datasheets print, "with sparsity".
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        hardware.name: hardware
        for hardware in (
            # NVIDIA V100 Tensor Core GPU datasheet, column V100 SXM2, with the PCIe 3 link that its
            # column V100 PCIe gives.
            Hardware("v100-32g", 125e12, 0.9e12, 32 * _GIB, 16e9, 150e9),
            # NVIDIA A100 Tensor Core GPU datasheet, column A100 40GB SXM.
            Hardware("a100-40g", 312e12, 1.555e12, 40 * _GIB, 32e9, 300e9),
            # The same datasheet, column A100 80GB SXM.
            Hardware("a100-80g", 312e12, 2.039e12, 80 * _GIB, 32e9, 300e9),
            # NVIDIA H100 Tensor Core GPU datasheet, column H100 SXM.
            Hardware("h100", 989.5e12, 3.35e12, 80 * _GIB, 64e9, 450e9),
            # NVIDIA H200 Tensor Core GPU datasheet, column H200 SXM.
            Hardware("h200", 989.5e12, 4.8e12, 141 * _GIB, 64e9, 450e9),
        )
    }
)


def find_hardware(name: str) -> Hardware:
    """Raises ConfigError for a name that is not in ``HARDWARE``."""
    if name not in HARDWARE:
        raise ConfigError(f"hardware: got {name!r}; known are {', '.join(HARDWARE)}")
    return HARDWARE[name]
