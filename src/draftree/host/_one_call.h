/* A whole pass of a plain model: embedding, layers, norm and head. A step of a small model takes less time than the calls that
 * it would be put together from. Included by _layer.c only. */

typedef struct {
    const Layer *const *layers;
    float *const *keys, *const *values; /* by layer, as layer_run takes them */
    int64_t count;
    const float *embedding, *norm; /* [vocabulary, hidden]; of the last layer's output */
    const float *cosines, *sines;  /* [positions, dim] */
    const Matrix *head;
    int64_t vocabulary, positions;
    float epsilon; /* of the norm */
} Whole;

/* tokens, positions [batch, rows]; logits [batch, rows, outputs of the head]; where requests have fewer rows, what is behind
 * them is not read and not written. The pass's cosine and sine are buffers of `dim` a row that are filled here, x and normed of
 * `hidden`, spare of `outputs` (read only where requests have fewer rows). Returns 0 where a token or a position is none;
 * nothing is done then. */
int64_t layer_pass(const Whole *w, const Pass *p, const int64_t *tokens, const int64_t *positions, int64_t head_threads, float *x,
                   float *normed, float *spare, float *logits) {
    int64_t rows = offset_of(p, p->batch), hidden = w->head->inputs, outputs = w->head->outputs, dim = w->layers[0]->dim;
    float *cosine = (float *)p->cosine, *sine = (float *)p->sine;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0, n = rows_of(p, b), from = b * p->rows; i < n; i++, from++)
            if (tokens[from] < 0 || tokens[from] >= w->vocabulary || positions[from] < 0 || positions[from] >= w->positions) return 0;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0, n = rows_of(p, b), from = b * p->rows, to = offset_of(p, b); i < n; i++, from++, to++) {
            memcpy(x + to * hidden, w->embedding + tokens[from] * hidden, hidden * sizeof *x);
            memcpy(cosine + to * dim, w->cosines + positions[from] * dim, dim * sizeof *cosine);
            memcpy(sine + to * dim, w->sines + positions[from] * dim, dim * sizeof *sine);
        }
    layer_run(w->layers, w->count, p, x, w->keys, w->values);
    layer_norm(x, w->norm, w->epsilon, rows, hidden, normed);
    layer_product(w->head, normed, rows, head_threads, 0, p->counts ? spare : logits);
    for (int64_t b = 0; p->counts && b < p->batch; b++)
        memcpy(logits + b * p->rows * outputs, spare + offset_of(p, b) * outputs, rows_of(p, b) * outputs * sizeof *logits);
    return 1;
}
