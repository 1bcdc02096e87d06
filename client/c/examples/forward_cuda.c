/* A call through a CUDA session, captured in a graph and replayed: zeros to layer 0, and the first element of the answer.
 *
 *   cargo build --release -p expertd-c
 *   cc -I $CUDA_HOME/include -I client/c/include client/c/examples/forward_cuda.c -L target/release -lexpertd_c \
 *      -L $CUDA_HOME/lib64 -lcudart -o forward_cuda
 *   LD_LIBRARY_PATH=target/release:$CUDA_HOME/lib64 ./forward_cuda unix:/run/expertd/session.sock 0 */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include "expertd.h"

enum { TOKENS = 8, REPLAYS = 100 };

static int failed(const char *what, int code, const char *text) {
  fprintf(stderr, "%s: %d: %s\n", what, code, text);
  return 1;
}

#define CUDA(call)                                                                   \
  do {                                                                               \
    cudaError_t status = (call);                                                     \
    if (status != cudaSuccess) return failed(#call, status, cudaGetErrorString(status)); \
  } while (0)

int main(int count, char **arguments) {
  if (count < 2) return failed("usage", 0, "forward_cuda unix:PATH [GPU]");
  uint32_t gpu = count > 2 ? (uint32_t)atoi(arguments[2]) : 0;
  char error[512];
  expertd_cuda_session *session = NULL;
  int code = expertd_session_open_cuda(arguments[1], gpu, 64 << 20, 1, 0, 10000, &session, error, sizeof error);
  if (code != 0) return failed("open", code, error);

  uint64_t memory = expertd_cuda_memory(session, NULL);
  size_t bytes = TOKENS * (size_t)expertd_cuda_hidden(session) * 4;
  expertd_prepared_call layer = {.layer = 0, .dtype = EXPERTD_F32, .max_rows = TOKENS, .rows = 0};
  layer.output = (bytes + 63) / 64 * 64;
  uint32_t prepared;
  code = expertd_cuda_prepare(session, &layer, 1, &prepared, error, sizeof error);
  if (code != 0) return failed("prepare", code, error);

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CUDA(cudaSetDevice((int)gpu));
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CUDA(cudaMemsetAsync((void *)memory, 0, bytes, stream));
  code = expertd_cuda_enqueue(session, prepared, 0, TOKENS, stream, error, sizeof error);
  if (code != 0) return failed("enqueue", code, error);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < REPLAYS; ++i) CUDA(cudaGraphLaunch(replay, stream));

  float first;
  CUDA(cudaMemcpyAsync(&first, (void *)(memory + layer.output), sizeof first, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  uint64_t calls, failures;
  code = expertd_cuda_status(session, 0, &calls, &failures, error, sizeof error);
  if (code != 0) return failed("call", code, error);
  printf("%u tokens, %llu calls, %llu failures; the first element is %g\n", TOKENS, (unsigned long long)calls,
         (unsigned long long)failures, first);
  CUDA(cudaGraphExecDestroy(replay));
  expertd_cuda_close(session);
  return 0;
}
