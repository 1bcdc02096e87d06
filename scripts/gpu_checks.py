#!/usr/bin/env python3
"""Runs every test that needs GPUs, a few at a time, each with a time limit, and prints what passed.

    scripts/gpu_checks.py [--ranks LIST] [--one-gpu] [--mps] [--portable] [--soak N] [--chaos SECONDS] [--lanes N] [--limit SECONDS]
                          [--budget SECONDS] [--logs FOLDER] [--resume] [--list] [FILTER...]

Builds the programs with `cargo --release --features cuda` unless --programs names a folder that holds them: `e2e`, `device`,
`rank_cuda` and `session_cuda` (the tests of those names and of expertd-rank-cuda, built on another machine with nvcc). They look for
fixtures at the path of the checkout they were built in; EXPERTD_BINARY names expertd. FILTERs choose tests whose names contain one of them.

Tests of services run once for each number of ranks in --ranks. If that is larger than the number of GPUs, the ranks share them, which
needs NCCL 2.30 or newer (EXPERTD_NCCL); the default on one GPU is then `1,4`. Ranks that share a GPU take turns. With --mps they run side
by side instead, and tests that kill or stop ranks are left out, because the end of an MPS client can take the others along;
use two ranks, as more can block one another (docs/gpu.md). With --portable everything runs the portable kernels, as it does on cards other
than Hopper; tests of what those do not have (products of FP8) are left out. With --one-gpu, and where the GPUs cannot form a group, each test uses one GPU, and --lanes
tests run on each.

A test spends most of its time starting services, so several run at once. Tests that need more GPUs than there are count as
skipped; a test that was cut off or not begun counts as failed. With --resume, tests that passed before with the same --logs are left
out. The environment (EXPERTD_NCCL, LD_LIBRARY_PATH) is passed on.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import random
import re
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
# The kernels without a service.
SAME_BITS = "same_bits"
DEVICE = [SAME_BITS, "gate", "experts", "full", "wide", "skew", "rows", "word", "loopback", "fp8_rows", "faults", "beyond", "staging"]
# Modules of `e2e` whose ignored tests need GPUs. `victim` is a process of another test.
MODULES = ["fp8", "gpu", "gpu_placement", "reload", "tiers_copies", "tiers_copies::divided", "tiers_gpu"]
MODULES += [f"sessions::{name}" for name in ("gpu", "cuda_gpu", "cuda_routing", "other_checkpoints", "tiers")]
# Modules whose services have one GPU rank, whatever number of ranks others have.
ONE_GPU_RANK = ["tiers_copies", "tiers_copies::divided", "tiers_gpu", "sessions::tiers"]
SOAK, REPLAYED = "soak_gpu", "replayed_calls_stay_right"
NOT_TESTS = ["victim", "stand_in"]
# Tests that fail with fewer than two ranks, and those that fail with fewer than two GPUs.
NEED_TWO_RANKS = ["gpu_placement::", "chaos_on_gpus"]
NEED_TWO = ["a_gpu_that_the_service_does_not_see"]
# What else only several GPUs can show.
ELSEWHERE = {
    "peers over NVLink": "scripts/gpu_checks.py, on two and on four GPUs",
    "a client on a GPU without a rank": "loadtest/session_figures.py --client-gpu 1",
    "times of several GPUs": "loadtest/peers/gpu_compare.py --ranks 4, and the tables of docs/performance.md",
}
# Tests that kill or stop ranks or clients.
KILLS = ["killed", "chaos", "outlives", "scribbles", "kills", "stop_within", "overtakes"]
# Tests of what the portable kernels do not have.
NOT_PORTABLE = ["fp8::"]
# The shared memory of a block on the smallest cards that the portable kernels support.
SMALLEST = {"EXPERTD_CUDA_SHARED_BYTES": str(99 * 1024)}
# These tests take longest (about a minute each on two busy GPUs) and begin first.
FIRST = [SOAK, "chaos", REPLAYED, "kills", "every_family", "quantised", "repacked", "device experts", "device wide"]
# These tests go through many checkpoints, and are split into as many processes.
PARTS = {
    "other_checkpoints::": 16,
    "recorded_answers_of_every_family": 4,
    "recorded_answers_of_quantised": 4,
    "answers_of_every_family": 4,
    "repacked": 2,
}
# Tests that also run with rows that copy engines move into poisoned memory, in steps launched kernel by kernel. The rows of other recorded
# answers are padded, and those of small sizes are not cut: `sessions::gpu::steps_in_parts_give_the_same_bits` has larger ones.
COPIED_TOO = ["gpu::recorded_answers_of_rows_without_padding", "gpu::recorded_answers_of_repacked_checkpoints"]
COPIED = {"EXPERTD_CUDA_POISON": "50"}
# With ranks that share a GPU: calls in replayed graphs, unless --soak says otherwise, and seconds of random faults without --chaos.
SHARED_CALLS, SHARED_CHAOS = "2000", 60
PASSED, FAILED, CUT_OFF, SKIPPED, NOT_BEGUN = "passed", "FAILED", "CUT OFF", "skipped", "NOT BEGUN"


@dataclass
class Check:
    """A test in a process of its own."""

    name: str
    command: list
    environment: dict = field(default_factory=dict)
    ranks: int = 1
    shared: bool = False
    alone: bool = False
    outcome: str = NOT_BEGUN
    seconds: float = 0.0

    def key(self):
        """The name without the seed, which differs from run to run."""
        return re.sub(" seed=[0-9]+", "", self.name)


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


def of_services(program, test, ranks, gpus, args):
    """The checks of a test of services with this number of ranks."""
    shared = ranks > gpus
    environment = {}
    if args.soak:
        environment |= {"EXPERTD_SOAK_STEPS": str(args.soak), "EXPERTD_SOAK_CALLS": str(args.soak)}
    elif shared:
        environment["EXPERTD_SOAK_CALLS"] = SHARED_CALLS
    if args.chaos or shared:
        environment["EXPERTD_CHAOS_SECONDS"] = str(args.chaos or SHARED_CHAOS)
    if shared:
        environment["EXPERTD_TEST_GPUS"] = ",".join(str(rank % gpus) for rank in range(ranks))
    name = f"{test}, {ranks} ranks share {gpus} GPU" if shared else test
    command = [program, test, "--ignored", "--exact", "--nocapture", "--test-threads", "1"]
    # Rates are those of one test.
    alone = bool(args.soak) and (test.startswith(SOAK) or test.endswith(REPLAYED))
    parts = next((parts for text, parts in PARTS.items() if text in test), 1)
    for number in range(parts):
        part = {"EXPERTD_TEST_PART": f"{number + 1}/{parts}"} if parts > 1 else {}
        named = f"{name}, part {number + 1} of {parts}" if part else name
        yield Check(named, command, environment | part, ranks, shared, alone)
        if test in COPIED_TOO:
            yield Check(f"{named}, copied", command, environment | part | COPIED, ranks, shared)


def checks_of(programs, gpus, all_ranks, args):
    """All checks, those that take longest first."""
    # New data in every run; the name says how to repeat them.
    kernels = DEVICE + [f"peers ranks={ranks} share=1 timing=0" for ranks in all_ranks if ranks > 1]
    kernels = [f"{words} seed={random.randrange(1_000_000)}" for words in kernels]
    checks = []
    for words in kernels:
        check = Check(f"device {words}", [programs["device"], *words.split()])
        check.shared = words.startswith("peers") and max(all_ranks) > gpus
        checks.append(check)
        if words.startswith(SAME_BITS):
            checks.append(Check(f"{check.name}, least shared memory", check.command, SMALLEST))
    for program in ("rank_cuda", "session_cuda"):
        for test in ignored(programs[program]):
            command = [programs[program], test, "--ignored", "--exact", "--nocapture", "--test-threads", "1"]
            checks.append(Check(test, command))
    modules = MODULES + [SOAK] * bool(args.soak)
    for test in ignored(programs["e2e"]):
        if test.rsplit("::", 1)[0] in modules:
            one = test.rsplit("::", 1)[0] in ONE_GPU_RANK
            for ranks in [1] if one else all_ranks:
                checks += of_services(programs["e2e"], test, ranks, max(gpus, 1), args)
    order = lambda check: next((at for at, name in enumerate(FIRST) if name in check.name), len(FIRST))
    return sorted(checks, key=order)


def run(check, environment, limit, log):
    """Runs a check for at most `limit` seconds and ends the processes that it leaves behind."""
    start = time.monotonic()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            check.command,
            env={**os.environ, **environment, **check.environment},
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


def present_gpus():
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def inventory():
    """What expertd says of this machine's GPUs and its NCCL."""
    program = os.environ.get("EXPERTD_BINARY", ROOT / "target/release/expertd")
    # The order in which the service numbers GPUs.
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}
    try:
        done = subprocess.run([program, "inventory"], capture_output=True, text=True, timeout=60, env=environment)
        if done.returncode:
            sys.exit(f"`{program} inventory` fails: {done.stderr.strip()}")
        found = json.loads(done.stdout)
        return found["gpus"], found["peers"], found["nccl"]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        sys.exit(f"`{program} inventory` fails: {error}")


def is_portable(cards):
    """Whether tests run the portable kernels: because the environment says so, or because of a card."""
    return os.environ.get("EXPERTD_GPU_PATH") == "portable" or any(card["capability"] != [9, 0] for card in cards)


def are_a_group(cards, peers):
    """Whether ranks on all of these cards can form one group."""
    return all(map(all, peers)) and len({(tuple(card["capability"]), card["multiprocessors"]) for card in cards}) < 2


def can_share(nccl):
    """Whether ranks can share a GPU here, and why not."""
    if "Err" in nccl:
        return False, nccl["Err"]
    version = tuple(nccl["Ok"]["version"])
    return version >= (2, 30), f"NCCL is {'.'.join(map(str, version))}, needed: 2.30 or newer (EXPERTD_NCCL)"


def numbers_of_ranks(text, gpus, nccl):
    """The numbers of ranks of --ranks, or those that show most on this machine."""
    if text:
        return sorted({int(number) for number in text.split(",")})
    if gpus > 1:
        return [min(gpus, 4)]
    shares, why = can_share(nccl)
    if not shares:
        print(f"tests run with one rank, because ranks cannot share a GPU here: {why}")
    return [1, 4] if shares else [1]


@contextlib.contextmanager
def mps(percentage):
    """The environment of clients of an MPS server that grants each this percentage of the multiprocessors."""
    control = "nvidia-cuda-mps-control"
    if shutil.which(control) is None:
        sys.exit(f"{control} is not installed")
    with tempfile.TemporaryDirectory(prefix="gpu-checks-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            os.mkdir(place)
        # The server takes all GPUs: those that it is restricted to have other numbers for its clients.
        all_gpus = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        subprocess.run([control, "-d"], env={**all_gpus, **places}, check=True)
        try:
            yield {**places, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}
        finally:
            subprocess.run([control], env={**os.environ, **places}, input="quit\n", text=True, timeout=30)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters", nargs="*", metavar="FILTER")
    parser.add_argument("--ranks", help="numbers of ranks, such as 1,2,4 [default: see above]")
    parser.add_argument("--one-gpu", action="store_true", help="let each test use one GPU, and spread the tests over all GPUs")
    parser.add_argument("--mps", action="store_true", help="start an MPS server, whose clients the tests' processes are")
    parser.add_argument("--portable", action="store_true", help="run the portable kernels, also on Hopper")
    parser.add_argument("--soak", type=int, help="also run this many steps, and as many calls of a CUDA session")
    parser.add_argument("--chaos", type=int, help="duration of the random faults in seconds [default: 10]")
    parser.add_argument("--lanes", type=int, default=3, help="number of tests that run at once [default: 3]")
    parser.add_argument("--limit", type=float, default=240, help="time limit of a test in seconds, half of that of ranks that share a GPU [default: 240]")
    parser.add_argument("--budget", type=float, default=float("inf"), help="time limit of all tests in seconds")
    parser.add_argument("--programs", type=pathlib.Path, help="a folder with the programs, built before")
    parser.add_argument("--logs", type=pathlib.Path, help="a folder for the output of each test [default: a new one]")
    parser.add_argument("--resume", action="store_true", help="leave out tests that passed before with the same --logs")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    args = parser.parse_args()
    if args.resume and not args.logs:
        parser.error("--resume needs --logs")
    if args.programs:
        programs = {name: str((args.programs / name).resolve()) for name in BUILDS}
    else:
        programs = build(BUILDS)
    present = present_gpus()
    cards, peers, nccl = inventory() if present else ([], [], {"Err": "no GPU"})
    if not args.one_gpu and not are_a_group(cards, peers):
        print("each test uses one GPU, because ranks on these GPUs cannot form a group (`expertd doctor`)")
        args.one_gpu = True
    gpus = min(present, 1) if args.one_gpu else present
    all_ranks = numbers_of_ranks(args.ranks, gpus, nccl)
    checks = checks_of(programs, gpus, all_ranks, args)
    checks = [c for c in checks if not args.filters or any(text in c.name for text in args.filters)]
    lacks_ranks = lambda check: check.ranks < 2 and any(text in check.name for text in NEED_TWO_RANKS)
    if max(all_ranks) > 1:
        checks = [c for c in checks if not lacks_ranks(c)]
    if args.mps:
        checks = [c for c in checks if not any(text in c.name for text in KILLS)]
    if args.portable or is_portable(cards):
        os.environ["EXPERTD_GPU_PATH"] = "portable"
        checks = [c for c in checks if not any(text in c.name for text in NOT_PORTABLE)]
    if not checks:
        sys.exit(f"no test has a name with {' or '.join(args.filters)}")
    if args.resume and (args.logs / PASSED).exists():
        before = (args.logs / PASSED).read_text().splitlines()
        checks = [c for c in checks if c.key() not in before]
    if args.list:
        print("\n".join(check.name for check in checks))
        return
    if gpus == 0:
        sys.exit("nvidia-smi finds no GPU here")
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="gpu-checks-"))
    logs.mkdir(parents=True, exist_ok=True)
    # GPUs for the environment of a test: each of them `lanes` times, or all of them.
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(present)))).split(",")
    free = queue.SimpleQueue()
    for name in names * args.lanes if args.one_gpu else [",".join(names)] * args.lanes:
        free.put(name)
    lanes = free.qsize()
    print(f"{len(checks)} tests, {lanes} at a time, on {present} GPUs; logs in {logs}", flush=True)
    end = time.monotonic() + args.budget
    printing = threading.Lock()

    def one(check, environment):
        left = end - time.monotonic()
        log = logs / ("".join(c if c.isalnum() else "_" for c in check.name) + ".log")
        if lacks_ranks(check) or (gpus < 2 and any(text in check.name for text in NEED_TWO)):
            check.outcome = SKIPPED
        elif left > 0:
            visible = free.get()
            try:
                limit = min(args.limit * (2 if check.shared else 1), left)
                run(check, environment | {"CUDA_VISIBLE_DEVICES": visible}, limit, log)
            finally:
                free.put(visible)
        with printing:
            print(f"{check.outcome:9} {check.seconds:6.1f} s  {check.name}", flush=True)
            if check.outcome == PASSED:
                with open(logs / PASSED, "a") as file:
                    print(check.key(), file=file)
            if check.outcome in (FAILED, CUT_OFF):
                print("".join(f"    | {line[:200]}\n" for line in telling(log)), end="", flush=True)

    start = time.monotonic()
    with mps(100 // max(all_ranks)) if args.mps else contextlib.nullcontext({}) as environment:
        # Kernels of ranks that share a GPU wait for one another and would take the time of the other tests.
        for shared, alone in ((False, False), (True, False), (False, True), (True, True)):
            chosen = [check for check in checks if (check.shared, check.alone) == (shared, alone)]
            with concurrent.futures.ThreadPoolExecutor(1 if alone else lanes) as threads:
                list(threads.map(lambda check: one(check, environment), chosen))
    counts = {outcome: sum(c.outcome == outcome for c in checks) for outcome in (PASSED, FAILED, CUT_OFF, NOT_BEGUN, SKIPPED)}
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n) + f" in {time.monotonic() - start:.0f} s")
    if gpus < 2 and not args.filters:
        print("only several GPUs can show:")
        print("".join(f"  {what}: {command}\n" for what, command in ELSEWHERE.items()), end="")
    sys.exit(any(counts[outcome] for outcome in (FAILED, CUT_OFF, NOT_BEGUN)))


if __name__ == "__main__":
    main()
