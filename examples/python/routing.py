#!/usr/bin/env python3
"""Pictures of a model's routing: the load of each expert in each layer, and the weights of a few tokens.

Makes a random checkpoint, serves it, sends the same tokens through every MoE layer, and writes `routing.png`. Needs
`pip install './python[numpy]' matplotlib`.
"""

import pathlib
import subprocess
import sys
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import expertd

TOKENS = 2048


def make_checkpoint(folder):
    synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", folder]
    sizes = ["--hidden", "256", "--experts", "32", "--top-k", "4", "--width", "64", "--layers", "8"]
    subprocess.run([*synth, *sizes], check=True)


def route(client, model, rows):
    """Ids and weights `[layers, tokens, k]` that each layer's gate chooses for the rows."""
    routings = [client.forward(layer.layer, rows, return_routing=True).receipt for layer in model.moe_layers]
    return tuple(np.stack([np.asarray(getattr(r, name)) for r in routings]) for name in ("topk_ids", "topk_weights"))


def draw(ids, weights, experts, path):
    layers = len(ids)
    load = np.stack([np.bincount(of_layer.reshape(-1), minlength=experts) for of_layer in ids])
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    picture = left.imshow(load / load.mean(), aspect="auto", cmap="viridis")
    left.set(title="load of each expert (1 = even)", xlabel="expert", ylabel="layer", yticks=range(layers))
    figure.colorbar(picture, ax=left)
    chosen = np.zeros((32, experts))
    np.put_along_axis(chosen, ids[0, :32], weights[0, :32], axis=1)
    picture = right.imshow(chosen, aspect="auto", cmap="magma")
    right.set(title="weights of 32 tokens, first layer", xlabel="expert", ylabel="token")
    figure.colorbar(picture, ax=right)
    figure.savefig(path, dpi=120)
    return load


def main():
    path = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "routing.png")
    with tempfile.TemporaryDirectory() as parent:
        folder = str(pathlib.Path(parent) / "checkpoint")
        make_checkpoint(folder)
        with expertd.serve(folder, ranks=2) as service, service.client(session="host") as client:
            model = client.model()
            rows = np.random.default_rng(0).standard_normal((TOKENS, model.hidden)).astype(np.float32)
            ids, weights = route(client, model, rows)
    load = draw(ids, weights, model.moe_layers[0].num_experts, path)
    busiest = load.max(axis=1) / load.mean(axis=1)
    print(f"{TOKENS} tokens, {len(ids)} layers: the busiest expert has {busiest.min():.2f} to {busiest.max():.2f} times its share")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
