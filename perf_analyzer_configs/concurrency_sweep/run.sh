#!/usr/bin/env bash
# CLIENTS: numbers of clients, one run each. REQUESTS: number of requests of each run.
source "$(dirname "$0")/../load.sh"

for clients in ${CLIENTS:-1 2 4 8 16}; do
    load "clients_$clients" --concurrency-range "$clients" \
        --request-count "${REQUESTS:-$((8 * clients))}"
done
report
