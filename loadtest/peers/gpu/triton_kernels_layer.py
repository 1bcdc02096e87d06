#!/usr/bin/env python3
"""OpenAI's triton_kernels peer: gpt-oss's experts with MXFP4 weights, as vLLM runs them on Hopper; with several ranks between
an all-gather and a reduce-scatter.

The gate's product is PyTorch's; choosing experts and sorting rows by expert are the library's. Needs triton_kernels as vLLM 0.20.0
brings it along (vllm/third_party/triton_kernels, for PyTorch 2.11); see README.md for the environment.

torchrun --nproc-per-node N triton_kernels_layer.py --shape gpt-oss-120b [--tokens T ...]
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl

import layer as common

# Bits of a word of the bitmatrix.
WORD = 32


@triton.jit
def mark(chosen, words, rows, K: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sets bit e of a row of `words` [rows, WORDS] for each expert e >= 0 in its row of `chosen` [rows, K]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < rows
    choice = tl.load(chosen + row[:, None] * K + tl.arange(0, K)[None, :], mask=here[:, None], other=-1).to(tl.int32)
    for word in tl.static_range(WORDS):
        mine = (choice >= 0) & (choice // BITS == word)
        bits = tl.where(mine, tl.full((BLOCK, K), 1, tl.uint32) << (choice % BITS).to(tl.uint32), 0)
        # A row's experts differ from each other, so their sum is their union.
        tl.store(words + row * WORDS + word, tl.sum(bits, 1).to(tl.uint32), mask=here)


def packed(weights):
    """The library's tensor and precision of an `Mxfp4`, whose k is the second dimension there."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    form, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_form, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    values = convert_layout(wrap_torch_tensor(weights.codes.transpose(-2, -1), dtype=FP4), form, **options)
    scales = convert_layout(wrap_torch_tensor(weights.exponents.transpose(-2, -1)), scale_form, **scale_options)
    return values, PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))


def prepare(world, shape, tokens):
    from triton_kernels import swiglu
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, GatherIndx, RoutingData, ScatterIndx, matmul_ogs
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.tensor import BIT, Bitmatrix, SparseMatrix, make_ragged_tensor_metadata
    from triton_kernels.topk import topk

    if not shape.gpt_oss:
        return None
    # As in vLLM on Hopper.
    opt_flags.update_opt_flags_constraints({"split_k": 1})
    total, local, k = tokens * world.ranks, shape.experts // world.ranks, shape.top_k
    # All steps of a graph share scratch memory, as in an engine.
    bf16 = dict(device=world.device, dtype=torch.bfloat16)
    inner = torch.empty(1, total * k, shape.width, **bf16)
    gathered = torch.empty(total, shape.hidden, **bf16)
    summed = torch.empty(total, shape.hidden, **bf16)
    bits = torch.empty(total, triton.cdiv(local, WORD), device=world.device, dtype=torch.uint32)
    activation = FusedActivation(
        FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit"), reduction_n=2), (common.ALPHA, common.LIMIT)
    )

    def choose(layer, rows):
        """The library's sparse matrix of rows and this rank's experts."""
        logits = F.linear(rows, layer.gate)
        if layer.gate_bias is not None:
            logits = logits + layer.gate_bias
        chosen = topk(logits, k, apply_softmax=True)
        if world.ranks == 1:
            return chosen
        ids = chosen.indx - layer.first
        ids = torch.where((ids >= 0) & (ids < local), ids, -1).to(torch.int16)
        mark[(triton.cdiv(total, 64),)](ids, bits, total, k, bits.shape[1], WORD, 64)
        mask = Bitmatrix(bits, dtype=BIT, shape=[total, bits.shape[1] * WORD], shape_max=[total, None])
        return SparseMatrix(indx=ids, vals=torch.where(ids == -1, -1.0, chosen.vals), mask=mask)

    def experts(layer, rows, out):
        if not hasattr(layer, "for_triton_kernels"):
            layer.for_triton_kernels = packed(layer.gate_up), packed(layer.down)
        (gate_up, first_precision), (down, second_precision) = layer.for_triton_kernels
        chosen = choose(layer, rows)
        by_expert, by_row = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        ragged = make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, by_expert.shape[0])
        weights = chosen.vals.flatten()[by_row]
        routing = RoutingData(weights, ragged.block_sizes, local, k, ragged)
        matmul_ogs(
            rows,
            gate_up,
            layer.gate_up_bias,
            routing,
            gather_indx=GatherIndx(by_row, by_expert),
            precision_config=first_precision,
            fused_activation=activation,
            y=inner,
        )
        matmul_ogs(
            inner[0],
            down,
            layer.down_bias,
            routing,
            scatter_indx=ScatterIndx(by_expert, by_row),
            precision_config=second_precision,
            gammas=weights,
            y=out.unsqueeze(0),
        )

    def make(layer, rows, out):
        def step():
            if world.ranks == 1:
                experts(layer, rows, out)
                return
            dist.all_gather_into_tensor(gathered, rows)
            experts(layer, gathered, summed)
            dist.reduce_scatter_tensor(out, summed)

        return step

    return make


if __name__ == "__main__":
    common.run("triton_kernels", __doc__, prepare, formats=("mxfp4",))
