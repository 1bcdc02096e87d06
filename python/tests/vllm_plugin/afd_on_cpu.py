"""The attention side of vLLM's AFD plugin on a processor, for which that plugin has no worker: its runner and models over vLLM's for processors."""

from afd_plugin.model_executor.models import deepseek_v2
from afd_plugin.model_executor.models.model_utils import get_afd_model_config
from afd_plugin.v1.worker.attention_model_runner import AFDAttentionModelRunner
from vllm.platforms import current_platform
from vllm.v1.worker import cpu_worker


class _Runner(AFDAttentionModelRunner, cpu_worker.CPUModelRunner):
    """Connects, and tells models which connector to use."""


class _AsOnGpus:
    """The processor's platform. The plugin's models keep gates and hand over rows of MoE layers as they do on a GPU."""

    device_type = "cuda"

    def __getattr__(self, name):
        return getattr(current_platform, name)


class Worker(cpu_worker.CPUWorker):
    """As the plugin's worker for GPUs."""

    def init_device(self):
        self.vllm_config.model_config = get_afd_model_config(self.vllm_config.model_config)
        deepseek_v2.native.current_platform = _AsOnGpus()
        cpu_worker.CPUModelRunner = _Runner
        super().init_device()
