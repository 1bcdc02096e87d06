"""Adapters of attention for models of `models.py`, in PEFT's files."""

import json

import torch
import transformers
from safetensors.torch import save_file

MODULES = ("q_proj", "o_proj")


def make_adapter(checkpoint, folder, merged, rank=4):
    """Writes a random adapter, and the checkpoint that it makes of a model into the folder `merged`."""
    folder.mkdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    attention = config.num_attention_heads * config.head_dim
    sizes = {"q_proj": (attention, config.hidden_size), "o_proj": (config.hidden_size, attention)}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module in MODULES:
            place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            out, width = sizes[module]
            down, up = torch.randn(rank, width) * width**-0.5, torch.randn(out, rank)
            tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"] = down, up
            with torch.no_grad():
                getattr(model.model.layers[layer].self_attn, module).weight += up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    described = dict(peft_type="LORA", r=rank, lora_alpha=rank, target_modules=list(MODULES), bias="none", task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps(described))
    model.save_pretrained(merged)
