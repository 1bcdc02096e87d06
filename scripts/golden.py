#!/usr/bin/env python3
"""Makes checkpoints of many shapes with Hugging Face transformers and records their MoE blocks.

    python scripts/golden.py OUT [--only SUBSTRING] [--random N]
    EXPERTD_GOLDEN=OUT cargo test --test checkpoints golden_block

    EXPERTD_SYNTH_OUT=OUT cargo test --test checkpoints synth
    python scripts/golden.py OUT --record
    EXPERTD_GOLDEN=OUT cargo test --test checkpoints golden_block

Each folder gets the files of `save_pretrained` and a `golden.safetensors` like those in tests/fixtures/golden, recorded in
float32 from the checkpoint after it was loaded back from disk. With --record, the script records existing checkpoints; it
dequantises quantised ones with PyTorch into a float32 copy and runs the copy.

    python scripts/golden.py OUT --compress

makes small checkpoints whose experts the compressed-tensors library quantises, one in each of its formats, and records them;
--blocks makes them in FP8 with narrow blocks, and with shared experts whose matrices differ in format. Needs torch, transformers and
safetensors; compressed-tensors for its formats.
"""

import argparse
import contextlib
import json
import math
import pathlib
import random
import tempfile

import torch
import transformers
from golden_families import (
    ALIASES, CHOICES, COMMON, FAMILIES, NESTED, NUMBERED, PLAIN, TINY, nested_config, sized)
from golden_formats import BLOCKS, FP4, LIBRARY, SIZES, blocks_of_experts, compress_experts, dequantise_modules, fuse
from safetensors.torch import load_file, save_file


def blocks(model):
    """Yields (layer number, MoE block, gate) of the text model."""
    for name, module in model.named_modules():
        if name.endswith(".layers") and "visual" not in name and "vision" not in name:
            for number, layer in enumerate(module):
                for attribute in ("mlp", "feed_forward", "block_sparse_moe"):
                    block = getattr(layer, attribute, None)
                    if block is not None and hasattr(block, "experts"):
                        yield number, block, getattr(block, "gate", None) or block.router


def randomise(model, seed):
    """Sets the weights of MoE blocks to random values that are large enough for every part of the arithmetic to matter."""
    generator = torch.Generator().manual_seed(seed)
    for _, block, _ in blocks(model):
        tensors = list(block.named_parameters()) + list(block.named_buffers())
        for name, tensor in tensors:
            if tensor.dtype == torch.long:
                experts = block.experts.num_experts
                rows = [torch.randperm(experts, generator=generator)[: tensor.shape[1]] for _ in range(len(tensor))]
                tensor.data.copy_(torch.stack(rows))
                continue
            scale = 0.3 if tensor.dim() < 2 or "bias" in name else 1.5 / math.sqrt(min(tensor.shape[-2:]))
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * scale)


def record(model, ids):
    out = {}
    hooks = []
    for number, block, gate in blocks(model):
        def on_block(_, args, kwargs, result, number=number):
            result = result[0] if isinstance(result, tuple) else result
            given = args[0] if args else kwargs["hidden_states"]
            width = given.shape[-1]
            out[f"layers.{number}.input"] = given.detach().reshape(-1, width).clone().contiguous()
            out[f"layers.{number}.output"] = result.detach().reshape(-1, width).clone().contiguous()

        # Some blocks scale the sum of the experts instead of the weights.
        scale = 1.0 if hasattr(gate, "routed_scaling_factor") else getattr(block, "routed_scaling_factor", 1.0)

        def on_gate(_, args, result, number=number, scale=scale):
            if isinstance(result, tuple) and len(result) == 3:
                out[f"layers.{number}.topk_weights"] = (result[1].detach().float() * scale).contiguous()
                out[f"layers.{number}.topk_ids"] = result[2].detach().to(torch.int32).clone().contiguous()

        hooks.append(block.register_forward_hook(on_block, with_kwargs=True))
        hooks.append(gate.register_forward_hook(on_gate))
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    out["input_ids"] = ids.clone()
    return out


def auto_class(config):
    """The class that loads a checkpoint with this config: one for text, or one for text and images."""
    auto = transformers.AutoModelForCausalLM
    known = type(config).__name__ in {c.__name__ for c in auto._model_mapping}
    nested = getattr(config, "text_config", None) is not None and config.text_config is not config
    return auto if known and not nested else transformers.AutoModelForImageTextToText


def make(folder, config, dtype, shard, seed):
    torch.manual_seed(seed)
    auto = auto_class(config)
    model = auto.from_config(config).eval()
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    model = auto.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.randint(3, 97, (1, 13), generator=torch.Generator().manual_seed(seed))
    save_file(record(model, ids), folder / "golden.safetensors")


def dequantise(tensors, transposed, block):
    """Returns float32 tensors with the names of an unquantised checkpoint."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(("_scale_inv", "_scale", "_scales")):
            continue
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            low, high = FP4[(tensor & 15).long()], FP4[(tensor >> 4).long()]
            values = torch.stack([low, high], dim=-1).flatten(-2)
            exponents = tensors[stem + "_scales"].double() - 127
            values = (values * torch.exp2(exponents)[..., None]).flatten(-2)
            out[stem] = (values.transpose(1, 2) if transposed else values).float().contiguous()
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = tensors.get(name + "_scale_inv", tensors.get(name + "_scale")).double()
            rows, cols = tensor.shape[-2:]
            for dim, size, of in ((-2, rows, block[0]), (-1, cols, block[1])):
                if scale.shape[dim] not in (1, size):
                    scale = scale.repeat_interleave(of, dim).narrow(dim, 0, size)
            values = tensor.double() * scale
            fused = tensor.dim() == 3 and transposed
            out[name] = (values.transpose(1, 2) if fused else values).float().contiguous()
        else:
            out[name] = tensor.float()
    return out


def unfuse(tensors, config):
    """Splits fused experts, for families whose unquantised checkpoints store each expert by itself."""
    numbered = config["model_type"] in NUMBERED
    gate, up, down = ("w1", "w3", "w2") if numbered else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".experts.")
        if leaf == "gate_up_proj":
            for e, matrix in enumerate(tensor):
                out[f"{stem}.experts.{e}.{gate}.weight"], out[f"{stem}.experts.{e}.{up}.weight"] = (
                    part.contiguous() for part in matrix.chunk(2))
        elif leaf == "down_proj":
            for e, matrix in enumerate(tensor):
                out[f"{stem}.experts.{e}.{down}.weight"] = matrix.contiguous()
        else:
            out[name] = tensor
    return out


def record_folder(folder):
    """Records golden data of an existing checkpoint. Weights outside of MoE blocks are the same in every run."""
    torch.manual_seed(1)
    with dequantised(folder) as copy:
        save_file(record(load(copy), token_ids(13)), folder / "golden.safetensors")


@contextlib.contextmanager
def dequantised(folder):
    """A folder with the checkpoint in float32, or the checkpoint itself if it is not quantised."""
    config = json.loads((folder / "config.json").read_text())
    declared = config.pop("quantization_config", None)
    if declared is None:
        yield folder
        return
    tensors = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    kind = config["model_type"]
    block = declared.get("weight_block_size") or [128, 128]
    tensors = dequantise(dequantise_modules(tensors, declared), kind in ("gpt_oss", "llama4_text"), block)
    if kind not in ("gpt_oss", "llama4_text", "granitemoe", "mistral4"):
        tensors = unfuse(tensors, config)
    elif any(".experts.0." in name for name in tensors):
        tensors = fuse(tensors, kind)
    with tempfile.TemporaryDirectory() as copy:
        copy = pathlib.Path(copy)
        (copy / "config.json").write_text(json.dumps(config))
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        yield copy


def compress(folder, kind):
    """Makes a small checkpoint in one of compressed-tensors' formats, with the library's own tensors, and records it."""
    hidden, width = SIZES.get(kind, (64, 96))
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", **TINY, **sized(PLAIN, (hidden, 4, 2, width)), intermediate_size=96, norm_topk_prob=True)
    quantised(folder, config, len(kind), lambda tensors: compress_experts(tensors, kind))


def in_blocks(folder, kind):
    """Makes a small checkpoint in FP8 with blocks of a given size, and records it."""
    family, block, plain, seed = BLOCKS[kind]
    names, extra, _ = FAMILIES[family]
    shared = dict(
        deepseek_v3=dict(first_k_dense_replace=0, n_shared_experts=1), qwen2_moe=dict(shared_expert_intermediate_size=136))
    options = {**TINY, **extra, **sized(names, (72, 6, 2, 136)), **shared[family], "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(family, **options)
    quantised(folder, config, seed, lambda tensors: blocks_of_experts(tensors, block, plain))


def quantised(folder, config, seed, quantise):
    """Writes a random model of one layer whose tensors `quantise` has replaced, and records it."""
    config.num_hidden_layers = 1
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if ".mlp." in name}
    tensors, declared = quantise(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": declared}, indent=2) + "\n")
    record_folder(folder)


def load(folder):
    """The model of a float32 checkpoint; weights outside of MoE blocks may be missing and are random then."""
    model, info = auto_class(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, experts_implementation="eager")
    missing = [key for key in (*info["missing_keys"], *info["mismatched_keys"]) if "expert" in str(key) or "router" in str(key)
            or ".gate." in str(key) or "tid2eid" in str(key)]
    if missing or info["unexpected_keys"]:
        raise RuntimeError(f"missing {missing}, unexpected {info['unexpected_keys']}")
    return model.eval()


def token_ids(count):
    return torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(1))


def cases():
    for family, (names, extra, variants) in FAMILIES.items():
        for name, sizes, dtype, shard in COMMON:
            config = {**TINY, **extra, **sized(names, sizes)}
            if family == "olmoe":
                config["head_dim"] = sizes[0] // 4
            yield f"{family}-{name}", (lambda f=family, c=config: transformers.AutoConfig.for_model(f, **c)), dtype, shard
        for name, sizes, overrides in variants:
            config = {**TINY, **extra, **sized(names, sizes), **overrides}
            make_config = lambda f=family, c=config: transformers.AutoConfig.for_model(f, **c)
            yield f"{family}-{name}", make_config, torch.bfloat16, "50GB"
    for family, (names, extra) in ALIASES.items():
        config = {**TINY, **extra, **sized(names, (64, 12, 3, 40))}
        yield family, (lambda f=family, c=config: transformers.AutoConfig.for_model(f, **c)), torch.float32, "50GB"
    for outer, (text_type, names, extra, variants) in NESTED.items():
        for name, sizes, overrides in [("", (64, 12, 3, 40), {}), *variants]:
            text = {**TINY, **extra, **sized(names, sizes), **overrides}
            make_config = lambda o=outer, t=text_type, c=text: nested_config(o, t, c)
            dtype = torch.bfloat16 if name else torch.float32
            yield f"{outer}-nested{name and '-' + name}", make_config, dtype, "50GB"


def random_cases(count, seed):
    """Yields `count` cases of every family with random sizes and options."""
    dice = random.Random(seed)
    plain = [(family, None, names, extra) for family, (names, extra, _) in FAMILIES.items()]
    nested = [(text, outer, names, extra) for outer, (text, names, extra, variants) in NESTED.items() if variants]
    for family, outer, names, extra in plain + nested:
        fields = set(transformers.AutoConfig.for_model(family).to_dict())
        for number in range(count):
            groups = dice.choice([1, 2, 4])
            per_group = dice.randint(3, 12)
            experts = groups * per_group
            kept = dice.randint(1, groups)
            k = dice.randint(1, min(8, kept * per_group))
            sizes = (dice.choice([32, 48, 64, 96, 136]), experts, k, dice.choice([8, 24, 33, 64, 100]))
            config = {**TINY, **extra, **sized(names, sizes)}
            if family == "olmoe":
                config["head_dim"] = sizes[0] // 4
            for field, values in CHOICES.items():
                if field in fields and dice.random() < 0.7:
                    config[field] = dice.choice(values)
            if fields & {"n_group", "num_expert_group"}:
                config |= dict(n_group=groups, topk_group=kept)
            if family == "deepseek_v2":
                config["topk_method"] = dice.choice(["greedy", "group_limited_greedy"])
            dtype = dice.choice([torch.float32, torch.bfloat16, torch.float16])
            shard = dice.choice(["50GB", "60KB"])
            if outer is None:
                make_config = lambda f=family, c=config: transformers.AutoConfig.for_model(f, **c)
            else:
                config["hidden_size"] = 64
                make_config = lambda o=outer, t=family, c=config: nested_config(o, t, c)
            yield f"{family}-random{number}", make_config, dtype, shard


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="make only folders whose name contains this text")
    parser.add_argument("--record", action="store_true", help="record the existing checkpoints in OUT")
    parser.add_argument("--compress", action="store_true", help="make checkpoints in the formats of compressed-tensors instead")
    parser.add_argument("--blocks", action="store_true", help="make checkpoints in FP8 of the kinds in `BLOCKS` instead")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="make N random checkpoints of each family instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random checkpoints")
    arguments = parser.parse_args()
    if arguments.record:
        for folder in sorted(path.parent for path in arguments.out.glob("*/config.json")):
            if arguments.only in folder.name:
                attempt(folder.name, lambda: record_folder(folder))
        return
    if arguments.compress:
        for kind in (kind for kind in LIBRARY if arguments.only in kind):
            folder = arguments.out / f"qwen3_moe-{kind}-library"
            folder.mkdir(parents=True, exist_ok=True)
            attempt(folder.name, lambda: compress(folder, kind))
        return
    if arguments.blocks:
        for kind in (kind for kind in BLOCKS if arguments.only in kind):
            folder = arguments.out / kind
            folder.mkdir(parents=True, exist_ok=True)
            attempt(kind, lambda: in_blocks(folder, kind))
        return
    listed = random_cases(arguments.random, arguments.seed) if arguments.random else cases()
    for number, (name, config, dtype, shard) in enumerate(listed):
        if arguments.only not in name:
            continue
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        attempt(name, lambda: make(folder, config(), dtype, shard, 1000 + number + 7919 * arguments.seed))


def attempt(name, work):
    """Prints a failure and continues, because the reference cannot run every random configuration."""
    try:
        work()
        print(f"{name}: ok", flush=True)
    except Exception as error:
        print(f"{name}: FAILED: {type(error).__name__}: {str(error)[:400]}", flush=True)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
