#!/usr/bin/env python3
"""Compares FP8 products with float32 on the dequantised weights: transformers' own FP8 path, expertd's definition, and services.

    git clone https://github.com/huggingface/kernels-community && git -C kernels-community checkout 40d4194f
    EXPERTD_BINARY=target/release/expertd python scripts/fp8_accuracy.py OUT \\
        --kernels kernels-community/finegrained-fp8/torch-ext [--weights gaussian] [--sizes odd] [--only SUBSTRING]
    python scripts/fp8_accuracy.py DIR --kernels … --record

For each family, the first form writes a checkpoint below OUT with `expertd synth --dtype fp8` and gives it other weights if asked to.
It prints the relative L2 error of rows of each path against transformers in float32, root mean square and worst, and keeps it in
OUT/*.json. All paths get the same rows, which bf16 holds exactly, and the routing that float32 chose. The paths are

* transformers: its FP8 modules and the Triton kernels that it loads from the hub, run by Triton's interpreter. Where it cannot run the
  checkpoint: the same arithmetic in PyTorch, marked with *; with scales per channel that of its fbgemm path
* definition: what docs/models.md says of FP8 products, with the roundings of GPU ranks (docs/gpu.md), in PyTorch
* served: `expertd serve` on CPU ranks with each --fp8-compute

With --record, each FP8 checkpoint in DIR gets `transformers-fp8.safetensors`: rows, routing and outputs of transformers' path.
`expertd verify --golden FILE --routing recorded --tolerance 6e-2` compares a service with it.
Needs torch, triton 3.7 (3.9 refuses the grouped kernels), transformers, accelerate, safetensors and the `expertd` Python package.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

import fp8_paths
import golden
import numpy as np
import torch
import transformers
from fp8_paths import Arithmetic
from safetensors.torch import load_file, save_file

import expertd

# Sizes (hidden, width): multiples of 128, not, and those of Qwen3-30B-A3B.
SIZES = {"even": (256, 384), "odd": (200, 176), "large": (2048, 768)}
EXPERTS, LAYERS, TOKENS = 8, 3, 64


def synthesise(family, sizes, folder):
    hidden, width = sizes
    command = [expertd._serve.command(), "synth", "--family", family, "--out", folder, "--dtype", "fp8", "--hidden", hidden,
               "--width", width, "--experts", EXPERTS, "--top-k", 2, "--layers", LAYERS, "--seed", 3]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


def quantise(values, rows, columns, power_of_two):
    """e4m3 codes and a scale for each block: its largest magnitude / 448, rounded up to a power of two if asked for."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % columns, 0, -values.shape[-2] % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    scale = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=1e-12) / 448
    if power_of_two:
        scale = torch.exp2(torch.log2(scale.double()).ceil()).float()
    codes = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-4, -3).flatten(-2)
    return codes[..., : values.shape[-2], : values.shape[-1]].contiguous().view(torch.float8_e4m3fn), scale[..., 0, :, 0]


def replace_weights(folder, kind):
    """Gives the checkpoint other FP8 weights, of the same deviation.

    gaussian: normal values, quantised. ue8m0: likewise, with scales that are powers of two. channel: likewise, with a scale for each
    row. codes: all codes that are numbers are equally likely, and so are scales between half of their mean and three halves."""
    generator = torch.Generator().manual_seed(7)
    (file,) = folder.glob("model*.safetensors")
    tensors = load_file(file)
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]:
        suffix = "_scale_inv" if name + "_scale_inv" in tensors else "_scale"
        old, scale = tensors[name], tensors.pop(name + suffix)
        deviation = old.float().std() * scale.float().mean()
        if kind == "codes":
            codes = torch.randint(0, 254, old.shape, generator=generator, dtype=torch.uint8)
            codes += codes >= 127
            codes = codes.view(torch.float8_e4m3fn)
            scale = (0.5 + torch.rand(scale.shape, generator=generator)) * deviation / codes.float().std()
        else:
            by_row = kind == "channel" or suffix == "_scale"
            values = torch.randn(old.shape, generator=generator) * deviation
            codes, scale = quantise(values, *((1, old.shape[-1]) if by_row else (128, 128)), kind == "ue8m0")
            suffix = "_scale" if by_row else suffix
        tensors |= {name: codes, name + suffix: scale.contiguous()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if kind == "ue8m0" and config["quantization_config"]["quant_method"] == "fp8":
        config["quantization_config"]["scale_fmt"] = "ue8m0"
    if kind == "channel":
        weights = dict(num_bits=8, type="float", strategy="channel", symmetric=True, dynamic=False)
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["re:.*gate$", "re:.*router", "lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class Block:
    """An MoE block of the float32 model with rows, the gate's answer to them, and the output."""

    def __init__(self, layer, block, gate, arguments, options):
        self.layer, self.block, self.options = layer, block, options
        self.rows = (arguments[0] if arguments else options["hidden_states"]).detach().bfloat16().float()
        self.routed = self.ids = None

        def on_gate(_, __, result):
            self.routed = result

        def on_experts(_, given):
            if len(given) == 3:
                _, self.ids, self.weights = given

        hooks = [gate.register_forward_hook(on_gate), block.experts.register_forward_pre_hook(on_experts)]
        self.expected = self.run(block, gate, torch.float32)
        for hook in hooks:
            hook.remove()
        if self.ids is None:
            # Llama 4's experts get no ids: a score that is not 0 means that the expert is chosen.
            self.weights, self.ids = self.routed[0].topk(int((self.routed[0][0] != 0).sum()), dim=-1)

    def run(self, block, gate, dtype):
        """The output of another form of the block, with the same routing."""
        routed = self.routed

        def answer(_, __, result):
            if routed is None:
                return None
            if torch.is_tensor(result):
                return routed.to(result.dtype)
            return tuple(ours.to(theirs.dtype) for ours, theirs in zip(routed, result))

        hook = gate.register_forward_hook(answer)
        options = {key: value for key, value in self.options.items() if key != "hidden_states"}
        with torch.no_grad():
            out = block(self.rows.to(dtype), **options)
        hook.remove()
        out = out[0] if isinstance(out, tuple) else out
        return out.float().reshape(-1, out.shape[-1])

    def with_arithmetic(self, arithmetic):
        changed = fp8_paths.with_arithmetic(self.block, arithmetic)
        gate = getattr(changed, "gate", None) or changed.router
        return self.run(changed, gate, torch.bfloat16 if arithmetic.rounded else torch.float32)


def blocks_of(model, tokens):
    """The MoE blocks of a float32 model, with the rows that reach them."""
    calls, hooks = {}, []
    for number, block, _ in golden.blocks(model):
        def keep(_, arguments, options, number=number):
            calls[number] = arguments, options
        hooks.append(block.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(input_ids=golden.token_ids(tokens))
    for hook in hooks:
        hook.remove()
    return [Block(number, block, gate, *calls[number]) for number, block, gate in golden.blocks(model)]


def declared(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def by_row_scales(folder):
    return declared(folder)["quant_method"] == "compressed-tensors"


def transformers_outputs(folder, model, blocks, implementation):
    """Outputs of transformers' FP8 path by layer, and how they were computed. The eager implementation takes some sizes that others
    refuse."""
    by_row, reasons = by_row_scales(folder), []
    for way in [] if by_row else dict.fromkeys((implementation, "eager")):
        try:
            with tempfile.TemporaryDirectory() as scratch:
                quantised = fp8_paths.load_fp8(folder, model, pathlib.Path(scratch), way)
            gates = {number: (block, gate) for number, block, gate in golden.blocks(quantised)}
            return {block.layer: block.run(*gates[block.layer], torch.bfloat16) for block in blocks}, way
        except Exception as error:
            reasons.append(f"{way}: {type(error).__name__}: {str(error)[:200]}")
    arithmetic = Arithmetic(group=0 if by_row else 128, rounded=True)
    return {block.layer: block.with_arithmetic(arithmetic) for block in blocks}, f"emulated. {' '.join(reasons)}"


def served_outputs(folder, blocks, compute):
    """Outputs of a service on CPU ranks; None if the command refuses `compute` there."""
    try:
        service = expertd.serve(folder, ranks=2, device="cpu", fp8_compute=compute)
    except expertd.ServiceError as error:
        print(f"  --fp8-compute {compute}: {str(error)[-200:]}", flush=True)
        return None
    with service, service.client() as client:
        return {block.layer: torch.from_numpy(np.array(client.forward(
            block.layer, block.rows[0].contiguous().numpy(), topk_ids=block.ids.int().contiguous().numpy(),
            topk_weights=block.weights.float().contiguous().numpy(), token_ids=golden.token_ids(TOKENS)[0].numpy()).rows))
            for block in blocks}


def errors(outputs, expected):
    """Root mean square and largest relative L2 error of the rows of all layers."""
    rows = torch.cat([(outputs[layer] - rows).norm(dim=1) / rows.norm(dim=1) for layer, rows in expected.items()])
    return [rows.square().mean().sqrt().item(), rows.max().item()]


def compare(folder, implementation, services):
    with golden.dequantised(folder) as copy:
        torch.manual_seed(1)
        model = golden.load(copy)
    blocks = blocks_of(model, TOKENS)
    expected = {block.layer: block.expected for block in blocks}
    theirs, way = transformers_outputs(folder, model, blocks, implementation)
    group = 0 if by_row_scales(folder) else 128
    definition = Arithmetic(power_of_two=declared(folder).get("scale_fmt") == "ue8m0")
    paths = {
        "transformers": theirs,
        "emulated": {block.layer: block.with_arithmetic(Arithmetic(group, rounded=True)) for block in blocks},
        "definition": {block.layer: block.with_arithmetic(definition) for block in blocks},
    }
    paths |= {f"served {compute}": served_outputs(folder, blocks, compute) for compute in services}
    found = {name: errors(outputs, expected) for name, outputs in paths.items() if outputs}
    found["emulated, from transformers"] = errors(paths["emulated"], theirs)
    found["definition, from transformers"] = errors(paths["definition"], theirs)
    if paths.get("served fp8"):
        found["served fp8, from transformers"] = errors(paths["served fp8"], theirs)
        found["served fp8, from definition"] = errors(paths["served fp8"], paths["definition"])
    return {"rows": sum(len(rows) for rows in expected.values()), "transformers": way, "errors": found}


def record(folder, implementation):
    with golden.dequantised(folder) as copy:
        torch.manual_seed(1)
        model = golden.load(copy)
    blocks = blocks_of(model, 13)
    outputs, way = transformers_outputs(folder, model, blocks, implementation)
    tensors = {"input_ids": golden.token_ids(13)}
    for block in blocks:
        tensors |= {f"layers.{block.layer}.input": block.rows[0].contiguous(),
                    f"layers.{block.layer}.output": outputs[block.layer].contiguous(),
                    f"layers.{block.layer}.topk_ids": block.ids.int().contiguous(),
                    f"layers.{block.layer}.topk_weights": block.weights.float().contiguous()}
    save_file(tensors, folder / "transformers-fp8.safetensors")
    print(f"{folder.name}: {way}")


def line(name, result):
    cells = [name]
    for path in ("transformers", "definition", "served fp8", "served bf16"):
        found = result["errors"].get(path)
        mark = "*" if path == "transformers" and result["transformers"].startswith("emulated") else ""
        cells.append(f"{found[0]:.2e}{mark}, {found[1]:.2e}" if found else "–")
    return "| " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--kernels", type=pathlib.Path, required=True, help="folder that contains finegrained_fp8")
    parser.add_argument("--weights", choices=["synth", "gaussian", "ue8m0", "channel", "codes"], default="synth")
    parser.add_argument("--sizes", choices=list(SIZES), default="even")
    parser.add_argument("--implementation", default="grouped_mm", help="transformers' experts_implementation")
    parser.add_argument("--services", nargs="*", default=["bf16", "fp8"], metavar="COMPUTE", help="--fp8-compute of services to run")
    parser.add_argument("--only", default="", help="only families, or folders, whose name contains this text")
    parser.add_argument("--record", action="store_true", help="record transformers' outputs of existing checkpoints in OUT")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    fp8_paths.use_kernels(fp8_paths.load_kernels(arguments.kernels))
    if arguments.record:
        for folder in sorted(path.parent for path in arguments.out.glob("*fp8*/config.json")):
            if arguments.only in folder.name and "mxfp8" not in folder.name:
                record(folder, arguments.implementation)
        return
    print("| family | transformers | definition | served fp8 | served bf16 |\n|---|---|---|---|---|")
    for family in (family for family in golden.FAMILIES if arguments.only in family):
        folder = arguments.out / f"{family}-{arguments.weights}-{arguments.sizes}"
        answers = arguments.out / f"{folder.name}.json"
        if not folder.exists():
            synthesise(family, SIZES[arguments.sizes], folder)
            if arguments.weights != "synth":
                replace_weights(folder, arguments.weights)
        if not answers.exists():
            answers.write_text(json.dumps(compare(folder, arguments.implementation, arguments.services), indent=1))
        print(line(family, json.loads(answers.read_text())), flush=True)


if __name__ == "__main__":
    main()
