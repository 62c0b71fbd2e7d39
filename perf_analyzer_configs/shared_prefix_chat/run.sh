#!/usr/bin/env bash
# CLIENTS: conversations at a time. REQUESTS: in all.
source "$(dirname "$0")/../load.sh"

clients=${CLIENTS:-4}
load chat --concurrency-range "$clients" --request-count "${REQUESTS:-16}"
report
