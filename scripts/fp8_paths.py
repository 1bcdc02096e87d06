"""FP8 products of MoE blocks in PyTorch: transformers' own FP8 path with its Triton kernels, and the arithmetic of that path and of
expertd's GPU ranks in float32. Used by fp8_accuracy.py.

Triton's interpreter runs the kernels on the CPU, so this module has to be imported before anything else imports Triton.
"""

import copy
import dataclasses
import importlib
import json
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import transformers
import triton
from safetensors.torch import load_file, save_file
from torch import nn

E4M3_LARGEST = 448.0
# Largest magnitudes below this one count as this one in expertd (kernels/src/experts_quantise.cuh).
SMALLEST_LARGEST = 2.0**-100
# PyTorch's types by the names of Triton's, and numpy's type of the same size.
TYPES = {"fp32": (torch.float32, np.float32), "fp16": (torch.float16, np.float16), "bf16": (torch.bfloat16, np.uint16),
         "fp8e4nv": (torch.float8_e4m3fn, np.uint8)}


def convert(values, source, target, _rounding):
    """Conversion between types of floats, as a GPU does it: to nearest even, e4m3 saturated."""
    (from_type, _), (to_type, number) = TYPES[str(source)], TYPES[str(target)]
    bits = np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}")
    floats = torch.from_numpy(bits.copy()).view(from_type).float()
    if to_type == torch.float8_e4m3fn:
        floats = floats.clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return floats.to(to_type).view(getattr(torch, f"int{target.primitive_bitwidth}")).numpy().view(number)


def load_kernels(folder):
    """The module finegrained_fp8 of `folder`, with its kernels unchanged, for Triton's interpreter.

    Four things around them are replaced: the interpreter's conversion of floats, which truncates and loses carries; autotuning
    (configurations differ in warps and stages, which change no number); `wrap_triton`, which accepts compiled kernels only; and the
    module `_ops` that the kernels' build would generate."""
    from triton.runtime import interpreter

    interpreter._convert_float = convert
    autotune = triton.autotune
    triton.autotune = lambda configs, key, **_: autotune(configs=configs[:1], key=key)
    torch.library.wrap_triton = lambda kernel: kernel
    operators = types.ModuleType("finegrained_fp8._ops")
    operators.ops = torch.ops.finegrained_fp8
    operators.add_op_namespace_prefix = lambda name: f"finegrained_fp8::{name}"
    sys.modules[operators.__name__] = operators
    sys.path.insert(0, str(folder))
    return importlib.import_module("finegrained_fp8")


def use_kernels(kernels):
    """Gives transformers the kernels that it would load from the hub, and lets it load FP8 models without a GPU."""
    from transformers.integrations import finegrained_fp8
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    finegrained_fp8._FINEGRAINED_FP8 = finegrained_fp8.FineGrainedFP8(
        matmul=kernels.matmul_2d, batched_matmul=kernels.matmul_batched, grouped_matmul=kernels.matmul_grouped)
    FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None


def load_fp8(folder, reference, scratch, implementation):
    """The checkpoint in transformers' FP8 modules and otherwise in bf16; weights that it does not have are those of `reference`."""
    tensors = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    copy.deepcopy(reference).bfloat16().save_pretrained(scratch)
    present = {}
    for file in scratch.glob("model*.safetensors"):
        present |= load_file(file)
        file.unlink()
    (scratch / "model.safetensors.index.json").unlink(missing_ok=True)
    scaled = {name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")}
    # GraniteMoE's scales have no name in transformers' table of names.
    names = {"input_linear.weight_scale_inv": "experts.gate_up_proj_scale_inv",
             "output_linear.weight_scale_inv": "experts.down_proj_scale_inv"}
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in present.items() if name not in scaled and not replaced(name, scaled)}
    save_file(kept | tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    # Of linear layers, only those of shared experts are in FP8.
    linear = [name for name, module in reference.named_modules() if isinstance(module, nn.Linear)]
    config["quantization_config"]["modules_to_not_convert"] = [n for n in linear if "shared_expert" not in n.rpartition(".")[0]]
    (scratch / "config.json").write_text(json.dumps(config))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        scratch, dtype=torch.bfloat16, output_loading_info=True, experts_implementation=implementation)
    if info["missing_keys"] or info["mismatched_keys"] or info["unexpected_keys"]:
        raise RuntimeError(f"{ {what: sorted(map(str, keys))[:3] for what, keys in info.items() if keys} }")
    return model.eval()


def replaced(name, scaled):
    """Whether `name` is a stack of experts that the FP8 checkpoint stores one by one."""
    stem, _, leaf = name.partition(".experts.")
    return bool(leaf) and not leaf[0].isdigit() and any(other.startswith(f"{stem}.experts.0.") for other in scaled)


def through_e4m3(rows, group, reciprocal, power_of_two=False):
    """Rows as their codes and scales stand for them: `group` columns share the scale largest magnitude / 448, rounded up to a power
    of two if asked for. Codes are elements / scale, or elements * (1 / scale)."""
    columns = rows.shape[-1]
    groups = nn.functional.pad(rows.float(), (0, -columns % group)).unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    if reciprocal:
        scale = largest.clamp(min=SMALLEST_LARGEST) / E4M3_LARGEST
        if power_of_two:
            scale = torch.exp2(torch.log2(scale.double()).ceil()).float()
        codes = groups * (1 / scale)
    else:
        scale = largest / E4M3_LARGEST
        codes = groups / scale.clamp(min=1e-12)
    values = codes.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float() * scale
    return values.flatten(-2)[..., :columns]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Where a path quantises and rounds.

    `group` columns of a row share a scale, 0 for the whole row. `rounded`: products, activations and weighted rows are rounded to
    bf16, and the routing weight multiplies the output, as in transformers. Otherwise it multiplies the activation, which is then
    rounded to bf16 and quantised, and expert rows are rounded to bf16, as on expertd's GPU ranks. `power_of_two`: scales of rows are."""

    group: int = 128
    rounded: bool = False
    power_of_two: bool = False

    def product(self, rows, weight, bias=None):
        """rows times the transposed weight, which is float32."""
        rows = through_e4m3(rows, self.group or rows.shape[-1], not self.rounded, self.power_of_two)
        out = rows @ weight.float().T
        out = out.bfloat16() if self.rounded else out
        return out if bias is None else out + bias.to(out.dtype)


class Product(nn.Module):
    """In place of a linear layer."""

    def __init__(self, linear, arithmetic):
        super().__init__()
        # Not a parameter, so that a block that becomes bf16 keeps it in float32.
        self.values, self.offset, self.arithmetic = linear.weight.data.clone(), linear.bias, arithmetic

    def forward(self, rows):
        if not self.arithmetic.rounded:
            rows = rows.bfloat16()
        return self.arithmetic.product(rows, self.values, self.offset)


class Experts(nn.Module):
    """In place of a family's experts."""

    def __init__(self, experts, arithmetic):
        super().__init__()
        # In a list, so that a block that becomes bf16 keeps them in float32.
        self.module, self.arithmetic = [experts], arithmetic
        self.turned = getattr(experts, "is_transposed", False) or type(experts).__name__ == "Llama4TextExperts"

    def expert(self, e, rows, factor):
        experts, arithmetic = self.module[0], self.arithmetic
        up, down = experts.gate_up_proj[e], experts.down_proj[e]
        up, down = (up.T, down.T) if self.turned else (up, down)
        biases = [getattr(experts, name, None) for name in ("gate_up_proj_bias", "down_proj_bias")]
        before, after = (None if bias is None else bias[e] for bias in biases)
        out = arithmetic.product(rows, up, before)
        if hasattr(experts, "_apply_gate"):
            h = experts._apply_gate(out)
        else:
            gate, value = out.chunk(2, -1)
            h = experts.act_fn(gate) * value
        if arithmetic.rounded:
            return arithmetic.product(h, down, after) * factor.to(h.dtype)
        out = arithmetic.product((h * factor).bfloat16(), down) + (0 if after is None else after * factor)
        return out.bfloat16().float()

    def forward(self, rows, ids=None, weights=None):
        experts = self.module[0]
        if ids is None:
            # Llama 4 calls its experts with all rows for each of them, multiplied by the score, which is 0 for most.
            rows = rows.view(experts.num_experts, -1, rows.shape[-1])
            one = torch.ones((), dtype=rows.dtype)
            return torch.cat([self.expert(e, rows[e], one) for e in range(len(rows))])
        out = torch.zeros(rows.shape, dtype=torch.float32)
        for e in ids.unique().tolist():
            token, place = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, rows[token], weights[token, place, None]).float())
        return out.to(rows.dtype)


def with_arithmetic(block, arithmetic):
    """A copy of a float32 block, which holds dequantised weights, that computes as `arithmetic` says."""
    block = copy.deepcopy(block)
    for name, module in list(block.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf == "experts":
            setattr(block.get_submodule(parent), leaf, Experts(module, arithmetic))
        elif isinstance(module, nn.Linear) and leaf.endswith(("_proj", "w1", "w2", "w3")) and ".experts." not in f".{name}":
            setattr(block.get_submodule(parent), leaf, Product(module, arithmetic))
    return block.bfloat16() if arithmetic.rounded else block
