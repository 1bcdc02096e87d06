#!/usr/bin/env bash
# Runs the tests of the crates with unsafe code under the address sanitizer and its leak check. With RUSTC_BOOTSTRAP the stable
# compiler accepts the flag. Everything is built into target/asan.
#
#   scripts/asan.sh [ARGUMENTS OF cargo test]
#
# The leak check needs ptrace; ASAN_OPTIONS=detect_leaks=0 turns it off where a container forbids that.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes" \
    cargo test --locked --target "$target" --target-dir target/asan \
    -p expertd-compute -p expertd-ipc -p expertd-model -p expertd-rank -p expertd-rank-cpu -p expertd-shm "$@"
