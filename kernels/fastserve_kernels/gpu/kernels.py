"""The GPU's operations, except attention, under one name for `ops` and `backend`."""

from fastserve_kernels.gpu.activations import (
    bias_relu,
    clamped_swiglu,
    gelu_tanh_mul,
    silu_mul,
)
from fastserve_kernels.gpu.cache_writes import kv_write, rope_kv_write
from fastserve_kernels.gpu.norms import add_layer_norm, add_rms_norm, rms_norm_heads
from fastserve_kernels.gpu.routing import sort_choices
from fastserve_kernels.gpu.sums import sum_choices

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bias_relu",
    "clamped_swiglu",
    "gelu_tanh_mul",
    "kv_write",
    "rms_norm_heads",
    "rope_kv_write",
    "silu_mul",
    "sort_choices",
    "sum_choices",
]
