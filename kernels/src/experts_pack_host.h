/* Packing of expert weights by the processor, for loaders that must leave the multiprocessors to other processes. The results are the
 * bytes that expertd_experts_pack and expertd_experts_pack_narrow write; all addresses are of host memory. */
#ifndef EXPERTD_EXPERTS_PACK_HOST_H
#define EXPERTD_EXPERTS_PACK_HOST_H

#include "experts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes `count` panels of 64 k from panel `first` on. `experts` must be 1. */
int expertd_experts_pack_host(const ExpertdPackParams* params, uint64_t first, uint64_t count);

/* Writes `count` units of 16 rows, over all of k, from unit `first` on, and the row scales of their rows. */
int expertd_experts_pack_narrow_host(const ExpertdPackNarrowParams* params, uint64_t first, uint64_t count);

#ifdef __cplusplus
}
#endif
#endif
