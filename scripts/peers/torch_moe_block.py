#!/usr/bin/env python3
"""Times the Hugging Face OLMoE block (H2048 I1024 E64 k8) on the CPU, for comparison with expertd's CPU ranks.

Weights are random; every call gets new random tokens. The weights exceed the caches, so they are cold in calls that use only
some of them. Prints the least and the median time per call, in milliseconds.

    pip install torch transformers
    taskset -c 0,1 scripts/peers/torch_moe_block.py --threads 2
"""

import argparse
import json
import time

import torch
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock


def block(implementation: str, dtype: torch.dtype, args: argparse.Namespace) -> torch.nn.Module:
    config = OlmoeConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.k,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = OlmoeSparseMoeBlock(config)
    module = module.to(dtype).to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--implementations", nargs="+", default=["eager", "grouped_mm"])
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure the process's CPU time instead of elapsed time, for one thread on a shared machine",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    torch.manual_seed(time.time_ns())
    with torch.inference_mode():
        for dtype in args.dtypes:
            for implementation in args.implementations:
                module = block(implementation, getattr(torch, dtype), args)
                for tokens in args.tokens:
                    times = []
                    end = None
                    while end is None or time.perf_counter() < end or len(times) < 3:
                        x = torch.randn(1, tokens, args.hidden).to(getattr(torch, dtype))
                        start = clock()
                        module(x)
                        if end is None:  # the first call warms up
                            end = time.perf_counter() + args.seconds
                        else:
                            times.append(1e3 * (clock() - start))
                    times.sort()
                    least, median = times[0], times[len(times) // 2]
                    if args.json:
                        row = dict(dtype=dtype, implementation=implementation, tokens=tokens)
                        print(json.dumps(row | dict(least_ms=least, median_ms=median, calls=len(times))), flush=True)
                    else:
                        label = f"{dtype:9} {implementation:11} {tokens:5} tokens"
                        print(f"{label}  least {least:9.3f} ms  median {median:9.3f} ms  ({len(times)} calls)", flush=True)
                del module


if __name__ == "__main__":
    main()
