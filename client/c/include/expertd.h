/* Sessions of expertd: a client on the same host shares memory with the service, one on another host writes into it over NIXL.
 *
 * Every function returns 0, or a negative EXPERTD_E... code, or the positive code of gRPC with which the service ended a call.
 * Where a function fails, a sentence is written to `error` (if it is not NULL): `error_bytes` bytes at most, with a final zero.
 * Threads may share a session; a fork may not use it (EXPERTD_EINVALID). Every call is bounded in time. docs/sessions.md says how
 * memory and rings are used. */
#ifndef EXPERTD_H
#define EXPERTD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A pointer is NULL, an argument does not fit, there is no such call, or a fork uses the session of its parent. */
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

/* How a network session is opened; 0 and NULL for what is not needed. Files are in PEM. */
typedef struct {
  const char *library;     /* NIXL's library or its folder; NULL for EXPERTD_NIXL and the system's linker */
  const char *ca;          /* file with certificate authorities of the service; turns TLS on for the call that opens the session */
  const char *cert;        /* file with the client's certificate chain */
  const char *key;         /* file with its private key */
  const char *server_name; /* name in the service's certificate, if it differs from the host of the address */
  const char *token_file;  /* file with the client's token */
  uint32_t insecure;       /* 1 for services beyond loopback: rows are neither encrypted nor authenticated */
  uint32_t reserved;       /* 0 */
} expertd_network;

/* As expertd_session_open, with a service that was started with --network-listen; `address` is that of its public API, "HOST:PORT".
 * `network` may be NULL. docs/network.md says who is trusted. */
int expertd_session_open_network(const char *address, const expertd_network *network, uint64_t rows_bytes, uint32_t calls,
                                 uint32_t timeout_ms, expertd_session **session, char *error, size_t error_bytes);

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

/* Waits for the end of a call, which is told once: EXPERTD_EINVALID for a call that was waited for with another result than
 * EXPERTD_ETIMEOUT, or never started. `receipt` may be NULL. */
int expertd_session_wait(expertd_session *session, uint64_t call_number, uint32_t timeout_ms,
                         expertd_receipt *receipt, char *error, size_t error_bytes);

/* Forgets a call that no thread waits for or will wait for. Its places must not be used again until the session is closed, because the
 * service may still read and write them. */
void expertd_session_forget(expertd_session *session, uint64_t call_number);

/* CUDA sessions: rows lie in memory that the session allocates on the caller's GPU, and a call is work of a stream. The CUDA driver is
 * loaded at run time; without it, opening fails. */

typedef struct expertd_cuda_session expertd_cuda_session;

/* A call that is described once. Places are offsets into the session's memory in bytes, multiples of 64. */
typedef struct {
  uint32_t layer;
  uint32_t dtype;          /* EXPERTD_BF16, EXPERTD_F16 or EXPERTD_F32 */
  uint32_t max_rows;       /* largest number of rows of a call, at most 65535 */
  uint32_t flags;          /* as of expertd_call */
  uint64_t rows;           /* [max_rows, hidden] */
  uint64_t output;         /* [max_rows, hidden]; must not overlap rows */
  uint64_t ids;            /* [max_rows, k] int32, with EXPERTD_GIVEN_ROUTING or EXPERTD_RETURN_ROUTING; a multiple of 4 */
  uint64_t weights;        /* [max_rows, k] float32, likewise */
  uint64_t token_ids;      /* [max_rows] int32, with EXPERTD_TOKEN_IDS; a multiple of 4 */
  uint64_t timeout_us;     /* deadline of a call; 0 for none */
  uint64_t weight_version; /* with EXPERTD_EXPECT_WEIGHT_VERSION */
  uint32_t k;              /* experts per token of ids and weights; 0 without them */
  uint32_t reserved;       /* 0 */
} expertd_prepared_call;

/* Allocates `memory_bytes` bytes on GPU `device` (its number in this process) and opens a session with `doorbells` doorbells: calls
 * that may be in flight at once. `routing_bytes` is the room for ids, weights and token ids of one call, each rounded up to a multiple of
 * 64 bytes; 0 if the service's gate routes all calls. Uses the GPU's primary context, as the CUDA runtime does. */
int expertd_session_open_cuda(const char *address, uint32_t device, uint64_t memory_bytes, uint32_t doorbells,
                              uint32_t routing_bytes, uint32_t timeout_ms, expertd_cuda_session **session, char *error, size_t error_bytes);

/* Closes a session, after waiting for the GPU's work; NULL is allowed. Graphs that captured its calls must not be launched
 * afterwards. */
void expertd_cuda_close(expertd_cuda_session *session);

/* Device address of the memory, and its size in bytes. */
uint64_t expertd_cuda_memory(const expertd_cuda_session *session, uint64_t *bytes);

/* Elements of a row. */
uint32_t expertd_cuda_hidden(const expertd_cuda_session *session);

/* Describes `count` calls to the service. The number of the first is stored in `first`; the others follow. After a failure none can be
 * enqueued; if `count` exceeds 1024, some of them may count towards the service's limit of 65536 calls. */
int expertd_cuda_prepare(const expertd_cuda_session *session, const expertd_prepared_call *calls, size_t count,
                         uint32_t *first, char *error, size_t error_bytes);

/* Enqueues a call of the first `rows` rows on `stream` (a cudaStream_t or CUstream of the session's GPU), which may be captured.
 * Work that was enqueued before has written the rows; work that is enqueued later finds the output. A doorbell has one call in flight
 * at a time: use it on one stream, or on streams that wait for each other. */
int expertd_cuda_enqueue(const expertd_cuda_session *session, uint32_t prepared, uint32_t doorbell, uint32_t rows,
                         void *stream, char *error, size_t error_bytes);

/* Stores the numbers of a doorbell's calls that ended and that failed (either pointer may be NULL). Returns the code and the sentence
 * of the last call that failed, or 0 if none did. */
int expertd_cuda_status(const expertd_cuda_session *session, uint32_t doorbell, uint64_t *calls, uint64_t *failures,
                        char *error, size_t error_bytes);

#ifdef __cplusplus
}
#endif
#endif
