/* Tiles that are summed in registers. Included by products.h once for each size of vectors that processors have, with VECTOR, a
 * vector of floats, and TILED(name), a function's name for it: LANES floats are one vector or several, as a compiler keeps
 * vectors that the processor does not have in memory. */
#define BITS TILED(Bits) /* a vector's bits */
#define WHOLE TILED(Whole) /* whole numbers */
typedef uint32_t BITS __attribute__((vector_size(sizeof(VECTOR)), aligned(4)));
typedef int32_t WHOLE __attribute__((vector_size(sizeof(VECTOR)), aligned(4)));
#define PARTS ((int)(LANES * sizeof(float) / sizeof(VECTOR)))
#define EACH(i, count) UNROLL for (int i = 0; i < (count); i++)
#define HALVES TILED(Halves) /* half as many bits for each number */
typedef uint16_t HALVES __attribute__((vector_size(sizeof(VECTOR) / 2), aligned(2)));

/* Finite numbers of 16 bits, of five for the exponent. */
INLINE VECTOR TILED(from_halves)(const HALVES *held) {
    VECTOR numbers;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) /* which compiles it for vectors that a target has alone */
    if (sizeof(VECTOR) > 16) { /* whose processors have an instruction for it */
        __asm__("vcvtph2ps %1, %0" : "=v"(numbers) : "m"(*held));
        return numbers;
    }
#endif
    /* Exponents count from 112 further up. The smallest numbers have none: as a sum with 2^-14 they do, and threads that take
     * such floats for 0, as torch can be told to, do not meet them. */
    BITS bits = __builtin_convertvector(*held, BITS), size = (bits & 0x7fff) << 13, small = (BITS)(size < 0x800000);
    numbers = (VECTOR)(size + 0x38800000) - 0x1p-14f;
    return (VECTOR)(((BITS)numbers & small) | ((size + 0x38000000) & ~small) | (bits & 0x8000) << 16);
}

/* `rows` x `wide` panels at once: x as Laying leaves it, result [rows, wide, LANES]; `kind` of weights; constants after
 * inlining. Of four panels side by side what comes SOON is prefetched, of fewer what `ahead` says: into the second level of
 * caches, as the first one has few places for lines that are on their way. */
INLINE void TILED(product_tile)(const Matrix *m, const float *x, int64_t panel, int rows, int wide, int kind,
                                const Ahead *ahead, float *result) {
    VECTOR sums[12][4][PARTS];
    const int64_t words = words_of(m), step = ahead->step, others = (wide - 1) * words * LANES;
    const float *weights = m->packed + panel * words * LANES;
    const float *soon = wide < 4 ? ahead->first : weights + SOON * LANES, *also = ahead->second;
    EACH(r, rows) EACH(p, wide) EACH(q, PARTS) sums[r][p][q] = (VECTOR){0};
    int64_t end = words - (wide < 4 ? ahead->lead : SOON);
    for (int64_t k = 0; k < words; end = words, soon += others, also += others)
        for (; k < end; k++) {
            if (wide == 1) {
                const float *behind = soon + step;
                FETCH_SECOND(soon);
                soon = also, also = behind;
            } else if (wide < 4) {
                FETCH_SECOND(soon);
                FETCH_SECOND(also);
                soon += step, also += step;
            } else {
                EACH(p, wide) FETCH_SECOND(soon + p * words * LANES);
                soon += LANES;
            }
            VECTOR w[4][PARTS], part[4][PARTS];
            const float *word = weights + k * LANES;
            if (kind != FLOAT16) EACH(p, wide) EACH(q, PARTS) w[p][q] = ((const VECTOR *)(word + p * words * LANES))[q];
            if (kind == DOTS) {
                EACH(r, rows) EACH(p, wide) EACH(q, PARTS) ADD_DOTS(sums[r][p][q], w[p][q], x[r]);
            } else if (kind == BYTES) { /* as unsigned ones, which are 128 more */
                EACH(p, wide) EACH(q, PARTS) w[p][q] = (VECTOR)((BITS)w[p][q] ^ 0x80808080);
                EACH(r, rows) EACH(p, wide) EACH(q, PARTS) ADD_BYTES(sums[r][p][q], w[p][q], x[r]);
            } else if (kind == BFLOAT16) { /* the upper halves of two floats, the first one's below */
                EACH(p, wide) EACH(q, PARTS) part[p][q] = (VECTOR)((BITS)w[p][q] << 16);
                EACH(r, rows) EACH(p, wide) EACH(q, PARTS) sums[r][p][q] += x[r] * part[p][q];
                EACH(p, wide) EACH(q, PARTS) part[p][q] = (VECTOR)((BITS)w[p][q] & 0xffff0000);
                EACH(r, rows) EACH(p, wide) EACH(q, PARTS) sums[r][p][q] += x[rows + r] * part[p][q];
            } else if (kind == FLOAT16) { /* all outputs' weights of one input, and behind them those of the next */
                EACH(i, 2) {
                    EACH(p, wide) EACH(q, PARTS)
                        part[p][q] = TILED(from_halves)((const HALVES *)(word + p * words * LANES + i * LANES / 2) + q);
                    EACH(r, rows) EACH(p, wide) EACH(q, PARTS) sums[r][p][q] += x[i * rows + r] * part[p][q];
                }
            } else if (kind == INT8) { /* the bytes of a word, the lowest first */
                EACH(i, 4) {
                    EACH(p, wide) EACH(q, PARTS)
                        part[p][q] = __builtin_convertvector((WHOLE)((BITS)w[p][q] << (24 - 8 * i)) >> 24, VECTOR);
                    EACH(r, rows) EACH(p, wide) EACH(q, PARTS) sums[r][p][q] += x[i * rows + r] * part[p][q];
                }
            } else {
                EACH(r, rows) EACH(p, wide) EACH(q, PARTS) sums[r][p][q] += x[r] * w[p][q];
            }
            x += kind == BFLOAT16 || kind == FLOAT16 ? 2 * rows : kind == INT8 ? 4 * rows : rows;
        }
    EACH(r, rows) EACH(p, wide) EACH(q, PARTS) ((VECTOR *)(result + (r * wide + p) * LANES))[q] = sums[r][p][q];
}

/* Panels [panel, panel + wide) of weights of 16 bits as floats, [wide, inputs, LANES]. */
INLINE void TILED(expand_panels)(const Matrix *m, int64_t panel, int64_t wide, int kind, float *numbers) {
    const float *word = m->packed + panel * words_of(m) * LANES;
    VECTOR *to = (VECTOR *)numbers;
    for (int64_t k = 0; k < wide * words_of(m); k++, word += LANES, to += 2 * PARTS) {
        EACH(q, PARTS) {
            BITS pair = ((const BITS *)word)[q];
            const HALVES *halves = (const HALVES *)word + q;
            to[q] = kind == BFLOAT16 ? (VECTOR)(pair << 16) : TILED(from_halves)(halves);
            to[PARTS + q] = kind == BFLOAT16 ? (VECTOR)(pair & 0xffff0000) : TILED(from_halves)(halves + PARTS);
        }
    }
}

/* sums [rows, LANES] += rows' numbers of one unit, [UNIT, rows], times its weights as floats, [UNIT, LANES]. */
INLINE void TILED(unit_tile)(const float *x, const float *numbers, int rows, float *sums) {
    VECTOR found[12][PARTS];
    EACH(r, rows) EACH(q, PARTS) found[r][q] = ((const VECTOR *)(sums + r * LANES))[q];
    for (int k = 0; k < UNIT; k++, x += rows, numbers += LANES) {
        VECTOR w[PARTS];
        EACH(q, PARTS) w[q] = ((const VECTOR *)numbers)[q];
        EACH(r, rows) EACH(q, PARTS) found[r][q] += x[r] * w[q];
    }
    EACH(r, rows) EACH(q, PARTS) ((VECTOR *)(sums + r * LANES))[q] = found[r][q];
}

/* scores[j] = query . keys[j] for `count` columns at once, of the first `parts` vectors of query rows; both are constants after
 * inlining. */
INLINE void TILED(score_tile)(const float *query, const float *keys, int64_t dim, int parts, int count, float *scores) {
    VECTOR sums[12][PARTS];
    EACH(j, count) EACH(q, parts) sums[j][q] = (VECTOR){0};
    for (int64_t d = 0; d < dim; d++) {
        VECTOR own[PARTS];
        EACH(q, parts) own[q] = ((const VECTOR *)(query + d * LANES))[q];
        EACH(j, count) EACH(q, parts) sums[j][q] += own[q] * keys[j * dim + d];
    }
    EACH(j, count) EACH(q, parts) ((VECTOR *)(scores + j * LANES))[q] = sums[j][q];
}

/* out[r] = the sum over columns of weights[c][r] * values[c], of `wide` times LANES dimensions of `rows` rows, both constants
 * after inlining; rows of the result are `dim` floats apart. */
INLINE void TILED(value_tile)(const float *weights, const float *values, int64_t columns, int64_t dim, int wide, int rows, float *out) {
    VECTOR sums[6][4 * PARTS];
    EACH(r, rows) EACH(q, wide * PARTS) sums[r][q] = (VECTOR){0};
    for (int64_t c = 0; c < columns; c++) {
        VECTOR own[4 * PARTS];
        EACH(q, wide * PARTS) own[q] = ((const VECTOR *)(values + c * dim))[q];
        EACH(r, rows) EACH(q, wide * PARTS) sums[r][q] += own[q] * weights[c * LANES + r];
    }
    EACH(r, rows) EACH(q, wide * PARTS) ((VECTOR *)(out + r * dim))[q] = sums[r][q];
}

#undef EACH
#undef BITS
#undef HALVES
#undef WHOLE
#undef PARTS
#undef TILED
#undef VECTOR
