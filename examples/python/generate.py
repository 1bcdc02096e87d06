#!/usr/bin/env python3
"""Text from a model whose experts are served by another process.

Makes a small random checkpoint, serves it with two expert ranks, and generates with the model once whole and once with remote
experts, over gRPC and over a session. Needs `pip install ./python torch transformers`.
"""

import tempfile

import torch
import transformers

import expertd
from expertd.transformers import remote_experts


def make_checkpoint(folder):
    """A Mixtral of four layers with eight experts each, random."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def generate(model, text):
    """The continuation of `text`; a byte is a token."""
    ids = torch.tensor([list(text.encode())])
    mask = torch.ones_like(ids)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=32, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def megabytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6


def main():
    load = transformers.AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder)
        whole = load(folder)
        expected = generate(whole, "Experts are")
        with expertd.serve(folder, ranks=2) as service:
            ways = [("experts", None), ("block", None), ("experts", "host"), ("block", "host")]
            for mode, session in ways:
                address = service.session_address if session else service.address
                with remote_experts(address, mode=mode, session=session):
                    model = load(folder)
                found = generate(model, "Experts are")
                print(f"{mode}, {session or 'grpc'}: {megabytes(model):.1f} of {megabytes(whole):.1f} MB of weights in this process")
                print(f"  tokens {found[:12]} … {'the same' if found == expected else 'DIFFERENT'}")
                assert found == expected


if __name__ == "__main__":
    main()
