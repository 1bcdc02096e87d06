// The expert kernel of each format, which return a cudaError_t. Each is in its own source file, so that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "experts.h"

namespace expertd {

int setup_bf16();
int setup_fp8();
int setup_mxfp4();
int setup_w8a8();
int setup_int4();
int setup_int4_zeros();
int setup_nvfp4();
int setup_mxfp8();
int setup_w4a8();
int setup_w4a8_rows();
int launch_bf16(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_few(const ExpertdExpertsParams& p, cudaStream_t stream); // all formats with EXPERTD_LAUNCH_FEW_ROWS
int launch_fp8(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_mxfp4(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_w8a8(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_int4(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_int4_zeros(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_nvfp4(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_mxfp8(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_w4a8(const ExpertdExpertsParams& p, cudaStream_t stream);
int launch_w4a8_rows(const ExpertdExpertsParams& p, cudaStream_t stream); // EXPERTD_LAUNCH_MANY_ROWS

// Launches a kernel whose blocks are all resident, with the attributes that p.flags asks for.
inline cudaError_t launch_resident(void (*kernel)(ExpertdExpertsParams), const ExpertdExpertsParams& p, int blocks, int threads,
                                   int shared_bytes, cudaStream_t stream) {
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (p.flags & EXPERTD_LAUNCH_PROGRAMMATIC) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (p.flags & EXPERTD_LAUNCH_COOPERATIVE) {
        attributes[count].id = cudaLaunchAttributeCooperative;
        attributes[count++].val.cooperative = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, p);
}

} // namespace expertd
