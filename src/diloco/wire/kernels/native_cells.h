// The coder of diloco.publishing.cells, of cells of 1, 2, 4 or 8 bytes.
// The file includes itself: once for each set of instructions, whose functions end in its NAME, and there once for each
// size of a cell.

#ifndef LEVEL

#define PAIRS ((uint64_t)0x5555555555555555)
enum { SAMPLE = 64, CLASSES = 4, WORDS = 32, HEAD = 2 + 3 * CLASSES, SLACK = 16 };
enum { MOST_PARAMETER = 62, MOST_GAP_PARAMETER = 17 };

INLINE int bit_length(uint64_t value) { return value ? 64 - __builtin_clzll(value) : 0; }
INLINE int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }

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
// The highest bucket with a 64th of the cells in it and above.
static int top_bucket(const uint32_t *counts) {
    uint64_t all = 0, above = 0;
    int top = 127;
    for (int b = 0; b < 128; b++) all += counts[b];
    for (; top > 0 && 64 * (above += counts[top]) < all; top--) {}
    return top;
}

// A plane of bits that is written from the lowest bit of a byte on, and up to 8 bytes beyond; fewer than 8 are held.
typedef struct { uint8_t *start, *to; uint64_t held; int64_t num_held; } Writer;
INLINE void begin(Writer *w, uint8_t *start) { *w = (Writer){.start = start, .to = start}; }
// Bits above `width`, which is at most 56, are 0.
INLINE void put_some(Writer *w, uint64_t bits, int64_t width) {
    uint64_t held = w->held | bits << w->num_held;
    int64_t num_held = w->num_held + width;
    memcpy(w->to, &held, 8);
    w->to += num_held >> 3;
    w->held = held >> (num_held & ~7);
    w->num_held = num_held & 7;
}
INLINE void put(Writer *w, uint64_t bits, int64_t width) {
    if (width > 56) {
        put_some(w, bits & 0xFFFFFFFF, 32);
        bits >>= 32, width -= 32;
    }
    put_some(w, bits, width);
}
INLINE void put_unary(Writer *w, uint64_t zeros) {
    for (; zeros >= 55; zeros -= 55) put_some(w, 0, 55);
    put_some(w, (uint64_t)1 << zeros, (int64_t)zeros + 1);
}
INLINE int64_t put_last(Writer *w) {
    memcpy(w->to, &w->held, 8);
    return w->to - w->start + bytes_of(w->num_held);
}

// Have 64 cells come into the cache, at a place that may lie outside: processors fetch ahead within a page only.
INLINE void fetch(const void *cells, int64_t cell, int size) {
    for (int i = 0; i < size; i++)
        __builtin_prefetch((const void *)((uintptr_t)cells + (uintptr_t)(cell * size) + 64 * (uintptr_t)i));
}

// 64 bits of a plane; 9 bytes are read.
INLINE uint64_t bits_at(const uint8_t *plane, int64_t bit) {
    uint64_t low;
    memcpy(&low, plane + (bit >> 3), 8);
    return low >> (bit & 7) | (uint64_t)plane[(bit >> 3) + 8] << 1 << (63 - (bit & 7));
}
static int64_t count_ones(const uint8_t *plane, int64_t bits) {
    int64_t ones = 0;
    for (int64_t i = 0; i < bits; i += 64) {
        uint64_t word = 0;
        memcpy(&word, plane + i / 8, (size_t)(bits - i < 64 ? bytes_of(bits - i) : 8));
        ones += __builtin_popcountll(word & first_bits(bits - i));
    }
    return ones;
}

// The words of a block.
static const uint8_t EVERY[WORDS] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// The planes of a chunk's body; three of each class.
typedef struct {
    const uint8_t *first[CLASSES], *second[CLASSES], *third[CLASSES], *signs, *exact[64], *longer[64];
    int64_t num_first[CLASSES];
    int gap[CLASSES], top, e;
} Planes;

// Check that the gaps of a class have k places below n.
static int check_places(const Planes *p, int c, int64_t k, int64_t n) {
    int64_t bits = 8 * p->num_first[c], low = 0;
    int g = p->gap[c];
    while (bits > 0 && !(p->first[c][(bits - 1) >> 3] >> ((bits - 1) & 7) & 1)) bits--;
    if (bytes_of(bits) != p->num_first[c]) return 0;
    for (int64_t j = 0; j < k; j++) low += (int64_t)(bits_at(p->second[c], j * g) & first_bits(g));
    return ((bits - k) << g) + low + k <= n;
}

// Find the planes of a class in a body that ends at `end`; return the number of ones of its mask, or −1.
static int64_t find_mask(const uint8_t **at, const uint8_t *end, int64_t n, int c, Planes *p) {
    int64_t num = p->num_first[c], g = p->gap[c];
    p->first[c] = *at;
    if (num > end - *at || g > MOST_GAP_PARAMETER || (g < 2 && num > bytes_of((n + g) >> g))) return -1;
    int64_t ones = count_ones(*at, 8 * num);
    p->second[c] = *at += num;
    if (!g) return ones;
    *at += bytes_of(ones * g);
    if (*at > end) return -1;
    if (g > 1) return check_places(p, c, ones, n) ? ones : -1;
    int64_t others = ones - count_ones(p->second[c], ones);
    p->third[c] = *at, *at += bytes_of(others);
    return *at > end ? -1 : ones + count_ones(p->third[c], others);
}

// Find the planes of a body, which is followed by `SLACK` bytes that may be read; return the number of changed cells,
// or −1 for a body that is not written so.
static int64_t find_planes(const uint8_t *body, int64_t length, int64_t n, int bits, Planes *p) {
    if (length < HEAD || length >= n * bits / 8) return -1;
    const uint8_t *at = body + HEAD, *end = body + length;
    int64_t k = 0, ones, all;
    p->top = body[0], p->e = body[1];
    if (p->e > bits - 2 || p->e > MOST_PARAMETER) return -1;
    for (int c = 0; c < CLASSES; c++) {
        const uint8_t *head = body + 2 + 3 * c;
        p->num_first[c] = head[0] | head[1] << 8, p->gap[c] = head[2];
        if ((ones = find_mask(&at, end, n, c, p)) < 0) return -1;
        k += ones;
    }
    if (k < 1 || k > n) return -1;
    all = k;
    p->signs = at, at += bytes_of(k);
    for (int b = 0; b < p->e; b++) p->exact[b] = at, at += bytes_of(k);
    for (int b = p->e; b < bits - 1; b++) {
        p->longer[b] = at, at += bytes_of(k);
        if (at > end) return -1;
        k = count_ones(p->longer[b], k);
        p->exact[b] = at, at += bytes_of(k);
    }
    return at == end ? all : -1;
}

// Write the mask that has gaps.
static void write_gaps(const uint8_t *first, int64_t num_first, const uint8_t *second, int g, uint8_t *mask) {
    int64_t bit = 0, last_one = -1, next = 0;
    for (int64_t at = 0; at < num_first; at += 8) {
        uint64_t word = bits_at(first, 8 * at) & first_bits(8 * (num_first - at));
        for (; word; word &= word - 1, bit += g) {
            int64_t one = 8 * at + __builtin_ctzll(word);
            next += (one - last_one - 1) << g | (int64_t)(bits_at(second, bit) & first_bits(g));
            mask[next >> 3] |= (uint8_t)(1 << (next & 7));
            next++;
            last_one = one;
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define LEVEL 1
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define NAME(FUNCTION) FUNCTION##_avx2
#include "native_cells.h"
#endif
#define LEVEL 0
#define TARGET
#define NAME(FUNCTION) FUNCTION##_plain
#include "native_cells.h"

int cells_are_plain = 0;  // 1 where tests ask for the portable functions
#if defined(__x86_64__) && defined(__GNUC__)
static int has_avx2(void) {
    if (cells_are_plain || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi2")) return 0;
    return !__builtin_cpu_is("znver1") && !__builtin_cpu_is("znver2");  // their pext takes a hundred cycles
}
#define BEST(FUNCTION, ...) has_avx2() ? FUNCTION##_avx2(__VA_ARGS__) : FUNCTION##_plain(__VA_ARGS__)
#else
#define BEST(FUNCTION, ...) FUNCTION##_plain(__VA_ARGS__)
#endif
#define CELLS(SIZE) \
    int64_t cells##SIZE##_encode( \
        const uint8_t *old, const uint8_t *new, int64_t n, int64_t chunk, uint32_t *lengths, uint8_t *body) { \
        return BEST(encode##SIZE, old, new, n, chunk, lengths, body); \
    } \
    int64_t cells##SIZE##_decode( \
        const uint8_t *body, const uint32_t *lengths, uint8_t *into, int64_t n, int64_t chunk, int only_check) { \
        return BEST(decode##SIZE, body, lengths, into, n, chunk, only_check); \
    }
CELLS(1)
CELLS(2)
CELLS(4)
CELLS(8)

#elif !defined(CELL)

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
// A bit of each of 64 bytes.
TARGET INLINE uint64_t NAME(plane)(const uint8_t byte[64], int bit) {
#if LEVEL > 0
    __m256i low = _mm256_loadu_si256((const void *)byte), high = _mm256_loadu_si256((const void *)(byte + 32));
    uint32_t low_bits = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(low, 7 - bit));
    return low_bits | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(high, 7 - bit)) << 32;
#else
    uint64_t bits = 0, eight;
    for (int i = 0; i < 8; i++) {
        memcpy(&eight, byte + 8 * i, 8);
        bits |= ((eight >> bit & 0x0101010101010101u) * 0x0102040810204080u) >> 56 << 8 * i;
    }
    return bits;
#endif
}
// Make 64 bytes of the planes of their bits, of which there are at most 8, `WORDS` words apart.
TARGET INLINE void NAME(join)(const uint64_t *planes, int num, uint8_t byte[64]) {
#if LEVEL > 0
    __m256i one = _mm256_set1_epi64x((int64_t)0x8040201008040201u), low = _mm256_setzero_si256(), high = low;
    __m256i low_at = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    __m256i high_at = _mm256_or_si256(low_at, _mm256_set1_epi8(4));
    for (int b = 0; b < num; b++) {
        __m256i word = _mm256_set1_epi64x((int64_t)planes[b * WORDS]), value = _mm256_set1_epi8((char)(1 << b));
        __m256i is_low = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, low_at), one), one);
        __m256i is_high = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, high_at), one), one);
        low = _mm256_or_si256(low, _mm256_and_si256(is_low, value));
        high = _mm256_or_si256(high, _mm256_and_si256(is_high, value));
    }
    _mm256_storeu_si256((void *)byte, low);
    _mm256_storeu_si256((void *)(byte + 32), high);
#else
    for (int i = 0; i < 8; i++) {
        uint64_t eight = 0;
        for (int b = 0; b < num; b++) {
            uint64_t each = (planes[b * WORDS] >> 8 * i & 0xFF) * 0x0101010101010101u & 0x8040201008040201u;
            eight |= ((each + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u) << b;
        }
        memcpy(byte + 8 * i, &eight, 8);
    }
#endif
}
// Append those bits of some words that their masks have.
TARGET static void NAME(pack)(
    Writer *writer, const uint64_t *words, const uint64_t *masks, const uint8_t *some, int64_t num) {
    Writer w = *writer;
    for (int64_t j = 0; j < num; j++) {
        uint64_t mask = masks[some[j]];
        put(&w, NAME(pext)(words[some[j]], mask), __builtin_popcountll(mask));
    }
    *writer = w;
}
// Read them from a bit on, and return the next one.
TARGET static int64_t NAME(unpack)(
    const uint8_t *plane, int64_t bit, const uint64_t *masks, const uint8_t *some, int64_t num, uint64_t *words) {
    for (int64_t j = 0; j < num; j++) {
        uint64_t mask = masks[some[j]];
        words[some[j]] = NAME(pdep)(bits_at(plane, bit), mask);
        bit += __builtin_popcountll(mask);
    }
    return bit;
}
// Find those of some words that are not zero.
INLINE int64_t NAME(find)(const uint64_t *words, const uint8_t *some, int64_t num, uint8_t *found) {
    int64_t num_found = 0;
    for (int64_t j = 0; j < num; j++) {
        found[num_found] = some[j];
        num_found += words[some[j]] != 0;
    }
    return num_found;
}

// Code the mask of a class in up to three planes; return the parameter.
TARGET static int NAME(code_mask)(const Writer *mask, Writer *first, Writer *second, Writer *third) {
    int64_t n = 8 * (mask->to - mask->start) + mask->num_held, k = 0, next = 0;
    for (int64_t i = 0; i < n; i += 64) k += __builtin_popcountll(bits_at(mask->start, i) & first_bits(n - i));
    if (!k) return 0;
    int g = bit_length((uint64_t)(n * 11 / (16 * k))) - 1;
    Writer one = *first, two = *second, three = *third;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t word = bits_at(mask->start, i) & first_bits(n - i);
        if (g < 1) {
            put(&one, word, n - i < 64 ? n - i : 64);
        } else if (g == 1) {
            uint64_t both = word & word >> 1 & PAIRS, some = (word | word >> 1) & PAIRS, low = some & word & ~both;
            put(&one, NAME(pext)(some, PAIRS), n - i < 64 ? (n - i + 1) / 2 : 32);
            put(&two, NAME(pext)(low, some), __builtin_popcountll(some));
            put(&three, NAME(pext)(both, some & ~low), __builtin_popcountll(some & ~low));
        } else {
            for (; word; word &= word - 1) {
                int64_t place = i + __builtin_ctzll(word), gap = place - next;
                put_unary(&one, (uint64_t)(gap >> g));
                put_some(&two, (uint64_t)gap & first_bits(g), g);
                next = place + 1;
            }
        }
    }
    *first = one, *second = two, *third = three;
    return g < 0 ? 0 : g;
}
// Write it, in zeroed memory.
TARGET static void NAME(write_mask)(const Planes *p, int c, uint8_t *mask) {
    if (!p->gap[c]) {
        memcpy(mask, p->first[c], (size_t)p->num_first[c]);
    } else if (p->gap[c] > 1) {
        write_gaps(p->first[c], p->num_first[c], p->second[c], p->gap[c], mask);
    } else {
        int64_t at_low = 0, at_both = 0, bits = 8 * p->num_first[c];
        for (int64_t i = 0; i < bits; i += 32, mask += 8) {
            uint64_t some = NAME(pdep)(bits_at(p->first[c], i) & first_bits(bits - i), PAIRS);
            uint64_t low = NAME(pdep)(bits_at(p->second[c], at_low), some), others = some & ~low;
            uint64_t both = NAME(pdep)(bits_at(p->third[c], at_both), others), word = low | both | others << 1;
            at_low += __builtin_popcountll(some), at_both += __builtin_popcountll(others);
            memcpy(mask, &word, 8);
        }
    }
}
// The cells of each class, from the bits of its number; the words of a class are together.
TARGET INLINE void NAME(split)(const uint8_t number[64], uint64_t valid, uint64_t *of_class) {
    uint64_t bit0 = NAME(plane)(number, 0), bit1 = NAME(plane)(number, 1);
    for (int c = 0; c < CLASSES; c++) of_class[c * WORDS] = valid & (c & 1 ? bit0 : ~bit0) & (c & 2 ? bit1 : ~bit1);
}

#define CELL uint8_t
#define OF(FUNCTION) NAME(FUNCTION##1)
#include "native_cells.h"
#define CELL uint16_t
#define OF(FUNCTION) NAME(FUNCTION##2)
#include "native_cells.h"
#define CELL uint32_t
#define OF(FUNCTION) NAME(FUNCTION##4)
#include "native_cells.h"
#define CELL uint64_t
#define OF(FUNCTION) NAME(FUNCTION##8)
#include "native_cells.h"
#undef LEVEL
#undef TARGET
#undef NAME

#else

#define BITS (8 * (int)sizeof(CELL))
#define TOP ((CELL)((CELL)1 << (BITS - 1)))

TARGET INLINE CELL OF(order)(CELL bits) { return (CELL)(bits ^ ((CELL)-(CELL)(bits >> (BITS - 1)) | TOP)); }
TARGET INLINE CELL OF(at)(CELL place) { return (CELL)(place ^ ((CELL)((CELL)(place >> (BITS - 1)) - 1) | TOP)); }

// The buckets of 64 cells: the highest bits of their magnitudes.
TARGET INLINE void OF(buckets)(const CELL *cells, uint8_t bucket[64]) {
    for (int i = 0; i < 64; i++) bucket[i] = (uint8_t)((CELL)(cells[i] & (CELL)~TOP) >> (BITS - 8));
}
TARGET INLINE void OF(classes)(const CELL *cells, uint8_t top, uint64_t valid, uint64_t *of_class) {
    uint8_t number[64];
    OF(buckets)(cells, number);
    for (int i = 0; i < 64; i++) {
        uint8_t below = top > number[i] ? (uint8_t)(top - number[i]) : 0;
        number[i] = below < CLASSES - 1 ? below : CLASSES - 1;
    }
    NAME(split)(number, valid, of_class);
}
// |s| − 1 of 64 cells, and bytes with a bit 0 where a cell changed, and a bit 1 where s < 0.
TARGET INLINE void OF(steps)(const CELL *old, const CELL *new, CELL least[64], uint8_t flag[64]) {
    CELL both[64];
    for (int i = 0; i < 64; i++) {
        CELL step = (CELL)(OF(order)(new[i]) - OF(order)(old[i])), is_down = (CELL)(step >> (BITS - 1));
        CELL is_changed = old[i] != new[i];
        least[i] = (CELL)(((step ^ (CELL)-is_down) - 1 + is_down) & (CELL)-is_changed);
        both[i] = (CELL)(is_changed | is_down << 1);
    }
    for (int i = 0; i < 64; i++) flag[i] = (uint8_t)both[i];
}
// 64 cells, which are copied where there are fewer.
TARGET INLINE const CELL *OF(all)(const CELL *cells, int64_t num, CELL copy[64]) {
    if (num >= 64) return cells;
    for (int64_t i = 0; i < 64; i++) copy[i] = i < num ? cells[i] : 0;
    return copy;
}

// Read both parameters from a sample.
TARGET static void OF(sample)(const CELL *old, const CELL *new, int64_t n, int *top, int *e) {
    uint32_t bucket_counts[128] = {0}, length_counts[64] = {0};
    CELL copy_a[64], copy_b[64], least[64];
    uint8_t flag[64], bucket[64];
    int64_t stride = 64 * (n / 64 / SAMPLE + 1), num_cells = 0, num_changed = 0;
    for (int64_t i = 0; i < n; i += stride)
        fetch(old, i, sizeof(CELL)), fetch(new, i, sizeof(CELL));
    for (int64_t i = 0; i < n; i += stride) {
        int64_t num = n - i < 64 ? n - i : 64;
        const CELL *a = OF(all)(old + i, num, copy_a), *b = OF(all)(new + i, num, copy_b);
        OF(buckets)(a, bucket);
        OF(steps)(a, b, least, flag);
        for (int64_t j = 0; j < num; j++) bucket_counts[bucket[j]]++;
        for (uint64_t bits = NAME(plane)(flag, 0); bits; bits &= bits - 1, num_changed++)
            length_counts[bit_length(least[__builtin_ctzll(bits)])]++;
        num_cells += num;
    }
    *top = 8 * num_changed < 5 * num_cells ? top_bucket(bucket_counts) : 0;
    *e = step_parameter(length_counts, BITS);
}

// Planes of a chunk that are written: of each class its mask and the three that code it, those of steps.
enum { OF(SIGNS) = 4 * CLASSES, OF(LONGER), OF(EXACT), OF(ALL) = OF(LONGER) + 2 * BITS };

// Split up to `WORDS` words of cells into planes.
TARGET static void OF(split)(const CELL *old, const CELL *new, int64_t n, int top, int e, Writer *w) {
    CELL copy_a[64], copy_b[64], least[WORDS][64], all = 0;
    uint8_t flag[64], byte[64], some[WORDS];
    uint64_t of_class[CLASSES][WORDS], changed[WORDS] = {0}, down[WORDS], y[BITS][WORDS];
    uint64_t above[BITS][WORDS];
    int64_t num_words = (n + 63) / 64, num;
    for (int64_t i = 0; i < num_words; i++) {
        int64_t here = n - 64 * i;
        const CELL *a = OF(all)(old + 64 * i, here, copy_a), *b = OF(all)(new + 64 * i, here, copy_b);
        fetch(old, 64 * (i + WORDS), sizeof(CELL)), fetch(new, 64 * (i + WORDS), sizeof(CELL));
        OF(classes)(a, (uint8_t)top, first_bits(here), &of_class[0][i]);
        OF(steps)(a, b, least[i], flag);
        changed[i] = NAME(plane)(flag, 0), down[i] = NAME(plane)(flag, 1);
        for (int j = 0; j < 64; j++) all |= least[i][j];
    }
    for (int c = 0; c < (top ? CLASSES : 1); c++) NAME(pack)(w + 4 * c, changed, of_class[c], EVERY, num_words);
    if (!(num = NAME(find)(changed, EVERY, num_words, some))) return;
    NAME(pack)(w + OF(SIGNS), down, changed, some, num);
    int length = bit_length((uint64_t)all + ((uint64_t)1 << e));
    for (int64_t i = 0; i < num_words; i++) {
        if (!changed[i]) continue;
#pragma GCC unroll 8
        for (int b = 0; b < BITS; b += 8) {
            if (b >= length) break;
            for (int j = 0; j < 64; j++) byte[j] = (uint8_t)((CELL)(least[i][j] + ((CELL)1 << e)) >> b);
            for (int bit = b; bit < b + 8 && bit < length; bit++) y[bit][i] = NAME(plane)(byte, bit - b);
        }
    }
    memset(above[length - 1], 0, sizeof above[0]);
    for (int b = length - 2; b >= e; b--)
        for (int i = 0; i < WORDS; i++) above[b][i] = above[b + 1][i] | (y[b + 1][i] & changed[i]);
    for (int b = 0; b < e; b++) NAME(pack)(w + OF(EXACT) + 2 * b, y[b], changed, some, num);
    const uint64_t *here = changed;
    for (int b = e; b < BITS - 1 && num; b++) {
        NAME(pack)(w + OF(LONGER) + 2 * b, above[b], here, some, num);
        here = above[b];
        num = NAME(find)(here, some, num, some);
        NAME(pack)(w + OF(EXACT) + 2 * b, y[b], here, some, num);
    }
}

// Write the body of a chunk, and up to 8 bytes beyond; return its length.
TARGET static int64_t OF(encode_chunk)(const CELL *old, const CELL *new, int64_t n, uint8_t *body, uint8_t *scratch) {
    if (!memcmp(old, new, (size_t)n * sizeof(CELL))) return 0;
    Writer w[OF(ALL)];
    int64_t lengths[OF(ALL)], length = HEAD;
    int top, e;
    OF(sample)(old, new, n, &top, &e);
    for (int p = 0; p < OF(ALL); p++) begin(w + p, scratch + p * (bytes_of(n) + SLACK));
    for (int64_t i = 0; i < n; i += 64 * WORDS)
        OF(split)(old + i, new + i, n - i < 64 * WORDS ? n - i : 64 * WORDS, top, e, w);
    uint8_t head[HEAD] = {(uint8_t)top, (uint8_t)e};
    for (int c = 0; c < CLASSES; c++) {
        put_last(w + 4 * c);
        head[4 + 3 * c] = (uint8_t)NAME(code_mask)(w + 4 * c, w + 4 * c + 1, w + 4 * c + 2, w + 4 * c + 3);
        int64_t num_first = put_last(w + 4 * c + 1);
        head[2 + 3 * c] = (uint8_t)num_first, head[3 + 3 * c] = (uint8_t)(num_first >> 8);
        begin(w + 4 * c, w[4 * c].start);
    }
    for (int p = 0; p < OF(ALL); p++) length += lengths[p] = put_last(w + p);
    if (length >= n * (int64_t)sizeof(CELL)) {
        memcpy(body, new, (size_t)n * sizeof(CELL));
        return n * (int64_t)sizeof(CELL);
    }
    memcpy(body, head, HEAD);
    body += HEAD;
    for (int p = 0; p < OF(ALL); body += lengths[p++]) memcpy(body, w[p].start, (size_t)lengths[p]);
    return length;
}

// Write the bodies of the chunks of n cells one after another, and their lengths; return the sum of these, or −1
// without memory. `body` has n · size + 16 bytes.
TARGET static int64_t OF(encode)(
    const uint8_t *old, const uint8_t *new, int64_t n, int64_t chunk, uint32_t *lengths, uint8_t *body) {
    int64_t most = n < chunk ? n : chunk, total = 0;
    uint8_t *scratch = malloc((size_t)(bytes_of(most) + SLACK) * OF(ALL));
    if (!scratch) return -1;
    for (int64_t i = 0; i < n; i += chunk) {
        int64_t num = n - i < chunk ? n - i : chunk;
        const CELL *a = (const CELL *)old + i, *b = (const CELL *)new + i;
        total += *lengths++ = (uint32_t)OF(encode_chunk)(a, b, num, body + total, scratch);
    }
    free(scratch);
    return total;
}

// Change 64 cells by the bits of y, and by signs.
TARGET INLINE void OF(add)(CELL *cells, const uint64_t *y, int length, const uint64_t *down, int e) {
    CELL step[64] = {0};
    uint8_t byte[64];
#pragma GCC unroll 8
    for (int b = 0; b < BITS; b += 8) {
        if (b >= length) break;
        NAME(join)(y + b * WORDS, length - b < 8 ? length - b : 8, byte);
        for (int j = 0; j < 64; j++) step[j] |= (CELL)((CELL)byte[j] << b);
    }
    NAME(join)(down, 1, byte);
    for (int j = 0; j < 64; j++) {
        CELL is_down = byte[j], size = (CELL)(step[j] - (CELL)(((CELL)1 << e) - 1));
        cells[j] = OF(at)((CELL)(OF(order)(cells[j]) + ((size ^ (CELL)-is_down) + is_down)));
    }
}

// The next bit of each plane.
typedef struct { int64_t masks[CLASSES], signs, exact[BITS], longer[BITS]; } OF(Next);

// Change up to `WORDS` words of cells.
TARGET static void OF(change)(const Planes *p, OF(Next) *next, CELL *into, int64_t n, const uint8_t *masks, int64_t room) {
    uint64_t of_class[CLASSES][WORDS], part[WORDS], changed[WORDS] = {0}, down[WORDS], longer[2][WORDS], y[BITS][WORDS];
    uint8_t some[WORDS], left[WORDS];
    int64_t num_words = (n + 63) / 64, num;
    CELL copy[64];
    for (int64_t i = 0; i < num_words; i++) {
        int64_t here = n - 64 * i;
        fetch(into, 64 * (i + WORDS), sizeof(CELL));
        OF(classes)(OF(all)(into + 64 * i, here, copy), (uint8_t)p->top, first_bits(here), &of_class[0][i]);
    }
    for (int c = 0; c < (p->top ? CLASSES : 1); c++) {
        next->masks[c] = NAME(unpack)(masks + c * room, next->masks[c], of_class[c], EVERY, num_words, part);
        for (int64_t i = 0; i < num_words; i++) changed[i] |= part[i];
    }
    if (!(num = NAME(find)(changed, EVERY, num_words, some))) return;
    next->signs = NAME(unpack)(p->signs, next->signs, changed, some, num, down);
    int length = 0;
    for (; length < p->e; length++) {
        next->exact[length] = NAME(unpack)(p->exact[length], next->exact[length], changed, some, num, y[length]);
        for (int64_t i = 0; i < num_words; i++) y[length][i] |= ~changed[i];
    }
    const uint64_t *here = changed;
    int64_t num_left = NAME(find)(changed, some, num, left);
    for (; num_left; length++) {
        uint64_t *beyond = longer[length & 1];
        memset(y[length], 0, sizeof y[length]), memset(beyond, 0, sizeof longer[0]);
        if (length < BITS - 1)
            next->longer[length] = NAME(unpack)(p->longer[length], next->longer[length], here, left, num_left, beyond);
        num_left = NAME(find)(beyond, left, num_left, left);
        if (num_left)
            next->exact[length] = NAME(unpack)(p->exact[length], next->exact[length], beyond, left, num_left, y[length]);
        for (int64_t i = 0; i < num_words; i++) y[length][i] |= here[i] & ~beyond[i];
        here = beyond;
    }
    for (int64_t j = 0; j < num; j++) {
        int64_t i = some[j], num_here = n - 64 * i < 64 ? n - 64 * i : 64;
        OF(add)(num_here < 64 ? copy : into + 64 * i, &y[0][i], length, down + i, p->e);
        if (num_here < 64) memcpy(into + 64 * i, copy, (size_t)num_here * sizeof(CELL));
    }
}

// Change the cells of a chunk, or only check its body; return the number of changed cells, or −1 for a bad body.
TARGET static int64_t OF(decode_chunk)(
    const uint8_t *body, int64_t length, CELL *into, int64_t n, int only_check, uint8_t *masks) {
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
    int64_t room = bytes_of(n) + SLACK, k = find_planes(body, length, n, BITS, &p);
    if (k < 0 || only_check) return k;
    memset(masks, 0, (size_t)(CLASSES * room));
    for (int c = 0; c < CLASSES; c++) NAME(write_mask)(&p, c, masks + c * room);
    OF(Next) next = {0};
    for (int64_t i = 0; i < n; i += 64 * WORDS)
        OF(change)(&p, &next, into + i, n - i < 64 * WORDS ? n - i : 64 * WORDS, masks, room);
    return next.signs;
}

// Change n cells, or only check the bodies of their chunks, which lie one after another; return the number of changed
// cells, −1 − the index of a bad chunk, or INT64_MIN without memory.
TARGET static int64_t OF(decode)(
    const uint8_t *body, const uint32_t *lengths, uint8_t *into, int64_t n, int64_t chunk, int only_check) {
    int64_t most = n < chunk ? n : chunk, total = 0, left = 0, num_masks = (bytes_of(most) + SLACK) * CLASSES;
    for (int64_t i = 0, c = 0; i < n; i += chunk, c++) left += lengths[c];
    uint8_t *masks = malloc((size_t)num_masks + (size_t)most * sizeof(CELL) + SLACK), *copy = masks + num_masks;
    if (!masks) return INT64_MIN;
    for (int64_t i = 0; total >= 0 && i < n; i += chunk) {
        int64_t num = n - i < chunk ? n - i : chunk, length = *lengths++, changed = -1;
        const uint8_t *here = body;
        if (left - length < SLACK && length <= num * (int64_t)sizeof(CELL)) here = memcpy(copy, body, (size_t)length);
        if (length <= num * (int64_t)sizeof(CELL))
            changed = OF(decode_chunk)(here, length, (CELL *)into + i, num, only_check, masks);
        total = changed < 0 ? -1 - i / chunk : total + changed;
        body += length, left -= length;
    }
    free(masks);
    return total;
}

#undef BITS
#undef TOP
#undef CELL
#undef OF
#endif
