/* What layers.c and the kernels, which are compiled once for each kind of processor, have in common: what they work on, and
 * the table of functions by which a kind is chosen when the library is loaded. */
#include "products.h"


#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#else
#define X86 0
#endif
#if defined(__GNUC__)
#define HIDDEN __attribute__((visibility("hidden"))) /* from others than the library's own files */
#else
#define HIDDEN
#endif

/* Where numbers are rounded to bfloat16, as a model of that type does in its `forward`; products round where their matrix says so. */
#define ROUNDS 1 /* the results of norms, turns, activations, attention and sums */
#define NORMS_ROUND_TWICE 2 /* also before they are multiplied by the weight */
#define TURNS_ROUND_ONCE 4 /* only the sum of a turn's two products, not these themselves: where angles are float32 */

/* What a layer with Gated DeltaNet has in the place of attention, see recurrent.h; all in float32. Its `qkv` makes the channels of
 * the convolution (queries, keys, values), gates of the result, and two gates of each value head. A layer with a convolution alone
 * has the width 0: its `qkv` makes gates of the inputs, gates of the result, and inputs. */
#define MOST_KERNEL 8
typedef struct {
    const float *conv;                /* [kernel, channels] */
    const float *conv_bias;           /* [channels], or NULL */
    const float *decay, *bias, *norm; /* [value heads], [value heads], [dim] */
    float epsilon;
    int32_t kernel, width, channels;  /* inputs of the convolution; width of a key; of the convolution */
} Delta;

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
    int32_t rounding; /* 0 in float32; else ROUNDS, and what of the others holds */
    int32_t window; /* positions that a row sees back, its own included; 0 for all */
    float scaling; /* of attention scores */
    float cap; /* scores are bent to stay within -cap .. cap; 0 where they are not */
    int32_t gated; /* behind each head's query comes its gate, which multiplies the attention's result */
    const Delta *delta; /* of a layer without attention: kv_heads are key heads, dim is the width of a value; else NULL */
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
    const float *entry;            /* [batch * rows, inputs of qkv], read by layers without an input norm; NULL where they read x */
} Pass;

/* What one recurrent layer knows of the context, and keeps of a pass's rows. */
typedef struct {
    float *conv, *states;          /* [slots, kernel - 1, channels], [slots, value heads, width, dim] */
    int64_t rows;                  /* of the pass */
    float *inputs;                 /* [rows, stride of qkv], whose first are the convolution's; NULL for prompts */
    float *keys, *deltas, *paths;  /* likewise, [key heads, rows, width], [value heads, rows, dim], [value heads, rows] */
    float *next_conv, *next;       /* of the one request of a prompt, behind its rows; else NULL */
} States;

/* Floats of a thread's scratch for so many rows of a recurrence; Python has the same. */
static inline int64_t recurrent_floats(int64_t rows, int64_t width, int64_t dim) { return 4 * (rows + LANES) * (width + dim + LANES); }

/* The recurrence of one layer. */
typedef struct {
    const Layer *l;
    const Pass *p;
    const States *states;
    float *projected;              /* [rows, stride of qkv] */
    float *out;                    /* [rows, value heads * dim] */
    int64_t block, scratch;        /* rows at once; floats of scratch a thread */
} Recurring;

/* A commit: the states of requests move along the rows that were accepted. */
typedef struct {
    const Layer *const *layers;
    const States *const *states;
    int64_t batch, first;          /* requests; first slot */
    const int64_t *begins, *paths; /* [batch + 1]; rows of the pass, those of request b from begins[b] on */
    float *scratch;
    int64_t floats;                /* of scratch a thread */
} Moving;

/* Rows of a request, and where they begin. */
static inline int64_t rows_of(const Pass *p, int64_t b) { return p->counts ? p->counts[b] : p->rows; }
static inline int64_t offset_of(const Pass *p, int64_t b) { return p->counts ? p->offsets[b] : b * p->rows; }

/* Infinities and what is no number become 0: a row that does not see a column gives it the weight 0, and 0 times those is no
 * number. (Bits are compared, as compilers may take it that numbers are finite.) */
INLINE void only_finite(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        x[i] = (bits & 0x7f800000) == 0x7f800000 ? 0.0f : x[i];
    }
}

/* The first half of an MLP: the activated gate times what goes up. */
typedef struct {
    const Matrix *gate, *up;
    int kind;       /* how rows are laid */
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

/* One decoder layer's weights, and its attention's source. */
typedef struct {
    Matrix qkv, output;          /* attention to the text */
    Matrix query, crossed;       /* attention to the source: its query, its output */
    Matrix up, gate, down;       /* MLP; the gate has no inputs where there is none */
    const float *norm, *cross_norm, *mlp_norm;
    const float *keys, *values;  /* of the source, [slots, heads, columns, dim] */
} T5Layer;

/* The decoder, and what is the same for all rows of a pass. */
typedef struct {
    const T5Layer *layers;
    const float *bias;           /* [heads, distances], of a text's columns by their distance from the row */
    const int64_t *lengths;      /* per request, columns of its source */
    const int64_t *places;       /* [batch, rows], positions of the rows */
    const float *embedding;      /* [vocabulary, hidden] */
    const float *closing;        /* norm behind the last layer */
    const Matrix *head;
    int64_t vocabulary;
    int64_t count, hidden, heads, dim, inner, columns, distances;
    float epsilon;
    int64_t longest;             /* columns that a row may see, at most */
    float *scores;               /* threads * longest floats */
    int32_t *distance;           /* batch * rows * longest, of the row from the text's columns; -1: not seen */
} T5Decoder;

/* What rows attend to, head by head: the text where `keys` are of the cache, or the source. */
typedef struct {
    const T5Decoder *c;
    const Pass *p;
    const float *query, *keys, *values;
    int64_t stride, capacity;    /* floats from row to row of the queries; columns of a slot */
    int source;
    float *out;                  /* [batch * rows, heads * dim] */
} T5Attending;

typedef void (*Share)(const void *task, int64_t first, int64_t last); /* panels or tiles [first, last) of a task */

/* The functions for one kind of processor. */
typedef struct {
    Share laying, product, gating, attending, attending_t5, recurring, moving;
    /* As laying, for DOTS, BYTES, TILES and FLOAT_TILES, BYTE_TILES, BLOCKS; or NULL. */
    Share in_pairs, in_bytes, in_halves, in_parts, in_blocks;
    int64_t most; /* rows of a tile */
    void (*norm)(const float *, const float *, float, int64_t, int64_t, int, int, float *);
    void (*top)(const float *, int64_t, int64_t, int64_t, int64_t *, float *);
    void (*rotate)(const Layer *, const Pass *, const float *, float *, float *, float *);
} Kernels;

HIDDEN Kernels kernels_plain(void);
HIDDEN Kernels kernels_avx2(void);
HIDDEN Kernels kernels_avx512(int matrices); /* whether registers that hold matrices may be used */

HIDDEN int64_t thread_number(void); /* of those that work on a task, from 0 on */
