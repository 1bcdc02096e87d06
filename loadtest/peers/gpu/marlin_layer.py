#!/usr/bin/env python3
"""Marlin peer: vLLM's products for INT4 (groups of 32 and 128) and MXFP4 weights with bf16 rows on one GPU, as its `fused_marlin_moe` calls
them: rows listed by expert, gate and up, activation, down with the routing weights, sum. Activation and sum are Triton.

Needs `_moe_C_stable_libtorch.abi3.so` of vLLM 0.26.0, which fits PyTorch 2.11, in the folder that PEER_SITE names.

marlin_layer.py [--dtype int4|int4_g128|mxfp4] [--shape S] [--tokens T ...]
"""

from pathlib import Path

import torch

import elementwise
import layer as common

LIBRARY = "_moe_C_stable_libtorch.abi3.so"
# vLLM's numbers of the formats: four bits minus 8, and e2m1.
INT4, E2M1 = 1125899907892224, 562949953487106
# Rows of a tile. vLLM takes the smallest that has room for the mean number of rows of an expert, divided by 0.9.
TILES = (8, 16, 32, 48, 64)
# vLLM pads MXFP4 layers to multiples of these: columns of rows, and width.
PADDED = 256, 128


def padded(size, multiple):
    return -(-size // multiple) * multiple


def packed_codes(codes):
    """Marlin's i32 [K / 16, 2N] of codes [N, K]: a thread's operands of four 16 x 16 tiles beside each other."""
    n, k = codes.shape
    # Eight codes of a word: k odd or even, n in the second eight, k in the second eight.
    parts = codes.view(n // 64, 4, 2, 8, k // 16, 2, 4, 2).permute(4, 0, 3, 6, 1, 7, 2, 5).reshape(k // 16, -1)
    return common.in_pairs(parts).view(torch.int32)


def permuted_scales(scales):
    """Marlin's [G, K / group, N] of scales [G, N, K / group]: each 64 columns as a transposed 8 x 8 matrix."""
    groups, n, count = scales.shape
    return scales.transpose(1, 2).reshape(groups, count, n // 64, 8, 8).transpose(3, 4).reshape(groups, count, n).contiguous()


def permuted_bias(bias):
    """Marlin's bf16 bias [G, N]."""
    return bias.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1).bfloat16().contiguous()


class Matrix:
    """A matrix of every expert, [E, N, K] with padding, in Marlin's layout."""

    def __init__(self, weights, bias, n, k):
        experts, rows, half = weights.codes.shape
        self.n, self.k = n, k
        scales = weights.exponents if isinstance(weights, common.Mxfp4) else weights.scales.bfloat16()
        group = 2 * half // scales.shape[2]
        added = n - rows
        self.codes = torch.empty(experts, k // 16, 2 * n, device=weights.codes.device, dtype=torch.int32)
        for expert in range(experts):
            codes = torch.nn.functional.pad(common.from_pairs(weights.codes[expert]), (0, k - 2 * half, 0, added))
            self.codes[expert] = packed_codes(codes)
        scales = torch.nn.functional.pad(scales, (0, k // group - scales.shape[2], 0, added))
        self.scales = permuted_scales(scales)
        self.type = INT4
        if isinstance(weights, common.Mxfp4):
            self.type = E2M1
            exponents = self.scales.unflatten(2, (-1, 2, 2)).transpose(3, 4).flatten(2).contiguous()
            self.scales = exponents.view(torch.float8_e8m0fnu)
        self.bias = None if bias is None else permuted_bias(torch.nn.functional.pad(bias, (0, added)))


def prepare(world, shape, tokens):
    if world.ranks > 1:
        return None
    torch.ops.load_library(Path(common.SITE or ".") / LIBRARY)
    ops = torch.ops._moe_C
    entries, k, experts = tokens * shape.top_k, shape.top_k, shape.experts
    hidden, inter = shape.hidden, shape.width
    if shape.gpt_oss:
        hidden, inter = padded(hidden, PADDED[0]), padded(inter, PADDED[1])
    m = next((tile for tile in TILES if entries / experts / tile < 0.9), TILES[-1])
    most = entries + experts * (m - 1)
    if entries < experts:
        most = min(entries * m, most)
    # All steps of a graph share scratch memory, as in an engine.
    integers = lambda count: torch.zeros(count, device=world.device, dtype=torch.int32)
    listed, tile_expert, length = integers(most), integers(-(-most // m)), integers(1)
    locks = integers(4 * torch.cuda.get_device_properties(world.device).multi_processor_count)
    scratch = lambda rows, columns: torch.zeros(rows, columns, device=world.device, dtype=torch.bfloat16)
    both, h, y = scratch(entries, 2 * inter), scratch(entries, inter), scratch(entries, hidden)
    wide = scratch(tokens, hidden) if hidden != shape.hidden else None

    def product(matrix, inputs, outputs, weights, top_k, weighted):
        ops.moe_wna16_marlin_gemm(
            inputs, outputs, matrix.codes, matrix.bias, matrix.scales, None, None, None, None, None,
            locks, listed, tile_expert, length, weights, m, top_k, weighted, matrix.type,
            inputs.shape[0], matrix.n, matrix.k, True, False, True, False, -1, -1, -1,
        )  # fmt: skip

    def make(layer, rows, out):
        if not hasattr(layer, "for_marlin"):
            gate_up = Matrix(layer.gate_up, layer.gate_up_bias, 2 * inter, hidden)
            layer.for_marlin = gate_up, Matrix(layer.down, layer.down_bias, hidden, inter)
        gate_up, down = layer.for_marlin

        def step():
            weights, ids = layer.route(rows)
            inputs = rows
            if wide is not None:
                wide[:, : shape.hidden].copy_(rows)
                inputs = wide
            ops.moe_align_block_size(ids, experts, m, listed, tile_expert, length, None)
            product(gate_up, inputs, both, weights, k, False)
            elementwise.activate(both, h, shape.gpt_oss)
            product(down, h, y, weights, 1, True)
            elementwise.sum_choices(y, out)

        return step

    return make


if __name__ == "__main__":
    common.run("marlin", __doc__, prepare, formats=("int4", "int4_g128", "mxfp4"))
