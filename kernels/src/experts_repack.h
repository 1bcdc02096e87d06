/* Repacking of expert weights on the device: from the panels of CPU ranks to the layout of the expert MLP kernels. */
#ifndef EXPERTD_EXPERTS_REPACK_H
#define EXPERTD_EXPERTS_REPACK_H

#include "experts.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Formats of matrices that are packed for processors. */
enum ExpertdRepackFrom {
    EXPERTD_FROM_BF16 = 0,
    EXPERTD_FROM_F16 = 1,
    EXPERTD_FROM_F32 = 2,
    EXPERTD_FROM_FP8 = 3,
    EXPERTD_FROM_MXFP4 = 4,
    EXPERTD_FROM_NVFP4 = 5,
    EXPERTD_FROM_MXFP8 = 6,
    EXPERTD_FROM_INT4 = 7
};

/* Types of scales within the blocks of such a matrix. */
enum ExpertdRepackScales {
    EXPERTD_SCALES_BF16 = 0,
    EXPERTD_SCALES_F16 = 1, /* with an f32 factor of each row, in ExpertdRepackParams.scales */
    EXPERTD_SCALES_F32 = 2
};

/* Rewrites one matrix of each of some experts, device to device; source and destination must not overlap, and FP8 and MXFP8 sources have
 * no NaN codes (CPU ranks hold such matrices in f32). The results are the bytes that a loader packs from the same weights. All formats become bf16. FP8 also becomes FP8 and W8A8 if its scales span multiples of 128 k or all
 * of k, INT4 with groups of at least 32 k becomes INT4 and INT4_ZEROS, MXFP4, NVFP4 with f16 scales, and MXFP8 become themselves. */
typedef struct ExpertdRepackParams {
    const void* source;      /* panels of `width` rows as PackedMatrix has them, of the first expert; 16-byte aligned */
    const float* scales;     /* PackedMatrix's scales apart from the panels, of the first expert; null if there are none */
    void* panels;            /* destination of the first expert, 1024-byte aligned */
    float* row_scales;       /* destination, [experts][2][inter] or [experts][hidden]; null for bf16 */
    uint64_t source_stride;  /* bytes between experts in the source, and between their scales */
    uint64_t panel_stride;   /* bytes between experts in the destination */
    int32_t experts;
    int32_t hidden;          /* of the destination, padded */
    int32_t inter;           /* of the destination, padded */
    int32_t kind;            /* enum ExpertdPackKind; a pair of gate and up is interleaved in the source's panels */
    int32_t format;          /* enum ExpertdFormat of the destination */
    int32_t source_features; /* output features of each projection in the source, without padding */
    int32_t source_k;        /* input features in the source, without padding */
    int32_t width;           /* rows of a panel of the source: 16 or 32 */
    int32_t source_format;   /* enum ExpertdRepackFrom */
    int32_t scale_blocks;    /* FP8: blocks of 32 k that share a vector of scales */
    int32_t block_groups;    /* groups of k with scales in a block of 32: 1, 2 or 4; 0 for formats without scales in their blocks */
    int32_t scale_type;      /* enum ExpertdRepackScales, if there are such groups */
    int32_t has_zeros;       /* non-zero: the groups have zero points */
    int32_t reserved;
} ExpertdRepackParams;

int expertd_experts_repack(const ExpertdRepackParams* params, void* stream);

/* The same by the processor, for tests; all addresses are of host memory. */
int expertd_experts_repack_host(const ExpertdRepackParams* params);

#ifdef __cplusplus
}
#endif
#endif
