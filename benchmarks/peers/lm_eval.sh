#!/usr/bin/env bash
# EleutherAI's evaluation harness for benchmarks/evaluation.py.
#
#   benchmarks/peers/lm_eval.sh setup    installs it into an environment of its own, once
#   benchmarks/peers/lm_eval.sh python   prints the path of that environment's Python
set -euo pipefail

readonly PEER=lm-eval
readonly VERSION=0.4.13
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The extra is for models behind an HTTP API. For them the harness needs no torch, but it reads tokenizers with
# transformers.
install() {
    pip_install "$PEER[api]==$VERSION" "$(grep -o '^transformers==[0-9.]*' "$ROOT/deploy/locks/dev.txt")"
}

only_set_up install "$@"
