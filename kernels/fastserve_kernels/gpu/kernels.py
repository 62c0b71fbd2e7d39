"""All operations of the GPU by name, for `fastserve_kernels.implementation`."""

from fastserve_kernels.gpu.activations import bias_relu, silu_mul
from fastserve_kernels.gpu.cache_writes import kv_write, rope_kv_write
from fastserve_kernels.gpu.norms import add_layer_norm, add_rms_norm
from fastserve_kernels.gpu.paged_decode import decode_scratch, paged_decode
from fastserve_kernels.gpu.paged_prefill import paged_prefill, query_tile

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bias_relu",
    "decode_scratch",
    "kv_write",
    "paged_decode",
    "paged_prefill",
    "query_tile",
    "rope_kv_write",
    "silu_mul",
]
