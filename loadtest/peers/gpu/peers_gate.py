#!/usr/bin/env python3
"""Times the peers' gate alone, in graphs like those of the peers, whose times contain it.

peers_gate.py [--shape S] [--tokens T ...] [--steps N] [--replays N]
"""

import statistics
import types

import torch

import layer as common


def main():
    args = common.arguments(__doc__, ("bf16",)).parse_args()
    world, shape = common.World(), common.SHAPES[args.shape]
    gate = torch.randn(shape.experts, shape.hidden, device=world.device).mul_(shape.hidden**-0.5).bfloat16()
    layer = types.SimpleNamespace(shape=shape, gate=gate, gate_bias=None)
    with torch.inference_mode():
        for tokens in args.tokens:
            rows = torch.empty(args.steps, tokens, shape.hidden, device=world.device, dtype=torch.bfloat16)
            enqueue = lambda: [common.Layer.route(layer, row) for row in rows]
            times, _, _ = common.replay_times(world, enqueue, rows.normal_, args.replays, args.steps)
            print(f"{args.shape}: {tokens} rows: {statistics.median(times):.1f} us", flush=True)


if __name__ == "__main__":
    main()
