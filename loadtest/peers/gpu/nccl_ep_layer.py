#!/usr/bin/env python3
"""NCCL EP peer: low-latency dispatch and combine around a grouped GEMM in Triton, all in one CUDA graph.

Needs nccl-extensions 0.1.0, nccl4py 0.6.0 and NCCL 2.30.7; see README.md for the environment.

torchrun --nproc-per-node N nccl_ep_layer.py [--shape S] [--tokens T ...] [--exchange-only]
"""

import json
import sys

import torch

import layer as common
from grouped import Padded

# Above this number of rows per rank the low-latency mode is not meant to be used.
MOST = 512


class Exchange:
    """One NCCL EP group with its receive buffers; `ids` i64 [T, k] is read by every dispatch."""

    def __init__(self, world, shape, tokens):
        import nccl.ep as ep
        from nccl.ep.interop.torch import get_nccl_comm_from_group

        self.ep = ep
        local = shape.experts // world.ranks
        options = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY,
            num_experts=shape.experts,
            max_dispatch_tokens_per_rank=tokens,
            max_token_bytes=shape.hidden * 2,
        )
        self.group = ep.Group.create(get_nccl_comm_from_group(), options)
        self.capacity = world.ranks * tokens
        new = lambda *size, dtype: torch.zeros(*size, device=world.device, dtype=dtype)
        self.received = new(local, self.capacity, shape.hidden, dtype=torch.bfloat16)
        self.results = new(local, self.capacity, shape.hidden, dtype=torch.bfloat16)
        self.counts = new(local, dtype=torch.int32)
        self.ids = new(tokens, shape.top_k, dtype=torch.int64)
        self.ids.copy_(torch.arange(shape.top_k, device=world.device).expand(tokens, -1))
        self.weights = new(tokens, shape.top_k, dtype=torch.float32)
        torch.cuda.synchronize()
        # Descriptors live as long as the group, because the library may read them when a graph is replayed.
        self.held = {}
        stream = torch.cuda.current_stream()
        self.handle = self.group.create_handle(ep.Layout.EXPERT_MAJOR, self.describe(self.ids), stream=stream)
        torch.cuda.synchronize()

    def describe(self, tensor):
        """The library's descriptor of a tensor with a fixed address."""
        if tensor.data_ptr() not in self.held:
            self.held[tensor.data_ptr()] = (self.ep.Tensor(tensor), tensor)
        return self.held[tensor.data_ptr()][0]

    def dispatch(self, rows):
        ep = self.ep
        self.handle.dispatch(
            ep.DispatchInputs(tokens=self.describe(rows)),
            ep.DispatchOutputs(tokens=self.describe(self.received)),
            layout_info=ep.LayoutInfo(expert_counters=self.describe(self.counts)),
            stream=torch.cuda.current_stream(),
        )

    def combine(self, results, out):
        ep = self.ep
        self.handle.combine(
            ep.CombineInputs(tokens=self.describe(results)),
            ep.CombineOutputs(tokens=self.describe(out), topk_weights=self.describe(self.weights)),
            stream=torch.cuda.current_stream(),
        )

    def close(self):
        self.handle.destroy()
        self.group.destroy()


def prepare(world, shape, tokens):
    if tokens > MOST:
        return None
    exchange = Exchange(world, shape, tokens)
    local = shape.experts // world.ranks
    experts = Padded(world.device, shape, local, exchange.capacity, tokens * world.ranks * shape.top_k / shape.experts)

    def make(layer, rows, out):
        def step():
            weights, ids = layer.route(rows)
            exchange.ids.copy_(ids)
            exchange.weights.copy_(weights)
            exchange.dispatch(rows)
            experts(layer, exchange.received, exchange.counts, exchange.results)
            exchange.combine(exchange.results, out)

        return step

    return make


def exchange_only(args):
    """Dispatch and combine without experts. The result is the rows themselves, because the weights add up to 1."""
    world = common.World()
    shape = common.SHAPES[args.shape]
    report = {"peer": "nccl_ep exchange", "shape": args.shape, "ranks": world.ranks, "sizes": []}
    for tokens in args.tokens:
        exchange = Exchange(world, shape, tokens)
        sets = [
            torch.rand(tokens, shape.experts, device=world.device).topk(shape.top_k, -1)[1] for _ in range(common.STEPS)
        ]
        exchange.weights.fill_(1 / shape.top_k)
        rows = torch.randn(tokens, shape.hidden, device=world.device).bfloat16()
        out = torch.empty_like(rows)

        def enqueue():
            for ids in sets:
                exchange.ids.copy_(ids)
                exchange.dispatch(rows)
                exchange.combine(exchange.received, out)

        times, _, _ = common.replay_times(world, enqueue, lambda: out.fill_(float("nan")), args.replays, common.STEPS)
        error = world.slowest(common.relative_error(out, rows.float()))
        figures = common.Figures(times, error).json(tokens)
        if not error < 2e-2:
            figures["wrong"] = True
        report["sizes"].append(figures)
        world.say(json.dumps({"peer": report["peer"], "shape": args.shape, "ranks": world.ranks, **figures}))
        exchange.close()
    if args.json and world.rank == 0:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    world.close()


if __name__ == "__main__":
    if "--exchange-only" in sys.argv:
        sys.argv.remove("--exchange-only")
        exchange_only(common.arguments(__doc__, ["bf16"]).parse_args())
    else:
        common.run("nccl_ep", __doc__, prepare)
