#!/usr/bin/env bash
# Runs the content of an image as Kubernetes does: an unprivileged user, a read-only root, only /run/expertd writable; and
# compares the answers with recorded ones. Needs root and buildah, no daemon.
#
# Usage: scripts/try_image.sh IMAGE [FAMILY]     FAMILY is a folder of tests/fixtures/golden (default qwen3_moe)
set -euo pipefail
cd "$(dirname "$0")/.."
image=$1 family=${2:-qwen3_moe}
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=chroot
container=$(buildah from --pull-never "$image")
root=$(buildah mount "$container")
trap 'buildah umount "$container" > /dev/null; buildah rm "$container" > /dev/null' EXIT
mkdir -p "$root/model" "$root/run/expertd"
address=127.0.0.1:50951
unshare --mount bash -euo pipefail -s "$root" "$PWD/tests/fixtures/golden/$family" "$address" << 'INSIDE'
root=$1 model=$2 address=$3
mount --bind "$root" "$root"
mount --bind "$model" "$root/model"
mount -t proc proc "$root/proc"
mount -t tmpfs -o uid=10001,gid=10001,mode=0700 tmpfs "$root/run/expertd"
mount -t tmpfs tmpfs "$root/dev"
for device in null zero urandom; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mount -o remount,ro,bind "$root"
mount -o remount,ro,bind "$root/model"
inside() { chroot --userspec=10001:10001 "$root" env -i PATH=/usr/local/bin:/usr/bin:/bin \
    EXPERTD_ADMIN_LISTEN=unix:/run/expertd/admin.sock "$@"; }
if inside sh -c 'echo > /file' 2> /dev/null; then echo "the root is writable"; exit 1; fi
inside id -u
inside EXPERTD_MODEL=/model EXPERTD_LISTEN="$address" EXPERTD_METRICS_LISTEN=127.0.0.1:9951 EXPERTD_RANKS=2 \
    EXPERTD_LOG=warn expertd serve > /dev/null &
service=$!
for _ in $(seq 600); do inside expertd status > /dev/null 2>&1 && break; sleep 0.1; done
inside expertd status
inside expertd verify --address "$address" --golden /model/golden.safetensors
inside expertd drain
wait "$service"
echo "drained, exit status 0"
INSIDE
