"""CPU kernels: C++ compiled on first use, and a plain-torch fallback for machines without one."""
