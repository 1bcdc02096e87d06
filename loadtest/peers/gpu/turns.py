#!/usr/bin/env python3
"""Times expertd's layer and peers on one GPU in turn: one process, one timing loop, the same layers. Prints a table.

Needs the library of loadtest/peers/layer (expertd_layer.py) and what the peers need (README.md).

turns.py [--dtype bf16|fp8|mxfp4|int4|int4_g128|nvfp4] [--shape S] [--tokens T ...] [--peers P ...] [--portable] [--before LIBRARY]
         [--json FILE]
"""

import importlib
import json
import statistics
from pathlib import Path

import torch

import expertd_layer
import layer as common

# Modules of peers and the formats that they support.
PEERS = {
    "torch": ("torch_layer", ["bf16"]),
    "triton": ("triton_layer", ["bf16", "fp8"]),
    "deepgemm": ("deepgemm_layer", ["fp8"]),
    "deepgemm_masked": ("deepgemm_masked_layer", ["fp8"]),
    "triton_kernels": ("triton_kernels_layer", ["mxfp4"]),
    "humming": ("humming_layer", ["int4", "int4_g128"]),
    "marlin": ("marlin_layer", ["int4", "int4_g128", "mxfp4"]),
    "flashinfer": ("flashinfer_cutlass_layer", ["bf16", "mxfp4"]),
}

# What one H200 reaches: bytes/s read, and operations/s of bf16 and FP8 products (docs/measurements/gpu-experts.md).
MEMORY = 4.5e12
PRODUCTS = {"bf16": 873e12, "fp8": 1330e12}
# Bytes of a weight with its scales.
WEIGHT_BYTES = {"bf16": 2, "fp8": 1, "mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 32, "int4_g128": 0.5 + 2 / 128, "nvfp4": 0.5 + 1 / 16}


def floor_us(shape, dtype, tokens):
    """The least time for even routing: that of reading the weights of experts with rows, or that of their products."""
    active = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
    weights = 3 * shape.hidden * shape.width
    read = active * weights * WEIGHT_BYTES[dtype] / MEMORY
    products = PRODUCTS.get(dtype, PRODUCTS["bf16"])  # 4-bit weights are widened to bf16
    return max(read, 2 * tokens * shape.top_k * weights / products) * 1e6


def contenders(args):
    """(name, prepare, exact) of everything that is timed, ours first."""
    found = [("expertd", expertd_layer.preparer(args.library), True)]
    if args.before:
        found.append(("before", expertd_layer.preparer(args.before, rows_by_experts=True), True))
    if args.rows_by_experts:
        found.append(("rows_by_experts", expertd_layer.preparer(args.library, rows_by_experts=True), True))
    if args.portable:
        found.append(("portable", expertd_layer.preparer(args.library, portable=True), True))
    for name in args.peers:
        module, formats = PEERS[name]
        if args.dtype in formats:
            found.append((name, importlib.import_module(module).prepare, False))
    return found


def row(tokens, names, figures, gate):
    """A line of the table."""
    cells = [f"{figures[name]['median_us']:.1f}" if name in figures and "wrong" not in figures[name] else "-" for name in names]
    peers = [figures[name]["median_us"] for name in names if name in PEERS and name in figures and "wrong" not in figures[name]]
    ours = figures.get("expertd", {}).get("median_us")
    ratio = f"{min(peers) / ours:.2f}" if peers and ours else "-"
    clocks = {name: figures[name].get("sm_mhz", "-") for name in names if name in figures}
    return f"| {tokens} | " + " | ".join(cells) + f" | {ratio} | {gate:.1f} | {' '.join(map(str, clocks.values()))} |"


def main():
    parser = common.arguments(__doc__, ["bf16", *common.STORED])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--library", type=Path, default=expertd_layer.LIBRARY, help="expertd's library")
    parser.add_argument("--before", type=Path, help="also times another build of the library, whose experts quantise rows")
    parser.add_argument("--rows-by-experts", action="store_true", help="times expertd without dispatch's quantisation, too")
    parser.add_argument("--portable", action="store_true", help="times expertd's portable kernels, too")
    args = parser.parse_args()
    world, shape = common.World(args.zipf), common.SHAPES[args.shape]
    layers = [common.Layer(world, shape, seed + 1, args.dtype) for seed in range(args.layers)]
    all_of = contenders(args)
    names = [name for name, _, _ in all_of]
    about = {"shape": args.shape, "format": args.dtype, "zipf": args.zipf, "gpu": torch.cuda.get_device_name(0)}
    run = {**about, "ranks": 1, "ours": [], "peers": {name: [] for name in names[1:]}}
    table = []
    with torch.inference_mode():
        for tokens in args.tokens:
            figures = {}
            for name, prepare, exact in all_of:
                here = common.one_size(world, name, prepare, layers, tokens, args, exact)
                if here is not None:
                    figures[name] = here
                    print(json.dumps({"peer": name, **about, **here}), flush=True)
            rows = torch.randn(args.steps, tokens, shape.hidden, device=world.device).bfloat16()
            gates = lambda: [layers[0].route(step) for step in rows]
            gate = statistics.median(common.replay_times(world, gates, rows.normal_, args.replays, args.steps)[0])
            table.append(row(tokens, names, figures, gate))
            for name, here in figures.items():
                (run["ours"] if name == "expertd" else run["peers"][name]).append(here)
            if "expertd" in figures:
                figures["expertd"]["without_copies_seconds"] = figures["expertd"]["median_us"] / 1e6
                figures["expertd"]["peers_gate_us"] = round(gate, 2)
                if not args.zipf:
                    figures["expertd"]["floor"] = {"step_seconds": floor_us(shape, args.dtype, tokens) / 1e6}
            if args.json:
                Path(args.json).write_text(json.dumps({"runs": [run]}, indent=1) + "\n")
    print(f"\n{args.shape}, {args.dtype}, zipf {args.zipf}, {about['gpu']}, medians in µs")
    columns = ["rows", *names, "best peer / expertd", "peers' gate", "SM MHz, in the columns' order"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|\n" + "\n".join(table), flush=True)


if __name__ == "__main__":
    main()
