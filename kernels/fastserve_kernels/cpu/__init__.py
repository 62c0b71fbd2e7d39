"""CPU kernels: C++ that is compiled on first use, or plain torch without a compiler."""
