/* Decoder layers that also attend to a source, T5's way: scores are not scaled, and have a bias by distance instead of
 * positions in queries and keys. Included by layers.c only. */

/* One decoder layer's weights, and its attention's source. */
typedef struct {
    Matrix qkv, output;          /* attention to the text */
    Matrix query, crossed;       /* attention to the source: its query, its output */
    Matrix up, gate, down;       /* MLP; the gate has no inputs where there is none */
    const float *norm, *cross_norm, *mlp_norm;
    const float *keys, *values;  /* of the source, [slots, heads, columns, dim] */
} T5Layer;

/* The decoder, and what is the same for all rows of a pass. */
typedef struct {
    const T5Layer *layers;
    const float *bias;           /* [heads, distances], of a text's columns by their distance from the row */
    const uint8_t *seen;         /* [slots, columns], which of a source's columns are real */
    const int64_t *lengths;      /* per request, columns of its source */
    const int64_t *places;       /* [batch, rows], positions of the rows */
    const float *embedding;      /* [vocabulary, hidden] */
    const float *closing;        /* norm behind the last layer */
    const Matrix *head;
    int64_t vocabulary;
    int64_t count, hidden, heads, dim, inner, columns, distances;
    float epsilon;
    int64_t longest;             /* columns that a row may see, at most */
    float *scores;               /* threads * longest floats */
    int32_t *distance;           /* batch * rows * longest, of the row from the text's columns; -1: not seen */
} T5Decoder;

/* What rows attend to, head by head: the text where `keys` are of the cache, or the source. */
typedef struct {
    const T5Decoder *c;
    const Pass *p;
    const float *query, *keys, *values;
    int64_t stride, capacity;    /* floats from row to row of the queries; columns of a slot */
    int source;
    float *out;                  /* [batch * rows, heads * dim] */
} T5Attending;

/* One head of one row; columns lie `by_column` floats apart. `distance` by column, or else `seen`. */
INLINE void attend_columns(int64_t dim, const float *query, const float *keys, const float *values, int64_t by_column, int64_t count,
                           const float *bias, const int32_t *distance, const uint8_t *seen, float *scores, float *out) {
    float most = -3e38f, sum = 0;
    for (int64_t j = 0; j < count; j++) {
        if (distance ? distance[j] < 0 : !seen[j]) {
            scores[j] = -3e38f;
            continue;
        }
        const float *key = keys + j * by_column;
        float lanes[LANES] = {0}, score = distance ? bias[distance[j]] : 0;
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES)
            for (int k = 0; k < LANES; k++) lanes[k] += query[i + k] * key[i + k];
        for (; i < dim; i++) score += query[i] * key[i];
        for (int half = LANES / 2; half; half /= 2) /* pairs: sixteen additions one after the other took half of the time */
            for (int k = 0; k < half; k++) lanes[k] += lanes[k + half];
        score += lanes[0];
        scores[j] = score;
        most = score > most ? score : most;
    }
    for (int64_t i = 0; i < dim; i++) out[i] = 0;
    for (int64_t j = 0; j < count; j++) scores[j] = exponential(scores[j] - most);
    for (int64_t j = 0; j < count; j++) {
        if (distance ? distance[j] < 0 : !seen[j]) continue;
        const float *value = values + j * by_column;
        float weight = scores[j];
        sum += weight;
        for (int64_t i = 0; i < dim; i++) out[i] += weight * value[i];
    }
    for (int64_t i = 0; i < dim; i++) out[i] /= sum > 0 ? sum : 1.0f; /* a row that only fills up may see nothing */
}

/* The part of an attention that one thread does: heads of requests [first, last). */
INLINE void t5_attending_share(const T5Attending *t, int64_t first, int64_t last) {
    const T5Decoder *c = t->c;
    const Pass *p = t->p;
    float *scores = c->scores + (in_team ? own_number() : 0) * c->longest;
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / c->heads, h = item % c->heads, slot = p->first + b;
        int64_t store = (slot * c->heads + h) * t->capacity * c->dim;
        for (int64_t r = b * p->rows; r < (b + 1) * p->rows; r++)
            attend_columns(c->dim, t->query + r * t->stride + h * c->dim, t->keys + store, t->values + store, c->dim,
                           t->source ? c->lengths[b] : p->starts[b] + p->rows, c->bias + h * c->distances,
                           t->source ? 0 : c->distance + r * c->longest, c->seen + slot * c->columns, scores,
                           t->out + (r * c->heads + h) * c->dim);
    }
}

/* The share of a thread, compiled for one processor. */
#define T5_SHARE(name, target)                                                                  \
    target static void t5_attending_##name(const void *task, int64_t first, int64_t last) { \
        t5_attending_share(task, first, last);                                            \
    }
T5_SHARE(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
T5_SHARE(avx2, __attribute__((target("avx2,fma"))))
T5_SHARE(avx512, __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma"))))
#endif

/* The one for this processor. */
static Share t5_chosen(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (kernels->norm == norm_avx512) return t5_attending_avx512;
    if (kernels->norm == norm_avx2) return t5_attending_avx2;
#endif
    return t5_attending_plain;
}

/* Distances of all rows from the columns they see. A column of the context has its number as its position. */
static void t5_distances(const T5Decoder *c, const Pass *p) {
    int64_t covered = p->back + p->rows;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0; i < p->rows; i++) {
            int64_t row = b * p->rows + i, start = p->starts[b];
            int32_t *distance = c->distance + row * c->longest;
            const uint8_t *visible = p->visible + row * covered;
            int64_t place = c->places[row];
            for (int64_t j = 0; j < start + p->rows; j++) {
                int64_t back = j - start + p->back; /* the column as `visible` counts */
                int64_t at = j < start ? j : c->places[b * p->rows + j - start];
                int64_t far = place > at ? place - at : 0;
                distance[j] = back >= 0 && !visible[back] ? -1 : far < c->distances ? far : c->distances - 1;
            }
        }
}

/* x [rows, outputs of down] += down (activated up normed); no gate where it has no inputs. wide: 2 * rows * inner floats. */
static void dense(const Matrix *up, const Matrix *gate, const Matrix *down, const float *normed, int64_t rows, const Pass *p,
                  float *wide, float *x) {
    int64_t inner = down->inputs;
    if (gate->inputs) {
        gate_rows(gate, up, normed, rows, p, 1, wide);
    } else {
        layer_product(up, normed, rows, p->threads, 0, p->laid, wide);
        for (int64_t k = 0; k < rows * inner; k++) wide[k] = wide[k] > 0 ? wide[k] : 0;
    }
    layer_product(down, wide, rows, p->threads, 1, p->laid, x);
}

/* All layers of a decoder on x [batch * rows, hidden], in place; keys and values go behind each slot's context. The scratch of `p` holds
 * batch * rows * (hidden + the wider of 4 heads * dim and 2 inner) floats. */
static void t5_layers(const T5Decoder *c, const Pass *p, float *x, float *const *keys, float *const *values) {
    int64_t rows = p->batch * p->rows, width = c->heads * c->dim, items = p->batch * c->heads;
    float *normed = p->scratch, *wide = normed + rows * c->hidden, *mixed = wide + 3 * rows * width;
    Share attending = t5_chosen();
    t5_distances(c, p);
    for (int64_t i = 0; i < c->count; i++) {
        const T5Layer *l = c->layers + i;
        layer_norm(x, l->norm, c->epsilon, rows, c->hidden, 0, normed);
        layer_product(&l->qkv, normed, rows, p->threads, 0, p->laid, wide);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < c->heads; h++) {
                int64_t b = r / p->rows, column = p->starts[b] + r % p->rows;
                int64_t at = (((p->first + b) * c->heads + h) * p->capacity + column) * c->dim;
                const float *key = wide + (3 * r + 1) * width + h * c->dim;
                memcpy(keys[i] + at, key, c->dim * sizeof *key);
                memcpy(values[i] + at, key + width, c->dim * sizeof *key);
                only_finite(keys[i] + at, c->dim);
                only_finite(values[i] + at, c->dim);
            }
        T5Attending text = {c, p, wide, keys[i], values[i], 3 * width, p->capacity, 0, mixed};
        spread(attending, &text, items, p->threads, rows * width * c->longest);
        layer_product(&l->output, mixed, rows, p->threads, 1, p->laid, x);
        layer_norm(x, l->cross_norm, c->epsilon, rows, c->hidden, 0, normed);
        layer_product(&l->query, normed, rows, p->threads, 0, p->laid, wide);
        T5Attending source = {c, p, wide, l->keys, l->values, width, c->columns, 1, mixed};
        spread(attending, &source, items, p->threads, rows * width * c->columns);
        layer_product(&l->crossed, mixed, rows, p->threads, 1, p->laid, x);
        layer_norm(x, l->mlp_norm, c->epsilon, rows, c->hidden, 0, normed);
        dense(&l->up, &l->gate, &l->down, normed, rows, p, wide, x);
    }
}

/* A whole pass: logits [batch, last - first, outputs of the head] of each request's rows [first, last). x holds batch * rows *
 * hidden floats, normed as many. Returns 0 where a token is none; nothing is done then. */
int64_t t5_pass(const T5Decoder *c, const Pass *p, const int64_t *tokens, float *const *keys, float *const *values, int64_t first,
                      int64_t last, int64_t head_threads, float *x, float *normed, float *logits) {
    int64_t rows = p->batch * p->rows, n = last - first, hidden = c->hidden;
    for (int64_t r = 0; r < rows; r++)
        if (tokens[r] < 0 || tokens[r] >= c->vocabulary) return 0;
    for (int64_t r = 0; r < rows; r++) memcpy(x + r * hidden, c->embedding + tokens[r] * hidden, hidden * sizeof *x);
    t5_layers(c, p, x, keys, values);
    for (int64_t b = 0; b < p->batch; b++)
        layer_norm(x + (b * p->rows + first) * hidden, c->closing, c->epsilon, n, hidden, 0, normed + b * n * hidden);
    layer_product(c->head, normed, p->batch * n, head_threads, 0, p->laid, logits);
    return 1;
}
