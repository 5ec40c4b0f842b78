/* Attention of a few rows over a long context. Included by rows.h only.
 *
 * Lanes are query rows: the query heads of a group times the rows of a request. So keys and values are read where they lie,
 * each row of the tree is masked by a multiplication, and requests of a batch need no common length. Scores, their sum and
 * the values are summed column by column; columns that a row does not see add exact zeros, so its result is the same as in
 * a pass of its own. */
#include <math.h>

/* The attention of one request and one key head. */
typedef struct {
    int64_t rows, groups, dim, prefix, start; /* start: columns before the rows' own; the first `prefix` are the deep prefix */
    int64_t back;                             /* columns of the context that `visible` covers as well */
    const float *query;                       /* [groups, rows, dim] of this request and key head */
    const float *keys, *values;               /* [columns, dim] of this request and key head */
    const uint8_t *visible;                   /* [rows, back + rows], `by_row` from row to row */
    int64_t by_row;
    const uint8_t *prefix_rows;               /* [rows], which see the deep prefix, or NULL for none */
    const int64_t *positions;                 /* [rows]; a column of the context has its own number as position, less the prefix */
    int64_t window;                           /* positions that a row sees back, its own included; 0 for all */
    float scaling, cap;                       /* cap: scores are bent to stay within -cap .. cap; 0 where they are not */
    int rounding;                             /* whether the result is rounded to bfloat16 */
    const float *gates;                       /* where `out` has its elements, logistic gates of these; NULL for none */
    float *out;                               /* element (row, group, d) at out[row * stride + group * dim + d] */
    int64_t stride;
} Attention;

/* e^x to a unit in the last place or two: 2^k times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    int32_t k = (int32_t)(x * 1.44269504f + 126.5f) - 126; /* a positive number cut is one rounded down */
    float f = x - (float)k * 0.693359375f + (float)k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    union {
        int32_t bits;
        float value;
    } power = {(k + 127) << 23};
    return (p * f * f + f + 1.0f) * power.value;
}

/* A score that is bent, rounded where Hugging Face's attention rounds that bends scores. */
INLINE float bent(float score, const Attention *a) {
    score = rounded(rounded(rounded(score, a->rounding) * a->scaling, a->rounding) / a->cap, a->rounding);
    score = rounded(1.0f - 2.0f / (exponential(2.0f * score) + 1.0f), a->rounding); /* tanh */
    return rounded(score * a->cap, a->rounding);
}

/* Scores of columns [c, columns), of at least `live` query rows; `vector` and `parts` are constants. */
#define SCORES(count) WITH(vector, score_tile, query, a->keys + c * a->dim, a->dim, parts, count, scores + c * LANES)
INLINE void score_columns(const Attention *a, const float *query, int64_t c, int64_t columns, int vector, int parts, float *scores) {
    if (vector == LANES || parts == 1)
        for (; c + 12 <= columns; c += 12) SCORES(12);
    for (; c + 4 <= columns; c += 4) SCORES(4);
    for (; c < columns; c++) SCORES(1);
}

/* Rows [r, r + rows) of `mixed` [LANES, dim]: columns' values, weighted. `vector` and `rows` are constants. */
INLINE void mix_rows(const Attention *a, const float *weights, int64_t from, int64_t columns, int vector, int rows, float *mixed) {
    const float *values = a->values + from * a->dim;
    int64_t d = 0;
    if (vector == LANES)
        for (; d + 4 * LANES <= a->dim; d += 4 * LANES)
            WITH(vector, value_tile, weights, values + d, columns - from, a->dim, 4, rows, mixed + d);
    for (; d + LANES <= a->dim; d += LANES) WITH(vector, value_tile, weights, values + d, columns - from, a->dim, 1, rows, mixed + d);
    for (; d < a->dim; d++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (int64_t c = 0; c < columns - from; c++) sum += values[c * a->dim + d] * weights[c * LANES + r];
            mixed[r * a->dim + d] = sum;
        }
}

/* Query rows [first, first + LANES) of the group's groups * rows. scratch: (2 * dim + columns) * LANES floats, columns =
 * start + rows. `vector`: floats of the processor's vectors, a constant. */
INLINE void attend_lanes(const Attention *a, int64_t first, int vector, float *scratch) {
    int64_t dim = a->dim, total = a->groups * a->rows, live = total - first < LANES ? total - first : LANES;
    int64_t own = 0; /* columns of the pass up to the last that any row sees */
    for (int64_t l = 0; l < live; l++) {
        const uint8_t *visible = a->visible + (first + l) % a->rows * a->by_row + a->back;
        for (int64_t j = a->rows; j > own; j--)
            if (visible[j - 1]) own = j;
    }
    int64_t columns = a->start + own;
    float *query = scratch, *mixed = query + dim * LANES, *scores = mixed + dim * LANES;
    for (int64_t d = 0; d < dim; d++)
        for (int64_t l = 0; l < LANES; l++)
            query[d * LANES + l] = l < live ? a->query[(first + l) * dim + d] * (a->cap != 0 ? 1.0f : a->scaling) : 0;
    int64_t begins[LANES] = {0}, from = a->window && !a->prefix ? a->start : 0; /* the first columns that rows and any row see */
    for (int64_t l = 0; l < live && a->window; l++) {
        int64_t begin = a->positions[(first + l) % a->rows] - a->window + 1;
        begin = a->prefix + (begin > 0 ? begin : 0);
        begins[l] = begin < a->start ? begin : a->start;
        from = begins[l] < from ? begins[l] : from;
    }
    int64_t c;
    if (live <= 4) /* processors do more short vectors at a time than long ones */
        score_columns(a, query, from, columns, 4, 1, scores);
    else if (live <= 8 && vector >= 8)
        score_columns(a, query, from, columns, 8, 1, scores);
    else
        score_columns(a, query, from, columns, vector, LANES / vector, scores);
    for (int64_t i = from * LANES; i < columns * LANES && a->cap != 0; i++) scores[i] = bent(scores[i], a);

    /* Lanes behind the last row hold anything. Unseen columns get a score that is never the largest, and later the weight 0. */
    const float never = -3e38f;
    int64_t before = a->start - a->back; /* negative where the context is shorter than that */
    for (int64_t l = 0; l < live; l++) {
        int64_t row = (first + l) % a->rows;
        const uint8_t *visible = a->visible + row * a->by_row;
        for (c = 0; c < a->prefix && !(a->prefix_rows && a->prefix_rows[row]); c++) scores[c * LANES + l] = never;
        for (c = from > a->prefix ? from : a->prefix; c < begins[l]; c++) scores[c * LANES + l] = never;
        for (int64_t j = before < 0 ? -before : 0; j < a->back; j++)
            if (!visible[j] && before + j >= from) scores[(before + j) * LANES + l] = never;
        for (int64_t j = 0; j < own; j++)
            if (!visible[a->back + j] || (a->window && a->positions[row] - a->positions[j] >= a->window))
                scores[(a->start + j) * LANES + l] = never;
    }
    float most[LANES], sum[LANES];
    for (int l = 0; l < LANES; l++) most[l] = never, sum[l] = 0;
    for (c = from; c < columns; c++) {
        const float *s = scores + c * LANES;
        for (int l = 0; l < LANES; l++) most[l] = s[l] > most[l] ? s[l] : most[l];
    }
    for (c = from; c < columns; c++) {
        float *s = scores + c * LANES;
        for (int l = 0; l < LANES; l++) {
            float weight = exponential(s[l] - most[l]);
            weight = s[l] > 0.5f * never ? weight : 0;
            sum[l] += weight;
            s[l] = rounded(weight, a->rounding && a->cap == 0); /* as torch's attention in bfloat16 does between its two products */
        }
    }
    for (int l = 0; l < LANES; l++) sum[l] = 1.0f / sum[l];
    for (c = from; c < columns && a->rounding && a->cap != 0; c++) { /* and as Hugging Face's does that bends scores */
        float *s = scores + c * LANES;
        for (int l = 0; l < LANES; l++) s[l] = as_bfloat16(s[l] * sum[l]);
    }
    for (int64_t r = 0; r < live;) {
        int rows = live - r < 6 ? (int)(live - r) : 6;
        const float *weights = scores + from * LANES + r;
        float *to = mixed + r * dim;
        switch (rows) {
#define MIX(n) case n: mix_rows(a, weights, from, columns, vector, n, to); break;
            MIX(1) MIX(2) MIX(3) MIX(4) MIX(5) MIX(6)
#undef MIX
        }
        r += rows;
    }
    for (int64_t l = 0; l < live; l++) {
        int64_t at = (first + l) % a->rows * a->stride + (first + l) / a->rows * dim;
        float *out = a->out + at, scale = a->rounding && a->cap != 0 ? 1.0f : sum[l];
        for (int64_t d = 0; d < dim; d++) out[d] = rounded(mixed[l * dim + d] * scale, a->rounding);
        if (a->gates)
            for (int64_t d = 0; d < dim; d++)
                out[d] = rounded(out[d] * rounded(1.0f / (1.0f + exponential(-a->gates[at + d])), a->rounding), a->rounding);
    }
}
