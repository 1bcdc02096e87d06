#!/usr/bin/env python3
"""Decode steps of a Hugging Face model whose experts are local, offloaded, or served by expertd on another GPU or on CPU cores.

The model has the shape of Qwen3-30B-A3B and random weights. The ways to compute its MoE blocks take turns in one process, with the
same attention, a static cache and batches of random prompts. Prints one JSON line per measurement. Needs two GPUs, torch,
transformers, and accelerate for the way "offload".

    loadtest/peers/python/decode.py --folder /dev/shm/qwen --batches 1 8 64
"""

import argparse
import concurrent.futures
import contextlib
import json
import pathlib
import re
import statistics
import struct
import subprocess
import time

import torch
import transformers

import expertd
from expertd._torch import Remote
from expertd.transformers._modules import RemoteBlock, RemoteExperts

SHAPE = {"hidden": 2048, "experts": 128, "width": 768, "top-k": 8}


def make_checkpoint(folder, layers):
    """The service's checkpoint: one layer from `expertd synth`, and copies of its file under the names of the other layers.

    All layers have the same weights, which the service packs once for each of them.
    """
    one = folder.parent / (folder.name + "-one")
    arguments = [part for name, value in SHAPE.items() for part in (f"--{name}", str(value))]
    synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", str(one), "--layers", "1", "--dtype", "bf16"]
    subprocess.run([*synth, *arguments], check=True)
    [source] = one.glob("*.safetensors")
    data = source.read_bytes()
    [length] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = memoryview(data)[8 + length :]
    folder.mkdir()

    def write(layer):
        names = {re.sub(r"layers\.0\.", f"layers.{layer}.", name): value for name, value in header.items()}
        if layer > 0:
            names = {name: value for name, value in names.items() if ".layers." in name or name == "__metadata__"}
        text = json.dumps(names).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"layer-{layer:03}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.write(body)
        return [name for name in names if name != "__metadata__"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        written = list(pool.map(write, range(layers)))
    index = {name: f"layer-{layer:03}.safetensors" for layer, names in enumerate(written) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((one / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    subprocess.run(["rm", "-r", str(one)], check=True)


def make_model(layers, device):
    """The whole model with random weights on one GPU."""
    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=SHAPE["hidden"],
        num_experts=SHAPE["experts"],
        moe_intermediate_size=SHAPE["width"],
        num_experts_per_tok=SHAPE["top-k"],
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=4096,
        norm_topk_prob=True,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


class Decoder:
    """Greedy decoding with a static cache, one step at a time or as a CUDA graph."""

    def __init__(self, model, batch, prompt, steps, device):
        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=prompt + 4 * steps + 16)
        self.position = torch.full((1, 1), prompt, device=device)
        ids = torch.randint(model.config.vocab_size, (batch, prompt), device=device)
        positions = torch.arange(prompt, device=device)[None]
        logits = model(input_ids=ids, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.logits = logits[:, -1].clone()
        self.token = self.logits.argmax(-1, keepdim=True)

    def step(self):
        out = self.model(
            input_ids=self.token, position_ids=self.position, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.logits.copy_(out.logits[:, -1])
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def times(self, step, steps, device):
        """Milliseconds of each step; the host reads the tokens after each, as `generate` does to find the end of a text."""
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            self.token.cpu()
            found.append(1e3 * (time.perf_counter() - start))
        # Calls that fail leave NaN.
        assert torch.isfinite(self.logits).all()
        return found


def measure(name, model, batch, args, graphed):
    device = torch.device(args.device)
    # batched_mm copies the weights of every row's experts, for which prompts have too many rows.
    model.set_experts_implementation("grouped_mm")
    decoder = Decoder(model, batch, args.prompt, args.steps, device)
    model.set_experts_implementation(args.implementation)
    step = decoder.step
    for _ in range(args.warm_up):
        step()
    torch.cuda.synchronize(device)
    if graphed:
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
        step()
    times = decoder.times(step, args.steps, device)
    median = statistics.median(times)
    line = {
        "way": name,
        "graph": graphed,
        "batch": batch,
        "step_ms": round(median, 3),
        "step_ms_10_90": [round(x, 3) for x in (sorted(times)[len(times) // 10], sorted(times)[-1 - len(times) // 10])],
        "tokens_per_second": round(1e3 * batch / median, 1),
    }
    print(json.dumps(line), flush=True)
    return line


def attempt(name, model, args, graphed=False, **changes):
    """Measures one way at all batches; prints the error of a way that fails, so that the others go on."""
    for batch in args.batches:
        try:
            given = argparse.Namespace(**{**vars(args), **changes})
            with torch.no_grad():
                measure(name, model, batch, given, graphed)
        except Exception as error:
            print(json.dumps({"way": name, "graph": graphed, "batch": batch, "error": f"{type(error).__name__}: {error}"[:400]}), flush=True)


def expect_same(blocks, rows, expected):
    """The blocks must give what the first way gave for the same rows; all ways but "local" have the service's weights."""
    with torch.no_grad():
        found = torch.stack([block(rows) for block in blocks])
    if expected is not None:
        error = ((found - expected).float().norm() / expected.float().norm()).item()
        assert error < 2e-2, error
    return found


def use_remote(model, blocks, remote, mode):
    """Puts the modules in place that `remote_experts` puts there."""
    for number, (layer, block) in enumerate(zip(model.model.layers, blocks, strict=True)):
        served = remote.layer(number)
        if mode == "block":
            layer.mlp = RemoteBlock(remote, served, pair=False).eval()
        else:
            block.experts = RemoteExperts(remote, served).eval()
            layer.mlp = block


def use_local(model, blocks, experts):
    for layer, block, kept in zip(model.model.layers, blocks, experts, strict=True):
        block.experts = kept
        layer.mlp = block


@contextlib.contextmanager
def offloaded(model, device):
    """Experts in host memory, copied to the GPU by accelerate whenever they are used."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    for layer in model.model.layers:
        cpu_offload(layer.mlp.experts, execution_device=device)
    yield
    for layer in model.model.layers:
        remove_hook_from_submodules(layer.mlp.experts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="the service's checkpoint; made if it does not exist")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--device", default="cuda:1", help="GPU of attention; the service's rank is on GPU 0")
    parser.add_argument("--ways", nargs="+", default=["local", "cuda", "host", "grpc", "cpu", "offload"])
    args = parser.parse_args()
    args.implementation = "batched_mm"
    torch.cuda.set_device(args.device)
    began = time.monotonic()

    def note(text):
        print(f"# {time.monotonic() - began:.0f} s: {text}", flush=True)

    if not args.folder.exists():
        make_checkpoint(args.folder, args.layers)
    note("checkpoint written")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        served = {"cuda", "host", "grpc"} & set(args.ways)
        starting = pool.submit(expertd.serve, args.folder, device="cuda", ranks=1) if served else None
        model = make_model(args.layers, args.device)
        note("model made")
        blocks = [layer.mlp for layer in model.model.layers]
        kept = [block.experts for block in blocks]
        rows, expected = torch.randn(1, 16, SHAPE["hidden"], device=args.device, dtype=torch.bfloat16), None
        with starting.result() if starting else contextlib.nullcontext() as service:
            note("service ready")
            if "local" in args.ways:
                for implementation in ("batched_mm", "grouped_mm"):
                    for graphed in (False, True):
                        attempt(f"local {implementation}", model, args, graphed, implementation=implementation)
                note("local measured")
            for way in ("cuda", "host", "grpc"):
                if way in args.ways:
                    session = None if way == "grpc" else way
                    remote = Remote(service.session_address if session else service.address, session=session)
                    for mode in ("block", "experts"):
                        use_remote(model, blocks, remote, mode)
                        if mode == "block":
                            expected = expect_same([layer.mlp for layer in model.model.layers[:2]], rows, expected)
                        attempt(f"{way} {mode}", model, args)
                        if way == "cuda":
                            attempt(f"{way} {mode}", model, args, graphed=True)
                    note(f"{way} measured")
        use_local(model, blocks, kept)
    if "cpu" in args.ways:
        with expertd.serve(args.folder, device="cpu") as service:
            note("CPU service ready")
            remote = Remote(service.session_address, session="host")
            use_remote(model, blocks, remote, "block")
            expect_same([layer.mlp for layer in model.model.layers[:2]], rows, expected)
            attempt("cpu ranks, host block", model, args)
        note("CPU ranks measured")
        use_local(model, blocks, kept)
    if "offload" in args.ways:
        with offloaded(model, args.device):
            note("experts offloaded")
            # Each step copies all experts, whatever the batch.
            attempt("offload", model, args, steps=2, warm_up=0, prompt=1)
        note("offload measured")


if __name__ == "__main__":
    main()
