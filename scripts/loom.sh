#!/usr/bin/env bash
# Runs what threads and processes share (rings, doorbells, portions of copies) in every interleaving, under loom.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --release -p expertd-ipc --features loom loom "$@"
