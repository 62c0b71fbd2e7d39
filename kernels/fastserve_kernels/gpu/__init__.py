"""Kernels in the Triton language for NVIDIA GPUs. They are imported only if tensors are on one.

If TRITON_INTERPRET=1 is in the environment before the import, they run on CPU tensors, slowly. So
they can be tested without a GPU.
"""
