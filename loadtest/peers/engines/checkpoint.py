#!/usr/bin/env python3
"""Writes a random bf16 checkpoint of a model of the family qwen3_moe, with weights of all layers, for engines and for the service.

    loadtest/peers/engines/checkpoint.py FOLDER [--shape qwen3-30b-a3b] [--layers 24] [--device cuda]

All tensors differ, so that a layer that is taken for another one changes tokens. The index is written last: a folder that has one is whole.
"""

import argparse
import json
import pathlib

SHAPES = {
    "qwen3-30b-a3b": dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    ),
    # Sizes that vLLM's kernels for CPUs accept.
    "tiny": dict(
        hidden_size=128, intermediate_size=96, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=1024,
    ),
}
INDEX = "model.safetensors.index.json"


def config_of(shape, layers, positions):
    """The content of config.json."""
    return dict(
        SHAPES[shape],
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        attention_bias=False,
        tie_word_embeddings=False,
        router_aux_loss_coef=0.001,
        dtype="bfloat16",
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    )


def sizes(config):
    """Bytes of routed experts, and of all other weights, in bf16."""
    hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    experts = layers * config["num_experts"] * 3 * hidden * config["moe_intermediate_size"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    layer = attention + hidden * config["num_experts"] + 2 * hidden + 2 * head
    rest = layers * layer + 2 * hidden * config["vocab_size"] + hidden
    return 2 * experts, 2 * rest


def whole(folder, config):
    """Whether the folder has such a checkpoint. SystemExit if it has another one, or a part of one."""
    if (folder / "model.safetensors").exists() and not (folder / INDEX).exists():
        raise SystemExit(f"{folder} has another checkpoint; name another --checkpoint")
    if not (folder / "config.json").exists():
        return False
    found = json.loads((folder / "config.json").read_text())
    other = {name: (found.get(name), value) for name, value in config.items() if found.get(name) != value}
    if other:
        differences = ", ".join(f"{name} {mine} instead of {wanted}" for name, (mine, wanted) in other.items())
        raise SystemExit(f"{folder} has a checkpoint with {differences}; name another --checkpoint, or remove it")
    return (folder / INDEX).exists()


def write(folder, config, seed, device):
    """Draws all tensors, one file for each layer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(seed)
    hidden, width, experts, head = (config[name] for name in ("hidden_size", "moe_intermediate_size", "num_experts", "head_dim"))
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    places = {}

    def draw(*shape, spread=None):
        drawn = torch.randn(*shape, generator=generator, device=device)
        return (drawn * (shape[-1] ** -0.5 if spread is None else spread)).bfloat16().cpu()

    def ones(length):
        return torch.ones(length, dtype=torch.bfloat16)

    def save(number, tensors):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, name))

    vocabulary = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden, spread=1.0),
        "lm_head.weight": draw(config["vocab_size"], hidden),
        "model.norm.weight": ones(hidden),
    }
    save(0, vocabulary)
    for layer in range(config["num_hidden_layers"]):
        tensors = {
            "input_layernorm.weight": ones(hidden),
            "post_attention_layernorm.weight": ones(hidden),
            "self_attn.q_norm.weight": ones(head),
            "self_attn.k_norm.weight": ones(head),
            "self_attn.q_proj.weight": draw(queries, hidden),
            "self_attn.k_proj.weight": draw(keys, hidden),
            "self_attn.v_proj.weight": draw(keys, hidden),
            "self_attn.o_proj.weight": draw(hidden, queries),
            "mlp.gate.weight": draw(experts, hidden),
        }
        projections = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        for name, (rows, columns) in projections.items():
            drawn = draw(experts, rows, columns)
            tensors |= {f"mlp.experts.{expert}.{name}.weight": drawn[expert].clone() for expert in range(experts)}
        save(layer + 1, {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--positions", type=int, default=8192, help="longest sequence")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="draws the weights")
    args = parser.parse_args()
    config = config_of(args.shape, args.layers, args.positions)
    if not whole(args.folder, config):
        write(args.folder, config, args.seed, args.device)


if __name__ == "__main__":
    main()
