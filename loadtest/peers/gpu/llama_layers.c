// Times a walk through MoE layers of Qwen3-30B-A3B's shape in llama.cpp's library for tensors, ggml, with the experts of some layers in
// host memory as with llama.cpp's option -ncmoe. README.md in the folder above says how to build it.
//
//     llama_layers FORMAT THREADS SECONDS HOST ON_HOST TOKENS...
//
// FORMAT is a name that ggml knows (bf16, q4_0, mxfp4). ON_HOST of the layers, the first ones, keep their experts on the host. HOST says
// how: `pinned` (llama.cpp's choice without mmap; the CPU computes steps below 32 rows, and for others experts are copied to the GPU),
// `pinned-cpu` (the same without copies, -nopo), or `repacked` for the CPU's kernels (--no-host). Each layer is what llama.cpp builds:
// norm, gate, softmax, choice, three grouped products, SwiGLU, weighted sum and residual, in its order of nodes. ggml's scheduler divides
// the graph between GPU and CPU. A step is one walk with fresh random rows from host memory; times are per layer. Prints one JSON object
// per number of tokens.

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

enum { HIDDEN = 2048, WIDTH = 768, EXPERTS = 128, TOP_K = 8, LAYERS = 4 };
// Different experts of a projection; the others, and other layers, repeat their weights at other addresses.
enum { DISTINCT = 4, MAX_STEPS = 4096, MIN_STEPS = 5, WARM_UP = 3, GRAPH = 1024 };
enum { GATE, UP, DOWN, PROJECTIONS };
static const int ROWS[PROJECTIONS] = {WIDTH, WIDTH, HIDDEN}, COLS[PROJECTIONS] = {HIDDEN, HIDDEN, WIDTH};

static void fail(const char * what) {
    fprintf(stderr, "llama_layers: %s\n", what);
    exit(1);
}

static void * allocate(size_t bytes) {
    void * memory = malloc(bytes);
    if (!memory) fail("out of memory");
    return memory;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

// A number from a distribution close to the normal one.
static float random_normal(void) {
    static unsigned long long state = 0x9e3779b97f4a7c15ULL;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += (int) (state >> 16 * i & 0xffff) - 0x8000;
    return sum / 37837.0f;
}

static void fill(float * values, size_t count, float deviation) {
    for (size_t i = 0; i < count; i++) values[i] = deviation * random_normal();
}

struct Layer {
    bool on_host;
    struct ggml_tensor * norm, * gate_inp, * experts[PROJECTIONS];
    float * gate_values;
};

// The distinct experts of each projection, as stored and as f32.
static char * stored[PROJECTIONS];
static float * values[PROJECTIONS];

// A type of buffer in which a backend multiplies these experts.
static bool supports(ggml_backend_dev_t device, ggml_backend_buffer_type_t kind, enum ggml_type type) {
    struct ggml_init_params params = {8 * ggml_tensor_overhead(), NULL, true};
    struct ggml_context * context = ggml_init(params);
    bool supported = true;
    for (int projection = UP; projection <= DOWN; projection++) {
        struct ggml_tensor * weights = ggml_new_tensor_3d(context, type, COLS[projection], ROWS[projection], EXPERTS);
        struct ggml_tensor * x = ggml_new_tensor_3d(context, GGML_TYPE_F32, COLS[projection], TOP_K, 512);
        struct ggml_tensor * ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, TOP_K, 512);
        weights->buffer = ggml_backend_buft_alloc_buffer(kind, 0);
        supported = supported && ggml_backend_dev_supports_op(device, ggml_mul_mat_id(context, weights, x, ids));
        ggml_backend_buffer_free(weights->buffer);
        weights->buffer = NULL;
        ggml_reset(context);
    }
    ggml_free(context);
    return supported;
}

static ggml_backend_buffer_type_t repacked(ggml_backend_dev_t device, enum ggml_type type) {
    ggml_backend_dev_get_extra_bufts_t extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * kind = extra ? extra(device) : NULL; kind && *kind; kind++) {
        if (supports(device, *kind, type)) return *kind;
    }
    return ggml_backend_cpu_buffer_type();
}

static void make_values(enum ggml_type type) {
    for (int p = 0; p < PROJECTIONS; p++) {
        size_t count = (size_t) ROWS[p] * COLS[p] * DISTINCT;
        values[p] = allocate(sizeof(float) * count);
        stored[p] = allocate(ggml_row_size(type, COLS[p]) * ROWS[p] * DISTINCT);
        fill(values[p], count, 0.02f);
        ggml_quantize_chunk(type, values[p], stored[p], 0, (int64_t) ROWS[p] * DISTINCT, COLS[p], NULL);
        ggml_get_type_traits(type)->to_float(stored[p], values[p], count);
    }
}

static void set_experts(struct ggml_tensor * tensor, int projection) {
    size_t bytes = ggml_row_size(tensor->type, COLS[projection]) * ROWS[projection];
    char * data = allocate(bytes * EXPERTS);
    for (int expert = 0; expert < EXPERTS; expert++) {
        memcpy(data + expert * bytes, stored[projection] + expert % DISTINCT * bytes, bytes);
    }
    ggml_backend_tensor_set(tensor, data, 0, bytes * EXPERTS);
    free(data);
}

// A layer as llama.cpp builds it for Qwen3 MoE, in the order in which it expands the graph.
static struct ggml_tensor * build(struct ggml_context * context, struct ggml_cgraph * graph, ggml_backend_sched_t scheduler,
                                  ggml_backend_t gpu, const struct Layer * layer, struct ggml_tensor * residual, int tokens) {
    struct ggml_tensor * norm = ggml_rms_norm(context, residual, 1e-6f);
    if (gpu) ggml_backend_sched_set_tensor_backend(scheduler, norm, gpu);
    struct ggml_tensor * x = ggml_mul(context, norm, layer->norm);
    struct ggml_tensor * probabilities = ggml_soft_max(context, ggml_mul_mat(context, layer->gate_inp, x));
    struct ggml_tensor * chosen = ggml_argsort_top_k(context, probabilities, TOP_K);
    struct ggml_tensor * weights =
        ggml_get_rows(context, ggml_reshape_3d(context, probabilities, 1, EXPERTS, tokens), chosen);
    weights = ggml_reshape_2d(context, weights, TOP_K, tokens);
    struct ggml_tensor * total = ggml_clamp(context, ggml_sum_rows(context, weights), 6.103515625e-5f, INFINITY);
    weights = ggml_reshape_3d(context, ggml_div(context, weights, total), 1, TOP_K, tokens);
    ggml_build_forward_expand(graph, weights);
    x = ggml_reshape_3d(context, x, HIDDEN, 1, tokens);
    struct ggml_tensor * up = ggml_mul_mat_id(context, layer->experts[UP], x, chosen);
    struct ggml_tensor * gate = ggml_mul_mat_id(context, layer->experts[GATE], x, chosen);
    struct ggml_tensor * inner = ggml_swiglu_split(context, gate, up);
    struct ggml_tensor * down = ggml_mul_mat_id(context, layer->experts[DOWN], inner, chosen);
    struct ggml_tensor * weighted = ggml_mul(context, down, weights), * parts[TOP_K], * sum;
    ggml_build_forward_expand(graph, weighted);
    for (int i = 0; i < TOP_K; i++) {
        parts[i] = ggml_view_2d(context, weighted, HIDDEN, tokens, weighted->nb[2], i * weighted->nb[1]);
        ggml_build_forward_expand(graph, parts[i]);
    }
    sum = parts[0];
    for (int i = 1; i < TOP_K; i++) {
        sum = ggml_add(context, sum, parts[i]);
        ggml_build_forward_expand(graph, sum);
    }
    return ggml_add(context, sum, residual);
}

static void multiply(const float * matrix, const double * x, double * out, int rows, int cols) {
    for (int row = 0; row < rows; row++) {
        double sum = 0.0;
        for (int col = 0; col < cols; col++) sum += matrix[(size_t) row * cols + col] * x[col];
        out[row] = sum;
    }
}

// Adds a layer's output to a row, in f64 with the dequantised weights.
static void reference(const struct Layer * layer, double * row) {
    double x[HIDDEN], logits[EXPERTS], gate[WIDTH], up[WIDTH], down[HIDDEN], sum[HIDDEN] = {0}, squares = 0.0, total = 0.0;
    for (int i = 0; i < HIDDEN; i++) squares += row[i] * row[i];
    for (int i = 0; i < HIDDEN; i++) x[i] = row[i] / sqrt(squares / HIDDEN + 1e-6);
    multiply(layer->gate_values, x, logits, EXPERTS, HIDDEN);
    for (int k = 0; k < TOP_K; k++) {
        int best = 0;
        for (int i = 1; i < EXPERTS; i++) best = logits[i] > logits[best] ? i : best;
        size_t at = (size_t) (best % DISTINCT) * WIDTH * HIDDEN;
        multiply(values[GATE] + at, x, gate, WIDTH, HIDDEN);
        multiply(values[UP] + at, x, up, WIDTH, HIDDEN);
        for (int i = 0; i < WIDTH; i++) gate[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
        multiply(values[DOWN] + at, gate, down, HIDDEN, WIDTH);
        double weight = exp(logits[best]);
        total += weight;
        for (int i = 0; i < HIDDEN; i++) sum[i] += weight * down[i];
        logits[best] = -INFINITY;
    }
    for (int i = 0; i < HIDDEN; i++) row[i] += sum[i] / total;
}

// The root mean square of the difference between what the layers add to a row and the reference, relative to that.
static double error(const struct Layer * layers, const float * in, const float * out) {
    double row[HIDDEN], difference = 0.0, norm = 0.0;
    for (int i = 0; i < HIDDEN; i++) row[i] = in[i];
    for (int i = 0; i < LAYERS; i++) reference(&layers[i], row);
    for (int i = 0; i < HIDDEN; i++) {
        difference += (out[i] - row[i]) * (out[i] - row[i]);
        norm += (row[i] - in[i]) * (row[i] - in[i]);
    }
    return sqrt(difference / norm);
}

static int ascending(const void * a, const void * b) {
    double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

static void measure(ggml_backend_sched_t scheduler, ggml_backend_t gpu, const struct Layer * layers, const char * labels,
                    double seconds, int tokens, bool checked) {
    ggml_backend_sched_reset(scheduler);
    struct ggml_init_params params = {GRAPH * ggml_tensor_overhead() + ggml_graph_overhead(), NULL, true};
    struct ggml_context * context = ggml_init(params);
    struct ggml_cgraph * graph = ggml_new_graph(context);
    struct ggml_tensor * in = ggml_new_tensor_2d(context, GGML_TYPE_F32, HIDDEN, tokens), * x = in;
    ggml_set_input(in);
    for (int i = 0; i < LAYERS; i++) x = build(context, graph, scheduler, gpu, &layers[i], x, tokens);
    ggml_set_output(x);
    ggml_build_forward_expand(graph, x);
    if (!ggml_backend_sched_alloc_graph(scheduler, graph)) fail("the graph cannot be allocated");

    size_t count = (size_t) HIDDEN * tokens, bytes = sizeof(float) * count;
    float * rows = allocate(bytes), * output = allocate(bytes);
    static double times[MAX_STEPS];
    double end = INFINITY, wrong = -1.0;
    int steps = -WARM_UP;
    while (steps < MAX_STEPS && (steps < MIN_STEPS || now() < end)) {
        fill(rows, count, 1.0f);
        double start = now();
        ggml_backend_tensor_set(in, rows, 0, bytes);
        if (ggml_backend_sched_graph_compute(scheduler, graph) != GGML_STATUS_SUCCESS) fail("the graph failed");
        double taken = (now() - start) / LAYERS;
        if (steps == -WARM_UP && checked) {
            ggml_backend_tensor_get(x, output, 0, bytes);
            wrong = error(layers, rows + count - HIDDEN, output + count - HIDDEN);
        }
        if (steps >= 0) times[steps] = taken;
        if (++steps == 0) end = now() + seconds;
    }
    qsort(times, steps, sizeof(double), ascending);
    printf("{%s, \"tokens\": %d, \"splits\": %d, \"steps\": %d, \"median_seconds\": %.7f, \"least_seconds\": %.7f, \"error\": %.2e}\n",
           labels, tokens, ggml_backend_sched_get_n_splits(scheduler), steps, times[steps / 2], times[0], wrong);
    fflush(stdout);
    free(rows);
    free(output);
    ggml_free(context);
}

int main(int argc, char ** argv) {
    if (argc < 7) fail("usage: llama_layers FORMAT THREADS SECONDS HOST ON_HOST TOKENS...");
    enum ggml_type type = GGML_TYPE_COUNT;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * name = ggml_type_name((enum ggml_type) i);
        if (name && strcmp(name, argv[1]) == 0) type = (enum ggml_type) i;
    }
    if (type == GGML_TYPE_COUNT) fail("unknown format");
    int threads = atoi(argv[2]), on_host = atoi(argv[5]);
    ggml_backend_t cpu = ggml_backend_cpu_init(), gpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_GPU, NULL);
    ggml_backend_cpu_set_n_threads(cpu, threads);
    ggml_backend_buffer_type_t plain = ggml_backend_cpu_buffer_type(), of_gpu = plain, pinned = plain;
    if (gpu) {
        of_gpu = ggml_backend_get_default_buffer_type(gpu);
        pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(gpu));
    } else {
        fprintf(stderr, "llama_layers: ggml finds no GPU, so the CPU computes everything\n");
    }
    bool packs = strcmp(argv[4], "repacked") == 0;
    if (!packs && strncmp(argv[4], "pinned", 6) != 0) fail("HOST is pinned, pinned-cpu or repacked");
    ggml_backend_buffer_type_t of_host = packs ? repacked(ggml_backend_get_device(cpu), type) : pinned;

    make_values(type);
    struct ggml_init_params params = {8 * LAYERS * ggml_tensor_overhead(), NULL, true};
    struct ggml_context * contexts[2] = {ggml_init(params), ggml_init(params)};
    struct Layer layers[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        struct Layer * layer = &layers[i];
        layer->on_host = i < on_host;
        layer->norm = ggml_new_tensor_1d(contexts[0], GGML_TYPE_F32, HIDDEN);
        layer->gate_inp = ggml_new_tensor_2d(contexts[0], GGML_TYPE_F32, HIDDEN, EXPERTS);
        for (int p = 0; p < PROJECTIONS; p++) {
            layer->experts[p] = ggml_new_tensor_3d(contexts[layer->on_host], type, COLS[p], ROWS[p], EXPERTS);
        }
    }
    ggml_backend_buffer_type_t kinds[2] = {of_gpu, of_host};
    for (int i = 0; i < (on_host ? 2 : 1); i++) {
        ggml_backend_buffer_t weights = ggml_backend_alloc_ctx_tensors_from_buft(contexts[i], kinds[i]);
        if (!weights) fail("out of memory");
        ggml_backend_buffer_set_usage(weights, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    float ones[HIDDEN];
    for (int i = 0; i < HIDDEN; i++) ones[i] = 1.0f;
    for (int i = 0; i < LAYERS; i++) {
        struct Layer * layer = &layers[i];
        ggml_backend_tensor_set(layer->norm, ones, 0, sizeof(ones));
        layer->gate_values = allocate(sizeof(float) * EXPERTS * HIDDEN);
        fill(layer->gate_values, EXPERTS * HIDDEN, 0.02f);
        ggml_backend_tensor_set(layer->gate_inp, layer->gate_values, 0, sizeof(float) * EXPERTS * HIDDEN);
        for (int p = 0; p < PROJECTIONS; p++) set_experts(layer->experts[p], p);
    }
    // Rows that the CPU reads or writes lie in pinned memory, as in llama.cpp.
    ggml_backend_t backends[2] = {gpu ? gpu : cpu, cpu};
    ggml_backend_buffer_type_t buffers[2] = {of_gpu, pinned};
    ggml_backend_sched_t scheduler =
        ggml_backend_sched_new(backends, buffers, gpu ? 2 : 1, GRAPH, false, strcmp(argv[4], "pinned-cpu") != 0);
    char labels[256];
    snprintf(labels, sizeof(labels), "\"format\": \"%s\", \"host\": \"%s\", \"buffer\": \"%s\", \"layers\": %d, \"on_host\": %d, \"threads\": %d",
             argv[1], argv[4], ggml_backend_buft_name(of_host), LAYERS, on_host, threads);
    for (int i = 6; i < argc; i++) {
        measure(scheduler, gpu, layers, labels, atof(argv[3]), atoi(argv[i]), i == 6);
    }
    ggml_backend_sched_free(scheduler);
    if (gpu) ggml_backend_free(gpu);
    ggml_backend_free(cpu);
    return 0;
}
