#!/usr/bin/env python3
"""Compares a running expertd service on CPU ranks with the Hugging Face block of the same dimensions, interleaved.

See README.md beside this file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOALS = {1: 1.2, 8: 1.5, 64: 1.5, 512: 1.3}


def cores(text):
    """Parses a list of cores such as `0,2-4` into a set."""
    found = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def blocks(config, names, threads):
    """The family's block in each variant, by name, e.g. `bf16 grouped_mm`."""
    import torch
    from transformers import AutoConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    families = {
        "mixtral": MixtralSparseMoeBlock,
        "olmoe": OlmoeSparseMoeBlock,
        "qwen2_moe": Qwen2MoeSparseMoeBlock,
        "qwen3_moe": Qwen3MoeSparseMoeBlock,
    }
    torch.set_num_threads(threads)
    config = AutoConfig.from_pretrained(config)
    if config.model_type not in families:
        sys.exit(f"no block for model_type {config.model_type}; supported are {', '.join(families)}")
    made = {}
    for name in names:
        dtype, implementation = name.split()
        config._experts_implementation = implementation
        with torch.device("meta"):
            block = families[config.model_type](config)
        block = block.to(dict(bf16=torch.bfloat16, f32=torch.float32)[dtype]).to_empty(device="cpu")
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        made[name] = block.eval()
    return made, config.hidden_size


def torch_round(block, hidden, tokens, seconds):
    """Median seconds of a call over fresh random rows."""
    import torch

    dtype = next(block.parameters()).dtype
    times = []
    with torch.inference_mode():
        block(torch.randn(1, tokens, hidden).to(dtype))  # warm-up
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            rows = torch.randn(1, tokens, hidden).to(dtype)
            start = time.perf_counter()
            block(rows)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def service_round(args, tokens):
    """Median seconds of a gRPC call, with one outstanding, and of its step."""
    command = [args.loadtest, "--address", args.address, "--tokens", str(tokens), "--dtype", args.dtype]
    command += ["--warm-up", "0.5", "--duration", str(args.seconds), "--no-echo", "--quiet", "--check", "0"]
    done = subprocess.run(command + ["--json", "-"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr}{done.stdout}")
    report = json.loads(done.stdout)
    return report["latency"]["p50_seconds"], report["step"]["p50_seconds"]


def spread(values):
    middle = statistics.median(values)
    return f"{middle:9.1f} (±{(max(values) - min(values)) / 2 / middle:4.0%})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051", help="the running service")
    parser.add_argument("--model", required=True, help="directory of the served checkpoint (config.json is read)")
    parser.add_argument("--cores", type=cores, help="cores of client and PyTorch; serve with the same [default: all]")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--dtype", default="bf16", help="element type of the rows on the wire")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement")
    peers = ["bf16 eager", "bf16 grouped_mm", "f32 eager", "f32 grouped_mm"]
    parser.add_argument("--peers", nargs="+", default=peers, help=f"peers to compare with, of {peers}")
    parser.add_argument("--loadtest", default=str(ROOT / "target/release/expertd-loadtest"))
    parser.add_argument("--json", type=Path, help="write all rounds to this file")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, args.cores)
    allowed = os.sched_getaffinity(0)
    print(f"cores {sorted(allowed)}; {args.rounds} rounds of {args.seconds} s each; rows {args.dtype}")
    made, hidden = blocks(args.model, args.peers, len(allowed))
    rates = {}  # (tokens, side) -> tokens/s by round
    for round in range(args.rounds):
        for tokens in args.tokens:
            latency, step = service_round(args, tokens)
            rates.setdefault((tokens, "service"), []).append(tokens / latency)
            rates.setdefault((tokens, "step alone"), []).append(tokens / step)
            for name, block in made.items():
                seconds = torch_round(block, hidden, tokens, args.seconds / len(made))
                rates.setdefault((tokens, name), []).append(tokens / seconds)
            print(f"round {round + 1}, {tokens} tokens: done", file=sys.stderr)
    print(f"{'tokens':>6}  {'service tok/s':>17}  {'best peer tok/s':>17}  {'ratio':>6}  {'goal':>5}  peer; others")
    for tokens in args.tokens:
        middle = {name: statistics.median(rates[tokens, name]) for name in made}
        best = max(middle, key=middle.get)
        ratio = statistics.median(rates[tokens, "service"]) / middle[best]
        others = ", ".join(f"{name} {rate:.1f}" for name, rate in middle.items() if name != best)
        goal = GOALS.get(tokens)
        print(
            f"{tokens:6}  {spread(rates[tokens, 'service'])}  {spread(rates[tokens, best])}  {ratio:6.2f}  "
            f"{goal or '-':>5}  {best}; {others}"
        )
    if args.json:
        rows = [dict(tokens=tokens, side=side, tokens_per_second=all) for (tokens, side), all in rates.items()]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
