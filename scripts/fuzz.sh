#!/usr/bin/env bash
# Fuzzes the parsers of expertd with libFuzzer: an input that panics, runs for more than a second or needs more than 512 MiB
# is a fault and is kept in target/fuzz/faults/TARGET/. Add it to tests/fuzz/regressions/TARGET/ with the fix; cargo test
# replays it.
#
#   scripts/fuzz.sh                        every target for 60 s each, under the address sanitizer
#   scripts/fuzz.sh --runs 1000000 ring    one million inputs for one target
#   scripts/fuzz.sh --plain --seconds 600  without the address sanitizer, which is several times faster
#   scripts/fuzz.sh --timeout 5            an input may take five seconds of wall time, on a machine that is busy otherwise
#                                          (one that takes longer is run again: a machine that pauses is no fault)
#   scripts/fuzz.sh --coverage             lines of each parser that seeds, regressions and the corpus so far reach, in percent
#
# Inputs that reach new code are kept in target/fuzz/corpus/TARGET/ and used again by the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

limit=-max_total_time=60
timeout=1
sanitizer=(-Zsanitizer=address)
name=asan
coverage=
targets=()
while (($#)); do
    case $1 in
    --seconds) limit=-max_total_time=$2; shift ;;
    --runs) limit=-runs=$2; shift ;;
    --timeout) timeout=$2; shift ;;
    --plain) sanitizer=(); name=plain ;;
    --coverage) coverage=1 ;;
    -h | --help) sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit ;;
    -*) echo "unknown option $1; see --help" >&2; exit 64 ;;
    *) targets+=("$1") ;;
    esac
    shift
done

host=$(rustc -vV | sed -n 's/^host: //p')
seeds=target/fuzz/seeds
rm -rf "$seeds"
known=$(cargo run --quiet --locked -p expertd-fuzz --bin fuzz-seeds -- "$seeds")
if ((${#targets[@]} == 0)); then
    mapfile -t targets < <(cut -d' ' -f1 <<<"$known")
fi

if [[ $coverage ]]; then
    tools=$(rustc --print sysroot)/lib/rustlib/$host/bin
    if [[ ! -x $tools/llvm-cov ]]; then
        echo "coverage needs LLVM's tools: rustup component add llvm-tools" >&2
        exit 69
    fi
    build=$PWD/target/fuzz/coverage
    RUSTFLAGS="--cfg fuzzing -Cinstrument-coverage" cargo build --locked --profile fuzz --target "$host" \
        --target-dir "$build" -p expertd-fuzz --bin fuzz-replay
    replay=$build/$host/fuzz/fuzz-replay
    rm -f "$build"/*.profraw
    for target in "${targets[@]}"; do
        inputs=("$seeds/$target")
        for folder in "target/fuzz/corpus/$target" "tests/fuzz/regressions/$target"; do
            if [[ -d $folder ]]; then inputs+=("$folder"); fi
        done
        EXPERTD_FUZZ_TARGET=$target LLVM_PROFILE_FILE=$build/$target.profraw "$replay" "${inputs[@]}"
    done
    "$tools/llvm-profdata" merge -sparse "$build"/*.profraw -o "$build/all.profdata"
    "$tools/llvm-cov" report "$replay" -instr-profile="$build/all.profdata" \
        server/model/src/{header,checkpoint,config,decode,resolve,families,gate_rules}.rs \
        server/ipc/src/control.rs server/shm/src/ring.rs server/rank/src/segments.rs \
        server/core/src/validate.rs server/core/src/listen/address.rs server/grpc/src/bytes/body.rs \
        server/grpc/src/service/{call,validate}.rs server/grpc/src/access/tokens.rs \
        server/sessions/src/{connection,opening,host,cuda}.rs server/sessions/src/host/table.rs \
        server/sessions/src/cuda/doorbells.rs client/session/src/{memory,socket,wire}.rs |
        awk '$1 ~ /\.rs$|^TOTAL/ { print $1, "lines", $8, "reached", $10 }'
    exit
fi

# The instrumentation is a compiler feature without a stable flag. --target keeps it away from build scripts.
build=$PWD/target/fuzz/$name
echo "building the fuzzers ($name)"
RUSTC_BOOTSTRAP=1 RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Coverflow-checks ${sanitizer[*]:-}" \
    cargo build --locked --profile fuzz --target "$host" --target-dir "$build" -p expertd-fuzz --features libfuzzer \
    --bin fuzz-files --bin fuzz-ipc --bin fuzz-api
fuzzers=$build/$host/fuzz

# Runs a fuzzer on inputs: files one after the other, folders as a corpus.
fuzz() {
    EXPERTD_FUZZ_TARGET=$target RUST_BACKTRACE=1 "$fuzzers/$binary" "$limit" -timeout="$timeout" -rss_limit_mb=512 \
        -max_len=16384 -print_final_stats=1 -artifact_prefix="$faults/" "$@" >"$log" 2>&1
}

# Whether the fuzzer ended at an input that took too long then, and does not when it is run again.
was_a_pause() {
    local input
    input=$(sed -n 's/.*Test unit written to \(.*\/timeout-[^ ]*\)$/\1/p' "$log" | tail -1)
    [[ $input ]] || return 1
    cp "$log" "$log.pause"
    if fuzz "$input"; then
        rm "$input"
        echo "$target: an input took more than $timeout s, and not so when it was run again; see $log.pause"
    else
        mv "$log.pause" "$log"
        return 1
    fi
}

status=0
for target in "${targets[@]}"; do
    binary=$(awk -v target="$target" '$1 == target { print $2 }' <<<"$known")
    if [[ -z $binary ]]; then
        echo "there is no target $target; the targets are: $(cut -d' ' -f1 <<<"$known" | paste -sd' ')" >&2
        exit 64
    fi
    corpus=target/fuzz/corpus/$target faults=target/fuzz/faults/$target log=target/fuzz/$target.log
    mkdir -p "$corpus" "$faults"
    inputs=("$corpus" "$seeds/$target")
    if [[ -d tests/fuzz/regressions/$target ]]; then inputs+=("tests/fuzz/regressions/$target"); fi
    pauses=0
    until fuzz "${inputs[@]}"; do
        # A machine may pause several times.
        if ((pauses++ < 3)) && was_a_pause; then continue; fi
        status=1
        echo "$target: FAULT; see $log"
        grep -aE "panicked|ERROR|SUMMARY|Test unit written" "$log" | head -5 || true
        continue 2
    done
    echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, $(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")/s," \
        "slowest $(sed -n 's/^stat::slowest_unit_time_sec: *//p' "$log") s, peak memory $(sed -n 's/^stat::peak_rss_mb: *//p' "$log") MiB, $(grep -aoE "cov: [0-9]+ ft: [0-9]+ corp: [0-9]+" "$log" | tail -1)"
done
exit $status
