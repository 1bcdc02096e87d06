#!/bin/sh
# Runs COUNT schedules (default: a million) of the step loop's simulation, beginning with seed FIRST (default: 0).
#
#   scripts/simulate.sh [COUNT [FIRST]]
#   scripts/simulate.sh trace SEED        prints the trace of one schedule
set -eu
cd "$(dirname "$0")/.."
cargo build --quiet --release -p expertd-scheduler --example simulate
run=${CARGO_TARGET_DIR:-target}/release/examples/simulate
if [ "${1:-}" = trace ]; then
    exec "$run" "$2"
fi
exec "$run" "${2:-0}" "${1:-1000000}"
