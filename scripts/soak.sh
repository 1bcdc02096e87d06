#!/bin/sh
# Saturates a service for five minutes. Fails if an answer is missing or wrong, if the router has more than 200 MiB at any
# time, or if a process grows by more than 5 % from the fourth to the fifth minute.
#
#     scripts/soak.sh [CHECKPOINT [SECONDS [flags of expertd-loadtest...]]]
#
# Without CHECKPOINT the script makes a random one. It needs release builds: cargo build --release --workspace
set -eu
cd "$(dirname "$0")/.."
bin=${EXPERTD_BIN:-target/release}
folder=$(mktemp -d)
service=
trap 'test -z "$service" || { kill "$service"; wait "$service" || true; }; rm -rf "$folder"' EXIT INT TERM
model=${1:-}
seconds=${2:-300}
test $# -lt 2 || shift
test $# -lt 1 || shift
if [ -z "$model" ]; then
    model=$folder/model
    "$bin/expertd" synth --family qwen3_moe --hidden 512 --width 256 --experts 32 --top-k 4 --out "$model"
fi
"$bin/expertd" serve --model "$model" --listen "unix:$folder/expertd.sock" \
    --admin-listen "unix:$folder/admin.sock" --metrics-listen 127.0.0.1:0 >"$folder/out" &
service=$!
until grep -q '^ready: ' "$folder/out"; do
    kill -0 "$service" || { cat "$folder/out"; exit 1; }
    sleep 0.2
done
"$bin/expertd-loadtest" --address "unix:$folder/expertd.sock" --mode stream --connections 2 --streams 2 \
    --outstanding 8 --tokens lognormal:16,1 --warm-up 0 --duration "$seconds" --check 0.02 --no-echo \
    --watch-memory "$service" --max-memory-growth 0.05 --max-memory-bytes 209715200 "$@"
