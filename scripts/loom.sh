#!/usr/bin/env bash
# Tests the algorithms that threads and processes share (rings, doorbells, portions of copies) in every interleaving, with loom.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --release -p expertd-shm -p expertd-ipc --features expertd-shm/loom,expertd-ipc/loom loom "$@"
