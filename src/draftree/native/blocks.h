/* Weights in blocks, as GGUF files have them: whole numbers of 4 to 8 bits with a scale for 32 or 16 of them. Included by
 * products.h.
 *
 * They stay in their bits. In a panel of LANES outputs, 32 inputs of all its outputs lie together as a unit: first the scales
 * (and minima) of the outputs, then words of their numbers. A word of an output holds eight numbers of four bits, the first
 * four in the low halves of its bytes and the next four in the high halves; fifth and sixth bits lie in words behind these.
 * Numbers are unsigned: a weight is scale * (number - OFFSET) + minimum. Formats with superblocks of 256 weights have
 * scales of 6 or 8 bits in a unit, and what these are multiples of before the first of eight units. */

enum { UNIT = 32, SUPER = 8 }; /* inputs of a unit; units of a superblock */
enum { BLOCK_ROWS = 6 }; /* of a tile where rows are multiplied with blocks by dot products of bytes */

#define BLOCKED(kind) ((kind) >= Q4_0)
#define IN_SUPERS(kind) ((kind) >= Q4_K)
#define HAS_MINIMUM(kind) ((kind) == Q4_1 || (kind) == Q5_1 || (kind) == Q4_K || (kind) == Q5_K)
#define OFFSET(kind) ((kind) == Q4_0 ? 8 : (kind) == Q5_0 ? 16 : (kind) == Q6_K ? 32 : (kind) == Q8_0 ? 128 : 0)
#define BITS_OF(kind) ((kind) == Q8_0 ? 8 : (kind) == Q6_K ? 6 : (kind) == Q5_0 || (kind) == Q5_1 || (kind) == Q5_K ? 5 : 4)
/* Bytes of a unit's scales, of a unit, and before the units of a superblock; for LANES outputs. */
#define SCALE_BYTES(kind) (IN_SUPERS(kind) ? 2 * LANES : HAS_MINIMUM(kind) ? 4 * LANES : 2 * LANES)
#define UNIT_BYTES(kind) (SCALE_BYTES(kind) + BITS_OF(kind) * UNIT / 8 * LANES)
#define HEAD_BYTES(kind) (!IN_SUPERS(kind) ? 0 : HAS_MINIMUM(kind) ? 4 * LANES : 2 * LANES)

/* Bytes of a panel with so many inputs. */
INLINE int64_t panel_bytes(int kind, int64_t inputs) {
    int64_t units = inputs / UNIT;
    return units * UNIT_BYTES(kind) + (IN_SUPERS(kind) ? units / SUPER * HEAD_BYTES(kind) : 0);
}

/* Unit `u` of a panel, and what stands before its superblock. */
INLINE const uint8_t *unit_at(int kind, const uint8_t *panel, int64_t u, const uint8_t **head) {
    if (!IN_SUPERS(kind)) return panel + u * UNIT_BYTES(kind);
    *head = panel + u / SUPER * (HEAD_BYTES(kind) + SUPER * UNIT_BYTES(kind));
    return *head + HEAD_BYTES(kind) + u % SUPER * UNIT_BYTES(kind);
}

/* A number of 16 bits, of five for the exponent. */
INLINE float from_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    uint32_t size = (uint32_t)(half & 0x7fff) << 13, bits = size + 0x38000000, sign = (uint32_t)(half & 0x8000) << 16;
    float number;
    if (size < 0x800000) { /* without an exponent: as a sum with 2^-14 it has one */
        bits = size + 0x38800000;
        memcpy(&number, &bits, sizeof number);
        number -= 0x1p-14f;
        memcpy(&bits, &number, sizeof bits);
    } else if (size >= 0x0f800000) { /* infinite, or no number */
        bits = size | 0x7f800000;
    }
    bits |= sign;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* The numbers of a unit's word: of four inputs in `low`, of the next four in `high`. `words` are those of one output, LANES
 * apart. Also of vectors, one word an output. */
#define FOURS(kind, words, step, j, low, high)                                                      \
    do {                                                                                            \
        if ((kind) == Q8_0) {                                                                       \
            low = (words)[(2 * (j)) * (step)] ^ 0x80808080, high = (words)[(2 * (j) + 1) * (step)] ^ 0x80808080; \
        } else {                                                                                    \
            low = (words)[(j) * (step)] & 0x0f0f0f0f, high = (words)[(j) * (step)] >> 4 & 0x0f0f0f0f; \
        }                                                                                           \
        if (BITS_OF(kind) == 5) {                                                                   \
            low |= ((words)[4 * (step)] >> (2 * (j)) & 0x01010101) << 4;                            \
            high |= ((words)[4 * (step)] >> (2 * (j) + 1) & 0x01010101) << 4;                       \
        }                                                                                           \
        if (BITS_OF(kind) == 6) {                                                                   \
            low |= ((words)[(4 + (j) / 2) * (step)] >> (4 * ((j) % 2)) & 0x03030303) << 4;          \
            high |= ((words)[(4 + (j) / 2) * (step)] >> (4 * ((j) % 2) + 2) & 0x03030303) << 4;     \
        }                                                                                           \
    } while (0)

/* The scale of an output's numbers in a half of a unit, and its minimum. */
INLINE void scale_at(int kind, const uint8_t *unit, const uint8_t *head, int lane, int half, float *scale, float *minimum) {
    *minimum = 0;
    if (kind == Q6_K) {
        *scale = from_half(head + 2 * lane) * (int8_t)unit[half * LANES + lane];
    } else if (IN_SUPERS(kind)) {
        *scale = from_half(head + 2 * lane) * unit[lane];
        *minimum = -(from_half(head + 2 * LANES + 2 * lane) * unit[LANES + lane]);
    } else {
        *scale = from_half(unit + 2 * lane);
        if (HAS_MINIMUM(kind)) *minimum = from_half(unit + 2 * LANES + 2 * lane);
    }
}

/* Unit `u` of a panel as floats, [UNIT, LANES]. */
INLINE void expand_unit(int kind, const uint8_t *panel, int64_t u, float *numbers) {
    const uint8_t *head = 0, *unit = unit_at(kind, panel, u, &head), *at = unit + SCALE_BYTES(kind);
    float scales[2][LANES], minima[LANES];
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < LANES; i++) scale_at(kind, unit, head, i, half, &scales[half][i], &minima[i]);
    uint32_t words[8 * LANES];
    memcpy(words, at, UNIT_BYTES(kind) - SCALE_BYTES(kind));
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < LANES; i++) {
            uint32_t low, high;
            FOURS(kind, words + i, LANES, j, low, high);
            for (int b = 0; b < 4; b++) {
                int first = (int)(low >> 8 * b & 255) - OFFSET(kind), next = (int)(high >> 8 * b & 255) - OFFSET(kind);
                float one = scales[j / 2][i] * (float)first, other = scales[j / 2][i] * (float)next;
                numbers[(8 * j + b) * LANES + i] = HAS_MINIMUM(kind) ? one + minima[i] : one; /* -0 stays */
                numbers[(8 * j + 4 + b) * LANES + i] = HAS_MINIMUM(kind) ? other + minima[i] : other;
            }
        }
}

/* The same with the kind as a constant. */
#define EACH_KIND(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q4_K) X(Q5_K) X(Q6_K)
INLINE void expand_any_unit(int kind, const uint8_t *panel, int64_t u, float *numbers) {
    switch (kind) {
#define EXPAND(known) case known: expand_unit(known, panel, u, numbers); break;
        EACH_KIND(EXPAND)
#undef EXPAND
    }
}

/* ---------------------------------------------------------------- from a file's blocks */

/* Numbers of one output's unit `u` in a file, [UNIT], and its scales as bytes: what scale_at reads of an output. */
INLINE void read_block(int kind, const uint8_t *row, int64_t u, uint8_t *numbers, uint8_t *scales, uint8_t *head) {
    static const int sizes[] = {[Q4_0 - Q4_0] = 18, [Q4_1 - Q4_0] = 20, [Q5_0 - Q4_0] = 22, [Q5_1 - Q4_0] = 24,
                                [Q8_0 - Q4_0] = 34, [Q4_K - Q4_0] = 144, [Q5_K - Q4_0] = 176, [Q6_K - Q4_0] = 210};
    const uint8_t *block = row + (IN_SUPERS(kind) ? u / SUPER : u) * sizes[kind - Q4_0];
    int part = (int)(u % SUPER);
    if (kind == Q6_K) {
        int half = part / 4, turn = part % 4;
        const uint8_t *low = block + 64 * half + 32 * (turn % 2), *high = block + 128 + 32 * half;
        for (int l = 0; l < UNIT; l++)
            numbers[l] = (uint8_t)((turn < 2 ? low[l] & 15 : low[l] >> 4) | (high[l] >> 2 * turn & 3) << 4);
        memcpy(scales, block + 192 + 8 * half + 2 * turn, 2);
        memcpy(head, block + 208, 2);
    } else if (IN_SUPERS(kind)) {
        const uint8_t *packed = block + 4, *high = block + 16, *low = block + (kind == Q5_K ? 48 : 16) + 32 * (part / 2);
        for (int l = 0; l < UNIT; l++) {
            int fifth = kind == Q5_K ? (high[l] >> part & 1) << 4 : 0;
            numbers[l] = (uint8_t)((part % 2 ? low[l] >> 4 : low[l] & 15) | fifth);
        }
        if (part < 4)
            scales[0] = packed[part] & 63, scales[1] = packed[part + 4] & 63;
        else
            scales[0] = (uint8_t)((packed[part + 4] & 15) | packed[part - 4] >> 6 << 4),
            scales[1] = (uint8_t)(packed[part + 4] >> 4 | packed[part] >> 6 << 4);
        memcpy(head, block, 4);
    } else if (kind == Q8_0) {
        for (int l = 0; l < UNIT; l++) numbers[l] = block[2 + l] ^ 0x80;
        memcpy(scales, block, 2);
    } else {
        int skip = HAS_MINIMUM(kind) ? 4 : 2;
        uint32_t fifths = 0;
        memcpy(scales, block, skip);
        if (BITS_OF(kind) == 5) memcpy(&fifths, block + skip, 4), skip += 4;
        for (int l = 0; l < UNIT; l++)
            numbers[l] = (uint8_t)((l < 16 ? block[skip + l] & 15 : block[skip + l - 16] >> 4) | (fifths >> l & 1) << 4);
    }
}

/* A panel's outputs from `outputs` rows of a file; zeros behind the last one. */
INLINE void pack_panel(int kind, const uint8_t *rows, int64_t row_bytes, int64_t inputs, int64_t outputs, uint8_t *panel) {
    memset(panel, 0, panel_bytes(kind, inputs));
    for (int64_t u = 0; u < inputs / UNIT; u++) {
        const uint8_t *head = 0;
        uint8_t *unit = (uint8_t *)unit_at(kind, panel, u, &head), *words = unit + SCALE_BYTES(kind);
        for (int64_t i = 0; i < outputs; i++) {
            uint8_t numbers[UNIT], scales[4] = {0}, before[4] = {0};
            read_block(kind, rows + i * row_bytes, u, numbers, scales, before);
            if (IN_SUPERS(kind)) {
                unit[i] = scales[0], unit[LANES + i] = scales[1];
                memcpy((uint8_t *)head + 2 * i, before, 2);
                if (HAS_MINIMUM(kind)) memcpy((uint8_t *)head + 2 * LANES + 2 * i, before + 2, 2);
            } else {
                memcpy(unit + 2 * i, scales, 2);
                if (HAS_MINIMUM(kind)) memcpy(unit + 2 * LANES + 2 * i, scales + 2, 2);
            }
            for (int l = 0; l < UNIT; l++) {
                int j = l / 8, byte = l % 4, upper = l / 4 % 2, bits = BITS_OF(kind);
                uint8_t *word = words + 4 * (j * LANES + i) + byte, *more = words + 4 * (4 * LANES + i) + byte;
                if (bits == 8) {
                    words[4 * (l / 4 * LANES + i) + byte] = numbers[l] ^ 0x80;
                    continue;
                }
                *word |= (uint8_t)((numbers[l] & 15) << 4 * upper);
                if (bits == 5) *more |= (uint8_t)((numbers[l] >> 4) << (2 * j + upper));
                if (bits == 6) more[4 * LANES * (j / 2)] |= (uint8_t)((numbers[l] >> 4) << (4 * (j % 2) + 2 * upper));
            }
        }
    }
}

/* The same with the kind as a constant. */
static void pack_any_panel(int kind, const uint8_t *rows, int64_t row_bytes, int64_t inputs, int64_t outputs, uint8_t *panel) {
    switch (kind) {
#define PACK(known) case known: pack_panel(known, rows, row_bytes, inputs, outputs, panel); break;
        EACH_KIND(PACK)
#undef PACK
    }
}
