/* What is left to do behind a pass: kept rows go to their places in the cache, and rows of a drafter's own are asked for the
 * tokens that they hold likeliest. Included by _layer.c only. */

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
