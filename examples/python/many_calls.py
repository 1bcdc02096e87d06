#!/usr/bin/env python3
"""Many calls in flight from asyncio: batches of random sizes through every MoE layer of a random checkpoint.

Needs `pip install './python[numpy]'`. With `--session` rows go through memory that the service shares.
"""

import asyncio
import collections
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

import expertd

CALLS = 400


def make_checkpoint(folder):
    synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", folder]
    sizes = ["--hidden", "256", "--experts", "32", "--top-k", "4", "--width", "192", "--layers", "3"]
    subprocess.run([*synth, *sizes], check=True)


async def one(stream, model, random, load):
    layer = model.moe_layers[random.integers(len(model.moe_layers))].layer
    rows = random.standard_normal((random.integers(1, 17), model.hidden)).astype(np.float32)
    answer = await stream.forward(layer, rows, timeout=30, return_routing=True)
    load.update(np.asarray(answer.receipt.topk_ids).reshape(-1).tolist())
    return len(rows), answer.receipt.steps


async def call_all(service, session):
    random = np.random.default_rng(0)
    load = collections.Counter()
    address = service.session_address if session else service.address
    async with expertd.AsyncClient(address, session=session) as client:
        model = await client.model()
        async with client.stream() as stream:
            results = await asyncio.gather(*(one(stream, model, random, load) for _ in range(CALLS)))
    tokens = sum(count for count, _ in results)
    steps = {step for _, steps in results for step in steps}
    print(f"{CALLS} calls with {tokens} tokens were answered in {len(steps)} steps")
    most = max(load.values())
    for expert in range(model.moe_layers[0].num_experts):
        print(f"expert {expert:2} {load[expert]:4} {'#' * (40 * load[expert] // most)}")


def main():
    with tempfile.TemporaryDirectory() as parent:
        folder = str(pathlib.Path(parent) / "checkpoint")
        make_checkpoint(folder)
        with expertd.serve(folder, ranks=2) as service:
            asyncio.run(call_all(service, session="host" if "--session" in sys.argv else None))


if __name__ == "__main__":
    main()
