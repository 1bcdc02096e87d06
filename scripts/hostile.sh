#!/bin/sh
# Runs each attack of tests/hostile in full size, one after the other, and prints what an honest client on another
# address gets alone, beside a control and beside the attack, and the router's processor time and resident memory. The
# control is a process that uses as much processor time on the service's cores as the attackers cost the service.
#
#     scripts/hostile.sh [ATTACKERS [SECONDS [ROUNDS]]]
#
# With HOSTILE_TOKENS=1 the honest client has a token and the attackers have none. HOSTILE_SERVICE_CORES=0,1,2,3 and
# HOSTILE_HONEST_CORES=4,5 give service and honest client cores of their own; start the script under taskset with the
# attackers' cores. 1024 attackers need some 5000 file descriptors (ulimit -n).
set -eu
cd "$(dirname "$0")/.."
ulimit -n "$(ulimit -Hn)"
echo '| attack | attackers | connections made | calls/s alone | beside the control | beside the attack | attack / control | p99 alone, ms | control | attack | router, cores busy alone | beside the attack | beside the control + control | MiB before | MiB at most |'
echo '|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|'
HOSTILE_ATTACKERS=${1:-1024} HOSTILE_SECONDS=${2:-5} HOSTILE_ROUNDS=${3:-2} \
    cargo test --release --quiet --test hostile attacks:: -- --test-threads 1 --nocapture | grep '^|'
