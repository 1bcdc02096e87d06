#!/bin/sh
# Runs COUNT schedules (default: a million) of the step loop's simulation, beginning with seed FIRST (default: 0).
#
#   scripts/simulate.sh [COUNT [FIRST]]
#   scripts/simulate.sh trace SEED        prints the trace of one schedule
#   scripts/simulate.sh slots ...         the same for the cache of expert slots
set -eu
cd "$(dirname "$0")/.."
crate=expertd-scheduler
example=simulate
if [ "${1:-}" = slots ]; then
    crate=expertd-tier
    example=simulate_slots
    shift
fi
cargo build --quiet --release -p $crate --example $example
run=${CARGO_TARGET_DIR:-target}/release/examples/$example
if [ "${1:-}" = trace ]; then
    exec "$run" "$2"
fi
exec "$run" "${2:-0}" "${1:-1000000}"
