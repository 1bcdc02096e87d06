"""Hugging Face models whose experts are served by expertd.

    import expertd.transformers, transformers

    with expertd.transformers.remote_experts("unix:/run/expertd.sock"):
        model = transformers.AutoModelForCausalLM.from_pretrained("path/to/checkpoint")

Or, with EXPERTD_ADDRESS=unix:/run/expertd.sock, `from_pretrained("path/to/checkpoint", experts_implementation="expertd")`.

The weights of the experts are neither allocated nor read in this process. `docs/transformers.md` has the details.
"""

from ._load import register, remote_experts

__all__ = ["remote_experts"]

register()
