// The text of the CUDA runtime's error codes, which launches return.
#include <cuda_runtime.h>

extern "C" const char* expertd_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
