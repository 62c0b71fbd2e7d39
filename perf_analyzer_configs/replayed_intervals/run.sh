#!/usr/bin/env bash
# REQUESTS: number of requests. After the last interval of intervals.txt comes the first again.
source "$(dirname "$0")/../load.sh"

load replay --request-intervals "$folder/intervals.txt" --request-count "${REQUESTS:-24}"
report
