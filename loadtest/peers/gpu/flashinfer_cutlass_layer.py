#!/usr/bin/env python3
"""FlashInfer's `cutlass_fused_moe` on one GPU with bf16 rows and bf16 or MXFP4 weights. Its autotuner times every tactic for each
number of rows.

The gate is that of all peers. See README.md for the environment.

flashinfer_cutlass_layer.py [--dtype bf16|mxfp4] [--shape S] [--tokens T ...]
"""

import functools
import os
import sys
import types

import torch

import layer as common

# Packages whose __init__ imports every family of kernels.
LARGE = ["", ".jit", ".trace", ".quantization", ".fused_moe"]


@functools.cache
def load():
    """FlashInfer's functions for this layer and its autotuner, without the rest of the library."""
    if not common.SITE:
        sys.exit("set PEER_SITE to the folder that holds flashinfer/ and tvm_ffi/")
    for name in LARGE:
        package = types.ModuleType("flashinfer" + name)
        package.__path__ = [os.path.join(common.SITE, *package.__name__.split("."))]
        sys.modules[package.__name__] = package
    from flashinfer.jit import cubin_loader

    sys.modules["flashinfer.jit"].setup_cubin_loader = cubin_loader.setup_cubin_loader
    from flashinfer.autotuner import autotune
    from flashinfer.fused_moe import core

    return core, autotune


def up_first(tensor):
    """Up rows before gate rows, as FlashInfer takes them."""
    gate, up = tensor.chunk(2, 1)
    return torch.cat([up, gate], 1)


@functools.cache
def weights_of(layer):
    """The weights of both products and their scales in FlashInfer's layout."""
    if not isinstance(layer.down, common.Mxfp4):
        return up_first(layer.gate_up), layer.down, []
    core, _ = load()
    codes = [up_first(layer.gate_up.codes), layer.down.codes]
    exponents = [up_first(layer.gate_up.exponents), layer.down.exponents]
    codes = [core.interleave_moe_weights_for_sm90_mixed_gemm(each, "fp4") for each in codes]
    return *codes, [core.interleave_moe_scales_for_sm90_mixed_gemm(each) for each in exponents]


def prepare(world, shape, tokens):
    if world.ranks > 1 or shape.gpt_oss:
        return None
    core, autotune = load()
    # All steps of a graph share scratch memory, as in an engine.
    workspaces, tuned = {}, []

    def workspace_of(kind):
        if kind not in workspaces:
            sizes = (tokens, shape.hidden, shape.width, shape.experts, shape.top_k)
            size = core.cutlass_fused_moe_workspace_size(
                *sizes, x_dtype=torch.bfloat16, weight_dtype=kind, use_w4_group_scaling=kind == torch.uint8
            )
            workspaces[kind] = torch.empty(size, device=world.device, dtype=torch.uint8)
        return workspaces[kind]

    def make(layer, rows, out):
        gate_up, down, scales = weights_of(layer)
        options = {
            "quant_scales": scales,
            "use_w4_group_scaling": bool(scales),
            "output": out,
            "workspace_buffer": workspace_of(down.dtype),
        }

        def step():
            weights, ids = layer.route(rows)
            # Tactics for exactly this number of rows; the first step times them.
            with autotune(not tuned, tuning_buckets=(tokens,)):
                core.cutlass_fused_moe(rows, ids, weights, gate_up, down, torch.bfloat16, **options)
            tuned.append(True)

        return step

    return make


if __name__ == "__main__":
    common.run("flashinfer", __doc__, prepare, formats=("bf16", "mxfp4"))
