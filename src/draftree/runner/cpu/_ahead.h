/* A small model runs ahead of a text on its own: one row a request and step, each fed with the best token of the step
 * before. Drafting by it is a handful of such steps, and a call for each would take longer than the steps. Included by
 * _layer.c only. */

typedef struct {
    const Layer *const *layers;
    float *const *keys, *const *values; /* by layer, as layer_run takes them */
    int64_t count;
    const float *embedding, *norm;  /* [vocabulary, hidden]; of the last layer's output */
    const float *cosines, *sines;   /* [positions, dim] */
    const Matrix *head;
    const int64_t *ends;            /* tokens behind which nothing follows */
    int64_t end_count, last_position, best;
    float epsilon, least;           /* of the norm; log-probability under which paths are not followed */
    float each;                     /* log-probability under which a single token is not */
    const Cross *cross;             /* the layers of an encoder-decoder, in place of `layers`, or NULL */
} Ahead;

/* The `best` likeliest of scores [count], likeliest first, with their log-probabilities. */
INLINE void choose_best(const float *scores, int64_t count, int64_t best, int64_t *tokens, float *logp) {
    float top[LANES], sums[LANES] = {0}, sum = 0;
    for (int64_t k = 0; k < best; k++) tokens[k] = 0, logp[k] = -3e38f;
    for (int k = 0; k < LANES; k++) top[k] = -3e38f;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int k = 0; k < LANES; k++) top[k] = scores[i + k] > top[k] ? scores[i + k] : top[k];
    for (; i < count; i++) top[0] = scores[i] > top[0] ? scores[i] : top[0];
    for (int k = 1; k < LANES; k++) top[0] = top[k] > top[0] ? top[k] : top[0];
    for (i = 0; i + LANES <= count; i += LANES)
        for (int k = 0; k < LANES; k++) sums[k] += exponential(scores[i + k] - top[0]);
    for (; i < count; i++) sums[0] += exponential(scores[i] - top[0]);
    for (int k = 0; k < LANES; k++) sum += sums[k];
    for (i = 0; i < count; i++) {
        if (!(scores[i] > logp[best - 1])) continue;
        int64_t k = best - 1;
        for (; k > 0 && scores[i] > logp[k - 1]; k--) tokens[k] = tokens[k - 1], logp[k] = logp[k - 1];
        tokens[k] = i, logp[k] = scores[i];
    }
    float norm = top[0] + logf(sum);
    for (int64_t k = 0; k < best; k++) logp[k] -= norm;
}

typedef void (*Choose)(const float *, int64_t, int64_t, int64_t *, float *);
#define CHOOSE(name, target)                                                                                       \
    target static void choose_##name(const float *scores, int64_t count, int64_t best, int64_t *tokens, float *logp) { \
        choose_best(scores, count, best, tokens, logp);                                                            \
    }
CHOOSE(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
CHOOSE(avx2, __attribute__((target("avx2,fma"))))
CHOOSE(avx512, __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma"))))
#endif

static Choose chosen(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (kernels == &kernels_avx512) return choose_avx512;
    if (kernels == &kernels_avx2) return choose_avx2;
#endif
    return choose_plain;
}

/* Up to `steps` steps; returns how many were made. The rows lie behind the context, one column a step.
 *
 * p: a pass of one row a request; its cosine and sine are buffers [batch, dim] that are filled here, its starts move on.
 * positions: [batch], of the first row. given: [batch, steps], tokens to be read, ahead of those the model chooses (-1).
 * paths: [batch], log-probability of what was chosen so far; -inf for requests that do not take part.
 * work: batch * (2 * hidden + vocabulary) floats. tokens, logp: [steps, batch, best], what may follow each row. */
int64_t layer_ahead(const Ahead *a, const Pass *p, const int64_t *positions, const int64_t *given, int64_t steps, float *paths,
                    float *work, int64_t *tokens, float *logp) {
    int64_t batch = p->batch, hidden = a->head->inputs, dim = a->cross ? 0 : a->layers[0]->dim, vocabulary = a->head->outputs;
    float *x = work, *normed = x + batch * hidden, *scores = normed + batch * hidden;
    float *cosine = (float *)p->cosine, *sine = (float *)p->sine;
    int64_t *starts = (int64_t *)p->starts;
    Choose choose = chosen();
    for (int64_t s = 0; s < steps;) {
        for (int64_t b = 0; b < batch; b++) {
            int64_t token = given[b * steps + s], position = positions[b] + s;
            if (token < 0) token = s ? tokens[((s - 1) * batch + b) * a->best] : 0;
            if (position > a->last_position) position = a->last_position;
            memcpy(x + b * hidden, a->embedding + token * hidden, hidden * sizeof *x);
            if (a->cross) continue; /* positions are distances there */
            memcpy(cosine + b * dim, a->cosines + position * dim, dim * sizeof *cosine);
            memcpy(sine + b * dim, a->sines + position * dim, dim * sizeof *sine);
        }
        if (a->cross)
            layer_cross(a->cross, p, x, a->keys, a->values);
        else
            layer_run(a->layers, a->count, p, x, a->keys, a->values);
        layer_norm(x, a->norm, a->epsilon, batch, hidden, normed);
        layer_product(a->head, normed, batch, p->threads, 0, scores);
        int go_on = 0;
        for (int64_t b = 0; b < batch; b++) {
            int64_t at = (s * batch + b) * a->best;
            choose(scores + b * vocabulary, vocabulary, a->best, tokens + at, logp + at);
            if (s + 1 < steps && given[b * steps + s + 1] >= 0) {
                go_on |= paths[b] > -INFINITY;
                continue;
            }
            paths[b] = logp[at] >= a->each ? paths[b] + logp[at] : -INFINITY;
            for (int64_t i = 0; i < a->end_count; i++)
                if (tokens[at] == a->ends[i]) paths[b] = -INFINITY;
            go_on |= paths[b] > -INFINITY && paths[b] >= a->least; /* `least` may be -inf as well */
        }
        for (int64_t b = 0; b < batch; b++) starts[b]++;
        s++;
        if (!go_on) return s;
    }
    return steps;
}
