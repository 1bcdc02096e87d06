"""Tiny random models of several families, with sizes that vLLM's own kernels for CPUs accept."""

import json
import subprocess

import torch
import transformers
from safetensors.torch import load_file, save_file

import expertd

COMMON = dict(
    vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)
WIDTHS = dict(moe_intermediate_size=64, intermediate_size=96)
PLAIN = dict(num_experts=8, num_experts_per_tok=4, **WIDTHS)
MIXTRAL = dict(num_local_experts=8, intermediate_size=64)
GROUPS = dict(n_group=1, topk_group=1)
DEEP = dict(n_routed_experts=8, num_experts_per_tok=4, **WIDTHS, **GROUPS, first_k_dense_replace=1, n_shared_experts=1,
            routed_scaling_factor=2.5)
# vLLM reads some keys of released checkpoints that transformers does not.
FAMILIES = {
    "qwen3_moe": dict(**PLAIN, norm_topk_prob=True),
    "olmoe": dict(num_experts=8, num_experts_per_tok=4, intermediate_size=64, num_key_value_heads=4),
    "mixtral": dict(**MIXTRAL, num_experts_per_tok=2),
    "qwen2_moe": dict(**PLAIN, shared_expert_intermediate_size=64),
    "glm4_moe": dict(**DEEP, norm_topk_prob=True),
    "granitemoe": dict(**MIXTRAL, num_experts_per_tok=4),
    "gpt_oss": dict(**MIXTRAL, num_experts_per_tok=4, sliding_window=64),
    "ernie4_5_moe": dict(**WIDTHS, moe_num_experts=8, moe_k=4, moe_num_shared_experts=1),
    "afmoe": dict(**PLAIN, **GROUPS, num_shared_experts=1, num_dense_layers=1, route_scale=1.5, score_func="sigmoid", route_norm=True,
                  sliding_window=64),
    "exaone_moe": dict(**PLAIN, num_shared_experts=1, sliding_window=64),
    "lfm2_moe": dict(**PLAIN, num_dense_layers=1, layer_types=["conv", "full_attention"]),
    # vLLM has no model of its own for these. It replaces the experts of the one in transformers.
    "dots1": dict(**DEEP, norm_topk_prob=True, sliding_window=64),
    "hunyuan_v1_moe": dict(num_experts=8, moe_topk=4, intermediate_size=64, eod_token_id=3, sep_token_id=4),
    "mellum": dict(**PLAIN, sliding_window=64),
    "solar_open": dict(**DEEP | dict(first_k_dense_replace=0), norm_topk_prob=True),
}
# Families of vLLM's AFD plugin. Their first layer is dense.
LATENT = dict(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=32, q_lora_rank=None, num_key_value_heads=4, head_dim=16)
AFD_FAMILIES = {
    "deepseek_v2": dict(**DEEP, **LATENT, topk_method="greedy", norm_topk_prob=False),
    "deepseek_v3": dict(
        **DEEP | dict(n_group=2, routed_scaling_factor=1.5), **LATENT | dict(q_lora_rank=32), norm_topk_prob=True, topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
}
# vLLM's attention for these families on CPUs knows one size of a row of its cache, 512 + 64.
CACHED = dict(kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64)
FAMILIES |= {family: settings | CACHED for family, settings in AFD_FAMILIES.items()}


def make_checkpoint(family, folder, dtype=torch.float32, **settings):
    """Writes a random model. Weights are large enough that its layers differ from the identity."""
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
            elif not name.endswith("norm.weight"):
                parameter.normal_(0.0, 0.1)
    model.to(dtype).save_pretrained(folder)


def prompts(count=4, seed=None):
    """Prompts of different lengths."""
    generator = torch.Generator()
    if seed is not None:
        generator.manual_seed(seed)
    else:
        generator.seed()
    return [torch.randint(3, 128, (5 + 7 * i,), generator=generator).tolist() for i in range(count)]


def packed(weight):
    """A matrix in INT4 as compressed-tensors packs it, symmetric in groups of 32 columns, and its dequantised values, exact in bf16."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, -1, 32)
    scales = torch.exp2((groups.abs().amax(-1, keepdim=True) / 7).log2().ceil())
    codes = (groups / scales).round().clamp(-8, 7)
    nibbles = (codes.reshape(rows, -1, 8) + 8).to(torch.int64) << (4 * torch.arange(8))
    words = nibbles.sum(-1)
    tensors = {
        "weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32),
        "weight_scale": scales.squeeze(-1).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, (codes * scales).reshape(rows, columns).bfloat16()


def nibbles(words):
    """The eight codes of each word of int32, from its lowest bits on, in a new last dimension."""
    return (words[..., None] >> (4 * torch.arange(8))) & 15


def spread(scales, size, axis):
    """One scale, or zero point, for each element of an axis."""
    return scales.repeat_interleave(size // scales.shape[axis], axis)


def transposed_int4(parts, codes, zeros):
    inputs = codes.shape[0]
    return ((codes - spread(zeros, inputs, 0)) * spread(parts["scales"].float(), inputs, 0)).T


def awq(parts):
    # The code at place 1 of a word is that of column 2, the one at place 4 that of column 1.
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    return transposed_int4(parts, *(nibbles(parts[name])[..., order].flatten(1) for name in ("qweight", "qzeros")))


def gptq(parts):
    codes = nibbles(parts["qweight"]).transpose(1, 2).flatten(0, 1)
    return transposed_int4(parts, codes, nibbles(parts["qzeros"]).flatten(1) + 1)


def int4(parts):
    codes = nibbles(parts["weight_packed"]).flatten(1) - 8
    return codes * spread(parts["weight_scale"].float(), codes.shape[1], 1)


def fp8(parts):
    codes, scales = parts["weight"].float(), parts["weight_scale_inv"]
    return codes * spread(spread(scales, codes.shape[0], 0), codes.shape[1], 1)


def mxfp4(parts):
    """Experts of a whole layer, whose columns are inputs; transformers has them the other way round."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = torch.stack([parts["blocks"] & 15, parts["blocks"] >> 4], -1).flatten(3)
    return (values[codes.long()] * torch.exp2(parts["scales"].float() - 127)[..., None]).flatten(2).transpose(1, 2)


FORMATS = {"fp8": fp8, "int4": int4, "int4-awq": awq, "int4-gptq": gptq, "mxfp4": mxfp4}


def dequantised_experts(dtype, stored):
    """Weights of experts by the names of an unquantised checkpoint."""
    found, matrices = {}, {}
    for name, tensor in stored.items():
        if ".experts." not in name:
            continue
        matrix, _, part = name.rpartition("_" if dtype == "mxfp4" else ".")
        if part == "bias":
            found[name] = tensor
        else:
            matrices.setdefault(matrix, {})[part] = tensor
    for matrix, parts in matrices.items():
        values = FORMATS[dtype](parts)
        name = matrix if dtype == "mxfp4" else f"{matrix}.weight"
        found[name] = values.bfloat16()
        assert torch.equal(found[name].float(), values), name
    return found


def make_quantised(family, dtype, folder, plain, attention=False):
    """Writes a random checkpoint whose experts are quantised into `folder`, and the same dequantised, in bf16, into `plain`.

    Scales are powers of two, so that weights are exact in bf16. With `attention`, which needs the format int4, that is quantised as well.
    """
    sizes = ["--hidden", "256", "--width", "128", "--layers", "2", "--top-k", "4", "--seed", str(torch.seed() % 2**32)]
    command = [expertd.command(), "synth", "--family", family, "--dtype", dtype, "--out", str(folder), *sizes]
    subprocess.run(command, check=True, capture_output=True)
    config = json.loads((folder / "config.json").read_text())
    config["head_dim"] = 32
    dequantised = {name: value for name, value in config.items() if name != "quantization_config"}
    quantised = config["quantization_config"]
    if attention:
        quantised["ignore"].remove("re:.*self_attn.*")
    elif dtype == "int4-gptq":
        quantised["dynamic"]["-:.*self_attn.*"] = {}
        # vLLM knows no other ones. The service reads the zero points.
        quantised["sym"] = True
    elif dtype != "int4":
        # AWQ's rule is part of a name, FP8's the whole name.
        parts = ["mlp.gate", *(f"self_attn.{part}_proj" for part in "qkvo")]
        names = [f"model.layers.{n}.{part}" for n in range(2) for part in parts]
        quantised.setdefault("modules_to_not_convert", []).extend(["self_attn", *names])
    (folder / "config.json").write_text(json.dumps(config))
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(dequantised))

    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(plain), dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if tensor.is_floating_point() and "scale" in name:
            stored[name] = torch.exp2(tensor.float().log2().round()).to(tensor.dtype)
    rest = dequantised_experts(dtype, stored)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            continue
        deviation = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        tensor = torch.ones_like(parameter) if name.endswith("norm.weight") else torch.randn_like(parameter) * deviation
        if name in stored:
            rest[name] = stored[name]
        elif attention and name.endswith("_proj.weight"):
            tensors, rest[name] = packed(tensor)
            stored.update({name.replace("weight", kind): part for kind, part in tensors.items()})
        else:
            rest[name] = stored[name] = tensor
    for path, tensors in ((plain, rest), (folder, stored)):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
