/* The work of planned steps on their trees' guesses, how many of them pay and which came true, and that of courses between
 * such: which guesses are to be verified, and what came of it.
 *
 * Twin of the numpy code in counts.py, cells.py and average.py, called through ctypes. Behind a pass of the model all of
 * Python's own memory is out of the processor's caches, where a dozen operations on small arrays take longer than the rows
 * they decide about. */

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
#define FAR 12 /* guesses of a tree that has such of the last part */
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

/* How many guesses of each request bring most tokens a second: worth [batch, stride], of which counts[b] are given. Guesses of all
 * requests compete for rows where those are packed; else every tree is as wide as the widest. seconds as in `at`. Writes sizes
 * [batch]. */
static void choose(const double *worth, int64_t stride, const int64_t *counts, int64_t batch, const double *seconds, int packed,
                   int64_t *sizes, int64_t *head) {
    double sum = batch, best = sum / seconds[batch - 1];
    for (int64_t b = 0; b < batch; b++) sizes[b] = head[b] = 0;
    for (int64_t taken = batch; packed; taken++) {
        int64_t next = -1;
        double most = 0;
        for (int64_t b = 0; b < batch; b++)
            if (head[b] < counts[b] && worth[b * stride + head[b]] > most) most = worth[b * stride + head[b]], next = b;
        if (next < 0) return;
        sum += most;
        head[next]++;
        if (sum / seconds[taken] <= best) continue;
        best = sum / seconds[taken];
        memcpy(sizes, head, batch * sizeof *sizes);
    }
    int64_t width = 0, widest = 0;
    for (int64_t b = 0; b < batch; b++) widest = counts[b] > widest ? counts[b] : widest;
    for (int64_t w = 0; w < widest; w++) {
        for (int64_t b = 0; b < batch; b++) sum += w < counts[b] ? worth[b * stride + w] : 0;
        double time = seconds[batch * (w + 2) - 1];
        if (sum / time > best) best = sum / time, width = w + 1;
    }
    for (int64_t b = 0; b < batch; b++) sizes[b] = counts[b] < width ? counts[b] : width;
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

/* Seconds of one more row where a guess of this part is verified: behind those that a tree has before it, and such rows as the other
 * requests have on the average. Most trees are small and some large, so that a row of the average number would be too cheap. */
static double price(const double *seconds, int64_t part, int64_t batch, double others) {
    double from = batch + others + (part ? ENDS[part - 1] : 0), to = batch + others + (part < PARTS - 1 ? ENDS[part] : FAR);
    return (at(seconds, to) - at(seconds, from)) / (to - from);
}

/* For steps that no plan goes before, whose trees are taken for each request's average ones: average as in `counts_plan`, seconds as in
 * `at`, to which `aside` is added. levels [batch, PARTS]: how many bins of each part guesses are to be of, never more than of the part
 * before; gains, guesses [batch]: tokens and guesses expected. *took: seconds of such a step. Returns 0; -2 for too many requests. */
int64_t counts_ahead(double *const *average, int64_t batch, const double *seconds, double aside, int packed, int64_t *levels,
                     double *gains, double *guesses, double *took) {
    double worth[MOST], rows[MOST], sum = batch, taken = batch, best, cost;
    int64_t counts[MOST], head[MOST] = {0}, length[MOST], sequences = batch * PARTS;
    if (batch * CELLS > MOST) return -2;
    *took = cost = seconds[batch - 1] + aside;
    best = sum / cost;
    for (int64_t q = 0; q < sequences; q++) {
        const double *of = average[q / PARTS];
        int64_t from = q % PARTS * LEVELS, to = q * LEVELS;
        levels[q] = 0;
        counts[q] = of ? pool(of + from, of + CELLS + from, worth + to, rows + to, length + to) : 0;
    }
    for (; packed;) {
        int64_t next = -1;
        double most = 0, others = (taken - batch) * (batch - 1) / batch, prices[PARTS];
        for (int64_t part = 0; part < PARTS; part++) prices[part] = price(seconds, part, batch, others);
        for (int64_t q = 0; q < sequences; q++) {
            while (head[q] < counts[q] && rows[q * LEVELS + head[q]] <= RARE) head[q]++;
            int64_t place = q * LEVELS + head[q], part = q % PARTS;
            if (head[q] == counts[q]) continue;
            double dear = prices[part] > 0 ? prices[part] : 1e-12, found = worth[place] / (rows[place] * dear);
            if (found > most) most = found, next = q;
        }
        if (next < 0) break;
        int64_t place = next * LEVELS + head[next]++;
        sum += worth[place];
        taken += rows[place];
        cost += rows[place] * prices[next % PARTS];
        if (taken > batch * (AHEAD + 1)) break;
        if (sum / cost <= best) continue;
        best = sum / cost, *took = cost;
        for (int64_t q = 0; q < sequences; q++) {
            levels[q] = 0;
            for (int64_t k = 0; k < head[q]; k++) levels[q] += length[q * LEVELS + k];
        }
    }
    for (int64_t w = 0, far = 0; !packed && w < LEVELS; w++) { /* all go as far, and trees are as wide as the widest */
        double wide = 0;
        for (int64_t b = 0; b < batch; b++) {
            double take = 0;
            for (int64_t k = w; average[b] && k < CELLS; k += LEVELS) sum += average[b][k], take += average[b][CELLS + k];
            wide = take > wide ? take : wide;
        }
        taken += batch * wide;
        if (taken > batch * (AHEAD + 1)) break;
        cost = at(seconds, taken) + aside;
        if (sum / cost > best) best = sum / cost, *took = cost, far = w + 1;
        for (int64_t q = 0; q < sequences; q++) levels[q] = average[q / PARTS] ? far : 0;
    }
    for (int64_t b = 0; b < batch; b++) {
        gains[b] = 1, guesses[b] = 0;
        for (int64_t part = 0; part < PARTS; part++) {
            int64_t *level = levels + b * PARTS + part;
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
    choose(worth, width, counts, batch, seconds, packed, now, head);
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
