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

makes small checkpoints whose experts the compressed-tensors library quantises, one in each of its formats, and records them.
Needs torch, transformers and safetensors; compressed-tensors for its formats.
"""

import argparse
import json
import math
import pathlib
import random
import tempfile

import torch
import transformers
from golden_formats import FP4, LIBRARY, SIZES, compress_experts, dequantise_modules, fuse
from safetensors.torch import load_file, save_file

TINY = dict(
    vocab_size=97, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
           num_key_value_heads=4, head_dim=16)
LINEAR = dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
LOCAL = dict(experts="num_local_experts", k="num_experts_per_tok", width="intermediate_size")
PLAIN = dict(experts="num_experts", k="num_experts_per_tok", width="moe_intermediate_size")
DEEP = dict(experts="n_routed_experts", k="num_experts_per_tok", width="moe_intermediate_size")
ERNIE = dict(experts="moe_num_experts", k="moe_k", width="moe_intermediate_size")

# For each family: the names of its sizes, further options of the model, and its variants: (name, sizes, overrides).
# Sizes are (hidden, experts, k, width).
FAMILIES = {
    "mixtral": (LOCAL, {}, []),
    "olmoe": ({**PLAIN, "width": "intermediate_size"}, {}, [("renorm", (64, 12, 4, 40), dict(norm_topk_prob=True))]),
    "qwen2_moe": (PLAIN, dict(shared_expert_intermediate_size=56, intermediate_size=96), [
        ("renorm", (64, 12, 4, 40), dict(norm_topk_prob=True)),
        ("steps", (64, 12, 4, 40), dict(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])),
    ]),
    "qwen3_moe": (PLAIN, dict(intermediate_size=96), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False)),
        ("renorm", (64, 12, 4, 40), dict(norm_topk_prob=True)),
        ("steps", (64, 12, 4, 40), dict(num_hidden_layers=6, decoder_sparse_step=3, mlp_only_layers=[0])),
    ]),
    "qwen3_next": (PLAIN, dict(shared_expert_intermediate_size=24, num_hidden_layers=4, **LINEAR), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, mlp_only_layers=[1])),
    ]),
    "qwen3_5_moe_text": (PLAIN, dict(shared_expert_intermediate_size=24, num_hidden_layers=4, **LINEAR), []),
    "deepseek_v2": (DEEP, dict(topk_method="greedy", first_k_dense_replace=1, **MLA), [
        ("groups", (64, 24, 5, 40), dict(topk_method="group_limited_greedy", n_group=6, topk_group=2,
                                         routed_scaling_factor=16.0, n_shared_experts=1)),
        ("norm", (64, 24, 5, 40), dict(topk_method="group_limited_greedy", n_group=3, topk_group=1,
                                       norm_topk_prob=True, mlp_bias=True)),
    ]),
    "deepseek_v3": (DEEP, dict(n_group=1, topk_group=1, first_k_dense_replace=1, **MLA), [
        ("groups", (64, 24, 6, 40), dict(n_group=6, topk_group=3, routed_scaling_factor=2.827, n_shared_experts=2,
                                         num_hidden_layers=3)),
        ("norenorm", (64, 24, 3, 40), dict(n_group=4, topk_group=2, norm_topk_prob=False, first_k_dense_replace=0)),
    ]),
    "deepseek_v4": (DEEP, dict(num_hidden_layers=4, q_lora_rank=32, o_lora_rank=32, o_groups=2, index_head_dim=32,
                               index_n_heads=4, layer_types=["heavily_compressed_attention"] * 3 +
                               ["compressed_sparse_attention"]), [
        ("sigmoid", (64, 12, 4, 40), dict(scoring_func="sigmoid", swiglu_limit=0.7, routed_scaling_factor=2.5)),
        ("hash1", (64, 12, 4, 40), dict(mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"], n_shared_experts=2,
                                        norm_topk_prob=False)),
        ("bias", (64, 12, 4, 40), dict(mlp_bias=True)),
    ]),
    "dots1": (DEEP, dict(n_shared_experts=2, first_k_dense_replace=1), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, routed_scaling_factor=3.0)),
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, norm_topk_prob=True)),
    ]),
    "ernie4_5_moe": (ERNIE, {}, [
        ("window", (64, 12, 4, 40), dict(num_hidden_layers=7, moe_layer_start_index=2, moe_layer_end_index=5,
                                         moe_layer_interval=2, moe_num_shared_experts=0)),
        ("bias", (64, 12, 4, 40), dict(use_bias=True, moe_layer_end_index=-1, moe_norm_min=0.75)),
    ]),
    "glm4_moe": (DEEP, dict(first_k_dense_replace=1), [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, n_shared_experts=3, routed_scaling_factor=2.5)),
    ]),
    "gpt_oss": (LOCAL, {}, [
        ("clamp", (64, 12, 4, 64), dict(swiglu_limit=0.5, swiglu_alpha=1.3)),
        ("square", (64, 12, 4, 32), {}),
        ("even", (64, 12, 4, 64), {}),
    ]),
    "granitemoe": (LOCAL, {}, [("square", (64, 12, 4, 32), {}), ("even", (64, 12, 4, 64), {})]),
    "llama4_text": (LOCAL, dict(intermediate_size_mlp=96), [
        ("square", (64, 12, 2, 32), {}),
        ("even", (64, 12, 4, 64), {}),
        ("step", (64, 12, 1, 40), dict(num_hidden_layers=4, interleave_moe_layer_step=2)),
        ("listed", (64, 12, 1, 40), dict(num_hidden_layers=4, moe_layers=[0, 3])),
    ]),
    "minimax_m2": (LOCAL, {}, []),
    "phimoe": (LOCAL, {}, [
        ("jitter", (64, 12, 2, 40), dict(router_jitter_noise=0.4)),
        ("nojitter", (64, 12, 2, 40), dict(router_jitter_noise=0.0)),
    ]),
}
# Variants of every family: (name, sizes, stored dtype, shard size).
COMMON = [
    ("odd", (72, 7, 3, 40), torch.float32, "50GB"),
    ("one", (64, 6, 1, 24), torch.float16, "50GB"),
    ("all", (32, 8, 8, 24), torch.float32, "50GB"),
    ("many", (128, 66, 8, 56), torch.bfloat16, "100KB"),
]
# Checkpoints whose text model is nested in a multimodal one: text family, names of its sizes, further options.
NESTED = {
    "qwen3_vl_moe": ("qwen3_vl_moe_text", PLAIN, dict(intermediate_size=96)),
    "qwen3_5_moe": ("qwen3_5_moe_text", PLAIN, dict(shared_expert_intermediate_size=24, num_hidden_layers=4, **LINEAR)),
    "llama4": ("llama4_text", LOCAL, dict(intermediate_size_mlp=96)),
    "glm4v_moe": ("glm4v_moe_text", DEEP, dict(first_k_dense_replace=1, head_dim=64, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, mrope_section=[8, 12, 12], partial_rotary_factor=1.0))),
}
ALIASES = {
    "deepseek_v32": (DEEP, dict(n_group=2, topk_group=1, first_k_dense_replace=1, index_n_heads=4, index_head_dim=32,
                                index_topk=8, **MLA)),
    "glm4_moe_lite": (DEEP, dict(mlp_layer_types=["dense", "sparse"], **MLA)),
    "glm_moe_dsa": (DEEP, dict(first_k_dense_replace=1, index_n_heads=4, index_head_dim=32, index_topk=8, **MLA)),
}


def sized(names, sizes):
    hidden, experts, k, width = sizes
    return {"hidden_size": hidden, names["experts"]: experts, names["k"]: k, names["width"]: width}


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

        def on_gate(_, args, result, number=number):
            if isinstance(result, tuple) and len(result) == 3:
                out[f"layers.{number}.topk_weights"] = result[1].detach().float().clone().contiguous()
                out[f"layers.{number}.topk_ids"] = result[2].detach().to(torch.int32).clone().contiguous()

        hooks.append(block.register_forward_hook(on_block, with_kwargs=True))
        hooks.append(gate.register_forward_hook(on_gate))
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    out["input_ids"] = ids.clone()
    return out


def make(folder, config, dtype, shard, seed):
    torch.manual_seed(seed)
    auto = transformers.AutoModelForCausalLM
    if type(config).__name__ not in {c.__name__ for c in auto._model_mapping}:
        auto = transformers.AutoModelForImageTextToText
    elif getattr(config, "text_config", None) is not None and config.text_config is not config:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config).eval()
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    model = auto.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    ids = torch.randint(3, 97, (1, 13), generator=torch.Generator().manual_seed(seed))
    save_file(record(model, ids), folder / "golden.safetensors")


def dequantise(tensors, transposed):
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
            for dim, size in ((-2, rows), (-1, cols)):
                if scale.shape[dim] not in (1, size):
                    scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
            values = tensor.double() * scale
            fused = tensor.dim() == 3 and transposed
            out[name] = (values.transpose(1, 2) if fused else values).float().contiguous()
        else:
            out[name] = tensor.float()
    return out


def unfuse(tensors, config):
    """Splits fused experts, for families whose unquantised checkpoints store each expert by itself."""
    numbered = config["model_type"] in ("mixtral", "minimax_m2", "phimoe", "deepseek_v4")
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
    """Records golden data of an existing checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    declared = config.pop("quantization_config", None)
    if declared is None:
        return run_and_record(folder, folder)
    tensors = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    kind = config["model_type"]
    tensors = dequantise(dequantise_modules(tensors, declared), kind in ("gpt_oss", "llama4_text"))
    if kind not in ("gpt_oss", "llama4_text", "granitemoe"):
        tensors = unfuse(tensors, config)
    elif any(".experts.0." in name for name in tensors):
        tensors = fuse(tensors, kind)
    with tempfile.TemporaryDirectory() as copy:
        copy = pathlib.Path(copy)
        (copy / "config.json").write_text(json.dumps(config))
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        run_and_record(copy, folder)


def compress(folder, kind):
    """Makes a small checkpoint in one of compressed-tensors' formats, with the library's own tensors, and records it."""
    hidden, width = SIZES.get(kind, (64, 96))
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", **TINY, **sized(PLAIN, (hidden, 4, 2, width)), intermediate_size=96, norm_topk_prob=True)
    config.num_hidden_layers = 1
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model, len(kind))
    model.save_pretrained(folder)
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if ".mlp." in name}
    tensors, declared = compress_experts(tensors, kind)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": declared}, indent=2) + "\n")
    record_folder(folder)


def run_and_record(source, folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, output_loading_info=True, experts_implementation="eager")
    missing = [key for key in (*info["missing_keys"], *info["mismatched_keys"]) if "expert" in str(key) or "router" in str(key)
            or ".gate." in str(key) or "tid2eid" in str(key)]
    if missing or info["unexpected_keys"]:
        raise RuntimeError(f"missing {missing}, unexpected {info['unexpected_keys']}")
    ids = torch.randint(3, 97, (1, 13), generator=torch.Generator().manual_seed(1))
    save_file(record(model.eval(), ids), folder / "golden.safetensors")


def nested_config(outer, text_type, text):
    inner = transformers.AutoConfig.for_model(text_type, **text)
    vision = {
        "qwen3_vl_moe": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64,
                             deepstack_visual_indexes=[0]),
        "qwen3_5_moe": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64),
        "llama4": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
                       vision_output_dim=32, projector_input_dim=32, projector_output_dim=32, image_size=28,
                       patch_size=14),
        "glm4v_moe": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64),
    }[outer]
    return transformers.AutoConfig.for_model(outer, text_config=inner.to_dict(), vision_config=vision)


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
    for outer, (text_type, names, extra) in NESTED.items():
        text = {**TINY, **extra, **sized(names, (64, 12, 3, 40))}
        yield f"{outer}-nested", (lambda o=outer, t=text_type, c=text: nested_config(o, t, c)), torch.float32, "50GB"


# Values of options for random checkpoints.
CHOICES = {
    "norm_topk_prob": [False, True],
    "routed_scaling_factor": [0.5, 1.0, 2.5, 16.0],
    "router_jitter_noise": [0.0, 0.01, 0.1, 1.0],
    "swiglu_limit": [0.3, 1.0, 7.0],
    "first_k_dense_replace": [0, 1],
    "mlp_only_layers": [[], [0], [1]],
    "moe_num_shared_experts": [0, 1, 3],
    "n_shared_experts": [1, 2],
    "shared_expert_intermediate_size": [8, 40],
    "moe_norm_min": [1e-12, 0.5],
    "use_bias": [False, True],
    "mlp_bias": [False, True],
    "scoring_func": ["sqrtsoftplus", "sigmoid"],
    "swiglu_alpha": [0.7, 1.702],
}


def random_cases(count, seed):
    """Yields `count` cases of every family with random sizes and options."""
    dice = random.Random(seed)
    for family, (names, extra, _) in FAMILIES.items():
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
            if "n_group" in fields:
                config |= dict(n_group=groups, topk_group=kept)
            if family == "deepseek_v2":
                config["topk_method"] = dice.choice(["greedy", "group_limited_greedy"])
            dtype = dice.choice([torch.float32, torch.bfloat16, torch.float16])
            shard = dice.choice(["50GB", "60KB"])
            make_config = lambda f=family, c=config: transformers.AutoConfig.for_model(f, **c)
            yield f"{family}-random{number}", make_config, dtype, shard


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="make only folders whose name contains this text")
    parser.add_argument("--record", action="store_true", help="record the existing checkpoints in OUT")
    parser.add_argument("--compress", action="store_true", help="make checkpoints in the formats of compressed-tensors instead")
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
