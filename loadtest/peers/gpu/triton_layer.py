#!/usr/bin/env python3
"""Triton peer: fused MoE (rows sorted by expert, two grouped GEMMs, silu and product fused) in bf16 or FP8; with several ranks
between an all-gather and a reduce-scatter.

torchrun --nproc-per-node N triton_layer.py [--dtype bf16|fp8] [--shape S] [--tokens T ...]
"""

import torch
import torch.distributed as dist

import layer as common
from grouped import Grouped
from grouped_fp8 import GroupedFp8


def prepare(world, shape, tokens):
    total = tokens * world.ranks
    rows_per_expert = total * shape.top_k / shape.experts
    local = shape.experts // world.ranks
    # All steps of a graph share scratch memory, as in an engine, and so one object.
    kinds = {}

    def experts_of(layer):
        kind = GroupedFp8 if isinstance(layer.down, common.Quantised) else Grouped
        if kind not in kinds:
            last = total if kind is GroupedFp8 else rows_per_expert
            kinds[kind] = kind(world.device, shape, local, total * shape.top_k, last)
        return kinds[kind]

    gathered = torch.empty(total, shape.hidden, device=world.device, dtype=torch.bfloat16)
    summed = torch.empty(total, shape.hidden, device=world.device, dtype=torch.bfloat16)

    def make(layer, rows, out):
        experts = experts_of(layer)

        def step():
            if world.ranks == 1:
                weights, ids = layer.route(rows)
                experts(layer, rows, weights, ids, out)
                return
            dist.all_gather_into_tensor(gathered, rows)
            weights, ids = layer.route(gathered)
            experts(layer, gathered, weights, ids, summed)
            dist.reduce_scatter_tensor(out, summed)

        return step

    return make


if __name__ == "__main__":
    common.run("triton", __doc__, prepare, formats=("bf16", "fp8"))
