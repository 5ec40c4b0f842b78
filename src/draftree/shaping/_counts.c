/* The work of every drafted step on one tree's guesses: how many of them pay, and which came true.
 *
 * Twin of the numpy code in counts.py, called through ctypes. Behind a pass of the model all of Python's own memory is out
 * of the processor's caches, where a dozen operations on small arrays take longer than the rows they decide about. */

#include <stdint.h>
#include <string.h>

#define ABI 1
#define BINS 24
#define KINDS 3
#define MOST 1024 /* nodes of a tree that is looked at here */

static const float PER_FACTOR = 4.0f;
static const float KIND_LEAST[KINDS - 1] = {-0.5f, -1.2f};
static const double FORGET = 0.99, SUREST = 0.999;

int64_t counts_abi(void) { return ABI * 10000 + BINS * 100 + KINDS; }

static int64_t bin_of(float logp) {
    float place = -PER_FACTOR * logp;
    return place < BINS - 1 ? (int64_t)place : BINS - 1;
}

static int64_t kind_of(const float *logp, int64_t nodes) {
    float best = logp[1];
    for (int64_t i = 2; i < nodes; i++) best = logp[i] > best ? logp[i] : best;
    for (int64_t kind = 0; kind < KINDS - 1; kind++)
        if (best > KIND_LEAST[kind]) return kind;
    return KINDS - 1;
}

/* How many of the guesses 1 .. nodes - 1, taken in their order, bring most tokens a second, and in *gain how many tokens a step
 * has with them; -1 where their log-probabilities do not fall. rates [KINDS, BINS], seconds [nodes] by rows from 1 on. */
int64_t counts_weigh(const float *logp, int64_t nodes, const double *rates, double trust, const double *seconds, double *gain) {
    if (nodes < 2) {
        *gain = 1;
        return 0;
    }
    const double *of_kind = rates + BINS * kind_of(logp, nodes);
    double sum = 1, best = 1 / seconds[0];
    int64_t size = 0;
    *gain = 1;
    for (int64_t i = 1; i < nodes; i++) {
        if (logp[i] > logp[i - 1]) return -1;
        double worth = of_kind[bin_of(logp[i])] * trust;
        sum += worth < SUREST ? worth : SUREST;
        if (sum / seconds[i] > best) best = sum / seconds[i], size = i, *gain = sum;
    }
    return size;
}

/* Count which guesses the text confirms: text [came] is what followed the root. Returns how many it does, with those that the
 * rates expected in *expected; -1 where more text may confirm more and it has not ended; -2 where the tree is too large.
 * right and seen [KINDS, BINS] fade where the tree adds to them. */
int64_t counts_learn(const float *logp, const int64_t *tokens, const int64_t *parents, int64_t nodes, const int64_t *text,
                     int64_t came, int ended, const double *rates, double *right, double *seen, double *expected) {
    uint8_t reached[MOST] = {1}, next[MOST], confirmed[MOST] = {0};
    if (nodes > MOST) return -2;
    int any = 1;
    for (int64_t at = 0; at < came && any; at++) {
        any = 0;
        next[0] = 0;
        for (int64_t i = 1; i < nodes; i++) {
            next[i] = reached[parents[i]] && tokens[i] == text[at];
            confirmed[i] |= next[i];
            any |= next[i];
        }
        memcpy(reached, next, nodes);
    }
    int64_t depth[MOST] = {0}, of_seen[BINS] = {0}, of_right[BINS] = {0}, found = 0;
    for (int64_t i = 1; i < nodes; i++) {
        if (!ended && any && reached[parents[i]]) return -1;
        depth[i] = depth[parents[i]] + 1;
        if (ended && depth[i] > came) continue;
        of_seen[bin_of(logp[i])]++;
        of_right[bin_of(logp[i])] += confirmed[i];
        found += confirmed[i];
    }
    int64_t row = BINS * kind_of(logp, nodes);
    *expected = 0;
    for (int64_t bin = 0; bin < BINS; bin++) {
        if (!of_seen[bin]) continue;
        *expected += of_seen[bin] * rates[row + bin];
        seen[row + bin] = FORGET * seen[row + bin] + of_seen[bin];
        right[row + bin] = FORGET * right[row + bin] + of_right[bin];
    }
    return found;
}
