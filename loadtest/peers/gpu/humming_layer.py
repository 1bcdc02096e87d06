#!/usr/bin/env python3
"""Humming peer: its grouped products on one GPU with INT4 weights and bf16 rows, as vLLM runs them: rows found by lists, gate and up,
activation, down, sum. Lists, activation and sum are Triton.

Needs humming-kernels in the folder that PEER_SITE names; it compiles kernels when it runs.

humming_layer.py [--shape S] [--tokens T ...]
"""

import torch
import triton
import triton.language as tl

import elementwise
import grouped
import layer as common


@triton.jit
def padded_kernel(counts, padded, local, EXPERTS: tl.constexpr, M: tl.constexpr):
    """The number of rows of all experts, each in whole tiles of M rows."""
    expert = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + expert, mask=expert < local, other=0) + M - 1) // M
    tl.store(padded, tl.sum(tiles, 0) * M)


def products(weights):
    """The library's layer of a matrix of every expert, from tensors as checkpoints of compressed-tensors have them."""
    from humming.layer import HummingLayer

    about = dict(quant_method="compressed-tensors", num_bits=4, strategy="group", symmetric=True)
    about.update(format="pack-quantized", type="int", group_size=weights.group)
    experts, rows, columns = weights.codes.shape
    with torch.inference_mode(False), weights.codes.device:
        made = HummingLayer(
            shape_n=rows, shape_k=2 * columns, weight_config=about, num_experts=experts, torch_dtype=torch.bfloat16
        )
        made.load_from_tensors({"weight_packed": weights.codes.view(torch.int32), "weight_scale": weights.scales.bfloat16()})
        made.transform()
    return made


def prepare(world, shape, tokens):
    from humming.tune import get_heuristics_config

    if world.ranks > 1 or shape.gpt_oss:
        return None
    entries, inter, hidden = tokens * shape.top_k, shape.width, shape.hidden
    # All steps of a graph share scratch memory, as in an engine.
    scratch = lambda columns: torch.empty(entries, columns, device=world.device, dtype=torch.bfloat16)
    both, h, y = scratch(2 * inter), scratch(inter), scratch(hidden)
    lists = {}

    def product(layer, inputs, outputs, ids, top_k):
        """One grouped product, in the tile sizes that the library chooses for this number of rows."""
        if not hasattr(layer, "sizes"):
            layer.sizes = {}
        if tokens not in layer.sizes:
            layer.sizes[tokens] = get_heuristics_config(layer.humming_config, shape_m=entries, gemm_type="indexed")
        sizes = layer.sizes[tokens]
        m = sizes["block_shape"][0]
        if m not in lists:
            padded = torch.empty(1, device=world.device, dtype=torch.int32)
            lists[m] = grouped.Lists(world.device, shape.experts, entries, m, empty=entries), padded
        found, padded = lists[m]
        if m not in ids["listed"]:
            found(ids["ids"])
            padded_kernel[(1,)](found.counts, padded, shape.experts, EXPERTS=triton.next_power_of_2(shape.experts), M=m)
            ids["listed"].add(m)
        layer(
            inputs, outputs=outputs, sorted_ids=found.listed, expert_ids=found.tile_expert, num_tokens_padded=padded, top_k=top_k,
            compute_config={"gemm_type": "indexed"}, tuning_config=sizes,
        )  # fmt: skip

    def make(layer, rows, out):
        if not hasattr(layer, "for_humming"):
            layer.for_humming = products(layer.gate_up), products(layer.down)
        gate_up, down = layer.for_humming

        def step():
            weights, ids = layer.route(rows)
            listed = {"ids": ids, "listed": set()}
            product(gate_up, rows, both, listed, shape.top_k)
            elementwise.activate(both, h)
            product(down, h, y, listed, 1)
            elementwise.sum_choices(y, out, weights)

        return step

    return make


if __name__ == "__main__":
    common.run("humming", __doc__, prepare, formats=("int4", "int4_g128"))
