// Times one MoE layer of OLMoE's shape in llama.cpp's library for tensors, ggml: gate, softmax, choice of 8 experts, three
// grouped products, SwiGLU, weighted sum. README.md beside cpu_compare.py says how to build it.
//
//     llama_layer FORMAT THREADS SECONDS TOKENS...
//
// FORMAT is a name that ggml knows (bf16, q8_0, q4_0, q4_K, mxfp4). A step is one pass through LAYERS layers with fresh random
// rows, so that weights are cold; times are per layer. Prints one JSON object per number of tokens.

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

enum { HIDDEN = 2048, WIDTH = 1024, EXPERTS = 64, TOP_K = 8, LAYERS = 3 };
// Different experts of a layer; the others repeat their weights at other addresses, because quantising takes long.
enum { DISTINCT = 4, MAX_STEPS = 4096, MIN_STEPS = 3, GRAPH = 256 };

static void fail(const char * what) {
    fprintf(stderr, "llama_layer: %s\n", what);
    exit(1);
}

static void * allocate(size_t bytes) {
    void * memory = malloc(bytes);
    if (!memory) fail("out of memory");
    return memory;
}

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// A number from a distribution close to the normal one.
static float random_normal(void) {
    static unsigned long long state = 0x9e3779b97f4a7c15ULL;
    int sum = 0;
    for (int i = 0; i < 4; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        sum += (int) (state >> 40 & 0xffff) - 0x8000;
    }
    return sum / 37837.0f;
}

static void fill(float * values, size_t count, float deviation) {
    for (size_t i = 0; i < count; i++) values[i] = deviation * random_normal();
}

// One projection of all experts, [EXPERTS, rows, cols], and the values of the distinct ones.
struct Projection {
    struct ggml_tensor * tensor;
    float * values;
    int rows, cols;
};

struct Layer {
    struct ggml_tensor * gate_inp;
    float * gate_values;
    struct Projection gate, up, down;
    struct ggml_tensor * in, * out;
};

// Whether the CPU backend multiplies a tensor of this type and shape if it lies in a buffer of type `kind`.
static bool supports(ggml_backend_dev_t device, ggml_backend_buffer_type_t kind, enum ggml_type type, int rows, int cols) {
    struct ggml_init_params params = {8 * ggml_tensor_overhead(), NULL, true};
    struct ggml_context * context = ggml_init(params);
    struct ggml_tensor * weights = ggml_new_tensor_3d(context, type, cols, rows, EXPERTS);
    struct ggml_tensor * x = ggml_new_tensor_3d(context, GGML_TYPE_F32, cols, TOP_K, 512);
    struct ggml_tensor * ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, TOP_K, 512);
    struct ggml_tensor * product = ggml_mul_mat_id(context, weights, x, ids);
    weights->buffer = ggml_backend_buft_alloc_buffer(kind, 0);
    bool supported = ggml_backend_dev_supports_op(device, product);
    ggml_backend_buffer_free(weights->buffer);
    ggml_free(context);
    return supported;
}

// The type of buffer that holds the weights: the first that repacks them, as in llama.cpp by default, or plain memory.
static ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device, enum ggml_type type) {
    ggml_backend_dev_get_extra_bufts_t extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * kind = extra ? extra(device) : NULL; kind && *kind; kind++) {
        if (supports(device, *kind, type, WIDTH, HIDDEN) && supports(device, *kind, type, HIDDEN, WIDTH)) return *kind;
    }
    return ggml_backend_cpu_buffer_type();
}

static void fill_projection(struct Projection * projection) {
    struct ggml_tensor * tensor = projection->tensor;
    int rows = projection->rows, cols = projection->cols;
    size_t count = (size_t) rows * cols, bytes = ggml_row_size(tensor->type, cols) * rows;
    char * data = allocate(bytes * EXPERTS);
    projection->values = allocate(sizeof(float) * count * DISTINCT);
    fill(projection->values, count * DISTINCT, 0.02f);
    ggml_quantize_chunk(tensor->type, projection->values, data, 0, (int64_t) rows * DISTINCT, cols, NULL);
    for (int expert = DISTINCT; expert < EXPERTS; expert++) {
        memcpy(data + expert * bytes, data + expert % DISTINCT * bytes, bytes);
    }
    ggml_get_type_traits(tensor->type)->to_float(data, projection->values, count * DISTINCT);
    ggml_backend_tensor_set(tensor, data, 0, bytes * EXPERTS);
    free(data);
}

// The layer as llama.cpp builds it for OLMoE: probabilities over all experts, those of the chosen ones not scaled to 1.
static struct ggml_tensor * build(struct ggml_context * context, struct ggml_cgraph * graph, struct Layer * layer, int tokens) {
    struct ggml_tensor * logits = ggml_mul_mat(context, layer->gate_inp, layer->in);
    struct ggml_tensor * probabilities = ggml_soft_max(context, logits);
    struct ggml_tensor * chosen = ggml_argsort_top_k(context, probabilities, TOP_K);
    struct ggml_tensor * weights =
        ggml_get_rows(context, ggml_reshape_3d(context, probabilities, 1, EXPERTS, tokens), chosen);
    struct ggml_tensor * x = ggml_reshape_3d(context, layer->in, HIDDEN, 1, tokens);
    struct ggml_tensor * up = ggml_mul_mat_id(context, layer->up.tensor, x, chosen);
    struct ggml_tensor * gate = ggml_mul_mat_id(context, layer->gate.tensor, x, chosen);
    struct ggml_tensor * inner = ggml_swiglu_split(context, gate, up);
    struct ggml_tensor * down = ggml_mul_mat_id(context, layer->down.tensor, inner, chosen);
    struct ggml_tensor * weighted = ggml_mul(context, down, weights), * sum = NULL;
    for (int i = 0; i < TOP_K; i++) {
        struct ggml_tensor * part =
            ggml_view_2d(context, weighted, HIDDEN, tokens, weighted->nb[2], i * weighted->nb[1]);
        sum = sum ? ggml_add(context, sum, part) : part;
    }
    ggml_set_output(sum);
    ggml_build_forward_expand(graph, sum);
    return sum;
}

static void multiply(const float * matrix, const double * x, double * out, int rows, int cols) {
    for (int row = 0; row < rows; row++) {
        out[row] = 0.0;
        for (int col = 0; col < cols; col++) out[row] += matrix[(size_t) row * cols + col] * x[col];
    }
}

// The root mean square of the difference between a row of the output and the result in f64 with the dequantised weights,
// relative to that result.
static double error(const struct Layer * layer, const float * row, const float * output) {
    double x[HIDDEN], logits[EXPERTS], gate[WIDTH], up[WIDTH], down[HIDDEN], expected[HIDDEN] = {0};
    for (int i = 0; i < HIDDEN; i++) x[i] = row[i];
    multiply(layer->gate_values, x, logits, EXPERTS, HIDDEN);
    double total = 0.0;
    for (int i = 0; i < EXPERTS; i++) total += exp(logits[i]);
    bool taken[EXPERTS] = {false};
    for (int k = 0; k < TOP_K; k++) {
        int best = -1;
        for (int i = 0; i < EXPERTS; i++) {
            if (!taken[i] && (best < 0 || logits[i] > logits[best])) best = i;
        }
        taken[best] = true;
        size_t at = (size_t) (best % DISTINCT) * WIDTH * HIDDEN;
        multiply(layer->gate.values + at, x, gate, WIDTH, HIDDEN);
        multiply(layer->up.values + at, x, up, WIDTH, HIDDEN);
        for (int i = 0; i < WIDTH; i++) gate[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
        multiply(layer->down.values + at, gate, down, HIDDEN, WIDTH);
        for (int i = 0; i < HIDDEN; i++) expected[i] += exp(logits[best]) / total * down[i];
    }
    double difference = 0.0, norm = 0.0;
    for (int i = 0; i < HIDDEN; i++) {
        difference += (output[i] - expected[i]) * (output[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    return sqrt(difference / norm);
}

static int ascending(const void * a, const void * b) {
    double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

static void measure(ggml_backend_t backend, struct Layer * layers, const char * format, const char * buffer, int threads,
                    double seconds, int tokens) {
    struct ggml_init_params params = {GRAPH * ggml_tensor_overhead() + ggml_graph_overhead(), NULL, true};
    struct ggml_context * context = ggml_init(params);
    struct ggml_cgraph * graph = ggml_new_graph(context);
    for (int i = 0; i < LAYERS; i++) {
        layers[i].in = ggml_new_tensor_2d(context, GGML_TYPE_F32, HIDDEN, tokens);
        ggml_set_input(layers[i].in);
        layers[i].out = build(context, graph, &layers[i], tokens);
    }
    ggml_gallocr_t allocator = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
    if (!ggml_gallocr_alloc_graph(allocator, graph)) fail("the graph cannot be allocated");

    size_t count = (size_t) HIDDEN * tokens;
    float * rows = allocate(sizeof(float) * count), * output = allocate(sizeof(float) * count);
    static double wall[MAX_STEPS], cpu[MAX_STEPS];
    double end = 0.0, worst = 0.0;
    int steps = 0;
    for (int step = -1; steps < MAX_STEPS; step++) {
        for (int i = 0; i < LAYERS; i++) {
            fill(rows, count, 1.0f);
            ggml_backend_tensor_set(layers[i].in, rows, 0, sizeof(float) * count);
        }
        double wall_start = now(CLOCK_MONOTONIC), cpu_start = now(CLOCK_PROCESS_CPUTIME_ID);
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) fail("the graph failed");
        double cpu_end = now(CLOCK_PROCESS_CPUTIME_ID), wall_end = now(CLOCK_MONOTONIC);
        if (step < 0) {
            // The first step warms up; its last layer's last row is checked.
            ggml_backend_tensor_get(layers[LAYERS - 1].out, output, 0, sizeof(float) * count);
            size_t last = count - HIDDEN;
            worst = error(&layers[LAYERS - 1], rows + last, output + last);
            end = now(CLOCK_MONOTONIC) + seconds;
            continue;
        }
        wall[steps] = (wall_end - wall_start) / LAYERS;
        cpu[steps++] = (cpu_end - cpu_start) / LAYERS;
        if (steps >= MIN_STEPS && wall_end > end) break;
    }
    qsort(wall, steps, sizeof(double), ascending);
    qsort(cpu, steps, sizeof(double), ascending);
    printf("{\"format\": \"%s\", \"buffer\": \"%s\", \"threads\": %d, \"tokens\": %d, \"steps\": %d, \"median_seconds\": %.7f, "
           "\"least_seconds\": %.7f, \"median_cpu_seconds\": %.7f, \"least_cpu_seconds\": %.7f, \"error\": %.2e}\n",
           format, buffer, threads, tokens, steps, wall[steps / 2], wall[0], cpu[steps / 2], cpu[0], worst);
    fflush(stdout);
    free(rows);
    free(output);
    ggml_gallocr_free(allocator);
    ggml_free(context);
}

int main(int argc, char ** argv) {
    if (argc < 5) fail("usage: llama_layer FORMAT THREADS SECONDS TOKENS...");
    enum ggml_type type = GGML_TYPE_COUNT;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * name = ggml_type_name((enum ggml_type) i);
        if (name && strcmp(name, argv[1]) == 0) type = (enum ggml_type) i;
    }
    if (type == GGML_TYPE_COUNT) fail("unknown format");
    int threads = atoi(argv[2]);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, threads);
    ggml_backend_buffer_type_t kind = buffer_type(ggml_backend_get_device(backend), type);

    struct ggml_init_params params = {8 * LAYERS * ggml_tensor_overhead(), NULL, true};
    struct ggml_context * plain = ggml_init(params), * packed = ggml_init(params);
    struct Layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        struct Layer * layer = &layers[i];
        layer->gate_inp = ggml_new_tensor_2d(plain, GGML_TYPE_F32, HIDDEN, EXPERTS);
        layer->gate = (struct Projection) {ggml_new_tensor_3d(packed, type, HIDDEN, WIDTH, EXPERTS), NULL, WIDTH, HIDDEN};
        layer->up = (struct Projection) {ggml_new_tensor_3d(packed, type, HIDDEN, WIDTH, EXPERTS), NULL, WIDTH, HIDDEN};
        layer->down = (struct Projection) {ggml_new_tensor_3d(packed, type, WIDTH, HIDDEN, EXPERTS), NULL, HIDDEN, WIDTH};
    }
    if (!ggml_backend_alloc_ctx_tensors_from_buft(plain, ggml_backend_cpu_buffer_type())) fail("out of memory");
    ggml_backend_buffer_t weights = ggml_backend_alloc_ctx_tensors_from_buft(packed, kind);
    if (!weights) fail("out of memory");
    ggml_backend_buffer_set_usage(weights, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (int i = 0; i < LAYERS; i++) {
        struct Layer * layer = &layers[i];
        layer->gate_values = allocate(sizeof(float) * EXPERTS * HIDDEN);
        fill(layer->gate_values, EXPERTS * HIDDEN, 0.02f);
        ggml_backend_tensor_set(layer->gate_inp, layer->gate_values, 0, sizeof(float) * EXPERTS * HIDDEN);
        fill_projection(&layer->gate);
        fill_projection(&layer->up);
        fill_projection(&layer->down);
    }
    for (int i = 4; i < argc; i++) {
        measure(backend, layers, argv[1], ggml_backend_buft_name(kind), threads, atof(argv[3]), atoi(argv[i]));
    }
    ggml_backend_free(backend);
    return 0;
}
