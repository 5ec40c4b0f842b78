/* Trees of a few nodes on the host: who sees whom, and which way the model's own choices lead.
 *
 * Twin of the Python code in structure.py and acceptance/greedy.py, called through ctypes. Trees that a trie finds have a new
 * shape nearly every step, and a dozen array operations on them take longer than rows of a small model. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ABI 2

int32_t tree_abi(void) { return ABI; }

/* depth [batch, width] and seen [batch, width, width] of parents [batch, width], -1 for roots and padding. Returns the largest
 * depth. */
int64_t tree_structure(const int64_t *parents, int64_t batch, int64_t width, int64_t *depth, uint8_t *seen) {
    int64_t height = 0;
    for (int64_t b = 0; b < batch; b++, parents += width, depth += width, seen += width * width)
        for (int64_t i = 0; i < width; i++) {
            int64_t above = parents[i];
            uint8_t *row = seen + i * width;
            if (above >= 0) {
                memcpy(row, seen + above * width, width);
                depth[i] = depth[above] + 1;
            } else {
                memset(row, 0, width);
                depth[i] = 0;
            }
            row[i] = 1;
            height = depth[i] > height ? depth[i] : height;
        }
    return height;
}

/* The first sizes[b] nodes of each tree, padded to `width`: from `parts` of tokens, parents, sources [batch, stride] and best
 * alike, to ids [3, batch, width] and kept [batch, width]. */
void tree_first(const int64_t *const *parts, const float *best, int64_t stride, const int64_t *sizes, int64_t batch, int64_t width,
                int64_t *ids, float *kept) {
    static const int64_t padding[3] = {0, -1, 0};
    for (int64_t part = 0; part < 3; part++)
        for (int64_t b = 0; b < batch; b++)
            for (int64_t i = 0; i < width; i++) *ids++ = i < sizes[b] ? parts[part][b * stride + i] : padding[part];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < width; i++) *kept++ = i < sizes[b] ? best[b * stride + i] : -INFINITY;
}

/* Walks from the roots along the model's choices best [batch, stride] by node. Writes of each tree the nodes [width + 1] walked
 * and how many in counts [batch]. Returns 0, or 1 where two siblings on the way share a token. */
int32_t tree_walk(const int64_t *parents, const int64_t *tokens, const int64_t *sizes, int64_t batch, int64_t width,
                  const int64_t *best, int64_t stride, int64_t *nodes, int64_t *counts) {
    for (int64_t b = 0; b < batch; b++, parents += width, tokens += width, best += stride, nodes += width) {
        int64_t node = 0, n = 0;
        while (node >= 0) {
            int64_t next = -1;
            nodes[n++] = node;
            for (int64_t i = node + 1; i < sizes[b]; i++)
                if (parents[i] == node && tokens[i] == best[node]) {
                    if (next >= 0) return 1;
                    next = i;
                }
            node = next;
        }
        counts[b] = n;
    }
    return 0;
}
