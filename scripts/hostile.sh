#!/bin/sh
# Runs each attack of tests/hostile in full size, one after the other, and prints what an honest client on another
# address gets without and beside it, and the router's resident memory.
#
#     scripts/hostile.sh [ATTACKERS [SECONDS]]
#
# With HOSTILE_TOKENS=1 the honest client has a token and the attackers have none. 1024 attackers need some 5000 file
# descriptors (ulimit -n), and cores of their own: run it on a machine with at least eight.
set -eu
cd "$(dirname "$0")/.."
ulimit -n "$(ulimit -Hn)"
echo '| attack | attackers | connections made | calls/s alone | calls/s beside | p99 alone, ms | p99 beside, ms | MiB before | MiB at most | MiB later |'
echo '|---|---|---|---|---|---|---|---|---|---|'
HOSTILE_ATTACKERS=${1:-1024} HOSTILE_SECONDS=${2:-10} HOSTILE_SETTLE_SECONDS=60 \
    cargo test --release --quiet --test hostile attacks:: -- --test-threads 1 --nocapture | grep '^|'
