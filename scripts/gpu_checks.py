#!/usr/bin/env python3
"""Runs every test that needs GPUs, a few at a time, each with a time limit, and prints what passed.

    scripts/gpu_checks.py [--lanes N] [--limit SECONDS] [--budget SECONDS] [--logs FOLDER] [--list] [FILTER...]

Builds the programs with `cargo --release --features cuda` unless --programs names a folder that holds them: `e2e`, `device`,
`rank_cuda` and `session_cuda` (the tests of those names and of expertd-rank-cuda, built on another machine with nvcc). They look for
fixtures and for `target/release/expertd` at the path of the checkout they were built in. FILTERs choose tests whose names contain one of them.

A test spends most of its time starting services, so several run at once. Tests that need more GPUs than there are count as
skipped; a test that was cut off or not begun counts as failed. The environment (EXPERTD_NCCL, LD_LIBRARY_PATH) is passed on.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
# How cargo builds each program, and the name of its target.
BUILDS = {
    "e2e": (["--package", "expertd", "--test", "e2e", "--features", "fault-injection"], "e2e"),
    "device": (["--package", "expertd-kernels", "--test", "device"], "device"),
    "rank_cuda": (["--package", "expertd-rank-cuda", "--lib"], "expertd_rank_cuda"),
    "session_cuda": (["--package", "expertd-session", "--test", "cuda"], "cuda"),
}
# The kernels without a service; the last one needs two GPUs.
DEVICE = ["gate", "experts", "loopback", "fp8_rows", "faults", "staging", "peers ranks=2 timing=0"]
# Modules of `e2e` whose ignored tests need GPUs. `victim` is a process of another test.
MODULES = ["fp8", "gpu", "gpu_placement", "reload", "sessions::gpu", "sessions::cuda_gpu", "sessions::cuda_routing"]
NOT_TESTS = ["victim", "stand_in"]
# Tests that fail with fewer GPUs than two.
NEED_TWO = ["gpu_placement::", "chaos_on_gpus", "a_gpu_that_the_service_does_not_see", "device peers"]
# These tests take longest (about a minute each on two busy GPUs) and begin first.
FIRST = ["every_family", "quantised", "repacked", "device experts"]
# Tests that also run with rows that copy engines move into poisoned memory, in steps launched kernel by kernel. The rows of other recorded
# answers are padded, and those of small sizes are not cut: `sessions::gpu::steps_in_parts_give_the_same_bits` has larger ones.
COPIED_TOO = ["gpu::recorded_answers_of_rows_without_padding", "gpu::recorded_answers_of_repacked_checkpoints"]
COPIED = {"EXPERTD_CUDA_POISON": "50"}
PASSED, FAILED, CUT_OFF, SKIPPED, NOT_BEGUN = "passed", "FAILED", "CUT OFF", "skipped", "NOT BEGUN"


@dataclass
class Check:
    """A test in a process of its own."""

    name: str
    command: list
    environment: dict = field(default_factory=dict)
    outcome: str = NOT_BEGUN
    seconds: float = 0.0


def build(names):
    """Builds programs with cargo; returns the path of each."""
    found = {}
    for name in names:
        arguments, target = BUILDS[name]
        command = ["cargo", "test", "--release", "--locked", "--features", "cuda", "--no-run", "--message-format=json"]
        done = subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"cargo cannot build the tests of {name}")
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        paths = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == target]
        if not paths:
            sys.exit(f"cargo built no program for the tests of {name}")
        found[name] = paths[-1]
    return found


def ignored(program):
    """The names of a program's ignored tests."""
    done = subprocess.run([program, "--list", "--ignored", "--format", "terse"], check=True, capture_output=True, text=True)
    names = [line.removesuffix(": test") for line in done.stdout.splitlines() if line.endswith(": test")]
    return [name for name in names if name.rsplit("::", 1)[-1] not in NOT_TESTS]


def checks_of(programs):
    """All checks, those that take longest first."""
    # New data in every run; the name says how to repeat them.
    device = [f"{words} seed={random.randrange(1_000_000)}" for words in DEVICE]
    checks = [Check(f"device {words}", [programs["device"], *words.split()]) for words in device]
    for program in ("e2e", "rank_cuda", "session_cuda"):
        for test in ignored(programs[program]):
            if program == "e2e" and test.rsplit("::", 1)[0] not in MODULES:
                continue
            flags = ["--ignored", "--exact", "--nocapture", "--test-threads", "1"]
            checks.append(Check(test, [programs[program], test, *flags]))
            if test in COPIED_TOO:
                checks.append(Check(f"{test}, copied", [programs[program], test, *flags], COPIED))
    order = lambda check: next((at for at, name in enumerate(FIRST) if name in check.name), len(FIRST))
    return sorted(checks, key=order)


def run(check, limit, log):
    """Runs a check for at most `limit` seconds and ends the processes that it leaves behind."""
    start = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            check.command,
            env={**os.environ, **check.environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            check.outcome = PASSED if process.wait(limit) == 0 else FAILED
        except subprocess.TimeoutExpired:
            check.outcome = CUT_OFF
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    # libtest succeeds when no test has the name.
    if check.outcome == PASSED and "--exact" in check.command and b"1 passed" not in log.read_bytes():
        check.outcome = FAILED
    check.seconds = time.monotonic() - start


def telling(log):
    """The lines of a test's output from a panic on, or the last ones."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    panic = next((at for at, line in enumerate(lines) if " panicked at " in line), None)
    return lines[-5:] if panic is None else lines[panic : panic + 5]


def gpus():
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", metavar="FILTER")
    parser.add_argument("--lanes", type=int, default=3, help="number of tests that run at once [default: 3]")
    parser.add_argument("--limit", type=float, default=240, help="time limit of a test in seconds [default: 240]")
    parser.add_argument("--budget", type=float, default=float("inf"), help="time limit of all tests in seconds")
    parser.add_argument("--programs", type=pathlib.Path, help="a folder with the programs, built before")
    parser.add_argument("--logs", type=pathlib.Path, help="a folder for the output of each test [default: a new one]")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    args = parser.parse_args()
    if args.programs:
        programs = {name: str((args.programs / name).resolve()) for name in BUILDS}
    else:
        programs = build(BUILDS)
    checks = checks_of(programs)
    checks = [c for c in checks if not args.filters or any(text in c.name for text in args.filters)]
    if not checks:
        sys.exit(f"no test has a name with {' or '.join(args.filters)}")
    if args.list:
        print("\n".join(check.name for check in checks))
        return
    present = gpus()
    if present == 0:
        sys.exit("nvidia-smi finds no GPU here")
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="gpu-checks-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(checks)} tests, {args.lanes} at a time, on {present} GPUs; logs in {logs}", flush=True)
    end = time.monotonic() + args.budget
    printing = threading.Lock()

    def one(check):
        left = end - time.monotonic()
        log = logs / ("".join(c if c.isalnum() else "_" for c in check.name) + ".log")
        if present < 2 and any(text in check.name for text in NEED_TWO):
            check.outcome = SKIPPED
        elif left > 0:
            run(check, min(args.limit, left), log)
        with printing:
            print(f"{check.outcome:9} {check.seconds:6.1f} s  {check.name}", flush=True)
            if check.outcome in (FAILED, CUT_OFF):
                print("".join(f"    | {line[:200]}\n" for line in telling(log)), end="", flush=True)

    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.lanes) as lanes:
        list(lanes.map(one, checks))
    counts = {outcome: sum(c.outcome == outcome for c in checks) for outcome in (PASSED, FAILED, CUT_OFF, NOT_BEGUN, SKIPPED)}
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n) + f" in {time.monotonic() - start:.0f} s")
    sys.exit(any(counts[outcome] for outcome in (FAILED, CUT_OFF, NOT_BEGUN)))


if __name__ == "__main__":
    main()
