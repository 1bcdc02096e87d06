#!/usr/bin/env bash
# What a contributor runs before a commit: format, lints, unit tests of all crates, tests of the API and of checkpoints,
# links of the documentation. About ten minutes on two cores once third-party crates are built; CI runs more.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; }

step "format"
cargo fmt --all --check

step "documentation: links, paths and pictures"
python3 scripts/check_docs.py
python3 scripts/plot_performance.py --check

step "size and import circles"
scripts/lines.py
scripts/import_circles.py

step "planted faults of the simulation still apply"
for patch in server/scheduler/mutants/*.patch server/tier/mutants/*.patch; do
    git apply --check "$patch" || { echo "$patch does not apply: adapt it, then run scripts/mutants.sh $(basename "$patch" .patch)"; exit 1; }
done

step "clippy"
cargo clippy --workspace --all-targets --locked -- -D warnings

step "unit tests of all crates"
cargo test --workspace --lib --locked

step "tests of the API and of checkpoints"
cargo test -p expertd --test api --test checkpoints --locked
