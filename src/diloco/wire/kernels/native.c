// One pass over memory where plain torch takes several: the codecs with one scale per block, those without a scale,
// what sparse codecs keep, the outer step, the digest of Θ, and differences of published weights.
// Every operation is rounded on its own, as in the reference: compile with -ffp-contract=off.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

// Decoding gains an eighth from vectors of 512 bits, and encoding loses a fifth (Zen 4).
#if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target("prefer-vector-width=512")))
#else
#define WIDE
#endif

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
INLINE int32_t limit(int32_t x, int32_t least, int32_t most) { return x < least ? least : x > most ? most : x; }

// 2^(byte − 127)
INLINE float power_of_two(int32_t byte) { return float_of(byte ? (uint32_t)byte << 23 : 0x400000); }

// Elements between rounding and packing, whose codes lie in the cache.
#define RUN 256

// A format offers NAME_scale (from the bits of a block's largest magnitude), NAME_factor (of a block's values; infinite
// for a scale that is never written), NAME_codes, and NAME_values, which writes the values of codes under a factor, or
// adds them, and returns 1 if a code is never written. Loops that narrow or widen by half fill vector registers best.

typedef struct { float inverse, step; uint8_t byte; } Scale;

INLINE Scale e8m0(int32_t byte) {
    byte = limit(byte, 0, 254);
    return (Scale){.inverse = power_of_two(254 - byte), .byte = (uint8_t)byte};
}
// `exponent` is that of the format's largest value, which must stay finite.
INLINE float e8m0_factor(const uint8_t *scale, int exponent) {
    return *scale <= 254 - exponent ? power_of_two(*scale) : INFINITY;
}

INLINE Scale e3m0_scale(uint32_t top) {
    return e8m0(top < 0x800000 ? top >= 0x600000 : (int32_t)((top + 0x400000) >> 23));
}
INLINE float e3m0_factor(const uint8_t *scale) { return e8m0_factor(scale, 0); }
// Sign, exponent and the mantissa's highest bit decide the code: in 16 bits, twice as many fit a vector register.
INLINE uint16_t e3m0_head(float x, Scale s) { return (uint16_t)(bits_of(x * s.inverse) >> 22); }
INLINE uint16_t e3m0_code(uint16_t head) {
    uint16_t half_octaves = head & 0x1FF, above = half_octaves > 239 ? half_octaves - 239 : 0;
    uint16_t least = above < 1 ? above : 1, k = above >> 1;
    k = k > least ? k : least;
    k = k < 7 ? k : 7;
    return k | (k ? head >> 6 & 8 : 0);
}
#ifdef __AVX2__
// As below, 32 at once: what is above half of the smallest magnitude, in half octaves, is looked up in 16 bytes.
INLINE void e3m0_codes32(const float *x, float inverse, uint8_t *code) {
    const __m256i up = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
    const __m256i down =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 9, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15));
    __m256i head[4], above[2];
    for (int i = 0; i < 4; i++) {
        __m256 unit = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse));
        head[i] = _mm256_srai_epi32(_mm256_castps_si256(unit), 22);
    }
    for (int i = 0; i < 2; i++) {
        head[i] = _mm256_packs_epi32(head[2 * i], head[2 * i + 1]);
        above[i] = _mm256_subs_epu16(_mm256_and_si256(head[i], _mm256_set1_epi16(0x1FF)), _mm256_set1_epi16(239));
    }
    __m256i place = _mm256_min_epu8(_mm256_packus_epi16(above[0], above[1]), _mm256_set1_epi8(15));
    __m256i sign = _mm256_packs_epi16(head[0], head[1]);
    __m256i codes = _mm256_blendv_epi8(_mm256_shuffle_epi8(up, place), _mm256_shuffle_epi8(down, place), sign);
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((void *)code, codes);
}
// The upper 16 bits of a value, one byte of each from 16.
INLINE void e3m0_values32(const uint8_t *code, float factor, float *x, int add) {
    const __m256i upper = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 60, 61, 61, 62, 62, 63, 63, -128, -68, -67, -67, -66, -66, -65, -65));
    const __m256i lower =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -128, 0, -128, 0, -128, 0, -128, 0, -128, 0, -128, 0, -128, 0, -128));
    __m256i codes = _mm256_loadu_si256((const void *)code), zero = _mm256_setzero_si256();
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    __m256i high = _mm256_shuffle_epi8(upper, codes), low = _mm256_shuffle_epi8(lower, codes);
    for (int i = 0; i < 4; i++) {
        __m256i head = i < 2 ? _mm256_unpacklo_epi8(low, high) : _mm256_unpackhi_epi8(low, high);
        __m256i bits = i % 2 ? _mm256_unpackhi_epi16(zero, head) : _mm256_unpacklo_epi16(zero, head);
        __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(factor));
        _mm256_storeu_ps(x + 8 * i, add ? _mm256_add_ps(_mm256_loadu_ps(x + 8 * i), value) : value);
    }
}
#endif
INLINE void e3m0_codes(const float *x, int64_t n, Scale s, uint8_t *code) {
    uint16_t head[RUN];
    int64_t done = 0;
#ifdef __AVX2__
    for (; done + 32 <= n; done += 32) e3m0_codes32(x + done, s.inverse, code + done);
#endif
    for (int64_t i = done; i < n; i++) head[i] = e3m0_head(x[i], s);
    for (int64_t i = done; i < n; i++) head[i] = e3m0_code(head[i]);
    for (int64_t i = done; i < n; i++) code[i] = (uint8_t)head[i];
}
// Without a mantissa the upper 16 bits of a float are its value.
INLINE int e3m0_values(const uint8_t *code, int64_t n, float factor, float *x, int add) {
    uint16_t head[RUN];
    int64_t done = 0;
#if defined(__AVX2__) && !defined(__AVX512BW__)  // which vectorizes what follows, and better
    for (; done + 32 <= n; done += 32) e3m0_values32(code + done, factor, x + done, add);
#endif
    for (int64_t i = done; i < n; i++) {
        uint16_t c = code[i], k = c & 7;
        head[i] = (uint16_t)((c & 8) << 12 | (k ? (k + 120) << 7 : 0));
    }
    for (int64_t i = done; i < n; i++) {
        float value = float_of((uint32_t)head[i] << 16) * factor;
        x[i] = add ? x[i] + value : value;
    }
    return 0;
}

// NAME_values of a format with NAME_value and with NAME_bad, which is true for a code that is never written.
#define VALUES(NAME) \
    INLINE int NAME##_values(const uint8_t *code, int64_t n, float factor, float *x, int add) { \
        int bad = 0; \
        for (int64_t i = 0; i < n; i++) { \
            float value = NAME##_value(code[i]) * factor; \
            x[i] = add ? x[i] + value : value; \
            bad |= NAME##_bad(code[i]); \
        } \
        return bad; \
    }

// A float of `bits` bits, `m` of them mantissa, laid out as in IEEE 754; its largest exponent holds numbers too.
INLINE uint8_t float_code(float unit, int bits, int m, int bias, uint32_t most) {
    uint32_t b = bits_of(unit), magnitude = b & 0x7FFFFFFF, first_normal = (uint32_t)(128 - bias) << 23;
    uint32_t even = magnitude >> (23 - m) & 1;
    uint32_t normal = ((magnitude + (1u << (22 - m)) - 1 + even) >> (23 - m)) - ((uint32_t)(127 - bias) << m);
    float steps = float_of(magnitude < first_normal ? magnitude : 0) * power_of_two(126 + bias + m);
    uint32_t code = magnitude < first_normal ? (uint32_t)(int32_t)rintf(steps) : normal;
    return (b >> 31 << (bits - 1)) | (code < most ? code : most);
}
INLINE float float_value(uint8_t c, int bits, int m, int bias) {
    uint32_t magnitude = c & ((1u << (bits - 1)) - 1), sign = (uint32_t)c >> (bits - 1) << 31;
    float subnormal = (float)(int32_t)magnitude * power_of_two(128 - bias - m);
    uint32_t normal = (magnitude << (23 - m)) + ((uint32_t)(127 - bias) << 23);
    return float_of(sign | (magnitude >> m ? normal : bits_of(subnormal)));
}

// EXPONENT is the exponent of the largest value, MOST its code.
#define FLOAT(NAME, BITS, M, BIAS, EXPONENT, MOST) \
    INLINE Scale NAME##_scale(uint32_t top) { return e8m0((int32_t)(top >> 23) - EXPONENT); } \
    INLINE float NAME##_factor(const uint8_t *scale) { return e8m0_factor(scale, EXPONENT); } \
    INLINE void NAME##_codes(const float *x, int64_t n, Scale s, uint8_t *code) { \
        for (int64_t i = 0; i < n; i++) code[i] = float_code(x[i] * s.inverse, BITS, M, BIAS, MOST); \
    } \
    INLINE float NAME##_value(uint8_t c) { return float_value(c, BITS, M, BIAS); } \
    INLINE int NAME##_bad(uint8_t c) { return (c & ((1 << (BITS - 1)) - 1)) > MOST; } \
    VALUES(NAME)
FLOAT(e4m3, 8, 3, 7, 8, 0x7E)
FLOAT(e5m2, 8, 2, 15, 15, 0x7B)
FLOAT(e2m1, 4, 1, 1, 2, 7)

// MOST_STEP is the largest step under which the largest value is finite.
#define INTEGER(NAME, BITS, MOST_STEP) \
    INLINE Scale NAME##_scale(uint32_t top) { \
        float step = float_of(top) / (float)((1 << (BITS - 1)) - 1); \
        return (Scale){.step = step < MOST_STEP ? step : MOST_STEP}; \
    } \
    INLINE float NAME##_factor(const uint8_t *scale) { \
        float step; \
        memcpy(&step, scale, 4); \
        return step <= MOST_STEP ? step : INFINITY; \
    } \
    INLINE void NAME##_codes(const float *x, int64_t n, Scale s, uint8_t *code) { \
        int16_t whole[RUN]; \
        for (int64_t i = 0; i < n; i++) { \
            float most = (1 << (BITS - 1)) - 1, q = rintf(x[i] / (s.step > 0 ? s.step : 1)); \
            q = q < -most ? -most : q > most ? most : q; \
            whole[i] = (int16_t)(int32_t)q; \
        } \
        for (int64_t i = 0; i < n; i++) code[i] = (uint8_t)(whole[i] & ((1 << BITS) - 1)); \
    } \
    INLINE float NAME##_value(uint8_t c) { return (float)((int32_t)((uint32_t)c << (32 - BITS)) >> (32 - BITS)); } \
    INLINE int NAME##_bad(uint8_t c) { return c == 1 << (BITS - 1); } \
    VALUES(NAME)
INTEGER(int8, 8, 0x1.020406p+121f)
INTEGER(int4, 4, 0x1.249248p+125f)
INTEGER(int2, 2, 0x1.fffffep+127f)

// Elements to fetch ahead while a block is computed; the hardware alone would not keep up.
#define AHEAD 512
INLINE void prefetch(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch((const char *)((uintptr_t)x + 4 * (uintptr_t)i));
}

// The codes of a run, one a byte. A word holds one packed byte's codes.
typedef union { uint8_t code[RUN]; uint16_t pair[RUN / 2]; uint32_t four[RUN / 4]; } Codes;

INLINE void join(const Codes *from, int64_t n, int bits, uint8_t *packed) {
    int64_t num_bytes = (n * bits + 7) / 8;
    if (bits == 8) memcpy(packed, from->code, n);
    for (int64_t i = 0; bits == 4 && i < num_bytes; i++) packed[i] = from->pair[i] | from->pair[i] >> 4;
    for (int64_t i = 0; bits == 2 && i < num_bytes; i++) {
        uint32_t word = from->four[i] | from->four[i] >> 6;
        packed[i] = (word & 15) | word >> 12;
    }
}
INLINE void split(const uint8_t *packed, int64_t n, int bits, Codes *to) {
    int64_t num_bytes = (n * bits + 7) / 8;
    if (bits == 8) memcpy(to->code, packed, n);
    for (int64_t i = 0; bits == 4 && i < num_bytes; i++) to->pair[i] = (packed[i] | packed[i] << 4) & 0x0F0F;
    for (int64_t i = 0; bits == 2 && i < num_bytes; i++) {
        uint32_t word = (packed[i] | (uint32_t)packed[i] << 12) & 0x000F000F;
        to->four[i] = (word | word << 6) & 0x03030303;
    }
}

INLINE uint32_t largest(const float *x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
        top = magnitude > top ? magnitude : top;
    }
    return top;
}

// NAME_pack returns 1 if an element is not finite; NAME_unpack, if a scale or code is never written; otherwise 0.
#define CODEC(NAME, BITS, SCALE_BYTES) \
    const int NAME##_bits = BITS, NAME##_scale_bytes = SCALE_BYTES; \
    INLINE void NAME##_pack_run(const float *x, int64_t n, Scale s, uint8_t *packed) { \
        Codes codes; \
        NAME##_codes(x, n, s, codes.code); \
        for (int64_t i = n; i % (8 / BITS); i++) codes.code[i] = 0; \
        join(&codes, n, BITS, packed); \
    } \
    INLINE int NAME##_pack_block(const float *x, int64_t n, uint8_t *scale, uint8_t *packed) { \
        prefetch(x + AHEAD, n < RUN ? n : RUN); \
        uint32_t top = largest(x, n); \
        if (top >= 0x7F800000) return 1; \
        Scale s = NAME##_scale(top); \
        if (SCALE_BYTES == 1) *scale = s.byte; \
        else memcpy(scale, &s.step, 4); \
        int64_t i = 0; \
        for (; i + RUN <= n; i += RUN) NAME##_pack_run(x + i, RUN, s, packed + i * BITS / 8); \
        if (i < n) NAME##_pack_run(x + i, n - i, s, packed + i * BITS / 8); \
        return 0; \
    } \
    INLINE int NAME##_pack_all(const float *x, int64_t n, int64_t block, uint8_t *scales, uint8_t *packed) { \
        int bad = 0; \
        int64_t i = 0; \
        for (; i + block <= n; i += block, scales += SCALE_BYTES) \
            bad |= NAME##_pack_block(x + i, block, scales, packed + i * BITS / 8); \
        return i < n ? bad | NAME##_pack_block(x + i, n - i, scales, packed + i * BITS / 8) : bad; \
    } \
    int NAME##_pack(const float *x, int64_t n, int64_t block, uint8_t *scales, uint8_t *packed) { \
        return block == 256  ? NAME##_pack_all(x, n, 256, scales, packed) \
               : block == 32 ? NAME##_pack_all(x, n, 32, scales, packed) \
                             : NAME##_pack_all(x, n, block, scales, packed); \
    } \
    INLINE int NAME##_unpack_run(const uint8_t *packed, int64_t n, float factor, float *x, int add) { \
        Codes codes; \
        prefetch(x + AHEAD, n < RUN ? n : RUN); \
        split(packed, n, BITS, &codes); \
        return NAME##_values(codes.code, n, factor, x, add); \
    } \
    INLINE int NAME##_unpack_block(const uint8_t *scale, const uint8_t *packed, int64_t n, float *x, int add) { \
        float factor = NAME##_factor(scale); \
        int bad = !(factor >= 0 && factor < INFINITY); \
        int64_t i = 0; \
        for (; i + RUN <= n; i += RUN) bad |= NAME##_unpack_run(packed + i * BITS / 8, RUN, factor, x + i, add); \
        return i < n ? bad | NAME##_unpack_run(packed + i * BITS / 8, n - i, factor, x + i, add) : bad; \
    } \
    INLINE int NAME##_unpack_all( \
        const uint8_t *scales, const uint8_t *packed, int64_t n, int64_t block, float *x, int add) { \
        int bad = 0; \
        int64_t i = 0; \
        for (; i + block <= n; i += block, scales += SCALE_BYTES) \
            bad |= NAME##_unpack_block(scales, packed + i * BITS / 8, block, x + i, add); \
        return i < n ? bad | NAME##_unpack_block(scales, packed + i * BITS / 8, n - i, x + i, add) : bad; \
    } \
    WIDE int NAME##_unpack( \
        const uint8_t *scales, const uint8_t *packed, int64_t n, int64_t block, float *x, int add) { \
        return block == 256 && add ? NAME##_unpack_all(scales, packed, n, 256, x, 1) \
               : block == 32 && add ? NAME##_unpack_all(scales, packed, n, 32, x, 1) \
               : block == 256       ? NAME##_unpack_all(scales, packed, n, 256, x, 0) \
               : block == 32        ? NAME##_unpack_all(scales, packed, n, 32, x, 0) \
                                    : NAME##_unpack_all(scales, packed, n, block, x, add); \
    }
CODEC(e4m3, 8, 1)
CODEC(e5m2, 8, 1)
CODEC(e2m1, 4, 1)
CODEC(e3m0, 4, 1)
CODEC(int8, 8, 4)
CODEC(int4, 4, 4)
CODEC(int2, 2, 4)

// Flags of bytes that are 0 or 1, as bits; bit i is that of element i.
INLINE uint64_t bits_of_flags(const uint8_t flag[64]) {
#ifdef __AVX2__
    __m256i low = _mm256_loadu_si256((const void *)flag), high = _mm256_loadu_si256((const void *)(flag + 32));
    uint32_t low_bits = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(low, 7));
    return low_bits | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(high, 7)) << 32;
#else
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) {
        uint64_t eight;
        memcpy(&eight, flag + 8 * i, 8);
        bits |= (eight * 0x0102040810204080u) >> 56 << 8 * i;
    }
    return bits;
#endif
}
INLINE uint64_t first_bits(int64_t n) { return n < 64 ? ((uint64_t)1 << n) - 1 : ~(uint64_t)0; }

// Those of 64 positions that a diloco.wire.payload.Mask has.
typedef struct { uint32_t word[2], most; } Mask;
INLINE uint64_t mask_bits(uint32_t position, Mask mask) {
    uint8_t flag[64];
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t x = (position + i) ^ mask.word[0];
        x = (x ^ x >> 16) * 0x7FEB352Du ^ mask.word[1];
        x = (x ^ x >> 15) * 0x846CA68Bu;
        flag[i] = x <= mask.most;
    }
    return bits_of_flags(flag);
}
int64_t mask_count(int64_t first, int64_t n, uint32_t word0, uint32_t word1, uint32_t most) {
    Mask mask = {{word0, word1}, most};
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 64)
        count += __builtin_popcountll(mask_bits((uint32_t)(first + i), mask) & first_bits(n - i));
    return count;
}
// Write the values that a mask keeps of n elements, at most `room`; return 1 if an element is not finite.
int mask_pack(
    const float *x, int64_t first, int64_t n, uint32_t word0, uint32_t word1, uint32_t most, int64_t room, float *kept) {
    Mask mask = {{word0, word1}, most};
    uint32_t top = 0;
    int64_t k = 0;
    for (int64_t i = 0; i < n; i += 64) {
        int64_t num = n - i < 64 ? n - i : 64;
        uint32_t here = num == 64 ? largest(x + i, 64) : largest(x + i, num);
        top = here > top ? here : top;
        uint64_t bits = mask_bits((uint32_t)(first + i), mask) & first_bits(num);
        for (; bits && k < room; bits &= bits - 1) kept[k++] = x[i + __builtin_ctzll(bits)];
    }
    return top >= 0x7F800000;
}
// Write zeros and the kept values, or add these.
int mask_unpack(
    float *x, int64_t first, int64_t n, uint32_t word0, uint32_t word1, uint32_t most, int64_t room, const float *kept,
    int add) {
    Mask mask = {{word0, word1}, most};
    int64_t k = 0;
    for (int64_t i = 0; i < n; i += 64) {
        int64_t num = n - i < 64 ? n - i : 64;
        uint64_t bits = mask_bits((uint32_t)(first + i), mask) & first_bits(num);
        if (!add) memset(x + i, 0, 4 * (size_t)num);
        for (; bits && k < room; bits &= bits - 1) {
            float *to = x + i + __builtin_ctzll(bits);
            *to = add ? *to + kept[k] : kept[k];
            k++;
        }
    }
    return 0;
}

INLINE uint32_t magnitude_of(float x) { return bits_of(x) & 0x7FFFFFFF; }

INLINE uint64_t in_bin(const float *x, int64_t n, uint32_t bin) {
    uint8_t flag[64] = {0};
    for (int64_t i = 0; i < n; i++) flag[i] = magnitude_of(x[i]) >> 16 == bin;
    return bits_of_flags(flag);
}
// Count magnitudes by their upper 15 bits, or, of those whose upper bits are `bin`, by their lower 16.
int topk_histogram(const float *x, int64_t n, int32_t bin, int64_t *counts) {
    for (int64_t i = 0; bin < 0 && i < n; i++) counts[magnitude_of(x[i]) >> 16]++;
    for (int64_t i = 0; bin >= 0 && i < n; i += 64) {
        uint64_t bits = n - i < 64 ? in_bin(x + i, n - i, (uint32_t)bin) : in_bin(x + i, 64, (uint32_t)bin);
        for (; bits; bits &= bits - 1) counts[magnitude_of(x[i + __builtin_ctzll(bits)]) & 0xFFFF]++;
    }
    return 0;
}
// Count the magnitudes above a threshold, then those at it.
int topk_count(const float *x, int64_t n, uint32_t threshold, int64_t counts[2]) {
    int64_t above = 0, equal = 0;
    for (int64_t i = 0; i < n; i++) {
        above += magnitude_of(x[i]) > threshold;
        equal += magnitude_of(x[i]) == threshold;
    }
    counts[0] = above;
    counts[1] = equal;
    return 0;
}
INLINE uint64_t at_least(const float *x, int64_t n, uint32_t threshold) {
    uint8_t flag[64] = {0};
    for (int64_t i = 0; i < n; i++) flag[i] = magnitude_of(x[i]) >= threshold;
    return bits_of_flags(flag);
}
// Write values and places of the magnitudes above a threshold, and of the first `ties` at it.
int topk_select(
    const float *x, int64_t first, int64_t n, uint32_t threshold, int64_t ties, float *kept, int64_t *places) {
    int64_t k = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t bits = n - i < 64 ? at_least(x + i, n - i, threshold) : at_least(x + i, 64, threshold);
        for (; bits; bits &= bits - 1) {
            int64_t at = i + __builtin_ctzll(bits);
            if (magnitude_of(x[at]) == threshold && ties-- <= 0) continue;
            kept[k] = x[at];
            places[k++] = first + at;
        }
    }
    return 0;
}
// The k-th largest of n magnitudes: the largest number that k of them reach, bit by bit.
INLINE uint32_t kth_largest(const uint32_t *magnitude, int64_t n, int64_t k) {
    uint32_t threshold = 0;
    for (int bit = 30; bit >= 0; bit--) {
        uint32_t higher = threshold | 1u << bit;
        int32_t count = 0;
        for (int64_t i = 0; i < n; i++) count += magnitude[i] >= higher;
        threshold = count >= k ? higher : threshold;
    }
    return threshold;
}
// As topk_select, of a block of at most 8192 elements; return 1 if one is not finite. The k-th largest of the largest
// magnitudes of at least k groups spares the exact search what is smaller.
INLINE int block_select(const float *x, int64_t first, int64_t n, int64_t k, float *kept, int64_t *places) {
    enum { MOST = 8192 };
    uint32_t magnitude[MOST], least = 0;
    int64_t size = n / (2 * k), num = 0, above = 0;
    for (; size > 1 && num < n / size; num++) magnitude[num] = largest(x + num * size, size);
    if (num) least = kth_largest(magnitude, num, k);
    num = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t bits = n - i < 64 ? at_least(x + i, n - i, least) : at_least(x + i, 64, least);
        for (bits &= first_bits(n - i); bits; bits &= bits - 1) magnitude[num++] = magnitude_of(x[i + __builtin_ctzll(bits)]);
    }
    uint32_t threshold = kth_largest(magnitude, num, k);
    for (int64_t i = 0; i < num; i++) above += magnitude[i] > threshold;
    topk_select(x, first, n, threshold, k - above, kept, places);
    return largest(x, n) >= 0x7F800000;
}
// Write values and places of the k largest magnitudes of each block, and the same share, rounded up, of a shorter last.
int blocks_select(const float *x, int64_t first, int64_t n, int64_t block, int64_t k, float *kept, int64_t *places) {
    int bad = 0;
    for (int64_t i = 0; i < n; i += block, kept += k, places += k) {
        int64_t num = n - i < block ? n - i : block, num_kept = (num * k + block - 1) / block;
        bad |= block_select(x + i, first + i, num, num_kept, kept, places);
    }
    return bad;
}
// Write or read the places of a top-k payload: low bits of each, then the bit vector, in zeroed memory.
int places_pack(const int64_t *places, int64_t k, int num_low, uint8_t *low, uint8_t *high) {
    uint64_t held = 0;
    int num_held = 0;
    for (int64_t j = 0; j < k; j++) {
        int64_t bit = j + (places[j] >> num_low);
        high[bit >> 3] |= (uint8_t)(1 << (bit & 7));
        held |= ((uint64_t)places[j] & first_bits(num_low)) << num_held;
        for (num_held += num_low; num_held >= 8; num_held -= 8, held >>= 8) *low++ = (uint8_t)held;
    }
    if (num_held) *low = (uint8_t)held;
    return 0;
}
// Return 1 if there are not k ascending places below n.
int places_unpack(
    const uint8_t *low, const uint8_t *high, int64_t num_high, int64_t k, int num_low, int64_t n, int64_t *places) {
    uint64_t held = 0;
    int num_held = 0;
    int64_t j = 0, last = -1;
    for (int64_t start = 0; start < num_high; start += 64) {
        int64_t num_bits = num_high - start < 64 ? num_high - start : 64;
        uint64_t bits = 0;
        memcpy(&bits, high + start / 8, (size_t)(num_bits + 7) / 8);
        for (bits &= first_bits(num_bits); bits; bits &= bits - 1, j++) {
            if (j == k) return 1;
            for (; num_held < num_low; num_held += 8) held |= (uint64_t)*low++ << num_held;
            int64_t place = (start + __builtin_ctzll(bits) - j) << num_low | (int64_t)(held & first_bits(num_low));
            held >>= num_low;
            num_held -= num_low;
            if (place <= last || place >= n) return 1;
            places[j] = last = place;
        }
    }
    return j != k;
}
// Write or add values in ascending places.
int places_write(const int64_t *places, const float *kept, int64_t k, float *x, int add) {
    for (int64_t j = 0; j < k; j++) x[places[j]] = add ? x[places[j]] + kept[j] : kept[j];
    return 0;
}

// BF16 is the upper half of FP32, rounded to nearest, ties to even.
INLINE float of_bf16(uint16_t b) { return float_of((uint32_t)b << 16); }
INLINE uint16_t to_bf16(float x) {
    uint32_t b = bits_of(x), rounded = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
    return (uint16_t)((b & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}
INLINE float itself(float x) { return x; }

// x where BF16, or FP32, sees the change from outer to outer − x, and 0 elsewhere.
int gate(const float *restrict x, const float *restrict outer, int64_t n, int is_bf16, float *restrict to) {
    for (int64_t i = 0; is_bf16 && i < n; i++)
        to[i] = of_bf16(to_bf16(outer[i] - x[i])) != of_bf16(to_bf16(outer[i])) ? x[i] : 0;
    for (int64_t i = 0; !is_bf16 && i < n; i++) to[i] = outer[i] - x[i] != outer[i] ? x[i] : 0;
    return 0;
}

// The formats without a scale saturate; NAME_pack and NAME_unpack return 1 if an element is not finite.
INLINE uint16_t saturated_bf16(float x) {
    uint32_t b = bits_of(x), magnitude = b & 0x7FFFFFFF, rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16;
    return (uint16_t)((b >> 16 & 0x8000) | (rounded < 0x7F7F ? rounded : 0x7F7F));
}
INLINE uint16_t saturated_fp16(float x) {
    uint32_t b = bits_of(x), magnitude = b & 0x7FFFFFFF;
    uint32_t normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    // Beside 2^-1, whose last bit is 2^-24, a number is rounded as a subnormal is.
    uint32_t subnormal = bits_of(float_of(magnitude < 0x38800000 ? magnitude : 0) + 0.5f) - 0x3F000000;
    uint32_t code = magnitude < 0x38800000 ? subnormal : normal;
    return (uint16_t)((b >> 16 & 0x8000) | (code < 0x7BFF ? code : 0x7BFF));
}
INLINE float of_fp16(uint16_t c) {
    uint32_t magnitude = c & 0x7FFF, sign = (uint32_t)(c & 0x8000) << 16;
    uint32_t normal = (magnitude << 13) + 0x38000000;
    uint32_t special = magnitude >= 0x7C00 ? 0x7F800000 : normal;
    return float_of(sign | (magnitude < 0x400 ? bits_of((float)(int32_t)magnitude * 0x1p-24f) : special));
}
// Whole runs by the processor's own conversion, which ignores that subnormals may be taken for 0; the number of elements
// is returned.
INLINE int64_t fp16_pack_runs(const float *x, int64_t n, uint16_t *code, uint32_t *top) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + RUN <= n; i += RUN) {
        uint32_t here = largest(x + i, RUN);
        *top = here > *top ? here : *top;
        for (int64_t j = i; j < i + RUN; j += 8) {
            __m256 near = _mm256_min_ps(_mm256_loadu_ps(x + j), _mm256_set1_ps(65504));
            near = _mm256_max_ps(near, _mm256_set1_ps(-65504));
            _mm_storeu_si128((void *)(code + j), _mm256_cvtps_ph(near, _MM_FROUND_TO_NEAREST_INT));
        }
    }
#endif
    return i;
}
INLINE int64_t fp16_unpack_runs(
    const uint16_t *restrict code, int64_t n, float *restrict x, int add, uint32_t *restrict top) {
    int64_t i = 0;
    uint32_t most = 0;
#ifdef __F16C__
    for (; i + RUN <= n; i += RUN) {
        float value[RUN];
        for (int j = 0; j < RUN; j += 8)
            _mm256_storeu_ps(value + j, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(code + i + j))));
        for (int j = 0; j < RUN; j++) {
            uint32_t magnitude = bits_of(value[j]) & 0x7FFFFFFF;
            most = magnitude > most ? magnitude : most;
            x[i + j] = add ? x[i + j] + value[j] : value[j];
        }
    }
#endif
    *top = most;
    return i;
}
#define NONE(...) 0
#define CAST(NAME, TYPE, READ, WRITE, PACK_RUNS, UNPACK_RUNS) \
    int NAME##_pack(const float *restrict x, int64_t n, TYPE *restrict code) { \
        uint32_t top = 0; \
        for (int64_t i = PACK_RUNS(x, n, code, &top); i < n; i++) { \
            uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF; \
            top = magnitude > top ? magnitude : top; \
            code[i] = WRITE(x[i]); \
        } \
        return top >= 0x7F800000; \
    } \
    int NAME##_unpack(const TYPE *restrict code, int64_t n, float *restrict x, int add) { \
        uint32_t top = 0; \
        for (int64_t i = UNPACK_RUNS(code, n, x, add, &top); i < n; i++) { \
            float value = READ(code[i]); \
            uint32_t magnitude = bits_of(value) & 0x7FFFFFFF; \
            top = magnitude > top ? magnitude : top; \
            x[i] = add ? x[i] + value : value; \
        } \
        return top >= 0x7F800000; \
    }
CAST(fp32, float, itself, itself, NONE, NONE)
CAST(bf16, uint16_t, of_bf16, saturated_bf16, NONE, NONE)
CAST(fp16, uint16_t, of_fp16, saturated_fp16, fp16_pack_runs, fp16_unpack_runs)

// Δ = total/M; v ← μ v + Δ; Θ ← Θ − η (Δ + μ v); θ ← α θ + (1 − α) Θ, with θ of any type
#define OUTER_STEP(NAME, TYPE, READ, WRITE) \
    void NAME( \
        float *restrict outer, float *restrict velocity, const float *total, TYPE *restrict theta, int64_t n, \
        float divisor, float lr, float momentum, float mixing, float rest) { \
        for (int64_t i = 0; i < n; i++) { \
            float delta = total[i] / divisor; \
            float v = momentum * velocity[i] + delta; \
            float Theta = outer[i] - lr * (delta + momentum * v); \
            velocity[i] = v; \
            outer[i] = Theta; \
            theta[i] = WRITE(mixing * READ(theta[i]) + rest * Theta); \
        } \
    }
OUTER_STEP(outer_step, float, itself, itself)
OUTER_STEP(outer_step_bf16, uint16_t, of_bf16, to_bf16)

// The part of diloco.outer.digest's sum that n elements from block k on give.
WIDE uint64_t outer_digest(const float *x, int64_t n, uint64_t k) {
    enum { ROWS = 255, COLUMNS = 256, BLOCK = ROWS * COLUMNS };
    uint64_t total = 0;
    for (; n > 0; n -= BLOCK, x += BLOCK, k++) {
        uint32_t sum[COLUMNS] = {0};
        int64_t end = n < BLOCK ? n : BLOCK, i = 0;
        for (; i + 5 * COLUMNS <= end; i += 5 * COLUMNS) {
            prefetch(x + i + 4 * AHEAD, 5 * COLUMNS);
            for (int j = 0; j < COLUMNS; j++)
                for (int row = 0; row < 5; row++) sum[j] += bits_of(x[i + row * COLUMNS + j]);
        }
        for (; i < end; i++) sum[i % COLUMNS] += bits_of(x[i]);
        for (uint64_t j = 0; j < COLUMNS; j++) {
            uint64_t place = (k * COLUMNS + j + 1) * 0x9E3779B97F4A7C15u;
            uint64_t y = (place + (uint64_t)(int64_t)(int32_t)sum[j]) * 0xBF58476D1CE4E5B9u;
            total += (y ^ y >> 32) * 0x94D049BB133111EBu;
        }
    }
    return total;
}

#include "native_cells.h"
