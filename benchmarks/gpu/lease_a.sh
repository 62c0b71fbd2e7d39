#!/usr/bin/env bash
# The first call of docs/gpu.md, "Fifteen minutes on one GPU": is it right, and how fast are a
# decode step and each kernel? Nothing is timed after a wrong result.
exec bash "$(dirname "$0")/lease.sh" a 5 "machine correctness parity step kernels" "$@"
