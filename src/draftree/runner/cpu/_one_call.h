/* A whole pass: embedding, layers, norm and head, and rows that a drafter attaches on the way. A step of a small model takes
 * less time than the calls that it would be put together from. Included by _layer.c only. */

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

/* Rows made of others by a matrix, which join behind `layer` layers. */
typedef struct {
    int64_t layer;
    const Matrix *matrix;   /* from hidden to steps * hidden outputs: each source makes one row a step */
    int64_t steps, sources; /* of each request; the rows stand step by step, in the order of their sources */
    const int64_t *source;  /* [batch, sources], rows of the request; NULL for its first ones */
    const uint8_t *visible; /* [batch, rows, rows] of all rows from here on */
} Join;

typedef struct {
    const int64_t *tokens, *positions; /* [batch, rows], [batch, last] */
    const float *embeddings;           /* [batch, given, hidden], what the last rows that enter are in place of their tokens */
    int64_t given, last, wanted;       /* rows of a request: such; in the end; the first ones, which get logits */
    int64_t joins, head_threads;
    const Join *join;                  /* ascending by layer */
} Entry;

/* The angles of the pass's rows, in its buffers. */
static void turn_rows(const Whole *w, const Pass *p, const Entry *e) {
    int64_t dim = w->layers[0]->dim;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0, n = rows_of(p, b), to = offset_of(p, b); i < n; i++, to++) {
            int64_t position = e->positions[b * e->last + i];
            memcpy((float *)p->cosine + to * dim, w->cosines + position * dim, dim * sizeof(float));
            memcpy((float *)p->sine + to * dim, w->sines + position * dim, dim * sizeof(float));
        }
}

/* New rows behind those of each request: x [batch, p->rows, hidden] becomes [batch, p->rows + sources * steps, hidden]. `from`
 * and `made` hold the sources, and what is made of them. */
static void join_rows(Pass *p, const Join *j, int64_t hidden, float *x, float *from, float *made) {
    int64_t rows = p->rows, more = j->sources * j->steps, size = hidden * sizeof(float);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0; i < j->sources; i++) {
            int64_t row = j->source ? j->source[b * j->sources + i] : i;
            memcpy(from + (b * j->sources + i) * hidden, x + (b * rows + row) * hidden, size);
        }
    layer_product(j->matrix, from, p->batch * j->sources, p->threads, 0, made);
    for (int64_t b = p->batch - 1; b >= 0; b--) { /* from the last on, as requests move apart */
        float *to = x + b * (rows + more) * hidden;
        if (b) memmove(to, x + b * rows * hidden, rows * size);
        for (int64_t s = 0; s < j->steps; s++)
            for (int64_t i = 0; i < j->sources; i++)
                memcpy(to + (rows + s * j->sources + i) * hidden, made + ((b * j->sources + i) * j->steps + s) * hidden, size);
    }
    p->rows = rows + more;
    p->visible = j->visible;
    p->prefix_rows = 0;
}

/* x becomes the last layer's output [batch, last, hidden], logits are [batch, wanted, outputs of the head]. Where requests have
 * fewer rows, what is behind them is not read and not written; nothing joins then, and all rows are wanted. The pass's cosine
 * and sine are buffers of `dim` a row that are filled here, x and normed of `hidden`, spare of `outputs` (read only where
 * requests have fewer rows). `work` holds the sources of joins and what is made of them. Returns 0 where a token or a position
 * is none; nothing is done then. */
int64_t layer_pass(const Whole *w, const Pass *given, const Entry *e, float *x, float *normed, float *spare, float *work,
                   float *logits) {
    Pass p = *given;
    int64_t hidden = w->head->inputs, outputs = w->head->outputs, done = 0;
    for (int64_t b = 0; b < p.batch; b++) {
        int64_t n = rows_of(&p, b), last = p.counts ? n : e->last;
        for (int64_t i = 0; i < n - e->given; i++)
            if (e->tokens[b * p.rows + i] < 0 || e->tokens[b * p.rows + i] >= w->vocabulary) return 0;
        for (int64_t i = 0; i < last; i++)
            if (e->positions[b * e->last + i] < 0 || e->positions[b * e->last + i] >= w->positions) return 0;
    }
    for (int64_t b = 0; b < p.batch; b++) {
        int64_t n = rows_of(&p, b), to = offset_of(&p, b) * hidden;
        for (int64_t i = 0; i < n - e->given; i++)
            memcpy(x + to + i * hidden, w->embedding + e->tokens[b * p.rows + i] * hidden, hidden * sizeof *x);
        if (e->given) memcpy(x + to + (n - e->given) * hidden, e->embeddings + b * e->given * hidden, e->given * hidden * sizeof *x);
    }
    turn_rows(w, &p, e);
    for (int64_t i = 0; i < e->joins; i++) {
        const Join *j = e->join + i;
        layer_run(w->layers + done, j->layer - done, &p, x, w->keys + done, w->values + done);
        done = j->layer;
        join_rows(&p, j, hidden, x, work, work + p.batch * j->sources * hidden);
        turn_rows(w, &p, e);
    }
    layer_run(w->layers + done, w->count - done, &p, x, w->keys + done, w->values + done);
    int64_t rows = offset_of(&p, p.batch), wanted = p.counts ? rows : p.batch * e->wanted;
    if (wanted == rows)
        layer_norm(x, w->norm, w->epsilon, rows, hidden, normed);
    else
        for (int64_t b = 0; b < p.batch; b++)
            layer_norm(x + b * p.rows * hidden, w->norm, w->epsilon, e->wanted, hidden, normed + b * e->wanted * hidden);
    layer_product(w->head, normed, wanted, e->head_threads, 0, p.counts ? spare : logits);
    for (int64_t b = 0; p.counts && b < p.batch; b++)
        memcpy(logits + b * p.rows * outputs, spare + offset_of(&p, b) * outputs, rows_of(&p, b) * outputs * sizeof *logits);
    return 1;
}
