#!/usr/bin/env bash
# Runs the tests of network sessions with NIXL from PyPI, over TCP on this host's loopback, and over a link between network namespaces
# where they can be made. scripts/python_tests.sh has those of Python.
#
#   scripts/network_tests.sh [ARGUMENTS OF THE TEST PROGRAM]
#
# EXPERTD_NETWORK_CALLS=1000000, EXPERTD_NETWORK_CLIENTS=1000, EXPERTD_NETWORK_CUTS=1000 and EXPERTD_NETWORK_ROUNDS=100000 make the
# tests longer.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${CARGO_TARGET_DIR:-$PWD/target}/network-tests
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
scripts/again.sh "$venv/bin/pip" install --quiet --no-deps nixl-cu13==1.5.1
EXPERTD_NIXL=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export EXPERTD_NIXL
probe=expertd-probe-$$
if [[ -w /dev/net/tun ]] && ip netns add $probe 2>/dev/null; then
    ip netns del $probe
    export EXPERTD_NETWORK_NAMESPACES=1
fi
cargo test --locked -p expertd-network --test order -- --ignored
UCX_TLS=sm,self,tcp cargo test --locked -p expertd-network --test order -- --ignored
cargo test --locked --test e2e network:: -- --ignored "$@"
