/* The work of planned steps on their trees' guesses: how many of them pay, and which came true.
 *
 * Twin of the numpy code in counts.py, called through ctypes. Behind a pass of the model all of Python's own memory is out
 * of the processor's caches, where a dozen operations on small arrays take longer than the rows they decide about. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ABI 4
#define BINS 24
#define KINDS 3
#define AHEAD 24 /* guesses of a tree in a step that is not planned */
#define RARE 1e-3 /* of the trees: guesses beyond those that are there so often are not asked for */
#define MOST 4096 /* nodes of all trees that are planned together */
#define TREE 1024 /* nodes of a tree that is learned from */

static const float PER_FACTOR = 4.0f;
static const float KIND_LEAST[KINDS - 1] = {-0.5f, -1.2f};
static const double FORGET = 0.99, SUREST = 0.999;
/* Factor by which steps raise what guesses are worth that were not tried in them; what a guess is worth against the one before, where
 * that is not known. */
static const double MOST_MORE = 2, LEAST_FALL = 0.5, MOST_FALL = 0.9;
static const double HELD = 4; /* trees that a guess's worth counts for beside those that it was seen in, once there is one */

int64_t counts_abi(void) { return ABI * 1000000 + AHEAD * 10000 + BINS * 100 + KINDS; }

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

/* Seconds of a step of that many rows; seconds are of 1, 2, .. rows. */
static double at(const double *seconds, double rows) {
    int64_t whole = (int64_t)rows;
    double more = rows - (double)whole;
    return seconds[whole - 1] + (more > 0 ? more * (seconds[whole] - seconds[whole - 1]) : 0);
}

/* How many guesses of each request bring most tokens a second: worth [batch, stride], of which counts[b] are given, and rows
 * alike, rows that each takes; NULL for one each. Guesses of all requests compete for rows where those are packed; else every
 * tree is as wide as the widest. seconds as in `at`, `more` is added to each. Writes sizes [batch] and gains [batch], tokens
 * expected of each. */
static void choose(const double *worth, const double *rows, int64_t stride, const int64_t *counts, int64_t batch,
                   const double *seconds, double more, int packed, int64_t *sizes, double *gains, int64_t *head) {
    double sum = batch, best = sum / (seconds[batch - 1] + more);
    for (int64_t b = 0; b < batch; b++) sizes[b] = head[b] = 0;
    if (packed) {
        for (double taken = batch;;) {
            int64_t next = -1;
            double most = 0;
            for (int64_t b = 0; b < batch; b++) {
                if (head[b] == counts[b]) continue;
                double found = worth[b * stride + head[b]] / (rows ? rows[b * stride + head[b]] : 1);
                if (found > most) most = found, next = b;
            }
            if (next < 0) break;
            int64_t place = next * stride + head[next]++;
            sum += worth[place];
            taken += rows ? rows[place] : 1;
            double pace = sum / (at(seconds, taken) + more);
            if (pace > best) {
                best = pace;
                memcpy(sizes, head, batch * sizeof *sizes);
            }
        }
    } else {
        int64_t width = 0, widest = 0;
        for (int64_t b = 0; b < batch; b++) widest = counts[b] > widest ? counts[b] : widest;
        for (int64_t w = 0; w < widest; w++) {
            for (int64_t b = 0; b < batch; b++) sum += w < counts[b] ? worth[b * stride + w] : 0;
            double time = seconds[batch * (w + 2) - 1] + more;
            if (sum / time > best) best = sum / time, width = w + 1;
        }
        for (int64_t b = 0; b < batch; b++) sizes[b] = counts[b] < width ? counts[b] : width;
    }
    for (int64_t b = 0; b < batch; b++) {
        gains[b] = 1;
        for (int64_t i = 0; i < sizes[b]; i++) gains[b] += worth[b * stride + i];
    }
}

/* Sizes for the steps to come, where each request's trees are taken for its average ones: average as in `counts_plan`. */
static void ahead(double *const *average, int64_t batch, int64_t width, const double *seconds, double aside, int packed,
                  int64_t *sizes, double *gains) {
    double worth[MOST], rows[MOST];
    int64_t counts[MOST], head[MOST];
    for (int64_t b = 0; b < batch; b++) {
        const double *of = average[b];
        for (counts[b] = 0; of && counts[b] < AHEAD && of[AHEAD + counts[b]] > RARE; counts[b]++) {
            worth[b * width + counts[b]] = of[counts[b]];
            rows[b * width + counts[b]] = of[AHEAD + counts[b]];
        }
    }
    choose(worth, rows, width, counts, batch, seconds, aside, packed, sizes, gains, head);
}

/* The same for steps that no plan goes before. Returns 0; -2 where there are too many nodes. */
int64_t counts_ahead(double *const *average, int64_t batch, const double *seconds, double aside, int packed, int64_t *sizes,
                     double *gains) {
    if (batch * AHEAD > MOST) return -2;
    ahead(average, batch, AHEAD, seconds, aside, packed, sizes, gains);
    return 0;
}

/* Sizes for this step's trees, and for the steps after it on the average of such trees.
 *
 * logp [batch, stride] of trees with sizes[b] nodes, the root first; rates [KINDS, BINS]; trust [batch] multiplies them.
 * average [batch], where each request's averages [2, AHEAD] lie: what its first guesses were worth of late, and how often they
 * were there at all, which this step adds to; NULL where a request takes no part. habit [batch]: weight of the past in them.
 * seconds as in `at`, enough for all nodes and for AHEAD guesses a tree. aside: seconds that the steps to come take beside their
 * rows. now, later [batch] become the sizes, now_gains, later_gains [batch] the tokens expected. Returns 0; -1 where
 * log-probabilities do not fall; -2 where there are too many nodes. */
int64_t counts_plan(const float *logp, int64_t stride, int64_t batch, const int64_t *sizes, const double *rates, const double *trust,
                    double *const *average, const double *habit, const double *seconds, double aside, int packed, int64_t *now,
                    double *now_gains, int64_t *later, double *later_gains) {
    double worth[MOST];
    int64_t counts[MOST], head[MOST];
    int64_t width = stride - 1 > AHEAD ? stride - 1 : AHEAD;
    if (batch * width > MOST) return -2;
    for (int64_t b = 0; b < batch; b++) {
        const float *of = logp + b * stride;
        counts[b] = sizes[b] - 1;
        if (counts[b] < 1) continue;
        const double *of_kind = rates + BINS * kind_of(of, sizes[b]);
        for (int64_t i = 0; i < counts[b]; i++) {
            if (of[i + 1] > of[i]) return -1;
            double found = of_kind[bin_of(of[i + 1])] * trust[b];
            worth[b * width + i] = found < SUREST ? found : SUREST;
        }
    }
    choose(worth, NULL, width, counts, batch, seconds, 0, packed, now, now_gains, head);
    for (int64_t b = 0; b < batch; b++) {
        double *of = average[b], *there = of ? of + AHEAD : NULL;
        for (int64_t i = 0; of && i < AHEAD; i++) {
            of[i] = habit[b] * of[i] + (1 - habit[b]) * (i < counts[b] ? worth[b * width + i] : 0);
            there[i] = habit[b] * there[i] + (1 - habit[b]) * (i < counts[b]);
        }
    }
    ahead(average, batch, AHEAD, seconds, aside, packed, later, later_gains);
    return 0;
}

/* Steps with some guesses each were taken: right [n + 1], in how many of them node i of the tree was walked, of which the root's is
 * not read, and trees [n + 1], how many had i guesses. average [3, AHEAD]: what guesses were worth, how often they were there, and
 * in how many trees, which counts for no more than `most`; each of the steps adds as `weight` of a tree. */
void counts_walked(double *average, double most, const int64_t *right, const int64_t *trees, int64_t n, double weight) {
    double *there = average + AHEAD, *met = there + AHEAD, before = 0, after = 0, steps = 0, left;
    int64_t tried = 0;
    for (int64_t i = 0; i <= n; i++) steps += trees[i];
    left = steps - trees[0];
    if (n > AHEAD) n = AHEAD;
    double held = average[0] > 0 ? HELD : 0;
    for (int64_t i = 0; i < n; left -= trees[++i]) {
        double share = weight * steps / ((met[i] < most ? met[i] : most) + held + weight * steps);
        before += average[i];
        average[i] += share * (right[i + 1] / steps - average[i]);
        there[i] += share * (left / steps - there[i]);
        after += average[i];
        met[i] += weight * steps;
    }
    double more = before > 0 ? after / before : 1;
    if (more > MOST_MORE) more = MOST_MORE;
    for (int64_t i = n; i < AHEAD; i++) {
        average[i] *= more;
        if (average[i] > SUREST * there[i]) average[i] = SUREST * there[i];
    }
    while (tried < AHEAD && met[tried] > 0) tried++;
    if (!tried || tried == AHEAD) return;
    double fall = average[0] > 0 ? pow(average[tried - 1] / average[0], 1.0 / (tried > 1 ? tried - 1 : 1)) : LEAST_FALL;
    fall = fall < LEAST_FALL ? LEAST_FALL : fall > MOST_FALL ? MOST_FALL : fall;
    for (int64_t i = tried; i < AHEAD; i++) {
        average[i] = fall * average[i - 1];
        there[i] = there[tried - 1];
    }
}

/* Count which guesses the text confirms: text [came] is what followed the root. Returns how many it does, with those that the
 * rates expected in *expected; -1 where more text may confirm more and it has not ended; -2 where the tree is too large.
 * right and seen [KINDS, BINS] fade where the tree adds to them. */
int64_t counts_learn(const float *logp, const int64_t *tokens, const int64_t *parents, int64_t nodes, const int64_t *text,
                     int64_t came, int ended, const double *rates, double *right, double *seen, double *expected) {
    uint8_t reached[TREE] = {1}, next[TREE], confirmed[TREE] = {0};
    if (nodes > TREE) return -2;
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
    int64_t depth[TREE] = {0}, of_seen[BINS] = {0}, of_right[BINS] = {0}, found = 0;
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

/* rates [KINDS, BINS]: right / seen by bin; neighbours that rise are pooled, so that a bin known well outweighs an empty one. */
void counts_read(const double *right, const double *seen, double *rates) {
    for (int64_t kind = 0; kind < KINDS; kind++, right += BINS, seen += BINS, rates += BINS) {
        double r[BINS], n[BINS];
        int64_t bins[BINS], pools = 0;
        for (int64_t bin = 0; bin < BINS; bin++) {
            r[pools] = right[bin], n[pools] = seen[bin], bins[pools] = 1;
            for (; pools && r[pools - 1] * n[pools] < r[pools] * n[pools - 1]; pools--)
                r[pools - 1] += r[pools], n[pools - 1] += n[pools], bins[pools - 1] += bins[pools];
            pools++;
        }
        for (int64_t pool = 0, bin = 0; pool < pools; pool++)
            for (int64_t i = 0; i < bins[pool]; i++) rates[bin++] = r[pool] / n[pool];
    }
}
