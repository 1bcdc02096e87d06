#!/usr/bin/env python3
"""PyTorch's CPU products of cold weights [2048, 2048]: bf16 (`torch.mm`) and INT4 (`_weight_int4pack_mm_for_cpu`).

On one thread, in turn, as scripts/peers/cpu-formats measures this project's kernels: µs of thread CPU time per matrix,
the median and the 10th percentile. PyTorch's INT4 takes bf16 rows, bf16 scales and bf16 zero points in groups of 32 to 256.

    python3 scripts/peers/torch_int4_cpu.py [ROWS ...]
"""

import sys
import time

import torch

N = K = 2048
BYTES = 160 << 20
ROUNDS = 12


def int4(group):
    codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.full((K // group, N, 2), 0.01, dtype=torch.bfloat16)
    return packed, scales


def timed(call):
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e6


def main():
    torch.set_num_threads(1)
    wide = [torch.randn(N, K, dtype=torch.bfloat16).t() for _ in range(BYTES // (N * K * 2))]
    narrow = {}
    for group in (32, 128):
        first = int4(group)
        size = sum(part.nbytes for part in first)
        narrow[group] = [tuple(part.clone() for part in first) for _ in range(BYTES // size)]
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, [m, {K}] x [{N}, {K}], one thread")
    print("| m | format | median | 10th percentile | bf16's 10th percentile / this |\n|---|---|---|---|---|")
    for m in [int(word) for word in sys.argv[1:]] or [1, 8, 64, 512]:
        x = torch.randn(m, K, dtype=torch.bfloat16)
        cases = {"bf16": lambda i: torch.mm(x, wide[i % len(wide)])}
        for group, weights in narrow.items():
            cases[f"INT4, groups of {group}"] = lambda i, g=group, w=weights: (
                torch.ops.aten._weight_int4pack_mm_for_cpu(x, w[i % len(w)][0], g, w[i % len(w)][1])
            )
        times = {name: [] for name in cases}
        calls = max(1, min(16, 64 // m))
        for turn in range(ROUNDS):
            for name, call in cases.items():
                for i in range(turn * calls, (turn + 1) * calls):
                    times[name].append(timed(lambda i=i, call=call: call(i)))
        tenth = {name: sorted(values)[len(values) // 10] for name, values in times.items()}
        for name, values in times.items():
            median = sorted(values)[len(values) // 2]
            print(f"| {m} | {name} | {median:.0f} | {tenth[name]:.0f} | {tenth['bf16'] / tenth[name]:.2f} |")


if __name__ == "__main__":
    main()
