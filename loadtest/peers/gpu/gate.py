"""The peers' gate: the router's product by PyTorch, then softmax, choice and normalisation in one Triton kernel, as engines do it."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def choose_kernel(logits, bias, weights, ids, experts, HAS_BIAS: tl.constexpr, K: tl.constexpr, E: tl.constexpr):
    """A row's K largest logits as ids, and the softmax over them as weights. Equal logits go to the lower id."""
    row = tl.program_id(0)
    expert = tl.arange(0, E)
    inside = expert < experts
    value = tl.load(logits + row * experts + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + expert, mask=inside, other=0.0)
    largest = tl.max(value, 0)
    total = 0.0
    place = tl.arange(0, K)
    chosen = tl.zeros((K,), tl.int32)
    score = tl.zeros((K,), tl.float32)
    for choice in tl.static_range(K):
        best = tl.max(value, 0)
        at = tl.min(tl.where(value == best, expert, E), 0)
        share = tl.exp(best - largest)
        total += share
        chosen = tl.where(place == choice, at, chosen)
        score = tl.where(place == choice, share, score)
        value = tl.where(expert == at, float("-inf"), value)
    tl.store(ids + row * K + place, chosen)
    tl.store(weights + row * K + place, score / total)


def route(rows, gate, bias, k):
    """f32 weights and i32 experts, [rows, k], of bf16 rows [R, H] and a bf16 gate [E, H]; bias f32 [E] or None. k is a power of two."""
    logits = F.linear(rows, gate)
    weights = torch.empty(rows.shape[0], k, device=rows.device, dtype=torch.float32)
    ids = torch.empty(rows.shape[0], k, device=rows.device, dtype=torch.int32)
    experts = gate.shape[0]
    choose_kernel[(rows.shape[0],)](
        logits, bias, weights, ids, experts,
        HAS_BIAS=bias is not None, K=k, E=triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    return weights, ids


def route_exactly(rows, gate, bias, k):
    """The same by PyTorch with logits in f32, which do not round to bf16; i64 experts."""
    scores = rows.float() @ gate.float().T
    if bias is not None:
        scores += bias
    values, ids = torch.topk(scores, k, -1)
    return torch.softmax(values, -1), ids
