/* Rows of layers, and the shares of work that threads take of them. Included once for each kind of processor, by the files that
 * begin with `kernels_`. */
#include "kernels.h"

#include "attention.h"

/* 1 / sqrt(mean of the squares of x + epsilon), by which a norm scales a row. */
INLINE float inverse_root_mean_square(const float *x, int64_t width, float epsilon) {
    float lanes[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        for (int k = 0; k < LANES; k++) lanes[k] += x[i + k] * x[i + k];
    for (; i < width; i++) sum += x[i] * x[i];
    for (int k = 0; k < LANES; k++) sum += lanes[k];
    return 1.0f / sqrtf(sum / (float)width + epsilon);
}

/* x of a row by its norm: scaled and weighed. */
INLINE float normed(float x, float scale, float weight, int rounding) {
    return rounded(rounded(x * scale, rounding & NORMS_ROUND_TWICE) * weight, rounding & ROUNDS);
}

/* Each row of x scaled to a mean square of 1, times weight; into `out`, or added to it. */
INLINE void norm_rows(const float *x, const float *weight, float epsilon, int64_t rows, int64_t width, int add, int rounding,
                      float *out) {
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        float scale = inverse_root_mean_square(x, width, epsilon);
        if (add)
            for (int64_t i = 0; i < width; i++) out[i] = rounded(out[i] + normed(x[i], scale, weight[i], rounding), rounding & ROUNDS);
        else
            for (int64_t i = 0; i < width; i++) out[i] = normed(x[i], scale, weight[i], rounding);
    }
}

/* The `count` largest of each row's `width` logits, those first, and their log-probabilities; where fewer are more than -infinity,
 * the others are number 0 with -infinity, as are all in a row with what is no number. */
INLINE void top_rows(const float *x, int64_t rows, int64_t width, int64_t count, int64_t *best, float *logp) {
    for (int64_t r = 0; r < rows; r++, x += width, best += count, logp += count) {
        for (int64_t k = 0; k < count; k++) best[k] = 0, logp[k] = -INFINITY;
        for (int64_t i = 0; i < width; i += 8 * LANES) {
            int64_t end = i + 8 * LANES < width ? i + 8 * LANES : width;
            int above = 0; /* whether any of these is one of the largest so far */
            for (int64_t j = i; j < end; j++) above |= x[j] > logp[count - 1];
            for (int64_t j = i; above && j < end; j++) {
                int64_t k = count - 1;
                if (!(x[j] > logp[k])) continue;
                for (; k > 0 && x[j] > logp[k - 1]; k--) best[k] = best[k - 1], logp[k] = logp[k - 1];
                best[k] = j;
                logp[k] = x[j];
            }
        }
        float most = logp[0], lanes[LANES] = {0}, sum = 0;
        if (!(most > -INFINITY)) continue;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES)
            for (int k = 0; k < LANES; k++) lanes[k] += exponential(x[i + k] - most);
        for (; i < width; i++) sum += exponential(x[i] - most);
        for (int k = 0; k < LANES; k++) sum += lanes[k];
        for (int64_t k = 0; k < count; k++) {
            logp[k] -= most + logf(sum);
            if (!(logp[k] <= 0)) best[k] = 0, logp[k] = -INFINITY; /* among logits that are no numbers, or infinite */
        }
    }
}

/* A number turned with its partner. */
INLINE float turned(float own, float other, float cosine, float sine, int rounding) {
    int each = rounding & ROUNDS && !(rounding & TURNS_ROUND_ONCE);
    return rounded(rounded(own * cosine, each) + rounded(other * sine, each), rounding & ROUNDS);
}

/* One head x [dim] normed and turned by its position's angles. `weight` is NULL where heads have no norm; `scale` is the norm's. */
INLINE void rotate_head(const float *x, const float *weight, float scale, const int32_t *partner, const float *cosine,
                        const float *sine, int64_t dim, int rounding, float *out) {
    int64_t half = dim / 2;
    if (partner)
        for (int64_t i = 0; i < dim; i++) {
            float own = x[i], other = x[partner[i]];
            if (weight) {
                own = normed(own, scale, weight[i], rounding);
                other = normed(other, scale, weight[partner[i]], rounding);
            }
            out[i] = turned(own, other, cosine[i], sine[i], rounding);
        }
    else
        for (int64_t i = 0; i < half; i++) {
            float low = x[i], high = x[half + i];
            if (weight) {
                low = normed(low, scale, weight[i], rounding);
                high = normed(high, scale, weight[half + i], rounding);
            }
            out[i] = turned(low, high, cosine[i], sine[i], rounding);
            out[half + i] = turned(high, low, cosine[half + i], sine[half + i], rounding);
        }
}

/* qkv [batch, rows, queries | keys | values] to query [batch, kv heads, groups, rows, dim], and to keys and values
 * [slots, kv heads, capacity, dim] behind each slot's context. Gates go behind the queries, [batch, rows, heads, dim]. */
INLINE void rotate_rows(const Layer *l, const Pass *p, const float *qkv, float *query, float *keys, float *values) {
    int64_t dim = l->dim, kv_heads = l->kv_heads, heads = kv_heads * l->groups, step = l->gated ? 2 * dim : dim;
    float *gates = query + offset_of(p, p->batch) * heads * dim;
    int rounding = l->rounding | (p->exact_angles ? TURNS_ROUND_ONCE : 0);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0, n = rows_of(p, b), at = offset_of(p, b); i < n; i++, qkv += heads * step + 2 * kv_heads * dim) {
            const float *cosine = p->cosine + (at + i) * dim, *sine = p->sine + (at + i) * dim;
            const float *key = qkv + heads * step;
            float of_query = 0, of_key = 0;
            if (l->query_norm && l->wide) {
                of_query = inverse_root_mean_square(qkv, heads * dim, l->head_epsilon);
                of_key = inverse_root_mean_square(key, kv_heads * dim, l->head_epsilon);
            }
            for (int64_t h = 0; h < heads; h++) {
                const float *weight = l->query_norm ? l->query_norm + (l->wide ? h * dim : 0) : 0;
                if (weight && !l->wide) of_query = inverse_root_mean_square(qkv + h * step, dim, l->head_epsilon);
                rotate_head(qkv + h * step, weight, of_query, l->partner, cosine, sine, dim, rounding,
                            query + (at * heads + h * n + i) * dim);
                if (l->gated) memcpy(gates + ((at + i) * heads + h) * dim, qkv + h * step + dim, dim * sizeof *gates);
            }
            for (int64_t h = 0; h < kv_heads; h++) {
                int64_t to = (((p->first + b) * kv_heads + h) * p->capacity + p->starts[b] + i) * dim;
                const float *weight = l->key_norm ? l->key_norm + (l->wide ? h * dim : 0) : 0;
                if (weight && !l->wide) of_key = inverse_root_mean_square(key + h * dim, dim, l->head_epsilon);
                rotate_head(key + h * dim, weight, of_key, l->partner, cosine, sine, dim, rounding, keys + to);
                memcpy(values + to, key + (kv_heads + h) * dim, dim * sizeof *values);
                only_finite(keys + to, dim);
                only_finite(values + to, dim);
            }
        }
}

#include "recurrent.h"

/* ---------------------------------------------------------------- shares of work that threads take */

/* The part of an attention that one thread does. */
INLINE void attending_share(const Attending *t, int64_t first, int64_t last, int vector) {
    const Layer *l = t->l;
    const Pass *p = t->p;
    float *scratch = p->scores + thread_number() * t->scratch;
    for (int64_t item = first; item < last; item++) {
        int64_t head = item / t->tiles % l->kv_heads, b = item / t->tiles / l->kv_heads, dim = l->dim;
        int64_t store = ((p->first + b) * l->kv_heads + head) * p->capacity * dim, rows = rows_of(p, b), at = offset_of(p, b);
        int64_t from = item % t->tiles * LANES;
        if (from >= l->groups * rows || from % rows + LANES <= t->first) continue; /* others have more; none of these is read */
        Attention a = {
            .rows = rows,
            .groups = l->groups,
            .dim = dim,
            .prefix = p->prefix,
            .start = p->starts[b],
            .back = p->back,
            .query = t->query + (at * l->kv_heads + head * rows) * l->groups * dim,
            .keys = t->keys + store,
            .values = t->values + store,
            .visible = p->visible + b * p->rows * (p->back + p->rows),
            .by_row = p->back + p->rows,
            .prefix_rows = p->prefix_rows ? p->prefix_rows + b * p->rows : 0,
            .positions = p->positions + b * p->rows,
            .window = l->window,
            .scaling = l->scaling,
            .cap = l->cap,
            .rounding = l->rounding,
            .gates = l->gated ? t->query + (offset_of(p, p->batch) + at) * l->kv_heads * l->groups * dim + head * l->groups * dim : 0,
            .out = t->out + (at * l->kv_heads + head) * l->groups * dim,
            .stride = (int64_t)l->kv_heads * l->groups * dim,
        };
        attend_lanes(&a, from, vector, scratch);
    }
}

/* The part of an MLP's first half that one thread does. */
INLINE void gating_share(const Gating *t, Share product, int64_t first, int64_t last) {
    Product gate = {t->gate, t->kind, t->x, t->rows, 0, t->gated}, up = {t->up, t->kind, t->x, t->rows, 0, t->raised};
    if (t->x) {
        product(&gate, first, last);
        product(&up, first, last);
    }
    int rounds = t->gate->rounds;
    int64_t width = t->gate->outputs, begin = first * LANES, end = last * LANES < width ? last * LANES : width;
    for (int64_t r = 0; r < t->rows; r++) {
        float *gated = t->gated + r * width;
        const float *raised = t->raised + r * width;
        if (t->gelu) /* (1 + tanh(u)) / 2 is the logistic function of 2 u */
            for (int64_t i = begin; i < end; i++) {
                float g = gated[i], u = 1.5957691216f * (g + 0.044715f * g * g * g);
                gated[i] = rounded(rounded(g / (1.0f + exponential(-u)), rounds) * raised[i], rounds);
            }
        else
            for (int64_t i = begin; i < end; i++) {
                float g = gated[i];
                gated[i] = rounded(rounded(g / (1.0f + exponential(-g)), rounds) * raised[i], rounds);
            }
    }
}

/* One head of one row; columns lie `by_column` floats apart. `distance` by column of a text; 0 for a source. */
INLINE void attend_columns(int64_t dim, const float *query, const float *keys, const float *values, int64_t by_column, int64_t count,
                           const float *bias, const int32_t *distance, float *scores, float *out) {
    float most = -3e38f, sum = 0;
    for (int64_t j = 0; j < count; j++) {
        if (distance && distance[j] < 0) {
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
        if (distance && distance[j] < 0) continue;
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
    float *scores = c->scores + thread_number() * c->longest;
    for (int64_t item = first; item < last; item++) {
        int64_t b = item / c->heads, h = item % c->heads, slot = p->first + b;
        int64_t store = (slot * c->heads + h) * t->capacity * c->dim;
        for (int64_t r = b * p->rows; r < (b + 1) * p->rows; r++)
            attend_columns(c->dim, t->query + r * t->stride + h * c->dim, t->keys + store, t->values + store, c->dim,
                           t->source ? c->lengths[b] : p->starts[b] + p->rows, c->bias + h * c->distances,
                           t->source ? 0 : c->distance + r * c->longest, scores,
                           t->out + (r * c->heads + h) * c->dim);
    }
}

/* All functions for one kind of processor, of which `target` is the compiler's name and `vector` the floats of its vectors;
 * `any` is the product of rows of every kind that it can lay. */
#define KERNELS(name, target, vector, any)                                                                        \
    TILES_OF(name, target, vector, FLOAT32)                                                                       \
    TILES_OF(name, target, vector, BFLOAT16)                                                                      \
    TILES_OF(name, target, vector, FLOAT16)                                                                       \
    TILES_OF(name, target, vector, INT8)                                                                          \
    target static void product_##name(const void *task, int64_t first, int64_t last) {                            \
        const Product *t = task;                                                                                  \
        int64_t kind = t->kind;                                                                                   \
        if (BLOCKED(t->m->kind)) {                                                                                \
            product_units(t, first, last, vector);                                                                \
            return;                                                                                               \
        }                                                                                                         \
        if (tiles_of(t->rows, MOST_ROWS(vector)) >= EXPANDED_FROM &&                                              \
            ((kind == BFLOAT16 && product_expanded(t, first, last, vector, BFLOAT16, product_##name)) ||          \
             (kind == FLOAT16 && product_expanded(t, first, last, vector, FLOAT16, product_##name))))             \
            return;                                                                                               \
        if (kind == BFLOAT16)                                                                                     \
            product_panels(task, first, last, vector, BFLOAT16, tiles_##name##_BFLOAT16);                         \
        else if (kind == INT8)                                                                                    \
            product_panels(task, first, last, vector, INT8, tiles_##name##_INT8);                                 \
        else if (kind == FLOAT16)                                                                                 \
            product_panels(task, first, last, vector, FLOAT16, tiles_##name##_FLOAT16);                           \
        else                                                                                                      \
            product_panels(task, first, last, vector, FLOAT32, tiles_##name##_FLOAT32);                           \
    }                                                                                                             \
    target static void laying_##name(const void *task, int64_t first, int64_t last) {                             \
        lay_tiles(task, first, last, MOST_ROWS(vector), FLOAT32);                                                 \
    }                                                                                                             \
    target static void gating_##name(const void *task, int64_t first, int64_t last) {                             \
        gating_share(task, any, first, last);                                                                     \
    }                                                                                                             \
    target static void attending_##name(const void *task, int64_t first, int64_t last) {                          \
        attending_share(task, first, last, vector);                                                               \
    }                                                                                                             \
    target static void norm_##name(const float *x, const float *weight, float epsilon, int64_t rows,              \
                                   int64_t width, int add, int rounding, float *out) {                            \
        norm_rows(x, weight, epsilon, rows, width, add, rounding, out);                                           \
    }                                                                                                             \
    target static void top_##name(const float *x, int64_t rows, int64_t width, int64_t count, int64_t *best, float *logp) { \
        top_rows(x, rows, width, count, best, logp);                                                              \
    }                                                                                                             \
    target static void rotate_##name(const Layer *l, const Pass *p, const float *qkv, float *query, float *keys,  \
                                     float *values) {                                                             \
        rotate_rows(l, p, qkv, query, keys, values);                                                              \
    }                                                                                                             \
    target static void attending_t5_##name(const void *task, int64_t first, int64_t last) {                       \
        t5_attending_share(task, first, last);                                                                    \
    }                                                                                                             \
    target NOINLINE static void sums_##name(const float *weights, const float *values, int64_t columns, int64_t dim, \
                                            int64_t live, float *sums) {                                           \
        sum_lanes(weights, values, columns, dim, live, vector, sums);                                             \
    }                                                                                                             \
    target static void recurring_##name(const void *task, int64_t first, int64_t last) {                          \
        recurring_share(task, sums_##name, first, last);                                                          \
    }                                                                                                             \
    target static void moving_##name(const void *task, int64_t first, int64_t last) {                             \
        moving_share(task, sums_##name, first, last);                                                             \
    }                                                                                                             \
    static const Kernels all_##name = {                                                                           \
        .laying = laying_##name,                                                                                  \
        .product = any,                                                                                           \
        .gating = gating_##name,                                                                                  \
        .attending = attending_##name,                                                                            \
        .attending_t5 = attending_t5_##name,                                                                      \
        .recurring = recurring_##name,                                                                            \
        .moving = moving_##name,                                                                                  \
        .most = MOST_ROWS(vector),                                                                                \
        .norm = norm_##name,                                                                                      \
        .top = top_##name,                                                                                        \
        .rotate = rotate_##name,                                                                                  \
    };
