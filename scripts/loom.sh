#!/usr/bin/env bash
# Tests the algorithms that threads and processes share (rings, doorbells, teams of threads) with loom: in every
# interleaving, of some in all of up to three preemptions.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --release -p expertd-shm --features expertd-shm/loom loom "$@"
