"""Kernels of the FastServe backend: attention over a paged KV cache, cache writes, linears.

`ops` is the public interface. It chooses an implementation by the device of its tensors. Tests
compare it with `reference`, which holds float64 oracles.
"""
