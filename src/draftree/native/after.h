/* What is left to do behind a pass: kept rows go to their places in the cache, and the rows that a
 * drafter attached give their likeliest tokens. Included by layers.c only. */

/* Of `count` stores [slots, heads, capacity, row bytes] the columns base + columns[i] of a slot, ascending and none before its
 * place, to base + first + i. */
void layer_keep(char *const *stores, int64_t count, int64_t heads, int64_t capacity, int64_t bytes, int64_t slot, int64_t base,
                int64_t first, const int64_t *columns, int64_t kept) {
    for (int64_t s = 0; s < count; s++)
        for (int64_t h = 0; h < heads; h++) {
            char *of_head = stores[s] + ((slot * heads + h) * capacity + base) * bytes;
            for (int64_t i = 0; i < kept; i++)
                if (columns[i] != first + i) memcpy(of_head + (first + i) * bytes, of_head + columns[i] * bytes, bytes);
        }
}

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

/* `choose_best` compiled for one processor. */
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

/* The one for this processor. */
static Choose chosen(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (kernels == &kernels_avx512) return choose_avx512;
    if (kernels == &kernels_avx2) return choose_avx2;
#endif
    return choose_plain;
}

/* The `best` likeliest tokens of the head behind each row places[i] of x [.., hidden], with their log-probabilities. A place
 * that is negative has none: token 0, -inf. The head takes `norm` of a row. work: rows * (hidden + outputs) floats. */
void layer_best(const Matrix *head, const float *norm, float epsilon, const float *x, const int64_t *places, int64_t rows,
                int64_t threads, int64_t best, float *work, int64_t *tokens, float *logp) {
    int64_t hidden = head->inputs, outputs = head->outputs, real = 0;
    float *scores = work + rows * hidden;
    Choose choose = chosen();
    for (int64_t i = 0; i < rows; i++)
        if (places[i] >= 0) layer_norm(x + places[i] * hidden, norm, epsilon, 1, hidden, work + real++ * hidden);
    layer_product(head, work, real, threads, 0, scores);
    for (int64_t i = 0; i < rows; i++, tokens += best, logp += best) {
        if (places[i] >= 0) {
            choose(scores, outputs, best, tokens, logp);
            scores += outputs;
            continue;
        }
        for (int64_t k = 0; k < best; k++) tokens[k] = 0, logp[k] = -INFINITY;
    }
}
