/* Repacking of expert weights on the device: from the panels of CPU ranks to those of the expert MLP kernels. */
#ifndef EXPERTD_EXPERTS_REPACK_H
#define EXPERTD_EXPERTS_REPACK_H

#include "experts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Formats of matrices that are packed for processors; all become bf16. */
enum ExpertdRepackFrom { EXPERTD_FROM_BF16 = 0, EXPERTD_FROM_F16 = 1, EXPERTD_FROM_F32 = 2 };

/* Rewrites one matrix of each of some experts, device to device; source and destination must not overlap. */
typedef struct ExpertdRepackParams {
    const void* source;      /* panels of `width` rows as PackedMatrix has them, of the first expert; 16-byte aligned */
    void* panels;            /* bf16 destination of the first expert, 1024-byte aligned */
    uint64_t source_stride;  /* bytes between experts in the source */
    uint64_t panel_stride;   /* bytes between experts in the destination */
    int32_t experts;
    int32_t hidden;          /* of the destination, padded */
    int32_t inter;           /* of the destination, padded */
    int32_t kind;            /* enum ExpertdPackKind; a pair of gate and up is interleaved in the source's panels */
    int32_t source_features; /* output features of each projection in the source, without padding */
    int32_t source_k;        /* input features in the source, without padding */
    int32_t width;           /* rows of a panel of the source: 16 or 32 */
    int32_t source_format;   /* enum ExpertdRepackFrom */
} ExpertdRepackParams;

int expertd_experts_repack(const ExpertdRepackParams* params, void* stream);

#ifdef __cplusplus
}
#endif
#endif
