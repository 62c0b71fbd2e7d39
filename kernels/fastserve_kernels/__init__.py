"""Kernels of the FastServe backend: attention over a paged KV cache, cache writes, linears.

`ops` is the public interface, chosen by the device of its tensors; `reference` holds the float64
oracles that tests compare it with.
"""
