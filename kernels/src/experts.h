/* Launch interface of the expert MLP kernels (bf16 or FP8 rows; weights in bf16, FP8, MXFP4, INT4, NVFP4 or MXFP8; Hopper).
 *
 * y[a] = down(act(gate(x[row_index[a]]), up(x[row_index[a]])) * row_weight[a])   for every assignment a
 *
 * An assignment is one (received row, local expert) pair. Assignments are sorted by expert: those of expert e are
 * a in [expert_offsets[e], expert_offsets[e + 1]). y holds one bf16 row per assignment, already multiplied by the routing weight;
 * the combine kernel adds the rows of a token in a fixed order in f32. All counts are read on the device. The launch never depends
 * on them, so one captured graph serves every step and, through the layer table, every layer of a shape.
 *
 * Functions return a cudaError_t as int. None of them allocates; launches can be captured in graphs.
 * Weight layout: experts_layout.cuh. How the kernels work: docs/kernels.md, "The experts' kernel". */
#ifndef EXPERTD_EXPERTS_H
#define EXPERTD_EXPERTS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EXPERTD_MAX_EXPERTS = 512, /* local experts of one rank */
    EXPERTD_ERROR_ROWS = 0x45580001, /* written to *error: the assignments do not fit panel_rows */
    EXPERTD_ERROR_TIMEOUT = 0x45580002 /* written to *error: a wait inside the kernel outlasted deadline_ns */
};

enum ExpertdActivation {
    EXPERTD_SWIGLU = 0,         /* silu(g) * u */
    EXPERTD_SWIGLU_CLAMPED = 1, /* silu(min(g, limit)) * clamp(u, -limit, limit) */
    EXPERTD_SWIGLU_OAI = 2      /* g * sigmoid(alpha * g) * (u + 1), with g and u clamped as in EXPERTD_SWIGLU_CLAMPED */
};

/* Formats of weights in device memory. */
enum ExpertdFormat {
    EXPERTD_BF16 = 0,
    EXPERTD_FP8 = 1,  /* e4m3 with f32 scales per row and 128 k, and per row */
    EXPERTD_MXFP4 = 2, /* e2m1 with e8m0 scales per row and 32 k, and f32 scales per row */
    /* As EXPERTD_FP8, but in another layout, and multiplied with FP8 rows: x is quantised to e4m3 with a scale per row and 128 k, h
     * with a scale per row and 128 features. inter is a multiple of 128. */
    EXPERTD_W8A8 = 3,
    EXPERTD_INT4 = 4,      /* 4-bit integers minus 8, with f16 scales per row and 32 k, and f32 scales per row */
    EXPERTD_INT4_ZEROS = 5, /* the same with a zero point from 0 to 15 for each row and 32 k instead of 8 */
    EXPERTD_NVFP4 = 6,     /* e2m1 with e4m3 scales per row and 16 k, and f32 scales per row */
    EXPERTD_MXFP8 = 7,     /* e4m3 with e8m0 scales per row and 32 k, and f32 scales per row */
    /* As EXPERTD_MXFP4, but widened to e4m3 and multiplied with FP8 rows, quantised as for EXPERTD_W8A8, in panels whose elements are in
     * another order (w4a8_token_byte). inter is a multiple of 128. */
    EXPERTD_W4A8 = 8
};

/* Formats of the rows of x. */
enum ExpertdRows {
    EXPERTD_ROWS_BF16 = 0, /* [hidden] bf16 */
    EXPERTD_ROWS_FP8 = 1   /* W8A8, W4A8: [hidden] e4m3, then f32 [ceil(hidden / 128)] scales */
};

enum {
    /* Special values of ExpertdExpertsParams.tile_rows. */
    EXPERTD_TILE_TALL = 1, /* 256 weight rows in one block */
    EXPERTD_TILE_TURNS = 2, /* two blocks share a segment, and in each block the two warpgroups take segments in turn */
    EXPERTD_TILE_TOKEN_ROWS = 3, /* bf16, W8A8 with block_scales, W4A8 with EXPERTD_LAUNCH_MANY_ROWS: 256 weight rows and 128 tokens, which are wgmma's M */
    EXPERTD_TILE_TOKEN_PAIRS = 4 /* as EXPERTD_TILE_TOKEN_ROWS, and two blocks with neighbouring token tiles share their weights */
};

enum ExpertdLaunchFlags {
    /* Programmatic dependent launch: the kernel may start before the previous kernel of the stream has ended and waits
     * for it (griddepcontrol.wait) before it reads anything but layer and layers, which must have been written earlier. */
    EXPERTD_LAUNCH_PROGRAMMATIC = 1,
    /* Cooperative launch: the runtime checks that all blocks can be resident at once. Blocks wait for each other's h. */
    EXPERTD_LAUNCH_COOPERATIVE = 2,
    /* A kernel for experts with few rows each. It gives the right results for any counts whose work (k blocks of all units of 16 weight
     * rows) fits 32 bits, but reads an expert's weights once for every eight rows. tile_tokens and tile_rows do not matter. h must have
     * room for bf16 [assignments][inter] in every format; x_panels and the scales of x and h are not used. */
    EXPERTD_LAUNCH_FEW_ROWS = 4,
    /* W4A8: a kernel for experts with many rows each, with the same results. tile_rows is 0, EXPERTD_TILE_TOKEN_ROWS or _PAIRS, and
     * tile_tokens does not matter. */
    EXPERTD_LAUNCH_MANY_ROWS = 8
};

/* One layer's weights on this rank; an array of these lives in device memory. */
typedef struct ExpertdLayerWeights {
    const void* gate_up; /* panels or units, [experts] x (2 * inter rows, hidden), rows interleaved; 1024-byte aligned */
    const void* down;    /* panels or units, [experts] x (hidden rows, inter); 1024-byte aligned */
    const float* gate_up_bias;  /* [experts][2][inter], gate first, or null */
    const float* down_bias;     /* [experts][hidden], or null; multiplied by the routing weight */
    const float* gate_up_scale; /* all but bf16: [experts][2][inter], gate first: factors of the sums of rows */
    const float* down_scale;    /* all but bf16: [experts][hidden] */
    uint64_t block_scales;      /* W8A8: not 0 if 128 neighbouring rows of gate, up and down, from a multiple of 128 on, have the same
                                   scales of k blocks */
} ExpertdLayerWeights;

typedef struct ExpertdExpertsParams {
    const ExpertdLayerWeights* layers; /* device table */
    const uint32_t* layer;             /* device: index into layers; null means 0 */
    const int32_t* expert_offsets;     /* device [experts + 1], ascending; the first is not 0 where other experts come before */
    const int32_t* row_index;          /* device [assignments]: row of x */
    const float* row_weight;           /* device [assignments] */
    const void* x;                     /* device rows of x_format, 16-byte aligned */
    void* y;                           /* device bf16 [assignments][hidden] */
    void* x_panels;                    /* device workspace bf16 [hidden / 64][panel_rows][64], 1024-byte aligned;
                                          W8A8, W4A8: e4m3 [ceil(hidden / 128)][panel_rows][128] */
    void* h;                           /* device workspace bf16 [inter / 64][panel_rows][64], 1024-byte aligned;
                                          W8A8, W4A8: e4m3 [inter / 128][panel_rows][128] */
    float* x_scales;                   /* W8A8, W4A8: device workspace [ceil(hidden / 128)][panel_rows], 32-byte aligned; else null */
    float* h_scales;                   /* W8A8, W4A8: device workspace [inter / 128][panel_rows], 32-byte aligned; else null */
    uint32_t* state;                   /* device, expertd_experts_state_words(experts) words, zeroed once at set-up */
    uint32_t* error;                   /* device error word or null: non-zero means return without writing anything */
    uint64_t x_stride;                 /* bytes between rows of x, a multiple of 16 */
    int32_t panel_rows;                /* rows of x_panels and h: at least max assignments + 7 * experts; W8A8, W4A8: multiple of 8 */
    int32_t experts;                   /* local experts, 1 ... EXPERTD_MAX_EXPERTS */
    int32_t hidden;                    /* multiple of 64 */
    int32_t inter;                     /* multiple of 64 */
    int32_t activation;                /* enum ExpertdActivation */
    float alpha;                       /* EXPERTD_SWIGLU_OAI */
    float limit;                       /* EXPERTD_SWIGLU_CLAMPED, EXPERTD_SWIGLU_OAI */
    int32_t weight_on_input;           /* non-zero: the routing weight scales the row before gate and up (Llama 4) */
    int32_t blocks;                    /* thread blocks, rounded up to an even number; 0: one per SM */
    int32_t tile_tokens;               /* widest token tile: 32, 64 or 128; bf16 also 192 or 256; portable kernels: up to 48 or more; 0: chosen on the device */
    int32_t tile_rows;                 /* weight rows of a tile: 16, 32, 64, 128 or 256 (shared by two blocks); bf16 with up to
                                          128 tokens also EXPERTD_TILE_TALL or _TURNS; 0: chosen on the device. bf16 also has EXPERTD_TILE_TOKEN_ROWS
                                          and _PAIRS. W8A8 only has 0, 256 (two blocks with 256 rows each of their own token
                                          tiles), EXPERTD_TILE_TALL and, with block_scales, _TOKEN_ROWS and _PAIRS. W4A8
                                          only has 0 and EXPERTD_TILE_TALL, other shapes with EXPERTD_LAUNCH_MANY_ROWS, and no kernel for few rows */
    int32_t flags;                     /* enum ExpertdLaunchFlags */
    int32_t format;                    /* enum ExpertdFormat: the format of all layers that are launched with these parameters */
    int32_t x_format;                  /* enum ExpertdRows */
    int32_t power_of_two_scales;       /* W8A8, W4A8: non-zero rounds the scales of x and h up to powers of two */
    uint64_t deadline_ns;              /* longest wait of a block for others, after which the kernel sets *error and ends; 0: no limit */
} ExpertdExpertsParams;

/* Size of ExpertdExpertsParams.state in 32-bit words. */
uint32_t expertd_experts_state_words(int32_t experts);

/* Prepares the kernels. Must be called once per process and device, before the first launch or capture. */
int expertd_experts_setup(void);

/* Launches the whole expert MLP, which is one persistent kernel. `stream` is a cudaStream_t. */
int expertd_experts_launch(const ExpertdExpertsParams* params, void* stream);

/* The matrix that a packing function writes. */
enum ExpertdPackKind { EXPERTD_PACK_GATE_UP = 0, EXPERTD_PACK_DOWN = 1 };

/* Rewrites row-major checkpoint weights into panels, device to device; source and destination must not overlap. */
typedef struct ExpertdPackParams {
    const void* first;      /* bf16 [experts] of gate [inter][hidden], or of down [hidden][inter] */
    const void* second;     /* bf16 [experts] of up [inter][hidden]; null for down */
    void* panels;           /* bf16 destination, 1024-byte aligned */
    uint64_t expert_stride; /* elements between the experts of `first`, and of `second` */
    int32_t experts;
    int32_t hidden;
    int32_t inter;
    int32_t kind; /* enum ExpertdPackKind */
} ExpertdPackParams;

int expertd_experts_pack(const ExpertdPackParams* params, void* stream);

/* Rewrites one expert's matrix that is not bf16 into units or, for W8A8, panels, device to device. The row scale of a row that holds a NaN
 * code or scale becomes NaN, so the outputs of that row are NaN for any input. */
typedef struct ExpertdPackNarrowParams {
    const void* first;          /* gate [inter][hidden] or down [hidden][inter]: FP8 bytes, or nibbles (low one first) */
    const void* second;         /* up [inter][hidden]; null for down */
    const void* first_scales;   /* FP8, W8A8: f32 [rows][ceil(k / 128)]; MXFP4, MXFP8, W4A8: e8m0 [rows][k / 32]; INT4: f16 [rows][k / 32];
                                   NVFP4: e4m3 [rows][k / 16] */
    const void* second_scales;  /* scales of up; null for down */
    const void* first_zeros;    /* INT4 with zero points: bytes [rows][k / 32]; else null */
    const void* second_zeros;   /* zero points of up; null for down */
    const float* row_scales_in; /* [2][inter] or [hidden]: further factors of rows, 1 if there are none */
    float* row_scales;          /* destination, as large as row_scales_in: the scales of ExpertdLayerWeights */
    void* units;                /* destination, 16-byte aligned, expertd_experts_matrix_bytes() */
    int32_t hidden;
    int32_t inter;
    int32_t kind;   /* enum ExpertdPackKind */
    int32_t format; /* any but EXPERTD_BF16 */
} ExpertdPackNarrowParams;

int expertd_experts_pack_narrow(const ExpertdPackNarrowParams* params, void* stream);

/* Size in bytes of one expert's gate_up or down in a format. hidden and inter are multiples of 64. */
uint64_t expertd_experts_matrix_bytes(int32_t format, int32_t kind, int32_t hidden, int32_t inter);

#ifdef __cplusplus
}
#endif
#endif
