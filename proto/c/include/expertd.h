/* Sessions of expertd: a client on the same host shares memory with the service.
 *
 * Every function returns 0, or a negative EXPERTD_E... code, or the positive code of gRPC with which the service ended a call.
 * Where a function fails, a sentence is written to `error` (if it is not NULL): `error_bytes` bytes at most, with a final zero.
 * Threads may share a session. Every call is bounded in time. docs/sessions.md says how memory and rings are used. */
#ifndef EXPERTD_H
#define EXPERTD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A pointer is NULL or an argument does not fit. */
#define EXPERTD_EINVALID (-1)
/* The session could not be opened. */
#define EXPERTD_EOPEN (-2)
/* As many calls as the session allows are in flight. */
#define EXPERTD_EBUSY (-3)
/* No completion came in time. The service may still read and write the places of the call. */
#define EXPERTD_ETIMEOUT (-4)
/* The session has ended. */
#define EXPERTD_EENDED (-5)

#define EXPERTD_BF16 1
#define EXPERTD_F16 2
#define EXPERTD_F32 3

/* Flags of a call. */
#define EXPERTD_GIVEN_ROUTING 1u         /* ids and weights hold the routing */
#define EXPERTD_RETURN_ROUTING 2u        /* the service writes the routing to ids and weights */
#define EXPERTD_TOKEN_IDS 4u             /* token_ids holds ids of tokens */
#define EXPERTD_EXCLUDE_SHARED 8u        /* leave out the shared experts */
#define EXPERTD_EXPECT_WEIGHT_VERSION 16u /* fail unless weight_version is loaded */

typedef struct expertd_session expertd_session;

/* Places are offsets into the session's row area in bytes, multiples of 64. Until the call's end the service reads rows and
 * writes output; places that it writes must not overlap any other place of a call in flight. */
typedef struct {
  uint64_t rows;           /* [tokens, hidden] */
  uint64_t output;         /* [tokens, hidden] */
  uint64_t ids;            /* [tokens, k] int32 */
  uint64_t weights;        /* [tokens, k] float32 */
  uint64_t token_ids;      /* [tokens] int32 */
  uint64_t weight_version;
  uint64_t timeout_us;     /* deadline of the call; 0 for none */
  uint32_t layer;
  uint32_t tokens;
  uint32_t dtype;          /* EXPERTD_BF16, EXPERTD_F16 or EXPERTD_F32 */
  uint32_t k;              /* 0 for the layer's own number */
  uint32_t flags;
  uint32_t reserved;       /* 0 */
} expertd_call;

typedef struct {
  uint64_t generation;
  uint64_t weight_version;
  uint64_t first_step;
  uint64_t last_step;
  uint32_t steps;
  uint32_t ranks;
  uint64_t queue_ns;
  uint64_t step_ns;
  uint64_t phase_ns[7];    /* copy_in, gate, prepare, dispatch, experts, combine, copy_out */
  uint32_t tokens_per_rank[8];
  uint64_t retry_after_ns; /* after a failure; 0 if unknown */
} expertd_receipt;

/* Opens a session on `address` ("unix:PATH") with `rows_bytes` bytes for rows and `calls` calls in flight. */
int expertd_session_open(const char *address, uint64_t rows_bytes, uint32_t calls, uint32_t timeout_ms,
                         expertd_session **session, char *error, size_t error_bytes);

/* Closes a session; NULL is allowed. No other thread may use it any more, and its memory must not be used afterwards. */
void expertd_session_close(expertd_session *session);

/* The row area and its size in bytes. */
uint8_t *expertd_session_rows(const expertd_session *session, uint64_t *bytes);

/* Elements of a row. */
uint32_t expertd_session_hidden(const expertd_session *session);

/* The model as an encoded expertd.v1.GetModelResponse (protobuf); valid until the session is closed. */
const uint8_t *expertd_session_model(const expertd_session *session, size_t *bytes);

/* Starts a call and stores its number in `call_number`. */
int expertd_session_submit(expertd_session *session, const expertd_call *call, uint64_t *call_number, char *error,
                           size_t error_bytes);

/* Waits for the end of a call. After EXPERTD_ETIMEOUT it may be waited for again. `receipt` may be NULL. */
int expertd_session_wait(expertd_session *session, uint64_t call_number, uint32_t timeout_ms,
                         expertd_receipt *receipt, char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif
#endif
