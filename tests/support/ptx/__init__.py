"""Executes the Triton-language kernels as PTX, to which they are compiled, where no GPU is.

The interpreter shows that a kernel's source is right. This shows that what the compiler makes of it
for a launch is: that its hints about alignment hold, that no thread reads or writes outside the
tensors it was given, that what other warps or copies write to shared memory is waited for, that
approximate functions are exact enough.

`driver` takes Triton's launches, `program` reads the code, `machine` runs it in numpy: all threads
of many programs of the grid at once. ``EMULATED_GPU=sm_90 pytest tests/kernels/gpu`` uses it.

Not shown: what the assembler makes of PTX (it may fuse a product and a sum), how tensor cores round
their sums, whether a result of ``wgmma`` or a fence between proxies is waited for, and time.
"""
