/* Makes one call through a session: forward ADDRESS LAYER TOKENS. ADDRESS is unix:PATH of a service on this host, or HOST:PORT of one
 * with network sessions. Row i has the value i + 1 in every element, in f32. Prints the sum of the output's elements.
 *
 *   cargo build --release -p expertd-c
 *   cc -I client/c/include client/c/examples/forward.c -L target/release -lexpertd_c -o forward
 *   LD_LIBRARY_PATH=target/release ./forward unix:/run/expertd/session.sock 0 8 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expertd.h"

int main(int argc, char **argv) {
  char error[256] = "";
  if (argc != 4) {
    fprintf(stderr, "usage: %s unix:PATH|HOST:PORT LAYER TOKENS\n", argv[0]);
    return 2;
  }
  expertd_session *session = NULL;
  int opened = strncmp(argv[1], "unix:", 5) == 0
                   ? expertd_session_open(argv[1], 1 << 22, 4, 10000, &session, error, sizeof error)
                   : expertd_session_open_network(argv[1], NULL, 1 << 22, 4, 10000, &session, error, sizeof error);
  if (opened != 0) {
    fprintf(stderr, "open: %s\n", error);
    return 1;
  }
  uint32_t hidden = expertd_session_hidden(session);
  uint32_t tokens = (uint32_t)atoi(argv[3]);
  uint64_t area_bytes = 0;
  uint8_t *area = expertd_session_rows(session, &area_bytes);
  uint64_t bytes = (uint64_t)tokens * hidden * sizeof(float);
  uint64_t output_at = (bytes + 63) / 64 * 64;
  if (output_at + bytes > area_bytes) {
    fprintf(stderr, "%u rows do not fit\n", tokens);
    return 1;
  }
  float *rows = (float *)area;
  for (uint32_t row = 0; row < tokens; row++)
    for (uint32_t at = 0; at < hidden; at++) rows[row * hidden + at] = (float)(row + 1);

  expertd_call call = {0};
  call.rows = 0;
  call.output = output_at;
  call.layer = (uint32_t)atoi(argv[2]);
  call.tokens = tokens;
  call.dtype = EXPERTD_F32;
  uint64_t number = 0;
  int code = expertd_session_submit(session, &call, &number, error, sizeof error);
  expertd_receipt receipt;
  if (code == 0) code = expertd_session_wait(session, number, 10000, &receipt, error, sizeof error);
  if (code != 0) {
    fprintf(stderr, "call: code %d: %s\n", code, error);
    expertd_session_close(session);
    return 1;
  }
  const float *output = (const float *)(area + output_at);
  double sum = 0;
  for (uint64_t at = 0; at < (uint64_t)tokens * hidden; at++) sum += output[at];
  printf("generation %llu sum %.9e\n", (unsigned long long)receipt.generation, sum);
  expertd_session_close(session);
  return 0;
}
