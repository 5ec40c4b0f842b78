/* Trees of a few nodes on the CPU: who sees whom, and which way the model's own choices lead.
 *
 * Twin of the Python code in structure.py, acceptance/greedy.py and shaping/best_first.py, called through ctypes. Trees that a
 * trie finds have a new shape nearly every step, and a dozen array operations on them take longer than rows of a small model. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ABI 3

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

/* Walks from the roots along the model's choices best [batch, stride] by node. Writes the accepted nodes [width + 1] of each
 * tree and how many in counts [batch]. Returns 0, or 1 where two siblings on the way share a token. */
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

/* ---------------------------------------------------------------- the most probable tree of per-depth candidates */

typedef struct {
    double score, sum;    /* log-probability of the path with and without what is taken off below second choices */
    int64_t parent, rank; /* -1 for children of the root */
    int64_t depth, strays, path; /* from 0; steps below a candidate that was not the best; where its ranks begin */
} Candidate;

/* Whether a goes before b: the likelier; of equals the higher one, and then the one with the better ranks. */
static int precedes(const Candidate *a, const Candidate *b, const int64_t *ranks) {
    if (a->score != b->score) return a->score > b->score;
    if (a->depth != b->depth) return a->depth < b->depth;
    for (int64_t d = 0; d < a->depth; d++)
        if (ranks[a->path + d] != ranks[b->path + d]) return ranks[a->path + d] < ranks[b->path + d];
    return a->rank < b->rank;
}

static void push(Candidate *heap, int64_t *held, Candidate added, const int64_t *ranks) {
    int64_t i = (*held)++;
    for (; i && precedes(&added, heap + (i - 1) / 2, ranks); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = added;
}

static Candidate pop(Candidate *heap, int64_t *held, const int64_t *ranks) {
    Candidate first = heap[0], last = heap[--*held];
    int64_t i = 0;
    for (int64_t below; (below = 2 * i + 1) < *held; i = below) {
        if (below + 1 < *held && precedes(heap + below + 1, heap + below, ranks)) below++;
        if (!precedes(heap + below, &last, ranks)) break;
        heap[i] = heap[below];
    }
    heap[i] = last;
    return first;
}

/* Of each request the best budgets[b] nodes of the product tree of its candidates, best first, and the root before them: to
 * ids [3, batch, width] (tokens, parents, sources) and kept [batch, width], with padding behind; width is 1 + the largest budget.
 * tokens and logp [batch, depth, count], logp falling at each depth. Each step below a candidate that was not the best of its
 * depth adds `off_path` to a path's log-probability. Writes the number of draft tokens in counts [batch]; -1 in the first where
 * there was no memory. */
void tree_best_first(const int64_t *roots, const int64_t *tokens, const float *logp, int64_t depth, int64_t count,
                     const int64_t *budgets, int64_t batch, int64_t width, double off_path, int64_t source, int64_t *ids,
                     float *kept, int64_t *counts) {
    Candidate *heap = malloc((2 * width + 2) * sizeof *heap), *made = malloc(width * sizeof *made);
    int64_t *ranks = malloc((width * depth + depth) * sizeof *ranks);
    int64_t *parents = ids + batch * width, *sources = parents + batch * width;
    for (int64_t b = 0; heap && made && ranks && b < batch; b++, tokens += depth * count, logp += depth * count) {
        int64_t held = 0, n = 0, at = b * width;
        ids[at] = roots[b], parents[at] = -1, sources[at] = 0, kept[at] = 0;
        if (depth && count) push(heap, &held, (Candidate){logp[0], logp[0], -1, 0, 0, 0, 0}, ranks);
        while (held && n < budgets[b] && heap[0].score > -INFINITY) {
            Candidate g = made[n] = pop(heap, &held, ranks);
            int64_t *path = ranks + (n + 1) * depth; /* of its children; ranks[0 ..] is that of the root's */
            memcpy(path, ranks + g.path, g.depth * sizeof *path);
            path[g.depth] = g.rank;
            n++;
            ids[at + n] = tokens[g.depth * count + g.rank], parents[at + n] = g.parent + 1, sources[at + n] = source;
            kept[at + n] = (float)g.score;
            if (g.rank + 1 < count) {
                Candidate s = g;
                s.rank++;
                s.sum = (g.parent < 0 ? 0.0 : made[g.parent].sum) + logp[g.depth * count + s.rank];
                s.score = s.sum + s.strays * off_path;
                push(heap, &held, s, ranks);
            }
            if (g.depth + 1 < depth) {
                int off = 0;
                for (int64_t d = 0; d <= g.depth; d++) off |= path[d] > 0;
                Candidate c = {0, g.sum + logp[(g.depth + 1) * count], n - 1, 0, g.depth + 1, off ? g.strays + 1 : 0, n * depth};
                c.score = c.sum + c.strays * off_path;
                push(heap, &held, c, ranks);
            }
        }
        counts[b] = n;
        for (int64_t i = n + 1; i < width; i++) ids[at + i] = 0, parents[at + i] = -1, sources[at + i] = 0, kept[at + i] = -INFINITY;
    }
    if (batch && !(heap && made && ranks)) counts[0] = -1;
    free(heap), free(made), free(ranks);
}
