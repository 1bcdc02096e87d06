"""What a peer needs between and after its grouped products, in Triton: activation, and the sum over a row's choices."""

import triton
import triton.language as tl

import layer as common

ALPHA: tl.constexpr = tl.constexpr(common.ALPHA)
LIMIT: tl.constexpr = tl.constexpr(common.LIMIT)
BLOCK = 1024


@triton.jit
def activate_kernel(both, h, inter, GPT_OSS: tl.constexpr, BLOCK: tl.constexpr):
    """h [R, I] = silu(gate) * up of bf16 `both` [R, 2I], gate before up. GPT_OSS: gate and up in turn, clamped SwiGLU."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inter
    source = both + row * 2 * inter
    if GPT_OSS:
        gate = tl.load(source + 2 * column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + 2 * column + 1, mask=inside, other=0.0).to(tl.float32)
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        value = gate * tl.sigmoid(ALPHA * gate) * (up + 1)
    else:
        gate = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + inter + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
    tl.store(h + row * inter + column, value.to(tl.bfloat16), mask=inside)


@triton.jit
def sum_kernel(y, weights, out, hidden, stride, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """out [R, hidden] = sum of the row's choices in bf16 y [R * K, stride]. WEIGHTED: times their weights, else these are in y."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    sum = tl.zeros((BLOCK,), tl.float32)
    for choice in range(K):
        value = tl.load(y + (row * K + choice) * stride + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + row * K + choice)
        sum += value
    tl.store(out + row * hidden + column, sum.to(tl.bfloat16), mask=inside)


def activate(both, h, gpt_oss=False):
    rows, inter = h.shape
    activate_kernel[(rows, triton.cdiv(inter, BLOCK))](both, h, inter, GPT_OSS=gpt_oss, BLOCK=BLOCK, num_warps=4)


def sum_choices(y, out, weights=None):
    """`weights`: None where y has them."""
    rows, hidden = out.shape
    sum_kernel[(rows, triton.cdiv(hidden, BLOCK))](
        y, weights, out, hidden, y.shape[1], K=y.shape[0] // rows, WEIGHTED=weights is not None, BLOCK=BLOCK, num_warps=4
    )
