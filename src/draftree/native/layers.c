/* Decoder layers on a CPU, several of them in one call. What else a step of a small model consists of is overhead of tensor
 * operations. Plain C behind ctypes; eager/layer.py does the same in tensor operations, and tests compare them. All tensors are contiguous float32 unless strides are given. */
#include <time.h>

#include "products.h"

#include "amx.h"

#include "attention.h"
#include "checksum.h"

#define ABI 22 /* raised when a signature changes; draftree.native refuses a library of another number */
#define WORTH_A_THREAD 32768 /* multiplications */
#define HELD_UP 1000000 /* nanoseconds; a share on several threads that takes so much longer than one thread would has waited */
#define A_PASS 64 /* shares, about */
#define NO_ATTENTION 1 /* of what a layer skips */
#define NO_MLP 2
/* Where numbers are rounded to bfloat16, as a model of that type does in its `forward`; products round where their matrix says so. */
#define ROUNDS 1 /* the results of norms, turns, activations, attention and sums */
#define NORMS_ROUND_TWICE 2 /* also before they are multiplied by the weight */
#define TURNS_ROUND_ONCE 4 /* only the sum of a turn's two products, not these themselves: where angles are float32 */

/* The weights of one decoder layer; all but matrices in float32. */
typedef struct {
    Matrix qkv, output, gate, up, down;
    /* Norms before attention and MLP, on queries and keys, behind attention and MLP; NULL where there is none. */
    const float *input_norm, *post_norm, *query_norm, *key_norm, *behind_attention, *behind_mlp;
    const int32_t *partner; /* [dim], entries of a head that turn with each other; NULL where its halves do */
    float input_epsilon, post_epsilon, head_epsilon, behind_epsilon;
    int32_t hidden, kv_heads, groups, dim;
    int32_t wide; /* the norms on queries and keys take all heads at once */
    int32_t gelu; /* the MLP's activation is GELU by tanh; else SiLU */
    int32_t skips; /* NO_ATTENTION: no keys and values are written then; NO_MLP */
    int32_t rounding; /* 0 in float32; else ROUNDS, and what of the others holds */
    int32_t window; /* positions that a row sees back, its own included; 0 for all */
    float scaling; /* of attention scores */
    float cap; /* scores are bent to stay within -cap .. cap; 0 where they are not */
} Layer;

/* What is the same for all layers of a pass. */
typedef struct {
    int64_t batch, rows;           /* rows per request */
    int64_t first, capacity;       /* first slot; columns of a slot */
    const int64_t *starts;         /* per request, the column its rows begin at */
    const float *cosine, *sine;    /* [batch, rows, dim]; signs of the turn in the sine */
    float *scratch;                /* batch * rows * (hidden + the wider of qkv and gate and up + queries) floats */
    int64_t threads;
    int64_t prefix;                /* columns of the deep prefix */
    int64_t back;                  /* columns of the context that `visible` covers as well */
    const uint8_t *visible;        /* [batch, rows, back + rows] */
    const uint8_t *prefix_rows;    /* [batch, rows], which see the deep prefix, or NULL for none */
    float *scores;                 /* threads * (2 * dim + longest columns) * LANES floats, aligned to LANES */
    const int64_t *counts;         /* [batch], rows of each request, where some have fewer; NULL where all have `rows` */
    const int64_t *offsets;        /* [batch + 1], the sums of those before: rows lie one behind the other then */
    int64_t exact_angles;          /* whether angles are float32 in a bfloat16 model, too */
    float *laid;                   /* scratch of products: batch * rows * (the most inputs of a matrix) * 3 / 2 floats */
    const int64_t *positions;      /* [batch, rows] */
} Pass;

/* Rows of a request, and where they begin. */
static int64_t rows_of(const Pass *p, int64_t b) { return p->counts ? p->counts[b] : p->rows; }
static int64_t offset_of(const Pass *p, int64_t b) { return p->counts ? p->offsets[b] : b * p->rows; }

/* ---------------------------------------------------------------- threads: those of OpenMP that torch already has */

typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Number)(void);
static Parallel parallel;
static Number own_number, team_size;
static __thread int in_team; /* whether this thread works on a share among several */
static __thread int alone; /* how many shares this thread does by itself, since others have kept it waiting */

/* ---------------------------------------------------------------- rows, compiled once per instruction set */

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

/* Infinities and what is no number become 0: a row that does not see a column gives it the weight 0, and 0 times those is no
 * number. (Bits are compared, as compilers may take it that numbers are finite.) */
INLINE void only_finite(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        x[i] = (bits & 0x7f800000) == 0x7f800000 ? 0.0f : x[i];
    }
}

/* qkv [batch, rows, queries | keys | values] to query [batch, kv heads, groups, rows, dim], and to keys and values
 * [slots, kv heads, capacity, dim] behind each slot's context. */
INLINE void rotate_rows(const Layer *l, const Pass *p, const float *qkv, float *query, float *keys, float *values) {
    int64_t dim = l->dim, kv_heads = l->kv_heads, heads = kv_heads * l->groups;
    int rounding = l->rounding | (p->exact_angles ? TURNS_ROUND_ONCE : 0);
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t i = 0, n = rows_of(p, b), at = offset_of(p, b); i < n; i++, qkv += (heads + 2 * kv_heads) * dim) {
            const float *cosine = p->cosine + (at + i) * dim, *sine = p->sine + (at + i) * dim;
            const float *key = qkv + heads * dim;
            float of_query = 0, of_key = 0;
            if (l->query_norm && l->wide) {
                of_query = inverse_root_mean_square(qkv, heads * dim, l->head_epsilon);
                of_key = inverse_root_mean_square(key, kv_heads * dim, l->head_epsilon);
            }
            for (int64_t h = 0; h < heads; h++) {
                const float *weight = l->query_norm ? l->query_norm + (l->wide ? h * dim : 0) : 0;
                if (weight && !l->wide) of_query = inverse_root_mean_square(qkv + h * dim, dim, l->head_epsilon);
                rotate_head(qkv + h * dim, weight, of_query, l->partner, cosine, sine, dim, rounding,
                            query + (at * heads + h * n + i) * dim);
            }
            for (int64_t h = 0; h < kv_heads; h++) {
                int64_t to = (((p->first + b) * kv_heads + h) * p->capacity + p->starts[b] + i) * dim;
                const float *weight = l->key_norm ? l->key_norm + (l->wide ? h * dim : 0) : 0;
                if (weight && !l->wide) of_key = inverse_root_mean_square(key + h * dim, dim, l->head_epsilon);
                rotate_head(key + h * dim, weight, of_key, l->partner, cosine, sine, dim, rounding, keys + to);
                memcpy(values + to, qkv + (heads + kv_heads + h) * dim, dim * sizeof *values);
                only_finite(keys + to, dim);
                only_finite(values + to, dim);
            }
        }
}

/* ---------------------------------------------------------------- shares of work that threads take */

/* The first half of an MLP: the activated gate times what goes up. */
typedef struct {
    const Matrix *gate, *up;
    const float *x; /* as Laying leaves them; NULL where products are made already */
    int64_t rows;
    int gelu;
    float *gated, *raised; /* [rows, outputs] each; the result is in `gated` */
} Gating;

/* The attention of one layer. */
typedef struct {
    const Layer *l;
    const Pass *p;
    const float *query, *keys, *values; /* as rotate_rows leaves them */
    float *out;                         /* [batch, rows, heads * dim] */
    int64_t first;                      /* rows before this one may be left out */
    int64_t tiles, scratch;             /* LANES query rows each; floats of scratch a thread */
} Attending;

/* The part of an attention that one thread does. */
INLINE void attending_share(const Attending *t, int64_t first, int64_t last, int vector) {
    const Layer *l = t->l;
    const Pass *p = t->p;
    float *scratch = p->scores + (in_team ? own_number() : 0) * t->scratch;
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
            .out = t->out + (at * l->kv_heads + head) * l->groups * dim,
            .stride = (int64_t)l->kv_heads * l->groups * dim,
        };
        attend_lanes(&a, from, vector, scratch);
    }
}

typedef void (*Share)(const void *task, int64_t first, int64_t last); /* panels or tiles [first, last) of a task */

/* The functions for one kind of processor. */
typedef struct {
    Share laying, product, gating, attending, checksum;
    Share in_pairs, in_bytes, in_halves, in_parts; /* as laying, for DOTS, BYTES, TILES and FLOAT_TILES, BYTE_TILES; or NULL */
    int64_t most; /* rows of a tile */
    void (*norm)(const float *, const float *, float, int64_t, int64_t, int, int, float *);
    void (*rotate)(const Layer *, const Pass *, const float *, float *, float *, float *);
} Kernels;

/* The part of an MLP's first half that one thread does. */
INLINE void gating_share(const Gating *t, Share product, int64_t first, int64_t last) {
    Product gate = {t->gate, t->x, t->rows, 0, t->gated}, up = {t->up, t->x, t->rows, 0, t->raised};
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

#define KERNELS(name, target, vector)                                                                             \
    target static void product_##name(const void *task, int64_t first, int64_t last) {                            \
        const Product *t = task;                                                                                  \
        int64_t kind = t->m->kind;                                                                                \
        if (tiles_of(t->rows, MOST_ROWS(vector)) >= EXPANDED_FROM &&                                              \
            ((kind == BFLOAT16 && product_expanded(t, first, last, vector, BFLOAT16, product_##name)) ||          \
             (kind == FLOAT16 && product_expanded(t, first, last, vector, FLOAT16, product_##name))))             \
            return;                                                                                               \
        if (kind == BFLOAT16)                                                                                     \
            product_panels(task, first, last, vector, BFLOAT16);                                                  \
        else if (kind == INT8)                                                                                    \
            product_panels(task, first, last, vector, INT8);                                                      \
        else if (kind == FLOAT16)                                                                                 \
            product_panels(task, first, last, vector, FLOAT16);                                                   \
        else                                                                                                      \
            product_panels(task, first, last, vector, FLOAT32);                                                   \
    }                                                                                                             \
    target static void laying_##name(const void *task, int64_t first, int64_t last) {                             \
        lay_tiles(task, first, last, MOST_ROWS(vector), FLOAT32);                                                 \
    }                                                                                                             \
    target static void gating_##name(const void *task, int64_t first, int64_t last) {                             \
        gating_share(task, product_##name, first, last);                                                          \
    }                                                                                                             \
    target static void attending_##name(const void *task, int64_t first, int64_t last) {                          \
        attending_share(task, first, last, vector);                                                               \
    }                                                                                                             \
    target static void checksum_##name(const void *task, int64_t first, int64_t last) {                           \
        checksum_share(task, first, last);                                                                        \
    }                                                                                                             \
    target static void norm_##name(const float *x, const float *weight, float epsilon, int64_t rows,              \
                                   int64_t width, int add, int rounding, float *out) {                            \
        norm_rows(x, weight, epsilon, rows, width, add, rounding, out);                                           \
    }                                                                                                             \
    target static void rotate_##name(const Layer *l, const Pass *p, const float *qkv, float *query, float *keys,  \
                                     float *values) {                                                             \
        rotate_rows(l, p, qkv, query, keys, values);                                                              \
    }                                                                                                             \
    static const Kernels kernels_##name = {laying_##name, product_##name, gating_##name,     attending_##name, checksum_##name, \
                                           0, 0, 0, 0,    MOST_ROWS(vector), norm_##name,  rotate_##name};

KERNELS(plain, , 4)
#if defined(__x86_64__) && defined(__GNUC__)
KERNELS(avx2, __attribute__((target("avx2,fma"))), 8)
KERNELS(avx512, __attribute__((target("avx512f,avx512vl,avx512dq,avx2,fma"))), 16)
#endif
#if HAS_DOTS
#define AVX512 "avx512f,avx512vl,avx512dq,avx2,fma"
__attribute__((target("avx512bf16," AVX512))) static void pairs_dots(const void *task, int64_t first, int64_t last) {
    product_panels(task, first, last, LANES, DOTS);
}
__attribute__((target("avx512vnni," AVX512))) static void bytes_dots(const void *task, int64_t first, int64_t last) {
    product_panels(task, first, last, LANES, BYTES);
}
__attribute__((target(AVX512))) static void in_pairs_dots(const void *task, int64_t first, int64_t last) {
    lay_tiles(task, first, last, MOST_ROWS(LANES), DOTS);
}
__attribute__((target("avx512bw," AVX512))) static void in_bytes_dots(const void *task, int64_t first, int64_t last) {
    lay_bytes(task, first, last, MOST_ROWS(LANES) / ((const Laying *)task)->parts, BYTES);
}
#if HAS_AMX
__attribute__((target(AVX512))) static void halves_amx(const void *task, int64_t first, int64_t last) {
    product_tiles(task, first, last, TILES);
}
__attribute__((target(AVX512))) static void floats_amx(const void *task, int64_t first, int64_t last) {
    product_tiles(task, first, last, FLOAT_TILES);
}
__attribute__((target(AVX512))) static void parts_amx(const void *task, int64_t first, int64_t last) {
    product_tiles(task, first, last, BYTE_TILES);
}
__attribute__((target("avx512bw," AVX512))) static void in_parts_amx(const void *task, int64_t first, int64_t last) {
    lay_bytes(task, first, last, TILE_ROWS / ((const Laying *)task)->parts, BYTE_TILES);
}
__attribute__((target("avx512bw," AVX512))) static void in_halves_amx(const void *task, int64_t first, int64_t last) {
    lay_halves(task, first, last);
}
#endif
static void product_dots(const void *task, int64_t first, int64_t last);
__attribute__((target(AVX512))) static void gating_dots(const void *task, int64_t first, int64_t last) {
    gating_share(task, product_dots, first, last);
}
static Kernels kernels_dots = {laying_avx512, product_dots, gating_dots, attending_avx512,  checksum_avx512,
                               0, 0, 0, 0,    MOST_ROWS(LANES), norm_avx512, rotate_avx512};
#endif

static const Kernels *kernels = &kernels_plain;

/* How so many rows are laid for a matrix, and multiplied: as its weights are, unless the processor has an instruction for them.
 * Only weights of 8 bits, whose sums are exact, may be multiplied otherwise in a single row, which is faster in vectors. */
static int kind_of(const Matrix *m, int64_t rows) {
    if (m->kind == BFLOAT16 && kernels->in_halves && FITS_AMX(m)) return m->rounds ? TILES : FLOAT_TILES;
    if (m->kind == BFLOAT16 && m->rounds && kernels->in_pairs) return DOTS;
    if (m->kind == INT8 && kernels->in_parts && rows > 1 && FITS_AMX(m) && fits_bytes(m)) return BYTE_TILES;
    if (m->kind == INT8 && kernels->in_bytes && fits_bytes(m)) return BYTES;
    return (int)m->kind;
}

#if HAS_DOTS
static void product_dots(const void *task, int64_t first, int64_t last) {
    const Product *t = task;
    int kind = kind_of(t->m, t->rows);
#if HAS_AMX
    if (kind == TILES || kind == FLOAT_TILES || kind == BYTE_TILES) {
        (kind == TILES ? halves_amx : kind == FLOAT_TILES ? floats_amx : parts_amx)(task, first, last);
        return;
    }
#endif
    (kind == DOTS ? pairs_dots : kind == BYTES ? bytes_dots : product_avx512)(task, first, last);
}
#endif

/* Called before all others; the functions are OpenMP's, or NULL for one thread. `widest`: the most floats of a register: 4, 8 or
   16 of a vector, 256 of a matrix. Returns ABI. */
int32_t layer_start(void *parallel_, void *own_number_, void *team_size_, int32_t widest) {
    kernels = &kernels_plain;
    parallel = (Parallel)parallel_;
    own_number = (Number)own_number_;
    team_size = (Number)team_size_;
#if defined(__x86_64__) && defined(__GNUC__)
    if (widest >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) kernels = &kernels_avx2;
    if (widest >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        kernels = &kernels_avx512;
#endif
#if HAS_DOTS
    if (kernels == &kernels_avx512) {
        kernels_dots.in_pairs = __builtin_cpu_supports("avx512bf16") ? in_pairs_dots : 0;
        kernels_dots.in_bytes = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") ? in_bytes_dots : 0;
#if HAS_AMX
        int tiles = widest >= 256 && may_use_tiles();
        kernels_dots.in_halves = tiles ? in_halves_amx : 0;
        kernels_dots.in_parts = tiles ? in_parts_amx : 0;
#endif
        kernels = &kernels_dots;
    }
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
    if (!parallel || threads < 2 || multiplications < WORTH_A_THREAD || alone) {
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
    kernels->norm(x, weight, epsilon, rows, width, 0, rounding, out);
}

/* x [rows, inputs of m] as its product reads them: as it lies, or in `scratch`, which has room for half as many floats more. */
static const float *laid(const Matrix *m, const float *x, int64_t rows, int64_t threads, float *scratch) {
    int kind = kind_of(m, rows);
    if (rows == 1 && kind == m->kind) return x;
    Laying t = {x, rows, m->inputs, scratch, parts_of(kind, m->rounds)};
    int64_t most = kind == TILES || kind == FLOAT_TILES || kind == BYTE_TILES ? TILE_ROWS : kernels->most;
    Share laying = kind == DOTS                           ? kernels->in_pairs
                   : kind == BYTES                        ? kernels->in_bytes
                   : kind == TILES || kind == FLOAT_TILES ? kernels->in_halves
                   : kind == BYTE_TILES                   ? kernels->in_parts
                                                          : kernels->laying;
    spread(laying, &t, tiles_of(rows, most / t.parts), threads, rows * m->inputs);
    return scratch;
}

/* out [rows, outputs] = x [rows, inputs] m, or added to it; scratch: rows * inputs * 3 / 2 floats. */
void layer_product(const Matrix *m, const float *x, int64_t rows, int64_t threads, int add, float *scratch, float *out) {
    Product t = {m, laid(m, x, rows, threads, scratch), rows, add, out};
    spread(kernels->product, &t, panels_of(m), threads, rows * m->inputs * m->outputs);
}

/* The first half of an MLP, see Gating; x [rows, inputs], of as many rows as `gated` and then `raised`. */
static void gate_rows(const Matrix *gate, const Matrix *up, const float *x, int64_t rows, const Pass *p, int gelu, float *gated) {
    float *raised = gated + rows * gate->outputs;
    int together = kind_of(gate, rows) == kind_of(up, rows); /* else rows are laid for each */
    if (!together) {
        layer_product(gate, x, rows, p->threads, 0, p->laid, gated);
        layer_product(up, x, rows, p->threads, 0, p->laid, raised);
    }
    Gating t = {gate, up, together ? laid(gate, x, rows, p->threads, p->laid) : 0, rows, gelu, gated, raised};
    spread(kernels->gating, &t, panels_of(gate), p->threads, 2 * rows * gate->inputs * gate->outputs);
}

/* A number for each block of BLOCK_WORDS words, of which the last may be shorter. */
void weights_checksum(const uint32_t *words, int64_t count, int64_t threads, uint64_t *sums) {
    Checksum t = {words, count, sums};
    spread(kernels->checksum, &t, (count + BLOCK_WORDS - 1) / BLOCK_WORDS, threads, count);
}

/* From hidden states x [batch * rows, hidden] to rotated queries, and keys and values in the cache. */
void layer_enter(const Layer *l, const Pass *p, const float *x, float *query, float *keys, float *values) {
    int64_t rows = offset_of(p, p->batch);
    float *normed = p->scratch, *qkv = normed + rows * l->hidden;
    if (l->input_norm) layer_norm(x, l->input_norm, l->input_epsilon, rows, l->hidden, l->rounding, normed);
    layer_product(&l->qkv, l->input_norm ? normed : x, rows, p->threads, 0, p->laid, qkv);
    kernels->rotate(l, p, qkv, query, keys, values);
}

/* x += in m, through a norm where there is one; `between` [rows, outputs] is written then. */
static void add_product(const Layer *l, const Pass *p, int64_t rows, const Matrix *m, const float *in, const float *norm,
                        float *between, float *x) {
    layer_product(m, in, rows, p->threads, !norm, p->laid, norm ? between : x);
    if (norm) kernels->norm(between, norm, l->behind_epsilon, rows, l->hidden, 1, l->rounding, x);
}

/* From the attention's result [batch * rows, heads * dim] behind the normed rows in the scratch, through output projection and
 * MLP; both are added to x [batch * rows, hidden] unless they are skipped. Rows before `first` stay as they are. */
static void leave(const Layer *l, const Pass *p, int64_t first, float *x) {
    int64_t all = offset_of(p, p->batch), rows = all - first, queries = (int64_t)l->kv_heads * l->groups * l->dim;
    float *normed = p->scratch, *gathered = normed + all * l->hidden, *attended = gathered + first * queries;
    x += first * l->hidden;
    if (!(l->skips & NO_ATTENTION)) add_product(l, p, rows, &l->output, attended, l->behind_attention, normed, x);
    if (l->skips & NO_MLP) return;
    if (l->post_norm) layer_norm(x, l->post_norm, l->post_epsilon, rows, l->hidden, l->rounding, normed);
    gate_rows(&l->gate, &l->up, l->post_norm ? normed : x, rows, p, l->gelu, gathered);
    add_product(l, p, rows, &l->down, gathered, l->behind_mlp, normed, x);
}

/* `count` layers one after the other on x [batch * rows, hidden], in place. The last one makes no more than keys and values of
 * the first `unread` rows of a batch of one. */
void layer_run(const Layer *const *layers, int64_t count, const Pass *p, int64_t unread, float *x, float *const *keys,
               float *const *values) {
    int64_t rows = offset_of(p, p->batch), longest = 0;
    for (int64_t b = 0; b < p->batch; b++) longest = p->starts[b] > longest ? p->starts[b] : longest;
    for (int64_t i = 0; i < count; i++) {
        const Layer *l = layers[i];
        int64_t heads = (int64_t)l->kv_heads * l->groups, tiles = (l->groups * p->rows + LANES - 1) / LANES;
        int64_t first = i == count - 1 ? unread : 0;
        float *gathered = p->scratch + rows * l->hidden, *query = gathered + rows * (heads + 2 * l->kv_heads) * l->dim;
        if (!(l->skips & NO_ATTENTION)) {
            layer_enter(l, p, x, query, keys[i], values[i]);
            Attending t = {l, p, query, keys[i], values[i], gathered, first, tiles, (2 * l->dim + longest + p->rows) * LANES};
            int64_t work = rows * heads * (longest + p->rows) * l->dim;
            spread(kernels->attending, &t, p->batch * l->kv_heads * tiles, p->threads, work);
        }
        leave(l, p, first, x);
    }
}

#include "t5.h"
