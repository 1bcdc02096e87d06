#!/bin/sh
# Fetches the CUDA compiler and the runtime's static library from PyPI, for building `--features cuda` on a machine
# without an installed toolkit. No GPU and no driver are needed to build.
#
# Usage: scripts/fetch-cuda.sh [DIR]        DIR defaults to target/cuda, where kernels/build.rs looks by itself;
#                                           for another folder set CUDA_HOME to the path that this script prints last.
# Environment: PYTHON (default python3).
set -eu

# nvcc, its front and back ends, the CUDA runtime and its headers. Kept at the CUDA version that the kernels are tested
# with; any 12.8 or newer toolkit found through CUDA_HOME works as well.
TOOLKIT="cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2"

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
dir=${1:-$root/target/cuda}
python=${PYTHON:-python3}
home=$dir/nvidia/cu13

if ! command -v "$python" >/dev/null 2>&1; then
    echo "fetch-cuda: '$python' not found; install Python 3 with pip, or name one in PYTHON" >&2
    exit 1
fi
if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then
    echo "fetch-cuda: nvcc needs a host C++ compiler and '${CXX:-c++}' was not found; install g++" >&2
    exit 1
fi

if [ -x "$home/bin/nvcc" ]; then
    echo "fetch-cuda: $home is already there"
else
    mkdir -p "$dir"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input --upgrade --target "$dir" "$TOOLKIT" || {
        echo "fetch-cuda: pip could not install $TOOLKIT into $dir (its message stands above)" >&2
        exit 1
    }
fi
# nvcc searches lib64; the packages unpack to lib.
[ -e "$home/lib64" ] || ln -s lib "$home/lib64"

"$home/bin/nvcc" --version | grep release
echo "CUDA_HOME=$home"
