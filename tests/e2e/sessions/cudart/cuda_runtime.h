/* The parts of the CUDA runtime's interface that client/c/examples/forward_cuda.c uses, for machines without CUDA:
 * libcudart.c beside it has functions that fail. */
#ifndef CUDA_RUNTIME_STAND_IN_H
#define CUDA_RUNTIME_STAND_IN_H

#include <stddef.h>

typedef enum { cudaSuccess = 0, cudaErrorNoDevice = 100 } cudaError_t;
typedef struct stand_in_stream *cudaStream_t;
typedef struct stand_in_graph *cudaGraph_t;
typedef struct stand_in_graph_exec *cudaGraphExec_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost = 2 };

const char *cudaGetErrorString(cudaError_t status);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *replay, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t replay);

#endif
