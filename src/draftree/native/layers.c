/* Decoder layers on a CPU, several of them in one call. What else a step of a small model consists of is overhead of tensor
 * operations. Plain C behind ctypes; eager/layer.py does the same in tensor operations, and tests compare them. All tensors are
 * contiguous float32 unless strides are given. What depends on the kind of processor is in rows.h and the files kernels_*.c. */
#include <time.h>

#include "kernels.h"

#define ABI 31 /* raised when a signature changes; draftree.native refuses a library of another number */
#define WORTH_A_THREAD 32768 /* multiplications */
#define HELD_UP 1000000 /* nanoseconds; a share on several threads that takes so much longer than one thread would has waited */
#define A_PASS 64 /* shares, about */
#define PROMPT_ROWS 32 /* of a prompt, behind which a recurrence's state moves */

/* ---------------------------------------------------------------- threads: those of OpenMP that torch already has */

typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Number)(void);
static Parallel parallel;
static Number own_number, team_size;
static __thread int in_team; /* whether this thread works on a share among several */
static __thread int alone; /* how many shares this thread does by itself, since others have kept it waiting */

int64_t thread_number(void) { return in_team ? own_number() : 0; }

static Kernels kernels; /* of this processor */

/* How so many rows are laid for a matrix, and multiplied: as its weights are, unless the processor has an instruction for them.
 * Only weights of 8 bits, whose sums are exact, may be multiplied otherwise in a single row, which is faster in vectors. */
static int kind_of(const Matrix *m, int64_t rows) {
    if (BLOCKED(m->kind)) return kernels.in_blocks ? BLOCKS : FLOAT32;
    if (m->kind == BFLOAT16 && kernels.in_halves && FITS_TILES(m)) return m->rounds ? TILES : FLOAT_TILES;
    if (m->kind == BFLOAT16 && m->rounds && kernels.in_pairs) return DOTS;
    if (m->kind == INT8 && kernels.in_parts && rows > 1 && FITS_TILES(m) && fits_bytes(m)) return BYTE_TILES;
    if (m->kind == INT8 && kernels.in_bytes && fits_bytes(m)) return BYTES;
    return (int)m->kind;
}

/* Called before all others; the functions are OpenMP's, or NULL for one thread. `widest`: the most floats of a register: 4, 8 or
   16 of a vector, 256 of a matrix. Returns ABI. */
int32_t layer_start(void *parallel_, void *own_number_, void *team_size_, int32_t widest) {
    kernels = kernels_plain();
    parallel = (Parallel)parallel_;
    own_number = (Number)own_number_;
    team_size = (Number)team_size_;
#if X86
    if (widest >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels = kernels_avx2();
    if (widest >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        kernels = kernels_avx512(widest >= 256);
#endif
    return ABI;
}

/* Work that is divided among threads. */
typedef struct {
    Share share;
    const void *task;
    int64_t items;
} Spread;

/* What each thread of the team runs. */
static void spread_body(void *data) {
    const Spread *s = data;
    int64_t own = own_number(), team = team_size();
    in_team = 1;
    s->share(s->task, s->items * own / team, s->items * (own + 1) / team);
    in_team = 0;
}

/* Nanoseconds of a clock that never goes back. */
static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Divides a task among threads where it is worth it. */
static void spread(Share share, const void *task, int64_t items, int64_t threads, int64_t multiplications) {
    if (!parallel || threads < 2 || items < 2 || multiplications < WORTH_A_THREAD || alone) {
        alone -= alone > 0;
        share(task, 0, items);
        return;
    }
    Spread s = {share, task, items};
    int64_t begin = nanoseconds();
    parallel(spread_body, &s, (unsigned)threads, 0);
    /* Where another process has a core, every one of a pass's shares would wait for a time slice. */
    if (nanoseconds() - begin > HELD_UP + multiplications / 2) alone = A_PASS;
}

/* Panels of LANES outputs. */
static int64_t panels_of(const Matrix *m) { return (m->outputs + LANES - 1) / LANES; }

/* ---------------------------------------------------------------- what Python calls */

/* out = x, each row scaled to a mean square of 1, times weight. */
void layer_norm(const float *x, const float *weight, float epsilon, int64_t rows, int64_t width, int rounding, float *out) {
    kernels.norm(x, weight, epsilon, rows, width, 0, rounding, out);
}

/* The `count` likeliest tokens of logits [rows, width], and their log-probabilities, each [rows, count]; see top_rows. */
void layer_top(const float *logits, int64_t rows, int64_t width, int64_t count, int64_t *tokens, float *logp) {
    kernels.top(logits, rows, width, count, tokens, logp);
}

/* x [rows, inputs of m] as its product reads them: as it lies, or in `scratch`, which has room for half as many floats more. */
static const float *laid(const Matrix *m, int kind, const float *x, int64_t rows, int64_t threads, float *scratch) {
    if (rows == 1 && (kind == m->kind || kind == FLOAT32)) return x;
    Laying t = {x, rows, m->inputs, scratch, parts_of(kind, m->rounds)};
    int64_t most = kind == BLOCKS ? BLOCK_ROWS : kind >= TILES ? TILE_ROWS : kernels.most;
    Share laying = kind == BLOCKS       ? kernels.in_blocks
                   : kind == DOTS       ? kernels.in_pairs
                   : kind == BYTES      ? kernels.in_bytes
                   : kind == BYTE_TILES ? kernels.in_parts
                   : kind >= TILES      ? kernels.in_halves
                                        : kernels.laying;
    spread(laying, &t, tiles_of(rows, most / t.parts), threads, rows * m->inputs);
    return scratch;
}

/* Panels [first, last) of matrices that lie beside each other. */
static void product_beside(const void *task, int64_t first, int64_t last) {
    Product t = *(const Product *)task;
    for (; t.m; t.out += t.m->outputs, t.m = t.m->beside) {
        int64_t count = panels_of(t.m);
        if (first < count && last > 0) kernels.product(&t, first > 0 ? first : 0, last < count ? last : count);
        first -= count, last -= count;
    }
}

/* out [rows, stride of m] = x [rows, inputs] m and what lies beside it, or added to it; scratch: rows * inputs * 3 / 2 floats. */
void layer_product(const Matrix *m, const float *x, int64_t rows, int64_t threads, int add, float *scratch, float *out) {
    int kind = kind_of(m, rows);
    int64_t panels = 0;
    for (const Matrix *each = m; each; each = each->beside) panels += panels_of(each);
    Product t = {m, kind, laid(m, kind, x, rows, threads, scratch), rows, add, out};
    spread(m->beside ? product_beside : kernels.product, &t, panels, threads, rows * m->inputs * m->stride);
}

/* Rows of weights in blocks, [outputs, row_bytes] as a file has them, to panels. */
typedef struct {
    int kind;
    const uint8_t *rows;
    int64_t row_bytes, inputs, outputs;
    uint8_t *packed;
} Packing;

static void packing_share(const void *task, int64_t first, int64_t last) {
    const Packing *t = task;
    for (int64_t panel = first; panel < last; panel++) {
        int64_t begin = panel * LANES, count = t->outputs - begin < LANES ? t->outputs - begin : LANES;
        pack_any_panel(t->kind, t->rows + begin * t->row_bytes, t->row_bytes, t->inputs, count,
                   t->packed + panel * panel_bytes(t->kind, t->inputs));
    }
}

void blocks_pack(int64_t kind, const uint8_t *rows, int64_t row_bytes, int64_t inputs, int64_t outputs, int64_t threads, uint8_t *packed) {
    Packing t = {(int)kind, rows, row_bytes, inputs, outputs, packed};
    spread(packing_share, &t, (outputs + LANES - 1) / LANES, threads, inputs * outputs);
}

/* Weights of `count` outputs as floats, [count, inputs]: of those that `outputs` lists. */
void blocks_floats(const Matrix *m, const int64_t *outputs, int64_t count, float *out) {
    int kind = (int)m->kind;
    float numbers[UNIT * LANES];
    for (int64_t n = 0; n < count; n++, out += m->inputs) {
        const uint8_t *panel = (const uint8_t *)m->packed + outputs[n] / LANES * panel_bytes(kind, m->inputs);
        for (int64_t u = 0; u < m->inputs / UNIT; u++) {
            expand_any_unit(kind, panel, u, numbers);
            for (int64_t i = 0; i < UNIT; i++) out[u * UNIT + i] = numbers[i * LANES + outputs[n] % LANES];
        }
    }
}

/* Bytes of a panel of that kind. */
int64_t blocks_group(int64_t kind, int64_t inputs) { return panel_bytes((int)kind, inputs); }

/* The first half of an MLP, see Gating; x [rows, inputs], of as many rows as `gated` and then `raised`. */
static void gate_rows(const Matrix *gate, const Matrix *up, const float *x, int64_t rows, const Pass *p, int gelu, float *gated) {
    float *raised = gated + rows * gate->outputs;
    int kind = kind_of(gate, rows), together = kind == kind_of(up, rows); /* else rows are laid for each */
    if (!together) {
        layer_product(gate, x, rows, p->threads, 0, p->laid, gated);
        layer_product(up, x, rows, p->threads, 0, p->laid, raised);
    }
    Gating t = {gate, up, kind, together ? laid(gate, kind, x, rows, p->threads, p->laid) : 0, rows, gelu, gated, raised};
    spread(kernels.gating, &t, panels_of(gate), p->threads, 2 * rows * gate->inputs * gate->outputs);
}

/* From hidden states x [batch * rows, hidden] to rotated queries, and keys and values in the cache. */
static void layer_enter(const Layer *l, const Pass *p, const float *x, float *query, float *keys, float *values) {
    int64_t rows = offset_of(p, p->batch);
    float *normed = p->scratch, *qkv = normed + rows * l->hidden;
    if (l->input_norm) layer_norm(x, l->input_norm, l->input_epsilon, rows, l->hidden, l->rounding, normed);
    layer_product(&l->qkv, l->input_norm ? normed : p->entry ? p->entry : x, rows, p->threads, 0, p->laid, qkv);
    kernels.rotate(l, p, qkv, query, keys, values);
}

/* x += in m, through a norm where there is one; `between` [rows, outputs] is written then. */
static void add_product(const Layer *l, const Pass *p, int64_t rows, const Matrix *m, const float *in, const float *norm,
                        float *between, float *x) {
    layer_product(m, in, rows, p->threads, !norm, p->laid, norm ? between : x);
    if (norm) kernels.norm(between, norm, l->behind_epsilon, rows, l->hidden, 1, l->rounding, x);
}

/* From the attention's result [batch * rows, heads * dim] behind the normed rows in the scratch, through output projection and
 * MLP; both are added to x [batch * rows, hidden]. Rows before `first` stay as they are. */
static void leave(const Layer *l, const Pass *p, int64_t first, float *x) {
    int64_t all = offset_of(p, p->batch), rows = all - first, queries = (int64_t)l->kv_heads * l->groups * l->dim;
    float *normed = p->scratch, *gathered = normed + all * l->hidden, *attended = gathered + first * queries;
    x += first * l->hidden;
    add_product(l, p, rows, &l->output, attended, l->behind_attention, normed, x);
    if (l->post_norm) layer_norm(x, l->post_norm, l->post_epsilon, rows, l->hidden, l->rounding, normed);
    gate_rows(&l->gate, &l->up, l->post_norm ? normed : x, rows, p, l->gelu, gathered);
    add_product(l, p, rows, &l->down, gathered, l->behind_mlp, normed, x);
}

/* A layer's recurrence in the place of attention. */
static void layer_recur(const Layer *l, const Pass *p, const States *s, const float *x) {
    int64_t rows = offset_of(p, p->batch), heads = (int64_t)l->kv_heads * l->groups, width = l->delta->width;
    float *normed = p->scratch, *out = normed + rows * l->hidden, *projected = s->inputs ? s->inputs : out + rows * heads * l->dim;
    layer_norm(x, l->input_norm, l->input_epsilon, rows, l->hidden, l->rounding, normed);
    layer_product(&l->qkv, normed, rows, p->threads, 0, p->laid, projected);
    int64_t block = s->next_conv && p->rows > PROMPT_ROWS ? PROMPT_ROWS : p->rows;
    Recurring t = {l, p, s, projected, out, block, recurrent_floats(block, width, l->dim)};
    spread(kernels.recurring, &t, p->batch * heads, p->threads, 2 * rows * heads * (width + l->delta->kernel) * l->dim);
    if (!s->next_conv) return;
    int64_t before = l->delta->kernel - 1, channels = l->delta->channels, first = before > rows ? before - rows : 0;
    const float *kept = s->conv + p->first * before * channels;
    for (int64_t i = 0; i < before; i++)
        memcpy(s->next_conv + i * channels, i < first ? kept + (i + rows) * channels : projected + (i + rows - before) * l->qkv.stride,
               channels * sizeof *kept);
}

/* Moves the states of recurrent layers of one shape, see Moving. */
void states_move(const Moving *t, int64_t count, int64_t threads) {
    const Layer *l = t->layers[0];
    int64_t heads = (int64_t)l->kv_heads * l->groups, rows = t->begins[t->batch];
    spread(kernels.moving, t, count * t->batch * heads, threads, count * heads * rows * (l->delta->width + 1) * l->dim);
}

/* `count` layers one after the other on x [batch * rows, hidden], in place. The last one makes no more than keys and values of
 * the first `unread` rows of a batch of one. A recurrent layer has `states` and no keys and values. */
void layer_run(const Layer *const *layers, int64_t count, const Pass *p, int64_t unread, float *x, float *const *keys,
               float *const *values, const States *const *states) {
    int64_t rows = offset_of(p, p->batch), longest = 0;
    for (int64_t b = 0; b < p->batch; b++) longest = p->starts[b] > longest ? p->starts[b] : longest;
    for (int64_t i = 0; i < count; i++) {
        const Layer *l = layers[i];
        int64_t heads = (int64_t)l->kv_heads * l->groups, tiles = (l->groups * p->rows + LANES - 1) / LANES;
        int64_t first = i == count - 1 ? unread : 0;
        if (l->delta) {
            layer_recur(l, p, states[i], x);
            leave(l, p, first, x);
            continue;
        }
        float *gathered = p->scratch + rows * l->hidden, *query = gathered + rows * l->qkv.stride;
        layer_enter(l, p, x, query, keys[i], values[i]);
        Attending t = {l, p, query, keys[i], values[i], gathered, first, tiles, (2 * l->dim + longest + p->rows) * LANES};
        int64_t work = rows * heads * (longest + p->rows) * l->dim;
        spread(kernels.attending, &t, p->batch * l->kv_heads * tiles, p->threads, work);
        leave(l, p, first, x);
    }
}

#include "t5.h"
