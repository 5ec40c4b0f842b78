/* Decoder layers that also attend to a source, T5's way: one row a request, which sees all of its text and its source.
 * What the small model of an encoder-decoder runs ahead with. Included by _layer.c only. */

typedef struct {
    Matrix qkv, output;          /* attention to the text */
    Matrix query, crossed;       /* attention to the source: its query, its output */
    Matrix up, gate, down;       /* MLP; the gate has no inputs where there is none */
    const float *norm, *cross_norm, *mlp_norm;
    const float *keys, *values;  /* of the source, [slots, heads, columns, dim] */
} CrossLayer;

typedef struct {
    const CrossLayer *layers;
    const float *bias;           /* [heads, distances], of a text's columns by their distance from the row */
    const uint8_t *seen;         /* [slots, columns], which of a source's columns are real */
    const int64_t *lengths;      /* per request, columns of its source */
    int64_t count, hidden, heads, dim, inner, columns, distances;
    float epsilon;
    float *scores;               /* as many floats as a row may see columns */
} Cross;

/* Attention of one head of one row to `count` columns; `bias` by distance from the last column, `seen` by column, or NULL. */
INLINE void attend_columns(const float *query, const float *keys, const float *values, int64_t count, int64_t dim,
                           const float *bias, int64_t distances, const uint8_t *seen, float *scores, float *out) {
    float most = -3e38f, sum = 0;
    for (int64_t j = 0; j < count; j++, keys += dim) {
        float lanes[LANES] = {0}, score = 0;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES)
            for (int k = 0; k < LANES; k++) lanes[k] += query[i + k] * keys[i + k];
        for (; i < dim; i++) score += query[i] * keys[i];
        for (int k = 0; k < LANES; k++) score += lanes[k];
        if (bias) score += bias[count - 1 - j < distances ? count - 1 - j : distances - 1];
        if (seen && !seen[j]) score = -3e38f;
        scores[j] = score;
        most = score > most ? score : most;
    }
    for (int64_t j = 0; j < count; j++) sum += scores[j] = exponential(scores[j] - most);
    for (int64_t i = 0; i < dim; i++) out[i] = 0;
    for (int64_t j = 0; j < count; j++, values += dim) {
        float weight = scores[j] / sum;
        if (seen && !seen[j]) continue;
        for (int64_t i = 0; i < dim; i++) out[i] += weight * values[i];
    }
}

typedef void (*Attend)(const float *, const float *, const float *, int64_t, int64_t, const float *, int64_t, const uint8_t *,
                       float *, float *);
#define ATTEND(name, target)                                                                                         \
    target static void attend_##name(const float *query, const float *keys, const float *values, int64_t count,      \
                                     int64_t dim, const float *bias, int64_t distances, const uint8_t *seen,         \
                                     float *scores, float *out) {                                                    \
        attend_columns(query, keys, values, count, dim, bias, distances, seen, scores, out);                         \
    }
ATTEND(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
ATTEND(avx2, __attribute__((target("avx2,fma"))))
ATTEND(avx512, __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma"))))
#endif

static Attend attend_chosen(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (kernels == &kernels_avx512) return attend_avx512;
    if (kernels == &kernels_avx2) return attend_avx2;
#endif
    return attend_plain;
}

/* All layers on x [batch, hidden], in place. The scratch of `p` holds batch * (hidden + the wider of 4 heads * dim and
 * 2 inner) floats. */
static void cross_run(const Cross *c, const Pass *p, float *x, float *const *keys, float *const *values) {
    int64_t batch = p->batch, width = c->heads * c->dim;
    float *normed = p->scratch, *wide = normed + batch * c->hidden, *mixed = wide + 3 * batch * width;
    Attend attend = attend_chosen();
    for (int64_t i = 0; i < c->count; i++) {
        const CrossLayer *l = c->layers + i;
        layer_norm(x, l->norm, c->epsilon, batch, c->hidden, normed);
        layer_product(&l->qkv, normed, batch, p->threads, 0, wide);
        for (int64_t b = 0; b < batch; b++)
            for (int64_t h = 0; h < c->heads; h++) {
                const float *row = wide + b * 3 * width + h * c->dim;
                int64_t store = ((p->first + b) * c->heads + h) * p->capacity * c->dim, at = store + p->starts[b] * c->dim;
                memcpy(keys[i] + at, row + width, c->dim * sizeof *row);
                memcpy(values[i] + at, row + 2 * width, c->dim * sizeof *row);
                attend(row, keys[i] + store, values[i] + store, p->starts[b] + 1, c->dim, c->bias + h * c->distances,
                       c->distances, 0, c->scores, mixed + b * width + h * c->dim);
            }
        layer_product(&l->output, mixed, batch, p->threads, 1, x);
        layer_norm(x, l->cross_norm, c->epsilon, batch, c->hidden, normed);
        layer_product(&l->query, normed, batch, p->threads, 0, wide);
        for (int64_t b = 0; b < batch; b++)
            for (int64_t h = 0; h < c->heads; h++) {
                int64_t slot = p->first + b, store = (slot * c->heads + h) * c->columns * c->dim, at = b * width + h * c->dim;
                attend(wide + at, l->keys + store, l->values + store, c->lengths[b], c->dim, 0, 0,
                       c->seen + slot * c->columns, c->scores, mixed + at);
            }
        layer_product(&l->crossed, mixed, batch, p->threads, 1, x);
        layer_norm(x, l->mlp_norm, c->epsilon, batch, c->hidden, normed);
        if (l->gate.inputs) {
            Gating t = {&l->gate, &l->up, normed, batch, 1, wide, wide + batch * c->inner};
            spread(kernels->gating, &t, panels_of(&l->gate), p->threads, 2 * batch * c->hidden * c->inner);
        } else {
            layer_product(&l->up, normed, batch, p->threads, 0, wide);
            for (int64_t k = 0; k < batch * c->inner; k++) wide[k] = wide[k] > 0 ? wide[k] : 0;
        }
        layer_product(&l->down, wide, batch, p->threads, 1, x);
    }
}
