/* Products of a few rows with a large matrix, the bulk of a decoding step. Included by layers.c only.
 *
 * The weights lie in panels of LANES outputs, [panels, in, LANES], so that one pass over a panel feeds every row: a
 * dozen rows cost little more than one while the matrix comes from memory. Weights are software-prefetched, as the
 * processor's own prefetcher ends with each page: with one tile of rows a page or half of one ahead, with several, or where
 * panels are short, the panels behind these, so that memory works while tiles compute. Every output is summed in the order of the
 * inputs whatever the number of rows and threads, so a row's result does not depend on the other rows. */
#include <stdint.h>
#include <string.h>

#define LANES 16
#define AHEAD 64 /* inputs of a panel, which are one page */
#define SOON 32 /* inputs of a panel */
#define NEAR 2048 /* inputs of panels side by side, up to which those behind them fit into the second level of caches */

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

/* A matrix in panels, as draftree.runner.weights.packed lays it out. */
typedef struct {
    const float *panels; /* [ceil(outputs / LANES), inputs, LANES], zeros behind the last output */
    const float *bias;   /* [outputs] or NULL */
    int64_t inputs, outputs;
} Matrix;

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
/* A tile's function for vectors of so many floats, a constant. */
#define WITH(vector, name, ...) \
    ((vector) == 16 ? name##_16(__VA_ARGS__) : (vector) == 8 ? name##_8(__VA_ARGS__) : name##_4(__VA_ARGS__))

#define TILE(n, wide)                                                           \
    case n:                                                                     \
        WITH(vector, product_tile, m, at, panel, n, wide, ahead, step, result); \
        break;
#define TILES_TO_6(wide) TILE(1, wide) TILE(2, wide) TILE(3, wide) TILE(4, wide) TILE(5, wide) TILE(6, wide)
#define TILES_TO_12(wide) TILES_TO_6(wide) TILE(7, wide) TILE(8, wide) TILE(9, wide) TILE(10, wide) TILE(11, wide) TILE(12, wide)

/* Put a tile where it belongs; what lies behind the last output is dropped. */
static void put_tile(const Matrix *m, const float *result, int64_t panel, int64_t rows, int64_t wide, int add, float *out) {
    int64_t begin = panel * LANES, count = wide * LANES;
    if (m->outputs - begin < count) count = m->outputs - begin;
    for (int64_t r = 0; r < rows; r++, result += wide * LANES) {
        float *to = out + r * m->outputs + begin;
        for (int64_t i = 0; i < count; i++) {
            float value = result[i] + (add ? to[i] : 0);
            to[i] = m->bias ? value + m->bias[begin + i] : value;
        }
    }
}

/* Panels [first, last) of out = x m (+ out). `vector`: floats of the processor's vectors, a constant. */
INLINE void product_panels(const Matrix *m, const float *x, int64_t rows, int64_t first, int64_t last, int vector, int add,
                           float *out) {
    int64_t registers = MOST_IN_REGISTERS(vector), most = vector == LANES ? 12 : 6, tiles = (rows + most - 1) / most;
    int64_t tallest = rows < most ? rows : most;
    int usual = tallest * 4 <= registers ? 4 : tallest * 2 <= registers ? 2 : 1; /* panels side by side */
    for (int64_t panel = first; panel < last;) {
        int wide = last - panel >= usual ? usual : 1;
        for (int64_t t = 0, done = 0; t < tiles; t++) {
            int64_t count = (rows - done + tiles - t - 1) / (tiles - t);
            const float *at = x + done * m->inputs;
            const float *own = m->panels + panel * m->inputs * LANES;
            const float *ahead[2] = {own + AHEAD * LANES, own + ((wide > 1 ? m->inputs : 0) + AHEAD) * LANES};
            int64_t step = LANES;
            if (tiles == 1 && wide == 2 && wide * m->inputs <= NEAR) { /* the panels behind these, line by line */
                ahead[0] = own + wide * m->inputs * LANES, ahead[1] = ahead[0] + LANES;
                step = wide * LANES;
            }
            if (tiles > 1) ahead[0] = ahead[1] = own + (wide + (t < wide ? t : 0)) * m->inputs * LANES;
            float result[12 * 4 * LANES], *to = out + done * m->outputs;
            done += count;
            if (wide == 4)
                switch (count) { TILES_TO_6(4) }
            else if (wide == 2)
                switch (count) { TILES_TO_12(2) }
            else
                switch (count) { TILES_TO_12(1) }
            put_tile(m, result, panel, count, wide, add, to);
        }
        panel += wide;
    }
}
