#!/usr/bin/env bash
# Builds the Python package's wheel, installs it into a fresh virtual environment and runs its tests against services from
# that wheel. Cargo's artefacts of the workspace are reused (release profile).
#
#   scripts/python_tests.sh [PYTEST ARGUMENTS]
#
# EXPERTD_BINARY=target/debug/expertd puts a command into the wheel that was built already, which saves minutes.
# Network sessions are tried with NIXL from PyPI, over TCP on this host's loopback.
# With EXPERTD_TEST_TRANSFORMERS=5.23.0 the tests of expertd.transformers run as well, with that version and torch.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
if [[ -n ${EXPERTD_BINARY:-} ]]; then
    EXPERTD_BINARY=$(realpath "$EXPERTD_BINARY")
    export EXPERTD_BINARY
fi
venv=$CARGO_TARGET_DIR/python-tests

"$python" -m venv --clear "$venv"
scripts/again.sh "$venv/bin/pip" install --quiet ./python'[test]' mypy
scripts/again.sh "$venv/bin/pip" install --quiet --no-deps nixl-cu13==1.5.1
if [[ -n ${EXPERTD_TEST_TRANSFORMERS:-} ]]; then
    scripts/again.sh "$venv/bin/pip" install --quiet torch "transformers==$EXPERTD_TEST_TRANSFORMERS"
fi
# From here on the command is the wheel's own.
unset EXPERTD_BINARY
"$venv/bin/mypy" --strict --python-version 3.11 python/expertd --exclude 'expertd/(transformers/|vllm/|sglang/|_engines/(connection|settings).py|_torch.py)'
"$venv/bin/pytest" -q python/tests "$@"
# In a process of its own: the protobuf that comes with NIXL aborts where grpc_tools has loaded another one.
EXPERTD_NIXL=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export EXPERTD_NIXL
"$venv/bin/pytest" -q python/tests --ignore python/tests/test_grpcio.py -k network "$@"
