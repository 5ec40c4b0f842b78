/* Decoder layers that also attend to a source, T5's way: scores are not scaled, and have a bias by distance instead of
 * positions in queries and keys. Included by layers.c only. */

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
        spread(kernels.attending_t5, &text, items, p->threads, rows * width * c->longest);
        layer_product(&l->output, mixed, rows, p->threads, 1, p->laid, x);
        layer_norm(x, l->cross_norm, c->epsilon, rows, c->hidden, 0, normed);
        layer_product(&l->query, normed, rows, p->threads, 0, p->laid, wide);
        T5Attending source = {c, p, wide, l->keys, l->values, width, c->columns, 1, mixed};
        spread(kernels.attending_t5, &source, items, p->threads, rows * width * c->columns);
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
