// Prints a hash of what each function of a library of native.c writes and returns, for the same inputs everywhere:
// bits LIBRARY. Two libraries with the same bits print the same lines.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 3 * 255 * 256 + 77, ROOM = 8 * N };
#define COUNT(LIST) ((int)(sizeof(LIST) / sizeof *(LIST)))
static const int64_t LENGTHS[] = {1, 31, 64, 257, 700, N};

static uint64_t state = 88172645463325252u, hash;
static uint32_t any(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}
static void *memory(void) {
    uint8_t *bytes = calloc(ROOM + 64, 1);
    if (!bytes) exit(2);
    return bytes;
}
static void add(const void *bytes, int64_t n) {
    for (int64_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001B3u;
}
static void say(const char *name) {
    printf("%-16s %016llx\n", name, (unsigned long long)hash);
    hash = 0xCBF29CE484222325u;
}
// Finite numbers: any bits, or a few octaves with ties.
static float *floats(void) {
    float *x = memory();
    for (int64_t i = 0; i < N; i++) {
        uint32_t bits = any(), ties = (any() & 0x80F00000u) + 0x3F000000u;
        bits = (bits & 0x7F800000) == 0x7F800000 ? bits & ~0x800000u : bits;
        bits = i / 4096 % 2 ? ties : bits;
        memcpy(x + i, &bits, 4);
    }
    return x;
}

static void *library;
static void *function(const char *name, const char *end) {
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", name, end);
    void *found = dlsym(library, whole);
    if (!found) exit((fprintf(stderr, "%s\n", whole), 2));
    return found;
}

static void blocks(const char *name, const float *x) {
    int (*pack)(const float *, int64_t, int64_t, void *, void *) = function(name, "_pack");
    int (*unpack)(const void *, const void *, int64_t, int64_t, float *, int) = function(name, "_unpack");
    static const int64_t BLOCKS[] = {8, 32, 256, 640};
    uint8_t *scales = memory(), *codes = memory();
    float *to = floats();
    for (int b = 0; b < COUNT(BLOCKS); b++)
        for (int l = 0; l < COUNT(LENGTHS); l++) {
            int64_t n = LENGTHS[l];
            int bad[] = {pack(x, n, BLOCKS[b], scales, codes), unpack(scales, codes, n, BLOCKS[b], to, l % 2), 0};
            add(scales, 4 * (n / BLOCKS[b] + 1)), add(codes, n), add(to, 4 * n);
            for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)any();
            bad[2] = unpack(scales, codes, n, BLOCKS[b], to, 0);
            add(bad, sizeof bad), add(to, 4 * n);
        }
    say(name), free(scales), free(codes), free(to);
}
static void casts(const char *name, const float *x) {
    int (*pack)(const float *, int64_t, void *) = function(name, "_pack");
    int (*unpack)(const void *, int64_t, float *, int) = function(name, "_unpack");
    void *codes = memory();
    float *to = floats();
    for (int l = 0; l < COUNT(LENGTHS); l++) {
        int bad[] = {pack(x, LENGTHS[l], codes), unpack(codes, LENGTHS[l], to, l % 2)};
        add(bad, sizeof bad), add(codes, 4 * N), add(to, 4 * N);
    }
    say(name), free(codes), free(to);
}
static void sparse(const float *x) {
    int64_t (*mask_count)(int64_t, int64_t, uint32_t, uint32_t, uint32_t) = function("mask_count", "");
    int (*mask_pack)(const float *, int64_t, int64_t, uint32_t, uint32_t, uint32_t, int64_t, float *) = function("mask_pack", "");
    int (*mask_unpack)(float *, int64_t, int64_t, uint32_t, uint32_t, uint32_t, int64_t, const float *, int) = function("mask_unpack", "");
    int (*histogram)(const float *, int64_t, int32_t, int64_t *) = function("topk_histogram", "");
    int (*count)(const float *, int64_t, uint32_t, int64_t *) = function("topk_count", "");
    int (*selected)(const float *, int64_t, int64_t, uint32_t, int64_t, float *, int64_t *) = function("topk_select", "");
    int (*of_blocks)(const float *, int64_t, int64_t, int64_t, int64_t, float *, int64_t *) = function("blocks_select", "");
    int (*places_pack)(const int64_t *, int64_t, int, uint8_t *, uint8_t *) = function("places_pack", "");
    int (*places_unpack)(const uint8_t *, const uint8_t *, int64_t, int64_t, int, int64_t, int64_t *) = function("places_unpack", "");
    int (*places_write)(const int64_t *, const float *, int64_t, float *, int) = function("places_write", "");
    int64_t *places = memory(), *again = memory(), counts[2];
    float *kept = memory(), *to = floats();
    uint8_t *low = memory(), *high = memory();
    for (int l = 0; l < COUNT(LENGTHS); l++) {
        int64_t n = LENGTHS[l], k = mask_count(5, n, 17, 23, 0x30000000);
        mask_pack(x, 5, n, 17, 23, 0x30000000, k, kept), mask_unpack(to, 5, n, 17, 23, 0x30000000, k, kept, l % 2);
        add(&k, 8), add(kept, 4 * N), add(to, 4 * N);
    }
    say("mask");
    histogram(x, N, -1, again), add(again, 8 << 15), histogram(x, N, 0x3F80, again), add(again, 8 << 16);
    count(x, N, 0x3FA00000, counts), add(counts, 16);
    selected(x, 3, N, 0x3FA00000, 5, kept, places), add(kept, 4 * N), add(places, 8 * N);
    for (int64_t block = 32; block <= 4096; block *= 4)
        of_blocks(x, 0, N, block, block / 8, kept, places), add(kept, 4 * N), add(places, 8 * N);
    say("topk");
    int64_t k = N / 40;
    for (int64_t j = 0; j < k; j++) places[j] = 40 * j + any() % 40;
    places_pack(places, k, 5, low, high), add(low, N), add(high, N);
    int bad = places_unpack(low, high, k + (N >> 5) + 1, k, 5, N, again);
    places_write(again, x, k, to, 1);
    add(&bad, 4), add(again, 8 * k), add(to, 4 * N);
    say("places"), free(places), free(again), free(kept), free(to), free(low), free(high);
}
static void steps(const float *x) {
    int (*gate)(const float *, const float *, int64_t, int, float *) = function("gate", "");
    uint64_t (*digest)(const float *, int64_t, uint64_t) = function("outer_digest", "");
    float *outer = floats(), *velocity = floats(), *to = memory();
    for (int bf16 = 0; bf16 < 2; bf16++) {
        void (*step)(float *, float *, const float *, void *, int64_t, float, float, float, float, float) =
            function("outer_step", bf16 ? "_bf16" : "");
        // Not their NaNs, whose sign differs between processors.
        for (int64_t i = 0; i < N; i++) outer[i] = (float)(int32_t)any() * 1e-9f, velocity[i] = (float)(int32_t)any() * 1e-12f;
        gate(velocity, outer, N, bf16, to), add(to, 4 * N);
        uint16_t *theta = memory();
        step(outer, velocity, to, theta, N, 3, 0.4f, 0.9f, 0.3f, 0.7f), step(outer, velocity, to, theta, N, 2, 0.7f, 0.9f, 0, 1);
        add(outer, 4 * N), add(velocity, 4 * N), add(theta, 4 * N), free(theta);
    }
    uint64_t sum = digest(x, N, 3);
    add(&sum, 8), say("outer"), free(outer), free(velocity), free(to);
}
static void cells(const char *name, int size) {
    int64_t (*encode)(const void *, int64_t, int64_t, uint32_t *, uint8_t *) = function("cells", "_encode");
    int64_t (*decode)(const uint8_t *, const uint32_t *, const void *, int64_t, int64_t, int) = function("cells", "_decode");
    uint8_t *old = memory(), *new = memory(), *body = memory();
    uint32_t *lengths = memory();
    for (int64_t i = 0; i < N; i++) {
        int64_t number = any(), change = any() % 9 ? 0 : (int64_t)(any() % 100) - 50;
        memcpy(old + i * size, &number, (size_t)size), number += change, memcpy(new + i * size, &number, (size_t)size);
    }
    int64_t vector[4] = {(int64_t)(uintptr_t)old, (int64_t)(uintptr_t)new, N, size};
    int64_t counts[2] = {encode(vector, 1, 5000, lengths, body), 0};
    add(body, counts[0] < ROOM ? counts[0] : 0);
    counts[1] = decode(body, lengths, vector, 1, 5000, 0);
    if (memcmp(old, new, (size_t)(N * size))) exit(3);
    add(counts, 16), say(name), free(old), free(new), free(body), free(lengths);
}

int main(int argc, char **argv) {
    library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    static const char *BLOCK[] = {"e4m3", "e5m2", "e2m1", "e3m0", "int8", "int4", "int2"}, *CAST[] = {"fp32", "bf16", "fp16"};
    float *x = floats();
    hash = 0xCBF29CE484222325u;
    for (int i = 0; i < COUNT(BLOCK); i++) blocks(BLOCK[i], x);
    for (int i = 0; i < COUNT(CAST); i++) casts(CAST[i], x);
    sparse(x), steps(x);
    cells("cells1", 1), cells("cells2", 2), cells("cells4", 4), cells("cells8", 8);
    return 0;
}
