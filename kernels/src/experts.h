/* Launch interface of the expert MLP kernels (bf16, Hopper).
 *
 * y[a] = down(act(gate(x[row_index[a]]), up(x[row_index[a]])) * row_weight[a])   for every assignment a
 *
 * An assignment is one (received row, local expert) pair. Assignments are sorted by expert: those of expert e are
 * a in [expert_offsets[e], expert_offsets[e + 1]). y holds one bf16 row per assignment, already weighted; the combine
 * kernel adds the rows of a token in a fixed order in f32. All counts are read on the device; the launch never depends
 * on them, so one captured graph serves every step and, through the layer table, every layer of a shape.
 *
 * Functions return a cudaError_t as int. None of them allocates; launches are graph-capturable.
 * Weight layout: experts_layout.cuh. Everything is documented in docs/decisions/0011-gpu-experts.md. */
#ifndef EXPERTD_EXPERTS_H
#define EXPERTD_EXPERTS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EXPERTD_MAX_EXPERTS = 512, /* local experts of one rank */
    EXPERTD_ERROR_ROWS = 0x45580001 /* written to *error: the assignments do not fit panel_rows */
};

enum ExpertdActivation {
    EXPERTD_SWIGLU = 0,         /* silu(g) * u */
    EXPERTD_SWIGLU_CLAMPED = 1, /* silu(min(g, limit)) * clamp(u, -limit, limit) */
    EXPERTD_SWIGLU_OAI = 2      /* g * sigmoid(alpha * g) * (u + 1), g and u clamped as above */
};

enum ExpertdLaunchFlags {
    /* Programmatic dependent launch: the kernel may start before the previous kernel of the stream has ended and waits
     * for it (griddepcontrol.wait) before it reads anything. */
    EXPERTD_LAUNCH_PROGRAMMATIC = 1,
    /* Cooperative launch: the runtime checks that all blocks can be resident at once. Blocks wait for each other's h. */
    EXPERTD_LAUNCH_COOPERATIVE = 2
};

/* One layer's weights on this rank; an array of these lives in device memory. */
typedef struct ExpertdLayerWeights {
    const void* gate_up;       /* bf16 panels, [experts] x panel(2 * inter rows, hidden), rows interleaved */
    const void* down;          /* bf16 panels, [experts] x panel(hidden rows, inter) */
    const float* gate_up_bias; /* [experts][2][inter], gate first, or null */
    const float* down_bias;    /* [experts][hidden], or null; multiplied by the routing weight */
} ExpertdLayerWeights;

typedef struct ExpertdExpertsParams {
    const ExpertdLayerWeights* layers; /* device table */
    const uint32_t* layer;             /* device: index into layers; null means 0 */
    const int32_t* expert_offsets;     /* device [experts + 1], ascending, first 0 */
    const int32_t* row_index;          /* device [assignments]: row of x */
    const float* row_weight;           /* device [assignments] */
    const void* x;                     /* device bf16 rows, 16-byte aligned */
    void* y;                           /* device bf16 [assignments][hidden] */
    void* x_panels;                    /* device workspace bf16 [hidden / 64][panel_rows][64], 1024-byte aligned */
    void* h;                           /* device workspace bf16 [inter / 64][panel_rows][64], 1024-byte aligned */
    uint32_t* state;                   /* device, expertd_experts_state_words(experts) words, zeroed once at set-up */
    uint32_t* error;                   /* device error word or null: non-zero means return without writing anything */
    uint64_t x_stride;                 /* elements between rows of x, a multiple of 8 */
    int32_t panel_rows;                /* rows of x_panels and h: at least max assignments + 7 * experts */
    int32_t experts;                   /* local experts, 1 ... EXPERTD_MAX_EXPERTS */
    int32_t hidden;                    /* multiple of 64 */
    int32_t inter;                     /* multiple of 64 */
    int32_t activation;                /* enum ExpertdActivation */
    float alpha;                       /* EXPERTD_SWIGLU_OAI */
    float limit;                       /* EXPERTD_SWIGLU_CLAMPED, EXPERTD_SWIGLU_OAI */
    int32_t weight_on_input;           /* non-zero: the routing weight scales the row before gate and up (Llama 4) */
    int32_t blocks;                    /* thread blocks, rounded up to an even number; 0 = one per SM */
    int32_t tile_tokens;               /* widest token tile: 32, 64, 128, 192, 256; 0 = chosen on the device */
    int32_t tile_rows;                 /* weight rows of a tile: 16, 32, 64, 128, 256; 0 = chosen on the device */
    int32_t flags;                     /* enum ExpertdLaunchFlags */
} ExpertdExpertsParams;

/* 32-bit words that ExpertdExpertsParams.state points to. */
uint32_t expertd_experts_state_words(int32_t experts);

/* Once per process and device, before the first launch or capture. */
int expertd_experts_setup(void);

/* The whole expert MLP in one persistent kernel. `stream` is a cudaStream_t. */
int expertd_experts_launch(const ExpertdExpertsParams* params, void* stream);

/* Which matrix a pack makes. */
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

#ifdef __cplusplus
}
#endif
#endif
