#!/usr/bin/env bash
# OpenVINO GenAI for against_others.py. It reads GGUF files itself.
#
#   benchmarks/peers/openvino.sh setup    installs it into an environment of its own, once
#   benchmarks/peers/openvino.sh python   prints the path of that environment's Python
set -euo pipefail

readonly PEER=openvino-genai
readonly VERSION=2026.4.1.0
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install() {
    pip_install "$PEER==$VERSION"
}

only_set_up install "$@"
