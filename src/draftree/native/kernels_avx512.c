/* Kernels for processors with AVX-512, and for what only some of these have: dot products of pairs and fours, and matrix
 * registers. */
#include "rows.h"

#include "amx.h"

#if X86
#define AVX512 "avx512f,avx512vl,avx512dq,avx2,fma"
static void product_any(const void *task, int64_t first, int64_t last);
KERNELS(avx512, __attribute__((target(AVX512))), 16, product_any)

#if HAS_DOTS
TILES_OF(dots, __attribute__((target("avx512bf16," AVX512))), 16, DOTS)
TILES_OF(dots, __attribute__((target("avx512vnni," AVX512))), 16, BYTES)
__attribute__((target("avx512bf16," AVX512))) static void pairs_dots(const void *task, int64_t first, int64_t last) {
    product_panels(task, first, last, LANES, DOTS, tiles_dots_DOTS);
}
__attribute__((target("avx512vnni," AVX512))) static void bytes_dots(const void *task, int64_t first, int64_t last) {
    product_panels(task, first, last, LANES, BYTES, tiles_dots_BYTES);
}
__attribute__((target(AVX512))) static void in_pairs_dots(const void *task, int64_t first, int64_t last) {
    lay_tiles(task, first, last, MOST_ROWS(LANES), DOTS);
}
__attribute__((target("avx512bw," AVX512))) static void in_bytes_dots(const void *task, int64_t first, int64_t last) {
    lay_bytes(task, first, last, MOST_ROWS(LANES) / ((const Laying *)task)->parts, BYTES);
}
#include "block_dots.h"
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
#endif

/* A product of rows as they were laid. */
static void product_any(const void *task, int64_t first, int64_t last) {
    Share product = product_avx512;
#if HAS_DOTS
    switch (((const Product *)task)->kind) {
    case DOTS: product = pairs_dots; break;
    case BYTES: product = bytes_dots; break;
    case BLOCKS: product = blocks_dots; break;
#if HAS_AMX
    case TILES: product = halves_amx; break;
    case FLOAT_TILES: product = floats_amx; break;
    case BYTE_TILES: product = parts_amx; break;
#endif
    }
#endif
    product(task, first, last);
}

Kernels kernels_avx512(int matrices) {
    Kernels found = all_avx512;
#if HAS_DOTS
    if (__builtin_cpu_supports("avx512bf16")) found.in_pairs = in_pairs_dots;
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) found.in_bytes = in_bytes_dots, found.in_blocks = in_blocks_dots;
#if HAS_AMX
    if (matrices && may_use_tiles()) found.in_halves = in_halves_amx, found.in_parts = in_parts_amx;
#endif
#endif
    return found;
}
#endif
