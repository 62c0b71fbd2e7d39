#!/usr/bin/env bash
# NVIDIA's load generator AIPerf (docs/benchmarking.md).
#
#   benchmarks/peers/aiperf.sh setup              installs it into an environment of its own, once
#   benchmarks/peers/aiperf.sh run ARGUMENT...    calls `aiperf profile` with these arguments
set -euo pipefail

readonly PEER=aiperf
readonly VERSION=0.13.0
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install() {
    pip_install "$PEER==$VERSION"
}

case ${1:-} in
setup)
    alone install_once install
    ;;
run)
    [[ -e $ENVIRONMENT/.installed ]] || fail "not set up; run: benchmarks/peers/aiperf.sh setup"
    # With this variable it takes a tokenizer's folder for a repository's name, and refuses it.
    unset HF_HUB_OFFLINE
    exec "$ENVIRONMENT/bin/aiperf" profile "${@:2}"
    ;;
*)
    fail "got '${1:-}'; must be setup or run"
    ;;
esac
