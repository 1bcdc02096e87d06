// The gate's kernel for many tokens. Returns a cudaError_t.
#pragma once
#include <cuda_runtime.h>

#include "step.h"

namespace expertd {

// Number of rows of a launch, in a step of at most `tokens` rows.
inline uint32_t rows_of_launch(const GateParams& params, uint32_t tokens) { return params.rows == 0 ? tokens : params.rows; }

int launch_gate_wide(const GateParams& params, uint32_t tokens_at_most, cudaStream_t stream);

}  // namespace expertd
