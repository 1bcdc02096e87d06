/* Functions of cuda_runtime.h in this folder. There is no device, so all of them fail. */
#include "cuda_runtime.h"

const char *cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "no CUDA-capable device is detected";
}

cudaError_t cudaSetDevice(int device) {
  (void)device;
  return cudaErrorNoDevice;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  (void)stream;
  return cudaErrorNoDevice;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  (void)stream;
  (void)mode;
  return cudaErrorNoDevice;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  (void)stream;
  (void)graph;
  return cudaErrorNoDevice;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
  (void)memory;
  (void)value;
  (void)bytes;
  (void)stream;
  return cudaErrorNoDevice;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *replay, cudaGraph_t graph, unsigned long long flags) {
  (void)replay;
  (void)graph;
  (void)flags;
  return cudaErrorNoDevice;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t stream) {
  (void)replay;
  (void)stream;
  return cudaErrorNoDevice;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)to;
  (void)from;
  (void)bytes;
  (void)kind;
  (void)stream;
  return cudaErrorNoDevice;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  (void)stream;
  return cudaErrorNoDevice;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t replay) {
  (void)replay;
  return cudaErrorNoDevice;
}
