/* Gated DeltaNet for trees: a short convolution and the gated delta rule along each row's own ancestors. Included by rows.h only.
 *
 * A token turns a head's state S [width, dim] into exp(g) S + k delta', with delta = beta (v - exp(g) S' k), and its result is
 * the new S' q. With G, the sum of g along a row's path behind the state S0 of the context, that is
 *
 *     delta = beta (v - exp(G) S0' k - sum over the ancestors j of exp(G - G_j) (k_j . k) delta_j)
 *     result =         exp(G) S0' q + sum over the ancestors j and the row itself of exp(G - G_j) (k_j . q) delta_j
 *
 * so the state is read once for all rows and no row has one of its own. All sums go from a row to its ancestors in the order of
 * its path: a result depends on the path alone. Of a row, k, delta and G are kept until the commit, which moves the state in one
 * pass over it. A prompt's rows go in blocks, and a copy of the state moves behind each. */

/* sums [live, dim] = of `live` up to LANES rows of weights [columns, LANES], times values [columns, dim]. */
typedef void (*Sums)(const float *weights, const float *values, int64_t columns, int64_t dim, int64_t live, float *sums);

/* As Sums, of so many rows; `vector` and `rows` are constants. */
INLINE void sum_rows(const float *weights, const float *values, int64_t columns, int64_t dim, int vector, int rows, float *sums) {
    int64_t d = 0;
    if (vector == LANES)
        for (; d + 4 * LANES <= dim; d += 4 * LANES) WITH(vector, value_tile, weights, values + d, columns, dim, 4, rows, sums + d);
    for (; d + LANES <= dim; d += LANES) WITH(vector, value_tile, weights, values + d, columns, dim, 1, rows, sums + d);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (int64_t c = 0; c < columns; c++) sum += values[c * dim + d] * weights[c * LANES + r];
            sums[r * dim + d] = sum;
        }
}

INLINE void sum_lanes(const float *weights, const float *values, int64_t columns, int64_t dim, int64_t live, int vector, float *sums) {
    for (int64_t r = 0; r < live; r += 6) {
        switch (live - r < 6 ? live - r : 6) {
#define SUM(n) case n: sum_rows(weights + r, values, columns, dim, vector, n, sums + r * dim); break;
            SUM(1) SUM(2) SUM(3) SUM(4) SUM(5) SUM(6)
#undef SUM
        }
    }
}

/* The memory of a thread; see `recurrent_floats`. */
typedef struct {
    float *query, *key, *delta;    /* [rows, width], [rows, width], [rows, dim] of a block */
    float *lanes;                  /* [2 * rows / LANES, width, LANES], keys and behind them queries */
    float *read;                   /* [2 * rows, dim], what keys and queries find in the state */
    float *path, *beta;            /* [rows], the sums of g */
} Room;

INLINE Room room_of(float *scratch, int64_t rows, int64_t width, int64_t dim) {
    Room m;
    int64_t twice = (2 * rows + LANES - 1) / LANES * LANES;
    m.query = scratch, m.key = m.query + rows * width, m.delta = m.key + rows * width;
    m.lanes = m.delta + rows * dim, m.read = m.lanes + twice * width;
    m.path = m.read + twice * dim, m.beta = m.path + rows;
    return m;
}

/* target = decay * source + the sum of `count` rows' keys times deltas, [width, dim]; keys are weighted before.
 * scratch: LANES * (count + dim) floats. */
INLINE void move_state(const float *source, float decay, const float *keys, const float *deltas, int64_t count, int64_t width,
                       int64_t dim, Sums sums_of, float *scratch, float *target) {
    float *weights = scratch, *sums = scratch + count * LANES;
    for (int64_t first = 0; first < width; first += LANES) {
        int64_t live = width - first < LANES ? width - first : LANES;
        for (int64_t j = 0; j < count; j++)
            for (int64_t l = 0; l < LANES; l++) weights[j * LANES + l] = l < live ? keys[j * width + first + l] : 0;
        sums_of(weights, deltas, count, dim, live, sums);
        for (int64_t i = 0; i < live * dim; i++) target[first * dim + i] = decay * source[first * dim + i] + sums[i];
    }
}

/* The row before row i on its path; -1 for the context. Rows stand behind their ancestors. */
INLINE int64_t parent_of(const uint8_t *visible, int64_t by_row, int64_t i) {
    int64_t j = i - 1;
    while (j >= 0 && !visible[i * by_row + j]) j--;
    return j;
}

/* Channels [channel, channel + count) of a row's convolution: its window is the row's last ancestors, then the kept inputs. */
INLINE void convolve(const Delta *d, const float *const *window, int64_t channel, int64_t count, int rounding, float *out) {
    const float *weights = d->conv + channel;
    for (int64_t c = 0; c < count; c++) out[c] = 0;
    for (int64_t tap = 0; tap < d->kernel; tap++, weights += d->channels) {
        const float *in = window[tap] + channel;
        for (int64_t c = 0; c < count; c++) out[c] += weights[c] * in[c];
    }
    int on = rounding & ROUNDS;
    if (d->conv_bias)
        for (int64_t c = 0; c < count; c++) out[c] += d->conv_bias[channel + c];
    for (int64_t c = 0; c < count; c++) out[c] = rounded(out[c], on);
    for (int64_t c = 0; c < count && d->width; c++) out[c] = rounded(out[c] / (1.0f + exponential(-out[c])), on);
}

/* The last inputs up to row i of x, `stride` floats apart, behind those of `kept`. */
INLINE void find_window(const Delta *d, const Pass *p, const uint8_t *visible, const float *x, int64_t stride, const float *kept,
                        int64_t i, const float **window) {
    int64_t before = d->kernel - 1, missing = 0;
    for (int64_t tap = before; tap >= 0; tap--) {
        window[tap] = i >= 0 ? x + i * stride : kept + (before - ++missing) * d->channels;
        if (i >= 0) i = parent_of(visible, p->rows, i);
    }
}

/* A convolution alone of the rows of request b, in channels [h * dim, (h + 1) * dim). */
INLINE void recur_inputs(const Recurring *t, int64_t b, int64_t h) {
    const Layer *l = t->l;
    const Pass *p = t->p;
    const Delta *d = l->delta;
    int64_t at = offset_of(p, b), dim = l->dim, from = h * dim;
    int on = l->rounding & ROUNDS;
    const float *kept = t->states->conv + (p->first + b) * (d->kernel - 1) * d->channels, *window[MOST_KERNEL];
    const uint8_t *visible = p->visible + b * p->rows * p->rows;
    float *x = t->projected + at * l->qkv.stride;
    for (int64_t i = 0; i < rows_of(p, b); i++) {
        float *in = x + i * l->qkv.stride, *gate = in + d->channels, *out = t->out + (at + i) * d->channels;
        for (int64_t c = from; c < from + dim; c++) in[c] = rounded(in[c] * gate[d->channels + c], on);
        find_window(d, p, visible, x, l->qkv.stride, kept, i, window);
        convolve(d, window, from, dim, l->rounding, out + from);
        for (int64_t c = from; c < from + dim; c++) out[c] = rounded(out[c] * gate[c], on);
    }
}

/* x [width] scaled to length 1, times `scale`. */
INLINE void to_length_one(float *x, int64_t width, float scale) {
    float lanes[LANES] = {0}, sum = 1e-6f;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int k = 0; k < LANES; k++) lanes[k] += x[i + k] * x[i + k];
    for (; i < width; i++) sum += x[i] * x[i];
    for (int k = 0; k < LANES; k++) sum += lanes[k];
    scale /= sqrtf(sum);
    for (i = 0; i < width; i++) x[i] *= scale;
}

/* key . k and key . q. */
INLINE void two_dots(const float *key, const float *k, const float *q, int64_t width, float *with_k, float *with_q) {
    float own[LANES] = {0}, other[LANES] = {0}, first = 0, second = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int l = 0; l < LANES; l++) own[l] += key[i + l] * k[i + l], other[l] += key[i + l] * q[i + l];
    for (; i < width; i++) first += key[i] * k[i], second += key[i] * q[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) own[l] += own[l + half], other[l] += other[l + half];
    *with_k = first + own[0], *with_q = second + other[0];
}

/* The result of a row, [dim], normed and multiplied by its activated gate z. */
INLINE void close_row(const Layer *l, const float *x, const float *z, int64_t dim, float *out) {
    const Delta *d = l->delta;
    int on = l->rounding & ROUNDS;
    float scale = inverse_root_mean_square(x, dim, d->epsilon);
    for (int64_t i = 0; i < dim; i++) {
        float gate = z[i] / (1.0f + exponential(-z[i]));
        out[i] = rounded(rounded(rounded(x[i] * scale, on) * d->norm[i], on) * gate, on);
    }
}

/* Rows [begin, end) of request b and value head h, behind `state`; `block`: room for so many rows. */
INLINE void recur_block(const Recurring *t, int64_t b, int64_t h, int64_t begin, int64_t end, const float *state, Sums sums_of,
                        Room m) {
    const Layer *l = t->l;
    const Pass *p = t->p;
    const Delta *d = l->delta;
    const States *s = t->states;
    int64_t width = d->width, dim = l->dim, heads = (int64_t)l->kv_heads * l->groups, of_key = h / l->groups, keys = l->kv_heads * width;
    int64_t at = offset_of(p, b), stride = l->qkv.stride, count = end - begin;
    const float *x = t->projected + at * stride, *kept = s->conv + (p->first + b) * (d->kernel - 1) * d->channels;
    const uint8_t *visible = p->visible + b * p->rows * p->rows;
    for (int64_t i = begin; i < end; i++) {
        const float *window[MOST_KERNEL];
        find_window(d, p, visible, x, stride, kept, i, window);
        float *query = m.query + (i - begin) * width, *key = m.key + (i - begin) * width;
        convolve(d, window, of_key * width, width, l->rounding, query);
        convolve(d, window, keys + of_key * width, width, l->rounding, key);
        convolve(d, window, 2 * keys + h * dim, dim, l->rounding, m.delta + (i - begin) * dim);
        to_length_one(query, width, 1.0f / sqrtf((float)width));
        to_length_one(key, width, 1.0f);
        const float *gates = x + i * stride + d->channels + heads * dim;
        float a = gates[heads + h] + d->bias[h], g = d->decay[h] * (a > 20.0f ? a : log1pf(expf(a)));
        int64_t parent = parent_of(visible, p->rows, i);
        m.path[i - begin] = g + (parent >= begin ? m.path[parent - begin] : 0);
        m.beta[i - begin] = rounded(1.0f / (1.0f + expf(-gates[h])), l->rounding & ROUNDS);
    }
    for (int64_t r = 0; r < 2 * count; r++) {
        const float *row = r < count ? m.key + r * width : m.query + (r - count) * width;
        float *lane = m.lanes + r / LANES * width * LANES + r % LANES;
        for (int64_t c = 0; c < width; c++) lane[c * LANES] = row[c];
    }
    for (int64_t r = 0; r < 2 * count; r += LANES)
        sums_of(m.lanes + r * width, state, width, dim, 2 * count - r < LANES ? 2 * count - r : LANES, m.read + r * dim);
    for (int64_t i = 0; i < count; i++) {
        const float *key = m.key + i * width, *query = m.query + i * width;
        float *delta = m.delta + i * dim, *out = m.read + (count + i) * dim, *found = m.read + i * dim;
        float decay = exponential(m.path[i]), with_k, with_q;
        for (int64_t c = 0; c < dim; c++) delta[c] -= decay * found[c], out[c] *= decay;
        for (int64_t j = parent_of(visible, p->rows, begin + i); j >= begin; j = parent_of(visible, p->rows, j)) {
            const float *other = m.delta + (j - begin) * dim;
            two_dots(m.key + (j - begin) * width, key, query, width, &with_k, &with_q);
            decay = exponential(m.path[i] - m.path[j - begin]);
            with_k *= decay, with_q *= decay;
            for (int64_t c = 0; c < dim; c++) delta[c] -= with_k * other[c], out[c] += with_q * other[c];
        }
        two_dots(key, key, query, width, &with_k, &with_q);
        for (int64_t c = 0; c < dim; c++) {
            delta[c] *= m.beta[i];
            out[c] = rounded(out[c] + with_q * delta[c], l->rounding & ROUNDS);
        }
        close_row(l, out, x + (begin + i) * stride + d->channels + h * dim, dim, t->out + ((at + begin + i) * heads + h) * dim);
        if (s->keys) { /* kept until the commit */
            int64_t row = h * s->rows + at + begin + i;
            memcpy(s->keys + (of_key * s->rows + at + begin + i) * width, key, width * sizeof *key);
            memcpy(s->deltas + row * dim, delta, dim * sizeof *delta);
            s->paths[row] = m.path[i];
        }
    }
}

/* The part of a recurrence that one thread does: value heads of requests [first, last). */
INLINE void recurring_share(const Recurring *t, Sums sums_of, int64_t first, int64_t last) {
    const Layer *l = t->l;
    const Pass *p = t->p;
    const States *s = t->states;
    int64_t heads = (int64_t)l->kv_heads * l->groups, width = l->delta->width, dim = l->dim;
    Room m = room_of(p->scores + thread_number() * t->scratch, t->block, width, dim);
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / heads, h = item % heads, rows = rows_of(p, b);
        if (!width) {
            recur_inputs(t, b, h);
            continue;
        }
        const float *state = s->states + ((p->first + b) * heads + h) * width * dim;
        for (int64_t begin = 0; begin < rows; begin += t->block) {
            int64_t end = rows - begin < t->block ? rows : begin + t->block, count = end - begin;
            recur_block(t, b, h, begin, end, state, sums_of, m);
            if (!s->next) continue;
            float *next = s->next + h * width * dim;
            for (int64_t j = 0; j < count; j++) {
                float decay = exponential(m.path[count - 1] - m.path[j]);
                for (int64_t c = 0; c < width; c++) m.key[j * width + c] *= decay;
            }
            move_state(state, exponential(m.path[count - 1]), m.key, m.delta, count, width, dim, sums_of, m.lanes, next);
            state = next;
        }
    }
}

/* The part of a commit that one thread does: value heads of requests of layers [first, last). */
INLINE void moving_share(const Moving *t, Sums sums_of, int64_t first, int64_t last) {
    int64_t heads = (int64_t)t->layers[0]->kv_heads * t->layers[0]->groups;
    float *scratch = t->scratch + thread_number() * t->floats;
    for (int64_t item = first; item < last; item++) {
        int64_t i = item / heads / t->batch, b = item / heads % t->batch, h = item % heads;
        const Layer *l = t->layers[i];
        const States *s = t->states[i];
        int64_t width = l->delta->width, dim = l->dim, count = t->begins[b + 1] - t->begins[b], slot = t->first + b;
        const int64_t *path = t->paths + t->begins[b];
        if (!count) continue;
        if (!h) {
            int64_t before = l->delta->kernel - 1, channels = l->delta->channels;
            float *conv = s->conv + slot * before * channels;
            for (int64_t k = 0; k < before; k++) {
                int64_t from = k + count - before; /* of the path; before it come inputs that are kept already */
                memcpy(conv + k * channels, from < 0 ? conv + (k + count) * channels : s->inputs + path[from] * l->qkv.stride,
                       channels * sizeof *conv);
            }
        }
        if (!width) continue;
        const float *sums = s->paths + h * s->rows;
        float *keys = scratch, *deltas = keys + count * width, *state = s->states + (slot * heads + h) * width * dim;
        for (int64_t j = 0; j < count; j++) {
            const float *key = s->keys + (h / l->groups * s->rows + path[j]) * width;
            float decay = exponential(sums[path[count - 1]] - sums[path[j]]);
            for (int64_t c = 0; c < width; c++) keys[j * width + c] = key[c] * decay;
            memcpy(deltas + j * dim, s->deltas + (h * s->rows + path[j]) * dim, dim * sizeof *deltas);
        }
        move_state(state, exponential(sums[path[count - 1]]), keys, deltas, count, width, dim, sums_of, deltas + count * dim, state);
    }
}
