"""SGLang for tests: a distribution of it if one is installed, and modules with its names, classes and order of calls otherwise.

A distribution needs GPUs' kernels to import; they have stand-ins without function, and the state of a server has values of one rank.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from typing import NamedTuple

import torch

INSTALLED = importlib.util.find_spec("sglang") is not None
LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer"
LOADER = "sglang.srt.model_loader.loader"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
of = types.SimpleNamespace


def arguments(**changes):
    """ServerArgs of one rank."""
    whole = dict(
        tp_size=1, ep_size=1, dp_size=1, pp_size=1, attn_cp_size=1, moe_a2a_backend="none", enable_eplb=False, enable_lora=None,
        lora_paths=None, speculative_algorithm=None, enable_two_batch_overlap=False, enable_single_batch_overlap=False,
        enable_torch_compile=False, disaggregation_mode="null", kt_weight_path=None, load_format="auto", moe_runner_backend="auto",
        model_path="somebody/model", chunked_prefill_size=8192,
    )
    return of(**{**whole, **changes})


SERVER = arguments()


class Nothing:
    """A stand-in for whatever a module of kernels has."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else Nothing()

    def __getitem__(self, key):
        return Nothing()


class Absent(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else Nothing()


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = ("sgl_kernel", "IPython")

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


def prepare_distribution():
    """Imports what the plugin hooks, with the state of a server of one rank."""
    sys.meta_path.append(AbsentModules())
    import transformers

    # SGLang was made for one version of transformers, and others have some of the models that it adds.
    register = transformers.AutoConfig.register
    transformers.AutoConfig.register = staticmethod(lambda name, config, exist_ok=False: register(name, config, exist_ok=True))
    layer, runtime = importlib.import_module(LAYER), importlib.import_module("sglang.srt.runtime_context")
    standard = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard")
    parallel = of(moe_ep_size=1, moe_ep_rank=0, moe_tp_size=1, moe_tp_rank=0, attn_dp_size=1, tp_group=None)
    moe = of(ep_join_mode=None, moe_runner_backend="auto", enable_w4a4_mxfp4_megamoe=False, enable_paged_experts=False)
    for module in (layer, standard, runtime):
        module.get_parallel = lambda: parallel
        module.get_exec = lambda: of(moe=moe)
        module.get_server_args = lambda: SERVER
        module.get_flags = lambda: of(moe=of(in_speculative_scope=False))
    layer.is_allocation_symmetric = lambda: False
    layer.get_tp_group = lambda: None
    layer.create_kt_config_from_server_args = lambda *_: None


class HookType:
    AROUND = "around"


class HookRegistry:
    """As SGLang's: hooks are applied once all plugins ran, and what fails then is not raised."""

    hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type == HookType.AROUND
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks.items():
            place, name = target.rsplit(".", 1)
            module, owner = place.rsplit(".", 1)
            holder = getattr(sys.modules[module], owner)
            static = isinstance(inspect.getattr_static(holder, name), staticmethod)
            original = getattr(holder, name)
            wrapped = (lambda o, h: lambda *a, **k: h(o, *a, **k))(original, hook)
            setattr(holder, name, staticmethod(wrapped) if static else wrapped)
        cls.hooks = {}


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_output: StandardTopKOutput


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class FusedMoEMethodBase:
    runner = None

    def process_weights_after_loading(self, layer):
        pass


class FusedMoE(torch.nn.Module):
    def __init__(
        self, num_experts, hidden_size, intermediate_size, layer_id, top_k=None, num_fused_shared_experts=0, quant_config=None,
        prefix="", apply_router_weight_on_input=False, routed_scaling_factor=None,
    ):
        super().__init__()
        self.quant_config = quant_config
        self.quant_method = quant_config and quant_config.get_quant_method(self, prefix)
        if self.quant_method is None:
            self.w13_weight = torch.nn.Parameter(torch.zeros(num_experts, 2 * intermediate_size, hidden_size))
            return
        self.quant_method.create_weights(self, num_experts, hidden_size, intermediate_size, torch.float32, weight_loader=None)
        config = of(routed_scaling_factor=routed_scaling_factor, apply_router_weight_on_input=apply_router_weight_on_input)
        self.quant_method.create_moe_runner(self, config)
        self.runner = self.quant_method.runner

    def forward(self, hidden_states, topk_output):
        dispatched = StandardDispatchOutput(hidden_states, None, topk_output)
        return self.quant_method.apply(layer=self, dispatch_output=dispatched).hidden_states


class DefaultModelLoader:
    @staticmethod
    def load_weights_and_postprocess(model, weights, target_device):
        model.load_weights(weights)
        for module in model.modules():
            if getattr(module, "quant_method", None) is not None:
                module.quant_method.process_weights_after_loading(module)


class SchedulerOutputStreamer:
    def stream_output(self, reqs, return_logprob):
        reqs.append("given out")


def prepare_stubs():
    """Modules with SGLang's names."""

    def module(name, **content):
        made = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(content)
        while name:
            sys.modules.setdefault(name, made if name == made.__name__ else types.ModuleType(name))
            sys.modules[name].__path__ = []
            name = name.rpartition(".")[0]

    module("sglang", __version__="0.5.17")
    module(LAYER, FusedMoE=FusedMoE)
    module(LOADER, DefaultModelLoader=DefaultModelLoader)
    module(STREAMER, SchedulerOutputStreamer=SchedulerOutputStreamer)
    module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)
    module("sglang.srt.layers.moe.token_dispatcher", StandardCombineInput=StandardCombineInput)
    checker = of(format_is_standard=lambda output: isinstance(output, StandardTopKOutput))
    module("sglang.srt.layers.moe.topk", TopKOutputChecker=checker, StandardTopKOutput=StandardTopKOutput)
    module("sglang.srt.layers.quantization.base_config", FusedMoEMethodBase=FusedMoEMethodBase)
    module("sglang.srt.runtime_context", get_server_args=lambda: SERVER)


(prepare_distribution if INSTALLED else prepare_stubs)()
