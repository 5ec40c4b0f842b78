/* Products with weights in blocks by an instruction that multiplies bytes in fours. Included by kernels_avx512.c only.
 *
 * Each number of a row is taken as a multiple of a unit, which is the largest of 32 numbers divided by 8,355,711, and that as
 * three signed bytes. So a number is off by 2^-24 of the largest of its block at most, and sums within a block are whole
 * numbers, and exact. */
#if HAS_DOTS
#include <immintrin.h>

enum { PARTS_OF_ROW = 3 };

#define DOTS_TARGET __attribute__((target("avx512vnni,avx512bw," AVX512)))

/* What a row has for each block beside its bytes. */
typedef struct {
    float unit, sum;                       /* of the row's numbers */
    int32_t whole[PARTS_OF_ROW];           /* sums of the bytes of each part */
    int32_t first[PARTS_OF_ROW];           /* the same of the first half of the block */
} RowBlock;
enum { WORDS_OF_ROW = UNIT / 4 * PARTS_OF_ROW, RECORD = WORDS_OF_ROW + sizeof(RowBlock) / 4 }; /* words of four bytes */

/* Sixteen numbers of a block as whole multiples of its unit: their signed bytes into `bytes` [parts, UNIT]. */
DOTS_TARGET static inline void lay_half(const float *x, float inverse, int half, int8_t bytes[PARTS_OF_ROW][UNIT]) {
    __m512 value = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse)), limit = _mm512_set1_ps(UNITS(PARTS_OF_ROW));
    value = _mm512_max_ps(_mm512_min_ps(value, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    __m512i rest = _mm512_cvtps_epi32(value); /* to the nearest */
    for (int k = 0; k < PARTS_OF_ROW; k++) {
        __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
        _mm_storeu_si128((__m128i *)(bytes[k] + half * UNIT / 2), _mm512_cvtepi32_epi8(low));
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 8);
    }
}

/* Tiles [first, last) of at most BLOCK_ROWS rows: for each block the bytes, [height, PARTS_OF_ROW, UNIT], and behind them RowBlock
 * [height]. */
DOTS_TARGET static void in_blocks_dots(const void *task, int64_t first, int64_t last) {
    const Laying *l = task;
    int64_t tiles = tiles_of(l->rows, BLOCK_ROWS), blocks = l->inputs / UNIT, row = 0;
    for (int64_t t = 0; t < first; t++) row += height_of(l->rows, tiles, t);
    for (int64_t t = first; t < last; t++) {
        int64_t height = height_of(l->rows, tiles, t);
        int32_t *tile = (int32_t *)l->laid + row * blocks * RECORD;
        for (int64_t r = 0; r < height; r++, row++)
            for (int64_t b = 0; b < blocks; b++) {
                const float *x = l->x + row * l->inputs + b * UNIT;
                int32_t *record = tile + b * height * RECORD;
                RowBlock *own = (RowBlock *)(record + height * WORDS_OF_ROW) + r;
                __m512 upper = _mm512_loadu_ps(x), lower = _mm512_loadu_ps(x + UNIT / 2);
                /* By bits, so that infinities and what is no number are the largest. */
                __m512i sizes = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(upper)), _mm512_castps_si512(_mm512_abs_ps(lower)));
                int32_t largest = _mm512_reduce_max_epi32(sizes);
                float most;
                memcpy(&most, &largest, sizeof most);
                int finite = largest < 0x7f800000;
                if (finite && most < LEAST) most = LEAST;
                own->unit = finite ? most / UNITS(PARTS_OF_ROW) : most - most;
                int8_t(*bytes)[UNIT] = (int8_t(*)[UNIT])record + r * PARTS_OF_ROW;
                float inverse = finite ? UNITS(PARTS_OF_ROW) / most : 0;
                lay_half(x, inverse, 0, bytes);
                lay_half(x + UNIT / 2, inverse, 1, bytes);
                for (int k = 0; k < PARTS_OF_ROW; k++) {
                    uint64_t eights[4]; /* sums of the bytes, each 128 more than it is */
                    __m256i raised = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)bytes[k]), _mm256_set1_epi8((char)0x80));
                    _mm256_storeu_si256((__m256i *)eights, _mm256_sad_epu8(raised, _mm256_setzero_si256()));
                    own->first[k] = (int32_t)(eights[0] + eights[1]) - 128 * UNIT / 2;
                    own->whole[k] = own->first[k] + (int32_t)(eights[2] + eights[3]) - 128 * UNIT / 2;
                }
                own->sum = own->unit * (float)(own->whole[0] + 256 * own->whole[1] + 65536 * own->whole[2]);
            }
    }
}

#define INLINE_DOTS DOTS_TARGET static inline __attribute__((always_inline))

INLINE_DOTS __m512 halves_at(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
INLINE_DOTS __m512 bytes_at(const uint8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at))); }
INLINE_DOTS __m512 signed_at(const uint8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at))); }

/* Scales of a unit's outputs in one of its halves, and their minima where the kind has them. */
INLINE_DOTS __m512 scales_of(int kind, const uint8_t *unit, const uint8_t *head, int half) {
    if (kind == Q6_K) return _mm512_mul_ps(halves_at(head), signed_at(unit + half * LANES));
    return IN_SUPERS(kind) ? _mm512_mul_ps(halves_at(head), bytes_at(unit)) : halves_at(unit);
}
INLINE_DOTS __m512 minima_of(int kind, const uint8_t *unit, const uint8_t *head) {
    if (!IN_SUPERS(kind)) return halves_at(unit + 2 * LANES);
    return _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(halves_at(head + 2 * LANES), bytes_at(unit + LANES)));
}

#define BLOCK_AHEAD 2048 /* bytes of a panel that are prefetched; into the second level alone five rows take 1.45 times as long */
#define EACH(i, count) UNROLL for (int i = 0; i < (count); i++)

/* Numbers of word `j` of a unit: what FOURS says, for all outputs of a panel. */
INLINE_DOTS void fours_of(int kind, const uint8_t *words, int j, __m512i *low, __m512i *high) {
    __m512i fifteen = _mm512_set1_epi32(0x0f0f0f0f), flip = _mm512_set1_epi32((int)0x80808080);
#define WORD(n) _mm512_loadu_si512(words + (n) * LANES * 4)
    if (kind == Q8_0) {
        *low = _mm512_xor_si512(WORD(2 * j), flip), *high = _mm512_xor_si512(WORD(2 * j + 1), flip);
        return;
    }
    __m512i word = WORD(j);
    *low = _mm512_and_si512(word, fifteen), *high = _mm512_and_si512(_mm512_srli_epi32(word, 4), fifteen);
    if (BITS_OF(kind) == 5) {
        __m512i fifth = WORD(4), sixteen = _mm512_set1_epi32(0x10101010);
        *low = _mm512_or_si512(*low, _mm512_and_si512(j < 2 ? _mm512_slli_epi32(fifth, 4 - 2 * j) : _mm512_srli_epi32(fifth, 2 * j - 4), sixteen));
        *high = _mm512_or_si512(*high, _mm512_and_si512(j < 2 ? _mm512_slli_epi32(fifth, 3 - 2 * j) : _mm512_srli_epi32(fifth, 2 * j - 3), sixteen));
    }
    if (BITS_OF(kind) == 6) {
        __m512i upper = WORD(4 + j / 2), both = _mm512_set1_epi32(0x30303030);
        *low = _mm512_or_si512(*low, _mm512_and_si512(j % 2 ? upper : _mm512_slli_epi32(upper, 4), both));
        *high = _mm512_or_si512(*high, _mm512_and_si512(j % 2 ? _mm512_srli_epi32(upper, 2) : _mm512_slli_epi32(upper, 2), both));
    }
#undef WORD
}

/* `rows` times a panel: x as in_blocks_dots leaves it, result [rows, LANES]; `rows` and `kind` are constants. */
INLINE_DOTS void dots_tile(const Matrix *m, const float *x, int64_t panel, int rows, int kind, float *result) {
    const int64_t units = m->inputs / UNIT, bytes = panel_bytes(kind, m->inputs);
    const uint8_t *own = (const uint8_t *)m->packed + panel * bytes;
    __m512 sums[BLOCK_ROWS];
    EACH(r, rows) sums[r] = _mm512_setzero_ps();
    for (int64_t u = 0; u < units; u++) {
        const int32_t *record = (const int32_t *)x + u * rows * RECORD;
        const RowBlock *of_rows = (const RowBlock *)(record + rows * WORDS_OF_ROW);
        const uint8_t *head = 0, *unit = unit_at(kind, own, u, &head), *words = unit + SCALE_BYTES(kind);
        EACH(half, kind == Q6_K ? 2 : 1) {
            __m512i parts[BLOCK_ROWS][PARTS_OF_ROW];
            EACH(r, rows) EACH(k, PARTS_OF_ROW) { /* numbers are unsigned, so what they are too large by comes first */
                int32_t sum = half ? of_rows[r].whole[k] - of_rows[r].first[k] : kind == Q6_K ? of_rows[r].first[k] : of_rows[r].whole[k];
                parts[r][k] = OFFSET(kind) ? _mm512_set1_epi32(-OFFSET(kind) * sum) : _mm512_setzero_si512();
            }
            EACH(i, kind == Q6_K ? 2 : 4) {
                int j = kind == Q6_K ? 2 * half + i : i;
                __m512i low, high;
                FETCH(words + j * LANES * 4 + BLOCK_AHEAD);
                if (BITS_OF(kind) == 8) FETCH(words + (4 + j) * LANES * 4 + BLOCK_AHEAD);
                fours_of(kind, words, j, &low, &high);
                EACH(r, rows) EACH(k, PARTS_OF_ROW) {
                    const int32_t *four = record + (r * PARTS_OF_ROW + k) * (UNIT / 4) + 2 * j;
                    ADD_BYTES(parts[r][k], low, four[0]); /* the intrinsic would load these apart */
                    ADD_BYTES(parts[r][k], high, four[1]);
                }
            }
            __m512 scales = scales_of(kind, unit, head, half), minima = scales;
            if (HAS_MINIMUM(kind)) minima = minima_of(kind, unit, head);
            EACH(r, rows) {
                __m512i lower = _mm512_add_epi32(parts[r][0], _mm512_slli_epi32(parts[r][1], 8));
                __m512 upper = _mm512_cvtepi32_ps(parts[r][2]), of_row = _mm512_set1_ps(of_rows[r].unit);
                __m512 number = _mm512_fmadd_ps(upper, _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(lower));
                sums[r] = _mm512_fmadd_ps(_mm512_mul_ps(scales, of_row), number, sums[r]);
                if (HAS_MINIMUM(kind)) sums[r] = _mm512_fmadd_ps(minima, _mm512_set1_ps(of_rows[r].sum), sums[r]);
            }
        }
    }
    EACH(r, rows) _mm512_storeu_ps(result + r * LANES, sums[r]);
}
#undef EACH

typedef void (*DotsTile)(const Matrix *m, const float *x, int64_t panel, float *result);
#define DOTS_TILE(kind, n)                                                                                         \
    DOTS_TARGET NOINLINE static void dots_##kind##_##n(const Matrix *m, const float *x, int64_t panel, float *result) { \
        dots_tile(m, x, panel, n, kind, result);                                                                   \
    }
#define DOTS_TILES(kind)                                                                                           \
    DOTS_TILE(kind, 1) DOTS_TILE(kind, 2) DOTS_TILE(kind, 3) DOTS_TILE(kind, 4) DOTS_TILE(kind, 5) DOTS_TILE(kind, 6) \
    static const DotsTile dots_##kind[] = {0, dots_##kind##_1, dots_##kind##_2, dots_##kind##_3, dots_##kind##_4,  \
                                           dots_##kind##_5, dots_##kind##_6};
EACH_KIND(DOTS_TILES)

/* Panels [first, last) of a product of rows as in_blocks_dots leaves them. Several panels at a time gained nothing. */
static void blocks_dots(const void *task, int64_t first, int64_t last) {
    const Product *t = task;
    const Matrix *m = t->m;
    const DotsTile *of_rows = 0;
    switch (m->kind) {
#define CHOOSE(known) case known: of_rows = dots_##known; break;
        EACH_KIND(CHOOSE)
#undef CHOOSE
    }
    int64_t tiles = tiles_of(t->rows, BLOCK_ROWS);
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t i = 0, before = 0; i < tiles; i++) {
            int64_t height = height_of(t->rows, tiles, i);
            float result[BLOCK_ROWS * LANES];
            of_rows[height](m, t->x + before * (m->inputs / UNIT) * RECORD, panel, result);
            put_tile(m, result, panel, height, 1, t->add, t->out + before * m->stride);
            before += height;
        }
}
#endif
