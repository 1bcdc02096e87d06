#!/bin/sh
# Runs the tests of weights and faults in full size: files replaced under 1,000 killed ranks and starts, 50 reloads under
# load, 10 minutes of ranks and loaders that are killed and stopped in random order. Prints the effect on calls.
#
#     scripts/chaos.sh [ROUNDS [RELOADS [SECONDS]]]
set -eu
cd "$(dirname "$0")/.."
EXPERTD_REPLACE_ROUNDS=${1:-1000} EXPERTD_RELOAD_ROUNDS=${2:-50} EXPERTD_CHAOS_SECONDS=${3:-600} \
    cargo test --test e2e -- --test-threads 1 --nocapture \
    no_receipt_is_wrong reloads_under_load chaos_among
