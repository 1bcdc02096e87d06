#!/usr/bin/env bash
# Runs the content of an image as Kubernetes does: an unprivileged user, a read-only root, only /run/expertd and /dev/shm
# writable; and compares the answers with recorded ones. Needs root, no daemon.
#
# Usage: scripts/try_image.sh [--gpus N] IMAGE [FAMILY]
#   --gpus N  one rank on each of N GPUs; the driver's libraries and devices come from this machine, as a container
#             runtime injects them (default: two ranks on CPUs)
#   IMAGE     name of an image in buildah's storage, or a folder with the content of one
#   FAMILY    a recorded checkpoint of tests/fixtures/golden (default qwen3_moe), or its folder
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=0
if [ "${1:-}" = --gpus ]; then gpus=$2; shift 2; fi
image=$1
model=${2:-qwen3_moe}
[ -d "$model" ] || model=$(cargo run --quiet --package expertd-test-fixtures -- "golden/$model")
address=127.0.0.1:50951
if [ -d "$image" ]; then
    root=$(realpath "$image")
else
    export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=chroot
    container=$(buildah from --pull-never "$image")
    root=$(buildah mount "$container")
    trap 'buildah umount "$container" > /dev/null; buildah rm "$container" > /dev/null' EXIT
fi
mkdir -p "$root"/{model,run/expertd,proc,dev,sys,driver}
unshare --mount bash -euo pipefail -s "$root" "$model" "$address" "$gpus" << 'INSIDE'
root=$1 model=$2 address=$3 gpus=$4
mount --bind "$root" "$root"
mount --bind "$model" "$root/model"
mount -t proc proc "$root/proc"
mount -t tmpfs -o uid=10001,gid=10001,mode=0700 tmpfs "$root/run/expertd"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
mkdir -m 1777 "$root/dev/shm"
devices=(/dev/null /dev/zero /dev/urandom)
settings=(PATH=/usr/local/bin:/usr/bin:/bin EXPERTD_ADMIN_LISTEN=unix:/run/expertd/admin.sock EXPERTD_MODEL=/model
    EXPERTD_LISTEN="$address" EXPERTD_METRICS_LISTEN=127.0.0.1:9951 EXPERTD_LOG="${EXPERTD_LOG:-warn}")
# Rows of GPU ranks are bf16.
tolerance=1e-5
if [ "$gpus" = 0 ]; then
    settings+=(EXPERTD_RANKS=2)
else
    tolerance=1e-2
    settings+=(EXPERTD_RANKS="$gpus" EXPERTD_DEVICE=cuda EXPERTD_NCCL=/usr/local/lib/libnccl.so.2 LD_LIBRARY_PATH=/driver)
    mount --rbind /sys "$root/sys"
    mount -t tmpfs -o mode=0755 tmpfs "$root/driver"
    for name in libcuda.so.1 libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1; do
        file=$(ldconfig -p | awk -v name="$name" '$1 == name { print $NF; exit }')
        if [ -n "$file" ]; then cp "$(realpath "$file")" "$root/driver/$name"; fi
    done
    for device in /dev/nvidia*; do [ -c "$device" ] && devices+=("$device"); done
fi
for device in "${devices[@]}"; do touch "$root$device"; mount --bind "$device" "$root$device"; done
mount -o remount,ro,bind "$root"
mount -o remount,ro,bind "$root/model"
enter=(chroot --userspec=10001:10001 "$root" /usr/bin/env -i "${settings[@]}")
inside() { "${enter[@]}" "$@"; }
if inside sh -c 'echo > /file' 2> /dev/null; then echo "the root is writable"; exit 1; fi
"${enter[@]}" expertd serve > /dev/null &
service=$!
trap 'kill -9 $service 2> /dev/null || true' EXIT
for _ in $(seq 600); do inside expertd status > /dev/null 2>&1 && break; sleep 0.1; done
echo "user $(awk '/^Uid:/ { print $2 }' /proc/$service/status), root $(awk '$5 == "/" { print $6; exit }' /proc/$service/mountinfo)"
inside expertd verify --address "$address" --golden /model/golden.safetensors --tolerance "$tolerance"
inside expertd status
inside expertd drain
wait "$service"
echo "drained, exit status 0"
INSIDE
