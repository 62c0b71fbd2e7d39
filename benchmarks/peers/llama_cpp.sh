#!/usr/bin/env bash
# llama.cpp for against_others.py, compiled for this machine's processor.
#
#   benchmarks/peers/llama_cpp.sh setup    installs it into an environment of its own, once; minutes
#   benchmarks/peers/llama_cpp.sh python   prints the path of that environment's Python
set -euo pipefail

readonly PEER=llama-cpp-python
readonly VERSION=0.3.36
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Its wheels, if there are any, are for all processors.
build() {
    # LLAVA is for pictures.
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" pip_install --no-binary "$PEER" "$PEER==$VERSION"
}

only_set_up build "$@"
