"""Kernels in the Triton language for NVIDIA GPUs, imported where tensors are on one.

With TRITON_INTERPRET=1 in the environment before the import they run on CPU tensors, slowly: that
is how they are tested without a GPU.
"""
