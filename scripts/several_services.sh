#!/usr/bin/env bash
# Load on three services used as one, each layer held by two, while one of them is killed, stopped, drained and restarted in
# turn. Fails if a call with a deadline of 5 s fails, or an answer is wrong.
#
# Usage: scripts/several_services.sh [SECONDS] [BIN]     default 300 s; BIN is a folder with expertd and expertd-loadtest
#                                                        (default target/release)
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-300} bin=${2:-target/release}
model=tests/fixtures/golden/qwen3_next
folder=$(mktemp -d)
layers=(0-1 2-3 0-3)
pids=()
trap 'kill -CONT "${pids[@]}" 2> /dev/null; kill -KILL "${pids[@]}" 2> /dev/null; wait 2> /dev/null; rm -rf "$folder"' EXIT

start() {
    "$bin/expertd" --log error serve --model $model --device cpu --ranks 1 --layers "${layers[$1]}" \
        --listen "127.0.0.1:5096$1" --metrics-listen "127.0.0.1:5097$1" --admin-listen "unix:$folder/$1.sock" > /dev/null &
    pids[$1]=$!
    until "$bin/expertd" status --admin "unix:$folder/$1.sock" > /dev/null 2>&1; do sleep 0.1; done
}
load() {
    "$bin/expertd-loadtest" --address 127.0.0.1:50960,127.0.0.1:50961,127.0.0.1:50962 --quiet --no-echo --connections 2 \
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

for index in 0 1 2; do start $index; done
load 10 "$folder/quiet.json"
show "quiet" "$folder/quiet.json"
load "$seconds" "$folder/faults.json" &
loader=$!
round=0
while kill -0 $loader 2> /dev/null; do
    index=$((round % 3))
    case $((round / 3 % 3)) in
        0) kill -KILL "${pids[$index]}"; wait "${pids[$index]}" 2> /dev/null || true; sleep 1; start $index ;;
        1) kill -STOP "${pids[$index]}"; sleep 3; kill -CONT "${pids[$index]}" ;;
        2) "$bin/expertd" drain --admin "unix:$folder/$index.sock" > /dev/null; wait "${pids[$index]}"; start $index ;;
    esac
    round=$((round + 1))
    sleep 3
done
wait $loader || true
show "$round faults" "$folder/faults.json"
