// The coder of diloco.publishing.cells, of cells of 1, 2, 4 or 8 bytes.
// The file includes itself: once for each set of instructions, whose functions end in its NAME, and there once for each
// size of a cell. Cells are coded 64 at a time: a word has a bit of each, from its lowest bit on.

#ifndef LEVEL

#define PAIRS ((uint64_t)0x5555555555555555)
enum { SAMPLE = 16, CLASSES = 4, HEAD = 2 + 3 * CLASSES, SLACK = 16, GAP_BITS = 18, WORDS = 32, AHEAD_CELLS = 4096 };
enum { MOST_PARAMETER = 62, MOST_GAP_PARAMETER = 16 };
// Of a number y, a byte has the lowest bits and, as bit LOW, whether there are higher ones.
enum { LOW = 7, LONG = 1 << LOW };

INLINE int bit_length(uint64_t value) { return value ? 64 - __builtin_clzll(value) : 0; }
INLINE int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }
// Memory of a plane that is scratch.
INLINE int64_t room_of(int64_t bits) { return (bits + 63) / 64 * 8 + SLACK; }

// The e of the shortest code of steps, from the numbers of |s| − 1 of each bit length in a sample.
static int step_parameter(const uint32_t *counts, int bits) {
    uint64_t least = ~(uint64_t)0;
    int best = 0;
    for (int e = 0; e <= bits - 2 && e <= MOST_PARAMETER; e++) {
        uint64_t cost = 0;
        for (int b = 0; b < bits; b++) cost += counts[b] * (uint64_t)(b <= e ? e + 1 : 2 * b - e + (b == e + 1));
        if (cost < least) least = cost, best = e;
    }
    return best;
}
// A plane of bits that is written from the lowest bit of a byte on, and up to 8 bytes beyond; fewer than 8 are held.
typedef struct { uint8_t *start, *to; uint64_t held; int64_t num_held; } Writer;
INLINE void put_few(Writer *w, uint64_t bits, int64_t width) {
    uint64_t held = w->held | bits << w->num_held;
    int64_t num = w->num_held + width;
    memcpy(w->to, &held, 8);
    w->to += num >> 3;
    w->held = held >> (num & 56);
    w->num_held = num & 7;
}
// Bits above `width` are 0. What follows from a width is computed: it would be guessed wrong every other time.
INLINE void put(Writer *w, uint64_t bits, int64_t width) {
    for (int64_t most = 56; width > most; bits >>= most, width -= most) put_few(w, bits & first_bits(most), most);
    put_few(w, bits, width);
}
INLINE int64_t num_bits(const Writer *w) { return 8 * (w->to - w->start) + w->num_held; }

// A body that is written from `at` on, and up to 8 bytes beyond its end.
typedef struct { uint8_t *at, *end; } Body;
// The place of a plane of bits, the next one to be written; none if the body has no room.
INLINE uint8_t *take(Body *body, int64_t bits) {
    uint8_t *plane = body->at;
    if (bytes_of(bits) > body->end - plane) return 0;
    body->at += bytes_of(bits);
    return plane;
}
static int write_plane(Writer *w, Body *body) {
    uint8_t *plane = take(body, num_bits(w));
    memcpy(w->to, &w->held, 8);
    if (plane) memcpy(plane, w->start, (size_t)bytes_of(num_bits(w)));
    return plane != 0;
}

// Have 64 cells come into the cache, at a place that may lie outside: processors fetch ahead within a page only.
INLINE void fetch(const void *cells, int64_t cell, int size) {
    for (int i = 0; i < size; i++)
        __builtin_prefetch((const void *)((uintptr_t)cells + (uintptr_t)(cell * size) + 64 * (uintptr_t)i), 0, 2);
}

// The least bucket of each class but the last, of a chunk with this top bucket.
INLINE void find_least(int top, uint8_t least[CLASSES - 1]) {
    for (int c = 0; c < CLASSES - 1; c++) least[c] = (uint8_t)(top > c ? top - c : 0);
}

static void *aligned_memory(int64_t size) { return aligned_alloc(64, (size_t)((size + 63) & ~63)); }
INLINE uint64_t word_at(const uint8_t *plane) { uint64_t word; memcpy(&word, plane, 8); return word; }
INLINE void write_word(uint8_t *plane, uint64_t word) { memcpy(plane, &word, 8); }
// At least `num` bits of a plane; up to 9 bytes are read.
INLINE uint64_t bits_at(const uint8_t *plane, int64_t bit, int64_t num) {
    uint64_t bits = word_at(plane + (bit >> 3)) >> (bit & 7);
    return num > 57 ? bits | (uint64_t)plane[(bit >> 3) + 8] << 1 << (63 - (bit & 7)) : bits;
}

// The planes of k numbers y < 2^bits. Of each bit b ≥ e the planes are of the num[b] that have it or a higher one:
// those that have a higher one, and bit b of these.
typedef struct { const uint8_t *exact[64], *longer[64]; int64_t num[65]; int e, last; } Numbers;
// The planes of a chunk's body.
typedef struct {
    const uint8_t *first[CLASSES], *second[CLASSES], *third[CLASSES], *signs;
    int64_t num_first[CLASSES];
    int gap[CLASSES], top;
    Numbers gaps[CLASSES], steps;
} Planes;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
// For the bits of a byte: which of 8 bytes, or of as many pairs, come first, and which of the first ones go where; 128
// is none.
static uint8_t bytes_from[256][8], bytes_to[256][8], pairs_from[256][16], pairs_to[256][16];
__attribute__((constructor)) static void fill_tables(void) {
    for (int byte = 0; byte < 256; byte++) {
        memset(bytes_from[byte], 128, 8), memset(bytes_to[byte], 128, 8);
        memset(pairs_from[byte], 128, 16), memset(pairs_to[byte], 128, 16);
        for (int bit = 0, num = 0; bit < 8; num += byte >> bit++ & 1) {
            if (!(byte >> bit & 1)) continue;
            bytes_from[byte][num] = (uint8_t)bit, bytes_to[byte][bit] = (uint8_t)num;
            for (int half = 0; half < 2; half++) {
                pairs_from[byte][2 * num + half] = (uint8_t)(2 * bit + half);
                pairs_to[byte][2 * bit + half] = (uint8_t)(2 * num + half);
            }
        }
    }
}
#if defined(__clang__)
#define FULL ""
#else
#define FULL ",prefer-vector-width=512"
#endif
#define LEVEL 2
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vpopcntdq"
#define TARGET __attribute__((target(AVX512 ",bmi,bmi2,popcnt,lzcnt" FULL)))
#define NAME(FUNCTION) FUNCTION##_avx512
#include "native_cells.h"
#define LEVEL 1
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define NAME(FUNCTION) FUNCTION##_avx2
#include "native_cells.h"
#endif
#define LEVEL 0
#define TARGET
#define NAME(FUNCTION) FUNCTION##_plain
#include "native_cells.h"

int cells_level = 2;  // tests ask for less: the functions for AVX2, or portable ones
#if defined(__x86_64__) && defined(__GNUC__)
static int level(void) {
    // pext of the first Zen processors takes a hundred cycles.
    if (!__builtin_cpu_supports("avx2") || __builtin_cpu_is("znver1") || __builtin_cpu_is("znver2")) return 0;
    if (!__builtin_cpu_supports("bmi2")) return 0;
    int has_512 = __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vpopcntdq");
    return cells_level < 1 + has_512 ? cells_level : 1 + has_512;
}
#define BEST(FUNCTION, ...) \
    level() > 1 ? FUNCTION##_avx512(__VA_ARGS__) \
    : level()   ? FUNCTION##_avx2(__VA_ARGS__) \
                : FUNCTION##_plain(__VA_ARGS__)
#else
#define BEST(FUNCTION, ...) FUNCTION##_plain(__VA_ARGS__)
#endif
// A vector of cells: the addresses of the old ones and the new ones, their number, and the bytes of one.
typedef struct { int64_t old, new, n, size; } Vector;
#define BEST_OF_SIZE(FUNCTION, SIZE, ...) \
    (SIZE == 1   ? BEST(FUNCTION##1, __VA_ARGS__) \
     : SIZE == 2 ? BEST(FUNCTION##2, __VA_ARGS__) \
     : SIZE == 4 ? BEST(FUNCTION##4, __VA_ARGS__) \
                 : BEST(FUNCTION##8, __VA_ARGS__))

// Write the bodies of the vectors' chunks one after another, and their lengths; return the sum of these, or −1 without
// memory. `body` has 16 bytes more than the cells.
int64_t cells_encode(const Vector *vectors, int64_t num_vectors, int64_t chunk, uint32_t *lengths, uint8_t *body) {
    int64_t total = 0, written = 0;
    for (const Vector *v = vectors; written >= 0 && v < vectors + num_vectors; v++) {
        const uint8_t *old = (const uint8_t *)(uintptr_t)v->old, *new = (const uint8_t *)(uintptr_t)v->new;
        written = BEST_OF_SIZE(encode, v->size, old, new, v->n, chunk, lengths, body + total);
        lengths += (v->n + chunk - 1) / chunk, total += written;
    }
    return written < 0 ? -1 : total;
}
// Change the old cells of vectors, or only check the bodies of their chunks, which lie one after another; return the
// number of changed cells, −1 − v for a bad chunk of the vector v, or INT64_MIN without memory.
int64_t cells_decode(
    const uint8_t *body, const uint32_t *lengths, const Vector *vectors, int64_t num_vectors, int64_t chunk,
    int only_check) {
    int64_t total = 0;
    for (const Vector *v = vectors; v < vectors + num_vectors; v++) {
        uint8_t *into = (uint8_t *)(uintptr_t)v->old;
        int64_t changed = BEST_OF_SIZE(decode, v->size, body, lengths, into, v->n, chunk, only_check);
        if (changed < 0) return changed == -1 ? -1 - (v - vectors) : changed;
        for (int64_t i = 0; i < v->n; i += chunk) body += *lengths++;
        total += changed;
    }
    return total;
}

#elif !defined(CELL)

#if LEVEL > 1
// Zero, which no compiler folds: on Zen 4 vpexpand waits for the last value of the register that it writes, though it
// writes all of it, and so would wait for the loop's last round.
TARGET INLINE __m512i NAME(fresh)(void) {
    __m512i zero;
    __asm__("vpxor %x0, %x0, %x0" : "=x"(zero));
    return zero;
}
#endif
TARGET INLINE uint64_t NAME(pext)(uint64_t word, uint64_t mask) {
#if LEVEL > 0
    return _pext_u64(word, mask);
#else
    uint64_t bits = 0;
    for (int n = 0; mask; mask &= mask - 1, n++) bits |= (word >> __builtin_ctzll(mask) & 1) << n;
    return bits;
#endif
}
TARGET INLINE uint64_t NAME(pdep)(uint64_t bits, uint64_t mask) {
#if LEVEL > 0
    return _pdep_u64(bits, mask);
#else
    uint64_t word = 0;
    for (; mask; mask &= mask - 1, bits >>= 1) word |= (mask & -mask) & -(bits & 1);
    return word;
#endif
}
#if LEVEL == 1
TARGET INLINE __m256i NAME(load)(const void *from) { return _mm256_loadu_si256(from); }
// The bytes of 32 pairs, which are −128 to 127.
TARGET INLINE __m256i NAME(narrow)(__m256i low, __m256i high) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
}
// The highest bit of each byte.
TARGET INLINE uint64_t NAME(tops)(__m256i low, __m256i high) {
    uint32_t low_bits = (uint32_t)_mm256_movemask_epi8(low);
    return low_bits | (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << 32;
}
// All bits of 32 bytes, or of 16 pairs, that a word has from its lowest bit on.
TARGET INLINE __m256i NAME(spread1)(uint64_t word) {
    __m256i at = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201u);
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)word), at), bit), bit);
}
TARGET INLINE __m256i NAME(spread2)(uint64_t word) {
    __m256i bit = _mm256_setr_epi16(
        1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, (short)32768);
    return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((short)word), bit), bit);
}
// Bytes where a word has a bit, and 0 elsewhere: 16, or 32; 8 are read at a time.
TARGET INLINE __m128i NAME(expand16)(const uint8_t **from, uint64_t word) {
    __m128i eight[2];
    for (int i = 0; i < 2; i++, word >>= 8) {
        eight[i] = _mm_loadl_epi64((const void *)bytes_to[word & 0xFF]);
        eight[i] = _mm_shuffle_epi8(_mm_loadl_epi64((const void *)*from), eight[i]);
        *from += __builtin_popcountll(word & 0xFF);
    }
    return _mm_unpacklo_epi64(eight[0], eight[1]);
}
TARGET INLINE __m256i NAME(expand32)(const uint8_t **from, uint64_t word) {
    __m128i low = NAME(expand16)(from, word);
    return _mm256_set_m128i(NAME(expand16)(from, word >> 16), low);
}
// Pairs where a word has a bit, and 0 elsewhere: 16; 8 are read at a time.
TARGET INLINE __m256i NAME(expand_pairs)(const uint16_t **from, uint64_t word) {
    __m128i eight[2];
    for (int i = 0; i < 2; i++, word >>= 8) {
        eight[i] = _mm_loadu_si128((const void *)pairs_to[word & 0xFF]);
        eight[i] = _mm_shuffle_epi8(_mm_loadu_si128((const void *)*from), eight[i]);
        *from += __builtin_popcountll(word & 0xFF);
    }
    return _mm256_set_m128i(eight[1], eight[0]);
}
#endif
// A bit of each of 64 bytes.
TARGET INLINE uint64_t NAME(word)(const uint8_t byte[64], int bit) {
#if LEVEL > 1
    return _mm512_test_epi8_mask(_mm512_loadu_si512(byte), _mm512_set1_epi8((char)(1 << bit)));
#elif LEVEL > 0
    __m256i low = NAME(load)(byte), high = NAME(load)(byte + 32);
    return NAME(tops)(_mm256_slli_epi16(low, 7 - bit), _mm256_slli_epi16(high, 7 - bit));
#else
    uint64_t bits = 0, eight;
    for (int i = 0; i < 8; i++) {
        memcpy(&eight, byte + 8 * i, 8);
        bits |= ((eight >> bit & 0x0101010101010101u) * 0x0102040810204080u) >> 56 << 8 * i;
    }
    return bits;
#endif
}
// 64 bytes with the bits of a word.
TARGET INLINE void NAME(bytes)(uint64_t word, uint8_t byte[64]) {
#if LEVEL > 1
    _mm512_storeu_si512(byte, _mm512_maskz_set1_epi8(word, 1));
#elif LEVEL > 0
    __m256i one = _mm256_set1_epi8(1);
    _mm256_storeu_si256((void *)byte, _mm256_and_si256(NAME(spread1)(word), one));
    _mm256_storeu_si256((void *)(byte + 32), _mm256_and_si256(NAME(spread1)(word >> 32), one));
#else
    for (int i = 0; i < 8; i++) {
        uint64_t each = (word >> 8 * i & 0xFF) * 0x0101010101010101u & 0x8040201008040201u;
        each = (each + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        memcpy(byte + 8 * i, &each, 8);
    }
#endif
}
// Those of 64 bytes that are not below a number.
TARGET INLINE uint64_t NAME(reach)(const uint8_t byte[64], int least) {
#if LEVEL > 1
    return _mm512_cmpge_epu8_mask(_mm512_loadu_si512(byte), _mm512_set1_epi8((char)least));
#elif LEVEL > 0
    __m256i low = NAME(load)(byte), high = NAME(load)(byte + 32), bound = _mm256_set1_epi8((char)least);
    low = _mm256_cmpeq_epi8(_mm256_max_epu8(low, bound), low);
    return NAME(tops)(low, _mm256_cmpeq_epi8(_mm256_max_epu8(high, bound), high));
#else
    uint8_t is_above[64];
    for (int i = 0; i < 64; i++) is_above[i] = byte[i] >= (uint8_t)least;
    return NAME(word)(is_above, 0);
#endif
}
// The highest bucket with a 64th of the cells in it and above; those of the last 64 cells that are not there are 0.
TARGET static int NAME(top_bucket)(const uint8_t *bucket, int64_t num) {
    int top = 0;
    for (int bit = 64; bit; bit >>= 1) {
        int64_t above = 0;
        for (int64_t i = 0; i < num; i += 64) above += __builtin_popcountll(NAME(reach)(bucket + i, top + bit));
        if (64 * above >= num) top += bit;
    }
    return top;
}
// The ones among some bits of a plane.
TARGET static int64_t NAME(count)(const uint8_t *plane, int64_t bits) {
    int64_t ones = 0, i = 0;
#if LEVEL > 1
    __m512i sums = _mm512_setzero_si512();
    for (; i + 512 <= bits; i += 512)
        sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(_mm512_loadu_si512(plane + i / 8)));
    ones = _mm512_reduce_add_epi64(sums);
#else
    for (; i + 256 <= bits; i += 256) {
        const uint8_t *at = plane + i / 8;
        int64_t some = __builtin_popcountll(word_at(at)) + __builtin_popcountll(word_at(at + 8));
        ones += some + (__builtin_popcountll(word_at(at + 16)) + __builtin_popcountll(word_at(at + 24)));
    }
#endif
    for (; i < bits; i += 64) {
        uint64_t word = 0;
        memcpy(&word, plane + i / 8, (size_t)(bits - i < 64 ? bytes_of(bits - i) : 8));
        ones += __builtin_popcountll(word & first_bits(bits - i));
    }
    return ones;
}

// Find the planes of k numbers; return 1 if they are beyond the end.
TARGET static int NAME(find_numbers)(const uint8_t **at, const uint8_t *end, int64_t k, int e, int bits, Numbers *y) {
    if (k * e > 8 * (end - *at)) return 1;
    y->e = y->last = e, y->num[e] = k;
    for (int b = 0; b < e; b++) y->num[b] = k, y->exact[b] = *at, *at += bytes_of(k);
    for (int b = e; b < bits - 1 && k; b++) {
        y->longer[b] = *at, *at += bytes_of(k);
        if (*at > end) return 1;
        y->last = b;
        y->num[b + 1] = k = NAME(count)(y->longer[b], k);
        y->exact[b] = *at, *at += bytes_of(k);
    }
    if (k) y->last = bits - 1;
    return *at > end;
}
// The sum of numbers, by their planes.
TARGET static int64_t NAME(sum)(const Numbers *y, int bits) {
    int64_t sum = 0;
    for (int b = 0; b < y->e; b++) sum += NAME(count)(y->exact[b], y->num[y->e]) << b;
    for (int b = y->e; b <= y->last; b++) {
        int64_t longer = b < bits - 1 ? y->num[b + 1] : 0;
        sum += (y->num[b] - longer) << b;
        if (longer) sum += NAME(count)(y->exact[b], longer) << b;
    }
    return sum;
}
// Find the planes of a class in a body that ends at `end`; return the number of ones of its mask, or −1.
TARGET static int64_t NAME(find_mask)(const uint8_t **at, const uint8_t *end, int64_t n, int c, Planes *p) {
    int64_t num = p->num_first[c], g = p->gap[c];
    p->first[c] = *at;
    if (g > 1) {
        if (g > MOST_GAP_PARAMETER || NAME(find_numbers)(at, end, num, (int)g, GAP_BITS, &p->gaps[c])) return -1;
        return num && NAME(sum)(&p->gaps[c], GAP_BITS) - (num << g) + num > n ? -1 : num;
    }
    if (num > end - *at || num > bytes_of((n + g) >> g)) return -1;
    int64_t ones = NAME(count)(*at, 8 * num);
    p->second[c] = *at += num;
    if (!g) return ones;
    *at += bytes_of(ones);
    if (*at > end) return -1;
    int64_t others = ones - NAME(count)(p->second[c], ones);
    p->third[c] = *at, *at += bytes_of(others);
    return *at > end ? -1 : ones + NAME(count)(p->third[c], others);
}
// Find the planes of a body, which is followed by `SLACK` bytes that may be read; return the number of changed cells,
// or −1 for a body that is not written so.
TARGET static int64_t NAME(find_planes)(const uint8_t *body, int64_t length, int64_t n, int bits, Planes *p) {
    if (length < HEAD || length >= n * bits / 8) return -1;
    const uint8_t *at = body + HEAD, *end = body + length;
    int64_t k = 0, ones;
    int e = body[1];
    p->top = body[0];
    if (e > bits - 2 || e > MOST_PARAMETER) return -1;
    for (int c = 0; c < CLASSES; c++) {
        const uint8_t *head = body + 2 + 3 * c;
        p->num_first[c] = head[0] | head[1] << 8, p->gap[c] = head[2];
        if ((ones = NAME(find_mask)(&at, end, n, c, p)) < 0) return -1;
        k += ones;
    }
    if (k < 1 || k > n) return -1;
    p->signs = at, at += bytes_of(k);
    return at > end || NAME(find_numbers)(&at, end, k, e, bits, &p->steps) || at != end ? -1 : k;
}

TARGET static int NAME(write_mask)(
    const Writer *mask, Body *body, uint8_t *head, uint8_t *scratch, int64_t room);
TARGET static const uint8_t *NAME(read_mask)(const Planes *p, int c, uint8_t *mask, void *scratch, int64_t n);

#define CELL uint8_t
#define OF(FUNCTION) NAME(FUNCTION##1)
#include "native_cells.h"
#define CELL uint32_t
#define OF(FUNCTION) NAME(FUNCTION##4)
#include "native_cells.h"
#define CELL uint16_t
#define OF(FUNCTION) NAME(FUNCTION##2)
#include "native_cells.h"
#define CELL uint64_t
#define OF(FUNCTION) NAME(FUNCTION##8)
#include "native_cells.h"
// The places of a word's bits, from `first` on; up to 16 numbers are written beyond, and the end is returned.
TARGET INLINE uint32_t *NAME(places)(uint64_t word, uint32_t first, uint32_t *to) {
#if LEVEL > 1
    uint8_t at[64];
    for (int i = 0; i < 64; i++) at[i] = (uint8_t)i;
    _mm512_storeu_si512(at, _mm512_maskz_compress_epi8(word, _mm512_loadu_si512(at)));
    int num = (int)__builtin_popcountll(word), i = 0;
    do {
        for (int j = 0; j < 16; j++) to[i + j] = first + at[i + j];
    } while ((i += 16) < num);
    return to + num;
#else
    for (; word; word &= word - 1) *to++ = first + (uint32_t)__builtin_ctzll(word);
    return to;
#endif
}
// Code the mask of a class, with its head; return 0 if there is no room.
TARGET static int NAME(write_mask)(
    const Writer *mask, Body *body, uint8_t *head, uint8_t *scratch, int64_t room) {
    int64_t n = num_bits(mask);
    memcpy(mask->to, &mask->held, 8);
    int64_t k = NAME(count)(mask->start, n);
    if (!k) return 1;
    int g = bit_length((uint64_t)(n * 11 / (16 * k))) - 1;
    uint8_t *before = body->at;
    head[2] = (uint8_t)(g < 0 ? 0 : g);
    if (g < 1) {
        if (!write_plane((Writer[]){*mask}, body)) return 0;
        k = body->at - before;
    } else if (g == 1) {
        Writer w[3];
        for (int i = 0; i < 3; i++) w[i] = (Writer){scratch + i * room, scratch + i * room, 0, 0};
        for (int64_t i = 0; i < n; i += 64) {
            uint64_t word = word_at(mask->start + i / 8) & first_bits(n - i);
            uint64_t both = word & word >> 1 & PAIRS, some = (word | word >> 1) & PAIRS, low = some & word & ~both;
            put(w, NAME(pext)(some, PAIRS), n - i < 64 ? (n - i + 1) / 2 : 32);
            put(w + 1, NAME(pext)(low, some), __builtin_popcountll(some));
            put(w + 2, NAME(pext)(both, some & ~low), __builtin_popcountll(some & ~low));
        }
        k = bytes_of(num_bits(w));
        if (!write_plane(w, body) || !write_plane(w + 1, body) || !write_plane(w + 2, body)) return 0;
    } else {
        uint16_t *shorter = (uint16_t *)(scratch + 11 * room + 512);
        uint32_t *place = (uint32_t *)(scratch + 3 * room), *to = place, more = (1u << g) - 1, all = 0;
        *to++ = (uint32_t)-1;
        for (int64_t i = 0; i < n; i += 64)
            to = NAME(places)(word_at(mask->start + i / 8) & first_bits(n - i), (uint32_t)i, to);
        for (int64_t i = 0; i < k; i++) {
            uint32_t y = place[i + 1] - place[i] + more;
            all |= y, shorter[i] = (uint16_t)y;
        }
        for (int64_t i = 0; all >> 16 && i < k; i++) place[i] = place[i + 1] - place[i] + more;
        int is_room = all >> 16 ? NAME(write_numbers4)(place, k, g, 0, GAP_BITS - 1, body)
                                : NAME(write_numbers2)(shorter, k, g, 0, GAP_BITS - 1, body);
        if (!is_room) return 0;
    }
    head[0] = (uint8_t)k, head[1] = (uint8_t)(k >> 8);
    return 1;
}
// The mask of a class, which is made where it isn't a plane of all n cells; `scratch` has room for two lists of n
// numbers.
TARGET static const uint8_t *NAME(read_mask)(const Planes *p, int c, uint8_t *mask, void *scratch, int64_t n) {
    uint8_t *start = mask;
    if (!p->gap[c] && p->num_first[c] == bytes_of(n)) return p->first[c];
    memset(mask, 0, (size_t)room_of(n));
    if (!p->gap[c]) {
        memcpy(mask, p->first[c], (size_t)p->num_first[c]);
    } else if (p->gap[c] > 1) {
        int is_short = p->gaps[c].last < 16;
        const uint16_t *shorter = 0;
        const uint32_t *y = 0;
        if (is_short) shorter = NAME(read_numbers2)(&p->gaps[c], 0, 15, scratch, (uint16_t *)scratch + n + 64);
        else y = NAME(read_numbers4)(&p->gaps[c], 0, 31, scratch, (uint32_t *)scratch + n + 64);
        uint32_t less = (1u << p->gap[c]) - 1, next = (uint32_t)-1;
        for (int64_t j = 0; j < p->num_first[c]; j++) {
            next += (is_short ? shorter[j] : y[j]) - less;
            mask[next >> 3] |= (uint8_t)(1 << (next & 7));
        }
    } else {
        int64_t at_low = 0, at_both = 0, bits = 8 * p->num_first[c];
        for (int64_t i = 0; i < bits; i += 32, mask += 8) {
            uint64_t some = NAME(pdep)(bits_at(p->first[c], i, 32) & first_bits(bits - i), PAIRS);
            uint64_t low = NAME(pdep)(bits_at(p->second[c], at_low, 32), some), others = some & ~low;
            uint64_t both = NAME(pdep)(bits_at(p->third[c], at_both, 32), others), word = low | both | others << 1;
            at_low += __builtin_popcountll(some), at_both += __builtin_popcountll(others);
            write_word(mask, word);
        }
    }
    return start;
}
#undef LEVEL
#undef TARGET
#undef NAME

#else

#define BITS (8 * (int)sizeof(CELL))
#define TOP ((CELL)((CELL)1 << (BITS - 1)))
#define LANES (64 / (int)sizeof(CELL))

// The place of a cell among all, less that of 0; and the cell of a place.
TARGET INLINE CELL OF(order)(CELL cell) { return (CELL)(cell ^ ((CELL)-(CELL)(cell >> (BITS - 1)) & (CELL)~TOP)); }

// Write those of 64 cells that a word has, and up to 64 beyond, and return their number; `to` may be `from` or before.
TARGET INLINE int64_t OF(compress)(CELL *to, const CELL *from, uint64_t word) {
    CELL *start = to;
    if (LEVEL == 1 && !word) return 0;
#if LEVEL > 1
    for (int i = 0; i < 64; i += LANES) {
        uint64_t part = word >> i & first_bits(LANES);
        __m512i all = _mm512_loadu_si512(from + i);
        if (sizeof(CELL) == 1) all = _mm512_maskz_compress_epi8(part, all);
        if (sizeof(CELL) == 2) all = _mm512_maskz_compress_epi16((__mmask32)part, all);
        if (sizeof(CELL) == 4) all = _mm512_maskz_compress_epi32((__mmask16)part, all);
        if (sizeof(CELL) == 8) all = _mm512_maskz_compress_epi64((__mmask8)part, all);
        _mm512_storeu_si512(to, all);
        to += __builtin_popcountll(part);
    }
#else
#if LEVEL == 1
    for (int i = 0; sizeof(CELL) == 1 && i < 64; i += 8) {
        __m128i at = _mm_loadl_epi64((const void *)bytes_from[word >> i & 0xFF]);
        _mm_storel_epi64((void *)to, _mm_shuffle_epi8(_mm_loadl_epi64((const void *)(from + i)), at));
        to += __builtin_popcountll(word >> i & 0xFF);
    }
    if (sizeof(CELL) == 1) return to - start;
    for (int i = 0; sizeof(CELL) == 2 && i < 64; i += 8) {
        __m128i eight = _mm_loadu_si128((const void *)(from + i));
        __m128i at = _mm_loadu_si128((const void *)pairs_from[word >> i & 0xFF]);
        _mm_storeu_si128((void *)to, _mm_shuffle_epi8(eight, at));
        to += __builtin_popcountll(word >> i & 0xFF);
    }
    if (sizeof(CELL) == 2) return to - start;
    for (int i = 0; sizeof(CELL) == 4 && i < 64; i += 8) {
        __m256i eight = _mm256_loadu_si256((const void *)(from + i));
        __m256i at = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)bytes_from[word >> i & 0xFF]));
        _mm256_storeu_si256((void *)to, _mm256_permutevar8x32_epi32(eight, at));
        to += __builtin_popcountll(word >> i & 0xFF);
    }
    if (sizeof(CELL) == 4) return to - start;
#endif
    for (; word; word &= word - 1) *to++ = from[__builtin_ctzll(word)];
#endif
    return to - start;
}
// Put cells where a word has a bit, and 0 elsewhere; 64 are read.
TARGET INLINE void OF(expand)(const CELL *from, uint64_t word, CELL to[64]) {
#if LEVEL > 1
    for (int i = 0; i < 64; i += LANES) {
        uint64_t part = word >> i & first_bits(LANES);
        __m512i all = _mm512_loadu_si512(from);
        if (sizeof(CELL) == 1) all = _mm512_mask_expand_epi8(NAME(fresh)(), part, all);
        if (sizeof(CELL) == 2) all = _mm512_mask_expand_epi16(NAME(fresh)(), (__mmask32)part, all);
        if (sizeof(CELL) == 4) all = _mm512_mask_expand_epi32(NAME(fresh)(), (__mmask16)part, all);
        if (sizeof(CELL) == 8) all = _mm512_mask_expand_epi64(NAME(fresh)(), (__mmask8)part, all);
        _mm512_storeu_si512(to + i, all);
        from += __builtin_popcountll(part);
    }
#else
#if LEVEL == 1
    for (int i = 0; sizeof(CELL) == 1 && i < 64; i += 32)
        _mm256_storeu_si256((void *)(to + i), NAME(expand32)((const uint8_t **)&from, word >> i));
    for (int i = 0; sizeof(CELL) == 2 && i < 64; i += 16)
        _mm256_storeu_si256((void *)(to + i), NAME(expand_pairs)((const uint16_t **)&from, word >> i));
    if (sizeof(CELL) < 4) return;
#endif
    memset(to, 0, 64 * sizeof(CELL));
    for (; word; word &= word - 1) to[__builtin_ctzll(word)] = *from++;
#endif
}
// Those of 64 numbers that have one of some bits.
TARGET INLINE uint64_t OF(with)(const CELL *y, CELL bits) {
#if LEVEL > 1
    uint64_t word = 0;
    for (int i = 0; i < 64; i += LANES) {
        __m512i all = _mm512_loadu_si512(y + i);
        if (sizeof(CELL) == 1) word = _mm512_test_epi8_mask(all, _mm512_set1_epi8((char)bits));
        if (sizeof(CELL) == 2) word |= (uint64_t)_mm512_test_epi16_mask(all, _mm512_set1_epi16((short)bits)) << i;
        if (sizeof(CELL) == 4) word |= (uint64_t)_mm512_test_epi32_mask(all, _mm512_set1_epi32((int)bits)) << i;
        if (sizeof(CELL) == 8) word |= (uint64_t)_mm512_test_epi64_mask(all, _mm512_set1_epi64((int64_t)bits)) << i;
    }
    return word;
#else
#if LEVEL == 1
    __m256i zero = _mm256_setzero_si256();
    if (sizeof(CELL) == 1) {
        __m256i all = _mm256_set1_epi8((char)bits);
        __m256i low = _mm256_and_si256(NAME(load)(y), all), high = _mm256_and_si256(NAME(load)(y + 32), all);
        return ~NAME(tops)(_mm256_cmpeq_epi8(low, zero), _mm256_cmpeq_epi8(high, zero));
    }
    if (sizeof(CELL) == 2) {
        __m256i all = _mm256_set1_epi16((short)bits), half[4];
        for (int i = 0; i < 4; i++)
            half[i] = _mm256_cmpeq_epi16(_mm256_and_si256(NAME(load)(y + 16 * i), all), zero);
        return ~NAME(tops)(NAME(narrow)(half[0], half[1]), NAME(narrow)(half[2], half[3]));
    }
#endif
    uint8_t byte[64];
    for (int i = 0; i < 64; i++) byte[i] = (y[i] & bits) != 0;
    return NAME(word)(byte, 0);
#endif
}
// Give some of 64 numbers a bit.
TARGET INLINE void OF(give)(CELL y[64], uint64_t word, CELL bit) {
#if LEVEL > 1
    for (int i = 0; i < 64; i += LANES) {
        __m512i all = _mm512_loadu_si512(y + i), some = all;
        uint64_t part = word >> i;
        if (sizeof(CELL) == 1) some = _mm512_maskz_set1_epi8(part, (char)bit);
        if (sizeof(CELL) == 2) some = _mm512_maskz_set1_epi16((__mmask32)part, (short)bit);
        if (sizeof(CELL) == 4) some = _mm512_maskz_set1_epi32((__mmask16)part, (int)bit);
        if (sizeof(CELL) == 8) some = _mm512_maskz_set1_epi64((__mmask8)part, (int64_t)bit);
        _mm512_storeu_si512(y + i, _mm512_or_si512(all, some));
    }
#else
#if LEVEL == 1
    for (int i = 0; sizeof(CELL) < 4 && i < 64; i += LANES / 2) {
        __m256i some = sizeof(CELL) == 1 ? NAME(spread1)(word >> i) : NAME(spread2)(word >> i);
        some = _mm256_and_si256(some, sizeof(CELL) == 1 ? _mm256_set1_epi8((char)bit) : _mm256_set1_epi16((short)bit));
        _mm256_storeu_si256((void *)(y + i), _mm256_or_si256(NAME(load)(y + i), some));
    }
    if (sizeof(CELL) < 4) return;
#endif
    uint8_t byte[64];
    NAME(bytes)(word, byte);
    for (int i = 0; i < 64; i++) y[i] |= (CELL)-(CELL)byte[i] & bit;
#endif
}

TARGET static int OF(write_bit)(const CELL *y, int64_t k, int b, Body *body) {
    uint8_t *plane = take(body, k);
    for (int64_t i = 0; plane && i < k; i += 64)
        write_word(plane + i / 8, OF(with)(y + i, (CELL)((CELL)1 << b)) & first_bits(k - i));
    return plane != 0;
}
// Write the planes of bits, from `first` on and below `end`, of k numbers, which are lost; 64 more are read. Return 0
// if there is no room.
TARGET static int OF(write_numbers)(CELL *y, int64_t k, int e, int first, int end, Body *body) {
    for (int b = first; b < e && b < end; b++)
        if (!OF(write_bit)(y, k, b, body)) return 0;
    for (int b = first < e ? e : first; b < end && k; b++) {
        uint8_t *plane = take(body, k);
        int64_t num = 0;
        if (!plane) return 0;
        for (int64_t i = 0; i < k; i += 64) {
            uint64_t longer = OF(with)(y + i, (CELL)-((CELL)2 << b)) & first_bits(k - i);
            write_word(plane + i / 8, longer);
            num += OF(compress)(y + num, y + i, longer);
        }
        k = num;
        if (!OF(write_bit)(y, k, b, body)) return 0;
    }
    return 1;
}
// Make k numbers that reach bit b, of those that reach a higher one and some planes of lower bits.
TARGET INLINE void OF(read_level)(
    const CELL *from, const uint8_t *longer, const uint8_t *const *exact, int num, int b, int64_t k, CELL *to) {
    for (int64_t i = 0; i < k; i += 64, to += 64) {
        uint64_t word = longer ? word_at(longer + i / 8) : 0;
#if LEVEL == 1
        for (int at = 0; sizeof(CELL) == 1 && at < 64; at += 32) {
            __m256i y = NAME(expand32)((const uint8_t **)&from, word >> at), bit = _mm256_set1_epi8((char)(1 << b));
            y = _mm256_or_si256(y, _mm256_andnot_si256(NAME(spread1)(word >> at), bit));
            for (int j = 0; j < num; j++) {
                bit = _mm256_set1_epi8((char)(1 << (b - num + j)));
                bit = _mm256_and_si256(NAME(spread1)(word_at(exact[j] + i / 8) >> at), bit);
                y = _mm256_or_si256(y, bit);
            }
            _mm256_storeu_si256((void *)(to + at), y);
        }
        if (sizeof(CELL) == 1) continue;
#endif
        OF(expand)(from, word, to);
        from += __builtin_popcountll(word);
        OF(give)(to, ~word, (CELL)((CELL)1 << b));
        for (int j = 0; j < num; j++) OF(give)(to, word_at(exact[j] + i / 8), (CELL)((CELL)1 << (b - num + j)));
    }
}
// Make numbers of their planes of bits, from `first` on and up to `top`, which numbers with a higher bit have, too.
// They lie in one of two places, which have room for 64 more.
TARGET static CELL *OF(read_numbers)(const Numbers *p, int first, int top, CELL *to, CELL *other) {
    int last = p->last < top ? p->last : top, least = p->e < top ? p->e : top;
    for (int b = last; b >= least && b >= first; b--) {
        const uint8_t *longer = b < last ? p->longer[b] : 0;
        int lowest = b > p->e ? b - 1 : 0, num = b - (lowest < first ? first : lowest);
        const uint8_t *const *exact = p->exact + b - num;
        if (num == 1) OF(read_level)(other, longer, exact, 1, b, p->num[b], to);
        else OF(read_level)(other, longer, exact, num, b, p->num[b], to);
        CELL *swap = to;
        to = other, other = swap;
    }
    return other;
}

// Make y = |s| − 1 + 2^e of 64 steps.
TARGET INLINE void OF(measure)(CELL steps[64], CELL power) {
    for (int i = 0; i < 64; i++) {
        CELL s = steps[i], back = (CELL)-s;
        steps[i] = (CELL)((CELL)(s < back ? s : back) + (CELL)(power - 1));
    }
}
// The signs of 64 steps, which become numbers y as above, and a byte of each; and which have higher bits.
TARGET INLINE uint64_t OF(split)(CELL y[64], CELL power, uint8_t low[64], uint64_t *is_long) {
#if LEVEL == 1
    uint64_t down = 0, is_short = 0;
    __m256i zero = _mm256_setzero_si256(), lowest = _mm256_set1_epi16(LONG - 1);
    for (int i = 0; sizeof(CELL) == 2 && i < 64; i += 32) {
        __m256i all[2] = {NAME(load)(y + i), NAME(load)(y + i + 16)}, higher[2];
        down |= (uint64_t)NAME(tops)(NAME(narrow)(all[0], all[1]), zero) << i;
        for (int j = 0; j < 2; j++) {
            all[j] = _mm256_add_epi16(_mm256_abs_epi16(all[j]), _mm256_set1_epi16((short)(power - 1)));
            _mm256_storeu_si256((void *)(y + i + 16 * j), all[j]);
            higher[j] = _mm256_cmpeq_epi16(_mm256_andnot_si256(lowest, all[j]), zero);
            all[j] = _mm256_and_si256(all[j], lowest);
        }
        __m256i few = NAME(narrow)(higher[0], higher[1]);
        is_short |= NAME(tops)(few, zero) << i;
        few = _mm256_andnot_si256(few, _mm256_set1_epi8((char)LONG));
        _mm256_storeu_si256((void *)(low + i), _mm256_or_si256(few, NAME(narrow)(all[0], all[1])));
    }
    *is_long = ~is_short;
    if (sizeof(CELL) == 2) return down;
#endif
    uint64_t signs = OF(with)(y, TOP);
    OF(measure)(y, power);
    *is_long = OF(with)(y, (CELL)-(CELL)LONG);
    for (int i = 0; i < 64; i++) low[i] = (uint8_t)(y[i] & (LONG - 1));
    NAME(give1)(low, *is_long, LONG);
    return signs;
}
// Make 64 steps, of their numbers less 2^e − 1, as bytes, and signs; the higher bits of some are read from `from` on,
// whose end is returned.
TARGET INLINE const CELL *OF(lengthen)(
    const uint8_t low[64], const CELL *from, uint64_t down, CELL less, CELL step[64]) {
    uint64_t is_long = NAME(word)(low, LOW);
    OF(expand)(from, is_long, step);
#if LEVEL > 1
    for (int i = 0; i < 64; i += LANES) {
        const void *some = low + i;
        __m512i y = _mm512_loadu_si512(step + i), zero = _mm512_setzero_si512();
        uint64_t below = down >> i;
        if (sizeof(CELL) == 1) {
            y = _mm512_or_si512(y, _mm512_and_si512(_mm512_loadu_si512(some), _mm512_set1_epi8(LONG - 1)));
            y = _mm512_sub_epi8(y, _mm512_set1_epi8((char)less));
            y = _mm512_mask_sub_epi8(y, below, zero, y);
        }
        if (sizeof(CELL) == 2) {
            __m512i l = _mm512_cvtepu8_epi16(_mm256_loadu_si256(some));
            y = _mm512_ternarylogic_epi64(y, l, _mm512_set1_epi16(LONG - 1), 0xF8);
            y = _mm512_sub_epi16(y, _mm512_set1_epi16((short)less));
            y = _mm512_mask_sub_epi16(y, (__mmask32)below, zero, y);
        }
        if (sizeof(CELL) == 4) {
            __m512i l = _mm512_cvtepu8_epi32(_mm_loadu_si128(some));
            y = _mm512_ternarylogic_epi64(y, l, _mm512_set1_epi32(LONG - 1), 0xF8);
            y = _mm512_sub_epi32(y, _mm512_set1_epi32((int)less));
            y = _mm512_mask_sub_epi32(y, (__mmask16)below, zero, y);
        }
        if (sizeof(CELL) == 8) {
            __m512i l = _mm512_cvtepu8_epi64(_mm_loadl_epi64(some));
            y = _mm512_ternarylogic_epi64(y, l, _mm512_set1_epi64(LONG - 1), 0xF8);
            y = _mm512_sub_epi64(y, _mm512_set1_epi64((int64_t)less));
            y = _mm512_mask_sub_epi64(y, (__mmask8)below, zero, y);
        }
        _mm512_storeu_si512(step + i, y);
    }
#else
#if LEVEL == 1
    for (int i = 0; sizeof(CELL) == 2 && i < 64; i += 16) {
        __m256i l = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(low + i)));
        __m256i y = _mm256_or_si256(NAME(load)(step + i), _mm256_and_si256(l, _mm256_set1_epi16(LONG - 1)));
        __m256i is_down = NAME(spread2)(down >> i);
        y = _mm256_sub_epi16(y, _mm256_set1_epi16((short)less));
        _mm256_storeu_si256((void *)(step + i), _mm256_sub_epi16(_mm256_xor_si256(y, is_down), is_down));
    }
    if (sizeof(CELL) == 2) return from + __builtin_popcountll(is_long);
#endif
    uint8_t is_down[64];
    NAME(bytes)(down, is_down);
    for (int i = 0; i < 64; i++) {
        CELL s = (CELL)((step[i] | (low[i] & (LONG - 1))) - less);
        step[i] = (CELL)((s ^ (CELL)-is_down[i]) + is_down[i]);
    }
#endif
    return from + __builtin_popcountll(is_long);
}

// The buckets of 64 cells: the highest bits of their magnitudes.
TARGET INLINE void OF(buckets)(const CELL *cells, uint8_t bucket[64]) {
    for (int i = 0; i < 64; i++) bucket[i] = (uint8_t)((CELL)(cells[i] & (CELL)~TOP) >> (BITS - 8));
}
// The cells of each class, whose `least` buckets are known; the words of a class are together.
TARGET INLINE void OF(classes)(
    const CELL *cells, const uint8_t least[CLASSES - 1], uint64_t valid, uint64_t *of_class) {
    uint8_t bucket[64];
    OF(buckets)(cells, bucket);
    uint64_t higher = 0;
#pragma GCC unroll 3
    for (int c = 0; c < CLASSES - 1; c++) {
        uint64_t above = valid & NAME(reach)(bucket, least[c]);
        of_class[c * WORDS] = above & ~higher;
        higher = above;
    }
    of_class[(CLASSES - 1) * WORDS] = valid & ~higher;
}
// The steps of 64 cells, and a word of those that changed.
TARGET INLINE uint64_t OF(find_steps)(const CELL *old, const CELL *new, CELL step[64]) {
    for (int i = 0; i < 64; i++) step[i] = (CELL)(OF(order)(new[i]) - OF(order)(old[i]));
    return OF(with)(step, (CELL)~(CELL)0);
}
// 64 cells, which are copied where there are fewer.
TARGET INLINE const CELL *OF(all)(const CELL *cells, int64_t num, CELL copy[64]) {
    if (__builtin_expect(num >= 64, 1)) return cells;
    for (int64_t i = 0; i < 64; i++) copy[i] = i < num ? cells[i] : 0;
    return copy;
}

// Read both parameters from a sample.
TARGET static void OF(sample)(const CELL *old, const CELL *new, int64_t n, int *top, int *e) {
    uint32_t counts[65] = {0};
    CELL copy_a[64], copy_b[64], step[64];
    uint8_t bucket[SAMPLE * 64];
    int64_t stride = 64 * (n / 64 / SAMPLE + 1), num_cells = 0;
    for (int64_t i = 0; i < n; i += stride)
        fetch(old, i, sizeof(CELL)), fetch(new, i, sizeof(CELL));
    for (int64_t i = 0; i < n; i += stride) {
        int64_t num = n - i < 64 ? n - i : 64;
        const CELL *a = OF(all)(old + i, num, copy_a), *b = OF(all)(new + i, num, copy_b);
        OF(buckets)(a, bucket + num_cells);
        uint64_t word = OF(find_steps)(a, b, step);
        OF(measure)(step, 0);
        for (int b = 0; word; word &= OF(with)(step, (CELL)-((CELL)1 << b++)))
            counts[b] += (uint32_t)__builtin_popcountll(word);
        num_cells += num;
    }
    *top = 8 * counts[0] < 5 * num_cells ? NAME(top_bucket)(bucket, num_cells) : 0;
    for (int b = 0; b < 64; b++) counts[b] -= counts[b + 1];
    *e = step_parameter(counts, BITS);
}

// Append to the mask of each class which of its cells changed; write the steps, and return their number.
TARGET static int64_t OF(find_changes)(
    const CELL *old, const CELL *new, int64_t n, int top, Writer *masks, CELL *steps) {
    uint64_t of_class[CLASSES][WORDS], changed[WORDS];
    CELL copy_a[64], copy_b[64], step[64], *to = steps;
    uint8_t least[CLASSES - 1];
    find_least(top, least);
    for (int64_t start = 0; start < n; start += 64 * WORDS) {
        int64_t num = n - start < 64 * WORDS ? (n - start + 63) / 64 : WORDS;
        for (int64_t j = 0; j < num; j++) {
            int64_t i = start + 64 * j;
            const CELL *a = OF(all)(old + i, n - i, copy_a), *b = OF(all)(new + i, n - i, copy_b);
            fetch(old, i + AHEAD_CELLS, sizeof(CELL)), fetch(new, i + AHEAD_CELLS, sizeof(CELL));
            changed[j] = OF(find_steps)(a, b, step);
            if (top) OF(classes)(a, least, first_bits(n - i), &of_class[0][j]);
            to += OF(compress)(to, step, changed[j]);
        }
        for (int c = 0; c < (top ? CLASSES : 1); c++) {
            Writer w = masks[c];
            if (top) {
                for (int64_t j = 0; j < num; j++)
                    put(&w, NAME(pext)(changed[j], of_class[c][j]), __builtin_popcountll(of_class[c][j]));
            } else {
                int64_t here = n - start < 64 * num ? n - start : 64 * num;
                memcpy(w.to, changed, 8 * (size_t)num);
                w.to += here / 8, w.num_held = here % 8, w.held = w.num_held ? *w.to : 0;
            }
            masks[c] = w;
        }
    }
    return to - steps;
}
// Write the signs of k steps, and split y = |s| − 1 + 2^e: a byte of each, and whole those that have higher bits, which
// may lie where the steps are; return the number of these, or −1 if there is no room. No cells are read while numbers
// are written: the next old and new ones come into the cache.
TARGET static int64_t OF(write_signs)(
    const CELL *steps, int64_t k, int e, Body *body, uint8_t *low, CELL *whole, const CELL *old, const CELL *new) {
    uint8_t *plane = take(body, k);
    int64_t num = 0;
    CELL y[64];
    for (int64_t i = 0; plane && i < k; i += 64) {
        uint64_t is_long;
        memcpy(y, steps + i, sizeof(y));
        fetch(old, i, sizeof(CELL)), fetch(new, i, sizeof(CELL));
        write_word(plane + i / 8, OF(split)(y, (CELL)((CELL)1 << e), low + i, &is_long) & first_bits(k - i));
        num += OF(compress)(whole + num, y, is_long & first_bits(k - i));
    }
    return plane ? num : -1;
}
// Write the body of a chunk, and up to 8 bytes beyond; return its length.
TARGET static int64_t OF(encode_chunk)(const CELL *old, const CELL *new, int64_t n, uint8_t *start, uint8_t *scratch) {
    int64_t room = room_of(n);
    int top, e, is_room = 1;
    Writer masks[CLASSES];
    CELL *steps = (CELL *)(scratch + 20 * room + 1024);
    uint8_t *low = (uint8_t *)(steps + n + 64);
    for (int c = 0; c < CLASSES; c++) masks[c] = (Writer){scratch + c * room, scratch + c * room, 0, 0};
    OF(sample)(old, new, n, &top, &e);
    int64_t k = OF(find_changes)(old, new, n, top, masks, steps), num = -1;
    if (!k) return 0;
    uint8_t head[HEAD] = {(uint8_t)top, (uint8_t)e};
    Body body = {start, start + n * (int64_t)sizeof(CELL) - 1};
    is_room = take(&body, 8 * HEAD) != 0;
    for (int c = 0; c < CLASSES && is_room; c++)
        is_room = NAME(write_mask)(masks + c, &body, head + 2 + 3 * c, scratch + 4 * room, room);
    if (is_room) num = OF(write_signs)(steps, k, e, &body, low, steps, old + n, new + n);
    is_room = num >= 0 && NAME(write_numbers1)(low, k, e, 0, LOW, &body);
    if (is_room && OF(write_numbers)(steps, num, e, LOW, BITS - 1, &body)) {
        memcpy(start, head, HEAD);
        return body.at - start;
    }
    memcpy(start, new, (size_t)n * sizeof(CELL));
    return n * (int64_t)sizeof(CELL);
}

// Write the bodies of the chunks of n cells one after another, and their lengths; return the sum of these, or −1
// without memory. `body` has n · size + 16 bytes.
TARGET static int64_t OF(encode)(
    const uint8_t *old, const uint8_t *new, int64_t n, int64_t chunk, uint32_t *lengths, uint8_t *body) {
    int64_t most = n < chunk ? n : chunk, total = 0;
    uint8_t *scratch = aligned_memory(20 * room_of(most) + 1024 + (most + 64) * (int64_t)(sizeof(CELL) + 1));
    if (!scratch) return -1;
    for (int64_t i = 0; i < n; i += chunk) {
        int64_t num = n - i < chunk ? n - i : chunk;
        const CELL *a = (const CELL *)old + i, *b = (const CELL *)new + i;
        total += *lengths++ = (uint32_t)OF(encode_chunk)(a, b, num, body + total, scratch);
    }
    free(scratch);
    return total;
}

// Change those of 64 cells that a word has by steps, in order; return the end of these.
TARGET INLINE const CELL *OF(add_some)(const CELL *from, uint64_t word, CELL cells[64]) {
#if LEVEL == 1
    __m256i magnitude = _mm256_set1_epi16(0x7FFF);
    for (int i = 0; sizeof(CELL) == 2 && i < 64; i += 16) {
        __m256i x = NAME(load)(cells + i);
        x = _mm256_xor_si256(x, _mm256_and_si256(_mm256_srai_epi16(x, 15), magnitude));
        x = _mm256_add_epi16(x, NAME(expand_pairs)((const uint16_t **)&from, word >> i));
        x = _mm256_xor_si256(x, _mm256_and_si256(_mm256_srai_epi16(x, 15), magnitude));
        _mm256_storeu_si256((void *)(cells + i), x);
    }
    if (sizeof(CELL) == 2) return from;
#endif
    CELL step[64];
    OF(expand)(from, word, step);
    for (int l = 0; l < 64; l++) cells[l] = OF(order)((CELL)(OF(order)(cells[l]) + step[l]));
    return from + __builtin_popcountll(word);
}
// Change cells by steps, in order, where masks of their classes have bits; return the number of changed ones.
TARGET static int64_t OF(change)(
    const CELL *steps, CELL *into, int64_t n, int top, const uint8_t *const masks[CLASSES]) {
    uint64_t of_class[CLASSES][WORDS], changed[WORDS];
    uintptr_t at[CLASSES];
    for (int c = 0; c < CLASSES; c++) at[c] = 8 * (uintptr_t)masks[c];
    const CELL *from = steps;
    CELL copy[64];
    uint8_t least[CLASSES - 1];
    find_least(top, least);
    for (int64_t start = 0; start < n; start += 64 * WORDS) {
        int64_t num = n - start < 64 * WORDS ? (n - start + 63) / 64 : WORDS, num_some = 0;
        uint8_t some[WORDS];
        for (int64_t j = 0, i = start; j < num; j++, i += 64) {
            fetch(into, i + AHEAD_CELLS, sizeof(CELL));
            changed[j] = word_at(masks[0] + i / 8) & first_bits(n - i);
            if (top) OF(classes)(OF(all)(into + i, n - i, copy), least, first_bits(n - i), &of_class[0][j]);
        }
        for (int64_t j = 0; top && j < num; j++) {
            changed[j] = 0;
#pragma GCC unroll 4
            for (int c = 0; c < CLASSES; c++) {
                uint64_t cells = of_class[c][j];
                int64_t size = __builtin_popcountll(cells);
                changed[j] |= NAME(pdep)(bits_at((const uint8_t *)(at[c] >> 3), at[c] & 7, size), cells);
                at[c] += (uintptr_t)size;
            }
        }
        for (int64_t j = 0; j < num; j++) some[num_some] = (uint8_t)j, num_some += changed[j] != 0;
        for (int64_t j = 0; j < num_some; j++) {
            int64_t i = start + 64 * some[j];
            CELL *cells = (CELL *)OF(all)(into + i, n - i, copy);
            from = OF(add_some)(from, changed[some[j]], cells);
            if (cells == copy) memcpy(into + i, copy, (size_t)(n - i) * sizeof(CELL));
        }
    }
    return from - steps;
}
// Change the cells of a chunk, or only check its body; return the number of changed cells, or −1 for a bad body.
TARGET static int64_t OF(decode_chunk)(
    const uint8_t *body, int64_t length, CELL *into, int64_t n, int only_check, uint8_t *scratch) {
    if (!length) return 0;
    if (length == n * (int64_t)sizeof(CELL)) {
        int64_t changed = 0;
        for (int64_t i = 0; i < n; i++) {
            CELL cell;
            memcpy(&cell, body + i * (int64_t)sizeof(CELL), sizeof(CELL));
            changed += into[i] != cell;
        }
        if (!only_check) memcpy(into, body, (size_t)length);
        return changed;
    }
    Planes p;
    int64_t room = room_of(n), k = NAME(find_planes)(body, length, n, BITS, &p);
    if (k < 0 || only_check) return k;
    uint8_t *lists = scratch + CLASSES * room;
    const uint8_t *masks[CLASSES] = {0};
    for (int c = 0; c < (p.top ? CLASSES : 1); c++) masks[c] = NAME(read_mask)(&p, c, scratch + c * room, lists, n);
    CELL *steps = (CELL *)lists, *other = steps + n + 64;
    const CELL *whole = OF(read_numbers)(&p.steps, LOW, BITS - 1, steps, other);
    if (whole == steps) steps = other;
    uint8_t *bytes = (uint8_t *)lists + 2 * (n + 64) * (int64_t)sizeof(CELL);
    const uint8_t *low = NAME(read_numbers1)(&p.steps, 0, LOW, bytes, bytes + n + 64);
    for (int64_t i = 0; i < k; i += 64)
        whole = OF(lengthen)(low + i, whole, word_at(p.signs + i / 8), (CELL)(((CELL)1 << p.steps.e) - 1), steps + i);
    return OF(change)(steps, into, n, p.top, masks);
}

// Change n cells, or only check the bodies of their chunks, which lie one after another; return the number of changed
// cells, −1 for a bad chunk, or INT64_MIN without memory.
TARGET static int64_t OF(decode)(
    const uint8_t *body, const uint32_t *lengths, uint8_t *into, int64_t n, int64_t chunk, int only_check) {
    int64_t most = n < chunk ? n : chunk, total = 0, left = 0;
    for (int64_t i = 0, c = 0; i < n; i += chunk, c++) left += lengths[c];
    int64_t num_masks = CLASSES * room_of(most), size = sizeof(CELL) > 4 ? sizeof(CELL) : 4;
    int64_t num_lists = 2 * (most + 64) * (size + 1) + 64;
    uint8_t *scratch = aligned_memory(num_masks + num_lists + most * (int64_t)sizeof(CELL) + SLACK);
    if (!scratch) return INT64_MIN;
    for (int64_t i = 0; total >= 0 && i < n; i += chunk) {
        int64_t num = n - i < chunk ? n - i : chunk, length = *lengths++, changed = -1;
        const uint8_t *here = body;
        if (left - length < SLACK && length <= num * (int64_t)sizeof(CELL))
            here = memcpy(scratch + num_masks + num_lists, body, (size_t)length);
        if (length <= num * (int64_t)sizeof(CELL))
            changed = OF(decode_chunk)(here, length, (CELL *)into + i, num, only_check, scratch);
        total = changed < 0 ? -1 : total + changed;
        body += length, left -= length;
    }
    free(scratch);
    return total;
}

#undef BITS
#undef TOP
#undef LANES
#undef CELL
#undef OF
#endif
