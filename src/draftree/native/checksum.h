/* A checksum over the bytes of a model's weights, to notice that they were changed. Included by kernels.h only.
 *
 * Words of four bytes go through CHAINS x WIDE sums side by side, sum = turned(sum ^ word) * MIX, which one after the other
 * are folded into one number a block. Every step can be undone, so a change of a single word always changes its block's
 * number. Turning brings the upper bits down, from where multiplying spreads them: without it the signs of two words, or
 * the exponents of sixteen, would cancel. Other changes go unnoticed once in four billion. It takes as long as memory
 * does. */

#define CHAINS 8
#define WIDE 8 /* words of a vector, as AVX2 has them: sums in wider ones would go through memory there */
#define BLOCK_WORDS 16384
#define MIX 0x9E3779B1u
#define FOLD 1099511628211ull

typedef uint32_t Words __attribute__((vector_size(4 * WIDE), aligned(4)));

/* A word's bits moved up by 15 places, and those that fall out put in below. */
#define TURNED(word) ((word) << 15 | (word) >> 17)

/* Words, and a number for each block of them. */
typedef struct {
    const uint32_t *words;
    int64_t count;
    uint64_t *sums;
} Checksum;

/* The numbers of blocks [first, last). */
INLINE void checksum_share(const Checksum *c, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++) {
        int64_t i = block * BLOCK_WORDS, end = i + BLOCK_WORDS < c->count ? i + BLOCK_WORDS : c->count;
        Words chains[CHAINS];
        UNROLL for (int k = 0; k < CHAINS; k++) chains[k] = (Words){0};
        for (; i + CHAINS * WIDE <= end; i += CHAINS * WIDE)
            UNROLL for (int k = 0; k < CHAINS; k++) {
                chains[k] ^= *(const Words *)(c->words + i + k * WIDE);
                chains[k] = TURNED(chains[k]) * MIX;
            }
        uint64_t sum = (uint64_t)end;
        for (int k = 0; k < CHAINS; k++)
            for (int lane = 0; lane < WIDE; lane++) sum = (sum ^ chains[k][lane]) * FOLD;
        for (; i < end; i++) sum = (sum ^ c->words[i]) * FOLD;
        c->sums[block] = sum;
    }
}
