/* Products of a few rows with a large matrix, the bulk of a decoding step. Included by layers.c only.
 *
 * The weights lie in panels of LANES outputs, [panels, in, LANES], so that one pass over a panel feeds every row: a
 * dozen rows cost little more than one while the matrix comes from memory. Weights are software-prefetched, as the
 * processor's own prefetcher ends with each page: with one tile of rows a page or half of one ahead, with several, or where
 * panels are short, the panels behind these, so that memory works while tiles compute. Every output is summed in the order of the
 * inputs whatever the number of rows and threads, so a row's result does not depend on the other rows. */
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Words that hold several weights have the first one in their lowest bytes."
#endif

#define LANES 16
#define AHEAD 64 /* words of an output, whose panel's are one page */
#define SOON 32 /* words of an output */
#define NEAR 2048 /* words of outputs of panels side by side, up to which those behind them fit into the second level of caches */

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 12")
#define FETCH(address) __builtin_prefetch(address)
#else
#define INLINE static inline
#define UNROLL
#define FETCH(address)
#endif

/* Vectors of as many floats, whatever the alignment. */
typedef float Lanes16 __attribute__((vector_size(64), aligned(4)));
typedef float Lanes8 __attribute__((vector_size(32), aligned(4)));
typedef float Lanes4 __attribute__((vector_size(16), aligned(4)));

enum Kind { FLOAT32, BFLOAT16, INT8, DOTS }; /* of weights; DOTS: bfloat16 that the processor multiplies in pairs */

/* A matrix in panels, as draftree.runner.weights.packed lays it out. */
typedef struct {
    const float *panels; /* words [ceil(outputs / LANES), words_of, LANES], zeros behind the last output */
    const float *bias;   /* [outputs] or NULL */
    const float *scales; /* [outputs], by which sums of weights of 8 bits are multiplied, or NULL */
    int64_t inputs, outputs;
    int64_t kind;
    int64_t rounds;      /* whether results are rounded to bfloat16 */
} Matrix;

/* Words of four bytes that the weights of one output take: inputs are even in number in bfloat16, and whole fours in 8 bits. */
static inline int64_t words_of(const Matrix *m) {
    return m->kind == BFLOAT16 ? m->inputs / 2 : m->kind == INT8 ? m->inputs / 4 : m->inputs;
}

/* A number as bfloat16 has it, the nearest one, of two the even one; what is no number stays none. (Bits are compared, as
 * compilers may take it that numbers are finite.) */
INLINE float as_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t near = bits + 0x7fff + (bits >> 16 & 1);
    bits = ((bits & 0x7fffffff) > 0x7f800000 ? bits : near) & 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The same where rounding is on. */
INLINE float rounded(float x, int on) { return on ? as_bfloat16(x) : x; }

/* sum += the dot products of w's pairs of bfloat16 with one pair; by an instruction that some processors have. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11 /* clang wants the tile to be of that target */
#define HAS_DOTS 1
#define ADD_DOTS(sum, w, pair) __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(pair))
#else
#define HAS_DOTS 0
#define ADD_DOTS(sum, w, pair)
#endif

#define VECTOR Lanes16
#define TILED(name) name##_16
#include "tiles.h"
#define VECTOR Lanes8
#define TILED(name) name##_8
#include "tiles.h"
#define VECTOR Lanes4
#define TILED(name) name##_4
#include "tiles.h"
#define MOST_IN_REGISTERS(vector) ((vector) == LANES ? 24 : 6) /* times LANES floats */
#define MOST_ROWS(vector) ((vector) == LANES ? 12 : 6) /* of a tile */
/* A tile's function for vectors of so many floats, a constant. */
#define WITH(vector, name, ...) \
    ((vector) == 16 ? name##_16(__VA_ARGS__) : (vector) == 8 ? name##_8(__VA_ARGS__) : name##_4(__VA_ARGS__))

#define TILE(n, wide)                                                           \
    case n:                                                                     \
        WITH(vector, product_tile, m, at, panel, n, wide, kind, ahead, step, result); \
        break;
#define TILES_TO_6(wide) TILE(1, wide) TILE(2, wide) TILE(3, wide) TILE(4, wide) TILE(5, wide) TILE(6, wide)
#define TILES_TO_12(wide) TILES_TO_6(wide) TILE(7, wide) TILE(8, wide) TILE(9, wide) TILE(10, wide) TILE(11, wide) TILE(12, wide)

/* Put a tile where it belongs; what lies behind the last output is dropped. Numbers are rounded where a bfloat16 model's are. */
INLINE void put_tile(const Matrix *m, const float *result, int64_t panel, int64_t rows, int64_t wide, int add, float *out) {
    int64_t begin = panel * LANES, count = wide * LANES;
    if (m->outputs - begin < count) count = m->outputs - begin;
    for (int64_t r = 0; r < rows; r++, result += wide * LANES) {
        float *to = out + r * m->outputs + begin;
        for (int64_t i = 0; i < count; i++) {
            float value = result[i];
            if (m->scales) value = rounded(rounded(value, m->rounds) * m->scales[begin + i], m->rounds);
            if (m->bias) value += m->bias[begin + i];
            value = rounded(value, m->rounds);
            to[i] = add ? rounded(to[i] + value, m->rounds) : value;
        }
    }
}

/* Rows times m. */
typedef struct {
    const Matrix *m;
    const float *x; /* as Laying leaves them */
    int64_t rows;
    int add;        /* whether the product is added to `out` */
    float *out;     /* [rows, outputs] */
} Product;

/* Into how many tiles rows are divided, of almost equal height, and how many rows the one of a number has. */
static int64_t tiles_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }
static int64_t height_of(int64_t rows, int64_t tiles, int64_t tile) { return rows / tiles + (tile < rows % tiles); }

/* Rows as products read them: one behind the other in a tile, [inputs, height] of each; for DOTS in bfloat16,
 * [inputs / 2, height, 2]. */
typedef struct {
    const float *x; /* [rows, inputs] */
    int64_t rows, inputs;
    float *laid;
} Laying;

/* Tiles [first, last) of at most `most` rows. */
INLINE void lay_tiles(const Laying *l, int64_t first, int64_t last, int64_t most, int kind) {
    int64_t tiles = tiles_of(l->rows, most), words = kind == DOTS ? l->inputs / 2 : l->inputs, before = 0;
    for (int64_t t = 0; t < first; t++) before += height_of(l->rows, tiles, t);
    for (int64_t t = first; t < last; t++) {
        int64_t height = height_of(l->rows, tiles, t);
        const float *x = l->x + before * l->inputs;
        float *laid = l->laid + before * words;
        for (int64_t begin = 0; begin < words; begin += AHEAD) { /* few enough for the first level of caches */
            int64_t end = begin + AHEAD < words ? begin + AHEAD : words;
            for (int64_t r = 0; r < height; r++)
                for (int64_t k = begin; k < end; k++)
                    if (kind == DOTS) {
                        uint32_t pair[2];
                        memcpy(pair, x + r * l->inputs + 2 * k, sizeof pair);
                        pair[0] = pair[0] >> 16 | (pair[1] & 0xffff0000);
                        memcpy(laid + k * height + r, pair, sizeof *pair);
                    } else {
                        laid[k * height + r] = x[r * l->inputs + k];
                    }
        }
        before += height;
    }
}

/* Panels [first, last) of a product. `vector`: floats of the processor's vectors; `kind`: of the weights; constants. */
INLINE void product_panels(const Product *t, int64_t first, int64_t last, int vector, int kind) {
    const Matrix *m = t->m;
    int64_t registers = MOST_IN_REGISTERS(vector), most = MOST_ROWS(vector), tiles = tiles_of(t->rows, most);
    int64_t words = words_of(m), tallest = t->rows < most ? t->rows : most;
    int usual = tallest * 4 <= registers ? 4 : tallest * 2 <= registers ? 2 : 1; /* panels side by side */
    for (int64_t panel = first; panel < last;) {
        int wide = last - panel >= usual ? usual : 1;
        const float *at = t->x;
        float *to = t->out;
        for (int64_t i = 0; i < tiles; i++) {
            int64_t count = height_of(t->rows, tiles, i);
            const float *own = m->panels + panel * words * LANES;
            const float *ahead[2] = {own + AHEAD * LANES, own + ((wide > 1 ? words : 0) + AHEAD) * LANES};
            int64_t step = LANES;
            if (tiles == 1 && wide == 2 && wide * words <= NEAR) { /* the panels behind these, line by line */
                ahead[0] = own + wide * words * LANES, ahead[1] = ahead[0] + LANES;
                step = wide * LANES;
            }
            if (tiles > 1) ahead[0] = ahead[1] = own + (wide + (i < wide ? i : 0)) * words * LANES;
            float result[12 * 4 * LANES];
            if (wide == 4)
                switch (count) { TILES_TO_6(4) }
            else if (wide == 2)
                switch (count) { TILES_TO_12(2) }
            else
                switch (count) { TILES_TO_12(1) }
            put_tile(m, result, panel, count, wide, t->add, to);
            at += count * (kind == DOTS ? words : m->inputs), to += count * m->outputs;
        }
        panel += wide;
    }
}
