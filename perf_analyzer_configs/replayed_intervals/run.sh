#!/usr/bin/env bash
# REQUESTS: after the last interval of intervals.txt it begins again with the first.
source "$(dirname "$0")/../load.sh"

load replay --request-intervals "$folder/intervals.txt" --request-count "${REQUESTS:-24}"
report
