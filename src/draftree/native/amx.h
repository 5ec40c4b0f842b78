/* Products on processors with matrix registers (Intel's AMX), of which each holds 16 rows of 64 bytes: in bfloat16, and of
 * weights of 8 bits. Included by layers.c only.
 *
 * Sixteen words of a panel are what a register takes of weights, as they lie; rows are laid one behind the other in bfloat16,
 * or in bytes, a row's parts one behind the other. One instruction multiplies 16 of them with 16 words of 16 outputs, so a step of sixteen
 * rows takes little longer than one of a single row, and prompts a fraction of what vectors take. Every number of a result is summed by
 * itself and in one order, so a row's result does not depend on the other rows. */
#if HAS_DOTS && defined(__linux__) && !defined(NO_AMX)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
#define TILE_WORDS 16 /* of an output, in one register */
#define FITS_AMX(m) (words_of(m) % TILE_WORDS == 0)
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
        if (kind == TILES)                                                                                 \
            __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum : :);               \
        else                                                                                               \
            __asm__ volatile("tdpbssd %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum : :);                 \
    } while (0)

/* What comes soon of a panel, into the first level of caches. */
INLINE void fetch_tile(const float *weights) {
    for (int i = 0; i < TILE_WORDS; i++) FETCH(weights + (TILE_WORDS + i) * LANES);
}

/* Up to 16 laid rows x of so many words times up to four panels side by side, which keep memory busy; result
 * [rows, wide, LANES]. Registers: sums in 0 to 3, rows in 4, weights in 5 to 7. */
INLINE void multiply_beside(const float *x, int64_t words, const float *panels, int wide, int kind, float *result) {
    const float *own[4];
    for (int i = 0; i < 4; i++) own[i] = panels + (i < wide ? i : wide - 1) * words * LANES; /* where there are fewer, one again */
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < words; k += TILE_WORDS) {
        for (int i = 0; i < wide; i++) fetch_tile(own[i] + k * LANES);
        TILE_LOAD(4, x + k, 4 * words);
        TILE_LOAD(5, own[0] + k * LANES, 64);
        TILE_ADD(0, 4, 5);
        TILE_LOAD(6, own[1] + k * LANES, 64);
        TILE_ADD(1, 4, 6);
        TILE_LOAD(7, own[2] + k * LANES, 64);
        TILE_ADD(2, 4, 7);
        TILE_LOAD(5, own[3] + k * LANES, 64);
        TILE_ADD(3, 4, 5);
    }
    TILE_STORE(0, result, wide * 64);
    if (wide > 1) TILE_STORE(1, result + LANES, wide * 64);
    if (wide > 2) TILE_STORE(2, result + 2 * LANES, wide * 64);
    if (wide > 3) TILE_STORE(3, result + 3 * LANES, wide * 64);
}

/* Laid rows x [upper + lower] of so many words, at most 16 each, times up to two panels; result [rows, wide, LANES]. What lies
 * `ahead`, of as many panels, will be read soon, where that is not NULL. Registers: sums of the upper rows in 0 and 1, of the
 * lower ones in 2 and 3; these rows in 4 and 5; weights in 6 and 7. */
INLINE void multiply_below(const float *x, int64_t words, int64_t upper, int64_t lower, const float *panels, const float *ahead,
                           int wide, int kind, float *result) {
    const float *below = x + upper * words, *left = panels, *right = panels + (wide - 1) * words * LANES;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < words; k += TILE_WORDS) {
        if (ahead)
            for (int i = 0; i < TILE_WORDS; i++) {
                __builtin_prefetch(ahead + (k + i) * LANES, 0, 2);
                __builtin_prefetch(ahead + (words + k + i) * LANES, 0, 2);
            }
        TILE_LOAD(4, x + k, 4 * words);
        TILE_LOAD(5, below + k, 4 * words);
        TILE_LOAD(6, left + k * LANES, 64);
        TILE_ADD(0, 4, 6);
        TILE_ADD(2, 5, 6);
        TILE_LOAD(7, right + k * LANES, 64);
        TILE_ADD(1, 4, 7);
        TILE_ADD(3, 5, 7);
    }
    float *low = result + upper * wide * LANES;
    TILE_STORE(0, result, wide * 64);
    TILE_STORE(2, low, wide * 64);
    if (wide > 1) {
        TILE_STORE(1, result + LANES, wide * 64);
        TILE_STORE(3, low + LANES, wide * 64);
    }
}

/* Panels [first, last) of a product; `kind`: TILES or BYTE_TILES, a constant. */
INLINE void product_tiles(const Product *t, int64_t first, int64_t last, int kind) {
    const Matrix *m = t->m;
    int64_t parts = kind == BYTE_TILES ? PARTS_OF(m->rounds) : 1; /* each of which takes the place of a row */
    int64_t words = words_of(m), tiles = tiles_of(t->rows, TILE_ROWS / parts), held_upper = 0, held_lower = 0;
    const Unit *units = units_of(t->x, t->rows, m->inputs, parts);
    int usual = tiles == 1 ? 4 : 2;
    for (int64_t panel = first; panel < last; panel += usual) {
        int wide = last - panel < usual ? (int)(last - panel) : usual;
        const float *x = t->x, *panels = m->panels + panel * words * LANES, *ahead = panels + usual * words * LANES;
        float *to = t->out;
        for (int64_t tile = 0, before = 0; tile < tiles; tile += 2) {
            int64_t upper = height_of(t->rows, tiles, tile), lower = tile + 1 < tiles ? height_of(t->rows, tiles, tile + 1) : 0;
            int64_t height = upper + lower;
            if (upper != held_upper || lower != held_lower) configure_tiles(upper * parts, lower * parts);
            held_upper = upper, held_lower = lower;
            float result[4 * TILE_ROWS * LANES], numbers[4 * TILE_ROWS * LANES];
            if (lower)
                multiply_below(x, words, upper * parts, lower * parts, panels, ahead, wide, kind, result);
            else
                multiply_beside(x, words, panels, wide, kind, result);
            if (kind == BYTE_TILES) join_parts(result, units + before, height, parts, wide * LANES, numbers);
            put_tile(m, kind == BYTE_TILES ? numbers : result, panel, height, wide, t->add, to);
            x += height * parts * words, to += height * m->outputs, before += height, ahead = 0;
        }
    }
    __asm__ volatile("tilerelease" : :);
}

/* Rows [first, last) in bfloat16, the upper halves of floats that have been rounded. */
INLINE void lay_halves(const Laying *l, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
        const float *x = l->x + r * l->inputs;
        uint16_t *laid = (uint16_t *)l->laid + r * l->inputs;
        for (int64_t i = 0; i < l->inputs; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            laid[i] = (uint16_t)(bits >> 16);
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
#define FITS_AMX(m) 0
#endif
