#!/usr/bin/env python3
"""Runs the kernels under compute-sanitizer, at small sizes and with long deadlines, and prints what each tool reports.

    scripts/gpu_sanitizers.py [--portable] [--lanes N] [--limit SECONDS] [--budget SECONDS] [--programs FOLDER] [--logs FOLDER] [--list]
                              [FILTER...]

Builds the programs `device` (kernels/tests/device) and `rank_cuda` (the tests of expertd-rank-cuda) with EXPERTD_EVERY_LANE_ARRIVES,
without which racecheck reports each hand-over by one lane's arrival at an mbarrier after `__syncwarp`, which it does not follow;
--programs names a folder with such programs, built on another machine. With --portable the portable kernels run, which
have no products of FP8. FILTERs choose runs whose names contain one of them, such as `racecheck` or `experts mxfp4`.
docs/measurements/gpu-checks.md says what the last runs found.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# How cargo builds each program.
BUILDS = {
    "device": ["--package", "expertd-kernels", "--test", "device"],
    "rank_cuda": ["--package", "expertd-rank-cuda", "--lib"],
}
PACKING = "experts::pack_tests::packing_on_the_host_gives_the_bytes_of_the_kernels"
EVERY_LANE = "-DEXPERTD_EVERY_LANE_ARRIVES"
# What runs, by name: arguments of `device`, or a test of `rank_cuda`. Deadlines are those of waits on the device, which tools lengthen a hundredfold.
FORMATS = ("bf16", "fp8", "mxfp4", "w8a8", "int4", "int4_zeros", "nvfp4", "mxfp8", "w4a8")
SUBJECTS = {
    "gate of few rows, clusters": "gate cases=3 tokens=33 hidden=512 experts=256",
    "gate of many rows": "gate cases=2 tokens=300 hidden=512 experts=128",
    # The persistent kernel with every tile shape of the format, and the kernel for few rows.
    **{f"experts {name}": f"rows format={code}" for code, name in enumerate(FORMATS)},
    "exchange of 2 ranks": "loopback cases=3 steps=2 ranks=2 tokens=40 deadline=300",
    "exchange of 4 ranks": "loopback cases=4 steps=2 ranks=4 tokens=40 deadline=300 seed=3",
    "dispatch of a rank alone with FP8 rows": "fp8_rows cases=2",
    # copy_in in clusters for a rank alone, dispatch, combine, copy_out.
    "step": "staging cases=4 deadline=300",
    "packing": f"{PACKING} --ignored --exact --nocapture",
}
OF_RANK_CUDA = ["packing"]
NOT_PORTABLE = ["experts w8a8", "experts w4a8", "dispatch of a rank alone with FP8 rows"]
# More than all blocks of a launch have.
BARRIERS = "32768"
TOOLS = {
    "memcheck": ["--tool", "memcheck"],
    "racecheck": ["--tool", "racecheck", "--num-cuda-barriers", BARRIERS],
    "synccheck": ["--tool", "synccheck", "--num-cuda-barriers", BARRIERS],
    "initcheck": ["--tool", "initcheck"],
}
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (.*)")


def build():
    """Builds the programs for the tools; returns their paths."""
    target = ROOT / "target/sanitizers"
    environment = {**os.environ, "EXPERTD_NVCC_FLAGS": EVERY_LANE, "CARGO_TARGET_DIR": str(target)}
    found = {}
    for name, arguments in BUILDS.items():
        command = ["cargo", "test", "--release", "--locked", "--features", "cuda", "--no-run", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        path = re.search(r"\((\S*/deps/\w+-[0-9a-f]+)\)", done.stderr)
        if done.returncode or path is None:
            sys.exit(f"cargo cannot build `{name}`:\n{done.stderr[-2000:]}")
        found[name] = ROOT / path[1]
    return found


def command_of(programs, tool, subject):
    program = programs["rank_cuda" if subject in OF_RANK_CUDA else "device"]
    return ["compute-sanitizer", *TOOLS[tool], "--print-limit", "5", str(program), *SUBJECTS[subject].split()]


def run(command, limit, log):
    """Runs a program under a tool; returns what the tool reports, and whether that is nothing."""
    with open(log, "wb") as out:
        try:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return False, "CUT OFF"
    text = log.read_text(errors="replace")
    summaries = [found[2] for found in SUMMARY.finditer(text)]
    if not summaries:
        return False, "; ".join(text.splitlines()[-2:]) or f"status {status}"
    # libtest succeeds when no test has the name.
    if "--exact" in command and "1 passed" not in text:
        return False, f"the test did not pass; {summaries[-1]}"
    counts = [int(number) for number in re.findall(r"\d+", summaries[-1])]
    return status == 0 and not any(counts), summaries[-1] + ("" if status == 0 else f", exit status {status}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", metavar="FILTER")
    parser.add_argument("--portable", action="store_true", help="run the portable kernels")
    parser.add_argument("--lanes", type=int, default=4, help="number of runs at a time [default: 4]")
    parser.add_argument("--limit", type=float, default=600, help="time limit of a run in seconds [default: 600]")
    parser.add_argument("--budget", type=float, default=float("inf"), help="time limit of all runs in seconds")
    parser.add_argument("--programs", type=pathlib.Path, help="a folder with the programs, built before")
    parser.add_argument("--logs", type=pathlib.Path, help="a folder for the reports [default: a new one]")
    parser.add_argument("--list", action="store_true", help="print the commands and exit")
    args = parser.parse_args()
    runs = [(tool, subject) for tool in TOOLS for subject in SUBJECTS]
    runs = [(t, s) for t, s in runs if not args.filters or any(text in f"{t} {s}" for text in args.filters)]
    if args.portable:
        os.environ["EXPERTD_GPU_PATH"] = "portable"
        runs = [(tool, subject) for tool, subject in runs if subject not in NOT_PORTABLE]
    if args.list:
        for tool, subject in runs:
            print(f"{tool} {subject}: {' '.join(command_of({name: name for name in BUILDS}, tool, subject))}")
        return
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    programs = {name: args.programs.resolve() / name for name in BUILDS} if args.programs else build()
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="gpu-sanitizers-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(runs)} runs, {args.lanes} at a time; reports in {logs}", flush=True)
    end = time.monotonic() + args.budget

    def one(pair):
        tool, subject = pair
        log = logs / f"{tool}-{re.sub('[^a-z0-9]+', '-', subject)}.log"
        start = time.monotonic()
        left = end - start
        good, report = run(command_of(programs, tool, subject), min(args.limit, left), log) if left > 0 else (False, "NOT BEGUN")
        print(f"{'clean' if good else 'FOUND':5} {time.monotonic() - start:6.1f} s  {tool} {subject}: {report}", flush=True)
        return good

    with concurrent.futures.ThreadPoolExecutor(args.lanes) as lanes:
        good = list(lanes.map(one, runs))
    print(f"{sum(good)} of {len(good)} runs are clean")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
