/* The encoder of T5, and the keys and values that the decoder's layers make of what it says. Included by _layer.c only. */

typedef struct {
    Matrix qkv, output;        /* attention */
    Matrix up, gate, down;     /* MLP; the gate has no inputs where there is none */
    const float *norm, *mlp_norm;
} SourceLayer;

typedef struct {
    const SourceLayer *layers;
    const float *bias;         /* [heads, 2 * reach + 1], by the distance of a column from the row, from -reach on */
    const float *embedding;    /* [vocabulary, hidden] */
    const float *norm;         /* behind the last layer */
    const Matrix *crossed;     /* by decoder layer, its keys and values side by side */
    int64_t count, hidden, heads, dim, inner, reach, vocabulary;
    int64_t crossings, cross_heads, cross_dim; /* of the decoder: layers, and heads of their attention to the source */
    float epsilon;
} Source;

typedef struct {
    const Source *s;
    const float *qkv;          /* [length, queries | keys | values] */
    const int32_t *distance;   /* [length, length], of column from row, from 0 on; -1: not seen */
    int64_t length;
    float *scores, *out;       /* threads * length; [length, heads * dim] */
} SourceAttending;

/* Items are rows, head by head. */
INLINE void source_attending_share(const SourceAttending *t, int64_t first, int64_t last) {
    const Source *s = t->s;
    int64_t width = s->heads * s->dim;
    float *scores = t->scores + (in_team ? own_number() : 0) * t->length;
    for (int64_t item = first; item < last; item++) {
        int64_t h = item / t->length, r = item % t->length;
        const float *own = t->qkv + h * s->dim;
        attend_columns(s->dim, own + 3 * r * width, own + width, own + 2 * width, 3 * width, t->length,
                       s->bias + h * (2 * s->reach + 1), t->distance + r * t->length, 0, scores, t->out + r * width + h * s->dim);
    }
}

#define SOURCE(name, target)                                                                  \
    target static void source_attending_##name(const void *task, int64_t first, int64_t last) { \
        source_attending_share(task, first, last);                                            \
    }
SOURCE(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
SOURCE(avx2, __attribute__((target("avx2,fma"))))
SOURCE(avx512, __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma"))))
#endif

static Share source_chosen(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (kernels == &kernels_avx512) return source_attending_avx512;
    if (kernels == &kernels_avx2) return source_attending_avx2;
#endif
    return source_attending_plain;
}

/* Keys and values [slots, heads, columns, dim] of every decoder layer, in `slot`, of a source of `length` tokens.
 *
 * tokens: [length], read by the encoder; NULL where x [length, hidden] is its output already. seen: [length], real columns.
 * scratch: length * (hidden + the widest of 4 heads * dim, 2 inner and 2 cross heads * cross dim) floats; scores: threads *
 * length floats; distance: length * length. Returns 0 where a token is none; nothing is done then. */
int64_t layer_source(const Source *s, const int64_t *tokens, const uint8_t *seen, int64_t length, int64_t threads, int64_t slot,
                     int64_t columns, float *x, float *scratch, float *scores, int32_t *distance, float *const *keys,
                     float *const *values) {
    int64_t hidden = s->hidden, width = s->heads * s->dim, reach = s->reach, of_slot = s->cross_heads * s->cross_dim;
    float *normed = scratch, *wide = normed + length * hidden, *mixed = wide + 3 * length * width;
    for (int64_t r = 0; tokens && r < length; r++)
        if (tokens[r] < 0 || tokens[r] >= s->vocabulary) return 0;
    for (int64_t r = 0; tokens && r < length; r++) {
        memcpy(x + r * hidden, s->embedding + tokens[r] * hidden, hidden * sizeof *x);
        for (int64_t j = 0; j < length; j++) {
            int64_t far = j - r < -reach ? -reach : j - r > reach ? reach : j - r;
            distance[r * length + j] = seen[j] ? far + reach : -1;
        }
    }
    for (int64_t i = 0; tokens && i < s->count; i++) {
        const SourceLayer *l = s->layers + i;
        layer_norm(x, l->norm, s->epsilon, length, hidden, normed);
        layer_product(&l->qkv, normed, length, threads, 0, wide);
        SourceAttending t = {s, wide, distance, length, scores, mixed};
        spread(source_chosen(), &t, s->heads * length, threads, 2 * length * length * width);
        layer_product(&l->output, mixed, length, threads, 1, x);
        layer_norm(x, l->mlp_norm, s->epsilon, length, hidden, normed);
        dense(&l->up, &l->gate, &l->down, normed, length, threads, wide, x);
    }
    if (tokens) layer_norm(x, s->norm, s->epsilon, length, hidden, normed);
    for (int64_t i = 0; i < s->crossings; i++) {
        layer_product(s->crossed + i, tokens ? normed : x, length, threads, 0, wide);
        for (int64_t r = 0; r < length; r++)
            for (int64_t h = 0; h < s->cross_heads; h++) {
                int64_t at = ((slot * s->cross_heads + h) * columns + r) * s->cross_dim;
                const float *key = wide + 2 * r * of_slot + h * s->cross_dim;
                memcpy(keys[i] + at, key, s->cross_dim * sizeof *key);
                memcpy(values[i] + at, key + of_slot, s->cross_dim * sizeof *key);
            }
    }
    return 1;
}
