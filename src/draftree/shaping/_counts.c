/* The work of planned steps on their trees' guesses: how many of them pay, and which came true.
 *
 * Twin of the numpy code in counts.py, called through ctypes. Behind a pass of the model all of Python's own memory is out
 * of the processor's caches, where a dozen operations on small arrays take longer than the rows they decide about. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ABI 5
#define BINS 24
#define KINDS 3
#define AHEAD 24 /* guesses of a tree in a step that is not planned */
#define RARE 1e-3 /* guesses a step: cells with fewer cost nothing */
#define PARTS 3   /* of a tree's guesses: the likeliest, the next ones, and all others */
#define LEVELS 12 /* bins of each part; the last one holds all that is below */
#define CELLS (PARTS * LEVELS)
#define MOST 4096 /* nodes of all trees that are planned together */
#define TREE 1024 /* nodes of a tree that is learned from */

static const float PER_FACTOR = 4.0f;
static const float KIND_LEAST[KINDS - 1] = {-0.5f, -1.2f};
static const double FORGET = 0.99, SUREST = 0.999;
static const double MOST_MORE = 2; /* factor by which steps raise what guesses are worth that were not tried in them */
static const double HELD = 4;      /* steps that a cell counts for beside those that it was seen in, once there is one */
static const int64_t ENDS[PARTS - 1] = {1, 4}; /* guesses of a tree that are in the parts up to this one */

int64_t counts_abi(void) { return ABI * 10000000 + CELLS * 100000 + AHEAD * 1000 + BINS * 10 + KINDS; }

static int64_t bin_of(float logp) {
    float place = -PER_FACTOR * logp;
    return place < BINS - 1 ? (int64_t)place : BINS - 1;
}

static int64_t cell_of(int64_t guess, float logp) {
    int64_t part = 0, bin = bin_of(logp);
    while (part < PARTS - 1 && guess > ENDS[part]) part++;
    return part * LEVELS + (bin < LEVELS ? bin : LEVELS - 1);
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

/* How many of the sequences that guesses come in bring most tokens a second: worth [sequences, stride], of which counts[q] are given,
 * and alike the rows that each takes; NULL for one each. Each request has as many sequences, one behind the other. Those of all
 * requests compete for rows where rows are packed; else all go as far, and every tree is as wide as the widest. seconds as in `at`,
 * of up to `limit` rows; `more` is added to each. Writes sizes [sequences], how far each goes. */
static void choose(const double *worth, const double *rows, int64_t stride, const int64_t *counts, int64_t sequences, int64_t batch,
                   const double *seconds, double limit, double more, int packed, int64_t *sizes, int64_t *head) {
    double sum = batch, taken = batch, best = sum / (seconds[batch - 1] + more);
    int64_t each = sequences / batch;
    for (int64_t q = 0; q < sequences; q++) sizes[q] = head[q] = 0;
    for (; packed;) {
        int64_t next = -1;
        double most = 0;
        for (int64_t q = 0; q < sequences; q++) {
            while (rows && head[q] < counts[q] && rows[q * stride + head[q]] <= RARE) head[q]++;
            if (head[q] == counts[q]) continue;
            double found = worth[q * stride + head[q]] / (rows ? rows[q * stride + head[q]] : 1);
            if (found > most) most = found, next = q;
        }
        if (next < 0) return;
        int64_t place = next * stride + head[next]++;
        sum += worth[place];
        taken += rows ? rows[place] : 1;
        if (taken > limit) return;
        double pace = sum / (at(seconds, taken) + more);
        if (pace > best) {
            best = pace;
            memcpy(sizes, head, sequences * sizeof *sizes);
        }
    }
    int64_t far = 0, farthest = 0;
    for (int64_t q = 0; q < sequences; q++) farthest = counts[q] > farthest ? counts[q] : farthest;
    for (int64_t w = 0; w < farthest; w++) {
        double wide = 0, take = 0;
        for (int64_t q = 0; q < sequences; q++) {
            if (q % each == 0) take = 0;
            if (w < counts[q]) {
                sum += worth[q * stride + w];
                take += rows ? rows[q * stride + w] : 1;
            }
            wide = take > wide ? take : wide;
        }
        taken += batch * wide;
        if (taken > limit) break;
        double pace = sum / (at(seconds, taken) + more);
        if (pace > best) best = pace, far = w + 1;
    }
    for (int64_t q = 0; q < sequences; q++) sizes[q] = counts[q] < far ? counts[q] : far;
}

/* The cells of a part [LEVELS] as blocks [LEVELS] whose guesses are worth less and less, each of `length` cells: a cell that was
 * seldom seen must not hide those behind it. Returns how many. */
static int64_t pool(const double *worth, const double *count, double *block, double *rows, int64_t *length) {
    int64_t n = 0;
    for (int64_t k = 0; k < LEVELS; k++) {
        block[n] = worth[k], rows[n] = count[k], length[n] = 1;
        for (; n && block[n] * rows[n - 1] >= block[n - 1] * rows[n]; n--)
            block[n - 1] += block[n], rows[n - 1] += rows[n], length[n - 1] += length[n];
        n++;
    }
    return n;
}

/* For steps that no plan goes before, whose trees are taken for each request's average ones: average as in `counts_plan`. levels
 * [batch, PARTS]: how many bins of each part guesses are to be of, never more than of the part before; gains, guesses [batch]: tokens
 * and guesses expected. Returns 0; -2 for too many requests. */
int64_t counts_ahead(double *const *average, int64_t batch, const double *seconds, double aside, int packed, int64_t *levels,
                     double *gains, double *guesses) {
    double worth[MOST], rows[MOST];
    int64_t counts[MOST], head[MOST], length[MOST];
    if (batch * CELLS > MOST) return -2;
    for (int64_t q = 0; q < batch * PARTS; q++) {
        const double *of = average[q / PARTS];
        int64_t from = q % PARTS * LEVELS, to = q * LEVELS;
        counts[q] = of ? LEVELS : 0;
        if (of && packed) counts[q] = pool(of + from, of + CELLS + from, worth + to, rows + to, length + to);
        if (!of || packed) continue;
        memcpy(worth + to, of + from, sizeof(double) * LEVELS);
        memcpy(rows + to, of + CELLS + from, sizeof(double) * LEVELS);
    }
    choose(worth, rows, LEVELS, counts, batch * PARTS, batch, seconds, batch * (AHEAD + 1), aside, packed, levels, head);
    for (int64_t b = 0; b < batch; b++) {
        gains[b] = 1, guesses[b] = 0;
        for (int64_t part = 0; part < PARTS; part++) {
            int64_t q = b * PARTS + part, *level = levels + q;
            if (packed) {
                int64_t blocks = *level;
                for (*level = 0; blocks; blocks--) *level += length[q * LEVELS + blocks - 1];
            }
            if (part && *level > level[-1]) *level = level[-1];
            for (int64_t k = 0; k < *level; k++) {
                gains[b] += average[b][part * LEVELS + k];
                guesses[b] += average[b][CELLS + part * LEVELS + k];
            }
        }
    }
    return 0;
}

/* Sizes for this step's trees, of which the averages learn.
 *
 * logp [batch, stride] of trees with sizes[b] nodes, the root first; rates [KINDS, BINS]; trust [batch] multiplies them.
 * average [batch], where each request's averages [2, CELLS] lie: what guesses of each cell brought a step, and how many there were;
 * NULL where a request takes no part. habit [batch]: weight of the past in them. seconds as in `at`, enough for all nodes. now [batch]
 * become the sizes, gains [batch] the tokens expected. Returns 0; -1 where log-probabilities do not fall; -2 where there are too many
 * nodes. */
int64_t counts_plan(const float *logp, int64_t stride, int64_t batch, const int64_t *sizes, const double *rates, const double *trust,
                    double *const *average, const double *habit, const double *seconds, int packed, int64_t *now, double *gains) {
    double worth[MOST];
    int64_t counts[MOST], head[MOST];
    int64_t width = stride > 1 ? stride - 1 : 1;
    if (batch * width > MOST) return -2;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 2; i < sizes[b]; i++)
            if (logp[b * stride + i] > logp[b * stride + i - 1]) return -1;
    for (int64_t b = 0; b < batch; b++) {
        const float *of = logp + b * stride;
        double of_cell[2 * CELLS] = {0};
        counts[b] = sizes[b] - 1;
        const double *of_kind = counts[b] < 1 ? NULL : rates + BINS * kind_of(of, sizes[b]);
        for (int64_t i = 0; i < counts[b]; i++) {
            int64_t cell = cell_of(i + 1, of[i + 1]);
            double found = of_kind[bin_of(of[i + 1])] * trust[b];
            worth[b * width + i] = found < SUREST ? found : SUREST;
            of_cell[cell] += worth[b * width + i], of_cell[CELLS + cell]++;
        }
        for (int64_t k = 0; average[b] && k < 2 * CELLS; k++)
            average[b][k] = habit[b] * average[b][k] + (1 - habit[b]) * of_cell[k];
    }
    choose(worth, NULL, width, counts, batch, batch, seconds, INFINITY, 0, packed, now, head);
    for (int64_t b = 0; b < batch; b++) {
        gains[b] = 1;
        for (int64_t i = 0; i < now[b]; i++) gains[b] += worth[b * width + i];
    }
    return 0;
}

/* So many steps were taken with guesses of the first `tried` [PARTS] bins of each part; there and right [CELLS] are guesses, and such
 * that were walked. average [3, CELLS]: what guesses of each cell brought a step, how many there were, and in how many steps they were
 * looked for, which count for no more than `most`; each of the steps adds as `weight` of one. What is known of the others follows. */
static void learn(double *average, double most, const double *right, const double *there, double steps, const int64_t *tried,
                  double weight) {
    double *count = average + CELLS, *met = count + CELLS, before = 0, after = 0;
    for (int64_t k = 0; k < CELLS; k++) {
        if (k % LEVELS >= tried[k / LEVELS]) continue;
        double held = met[k] > 0 ? HELD : 0;
        double share = weight * steps / ((met[k] < most ? met[k] : most) + held + weight * steps);
        before += average[k];
        average[k] += share * (right[k] / steps - average[k]);
        count[k] += share * (there[k] / steps - count[k]);
        after += average[k];
        met[k] += weight * steps;
    }
    double more = before > 0 ? after / before : 1;
    if (more > MOST_MORE) more = MOST_MORE;
    for (int64_t k = 0; k < CELLS; k++) {
        if (k % LEVELS < tried[k / LEVELS]) continue;
        average[k] *= more;
        if (average[k] > SUREST * count[k]) average[k] = SUREST * count[k];
    }
}

/* What steps showed, for each request's average and for the usual one.
 *
 * In `met` of the `steps` steps there were guesses: logp [met] are their trees' log-probabilities, [batch] rows width[i] apart; sizes [met, batch]
 * nodes of each tree, the root first; walked [met, batch] nodes of each that were walked, the root among them, one tree's behind the
 * other's in walks. average [batch]: NULL where nothing is to be learned; tried [batch, PARTS], most and weight as in `learn`. Returns
 * 0; -2 for too many requests. */
int64_t counts_course(const float *const *logp, const int64_t *width, const int64_t *sizes, const int64_t *walked, const int64_t *walks,
                      int64_t met, int64_t steps, int64_t batch, double *const *average, double most, double *usual, double usual_most,
                      const int64_t *tried, double weight) {
    double right[MOST] = {0}, there[MOST] = {0};
    if (batch * CELLS > MOST) return -2;
    for (int64_t i = 0; i < met; i++)
        for (int64_t b = 0; b < batch; walks += walked[i * batch + b++]) {
            const float *of = b ? logp[i] + b * width[i] : logp[i];
            for (int64_t n = 1; n < sizes[i * batch + b]; n++) there[b * CELLS + cell_of(n, of[n])]++;
            for (int64_t w = 0; w < walked[i * batch + b]; w++)
                if (walks[w]) right[b * CELLS + cell_of(walks[w], of[walks[w]])]++;
        }
    for (int64_t b = 0; b < batch; b++) {
        if (!average[b]) continue;
        learn(average[b], most, right + b * CELLS, there + b * CELLS, steps, tried + b * PARTS, 1);
        learn(usual, usual_most, right + b * CELLS, there + b * CELLS, steps, tried + b * PARTS, weight);
    }
    return 0;
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
