#!/usr/bin/env bash
# Runs the tests of the crates with unsafe code under the address sanitizer. RUSTC_BOOTSTRAP lets the stable compiler take the
# flag; everything is built into a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes" ASAN_OPTIONS="detect_leaks=0" \
    cargo test --locked --target "$target" --target-dir target/asan \
    -p expertd-compute -p expertd-ipc -p expertd-memory -p expertd-model -p expertd-rank -p expertd-rank-cpu "$@"
