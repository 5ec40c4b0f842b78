/* Products on processors with matrix registers (Intel's AMX), of which each holds 16 rows of 64 bytes: in bfloat16, in float32
 * of weights that have 16 bits, and of weights of 8 bits. Included by kernels_avx512.c only.
 *
 * Sixteen words of a panel are what a register takes of weights, as they lie; rows are laid so that it takes 16 of them from one
 * place. One instruction multiplies these with 16 words of 16 outputs, so a step of sixteen rows takes little longer than one
 * of a single row, and prompts a fraction of what vectors take. Every number of a result is summed by itself and in one order, so
 * a row's result does not depend on the other rows.
 *
 * A float has 24 bits and is exactly the sum of three numbers of 8, which bfloat16 holds. So its products with weights that are
 * held in bfloat16, summed in float32, are as exact as those of floats; a row's three parts take the places of three rows. */
#if HAS_DOTS && defined(__linux__) && !defined(NO_AMX)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#define MAY_USE_TILES 0x1023 /* of arch_prctl: the kernel keeps this state only of processes that ask */
#define TILE_STATE 18

/* What each register holds: as LDTILECFG reads it. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

/* Registers as multiply_beside uses them (`lower` is 0), or multiply_below. */
static void configure_tiles(int64_t upper, int64_t lower) {
    TileConfig c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int weights = lower ? i > 5 : i > 4;
        c.rows[i] = (uint8_t)(weights ? TILE_WORDS : !lower || i < 2 || i == 4 ? upper : lower), c.row_bytes[i] = 64;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}

#define TILE_ZERO(sum) __asm__ volatile("tilezero %%tmm" #sum : :)
#define TILE_LOAD(tile, at, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, at, stride) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_ADD(sum, rows, weights)                                                                       \
    do {                                                                                                   \
        if (kind != BYTE_TILES)                                                                            \
            __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum : :);               \
        else                                                                                               \
            __asm__ volatile("tdpbssd %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum : :);                 \
    } while (0)

/* What comes soon of a panel, into the first level of caches. */
INLINE void fetch_tile(const float *weights) {
    for (int i = 0; i < TILE_WORDS; i++) FETCH(weights + (TILE_WORDS + i) * LANES);
}

/* Laid rows in matrix registers, and what multiplies them. */
typedef struct {
    const float *x;       /* see lay_halves */
    int64_t upper, lower; /* rows of two tiles that lie one behind the other, at most 16 each */
    const float *packed;  /* [wide, words, LANES] */
    int64_t words;
    int wide;
    const float *ahead;   /* as many panels that will be read soon, or NULL */
    float *result;        /* [upper + lower, wide, LANES] */
} Tiles;

/* One tile of rows times up to four panels side by side, which keep memory busy. Registers: sums in 0 to 3, rows in 4, weights in
 * 5 to 7. */
INLINE void multiply_beside(const Tiles *t, int kind) {
    int64_t words = t->words, wide = t->wide;
    const float *own[4];
    for (int i = 0; i < 4; i++) own[i] = t->packed + (i < wide ? i : wide - 1) * words * LANES; /* where there are fewer, one again */
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < words; k += TILE_WORDS) {
        for (int i = 0; i < wide; i++) fetch_tile(own[i] + k * LANES);
        TILE_LOAD(4, t->x + k * t->upper, 64);
        TILE_LOAD(5, own[0] + k * LANES, 64);
        TILE_ADD(0, 4, 5);
        TILE_LOAD(6, own[1] + k * LANES, 64);
        TILE_ADD(1, 4, 6);
        TILE_LOAD(7, own[2] + k * LANES, 64);
        TILE_ADD(2, 4, 7);
        TILE_LOAD(5, own[3] + k * LANES, 64);
        TILE_ADD(3, 4, 5);
    }
    TILE_STORE(0, t->result, wide * 64);
    if (wide > 1) TILE_STORE(1, t->result + LANES, wide * 64);
    if (wide > 2) TILE_STORE(2, t->result + 2 * LANES, wide * 64);
    if (wide > 3) TILE_STORE(3, t->result + 3 * LANES, wide * 64);
}

/* Two tiles of rows times up to two panels. Registers: sums of the upper rows in 0 and 1, of the lower ones in 2 and 3; these
 * rows in 4 and 5; weights in 6 and 7. */
INLINE void multiply_below(const Tiles *t, int kind) {
    int64_t words = t->words, wide = t->wide, upper = t->upper, lower = t->lower;
    const float *below = t->x + upper * words, *left = t->packed, *right = left + (wide - 1) * words * LANES;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < words; k += TILE_WORDS) {
        if (t->ahead)
            for (int i = 0; i < TILE_WORDS; i++) {
                __builtin_prefetch(t->ahead + (k + i) * LANES, 0, 2);
                __builtin_prefetch(t->ahead + (words + k + i) * LANES, 0, 2);
            }
        for (int i = 0; i < TILE_WORDS; i++) { /* rows come from the second level of caches */
            FETCH(t->x + (k + 2 * TILE_WORDS) * upper + i * LANES);
            FETCH(below + (k + 2 * TILE_WORDS) * lower + i * LANES);
        }
        TILE_LOAD(4, t->x + k * upper, 64);
        TILE_LOAD(5, below + k * lower, 64);
        TILE_LOAD(6, left + k * LANES, 64);
        TILE_ADD(0, 4, 6);
        TILE_ADD(2, 5, 6);
        TILE_LOAD(7, right + k * LANES, 64);
        TILE_ADD(1, 4, 7);
        TILE_ADD(3, 5, 7);
    }
    float *low = t->result + upper * wide * LANES;
    TILE_STORE(0, t->result, wide * 64);
    TILE_STORE(2, low, wide * 64);
    if (wide > 1) {
        TILE_STORE(1, t->result + LANES, wide * 64);
        TILE_STORE(3, low + LANES, wide * 64);
    }
}

/* Sums of a row's parts: `sums` [rows, FLOAT_PARTS, count] to result [rows, count]. */
INLINE void join_floats(const float *sums, int64_t rows, int64_t count, float *result) {
    for (int64_t r = 0; r < rows; r++, sums += FLOAT_PARTS * count, result += count)
        for (int64_t i = 0; i < count; i++) result[i] = (sums[2 * count + i] + sums[count + i]) + sums[i];
}

/* Panels [first, last) of a product; `kind`: TILES, FLOAT_TILES or BYTE_TILES, a constant. */
INLINE void product_tiles(const Product *t, int64_t first, int64_t last, int kind) {
    const Matrix *m = t->m;
    int64_t parts = parts_of(kind, m->rounds), words = words_of(m), tiles = tiles_of(t->rows, TILE_ROWS / parts);
    int64_t held_upper = 0, held_lower = 0;
    const Unit *units = units_of(t->x, t->rows, m->inputs, parts);
    int usual = tiles == 1 ? 4 : 2;
    float result[4 * TILE_ROWS * LANES], numbers[4 * TILE_ROWS * LANES];
    for (int64_t panel = first; panel < last; panel += usual) {
        Tiles some = {.packed = m->packed + panel * words * LANES, .words = words, .result = result};
        some.wide = last - panel < usual ? (int)(last - panel) : usual;
        some.ahead = some.packed + usual * words * LANES;
        for (int64_t tile = 0, row = 0; tile < tiles; tile += 2) {
            int64_t upper = height_of(t->rows, tiles, tile), lower = tile + 1 < tiles ? height_of(t->rows, tiles, tile + 1) : 0;
            int64_t height = upper + lower;
            some.x = t->x + row * parts * words, some.upper = upper * parts, some.lower = lower * parts;
            if (upper != held_upper || lower != held_lower) configure_tiles(some.upper, some.lower);
            held_upper = upper, held_lower = lower;
            if (lower)
                multiply_below(&some, kind);
            else
                multiply_beside(&some, kind);
            if (kind == BYTE_TILES) join_parts(result, units + row, height, parts, some.wide * LANES, numbers);
            if (kind == FLOAT_TILES) join_floats(result, height, some.wide * LANES, numbers);
            put_tile(m, kind == TILES ? result : numbers, panel, height, some.wide, t->add, t->out + row * m->stride);
            row += height, some.ahead = 0;
        }
    }
    __asm__ volatile("tilerelease" : :);
}

/* Tiles [first, last) of rows in bfloat16, [inputs / 32, height, parts, 32] of each: the upper halves of floats that have been
 * rounded, or of floats, of what is left of these, and of what is left then. */
INLINE void lay_halves(const Laying *l, int64_t first, int64_t last) {
    int64_t tiles = tiles_of(l->rows, TILE_ROWS / l->parts), row = 0;
    for (int64_t t = 0; t < first; t++) row += height_of(l->rows, tiles, t);
    for (int64_t t = first; t < last; t++) {
        int64_t height = height_of(l->rows, tiles, t), wide = height * l->parts;
        uint16_t *tile = (uint16_t *)l->laid + row * l->parts * l->inputs;
        for (int64_t r = 0; r < height; r++, row++)
            for (int64_t k = 0; k < l->inputs; k += 2 * TILE_WORDS) {
                float rest[2 * TILE_WORDS];
                memcpy(rest, l->x + row * l->inputs + k, sizeof rest);
                for (int64_t part = 0; part < l->parts; part++) {
                    uint16_t *to = tile + k * wide + (r * l->parts + part) * 2 * TILE_WORDS;
                    for (int64_t i = 0; i < 2 * TILE_WORDS; i++) {
                        uint32_t bits;
                        memcpy(&bits, rest + i, sizeof bits);
                        to[i] = (uint16_t)(bits >> 16);
                        bits &= 0xffff0000;
                        float upper;
                        memcpy(&upper, &bits, sizeof upper);
                        rest[i] = (bits & 0x7f800000) == 0x7f800000 ? 0 : rest[i] - upper; /* nothing is left of infinities */
                    }
                }
            }
    }
}

/* Whether the processor has such registers, and the kernel lets this process use them. */
static int may_use_tiles(void) {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           !syscall(SYS_arch_prctl, MAY_USE_TILES, TILE_STATE);
}
#else
#define HAS_AMX 0
#endif
