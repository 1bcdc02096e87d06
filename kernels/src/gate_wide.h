// The gate's kernel for many tokens. Returns a cudaError_t.
#pragma once
#include <cuda_runtime.h>

#include "step.h"

namespace expertd {

int launch_gate_wide(const GateParams& params, uint32_t tokens_at_most, cudaStream_t stream);

}  // namespace expertd
