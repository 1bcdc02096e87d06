#!/usr/bin/env bash
# Runs the service and clients of its sessions as containers of one pod do: mount, process and IPC namespaces and users of their
# own, read-only roots, and one shared folder with the socket. Clients compare answers. Needs root, no daemon.
#
# Usage: scripts/try_session_containers.sh FOLDER     FOLDER holds `expertd` and `expertd-loadtest`
set -euo pipefail
cd "$(dirname "$0")/.."
binaries=$(realpath "$1")
work=$(mktemp -d)
service=
end() {
    if [ -n "$service" ]; then kill "$service" 2> /dev/null; wait "$service" 2> /dev/null || true; fi
    umount "$work/shared" && rm -rf "$work"
}
trap end EXIT
mkdir "$work/shared" "$work/model"
# As an emptyDir of a pod with `fsGroup: 10001`.
mount -t tmpfs -o mode=2770,gid=10001 tmpfs "$work/shared"
"$binaries/expertd" synth --family qwen3_moe --layers 2 --out "$work/model/m" > "$work/synth.log"
chmod -R a+rX "$work/model" "$work"

# container USER HOW COMMAND...: the command as that user, with the shared folder mounted HOW (rw or ro).
container() {
    user=$1 how=$2; shift 2
    exec unshare --mount --pid --ipc --uts --fork --kill-child bash -euo pipefail -s "$work" "$binaries" "$user" "$how" "$@" << 'INSIDE'
work=$1 binaries=$2 user=$3 how=$4; shift 4
root=$work/root-$user
mkdir -p "$root"
mount -t tmpfs tmpfs "$root"
mkdir -p "$root"/{usr,lib,lib64,bin,proc,dev,tmp,model,run/expertd,run/expertd-sessions,opt}
for folder in usr lib lib64 bin; do
    if [ -e "/$folder" ]; then mount --bind "/$folder" "$root/$folder"; mount -o remount,ro,bind "$root/$folder"; fi
done
mount -t proc proc "$root/proc"
for device in null zero urandom; do touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"; done
mount --bind "$binaries" "$root/opt"
mount --bind "$work/model" "$root/model"
mount -t tmpfs -o "uid=$user,gid=$user,mode=0700" tmpfs "$root/run/expertd"
mount --bind "$work/shared" "$root/run/expertd-sessions"
mount -o "remount,$how,bind" "$root/run/expertd-sessions"
mount -o remount,ro "$root"
# 10001 is the pod's group.
exec chroot --userspec="$user:$user" --groups=10001 "$root" /usr/bin/env -i PATH=/opt:/usr/bin:/bin "$@"
INSIDE
}

socket=unix:/run/expertd-sessions/session.sock
container 10001 rw expertd serve --model /model/m --device cpu --ranks 2 --listen unix:/run/expertd/grpc.sock \
    --admin-listen unix:/run/expertd/admin.sock --metrics-listen 127.0.0.1:0 --session-listen "$socket" \
    --session-allow-uid 10002 > "$work/service.log" 2>&1 &
service=$!
for _ in $(seq 600); do grep -q "state=Serving" "$work/service.log" && break; sleep 0.1; done

client() {
    user=$1 how=$2
    (container "$user" "$how" expertd-loadtest --session host --address "$socket" --tokens uniform:1-64 --requests 200 \
        --warm-up 0 --check 0.5 --no-echo --quiet) > "$work/client.log" 2>&1
}
for how in rw ro; do
    if ! client 10002 "$how"; then echo "the allowed user failed ($how)"; cat "$work/client.log" "$work/service.log"; exit 1; fi
    echo "user 10002, folder mounted $how: $(grep -E '^wrong|^checked' "$work/client.log" | tr -s ' ' | tr '\n' ' ')"
done
if client 10003 rw; then echo "a user that is not allowed was served"; exit 1; fi
echo "user 10003: $(tail -1 "$work/client.log")"
grep "session opened" "$work/service.log" | tail -1
