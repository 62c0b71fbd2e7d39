#!/usr/bin/env bash
# The second call of docs/gpu.md, "Fifteen minutes on one GPU": serving, and copies to the host.
# Run it only after lease_a.sh has ended with 0.
exec bash "$(dirname "$0")/lease.sh" b 7 "serving swap strategies limit_128 flashinfer flex" "$@"
