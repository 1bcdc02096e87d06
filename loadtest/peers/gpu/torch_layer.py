#!/usr/bin/env python3
"""PyTorch peer: all-gather of rows, grouped_mm experts, reduce-scatter of sums; everything in one CUDA graph.

torchrun --nproc-per-node N torch_layer.py [--shape S] [--tokens T ...]
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import layer as common

ALIGN = 16


def prepare(world, shape, tokens):
    total, k = tokens * world.ranks, shape.top_k
    # A graph has fixed sizes but variable counts: the capacity is a quarter above this rank's share of the choices, or
    # all choices if they are few. Further choices would be lost, which the check of the result would show.
    capacity = total * k
    if total * k > 4096:
        capacity = min(capacity, -(-total * k * 5 // (world.ranks * 4)))
    capacity = -(-capacity // ALIGN) * ALIGN

    def make(layer, rows, out):
        gathered = torch.empty(total, shape.hidden, device=world.device, dtype=torch.bfloat16)
        gate_up, down = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)
        experts = torch.arange(layer.local, device=world.device)

        def step():
            if world.ranks > 1:
                dist.all_gather_into_tensor(gathered, rows)
            source = gathered if world.ranks > 1 else rows
            weights, ids = layer.route(source)
            local = ids.flatten() - layer.first
            local = torch.where((local >= 0) & (local < layer.local), local, layer.local)
            ordered, order = torch.sort(local, stable=True)
            ordered, order = ordered[:capacity], order[:capacity]
            offsets = torch.searchsorted(ordered, experts, right=True).to(torch.int32)
            row = order // k
            both = torch._grouped_mm(source.index_select(0, row), gate_up, offs=offsets)
            gate, up = both.chunk(2, -1)
            result = torch._grouped_mm(F.silu(gate) * up, down, offs=offsets)
            # Rows after the last expert's rows are uninitialised memory.
            mine = (ordered < layer.local).unsqueeze(1)
            weighted = result * weights.flatten()[order].to(torch.bfloat16).unsqueeze(1)
            weighted = torch.where(mine, weighted, torch.zeros((), device=world.device, dtype=torch.bfloat16))
            summed = torch.zeros(total, shape.hidden, device=world.device, dtype=torch.bfloat16)
            summed.index_add_(0, row, weighted)
            if world.ranks > 1:
                dist.reduce_scatter_tensor(out, summed)
            else:
                out.copy_(summed)

        return step

    return make


if __name__ == "__main__":
    common.run("torch", __doc__, prepare)
