"""Adapters of attention for models of `models.py`, in PEFT's files."""

import json

import torch
import transformers
from safetensors.torch import save_file

MODULES = ("q_proj", "o_proj")


def make_adapter(checkpoint, folder, rank=4):
    """Writes a random adapter that changes a model's tokens."""
    folder.mkdir()
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    attention = config.num_attention_heads * config.head_dim
    sizes = {"q_proj": (attention, config.hidden_size), "o_proj": (config.hidden_size, attention)}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module in MODULES:
            place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            out, width = sizes[module]
            tensors[f"{place}.lora_A.weight"] = torch.randn(rank, width) * width**-0.5
            tensors[f"{place}.lora_B.weight"] = torch.randn(out, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = dict(peft_type="LORA", r=rank, lora_alpha=rank, target_modules=list(MODULES), bias="none", task_type="CAUSAL_LM")
    (folder / "adapter_config.json").write_text(json.dumps(described))
