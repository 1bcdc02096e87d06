#!/usr/bin/env bash
# Tests the algorithms that threads and processes share (rings, doorbells, teams of threads) in every interleaving, with loom.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --release -p expertd-shm --features expertd-shm/loom loom "$@"
