#!/usr/bin/env python3
"""expertd's own layer in the peers' timing loop: the kernels of a rank alone, gate to combine, without the copies of a step.

Needs the library of loadtest/peers/layer:

cargo build --release -p expertd-peer-layer --features cuda
expertd_layer.py [--dtype bf16|fp8|mxfp4|int4|int4_g128|nvfp4] [--shape S] [--tokens T ...]

"""

import ctypes
import sys
from pathlib import Path

import torch

import layer as common

LIBRARY = Path(__file__).resolve().parents[3] / "target/release/libexpertd_peer_layer.so"
FORMATS = {torch.Tensor: 0, common.Quantised: 1, common.Mxfp4: 2, common.Int4: 3, common.Nvfp4: 4}

# Elements of an INT4 scale on the device; wider groups repeat theirs, as in a service.
INT4_GROUP = 32


class Shape(ctypes.Structure):
    """`LayerShape` of loadtest/peers/layer."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in "hidden width experts top_k format gpt_oss max_tokens layers rows_by_experts portable".split()
    ]


class Tensors(ctypes.Structure):
    """`LayerTensors` of loadtest/peers/layer."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in "gate gate_bias gate_up gate_up_scales down down_scales gate_up_bias down_bias".split()
    ]


def load(path):
    library = ctypes.CDLL(str(path))
    handle = ctypes.c_void_p
    library.expertd_layers_open.restype = handle
    library.expertd_layers_open.argtypes = [ctypes.POINTER(Shape)]
    library.expertd_layers_add.argtypes = [handle, ctypes.POINTER(Tensors)]
    library.expertd_layers_rows.argtypes = [handle, ctypes.c_uint32]
    library.expertd_layers_step.argtypes = [handle, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, handle]
    library.expertd_layers_check.argtypes = [handle]
    library.expertd_layers_close.argtypes = [handle]
    library.expertd_layers_close.restype = None
    return library


def must(status):
    if status != 0:
        sys.exit("expertd_layer: the library failed; its message is above")


def stored(weights):
    """Codes and scales of a matrix as the library takes them: gate rows before up rows, FP8 scales for every row."""
    if isinstance(weights, common.Quantised):
        return weights.values, weights.scales.repeat_interleave(common.BLOCK, 1).contiguous()
    if isinstance(weights, common.Mxfp4):
        return weights.codes, weights.exponents
    if isinstance(weights, common.Int4):
        return weights.codes, weights.scales.repeat_interleave(weights.group // INT4_GROUP, 2).contiguous()
    if isinstance(weights, common.Nvfp4):
        return weights.codes, weights.scales
    return weights, None


def in_halves(tensor):
    """gpt-oss's rows, which are gate and up in turn, as gate rows before up rows."""
    return torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1).contiguous()


class Layers:
    """The library's handle for one size and for the layers that steps use. `flags` are the last fields of `LayerShape`."""

    def __init__(self, library, shape, tokens, flags):
        self.library, self.shape, self.tokens, self.flags = library, shape, tokens, flags
        self.layers, self.kept, self.handle = [], [], None

    def index(self, layer):
        if layer not in self.layers:
            self.layers.append(layer)
        return self.layers.index(layer)

    def open(self):
        s, first = self.shape, self.layers[0]
        sizes = (s.hidden, s.width, s.experts, s.top_k, FORMATS[type(first.down)], s.gpt_oss)
        sizes += (self.tokens, len(self.layers), *self.flags)
        torch.cuda.synchronize()
        self.handle = self.library.expertd_layers_open(Shape(*map(int, sizes)))
        must(0 if self.handle else -1)
        for layer in self.layers:
            (gate_up, gate_up_scales), (down, down_scales) = stored(layer.gate_up), stored(layer.down)
            gate_up_bias = layer.gate_up_bias
            if s.gpt_oss:
                gate_up, gate_up_scales, gate_up_bias = map(in_halves, (gate_up, gate_up_scales, gate_up_bias))
            self.kept.append(gate_up_bias)
            parts = (layer.gate, layer.gate_bias, gate_up, gate_up_scales, down, down_scales, gate_up_bias, layer.down_bias)
            torch.cuda.synchronize()
            must(self.library.expertd_layers_add(self.handle, Tensors(*[0 if t is None else t.data_ptr() for t in parts])))
        must(self.library.expertd_layers_rows(self.handle, self.tokens))

    def step(self, index, rows, out):
        if self.handle is None:
            self.open()
        stream = torch.cuda.current_stream().cuda_stream
        must(self.library.expertd_layers_step(self.handle, index, rows.data_ptr(), out.data_ptr(), stream))

    def close(self):
        if self.handle is not None:
            torch.cuda.synchronize()
            must(self.library.expertd_layers_check(self.handle))
            self.library.expertd_layers_close(self.handle)
            self.handle = None


def preparer(path=LIBRARY, rows_by_experts=False, portable=False):
    library, last = load(path), []

    def prepare(world, shape, tokens):
        if world.ranks > 1:
            return None
        while last:
            last.pop().close()
        layers = Layers(library, shape, tokens, (rows_by_experts, portable))
        last.append(layers)

        def make(layer, rows, out):
            index = layers.index(layer)
            return lambda: layers.step(index, rows, out)

        return make

    return prepare


if __name__ == "__main__":
    common.run("expertd", __doc__, preparer(), formats=tuple(["bf16", *common.STORED]), exact=True)
