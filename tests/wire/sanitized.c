// Drives native.c under the sanitizers: memory of exactly the right size, odd lengths and blocks, hostile bytes, and
// the ranges of kernels/native.py on threads. Compile with -I src/diloco/kernels; ends with 1 if a result is wrong.
// With any argument the ranges overlap, and the last reaches beyond the end: each sanitizer must notice that; with two,
// those of the outer step alone.

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "native.c"

typedef int (*Pack)(const float *, int64_t, int64_t, uint8_t *, uint8_t *);
typedef int (*Unpack)(const uint8_t *, const uint8_t *, int64_t, int64_t, float *, int);
typedef struct { const char *name; Pack pack; Unpack unpack; const int *bits, *scale_bytes; } Codec;
#define ENTRY(NAME) {#NAME, NAME##_pack, NAME##_unpack, &NAME##_bits, &NAME##_scale_bytes}
static const Codec CODECS[] = {ENTRY(e4m3), ENTRY(e5m2), ENTRY(e2m1), ENTRY(e3m0), ENTRY(int8), ENTRY(int4), ENTRY(int2)};
static const int64_t LENGTHS[] = {0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 257, 511, 513, 700, 1283};
static const int64_t BLOCKS[] = {2, 3, 4, 8, 12, 32, 36, 256, 260, 640, 65536};
#define COUNT(LIST) ((int)(sizeof(LIST) / sizeof *(LIST)))
#define THREADS 4

static uint64_t state = 88172645463325252u;
static uint32_t any(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}
static void *bytes(int64_t n) {
    uint8_t *memory = malloc(n);
    for (int64_t i = 0; i < n; i++) memory[i] = any();
    return memory;
}
static float *floats(int64_t n, int finite) {
    float *x = malloc(4 * n);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = any();
        if (finite && (bits & 0x7F800000) == 0x7F800000) bits &= ~0x800000u;
        x[i] = float_of(bits);
    }
    return x;
}

typedef struct {
    const Codec *codec;
    int64_t n, block, start;
    float *x;
    uint8_t *scales, *codes;
    int kind, bad;  // kind: 0 packs, 1 writes, 2 adds
} Range;

static void *run(void *argument) {
    Range *r = argument;
    uint8_t *scales = r->scales + r->start / r->block * *r->codec->scale_bytes;
    uint8_t *codes = r->codes + r->start * *r->codec->bits / 8;
    r->bad = r->kind ? r->codec->unpack(scales, codes, r->n, r->block, r->x + r->start, r->kind == 2)
                     : r->codec->pack(r->x + r->start, r->n, r->block, scales, codes);
    return NULL;
}

static int faulty = 0;
// As `_on_threads`: ranges that begin at multiples of the block.
static int on_threads(Range whole) {
    Range ranges[THREADS];
    pthread_t threads[THREADS];
    int64_t size = (whole.n + THREADS * whole.block - 1) / (THREADS * whole.block) * whole.block;
    int started = 0, bad = 0;
    if (!faulty && size >= whole.n) return run(&whole), whole.bad;  // starting a thread takes longer than all else
    for (int64_t start = 0; start < whole.n; start += size, started++) {
        ranges[started] = whole;
        ranges[started].start = start;
        ranges[started].n = size < whole.n - start ? size : whole.n - start;
        if (faulty) ranges[started].n = size + whole.block;
        if (pthread_create(&threads[started], NULL, run, &ranges[started])) abort();
    }
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL), bad |= ranges[i].bad;
    return bad;
}

static int wrong = 0;
static void check(int right, const char *what, const Codec *codec, int64_t n, int64_t block) {
    if (!right) wrong = 1, fprintf(stderr, "%s: %s, %ld elements, blocks of %ld\n", what, codec->name, (long)n, (long)block);
}
static int all_finite(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return 0;
    return 1;
}

static void drive(const Codec *codec, int64_t n, int64_t block) {
    int64_t num_scales = (n + block - 1) / block * *codec->scale_bytes, num_codes = (n * *codec->bits + 7) / 8;
    for (int hostile = 0; hostile < 2; hostile++) {
        float *x = floats(n, !hostile), *one = floats(n, 1), *other = malloc(4 * n);
        uint8_t *scales = bytes(num_scales), *codes = bytes(num_codes);
        memcpy(other, one, 4 * n);
        Range whole = {codec, n, block, 0, x, scales, codes, 0, 0};
        if (!hostile) {
            run(&whole);
            uint8_t *again_scales = bytes(num_scales), *again_codes = bytes(num_codes);
            Range again = {codec, n, block, 0, x, again_scales, again_codes, 0, 0};
            int same = on_threads(again) == whole.bad && !memcmp(scales, again_scales, num_scales);
            check(same && !memcmp(codes, again_codes, num_codes), "threads pack something else", codec, n, block);
            free(again_scales), free(again_codes);
        } else {
            codec->pack(x, n, block, scales, codes);  // of NaN and infinities
            free(scales), free(codes);
            scales = bytes(num_scales), codes = bytes(num_codes);
        }
        for (int kind = 1; kind < 3; kind++) {
            Range alone = {codec, n, block, 0, one, scales, codes, kind, 0}, split = alone;
            split.x = other;
            run(&alone);
            int bad = on_threads(split);
            check(bad == alone.bad && !memcmp(one, other, 4 * n), "threads unpack something else", codec, n, block);
            check(hostile || !bad, "what was packed is refused", codec, n, block);
            check(kind == 2 || bad || all_finite(one, n), "an accepted body is not finite", codec, n, block);
        }
        free(x), free(one), free(other), free(scales), free(codes);
    }
}

typedef struct {
    float *outer, *velocity, *total;
    void *theta;
    int64_t n;
    int is_bf16;
} Vectors;

static void *step(void *argument) {
    Vectors *v = argument;
    if (v->is_bf16) outer_step_bf16(v->outer, v->velocity, v->total, v->theta, v->n, 3, 0.4f, 0.9f, 0.5f, 0.5f);
    else outer_step(v->outer, v->velocity, v->total, v->theta, v->n, 3, 0.4f, 0.9f, 0.5f, 0.5f);
    return NULL;
}

// The outer step of ranges on threads gives the bits of one call.
static void drive_outer_step(int64_t n, int is_bf16) {
    float *alone[3], *split[3];
    for (int i = 0; i < 3; i++) {
        alone[i] = floats(n, 1), split[i] = malloc(4 * n);
        memcpy(split[i], alone[i], 4 * n);
    }
    int64_t size_of = is_bf16 ? 2 : 4;
    uint8_t *theta = bytes(n * size_of), *split_theta = malloc(n * size_of);
    memcpy(split_theta, theta, n * size_of);
    Vectors whole = {alone[0], alone[1], alone[2], theta, n, is_bf16}, ranges[THREADS];
    pthread_t threads[THREADS];
    step(&whole);
    int64_t size = (n + THREADS - 1) / THREADS, started = 0;
    for (int64_t start = 0; start < n; start += size, started++) {
        int64_t count = faulty ? size + 1 : size < n - start ? size : n - start;
        void *part = split_theta + start * size_of;
        ranges[started] = (Vectors){split[0] + start, split[1] + start, split[2] + start, part, count, is_bf16};
        if (pthread_create(&threads[started], NULL, step, &ranges[started])) abort();
    }
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    int same = !memcmp(theta, split_theta, n * size_of);
    for (int i = 0; i < 3; i++) {
        same = same && !memcmp(alone[i], split[i], 4 * n);
        free(alone[i]), free(split[i]);
    }
    free(theta), free(split_theta);
    if (!same) wrong = 1, fprintf(stderr, "threads step elsewhere, %ld elements\n", (long)n);
}

// The digest of several blocks is the sum of theirs.
static void drive_digest(int64_t n) {
    enum { BLOCK = 255 * 256 };
    float *x = floats(n, 1);
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i += BLOCK) sum += outer_digest(x + i, n - i < BLOCK ? n - i : BLOCK, i / BLOCK);
    if (sum != outer_digest(x, n, 0)) wrong = 1, fprintf(stderr, "blocks sum up elsewhere, %ld elements\n", (long)n);
    free(x);
}

// What sparse codecs keep, in memory of exactly its size, and hostile places.
static void drive_sparse(int64_t n) {
    for (int64_t k = n ? 1 : 0; k <= n; k += n / 3 + 1) {
        int num_low = n ? 63 - __builtin_clzll((uint64_t)(n / k)) : 0;
        int64_t num_high = n ? k + ((n - 1) >> num_low) : 0, counts[2] = {0, 0};
        float *x = floats(n, 1), *kept = malloc(4 * k);
        int64_t *places = malloc(8 * k), *again = malloc(8 * k);
        uint8_t *low = bytes((k * num_low + 7) / 8), *high = calloc((num_high + 7) / 8, 1);
        int64_t *upper = calloc(1 << 15, 8), *lower = calloc(1 << 16, 8), left = k;
        uint32_t bin = 0x7FFF, last = 0xFFFF;
        topk_histogram(x, n, -1, upper);
        while (k && left > upper[bin]) left -= upper[bin--];
        topk_histogram(x, n, (int32_t)bin, lower);
        while (k && left > lower[last]) left -= lower[last--];
        topk_count(x, n, bin << 16 | last, counts);
        if (k && (counts[0] + left != k || left > counts[1])) wrong = 1, fprintf(stderr, "another threshold\n");
        if (k) topk_select(x, 0, n, bin << 16 | last, left, kept, places);
        places_pack(places, k, num_low, low, high);
        int bad = places_unpack(low, high, num_high, k, num_low, n, again);
        if (bad || memcmp(places, again, 8 * k)) wrong = 1, fprintf(stderr, "other places, %ld of %ld\n", (long)k, (long)n);
        int64_t block = n / 2 + 1, size = 4 * n + 8;
        float *of_blocks = malloc(4 * size), *gated = malloc(4 * n);
        int64_t *in_blocks = malloc(8 * size);
        blocks_select(x, 0, n, block, k < block ? k : block, of_blocks, in_blocks);
        gate(x, of_blocks, n, 1, gated), gate(x, of_blocks, n, 0, gated);
        free(of_blocks), free(gated), free(in_blocks);
        places_write(again, kept, k, x, 1);
        for (int64_t i = 0; i < (num_high + 7) / 8; i++) high[i] = (uint8_t)any();
        places_unpack(low, high, num_high, k, num_low, n, again);
        mask_pack(x, 0, n, any(), any(), any(), k, kept);
        mask_unpack(x, 0, n, any(), any(), any(), k, kept, (int)(k % 2));
        uint16_t *halves = malloc(2 * n);
        fp16_pack(x, n, halves), fp16_unpack(halves, n, x, 1), bf16_pack(x, n, halves), bf16_unpack(halves, n, x, 0);
        free(x), free(kept), free(places), free(again), free(low), free(high), free(upper), free(lower), free(halves);
    }
}

// A difference of cells of 2^power bytes, and hostile ones, in memory of exactly their size.
static void drive_cells(int64_t n, int power, uint32_t one_in, uint32_t most) {
    int64_t size = (int64_t)1 << power, chunk = any() % 2 ? 300 : 5000, num_chunks = (n + chunk - 1) / chunk, written = n * size + 16;
    uint8_t *old = bytes(n * size), *new = malloc(n * size), *to = malloc(n * size), *body = malloc(written);
    uint32_t *lengths = malloc(4 * num_chunks), *other = malloc(4 * num_chunks);
    memcpy(new, old, n * size);
    for (int64_t i = 0; i < n; i++)
        if (any() % one_in == 0) new[i * size] += 1 + any() % most;
    cells_level = any() % 3;
    // Two vectors, the first of which ends with a chunk.
    int64_t first = num_chunks / 2 * chunk * size;
    Vector pair[2] = {{.n = first / size}, {.n = n - first / size}}, states[2];
    for (int v = 0; v < 2; v++) {
        pair[v].old = (int64_t)(uintptr_t)(old + v * first), pair[v].new = (int64_t)(uintptr_t)(new + v * first);
        pair[v].size = size, states[v] = pair[v], states[v].old = (int64_t)(uintptr_t)(to + v * first);
    }
    int64_t total = cells_encode(pair, 2, chunk, lengths, body), changed = 0;
    uint8_t *exact = malloc(total);
    memcpy(exact, body, total);
    memcpy(to, old, n * size);
    for (int64_t i = 0; i < n; i++) changed += memcmp(old + i * size, new + i * size, size) != 0;
    int right = cells_decode(exact, lengths, states, 2, chunk, 1) == changed && !memcmp(to, old, n * size);
    right = right && cells_decode(exact, lengths, states, 2, chunk, 0) == changed && !memcmp(to, new, n * size);
    if (!right) wrong = 1, fprintf(stderr, "other cells, %ld of %ld bytes\n", (long)n, (long)size);
    for (int round = 0; round < 60 && total; round++) {
        cells_level = any() % 3;
        memcpy(exact, body, total);
        memcpy(other, lengths, 4 * num_chunks);
        for (int flips = 1 + any() % 3; flips--;) exact[any() % (any() % 2 ? total : total < 20 ? total : 20)] ^= 1 << any() % 8;
        int64_t from = any() % num_chunks, into = any() % num_chunks, moved = any() % 20;
        if (round % 2 && other[from] > moved) other[from] -= moved, other[into] += moved;
        int64_t only_checked = cells_decode(exact, other, states, 2, chunk, 1), done = cells_decode(exact, other, states, 2, chunk, 0);
        if (only_checked != done && (only_checked >= 0) != (done >= 0)) wrong = 1, fprintf(stderr, "checked otherwise\n");
    }
    free(old), free(new), free(to), free(body), free(lengths), free(other), free(exact);
}

int main(int argc, char **argv) {
    faulty = argc > 1;
    if (argc > 2) return drive_outer_step(1283, 0), wrong;
    for (int c = 0; c < COUNT(CODECS); c++)
        for (int b = 0; b < COUNT(BLOCKS); b++)
            for (int n = 0; n < COUNT(LENGTHS); n++)
                if (BLOCKS[b] * *CODECS[c].bits % 8 == 0) drive(&CODECS[c], LENGTHS[n], BLOCKS[b]);
    for (int n = 0; n < COUNT(LENGTHS); n++) drive_outer_step(LENGTHS[n], 0), drive_outer_step(LENGTHS[n], 1);
    for (int n = 0; n < COUNT(LENGTHS); n++) drive_digest(LENGTHS[n]), drive_sparse(LENGTHS[n]);
    drive_digest(2 * 255 * 256 + 3);
    for (int n = 0; n < COUNT(LENGTHS); n++)
        for (int power = 0; power < 4; power++)
            for (int one_in = 1; one_in < 200; one_in *= 5) drive_cells(LENGTHS[n], power, one_in, n % 2 ? 2 : 255);
    for (int power = 0; power < 4; power++) drive_cells(4999, power, 20, 2);
    return wrong;
}
