#!/usr/bin/env python3
"""Eager decode steps of a Hugging Face model with local and with remote experts, in turn.

Eager steps are mostly Python, whose speed varies from second to second and with the cores that threads are on. So the ways take turns in
short runs, first where the system puts the threads, then with this process and the service on cores apart. The model and the service
are those of decode.py. Prints one JSON line for each layout, batch and way. Needs two GPUs, torch and transformers.

    python/benches/decode_turns.py --folder /dev/shm/qwen
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import decode

import expertd
from expertd._torch import Remote
from expertd.transformers._modules import RemoteBlock, RemoteExperts

WAYS = ["local batched_mm", "local grouped_mm", "cuda block", "cuda experts"]


class Model:
    """The model, whose MoE blocks can be exchanged, and the host's time in them."""

    def __init__(self, layers, device, remote):
        self.model = decode.make_model(layers, device)
        self.layers = self.model.model.layers
        self.blocks = [layer.mlp for layer in self.layers]
        self.experts = [block.experts for block in self.blocks]
        self.remote_blocks = [RemoteBlock(remote, remote.layer(i), pair=False).eval() for i in range(layers)]
        self.remote_experts = [RemoteExperts(remote, remote.layer(i)).eval() for i in range(layers)]
        self.seconds = 0.0
        for block in self.blocks + self.remote_blocks:
            block.forward = self.timed(block.forward)

    def timed(self, forward):
        def timed(*arguments, **options):
            start = time.perf_counter()
            result = forward(*arguments, **options)
            self.seconds += time.perf_counter() - start
            return result

        return timed

    def use(self, way):
        for i, layer in enumerate(self.layers):
            self.blocks[i].experts = self.remote_experts[i] if way == "cuda experts" else self.experts[i]
            layer.mlp = self.remote_blocks[i] if way == "cuda block" else self.blocks[i]
        if way.startswith("local"):
            self.model.set_experts_implementation(way.split()[1])


def pin(pid, cores):
    """Puts all threads of a process, and of its children, on these cores."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        # A thread may have ended.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)
            for child in (task / "children").read_text().split():
                pin(int(child), cores)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="the service's checkpoint; made if it does not exist")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way in each layout")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn, after one that is not counted")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--device", default="cuda:1", help="GPU of attention; the service's rank is on GPU 0")
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    if not args.folder.exists():
        decode.make_checkpoint(args.folder, args.layers)
    with expertd.serve(args.folder, device="cuda", ranks=1) as service, torch.no_grad():
        remote = Remote(service.session_address, session="cuda")
        model = Model(args.layers, args.device, remote)
        # batched_mm copies the weights of every row's experts, which takes far longer than anything else with many rows.
        cases = [(batch, way) for batch in args.batches for way in WAYS if batch <= 8 or way != "local batched_mm"]
        decoders = {}
        for batch, way in cases:
            model.use("local grouped_mm")
            decoders[batch, way] = decode.Decoder(model.model, batch, args.prompt, args.rounds * (args.steps + 1), args.device)
            model.use(way)
            decoders[batch, way].step()
        torch.cuda.synchronize()
        cores = sorted(os.sched_getaffinity(0))
        for layout in ("free", "apart"):
            if layout == "apart":
                pin(os.getpid(), cores[len(cores) // 2 :])
                pin(service.process.pid, cores[: len(cores) // 2])
            times, inside = collections.defaultdict(list), collections.defaultdict(list)
            for _ in range(args.rounds):
                for case in cases:
                    model.use(case[1])
                    decoders[case].step()
                    torch.cuda.synchronize()
                    model.seconds = 0.0
                    times[case] += decoders[case].times(decoders[case].step, args.steps, args.device)
                    inside[case].append(1e3 * model.seconds / args.steps)
            for batch, way in cases:
                found = sorted(times[batch, way])
                line = {
                    "layout": layout,
                    "batch": batch,
                    "way": way,
                    "step_ms": round(statistics.median(found), 2),
                    "step_ms_10_90": [round(found[len(found) // 10], 2), round(found[-1 - len(found) // 10], 2)],
                    "host_in_blocks_ms": round(statistics.median(inside[batch, way]), 2),
                }
                print(json.dumps(line), flush=True)
        remote.client.synchronize()


if __name__ == "__main__":
    main()
