#!/usr/bin/env bash
# One call of docs/gpu.md, "Fifteen minutes on one GPU": installs the wheels offline into a folder
# that is removed again, describes the machine, and runs phases of check.py. lease_a.sh and
# lease_b.sh call it with their name, their minutes and their phases; options of check.py follow.
#
#   OUT      folder for machine.txt, log.txt and the JSON (build/gpu-check/NAME)
#   WHEELS   folder of the wheels of wheels.txt (.whl); empty: the packages are installed already
#   COMMIT   of this tree, where there is no git
#   MINUTES  instead of the call's own; a whole number
#   PYTHON   the interpreter that has torch (python3)
#
# Its exit code is check.py's; 124: it was ended, and the JSON has what was measured until then.
set -euo pipefail

name=$1 minutes=${MINUTES:-$2} phases=$3
shift 3
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS-.whl}
OUT=$(realpath -m "${OUT:-build/gpu-check/$name}")
export PYTHONUNBUFFERED=1

refuse() {
    echo "lease_$name.sh: $1" >&2
    exit 2
}
[[ $minutes =~ ^[1-9][0-9]*$ ]] || refuse "MINUTES=$minutes is not a whole number above 0"
command -v "$PYTHON" >/dev/null || refuse "no program $PYTHON; set PYTHON to the interpreter that has torch"
{ mkdir -p "$OUT" && touch "$OUT/machine.txt"; } || refuse "cannot write to $OUT; set OUT to another folder"

if [ -n "$WHEELS" ]; then
    compgen -G "$WHEELS/*.whl" >/dev/null ||
        refuse "no wheels in $WHEELS; docs/gpu.md says how to fetch them, and WHEELS= does without"
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" "$WHEELS"/*.whl ||
        refuse "the wheels in $WHEELS are not for $("$PYTHON" --version); docs/gpu.md says how to fetch others"
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi

describe() {
    timeout 20 nvidia-smi || echo "nvidia-smi: none"
    echo "cores: $(nproc); ulimit -l: $(ulimit -l)"
    for compiler in gcc nvcc ninja; do
        echo "$compiler: $(command -v $compiler || echo none)"
    done
    df -h . /tmp /dev/shm
    # A first import from a cold disk takes long; no phase's limit has to hold it.
    time timeout 120 "$PYTHON" -c 'import torch, triton, transformers as hf
on_gpu = torch.cuda.is_available() and torch.zeros(1).cuda()
print("torch", torch.__version__, "triton", triton.__version__, "transformers", hf.__version__)'
    "$PYTHON" benchmarks/gpu/host_memory.py
}
describe >"$OUT/machine.txt" 2>&1 || true

# If this script is killed, check.py must not go on to use the GPU beside the next run. A `timeout`
# that has just started its program may end without a signal to it, so both end with their parent.
with_us=(setpriv --pdeathsig TERM)
"${with_us[@]}" true 2>/dev/null || with_us=()
# check.py ends by itself a little earlier; `timeout` is for a check.py that hangs. A full disk stops
# `tee` from writing the log, and says nothing of the results.
set +e
"${with_us[@]}" timeout --foreground -k 15 $((minutes * 60 + 15)) \
    "${with_us[@]}" "$PYTHON" benchmarks/gpu/check.py --minutes "$minutes" --only $phases --output "$OUT" \
    ${COMMIT:+--commit "$COMMIT"} "$@" 2>&1 | tee -i "$OUT/log.txt"
code=${PIPESTATUS[0]}
{ echo "after the phases:" && "$PYTHON" benchmarks/gpu/host_memory.py; } >>"$OUT/machine.txt"
exit "$code"
