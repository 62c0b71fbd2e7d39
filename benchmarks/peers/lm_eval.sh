#!/usr/bin/env bash
# EleutherAI's evaluation harness for benchmarks/evaluation.py.
#
#   benchmarks/peers/lm_eval.sh setup    installs it into an environment of its own, once; minutes
#   benchmarks/peers/lm_eval.sh python   prints the path of that environment's Python
set -euo pipefail

readonly PEER=lm-eval
readonly VERSION=0.4.13
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The extra is for models behind an HTTP API.
install() {
    pip_install "$PEER[api]==$VERSION"
}

only_set_up install "$@"
