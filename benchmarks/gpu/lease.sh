#!/usr/bin/env bash
# One call of docs/gpu.md, "Fifteen minutes on one GPU": installs the wheels offline into a folder
# that is removed again, describes the machine, and runs phases of check.py. lease_a.sh and
# lease_b.sh call it with their name, their minutes and their phases; options of check.py follow.
#
#   OUT      folder for machine.txt, log.txt and the JSON (build/gpu-check/NAME)
#   WHEELS   folder of the wheels of wheels.txt (.whl); empty: the packages are installed already
#   COMMIT   of this tree, where there is no git
#   MINUTES  instead of the call's own
#   PYTHON   the interpreter that has torch (python3)
#
# Its exit code is check.py's; 124: it was ended, and the JSON has what was measured until then.
set -euo pipefail

name=$1 minutes=${MINUTES:-$2} phases=$3
shift 3
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS-.whl}
OUT=$(realpath -m "${OUT:-build/gpu-check/$name}")
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1

if [ -n "$WHEELS" ]; then
    ls "$WHEELS"/*.whl >/dev/null || {
        echo "no wheels in $WHEELS: benchmarks/gpu/wheels.txt says how to fetch them" >&2
        exit 2
    }
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

describe() {
    timeout 20 nvidia-smi || echo "nvidia-smi: none"
    echo "cores: $(nproc); ulimit -l: $(ulimit -l)"
    for compiler in gcc nvcc ninja; do
        echo "$compiler: $(command -v $compiler || echo none)"
    done
    df -h . /tmp /dev/shm || true
    # A first import from a cold disk takes long; no phase's limit has to hold it.
    time timeout 120 "$PYTHON" -c 'import torch, triton, transformers as hf
on_gpu = torch.cuda.is_available() and torch.zeros(1).cuda()
print("torch", torch.__version__, "triton", triton.__version__, "transformers", hf.__version__)' || true
    "$PYTHON" benchmarks/gpu/host_memory.py
}
describe >"$OUT/machine.txt" 2>&1

# check.py ends by itself a little earlier; this is for a check.py that hangs.
code=0
timeout --foreground -k 15 $((minutes * 60 + 15)) "$PYTHON" benchmarks/gpu/check.py --minutes "$minutes" \
    --only $phases --output "$OUT" ${COMMIT:+--commit "$COMMIT"} "$@" 2>&1 |
    tee -i "$OUT/log.txt" || code=$?
{ echo "after the phases:" && "$PYTHON" benchmarks/gpu/host_memory.py; } >>"$OUT/machine.txt"
exit $code
