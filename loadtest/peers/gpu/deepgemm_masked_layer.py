#!/usr/bin/env python3
"""DeepGEMM's masked grouped products as an engine runs them on one GPU: rows are quantised once and stored by expert, then product,
SiLU with quantisation, product, weighted sum. What lies between the products is Triton (quantise.py).

Needs sgl-deep-gemm 0.1.4.post1; see README.md for the environment.

deepgemm_masked_layer.py [--shape S] [--tokens T ...]
"""

import torch
import triton

import layer as common
import quantise
from grouped import count_kernel

# Rows of an expert are a multiple of this: with less, stores of the products overwrite the next expert's first rows.
ALIGN = 256


def capacity_of(shape, tokens, zipf):
    """Rows for which each expert has room. With even routing no expert gets twice the mean and ALIGN more."""
    mean = tokens * shape.top_k / shape.experts
    needed = tokens if zipf else min(tokens, int(2 * mean) + ALIGN)
    return triton.cdiv(needed, ALIGN) * ALIGN


def prepare(world, shape, tokens):
    import deep_gemm

    if world.ranks > 1:
        return None
    k, entries, h, i, experts = shape.top_k, tokens * shape.top_k, shape.hidden, shape.width, shape.experts
    capacity = capacity_of(shape, tokens, world.zipf)
    mean = max(1, triton.cdiv(entries, experts))
    empty = lambda *size, dtype: torch.empty(*size, device=world.device, dtype=dtype)
    fp8, f32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    counts, place = empty(experts, dtype=torch.int32), empty(entries, dtype=torch.int32)
    x, x_scales = empty(experts, capacity, h, dtype=fp8), empty(experts, h // 128, capacity, dtype=f32)
    inner, inner_scales = empty(experts, capacity, i, dtype=fp8), empty(experts, i // 128, capacity, dtype=f32)
    both, y = empty(experts, capacity, 2 * i, dtype=bf16), empty(experts, capacity, h, dtype=bf16)
    groups = lambda size: triton.next_power_of_2(size // 128)

    def make(layer, rows, out):
        first = (layer.gate_up.values, layer.gate_up.scales)
        second = (layer.down.values, layer.down.scales)

        def step():
            weights, ids = layer.route(rows)
            counts.zero_()
            count_kernel[(triton.cdiv(entries, 256),)](ids, counts, place, 0, experts, entries, BLOCK=256)
            quantise.scatter_kernel[(tokens,)](rows, ids, place, x, x_scales, h, capacity, K=k, GROUPS=groups(h))
            product = deep_gemm.fp8_m_grouped_gemm_nt_masked
            product((x, x_scales.transpose(1, 2)), first, both, counts, mean)
            quantise.silu_kernel[(entries,)](both, ids, place, inner, inner_scales, i, capacity, GROUPS=groups(i))
            product((inner, inner_scales.transpose(1, 2)), second, y, counts, mean)
            grid = (tokens, triton.cdiv(h, 1024))
            quantise.sum_kernel[grid](y, ids, place, weights, out, h, capacity, K=k, BLOCK=1024)

        return step

    return make


if __name__ == "__main__":
    common.run("deepgemm_masked", __doc__, prepare, formats=("fp8",))
