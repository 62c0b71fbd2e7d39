# Sourced by each folder's run.sh: how perf_analyzer is called, and where its files go.
# README.md lists the environment variables that it reads.
set -euo pipefail

configs=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(cd "$(dirname "$0")" && pwd)
URL=${URL:-127.0.0.1:8001}
RESULTS=${RESULTS:-$folder/results}
DEADLINE=${DEADLINE:-900} # seconds for one run
if [ -z "${PERF_ANALYZER:-}" ]; then
    PERF_ANALYZER=$configs/../.venv/perf_analyzer/bin/perf_analyzer
    [ -x "$PERF_ANALYZER" ] || PERF_ANALYZER=perf_analyzer
fi
command -v "$PERF_ANALYZER" >/dev/null || {
    echo "PERF_ANALYZER: got $PERF_ANALYZER, which is no program; run: make perf-analyzer" >&2
    exit 1
}
mkdir -p "$RESULTS"
profiles=()

# load NAME OPTIONS…: one run with the folder's input.json, to RESULTS/NAME.json.
load() {
    local profile=$RESULTS/$1.json
    shift
    rm -f "$profile" # perf_analyzer refuses to overwrite it
    # It often hangs when a request fails.
    timeout --foreground "$DEADLINE" "$PERF_ANALYZER" -m fastserve -u "$URL" -i grpc --streaming --async \
        --input-data "$folder/input.json" --profile-export-file "$profile" "$@" || {
        local status=$?
        [ "$status" -ne 124 ] ||
            echo "perf_analyzer did not end within $DEADLINE s (DEADLINE); did a request fail?" >&2
        exit "$status"
    }
    profiles+=("$profile")
}

# report: the latencies of all runs so far, as a table.
report() {
    "${PYTHON:-python3}" "$configs/latencies.py" "${profiles[@]}"
}
