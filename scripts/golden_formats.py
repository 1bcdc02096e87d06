"""Storage formats of linear modules for scripts/golden.py: values of INT4, NVFP4, MXFP4 and MXFP8 by their definitions,
checkpoints that the compressed-tensors library writes, and FP8 in blocks of any size.

The definitions are those of the libraries that write the files: compressed-tensors (`pack_quantized`, `nvfp4`, `mxfp4`, `mxfp8`),
GPTQModel (`TorchQuantLinear`, `convert_gptq_v1_to_v2_format`), AutoAWQ (`WQLinear_GEMM`) and ModelOpt's exporter. They are computed
in float64. Values of compressed-tensors' formats are compared with those of the library itself.
"""

import torch

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
# The column of each nibble of a word, from the lowest on.
IN_ORDER = [0, 1, 2, 3, 4, 5, 6, 7]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def nibbles(words, order=IN_ORDER):
    """`[n, m]` words of 32 bits as `[n, 8 m]` numbers."""
    words = words.long() & 0xFFFFFFFF
    out = torch.empty(*words.shape, 8, dtype=torch.float64)
    for place, column in enumerate(order):
        out[..., column] = (words >> (4 * place) & 15).double()
    return out.flatten(-2)


def exponents(codes):
    return torch.exp2(codes.view(torch.uint8).double() - 127)


def spread(groups, columns, size):
    """`[rows, groups]` as `[rows, columns]`: `size` columns have the same number."""
    return groups.repeat_interleave(size, 1)[:, :columns]


def fp4(codes):
    return torch.stack([FP4[(codes & 15).long()], FP4[(codes >> 4).long()]], -1).flatten(-2)


def pack_quantized(part, _):
    rows, cols = part["weight_shape"].tolist()
    values = nibbles(part["weight_packed"])[:, :cols]
    scale = part["weight_scale"].double()
    size = cols // scale.shape[1]
    zeros = torch.full_like(scale, 8)
    if "weight_zero_point" in part:
        zeros = nibbles(part["weight_zero_point"].T).T[:rows]
    return (values - spread(zeros, cols, size)) * spread(scale, cols, size)


def gptq(part, declared):
    values = nibbles(part["qweight"].T)
    cols = values.shape[1]
    zeros = part["qzeros"].long() & 0xFFFFFFFF
    if declared.get("checkpoint_format", "gptq") == "gptq":
        zeros = zeros + 0x11111111 & 0xFFFFFFFF
    zeros, scale = nibbles(zeros).T, part["scales"].double().T
    index = part["g_idx"].long()
    assert index.shape == (cols,)
    return (values - zeros[:, index]) * scale[:, index]


def awq(part, declared):
    values, zeros = nibbles(part["qweight"], AWQ_ORDER).T, nibbles(part["qzeros"], AWQ_ORDER).T
    cols, size = values.shape[1], declared["group_size"]
    return (values - spread(zeros, cols, size)) * spread(part["scales"].double().T, cols, size)


def nvfp4(part, _):
    values = fp4(part.get("weight_packed", part.get("weight")))
    factor = 1 / part["weight_global_scale"].double() if "weight_global_scale" in part else part["weight_scale_2"].double()
    return values * spread(part["weight_scale"].double(), values.shape[1], 16) * factor


def mxfp4(part, _):
    values = fp4(part["weight_packed"])
    return values * spread(exponents(part["weight_scale"]), values.shape[1], 32)


def mxfp8(part, _):
    values = part["weight"].double()
    return values * spread(exponents(part["weight_scale"]), values.shape[1], 32)


def definition(part, declared):
    """The function that computes the values of a module's tensors; None if they are in another format."""
    if "qweight" in part:
        return {"gptq": gptq, "awq": awq}[declared["quant_method"]]
    if "weight_packed" in part:
        if part["weight_packed"].dtype == torch.int32:
            return pack_quantized
        return mxfp4 if part["weight_scale"].dtype == torch.uint8 else nvfp4
    if part["weight"].dtype == torch.uint8:
        return nvfp4
    if part["weight"].dtype == torch.float8_e4m3fn and part.get("weight_scale", part["weight"]).dtype == torch.uint8:
        return mxfp8
    return None


def dequantise_modules(tensors, declared):
    """Replaces the tensors of modules in these formats by float32 weights; the others stay."""
    modules = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        modules.setdefault(stem, {})[leaf] = tensor
    out = {}
    for stem, part in modules.items():
        known = {"weight", "weight_packed", "qweight"} & set(part)
        values = definition(part, declared) if known else None
        if values is None:
            out |= {f"{stem}.{leaf}": tensor for leaf, tensor in part.items()}
            continue
        weight = values(part, declared)
        if declared["quant_method"] == "compressed-tensors":
            compare_with_library(stem, part, declared, weight)
        out[f"{stem}.weight"] = weight.float().contiguous()
        if "bias" in part:
            out[f"{stem}.bias"] = part["bias"].float()
    return out


def fuse(tensors, kind):
    """Fuses separate experts, for families whose unquantised checkpoints store them together."""
    out, parts = {}, {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.partition(".experts.")
        if not leaf:
            out[name] = tensor
            continue
        e, projection, what = leaf.split(".")
        turned = what == "weight" and kind not in ("granitemoe", "mistral4")
        parts.setdefault(stem, {}).setdefault((projection, what), {})[int(e)] = tensor.T if turned else tensor
    for stem, found in parts.items():
        stack = {key: torch.stack([t[e] for e in sorted(t)]) for key, t in found.items()}
        for what in {what for _, what in stack}:
            gate, up, down = (stack[name, what] for name in ("gate_proj", "up_proj", "down_proj"))
            if kind == "granitemoe":
                both, names = torch.cat([gate, up], 1), ("input_linear.weight", "output_linear.weight")
            elif kind == "mistral4":
                both, names = torch.cat([gate, up], 1), ("experts.gate_up_proj", "experts.down_proj")
            else:
                both = torch.stack([gate, up], -1).flatten(-2) if kind == "gpt_oss" else torch.cat([gate, up], -1)
                leaf = "" if what == "weight" else "_bias"
                names = (f"experts.gate_up_proj{leaf}", f"experts.down_proj{leaf}")
            for name, tensor in zip(names, (both, down)):
                out[f"{stem}.{name}"] = tensor.contiguous()
    return out


def scheme_of(declared):
    from compressed_tensors.quantization import QuantizationScheme

    (group,) = declared["config_groups"].values()
    return QuantizationScheme(**{key: group[key] for key in ("targets", "weights")})


def compressor(declared):
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(declared["format"])


def compare_with_library(stem, part, declared, weight):
    """The library rounds to bf16 on the way: the first seven bits agree."""
    theirs = compressor(declared).decompress(dict(part), scheme_of(declared))["weight"].double()
    error = (theirs - weight).abs() / weight.abs().clamp(min=1e-30)
    assert theirs.shape == weight.shape and error.max() < 2**-6, f"{stem}: {error.max()}"


# Hidden size and width of experts: no multiples of words where no group has to divide them.
SIZES = {"int4-channel": (72, 44)}

# Declarations of compressed-tensors: format, weights.
LIBRARY = {
    "int4-asymmetric": ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)),
    "int4-channel": ("pack-quantized", dict(num_bits=4, type="int", strategy="channel", symmetric=False)),
    "nvfp4": ("nvfp4-pack-quantized",
              dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True,
                   scale_dtype="torch.float8_e4m3fn")),
    "mxfp4": ("mxfp4-pack-quantized",
              dict(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype="torch.uint8")),
    "mxfp8": ("mxfp8-quantized",
              dict(num_bits=8, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype="torch.uint8")),
}


def declaration(kind):
    form, weights = LIBRARY[kind]
    group = {"targets": ["Linear"], "weights": {**weights, "dynamic": False}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*gate$"], "quantization_status": "compressed"}


def compress_experts(tensors, kind):
    """Quantises the experts' projections with the library. Returns all tensors with the names that it writes."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    declared = declaration(kind)
    scheme, library = scheme_of(declared), compressor(declared)
    args, out = scheme.weights, {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            out[name] = tensor
            continue
        weight = tensor.float()
        groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
        state = {"weight": weight}
        if kind == "nvfp4":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).reshape(1)
        scale, zeros = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
        state["weight_scale"] = scale.bfloat16() if args.type == "int" else scale
        if not args.symmetric:
            state["weight_zero_point"] = zeros.to(torch.int8)
        stem = name.removesuffix(".weight")
        for leaf, part in library.compress(state, scheme).items():
            out[f"{stem}.{leaf}"] = part.contiguous()
    return out, declared


# FP8 that neither `expertd synth` nor the library writes: family, sizes of a block, the module that stays in bf16, and a seed. With these
# seeds bf16 rows and weights leave every row within 1e-2: no output is a small difference of large terms.
BLOCKS = {
    "deepseek_v3-fp8-narrow": ("deepseek_v3", [40, 48], None, 22),
    "qwen2_moe-fp8-mixed": ("qwen2_moe", [128, 128], "shared_expert.down_proj", 22),
}


def to_fp8(weight, block):
    """The codes and scales of a matrix in FP8 with a scale for each block, whose largest magnitude gets the largest code."""
    rows, cols = weight.shape
    whole = torch.nn.functional.pad(weight.float(), (0, -cols % block[1], 0, -rows % block[0]))
    grid = whole.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).abs().amax((1, 3)) / 448
    scale = grid.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]
    return (weight.float() / scale).to(torch.float8_e4m3fn), grid


def blocks_of_experts(tensors, block, plain):
    """Quantises the projections of routed and shared experts to FP8, except the module `plain`. Returns all tensors."""
    out = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            out[name] = tensor
        elif plain is not None and plain in name:
            out[name] = tensor.bfloat16()
        else:
            out[name], out[f"{name}_scale_inv"] = to_fp8(tensor, block)
    return out, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
