"""Code that all GPU peers share: shapes, weights, fresh rows and routing, a reference, and timing under graph replay.

A peer is a layer of an MoE block on N GPUs, one process each (torchrun): gate, rows to the experts, experts, rows back.
Words: N ranks, T rows of one rank, H elements of a row, E experts of width I, k choices per row.
"""

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

import gate
from clocks import Clocks

# Folder with the libraries that peers need, or None.
SITE = os.environ.get("PEER_SITE")
if SITE:
    sys.path.insert(0, SITE)


@dataclass(frozen=True)
class Shape:
    """Sizes of one MoE layer without shared experts."""

    hidden: int
    width: int
    experts: int
    top_k: int
    # gpt-oss's experts: biases, gate and up rows in turn, and its clamped SwiGLU.
    gpt_oss: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "olmoe-7b": Shape(2048, 1024, 64, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "deepseek-v3": Shape(7168, 2048, 256, 8),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4, gpt_oss=True),
}
# Default number of layers in memory, used in turn, so that no cache holds the weights of the next one.
LAYERS = 2
# Default number of steps per graph, each with its own rows.
STEPS = 8
# Replays go on for this long before any is timed, so that clocks are those of sustained work, and at least this long while they are.
WARM_SECONDS, TIMED_SECONDS = 0.2, 0.15
# Most timed replays.
MOST_REPLAYS = 400
# Where routing is skewed, logits are multiplied by this: about the deviation of the noise that makes softmax draw experts.
SKEW_NOISE = 1.28
# FP8 weights have one scale for each block of BLOCK x BLOCK elements.
BLOCK = 128
# MXFP4 weights have one exponent for each MX_BLOCK elements of a row.
MX_BLOCK = 32
# The values of the codes 0 to 7 of MXFP4 (e2m1); the codes 8 to 15 are their negatives.
MX_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# INT4 weights have one scale for each 32 or 128 elements of a row, NVFP4 weights for each NV_GROUP.
INT4_GROUPS = {"int4": 32, "int4_g128": 128}
NV_GROUP = 16
# NVFP4 scales multiply this factor in every matrix here.
NV_FACTOR = 2.0**-9
# Constants of gpt-oss's SwiGLU.
ALPHA, LIMIT = 1.702, 7.0
# Largest relative error of a layer with weights of a format. Peers with FP8 weights also round rows to FP8 (3 bits of
# mantissa), some of them results as well; the reference does not.
TOLERANCE = {"bf16": 2e-2, "fp8": 1e-1, "mxfp4": 2e-2, "int4": 2e-2, "int4_g128": 2e-2, "nvfp4": 2e-2}


def arguments(description, formats):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--dtype", choices=formats, default=formats[0], help="format of the weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 2048], help="rows per rank")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers in memory, used in turn")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per graph; the number of layers makes it a walk")
    parser.add_argument("--replays", type=int, default=15, help="least number of timed replays of a graph of several steps")
    parser.add_argument("--zipf", type=float, default=0.0, help="adds -S log(1 + e) to the logit of expert e [default: even routing]")
    parser.add_argument("--json", help="also write the figures to this file")
    return parser


class World:
    """The process group; a single process needs no torchrun. `zipf`: skew of the routing."""

    def __init__(self, zipf=0.0):
        self.zipf = zipf
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        if self.ranks > 1:
            dist.init_process_group("nccl", device_id=self.device)

    def say(self, *words):
        if self.rank == 0:
            print(*words, flush=True)

    def barrier(self):
        if self.ranks > 1:
            dist.barrier()
        torch.cuda.synchronize()

    def slowest(self, value):
        """The maximum of all ranks' values."""
        return self.slowest_of([value])[0]

    def slowest_of(self, values):
        """The maxima of all ranks' values, one for each."""
        if self.ranks == 1:
            return values
        held = torch.tensor(values, device=self.device, dtype=torch.float64)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return held.tolist()

    def close(self):
        if self.ranks > 1:
            dist.destroy_process_group()


class Quantised:
    """FP8 weights [G, N, K] (e4m3) with f32 scales [G, N/BLOCK, K/BLOCK], which multiply the values."""

    def __init__(self, weights):
        groups, n, k = weights.shape
        self.values = torch.empty(groups, n, k, device=weights.device, dtype=torch.float8_e4m3fn)
        self.scales = torch.empty(groups, n // BLOCK, k // BLOCK, device=weights.device)
        largest = torch.finfo(torch.float8_e4m3fn).max
        for group in range(groups):
            blocks = weights[group].float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
            self.scales[group] = blocks.abs().amax((1, 3)).clamp(1e-4) / largest
            scaled = blocks / self.scales[group][:, None, :, None]
            self.values[group] = scaled.to(torch.float8_e4m3fn).view(n, k)

    def __getitem__(self, group):
        """The dequantised f32 weights of a group, [N, K]."""
        n, k = self.values.shape[1:]
        blocks = self.values[group].float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        return (blocks * self.scales[group][:, None, :, None]).view(n, k)


def in_pairs(codes):
    """u8 [..., K] of four bits each as [..., K/2], the even element in the low half."""
    low, high = codes.unflatten(-1, (-1, 2)).to(torch.uint8).unbind(-1)
    return low | high << 4


def from_pairs(codes):
    """The opposite, as integers."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()


class Mxfp4:
    """MXFP4 weights: e2m1 codes in pairs (u8 [G, N, K/2], the even element in the low half) with exponents of two, biased
    by 127 (u8 [G, N, K/MX_BLOCK])."""

    def __init__(self, weights):
        groups, n, k = weights.shape
        self.codes = torch.empty(groups, n, k // 2, device=weights.device, dtype=torch.uint8)
        self.exponents = torch.empty(groups, n, k // MX_BLOCK, device=weights.device, dtype=torch.uint8)
        self.table = torch.tensor(MX_VALUES, device=weights.device)
        between = (self.table[1:] + self.table[:-1]) / 2
        for group in range(groups):
            blocks = weights[group].float().view(n, k // MX_BLOCK, MX_BLOCK)
            # The largest element of a block is scaled to [4, 8); e2m1's largest value is 6.
            exponents = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(1e-30))) - 2
            codes = torch.bucketize((blocks * torch.exp2(-exponents)).abs(), between) + 8 * (blocks < 0)
            self.codes[group] = in_pairs(codes.view(n, k))
            self.exponents[group] = (exponents.squeeze(-1) + 127).to(torch.uint8)

    def __getitem__(self, group):
        """The dequantised f32 weights of a group, [N, K]."""
        codes = from_pairs(self.codes[group])
        values = self.table[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        scales = torch.exp2(self.exponents[group].float() - 127).unsqueeze(-1)
        n, k = values.shape
        return (values.view(n, k // MX_BLOCK, MX_BLOCK) * scales).view(n, k)


class Int4:
    """INT4 weights: integers from 0 to 15, of which 8 is subtracted (`in_pairs`: u8 [G, N, K/2]), with scales that bf16 and f16 both hold
    (f16 [G, N, K/group])."""

    def __init__(self, weights, group=INT4_GROUPS["int4"]):
        self.group = group
        groups, n, k = weights.shape
        self.codes = torch.empty(groups, n, k // 2, device=weights.device, dtype=torch.uint8)
        self.scales = torch.empty(groups, n, k // group, device=weights.device, dtype=torch.float16)
        for index in range(groups):
            blocks = weights[index].float().view(n, k // group, group)
            scales = (blocks.abs().amax(-1, keepdim=True).clamp(1e-3) / 7).bfloat16().float()
            self.codes[index] = in_pairs(((blocks / scales).round().clamp(-8, 7) + 8).view(n, k))
            self.scales[index] = scales.squeeze(-1).half()

    def __getitem__(self, index):
        """The dequantised f32 weights of a group, [N, K]."""
        values = from_pairs(self.codes[index]).float() - 8
        n, k = values.shape
        return (values.view(n, k // self.group, self.group) * self.scales[index].float().unsqueeze(-1)).view(n, k)


class Nvfp4:
    """NVFP4 weights: e2m1 codes (`in_pairs`: u8 [G, N, K/2]) with e4m3 scales [G, N, K/NV_GROUP], which multiply NV_FACTOR."""

    def __init__(self, weights):
        groups, n, k = weights.shape
        self.codes = torch.empty(groups, n, k // 2, device=weights.device, dtype=torch.uint8)
        self.scales = torch.empty(groups, n, k // NV_GROUP, device=weights.device, dtype=torch.float8_e4m3fn)
        self.table = torch.tensor(MX_VALUES, device=weights.device)
        between = (self.table[1:] + self.table[:-1]) / 2
        for group in range(groups):
            blocks = weights[group].float().view(n, k // NV_GROUP, NV_GROUP)
            self.scales[group] = (blocks.abs().amax(-1).clamp(1e-3) / 6 / NV_FACTOR).to(torch.float8_e4m3fn)
            scaled = blocks / (self.scales[group].float().unsqueeze(-1) * NV_FACTOR)
            self.codes[group] = in_pairs((torch.bucketize(scaled.abs(), between) + 8 * (scaled < 0)).view(n, k))

    def __getitem__(self, group):
        """The dequantised f32 weights of a group, [N, K]."""
        codes = from_pairs(self.codes[group])
        values = self.table[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        n, k = values.shape
        scales = self.scales[group].float().unsqueeze(-1) * NV_FACTOR
        return (values.view(n, k // NV_GROUP, NV_GROUP) * scales).view(n, k)


# How weights are stored in each format; bf16 stays as it is.
STORED = {"fp8": Quantised, "mxfp4": Mxfp4, "nvfp4": Nvfp4}
STORED.update({name: functools.partial(Int4, group=group) for name, group in INT4_GROUPS.items()})


class Layer:
    """Weights of this rank's experts and of the gate. All ranks have the same gate; a rank's experts are contiguous.

    `gate` is a bf16 tensor [E, H], `gate_bias` f32 [E] or None. `gate_up` [E/N, 2I, H], gate rows before up rows, and `down` [E/N, H, I] are bf16
    tensors or one of `STORED`. In gpt-oss gate and up rows take turns, and f32 biases [E/N, 2I] and [E/N, H] are added.
    """

    def __init__(self, world, shape, seed, dtype="bf16"):
        if shape.experts % world.ranks:
            sys.exit(f"{shape.experts} experts cannot be divided evenly among {world.ranks} ranks, as peers need")
        self.shape = shape
        self.local = shape.experts // world.ranks
        self.first = world.rank * self.local
        every = torch.Generator(world.device).manual_seed(seed)
        own = torch.Generator(world.device).manual_seed(seed * 1000 + world.rank + 1)

        def normal(*size, scale, generator):
            values = torch.empty(*size, device=world.device, dtype=torch.bfloat16)
            for part in values:
                part.copy_(torch.randn(part.shape, device=world.device, generator=generator) * scale)
            return values

        h, i, e = shape.hidden, shape.width, shape.experts
        stored = STORED.get(dtype, lambda weights: weights)
        self.gate = normal(e, h, scale=h**-0.5 * (SKEW_NOISE if world.zipf else 1.0), generator=every)
        self.gate_bias = None
        if world.zipf:
            self.gate_bias = -world.zipf * torch.log(1 + torch.arange(e, device=world.device, dtype=torch.float32))
        self.gate_up = stored(normal(self.local, 2 * i, h, scale=h**-0.5, generator=own))
        self.down = stored(normal(self.local, h, i, scale=i**-0.5, generator=own))
        self.gate_up_bias, self.down_bias = None, None
        if shape.gpt_oss:
            self.gate_up_bias = normal(self.local, 2 * i, scale=0.1, generator=own).float()
            self.down_bias = normal(self.local, h, scale=0.1, generator=own).float()

    def route(self, rows):
        """f32 weights and i32 experts, [rows, k]: softmax over the chosen experts."""
        return gate.route(rows, self.gate, self.gate_bias, self.shape.top_k)

    def route_exactly(self, rows):
        """The same from logits in f32."""
        return gate.route_exactly(rows, self.gate, self.gate_bias, self.shape.top_k)


def reference(world, layer, rows, exact=False):
    """A slow f32 reference of the layer for this rank's rows: every rank adds its experts' part. `exact`: logits are f32; otherwise
    those that the peers' gate rounds to bf16."""
    rows_of = [torch.empty_like(rows) for _ in range(world.ranks)]
    if world.ranks > 1:
        dist.all_gather(rows_of, rows)
    else:
        rows_of = [rows]
    gathered = torch.cat(rows_of)
    weights, ids = layer.route_exactly(gathered) if exact else layer.route(gathered)
    total = torch.zeros(gathered.shape, device=rows.device, dtype=torch.float32)
    for local in range(layer.local):
        row, choice = torch.where(ids == layer.first + local)
        if row.numel() == 0:
            continue
        both = gathered[row].float() @ layer.gate_up[local].float().T
        if layer.shape.gpt_oss:
            both += layer.gate_up_bias[local]
            gate, up = both[:, ::2].clamp(max=LIMIT), both[:, 1::2].clamp(-LIMIT, LIMIT)
            inner = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
            out = inner @ layer.down[local].float().T + layer.down_bias[local]
        else:
            gate, up = both.chunk(2, -1)
            out = (F.silu(gate) * up) @ layer.down[local].float().T
        total.index_add_(0, row, out * weights[row, choice].unsqueeze(1))
    if world.ranks > 1:
        dist.all_reduce(total)
    return total.chunk(world.ranks)[world.rank]


def relative_error(found, wanted):
    error = (found.float() - wanted).norm() / wanted.norm()
    return error.item() if torch.isfinite(error) else float("inf")


class Figures:
    """The result for one size. `busy`: the part of the time in which replays ran; `clocks`: `Clocks` of that time."""

    def __init__(self, times, error, busy, clocks):
        self.times = sorted(times)
        self.error, self.busy, self.clocks = error, busy, clocks

    def json(self, tokens):
        at = lambda part: self.times[int(len(self.times) * part)]
        return {
            "tokens_per_rank": tokens,
            "median_us": round(statistics.median(self.times), 2),
            "min_us": round(self.times[0], 2),
            "p10_us": round(at(0.1), 2),
            "p90_us": round(at(0.9), 2),
            "busy": round(self.busy, 3),
            **self.clocks.json(),
            "relative_error": self.error,
        }


def replay_times(world, enqueue, refresh, replays, steps):
    """Replays a graph of the `steps` steps that `enqueue()` enqueues, back to back but for `refresh()`, which enqueues new input
    before each. Returns µs per step, one figure per replay, of the slowest rank; the part of the time in which replays ran; `Clocks`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        enqueue()
        enqueue()
    stream.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        enqueue()

    def replay():
        refresh()
        if world.ranks > 1:
            world.barrier()
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        return begin, end

    began, count = time.monotonic(), 0
    while count < 3 or world.slowest(time.monotonic() - began) < WARM_SECONDS:
        replay()
        torch.cuda.synchronize()
        count += 1
    each = (time.monotonic() - began) / count
    count = max(replays, min(MOST_REPLAYS, math.ceil(world.slowest(TIMED_SECONDS / each))))
    with Clocks(world.rank) as clocks:
        events = [replay() for _ in range(count)]
        torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) * 1e3 for begin, end in events]
    busy = sum(spans) / (events[0][0].elapsed_time(events[-1][1]) * 1e3)
    return world.slowest_of([span / steps for span in spans]), busy, clocks


def measure(world, layers, tokens, make, replays, step_count, exact):
    """Times one size of a peer. `exact`: see `reference`.

    `make(layer, rows, out)` returns a function that enqueues one step and can be captured; it reads `rows` [T, H] and
    writes `out` [T, H]. Rows change with every step and every replay.
    """
    h = layers[0].shape.hidden
    rows = torch.empty(step_count, tokens, h, device=world.device, dtype=torch.bfloat16)
    out = torch.empty_like(rows)
    steps = [make(layers[s % len(layers)], rows[s], out[s]) for s in range(step_count)]

    def enqueue():
        for step in steps:
            step()

    def refresh():
        rows.normal_()
        out.fill_(float("nan"))

    torch.manual_seed(tokens * 100 + world.rank)
    refresh()
    times, busy, clocks = replay_times(world, enqueue, refresh, replays, step_count)
    # Check the results of the last replay: all are written, and two steps are compared with the reference.
    error = 0.0 if torch.isfinite(out).all() else float("inf")
    for s in (0, step_count - 1):
        error = max(error, relative_error(out[s], reference(world, layers[s % len(layers)], rows[s], exact)))
    return Figures(times, world.slowest(error), busy, clocks)


def one_size(world, name, prepare, layers, tokens, args, exact):
    """The figures of one size of a peer, or None if it does not run. See `run`."""
    try:
        make = prepare(world, layers[0].shape, tokens)
        if make is None:
            world.say(f"{name}: {tokens} rows per rank: not supported")
            return None
        figures = measure(world, layers, tokens, make, args.replays, args.steps, exact).json(tokens)
    except torch.OutOfMemoryError as error:
        world.say(f"{name}: {tokens} rows per rank: {str(error)[:100]}")
        return None
    finally:
        torch.cuda.empty_cache()
    if not figures["relative_error"] < TOLERANCE[args.dtype]:
        world.say(f"{name}: {tokens} rows per rank: WRONG, relative error {figures['relative_error']}")
        figures["wrong"] = True
    return figures


def run(name, description, prepare, formats=("bf16",), begin=None, exact=False):
    """The program of a peer that supports weights of `formats`. `exact`: its gate does not round logits to bf16.

    `prepare(world, shape, tokens)` returns the `make` of `measure`, or None if the peer does not support this size.
    `begin(world, dtype)` runs first.
    """
    args = arguments(description, formats).parse_args()
    world = World(args.zipf)
    if begin is not None:
        begin(world, args.dtype)
    shape = SHAPES[args.shape]
    layers = [Layer(world, shape, seed + 1, args.dtype) for seed in range(args.layers)]
    about = {"peer": name, "shape": args.shape, "format": args.dtype, "ranks": world.ranks, "zipf": args.zipf}
    report = {**about, "sizes": []}
    with torch.inference_mode():
        for tokens in args.tokens:
            figures = one_size(world, name, prepare, layers, tokens, args, exact)
            if figures is not None:
                report["sizes"].append(figures)
                world.say(json.dumps({**about, **figures}))
    if args.json and world.rank == 0:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    world.close()
