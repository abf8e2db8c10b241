// How packed weights lie in memory, and how they become the pairs of bf16 numbers that products take.
//
// A panel of PANEL columns lies together: [panels][groups]{codes [pairs][PANEL][2], scales [PANEL]}. Pairs are of
// neighbouring inputs; a group's inputs share a scale (bf16) for each column. In
//   BF16  a code is the weight itself; one group, and no scales;
//   INT8  it is a whole number from -127 to 127, its sign in the highest bit; one group holds all inputs;
//   INT4  it is four bits, a whole number from -8 to 7, and 8 more is stored; INT4_GROUP inputs a group.
// Whole numbers of that size are bf16 numbers, so that products of codes are summed like those of weights, and each
// group's sum is multiplied by its scale.

#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#define LOOK_UP_CODES 1
#else
#define LOOK_UP_CODES 0
#endif

#include "vectors.h"

enum { BF16, INT8, INT4 };

enum { PANEL = 2 * LANES, INT4_GROUP = 32 };

INLINE int64_t pair_bytes(int format) { return format == BF16 ? 4 * PANEL : format == INT8 ? 2 * PANEL : PANEL; }

INLINE int64_t group_inputs(int64_t inputs, int format) { return format == INT4 ? INT4_GROUP : (inputs + 1) / 2 * 2; }

// Its codes' bytes; the scales follow.
INLINE int64_t codes_bytes(int64_t inputs, int format) { return group_inputs(inputs, format) / 2 * pair_bytes(format); }

INLINE int64_t group_bytes(int64_t inputs, int format) {
    return codes_bytes(inputs, format) + (format == BF16 ? 0 : 2 * PANEL);
}

INLINE int64_t panel_bytes(int64_t inputs, int format) {
    int64_t group = group_inputs(inputs, format);
    return (inputs + group - 1) / group * group_bytes(inputs, format);
}

// Which byte of a pair's codes is of this column and input (0 or 1) in INT8.
INLINE int64_t int8_place(int64_t column, int64_t input) {
    if (!LOOK_UP_CODES) return column * 2 + input;
    // As interleaving the bytes of two vectors within their quarters wants it.
    return column % LANES / 4 * 16 + column / LANES * 8 + column % 4 * 2 + input;
}

// In INT4 two columns share a byte: the lower half is of the first LANES columns.
INLINE int64_t int4_place(int64_t column, int64_t input) { return column % LANES * 2 + input; }

#if LOOK_UP_CODES
#define EXPONENT(m) ((m) >= 64 ? 6 : (m) >= 32 ? 5 : (m) >= 16 ? 4 : (m) >= 8 ? 3 : (m) >= 4 ? 2 : (m) >= 2)
#define LOW_BYTE(m) ((m) ? ((127 + EXPONENT(m)) << 7 | ((m) << (7 - EXPONENT(m)) & 127)) & 255 : 0)
#define HIGH_BYTE(m) ((m) ? (127 + EXPONENT(m)) >> 1 : 0)
#define EIGHT(byte, m)                                                                                                 \
    byte(m), byte(m + 1), byte(m + 2), byte(m + 3), byte(m + 4), byte(m + 5), byte(m + 6), byte(m + 7)
#define SIXTY_FOUR(byte, m)                                                                                            \
    EIGHT(byte, m), EIGHT(byte, m + 8), EIGHT(byte, m + 16), EIGHT(byte, m + 24), EIGHT(byte, m + 32),                 \
        EIGHT(byte, m + 40), EIGHT(byte, m + 48), EIGHT(byte, m + 56)

// The two bytes of 0 to 127 in bf16, and -8 to 7 in bf16, twice.
_Alignas(64) static const uint8_t int8_low[128] = {SIXTY_FOUR(LOW_BYTE, 0), SIXTY_FOUR(LOW_BYTE, 64)};
_Alignas(64) static const uint8_t int8_high[128] = {SIXTY_FOUR(HIGH_BYTE, 0), SIXTY_FOUR(HIGH_BYTE, 64)};
#define MINUS_8_TO_7                                                                                                   \
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, \
        0x40e0
_Alignas(64) static const uint16_t int4_values[32] = {MINUS_8_TO_7, MINUS_8_TO_7};

INLINE void int8_columns(const char *codes, vuint columns[2]) {
    __m512i code = _mm512_loadu_si512(codes);
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(int8_low), code, _mm512_load_si512(int8_low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(int8_high), code, _mm512_load_si512(int8_high + 64));
    high = _mm512_or_si512(high, _mm512_and_si512(code, _mm512_set1_epi8((char)0x80)));
    columns[0] = (vuint)_mm512_unpacklo_epi8(low, high);
    columns[1] = (vuint)_mm512_unpackhi_epi8(low, high);
}

INLINE void int4_columns(const char *codes, vuint columns[2]) {
    __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    __m512i values = _mm512_load_si512(int4_values);
    // Five bits choose a value: the fifth, whatever it is, between two equal ones.
    columns[0] = (vuint)_mm512_permutexvar_epi16(code, values);
    columns[1] = (vuint)_mm512_permutexvar_epi16(_mm512_srli_epi16(code, 4), values);
}
#else
INLINE vuint bits_of(vuint number) { return (vuint)__builtin_convertvector((vint)number, vfloat); }

INLINE vuint two_bytes(const char *codes, int64_t v) {
    vhalf both;
    memcpy(&both, codes + v * sizeof both, sizeof both);
    return __builtin_convertvector(both, vuint);
}

INLINE void int8_columns(const char *codes, vuint columns[2]) {
    for (int v = 0; v < 2; v++) {
        vuint both = two_bytes(codes, v);
        columns[v] = bits_of(both & 127) >> 16 | (both & 128) << 8 | bits_of(both >> 8 & 127) | (both & 0x8000) << 16;
    }
}

INLINE void int4_columns(const char *codes, vuint columns[2]) {
    vuint both = two_bytes(codes, 0);
    for (int v = 0; v < 2; v++)
        columns[v] = bits_of((both >> 4 * v & 15) - 8) >> 16 | bits_of((both >> (8 + 4 * v) & 15) - 8);
}
#endif

// The two vectors of a panel's pair whose codes are here.
INLINE void load_columns(const char *codes, vuint columns[2], int format) {
    if (format == BF16) {
        memcpy(&columns[0], codes, sizeof *columns);
        memcpy(&columns[1], codes + sizeof *columns, sizeof *columns);
    }
    if (format == INT8) int8_columns(codes, columns);
    if (format == INT4) int4_columns(codes, columns);
}
