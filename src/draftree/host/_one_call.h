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

/* tokens, positions [batch * rows]; logits [batch * rows, outputs of the head]. The pass's cosine and sine are buffers [batch *
 * rows, dim] that are filled here; x and normed are buffers [batch * rows, hidden]. Returns 0 where a token or a position is
 * none; nothing is done then. */
int64_t layer_pass(const Whole *w, const Pass *p, const int64_t *tokens, const int64_t *positions, int64_t head_threads, float *x,
                   float *normed, float *logits) {
    int64_t rows = p->batch * p->rows, hidden = w->head->inputs, dim = w->layers[0]->dim;
    float *cosine = (float *)p->cosine, *sine = (float *)p->sine;
    for (int64_t i = 0; i < rows; i++)
        if (tokens[i] < 0 || tokens[i] >= w->vocabulary || positions[i] < 0 || positions[i] >= w->positions) return 0;
    for (int64_t i = 0; i < rows; i++) {
        memcpy(x + i * hidden, w->embedding + tokens[i] * hidden, hidden * sizeof *x);
        memcpy(cosine + i * dim, w->cosines + positions[i] * dim, dim * sizeof *cosine);
        memcpy(sine + i * dim, w->sines + positions[i] * dim, dim * sizeof *sine);
    }
    layer_run(w->layers, w->count, p, x, w->keys, w->values);
    layer_norm(x, w->norm, w->epsilon, rows, hidden, normed);
    layer_product(w->head, normed, rows, head_threads, 0, logits);
    return 1;
}
