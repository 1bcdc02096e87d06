#!/usr/bin/env python3
"""Compares steps on CPU ranks with the same MoE layer in ggml, the library that llama.cpp computes with, interleaved.

See README.md beside this file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr}{done.stdout}")
    return done.stdout


def ours(args, model, tokens):
    """Seconds of the steps of a model, by number of tokens, ascending."""
    with tempfile.NamedTemporaryFile() as report:
        command = [args.expertd, "bench", "--model", model, "--device", "cpu", "--cores", args.cores]
        command += ["--tokens", ",".join(map(str, tokens)), "--steps", str(args.steps), "--warmup", "3"]
        run(command + ["--log", "warn", "--json", report.name])
        return {size["tokens"]: size["step_seconds"] for size in json.loads(Path(report.name).read_text())["sizes"]}


def peer(args, name, tokens):
    """What llama_layer reports for a format, by number of tokens."""
    command = [args.llama_layer, name, str(len(os.sched_getaffinity(0))), str(args.seconds), *map(str, tokens)]
    return {report["tokens"]: report for report in map(json.loads, run(command).splitlines())}


def pair(text):
    """Parses `MODEL=FORMAT`."""
    model, _, name = text.rpartition("=")
    return model, name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "pairs", nargs="+", type=pair, metavar="MODEL=FORMAT", help="a checkpoint and the peer's format, e.g. int4=q4_0"
    )
    parser.add_argument("--llama-layer", required=True, help="the compiled cpu/llama_layer.c")
    parser.add_argument("--expertd", default=str(ROOT / "target/release/expertd"))
    parser.add_argument("--cores", default="0,1", help="cores of both sides; the peer has as many threads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="our steps per round and number of tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="the peer's time per round and number of tokens")
    args = parser.parse_args()
    os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    print("ms per layer: median over rounds of each round's median, and the least of all steps")
    print(f"{'ours':>12} {'peer':>8} {'tokens':>6}  {'ours':>15}  {'peer':>15}  peer / ours  peer's error  load")
    for model, name in args.pairs:
        steps, reports, loads = [], [], []
        for _ in range(args.rounds):
            steps.append(ours(args, model, args.tokens))
            reports.append(peer(args, name, args.tokens))
            loads.append(os.getloadavg()[0])
        for tokens in args.tokens:
            mine = statistics.median(statistics.median(round[tokens]) for round in steps)
            theirs = statistics.median(round[tokens]["median_seconds"] for round in reports)
            least = min(min(round[tokens]) for round in steps)
            least_peer = min(round[tokens]["least_seconds"] for round in reports)
            error = max(round[tokens]["error"] for round in reports)
            print(
                f"{Path(model).name:>12} {name:>8} {tokens:>6}  {mine * 1e3:7.2f} {least * 1e3:7.2f}  "
                f"{theirs * 1e3:7.2f} {least_peer * 1e3:7.2f}  {theirs / mine:5.2f} {least_peer / least:5.2f}  "
                f"{error:12.1e}  {max(loads):4.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
