#!/usr/bin/env python3
"""Triton peer: fused MoE (rows sorted by expert, two grouped GEMMs, silu and product fused); with several ranks
between an all-gather and a reduce-scatter.

torchrun --nproc-per-node N triton_layer.py [--shape S] [--tokens T ...]
"""

import torch
import torch.distributed as dist

import layer as common
from grouped import Grouped


def prepare(world, shape, tokens):
    total = tokens * world.ranks
    rows_per_expert = total * shape.top_k / shape.experts
    local = shape.experts // world.ranks
    # All steps of a graph share scratch memory, as in an engine.
    experts = Grouped(world.device, shape, local, total * shape.top_k, rows_per_expert)
    gathered = torch.empty(total, shape.hidden, device=world.device, dtype=torch.bfloat16)
    summed = torch.empty(total, shape.hidden, device=world.device, dtype=torch.bfloat16)

    def make(layer, rows, out):
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
    common.run("triton", __doc__, prepare)
