#!/bin/sh
# Plants known faults in the step loop, the life of weights, attachments and their driver, and in the cache of expert slots, one at a
# time, and runs the simulation of each until it finds them.
#
#   scripts/mutants.sh            all of server/scheduler/mutants/*.patch and server/tier/mutants/*.patch, against the last commit
#   scripts/mutants.sh NAME...    the patches whose names begin with a NAME
#
# Prints for each fault the seed that found it and how many schedules that took. Fails if a fault survives 10,000.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
schedules=10000
tree=$(mktemp -d)
trap 'git worktree remove --force "$tree" >/dev/null 2>&1; rm -rf "$tree"' EXIT
git worktree add --quiet --detach "$tree" HEAD
export CARGO_TARGET_DIR="$root/target/mutants"
[ $# -gt 0 ] || set -- ""
survived=0
printf '%-34s %-8s %-10s %s\n' mutant seed schedules fault
for prefix in "$@"; do
    for patch in "$root/server/scheduler/mutants/$prefix"*.patch "$root/server/tier/mutants/$prefix"*.patch; do
        [ -e "$patch" ] || continue
        name=$(basename "$patch" .patch)
        case $patch in
            "$root"/server/tier/*) crate=expertd-tier example=simulate_slots ;;
            *) crate=expertd-scheduler example=simulate ;;
        esac
        fault=$(head -n 1 "$patch")
        git -C "$tree" checkout --quiet -- .
        git -C "$tree" apply "$patch"
        (cd "$tree" && cargo build --quiet --release -p $crate --example $example 2>/dev/null)
        if output=$("$CARGO_TARGET_DIR/release/examples/$example" 0 $schedules); then
            printf '%-34s %-8s %-10s %s\n' "$name" - "$schedules" "SURVIVED: $fault"
            survived=1
        else
            found=$(printf '%s\n' "$output" | sed -n 's/^seed \([0-9]*\), schedule number \([0-9]*\),.*/\1 \2/p')
            printf '%-34s %-8s %-10s %s\n' "$name" ${found:-"panicked -"} "$fault"
        fi
    done
done
exit $survived
