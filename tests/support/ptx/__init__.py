"""Executes the PTX of Triton-language kernels without a GPU.

The interpreter shows that a kernel's source is right. This shows that the compiled code is right,
too: hints about alignment hold, no thread reads or writes outside its tensors, threads wait for
what other warps or copies write to shared memory, and approximate functions are exact enough.

`driver` takes Triton's launches, `program` parses the code, `machine` runs it in numpy, all threads
of many programs at once. ``EMULATED_GPU=sm_90 pytest tests/kernels/gpu`` uses it.

Not shown: what the assembler makes of PTX (it may fuse a product and a sum), how tensor cores round
their sums, fences between proxies, and time.
"""
