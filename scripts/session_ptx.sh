#!/bin/sh
# Compiles the kernels of CUDA sessions' clients to the PTX that is part of the source. Needs nvcc of CUDA 13.0, as
# scripts/fetch-cuda.sh installs it, and no GPU.
#
#   scripts/session_ptx.sh            writes client/session/src/cuda/copies/copies.ptx
#   scripts/session_ptx.sh --check    fails if that file is not what copies.cu compiles to
#
# Environment: CUDA_HOME, a toolkit or a folder of scripts/fetch-cuda.sh (default target/cuda).
set -eu

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
home=${CUDA_HOME:-$root/target/cuda}
[ -x "$home/bin/nvcc" ] || home=$home/nvidia/cu13
folder=$root/client/session/src/cuda/copies
made=$(mktemp -d)
trap 'rm -r "$made"' EXIT

"$home/bin/nvcc" --ptx --gpu-architecture=compute_75 -O3 -o "$made/raw.ptx" "$folder/copies.cu"
# The kernels use nothing newer than PTX 7.8, which drivers of CUDA 11.8 know. The comments name the compiler's build.
sed 's/^\.version .*/.version 7.8/; /^\/\//d; /^[[:space:]]*\/\/ /d; /^$/d' "$made/raw.ptx" >"$made/copies.ptx"
"$home/bin/ptxas" --gpu-name=sm_90 --output-file "$made/copies.cubin" "$made/copies.ptx"

if [ "${1:-}" = --check ]; then
    cmp "$made/copies.ptx" "$folder/copies.ptx" || {
        echo "session_ptx: copies.ptx is not what copies.cu compiles to; run scripts/session_ptx.sh with CUDA 13.0" >&2
        exit 1
    }
else
    cp "$made/copies.ptx" "$folder/copies.ptx"
fi
