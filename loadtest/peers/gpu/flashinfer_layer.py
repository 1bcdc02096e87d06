#!/usr/bin/env python3
"""FlashInfer peer: its expert-parallel MoE for Hopper ("push"), in bf16 or FP8, with rows pushed into symmetric memory.

The gate is that of all peers. With FP8 weights rows and results cross the links in FP8 as well. Needs flashinfer-python
0.7.2.post1 and apache-tvm-ffi 0.1.15.post2; see README.md for the environment.

torchrun --nproc-per-node N flashinfer_layer.py [--dtype bf16|fp8] [--shape S] [--tokens T ...]
"""

import os
import sys
import types

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

import layer as common


class SymmetricMemory:
    """The part of FlashInfer's SymmDeviceMemory that its pipe uses, over PyTorch's symmetric memory.

    FlashInfer's own class is in a module that imports multicast operations, which are not for machines that share
    their NVLink switches with others.
    """

    def __init__(
        self,
        buf_size,
        group_size,
        group_rank,
        device_idx,
        comm_backend_for_handle_transfer=None,
        enable_multicast=False,
        allocate_signal_pads=False,
    ):
        if enable_multicast:
            raise RuntimeError("multicast is not used here")
        device = torch.device("cuda", device_idx)
        if group_size == 1:
            self.memory = torch.empty(buf_size, dtype=torch.uint8, device=device)
            self.addresses = [self.memory.data_ptr()]
        else:
            self.memory = symmetric.empty(buf_size, dtype=torch.uint8, device=device)
            self.handle = symmetric.rendezvous(self.memory, dist.group.WORLD)
            self.addresses = list(self.handle.buffer_ptrs)
        self.on_device = torch.tensor(self.addresses, dtype=torch.int64, device=device)

    def get_buffer_ptrs_dev(self):
        return self.on_device.data_ptr()

    def get_unicast_ptr(self, rank):
        return self.addresses[rank]


def without_init(name):
    """Registers a package of FlashInfer without running its __init__, which imports every family of kernels."""
    package = types.ModuleType(name)
    package.__path__ = [os.path.join(common.SITE, *name.split("."))]
    sys.modules[name] = package
    return package


def load():
    """FlashInfer's modules for this layer, without the rest of the library."""
    if not common.SITE:
        sys.exit("set PEER_SITE to the folder that holds flashinfer/ and tvm_ffi/")
    for name in ("", ".jit", ".comm", ".moe_ep", ".moe_ep.kernel_src", ".moe_ep.kernel_src.sm90"):
        without_init("flashinfer" + name)
    for name in (".moe_ep.core", ".moe_ep.core.validation"):
        without_init("flashinfer" + name)
    from flashinfer.comm.comm_backend import MPIBackend, TorchDistBackend
    from flashinfer.comm.dlpack_utils import pack_strided_memory

    sys.modules["flashinfer.comm"].pack_strided_memory = pack_strided_memory
    multi_node = types.ModuleType("flashinfer.comm.mnnvl")
    multi_node.SymmDeviceMemory = SymmetricMemory
    multi_node.TorchDistBackend, multi_node.MPIBackend = TorchDistBackend, MPIBackend
    sys.modules[multi_node.__name__] = multi_node


def begin(world, dtype):
    """Loads FlashInfer and compiles all modules in parallel, on the first rank; the others find them compiled."""
    load()
    from flashinfer.jit import core
    from flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe.shim import cake_jit as bf16
    from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe.shim import gemm
    from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe.shim import jit as push

    modules = [push.gen_sm90_push_a2a_module()]
    if dtype == "fp8":
        modules.append(gemm.gen_sm90_push_fp8_moe_gemm_module())
    else:
        modules += [
            bf16.gen_sm90_cake_bf16_compact_module(),
            bf16.gen_sm90_cake_bf16_combine_prereduced_module(),
            bf16.gen_sm90_cake_bf16_combine_tail_module(),
            bf16.gen_sm90_cake_bf16_combine_tail_prereduced_module(),
            bf16.gen_sm90_cake_bf16_dispatch_module(),
            bf16.gen_sm90_cake_bf16_grouped_gemm_module("fc1_gated"),
            bf16.gen_sm90_cake_bf16_grouped_gemm_module("fc2"),
        ]
    missing = [module for module in modules if not module.is_aot]
    if world.rank == 0 and missing:
        core.build_jit_specs(missing)
    world.barrier()


def prepare(world, shape, tokens):
    from flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe.shim import cake_runner, cake_weights
    from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe.shim import protocol, runner, weights

    payload, combine = protocol.Sm90PushPayload, protocol.Sm90PushCombine
    runners = {}

    def runner_of(layer):
        """The runner of a layer; it has a pipe of its own."""
        fp8 = isinstance(layer.gate_up, common.Quantised)
        if not hasattr(layer, "for_flashinfer"):
            if fp8:
                # FlashInfer quantises by itself, from bf16, in the same blocks.
                both = [torch.stack([w[e].bfloat16() for e in range(layer.local)]) for w in (layer.gate_up, layer.down)]
                layer.for_flashinfer = weights.make_sm90_push_weights(*both, interleave_gate_up=False)
            else:
                layer.for_flashinfer = cake_weights.make_sm90_cake_bf16_weights(layer.gate_up, layer.down)
        if layer not in runners:
            config = protocol.Sm90PushConfig(
                payload_dtype=payload.FP8 if fp8 else payload.BF16,
                combine_dtype=combine.FP8 if fp8 else combine.BF16,
                fuse_act=True,
                capacity_factor=1.0,
                dedup_dispatch=True,
                grouped_combine=fp8,
                fuse_fc1_epilogue=False,
            )
            pipe = protocol.Sm90PushPipe(
                token_capacity=tokens,
                config=config,
                ep_size=world.ranks,
                rank=world.rank,
                num_local_experts=layer.local,
                hidden_size=shape.hidden,
                top_k=shape.top_k,
                device_index=world.rank,
                out_dtype=torch.bfloat16,
            )
            kind = runner.Sm90PushMoERunner if fp8 else cake_runner.Sm90CakeBf16MoERunner
            runners[layer] = kind(pipe, layer.for_flashinfer)
        return runners[layer]

    def make(layer, rows, out):
        here = runner_of(layer)

        def step():
            weights, ids = layer.route(rows)
            here.stage_inputs(rows, ids.to(torch.int32), weights)
            here.compute(output=out)

        return step

    return make


if __name__ == "__main__":
    common.run("flashinfer", __doc__, prepare, formats=("bf16", "fp8"), begin=begin)
