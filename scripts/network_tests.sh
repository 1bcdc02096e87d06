#!/usr/bin/env bash
# Runs the tests of network sessions with NIXL from PyPI, over TCP on this host's loopback.
#
#   scripts/network_tests.sh [ARGUMENTS OF THE TEST PROGRAM]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${CARGO_TARGET_DIR:-$PWD/target}/network-tests
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --no-deps nixl-cu13==1.5.1
EXPERTD_NIXL=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export EXPERTD_NIXL
cargo test --locked --test e2e network:: -- --ignored "$@"
