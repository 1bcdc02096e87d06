#!/bin/sh
# Downloads the CUDA compiler and the static runtime library from PyPI, to build with `--features cuda` on a machine
# without a toolkit. Building needs neither a GPU nor a driver.
#
# Usage: scripts/fetch-cuda.sh [DIR]        DIR defaults to target/cuda, which kernels/build.rs searches; for another
#                                           folder set CUDA_HOME to the path that this script prints last.
# Environment: PYTHON (default python3).
set -eu

# nvcc, its front and back ends, the CUDA runtime and its headers, in the version that the kernels are tested with. Any
# toolkit from 12.8 on works as well; set CUDA_HOME to it.
TOOLKIT="cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2"

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
dir=${1:-$root/target/cuda}
python=${PYTHON:-python3}
home=$dir/nvidia/cu13

if ! command -v "$python" >/dev/null 2>&1; then
    echo "fetch-cuda: '$python' was not found; install Python 3 with pip, or set PYTHON to an interpreter" >&2
    exit 1
fi
if ! command -v "${CXX:-c++}" >/dev/null 2>&1; then
    echo "fetch-cuda: nvcc needs a host C++ compiler, but '${CXX:-c++}' was not found; install g++" >&2
    exit 1
fi

if [ -x "$home/bin/nvcc" ]; then
    echo "fetch-cuda: $home exists already"
else
    mkdir -p "$dir"
    "$root/scripts/again.sh" \
        "$python" -m pip install --quiet --disable-pip-version-check --no-input --upgrade --target "$dir" "$TOOLKIT" || {
        echo "fetch-cuda: pip could not install $TOOLKIT into $dir; see its message above" >&2
        exit 1
    }
fi
# nvcc searches lib64, but the packages install to lib.
[ -e "$home/lib64" ] || ln -s lib "$home/lib64"

"$home/bin/nvcc" --version | grep release
echo "CUDA_HOME=$home"
