#!/usr/bin/env bash
# Load on three services used as one, each layer held by two, while one of them is killed, stopped, cut off, drained and
# upgraded in turn. Fails if a call with a deadline of 5 s fails, or an answer is wrong.
#
# Usage: scripts/several_services.sh [--namespaces] [SECONDS] [BIN] [NEW]
#   SECONDS       length of the run with faults (default 300)
#   BIN           folder with expertd and expertd-loadtest (default target/release)
#   NEW           the binary that services are upgraded to (default that of BIN)
#   --namespaces  each service has a network namespace of its own, with a link that can be cut; needs root and ip
set -euo pipefail
cd "$(dirname "$0")/.."
namespaces=
if [ "${1:-}" = --namespaces ]; then namespaces=1; shift; fi
seconds=${1:-300} bin=${2:-target/release}
new=${3:-$bin/expertd}
model=$(cargo run --quiet --package expertd-test-fixtures -- golden/qwen3_next)
folder=$(mktemp -d)
layers=(0-1 2-3 0-3)
pids=()
net=expertd-$$

if [ -n "$namespaces" ] && ! { [ "$(id -u)" = 0 ] && ip netns add "$net" 2> /dev/null; }; then
    echo "SKIPPED: several services in network namespaces were NOT tried; that needs root, ip (iproute2) and namespaces" >&2
    exit 0
fi

cleanup() {
    kill -CONT "${pids[@]}" 2> /dev/null
    kill -KILL "${pids[@]}" ${loader:+"$loader"} 2> /dev/null
    wait 2> /dev/null
    if [ -n "$namespaces" ]; then
        for name in "$net" "$net"-{0,1,2}; do ip netns delete "$name" 2> /dev/null; done
    fi
    rm -rf "$folder"
}
trap cleanup EXIT

# Clients are in a namespace with a bridge; the link of service N ends there as vN.
if [ -n "$namespaces" ]; then
    ip -n "$net" link set lo up
    ip -n "$net" link add bridge0 type bridge
    ip -n "$net" address add 10.213.7.1/24 dev bridge0
    ip -n "$net" link set bridge0 up
    for index in 0 1 2; do
        ip netns add "$net-$index"
        ip -n "$net" link add "v$index" type veth peer name eth0 netns "$net-$index"
        ip -n "$net" link set "v$index" master bridge0 up
        ip -n "$net-$index" address add "10.213.7.1$index/24" dev eth0
        ip -n "$net-$index" link set eth0 up
        ip -n "$net-$index" link set lo up
    done
    addresses=10.213.7.10:50051,10.213.7.11:50051,10.213.7.12:50051
    near="ip netns exec $net"
else
    addresses=127.0.0.1:50960,127.0.0.1:50961,127.0.0.1:50962
    near=
fi

# start INDEX BINARY
start() {
    local inside= listen="127.0.0.1:5096$1" metrics="127.0.0.1:5097$1" open=
    if [ -n "$namespaces" ]; then
        inside="ip netns exec $net-$1" listen="10.213.7.1$1:50051" metrics=127.0.0.1:9464 open=--insecure
    fi
    $inside "$2" --log error serve --model $model --device cpu --ranks 1 --layers "${layers[$1]}" --listen "$listen" \
        --metrics-listen "$metrics" --admin-listen "unix:$folder/$1.sock" $open > /dev/null &
    pids[$1]=$!
    until "$bin/expertd" status --admin "unix:$folder/$1.sock" > /dev/null 2>&1; do sleep 0.1; done
}
drain() {
    "$bin/expertd" drain --admin "unix:$folder/$1.sock" > /dev/null
    wait "${pids[$1]}"
}
load() {
    $near "$bin/expertd-loadtest" --address "$addresses" --quiet --no-echo --connections 2 \
        --outstanding 2 --deadline-ms 5000 --tokens uniform:1-64 --check-golden $model/golden.safetensors --check 0.1 \
        --duration "$1" --json "$2" > /dev/null
}
show() {
    python3 - "$1" "$2" << 'END'
import json, sys
report = json.load(open(sys.argv[2]))
latency, statuses = report["latency"], report["statuses"]
print(f"{sys.argv[1]}: {report['requests']} requests, {report['wrong']} wrong, {report['lost']} lost, "
      f"statuses {statuses or None}, p50 {latency['p50_seconds'] * 1e3:.2f} ms, "
      f"p99 {latency['p99_seconds'] * 1e3:.2f} ms, longest {latency['max_seconds'] * 1e3:.0f} ms")
failed = sum(status["count"] for status in statuses.values())
sys.exit(1 if report["wrong"] or report["lost"] or failed or not report["requests"] else 0)
END
}

for index in 0 1 2; do start $index "$bin/expertd"; done
load 10 "$folder/quiet.json"
show "quiet" "$folder/quiet.json"
load "$seconds" "$folder/faults.json" &
loader=$!
kinds=(killed stopped drained upgraded)
[ -z "$namespaces" ] || kinds+=("cut off")
declare -A count=()
round=0
while kill -0 $loader 2> /dev/null; do
    index=$((round % 3)) kind=${kinds[round % ${#kinds[@]}]}
    case $kind in
        killed) kill -KILL "${pids[$index]}"; wait "${pids[$index]}" 2> /dev/null || true; sleep 1; start $index "$bin/expertd" ;;
        stopped) kill -STOP "${pids[$index]}"; sleep 3; kill -CONT "${pids[$index]}" ;;
        drained) drain $index; start $index "$bin/expertd" ;;
        upgraded) drain $index; start $index "$new" ;;
        "cut off") ip -n "$net" link set "v$index" down; sleep 4; ip -n "$net" link set "v$index" up; sleep 2 ;;
    esac
    count[$kind]=$((${count[$kind]:-0} + 1))
    round=$((round + 1))
    # Until the client uses the service again.
    sleep 4
done
wait $loader || true
summary=
for kind in "${kinds[@]}"; do summary+=", ${count[$kind]:-0} $kind"; done
show "$round faults (${summary#, })" "$folder/faults.json"
