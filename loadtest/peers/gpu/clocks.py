"""SM clock and power of the GPU while a loop is timed, sampled by a thread."""

import statistics
import threading

import torch

# Seconds between two samples.
PERIOD = 0.005


class Clocks:
    """Samples while the `with` block runs. Without NVML there are no samples."""

    def __init__(self, index=0):
        self.mhz, self.watts = [], []
        self.ended = threading.Event()
        self.thread = None
        try:
            import pynvml

            pynvml.nvmlInit()
            # NVML numbers all GPUs, PyTorch those that CUDA_VISIBLE_DEVICES names.
            uuid = torch.cuda.get_device_properties(index).uuid
            self.nvml, self.device = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except Exception as error:  # any failure of a library that only watches
            print(f"no clocks: {error}", flush=True)
            self.nvml = None

    def sample(self):
        while not self.ended.wait(PERIOD):
            self.mhz.append(self.nvml.nvmlDeviceGetClockInfo(self.device, self.nvml.NVML_CLOCK_SM))
            self.watts.append(self.nvml.nvmlDeviceGetPowerUsage(self.device) / 1000)

    def __enter__(self):
        if self.nvml is not None:
            self.thread = threading.Thread(target=self.sample)
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def json(self):
        if not self.mhz:
            return {}
        return {
            "sm_mhz": statistics.median(self.mhz),
            "sm_mhz_range": [min(self.mhz), max(self.mhz)],
            "watts": round(statistics.median(self.watts)),
        }
