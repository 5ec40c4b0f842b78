/* Products of a few rows with a large matrix, the bulk of a decoding step. Included by kernels.h only.
 *
 * The weights lie in panels of LANES outputs, [panels, in, LANES], so that one pass over a panel feeds every row: a
 * dozen rows cost little more than one while the matrix comes from memory. Weights are software-prefetched, as the
 * processor's own prefetcher ends with each page: with one tile of rows a page or half of one ahead; with several, or where
 * panels come one at a time, the panels behind these, so that memory works while tiles compute. Every output is summed in
 * the order of the inputs whatever the number of rows and threads, so a row's result does not depend on the other rows. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Words that hold several weights have the first one in their lowest bytes."
#endif

#define LANES 16
#define AHEAD 64 /* words of an output, whose panel's are one page */
#define SOON 32 /* words of an output */

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 12")
#define FETCH(address) __builtin_prefetch(address)
#define FETCH_SECOND(address) __builtin_prefetch(address, 0, 2) /* into the second level of caches */
#else
#define INLINE static inline
#define NOINLINE
#define UNROLL
#define FETCH(address)
#define FETCH_SECOND(address)
#endif

/* Vectors of as many floats, whatever the alignment. */
typedef float Lanes16 __attribute__((vector_size(64), aligned(4)));
typedef float Lanes8 __attribute__((vector_size(32), aligned(4)));
typedef float Lanes4 __attribute__((vector_size(16), aligned(4)));

/* Of weights; DOTS: bfloat16 that the processor multiplies in pairs; BYTES: weights of 8 bits that it multiplies in fours;
 * TILES, BYTE_TILES: the same that it multiplies in matrix registers; FLOAT_TILES: bfloat16 so, where results are float32. */
enum Kind {
    FLOAT32, BFLOAT16, INT8, FLOAT16, DOTS, BYTES, TILES, FLOAT_TILES, BYTE_TILES,
    BLOCKS, /* rows as weights in blocks are multiplied with by dot products of bytes */
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K /* weights in blocks, see blocks.h */
};

/* A matrix in panels, as draftree.runner.weights.packed lays it out. */
typedef struct Matrix {
    const float *packed; /* words [ceil(outputs / LANES), words_of, LANES], zeros behind the last output; or blocks */
    const float *bias;   /* [outputs] or NULL */
    const float *scales; /* [outputs], by which sums of weights of 8 bits are multiplied, or NULL */
    int64_t inputs, outputs;
    int64_t kind;
    int64_t rounds;      /* whether results are rounded to bfloat16 */
    int64_t stride;      /* outputs of all matrices that lie beside each other, from row to row of a result */
    const struct Matrix *beside; /* the next of them, of another kind of blocks; NULL for none */
} Matrix;

/* Words of four bytes that the weights of one output take: inputs are even in number in 16 bits, and whole fours in 8. */
static inline int64_t words_of(const Matrix *m) {
    return m->kind == BFLOAT16 || m->kind == FLOAT16 ? m->inputs / 2 : m->kind == INT8 ? m->inputs / 4 : m->inputs;
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

/* sum += the dot products of w's pairs of bfloat16 with one pair, or of its fours of unsigned bytes with four signed ones (sums
 * of whole numbers then); by instructions that some processors have. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11 /* clang wants the tile to be of that target */
#define HAS_DOTS 1
#define ADD_DOTS(sum, w, pair) __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(pair))
#define ADD_BYTES(sum, w, four) __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(four))
#else
#define HAS_DOTS 0
#define ADD_DOTS(sum, w, pair)
#define ADD_BYTES(sum, w, four)
#endif

/* Weights that will be read soon, in two streams, since memory is read faster so. Of one panel at a time each word of an output
 * takes a line of the streams by turns, `step` floats apart; of two one of each, the lines behind each other, and `lead` words
 * before the panels' end both go on in the panels behind these. */
typedef struct {
    const float *first, *second;
    int64_t step, lead;
} Ahead;

#include "blocks.h"

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
#define LINE (LANES * sizeof(float)) /* bytes of a line of the caches, at whose begin vectors are read fastest */
#define EXPANDED_FROM 8 /* tiles of rows from which on weights of 16 bits are made floats once */
/* A tile's function for vectors of so many floats, a constant. */
#define WITH(vector, name, ...) \
    ((vector) == 16 ? name##_16(__VA_ARGS__) : (vector) == 8 ? name##_8(__VA_ARGS__) : name##_4(__VA_ARGS__))

/* A tile of a size, in a function of its own: within one for all sizes compilers do not find registers for all sums. */
typedef void (*Tile)(const Matrix *m, const float *x, int64_t panel, const Ahead *ahead, float *result);
#define TILE_FUNCTION(n, wide, name, target, vector, kind)                                                               \
    target NOINLINE static void tile_##name##_##kind##_##n##_##wide(                                                     \
        const Matrix *m, const float *x, int64_t panel, const Ahead *ahead, float *result) {                             \
        WITH(vector, product_tile, m, x, panel, n, wide, kind, ahead, result);                                           \
    }
#define TILE_ENTRY(n, wide, name, target, vector, kind) [wide / 2][n] = tile_##name##_##kind##_##n##_##wide,
/* T(rows, panels side by side) for all sizes that products with such vectors have. */
#define TO_6(T, wide, ...) \
    T(1, wide, __VA_ARGS__) T(2, wide, __VA_ARGS__) T(3, wide, __VA_ARGS__) \
    T(4, wide, __VA_ARGS__) T(5, wide, __VA_ARGS__) T(6, wide, __VA_ARGS__)
#define TO_12(T, wide, ...) \
    TO_6(T, wide, __VA_ARGS__) \
    T(7, wide, __VA_ARGS__) T(8, wide, __VA_ARGS__) T(9, wide, __VA_ARGS__) \
    T(10, wide, __VA_ARGS__) T(11, wide, __VA_ARGS__) T(12, wide, __VA_ARGS__)
#define SIZES_16(T, ...) TO_12(T, 1, __VA_ARGS__) TO_12(T, 2, __VA_ARGS__) TO_6(T, 4, __VA_ARGS__)
#define SIZES_8(T, ...) TO_6(T, 1, __VA_ARGS__) T(1, 4, __VA_ARGS__)
#define SIZES_4 SIZES_8
/* Tiles for weights of a kind, by panels side by side (1, 2, 4) and rows. */
#define TILES_OF(name, target, vector, kind)                    \
    SIZES_##vector(TILE_FUNCTION, name, target, vector, kind)   \
    static const Tile tiles_##name##_##kind[3][13] = {SIZES_##vector(TILE_ENTRY, name, target, vector, kind)};

/* Put a tile where it belongs; what lies behind the last output is dropped. Numbers are rounded where a bfloat16 model's are. */
INLINE void put_tile(const Matrix *m, float *result, int64_t panel, int64_t rows, int64_t wide, int add, float *out) {
    int64_t begin = panel * LANES, count = wide * LANES;
    if (m->outputs - begin < count) count = m->outputs - begin;
    for (int64_t r = 0; r < rows; r++, result += wide * LANES) { /* one thing at a time, which compilers put into vectors */
        float *to = out + r * m->stride + begin;
        if (m->scales)
            for (int64_t i = 0; i < count; i++)
                result[i] = rounded(rounded(result[i], m->rounds) * m->scales[begin + i], m->rounds);
        if (m->bias)
            for (int64_t i = 0; i < count; i++) result[i] += m->bias[begin + i];
        if (m->rounds)
            for (int64_t i = 0; i < count; i++) result[i] = as_bfloat16(result[i]);
        if (add)
            for (int64_t i = 0; i < count; i++) to[i] = rounded(to[i] + result[i], m->rounds);
        else
            memcpy(to, result, count * sizeof *to);
    }
}

/* Rows times m. */
typedef struct {
    const Matrix *m;
    int kind;       /* how rows are laid; as the weights, unless the processor has an instruction for them */
    const float *x; /* as Laying leaves them */
    int64_t rows;
    int add;        /* whether the product is added to `out` */
    float *out;     /* [rows, outputs] */
    int64_t before; /* panels before the first one that m has, and `out` has outputs for */
    const float *soon; /* what will be read behind these panels, if that is not what lies behind them */
} Product;

/* Into how many tiles rows are divided, of almost equal height, and how many rows the one of a number has. */
static inline int64_t tiles_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }
static inline int64_t height_of(int64_t rows, int64_t tiles, int64_t tile) { return rows / tiles + (tile < rows % tiles); }

/* Rows as products read them: one behind the other in a tile, [inputs, height] of each; for DOTS in bfloat16,
 * [inputs / 2, height, 2]; for BYTES see lay_bytes. */
typedef struct {
    const float *x; /* [rows, inputs] */
    int64_t rows, inputs;
    float *laid;
    int64_t parts; /* see parts_of */
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

/* A row of weights of 8 bits is multiplied in whole numbers: each number of a row x is taken as a multiple of a unit, which
 * is the row's largest one divided by UNITS, and that as two signed bytes, of a row in bfloat16, or three. So a number is off by
 * half a unit at most, 2^-16 or 2^-24 of the largest, and their sums with weights are exact. */
#define PARTS_OF(rounds) ((rounds) ? 2 : 3)
#define FLOAT_PARTS 3 /* of bfloat16, whose sum a float is */
#define TILE_ROWS 16 /* of a matrix register */
#define TILE_WORDS 16 /* of an output, in one */
#define FITS_TILES(m) (words_of(m) % TILE_WORDS == 0)
#define UNITS(parts) ((parts) == 2 ? 32639 : 8355711) /* the largest number of two or three signed bytes of 127 */
#define LEAST 1e-30f /* of a row's largest number, as the inverse of a unit has to be finite */
#define FEWEST_INPUTS 12 /* so that a row's bytes and Unit fit where its floats would */
#define MOST_INPUTS 65536 /* so that sums fit into 32 bits */

/* Parts of a row, each of which takes the place of a row in a tile. */
INLINE int64_t parts_of(int kind, int64_t rounds) {
    return kind == BYTES || kind == BYTE_TILES ? PARTS_OF(rounds) : kind == FLOAT_TILES ? FLOAT_PARTS : 1;
}

/* What a row's bytes mean. */
typedef struct {
    float unit;
    float sum[2]; /* a double: 128 times the sum of the row's whole numbers, as weights are multiplied as unsigned ones */
} Unit;

/* Whether weights of 8 bits can be multiplied in whole numbers. */
static inline int fits_bytes(const Matrix *m) { return m->inputs >= FEWEST_INPUTS && m->inputs <= MOST_INPUTS; }

/* Where the units of rows lie: behind all bytes. */
static inline Unit *units_of(const float *laid, int64_t rows, int64_t inputs, int64_t parts) {
    return (Unit *)(laid + rows * parts * (inputs / 4));
}

/* Tiles [first, last) of rows in bytes, of at most `most` rows: [inputs / 4, height, parts, 4], the lowest part first; for
 * BYTE_TILES [inputs / 64, height, parts, 64]. */
INLINE void lay_bytes(const Laying *l, int64_t first, int64_t last, int64_t most, int kind) {
    int64_t tiles = tiles_of(l->rows, most), words = l->inputs / 4, parts = l->parts, row = 0;
    Unit *units = units_of(l->laid, l->rows, l->inputs, parts);
    for (int64_t t = 0; t < first; t++) row += height_of(l->rows, tiles, t);
    for (int64_t t = first; t < last; t++) {
        int64_t height = height_of(l->rows, tiles, t), stride = height * parts;
        float *tile = l->laid + row * parts * words;
        for (int64_t r = 0; r < height; r++, row++) {
            const float *x = l->x + row * l->inputs;
            uint32_t largest = 0;
            for (int64_t i = 0; i < l->inputs; i++) { /* by bits, so that infinities and what is no number are the largest */
                uint32_t bits;
                memcpy(&bits, x + i, sizeof bits);
                bits &= 0x7fffffff;
                largest = bits > largest ? bits : largest;
            }
            float most_of_row, limit = UNITS(parts);
            memcpy(&most_of_row, &largest, sizeof largest);
            int finite = largest < 0x7f800000;
            if (finite && most_of_row < LEAST) most_of_row = LEAST;
            float inverse = finite ? limit / most_of_row : 0;
            int64_t sum = 0;
            for (int64_t begin = 0; begin < words; begin += AHEAD) {
                int64_t count = begin + AHEAD < words ? AHEAD : words - begin;
                int8_t bytes[3][4 * AHEAD];
                int32_t whole = 0;
                for (int64_t i = 0; i < 4 * count; i++) {
                    float value = x[4 * begin + i] * inverse;
                    value = value > -limit ? value : -limit; /* also where it is no number */
                    value = value < limit ? value : limit;
                    int32_t number = (int32_t)(value + (value < 0 ? -0.5f : 0.5f)), low = (int8_t)number;
                    int32_t rest = (number - low) >> 8, middle = (int8_t)rest;
                    bytes[0][i] = (int8_t)low, bytes[1][i] = (int8_t)middle, bytes[2][i] = (int8_t)((rest - middle) >> 8);
                    whole += number;
                }
                sum += whole;
                for (int64_t part = 0; part < parts; part++)
                    if (kind == BYTE_TILES)
                        for (int64_t k = 0; k < count; k += LANES)
                            memcpy(tile + (begin + k) * stride + (r * parts + part) * LANES, bytes[part] + 4 * k, LINE);
                    else
                        for (int64_t k = 0; k < count; k++)
                            memcpy(tile + (begin + k) * stride + r * parts + part, bytes[part] + 4 * k, 4);
            }
            double offset = kind == BYTE_TILES ? 0 : 128.0 * (double)sum; /* weights are signed there */
            units[row].unit = finite ? most_of_row / limit : most_of_row - most_of_row;
            memcpy(units[row].sum, &offset, sizeof offset);
        }
    }
}

/* Sums of bytes as numbers: `sums` [rows, parts, wide, LANES], whole numbers, to result [rows, wide, LANES]. */
INLINE void join_parts(const float *sums, const Unit *units, int64_t rows, int64_t parts, int64_t count, float *result) {
    for (int64_t r = 0; r < rows; r++, sums += parts * count, result += count) {
        double offset;
        memcpy(&offset, units[r].sum, sizeof offset);
        const int32_t *low = (const int32_t *)sums, *middle = low + count, *high = low + (parts - 1) * count;
        double weight = parts == 2 ? 0 : 65536;
        for (int64_t i = 0; i < count; i++)
            result[i] = (float)(((double)low[i] + 256 * (double)middle[i] + weight * (double)high[i] - offset) * units[r].unit);
    }
}

/* Panels [first, last) of a product. `vector`: floats of the processor's vectors; `kind`: of the weights; constants. `sizes`:
 * its tiles, as TILES_OF has them. */
INLINE void product_panels(const Product *t, int64_t first, int64_t last, int vector, int kind, const Tile sizes[3][13]) {
    const Matrix *m = t->m;
    int64_t parts = parts_of(kind, m->rounds);
    int64_t registers = MOST_IN_REGISTERS(vector), most = MOST_ROWS(vector) / parts, tiles = tiles_of(t->rows, most);
    int64_t words = words_of(m), tallest = (t->rows < most ? t->rows : most) * parts;
    const Unit *units = units_of(t->x, t->rows, m->inputs, parts);
    int usual = tallest * 4 <= registers ? 4 : vector == LANES && tallest * 2 <= registers ? 2 : 1; /* panels side by side */
    for (int64_t panel = first; panel < last;) {
        int wide = last - panel >= usual ? usual : 1;
        const float *at = t->x;
        float *to = t->out;
        for (int64_t i = 0, before = 0; i < tiles; i++) {
            int64_t height = height_of(t->rows, tiles, i), count = height * parts;
            const float *own = m->packed + (panel - t->before) * words * LANES;
            const float *next = t->soon ? t->soon : own + wide * words * LANES;
            Ahead ahead = {next, next, LANES, 0};
            if (wide == 1) { /* the next one, by halves, of which each tile takes its part */
                ahead.step = LANES / tiles;
                ahead.first = next + i * ahead.step * (words / 2), ahead.second = ahead.first + words / 2 * LANES;
            } else if (tiles == 1) {
                ahead = (Ahead){own + AHEAD * LANES, own + (words + AHEAD) * LANES, LANES, AHEAD};
            } else if (!t->soon && i < wide) {
                ahead.first = ahead.second = next + i * words * LANES;
            }
            float result[12 * 4 * LANES];
            sizes[wide / 2][count](m, at, panel - t->before, &ahead, result);
            if (kind == BYTES) {
                float numbers[6 * 4 * LANES];
                join_parts(result, units + before, height, parts, wide * LANES, numbers);
                put_tile(m, numbers, panel, height, wide, t->add, to);
            } else {
                put_tile(m, result, panel, height, wide, t->add, to);
            }
            at += count * (kind == DOTS || kind == BYTES ? words : m->inputs), to += height * m->stride, before += height;
        }
        panel += wide;
    }
}

/* Panels [first, last) of a product of so many rows that weights of 16 bits are made floats once, and not for each tile: two at
 * a time by `product`. Whether there was memory for it. */
INLINE int product_expanded(const Product *t, int64_t first, int64_t last, int vector, int kind,
                            void (*product)(const void *, int64_t, int64_t)) {
    void *held = malloc((size_t)(2 * t->m->inputs + 1) * LINE);
    if (!held) return 0;
    float *numbers = (float *)(((uintptr_t)held + LINE - 1) / LINE * LINE);
    Matrix m = *t->m;
    m.packed = numbers, m.kind = FLOAT32;
    Product some = *t;
    some.m = &m, some.kind = FLOAT32;
    for (int64_t panel = first; panel < last; panel += 2) {
        int64_t wide = last - panel < 2 ? last - panel : 2;
        WITH(vector, expand_panels, t->m, panel, wide, kind, numbers);
        some.before = panel, some.soon = t->m->packed + (panel + wide) * words_of(t->m) * LANES;
        product(&some, panel, panel + wide);
    }
    free(held);
    return 1;
}

/* Panels [first, last) of a product with weights in blocks, made floats unit by unit for all rows. */
INLINE void product_units(const Product *t, int64_t first, int64_t last, int vector) {
    const Matrix *m = t->m;
    int kind = (int)m->kind;
    int64_t tiles = tiles_of(t->rows, MOST_ROWS(vector)), bytes = panel_bytes(kind, m->inputs);
    float few[12 * LANES], numbers[UNIT * LANES], *held = t->rows > 12 ? malloc((size_t)t->rows * LINE) : 0, *sums = held ? held : few;
    int64_t most = held ? t->rows : 12; /* rows whose sums there is memory for */
    for (int64_t panel = first; panel < last; panel++) {
        const uint8_t *own = (const uint8_t *)m->packed + panel * bytes;
        for (int64_t tile = 0, before = 0; tile < tiles;) {
            int64_t end = tile, rows = 0;
            while (end < tiles && rows + height_of(t->rows, tiles, end) <= most) rows += height_of(t->rows, tiles, end++);
            memset(sums, 0, (size_t)rows * LINE);
            for (int64_t u = 0; u < m->inputs / UNIT; u++) {
                expand_any_unit(kind, own, u, numbers);
                for (int64_t i = tile, row = 0; i < end; i++) {
                    int64_t height = height_of(t->rows, tiles, i);
                    const float *x = t->x + (before + row) * m->inputs + u * UNIT * height;
                    switch (height) {
#define ADD_UNIT(n) case n: WITH(vector, unit_tile, x, numbers, n, sums + row * LANES); break;
                        ADD_UNIT(1) ADD_UNIT(2) ADD_UNIT(3) ADD_UNIT(4) ADD_UNIT(5) ADD_UNIT(6)
                        ADD_UNIT(7) ADD_UNIT(8) ADD_UNIT(9) ADD_UNIT(10) ADD_UNIT(11) ADD_UNIT(12)
#undef ADD_UNIT
                    }
                    row += height;
                }
            }
            put_tile(m, sums, panel, rows, 1, t->add, t->out + before * m->stride);
            tile = end, before += rows;
        }
    }
    free(held);
}
