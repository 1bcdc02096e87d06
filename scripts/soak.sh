#!/bin/sh
# Saturates a service for a minute: nothing may be lost or wrong, and no process may grow by more than 2 % from 15 s on.
#
#     scripts/soak.sh [CHECKPOINT [SECONDS [flags of expertd-loadtest...]]]
#
# Memory has not settled before some 15 s, so loads much shorter than the default of 60 s fail for growth.
#
# Without a checkpoint, a random one is made. Needs release builds: cargo build --release --workspace
set -eu
cd "$(dirname "$0")/.."
bin=${EXPERTD_BIN:-target/release}
folder=$(mktemp -d)
service=
trap 'test -z "$service" || { kill "$service"; wait "$service" || true; }; rm -rf "$folder"' EXIT INT TERM
model=${1:-}
seconds=${2:-60}
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
    --watch-memory "$service" --max-memory-growth 0.02 "$@"
