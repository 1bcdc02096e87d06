"""Quantisation of rows to FP8 in Triton: e4m3 codes with one f32 scale for each 128 elements."""

import triton
import triton.language as tl

GROUP: tl.constexpr = tl.constexpr(128)
LARGEST: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def codes_of(values):
    """e4m3 codes of f32 values [G, 128], and the scales [G] that multiply them."""
    scales = tl.maximum(tl.max(tl.abs(values), 1), 1e-10) / LARGEST
    return (values / scales[:, None]).to(tl.float8e4nv), scales


@triton.jit
def rows_kernel(x, codes, scales, hidden, GROUPS: tl.constexpr):
    """codes [R, H] and scales [R, H / 128] of bf16 rows x [R, H]."""
    row = tl.program_id(0).to(tl.int64)
    groups = hidden // GROUP
    group = tl.arange(0, GROUPS)
    inside = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * hidden + at, mask=inside[:, None], other=0.0).to(tl.float32)
    here, scale = codes_of(values)
    tl.store(codes + row * hidden + at, here, mask=inside[:, None])
    tl.store(scales + row * groups + group, scale, mask=inside)


@triton.jit
def scatter_kernel(x, ids, place, codes, scales, hidden, capacity, K: tl.constexpr, GROUPS: tl.constexpr):
    """Quantises a row once and stores it for each of its experts: codes [E, capacity, H], scales [E, H / 128, capacity]."""
    row = tl.program_id(0).to(tl.int64)
    groups = hidden // GROUP
    group = tl.arange(0, GROUPS)
    inside = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * hidden + at, mask=inside[:, None], other=0.0).to(tl.float32)
    here, scale = codes_of(values)
    for choice in range(K):
        expert = tl.load(ids + row * K + choice).to(tl.int64)
        slot = tl.load(place + row * K + choice).to(tl.int64)
        tl.store(codes + (expert * capacity + slot) * hidden + at, here, mask=inside[:, None])
        tl.store(scales + (expert * groups + group) * capacity + slot, scale, mask=inside)


@triton.jit
def silu_kernel(both, ids, place, codes, scales, inter, capacity, GROUPS: tl.constexpr):
    """silu(gate) * up of bf16 `both` [E, capacity, 2I], quantised to codes [E, capacity, I], scales [E, I / 128, capacity]. A program
    has one choice of a row."""
    entry = tl.program_id(0)
    groups = inter // GROUP
    slot = tl.load(place + entry).to(tl.int64)
    expert = tl.load(ids + entry).to(tl.int64)
    group = tl.arange(0, GROUPS)
    inside = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = both + (expert * capacity + slot) * 2 * inter + at
    gate = tl.load(source, mask=inside[:, None], other=0.0).to(tl.float32)
    up = tl.load(source + inter, mask=inside[:, None], other=0.0).to(tl.float32)
    here, scale = codes_of(gate * tl.sigmoid(gate) * up)
    tl.store(codes + (expert * capacity + slot) * inter + at, here, mask=inside[:, None])
    tl.store(scales + (expert * groups + group) * capacity + slot, scale, mask=inside)


@triton.jit
def sum_kernel(y, ids, place, weights, out, hidden, capacity, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum of weight * y[expert, place] over the row's choices."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(K):
        entry = row * K + choice
        expert = tl.load(ids + entry).to(tl.int64)
        slot = tl.load(place + entry).to(tl.int64)
        value = tl.load(y + (expert * capacity + slot) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + entry) * value
    tl.store(out + row * hidden + column, total.to(tl.bfloat16), mask=inside)
