#!/usr/bin/env bash
# RATES: mean requests per second of each run. REQUESTS: number of requests of each run.
source "$(dirname "$0")/../load.sh"

for rate in ${RATES:-0.5 1 2}; do
    load "rate_$rate" --request-rate-range "$rate" --request-distribution poisson \
        --request-count "${REQUESTS:-40}"
done
report
