#!/usr/bin/env bash
# Makes the base images of deploy/Dockerfile and deploy/Dockerfile.cuda under their usual names, for machines that reach
# Debian's packages but no image registry. Needs root, buildah and debootstrap, no daemon.
#
#   docker.io/library/debian:bookworm-slim   Debian's minimal system
#   docker.io/library/rust:1-bookworm        the same with gcc, g++, Python and this machine's Rust
#
# Usage: scripts/base_images.sh            STORAGE_DRIVER chooses how buildah stores layers (default vfs)
set -euo pipefail
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=chroot
toolchain=$(rustc --print sysroot)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# system NAME PACKAGES: a Debian system in $folder/NAME, without what images do not need.
system() {
    debootstrap --variant=minbase --include="$2" bookworm "$folder/$1" > "$folder/log" || { tail -5 "$folder/log"; exit 1; }
    chroot "$folder/$1" apt-get clean
    rm -rf "$folder/$1"/var/lib/apt/lists/* "$folder/$1"/usr/share/{doc,man,locale}/*
}

# image NAME FOLDER ENVIRONMENT…: an image of the folder's content.
image() {
    local name=$1 content=$2 container
    shift 2
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$content" / > /dev/null
    for variable; do buildah config --env "$variable" "$container"; done
    buildah config --cmd bash "$container"
    buildah commit --quiet --rm "$container" "$name" > /dev/null
    echo "made $name"
}

system slim ca-certificates
image docker.io/library/debian:bookworm-slim "$folder/slim"

system rust ca-certificates,gcc,g++,libc6-dev,make,pkg-config,python3
# Authorities that this machine trusts, such as that of a proxy.
cp /etc/ssl/certs/ca-certificates.crt "$folder/rust/etc/ssl/certs/ca-certificates.crt"
mkdir -p "$folder/rust/usr/local/cargo" "$folder/rust/usr/local/rustup"
cp -a "$toolchain/bin" "$toolchain/lib" "$folder/rust/usr/local/rustup/"
rm -rf "$folder/rust/usr/local/rustup/lib/rustlib/src"
image docker.io/library/rust:1-bookworm "$folder/rust" CARGO_HOME=/usr/local/cargo \
    PATH=/usr/local/rustup/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
