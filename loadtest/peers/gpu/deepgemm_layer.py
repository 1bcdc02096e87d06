#!/usr/bin/env python3
"""DeepGEMM peer: its fused FP8 MoE for Hopper, which quantises rows, exchanges them, multiplies and combines in one kernel.

The gate is that of all peers. A single rank runs the same kernel with its buffers in plain memory. Needs sgl-deep-gemm
0.1.4.post1; see README.md for the environment.

torchrun --nproc-per-node N deepgemm_layer.py [--shape S] [--tokens T ...]
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist

import layer as common

# The kernel supports no wider experts.
WIDEST = 4096


class OneRank:
    """The part of a process group that DeepGEMM's call needs, for a process without others."""

    def rank(self):
        return 0


def plain_buffer(world, shape, tokens):
    """DeepGEMM's buffer of a single rank; its own constructor needs a process group and symmetric memory."""
    import deep_gemm
    from deep_gemm.utils.math import align

    library, sizes = deep_gemm._C, (shape.top_k, shape.hidden, shape.width)
    capacity = align(tokens, library.get_token_alignment_for_mega_moe())
    size, slices = library.get_symm_buffer_size_for_sm90_mega_moe(1, shape.experts, capacity, *sizes, True, "swiglu")
    memory = torch.zeros(size, dtype=torch.int8, device=world.device)
    parts = [part if isinstance(part, torch.Tensor) else torch.from_dlpack(part) for part in slices(memory)]
    return SimpleNamespace(
        buffer=memory,
        handle=SimpleNamespace(buffer_ptrs=[memory.data_ptr()]),
        group=OneRank(),
        num_max_tokens_per_rank=capacity,
        num_experts=shape.experts,
        num_topk=shape.top_k,
        x=parts[0].view(torch.float8_e4m3fn),
        x_sf=parts[1],
        topk_idx=parts[2],
        topk_weights=parts[3],
    )


def prepare(world, shape, tokens):
    import deep_gemm

    if shape.width > WIDEST:
        return None
    # One step follows the other, so all use the same buffer.
    if world.ranks == 1:
        buffer = plain_buffer(world, shape, tokens)
    else:
        buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            dist.group.WORLD, shape.experts, tokens, shape.top_k, shape.hidden, shape.width
        )

    def make(layer, rows, out):
        if not hasattr(layer, "for_deepgemm"):
            pairs = [(weights.values, weights.scales) for weights in (layer.gate_up, layer.down)]
            layer.for_deepgemm = deep_gemm.transform_weights_for_mega_moe_sm90(*pairs)
        gate_up, down = layer.for_deepgemm

        def step():
            weights, ids = layer.route(rows)
            staged = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
            deep_gemm.mega_moe_pre_dispatch_sm90(rows, ids.to(torch.int32), weights, *staged, tokens)
            deep_gemm.fp8_mega_moe(out, gate_up, down, buffer)

        return step

    return make


if __name__ == "__main__":
    common.run("deepgemm", __doc__, prepare, formats=("fp8",))
