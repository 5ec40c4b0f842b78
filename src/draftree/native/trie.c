/* The C twin of the Lookahead trie: requests, their prompt arenas, and retrieval. Plain C99 behind ctypes, so that
 * any compiler builds it and no Python version binds it. python_trie.py does the same in dicts and is its oracle:
 * a change here is a change there. The caller holds a lock; nothing here is re-entrant. */
#include "forest.h"
#include "paths.h"

#include <math.h>

#define ABI 8 /* raised when a signature changes; c_trie.py refuses a library of another number */
#define FROM_PROMPT 1
#define FROM_OUTPUT 2
#define HIERARCHICAL 0
#define PARALLEL 1
#define SINGLE 2

/* One request: the tokens before its next one, and its prompt's branches. */
typedef struct {
    int live, ended, started; /* ended: EOS was generated; started: a first token was generated */
    int32_t n_context, n_cursors;
    int32_t *context; /* the newest tokens, oldest first */
    Cursor *cursors;
    Forest prompt;
} Request;

/* The trie: its settings, the requests, the branches that all share, and scratch memory. */
typedef struct {
    int32_t branch_length, max_query, min_nodes, n_context, scan;
    double prompt_weight, smoothing;
    int eliminate;
    int32_t n_eos, *eos;
    uint32_t tick;
    int32_t n_requests;
    Request *requests;
    Forest output, shared; /* shared: every prompt, when they are not eliminated */
    Paths heap, kids, trail;
    int32_t offered; /* children that were looked at, those that are not in `kids` as well */
} Trie;

/* A draft being filled: arrays of the caller with room for `budget` nodes, of which `n` are there. */
typedef struct {
    int32_t *tokens, *parents;
    float *logp;
    uint8_t *source;
    int32_t n, budget;
} Draft;

/* Whether a token ends a text. */
static int is_eos(const Trie *t, int32_t token) {
    for (int32_t i = 0; i < t->n_eos; i++)
        if (t->eos[i] == token) return 1;
    return 0;
}

/* ---------------------------------------------------------------- life */

/* The number of this file's signatures, see ABI. */
int32_t trie_abi(void) { return ABI; }

/* An empty trie with these settings, which python_trie.py describes; NULL when memory ran out. */
Trie *trie_new(int32_t branch_length, int32_t max_query, int32_t min_nodes, int32_t scan, double prompt_weight, double smoothing,
               int64_t per_key, int64_t max_nodes, int prune, int eliminate, const int32_t *eos, int32_t n_eos) {
    Trie *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->branch_length = branch_length;
    t->max_query = max_query;
    t->min_nodes = min_nodes;
    t->n_context = (branch_length > max_query ? branch_length : max_query) + 1; /* with the token before, for `breaks` */
    t->scan = scan;
    t->prompt_weight = prompt_weight;
    t->smoothing = smoothing;
    t->eliminate = eliminate;
    t->eos = malloc((size_t)(n_eos + 1) * sizeof(int32_t));
    if (!t->eos) {
        free(t);
        return NULL;
    }
    memcpy(t->eos, eos, (size_t)n_eos * sizeof(int32_t));
    t->n_eos = n_eos;
    forest_init(&t->output, max_nodes, per_key, prune);
    forest_init(&t->shared, max_nodes, per_key, prune);
    return t;
}

/* Frees a request; its slot is free for another. */
static void request_drop(Trie *t, Request *r) {
    forest_close(&t->output, r->cursors, r->n_cursors);
    forest_drop(&r->prompt);
    free(r->context);
    free(r->cursors);
    memset(r, 0, sizeof *r);
}

/* Frees everything. */
void trie_free(Trie *t) {
    for (int32_t i = 0; i < t->n_requests; i++)
        if (t->requests[i].live) request_drop(t, &t->requests[i]);
    forest_drop(&t->output);
    forest_drop(&t->shared);
    free(t->requests);
    free(t->heap.items);
    free(t->kids.items);
    free(t->trail.items);
    free(t->eos);
    free(t);
}

/* Nodes in all forests, or in the output's alone. */
int64_t trie_nodes(const Trie *t, int only_output) {
    int64_t n = t->output.live;
    if (only_output) return n;
    for (int32_t i = 0; i < t->n_requests; i++) n += t->requests[i].prompt.live;
    return n + t->shared.live;
}

/* Bytes that the forests take. */
int64_t trie_bytes(const Trie *t) {
    int64_t n = forest_bytes(&t->output) + forest_bytes(&t->shared);
    for (int32_t i = 0; i < t->n_requests; i++) n += forest_bytes(&t->requests[i].prompt);
    return n;
}

/* ---------------------------------------------------------------- requests */

/* One more token of a request's text; the oldest goes where there is no room. */
static void remember(const Trie *t, Request *r, int32_t token) {
    if (r->n_context == t->n_context)
        memmove(r->context, r->context + 1, (size_t)(--r->n_context) * sizeof(int32_t));
    r->context[r->n_context++] = token;
}

/* Whether no branch goes on at or begins with a token of a prompt: behind an EOS, chat templates write what no model does. */
static int breaks(const Trie *t, const int32_t *tokens, int64_t i) {
    return is_eos(t, tokens[i]) || (i > 0 && is_eos(t, tokens[i - 1]));
}

/* The slot of the new request; NONE when memory ran out. */
int32_t trie_begin(Trie *t, const int32_t *tokens, int64_t n) {
    int32_t slot = 0;
    while (slot < t->n_requests && t->requests[slot].live) slot++;
    if (slot == t->n_requests) {
        int32_t size = t->n_requests ? 2 * t->n_requests : 8;
        Request *requests = realloc(t->requests, (size_t)size * sizeof(Request));
        if (!requests) return NONE;
        memset(requests + t->n_requests, 0, (size_t)(size - t->n_requests) * sizeof(Request));
        t->requests = requests;
        t->n_requests = size;
    }
    Request *r = &t->requests[slot];
    r->context = malloc((size_t)t->n_context * sizeof(int32_t));
    r->cursors = malloc((size_t)(t->branch_length + 1) * sizeof(Cursor));
    if (!r->context || !r->cursors) {
        request_drop(t, r);
        return NONE;
    }
    r->live = 1;
    forest_init(&r->prompt, t->output.max_nodes, 0, 0);
    Forest *f = t->eliminate ? &r->prompt : &t->shared;
    /* About what a prompt takes: growing step by step would hash every node several times. */
    if (t->eliminate) forest_resize(f, n * (t->branch_length + 1) * 9 / 10 + 64);
    int32_t open = 0;
    for (int64_t i = 0; i < n; i++)
        open = forest_feed(f, r->cursors, open, tokens[i], ++t->tick, t->branch_length, breaks(t, tokens, i));
    forest_close(f, r->cursors, open);
    for (int64_t i = n > t->n_context ? n - t->n_context : 0; i < n; i++) remember(t, r, tokens[i]);
    return slot;
}

/* One more token on the branches of what is generated. */
static void feed_output(Trie *t, Request *r, int32_t token, int ends) {
    r->n_cursors = forest_feed(&t->output, r->cursors, r->n_cursors, token, ++t->tick, t->branch_length, ends);
}

/* `n` more tokens were generated for a request. */
void trie_extend(Trie *t, int32_t slot, const int32_t *tokens, int64_t n) {
    Request *r = &t->requests[slot];
    if (n && !r->started) {
        /* Stitching: the branches that start in the prompt's tail go on into the output. */
        int32_t from = r->n_context > t->branch_length ? r->n_context - t->branch_length : 0;
        for (int32_t i = from; i < r->n_context; i++) feed_output(t, r, r->context[i], breaks(t, r->context, i));
        r->started = 1;
    }
    for (int64_t i = 0; i < n; i++) {
        int ends = is_eos(t, tokens[i]);
        if (!r->ended) feed_output(t, r, tokens[i], ends);
        r->ended |= ends;
        remember(t, r, tokens[i]);
    }
}

/* A request has ended. */
void trie_end(Trie *t, int32_t slot) { request_drop(t, &t->requests[slot]); }

/* ---------------------------------------------------------------- retrieval */

/* Hits that a path's parent is taken to have more. Behind a long text that was seen before, less is open. */
static double unseen(const Trie *t, const Path *path) { return t->smoothing / ((double)path->known * path->known); }

/* Adds a child of `from` to t->kids; p and o are its nodes, NONE where a forest has none. */
static void add_kid(Trie *t, const Path *from, const Forest *pf, int32_t p, int32_t o, int32_t at) {
    if (!reserve(&t->kids)) return;
    const Forest *of = &t->output;
    double hits = 0;
    if (p != NONE) hits += t->prompt_weight * (pf->nodes[p].count / (double)ONE_HIT);
    if (o != NONE) hits += of->nodes[o].count / (double)ONE_HIT;
    /* The hand may have halved the parent and not yet the child; a child must not outrank its parent. */
    double score = hits < from->score ? hits : from->score;
    double logp = from->logp + log(score / (from->score + unseen(t, from)));
    t->offered++;
    Path *kid = &t->kids.items[t->kids.n++];
    kid->score = score;
    kid->logp = logp;
    kid->p_stamp = p != NONE ? pf->nodes[p].stamp : 0;
    kid->o_stamp = o != NONE ? of->nodes[o].stamp : 0;
    kid->token = p != NONE ? pf->nodes[p].token : of->nodes[o].token;
    kid->depth = from->depth + 1;
    kid->known = from->known + 1;
    kid->p = p;
    kid->o = o;
    kid->at = at;
}

/* Fills t->kids with the merged children, of each forest the `scan` most recently touched ones. */
static void expand(Trie *t, const Path *from, const Forest *pf, int32_t at) {
    const Forest *of = &t->output;
    t->kids.n = t->offered = 0;
    uint32_t oldest = 0; /* stamp of the last prompt child that was scanned */
    int32_t left = t->scan;
    if (from->p != NONE)
        for (int32_t p = pf->nodes[from->p].child; p != NONE && left > 0; p = pf->nodes[p].next, left--) {
            int32_t o = from->o == NONE ? NONE : forest_find(of, from->o, pf->nodes[p].token);
            oldest = pf->nodes[p].stamp;
            add_kid(t, from, pf, p, o, at);
        }
    left = t->scan;
    if (from->o != NONE)
        for (int32_t o = of->nodes[from->o].child; o != NONE && left > 0; o = of->nodes[o].next, left--) {
            int32_t p = from->p == NONE ? NONE : forest_find(pf, from->p, of->nodes[o].token);
            if (p == NONE || pf->nodes[p].stamp < oldest) add_kid(t, from, pf, p, o, at);
        }
}

/* Adds a path's last token to the draft; its row. */
static int32_t emit(Draft *d, const Path *path, int32_t parent) {
    d->tokens[d->n] = path->token;
    d->parents[d->n] = parent;
    d->logp[d->n] = (float)path->logp;
    d->source[d->n] = (uint8_t)((path->p != NONE ? FROM_PROMPT : 0) | (path->o != NONE ? FROM_OUTPUT : 0));
    return d->n++;
}

/* The row below `n` of this token behind `parent`, or NONE. */
static int32_t row_of(const Draft *d, int32_t parent, int32_t token, int32_t n) {
    for (int32_t i = parent + 1; i < n; i++)
        if (d->parents[i] == parent && d->tokens[i] == token) return i;
    return NONE;
}

/* Puts t->kids on the heap, without the one of index `but`. */
static void push_kids(Trie *t, int32_t but) {
    for (int32_t i = 0; i < t->kids.n; i++)
        if (i != but) heap_push(&t->heap, &t->kids.items[i]);
}

/* Index of the first of t->kids in the order of drafts, or NONE. */
static int32_t best_kid(const Trie *t) {
    int32_t best = NONE;
    for (int32_t i = 0; i < t->kids.n; i++)
        if (best == NONE || better(&t->kids.items[i], &t->kids.items[best])) best = i;
    return best;
}

/* The best paths one by one, whatever branch they are on. Like take_branches returns how many nodes of the match it saw. */
static int32_t take_tree(Trie *t, const Forest *pf, int32_t depth, Draft *d) {
    int32_t seen = 0, before = d->n; /* rows that longer prefixes found: they stay, and stay ahead */
    for (; t->heap.n && d->n < d->budget; seen++) {
        Path path = heap_pop(&t->heap);
        int32_t row = row_of(d, path.at, path.token, before);
        if (row == NONE)
            row = emit(d, &path, path.at);
        else
            path.logp = d->logp[row];
        if (path.depth == depth) continue;
        expand(t, &path, pf, row);
        push_kids(t, NONE);
    }
    return seen;
}

/* Is this branch the beginning of one that was emitted? */
static int already_emitted(const Draft *d, const Path *const *branch, int32_t length) {
    for (int32_t start = 0, next; start < d->n; start = next) {
        int32_t same = 0;
        for (next = start + 1; next < d->n && d->parents[next] != NONE;) next++;
        while (same < length && start + same < next && d->tokens[start + same] == branch[same]->token) same++;
        if (same == length) return 1;
    }
    return 0;
}

/* Whole branches, best first: the best open path, followed down its best children. At most `budget` are looked at, as
 * those that are cut at the budget may all begin alike. */
static int32_t take_branches(Trie *t, const Forest *pf, int32_t depth, Draft *d, const Path **branch) {
    t->trail.n = 0;
    for (int32_t tried = 0; t->heap.n && d->n < d->budget && tried < d->budget; tried++) {
        Path path = heap_pop(&t->heap);
        for (;;) {
            if (!reserve(&t->trail)) return t->trail.n;
            int32_t at = t->trail.n++;
            t->trail.items[at] = path;
            if (path.depth == depth) break;
            expand(t, &path, pf, at);
            int32_t best = best_kid(t);
            if (best == NONE) break;
            push_kids(t, best);
            path = t->kids.items[best];
        }
        int32_t length = path.depth, first = d->n;
        for (int32_t i = length - 1, at = t->trail.n - 1; i >= 0; at = t->trail.items[at].at, i--)
            branch[i] = &t->trail.items[at];
        if (length > d->budget - first) length = d->budget - first;
        if (already_emitted(d, branch, length)) continue;
        for (int32_t i = 0; i < length; i++) emit(d, branch[i], i ? d->n - 1 : NONE);
    }
    return t->trail.n;
}

/* The node at the end of a suffix that begins at a root, or NONE. */
static int32_t locate(const Forest *f, const int32_t *suffix, int32_t n) {
    int32_t k = NONE;
    for (int32_t i = 0; i < n; i++)
        if ((k = forest_find(f, k, suffix[i])) == NONE) break;
    return k;
}

/* Multi-stage retrieval (section 4.3.2): the longest suffix first, shorter ones while too little was found. */
int32_t trie_retrieve(Trie *t, int32_t slot, int32_t budget, int32_t depth, int mode, int sources,
                      int32_t *tokens, int32_t *parents, float *logp, uint8_t *source) {
    const Request *r = &t->requests[slot];
    const Forest *pf = t->eliminate ? &r->prompt : &t->shared;
    Draft d = {tokens, parents, logp, source, 0, budget};
    const Path **branch = malloc((size_t)(depth + 1) * sizeof(Path *));
    if (!branch) return 0;
    double escape = 0; /* log-probability that no longer suffix knew the next token, as in PPM */
    int32_t q = r->n_context < t->max_query ? r->n_context : t->max_query;
    for (int32_t seen = 0; q > 0 && seen < t->min_nodes && d.n < budget; q--) {
        const int32_t *suffix = r->context + r->n_context - q;
        Path match = {0, escape, 0, 0, 0, 0, NONE, NONE, NONE, q};
        if (sources & FROM_PROMPT) match.p = locate(pf, suffix, q);
        if (sources & FROM_OUTPUT) match.o = locate(&t->output, suffix, q);
        if (match.p != NONE) match.score += t->prompt_weight * (pf->nodes[match.p].count / (double)ONE_HIT);
        if (match.o != NONE) match.score += t->output.nodes[match.o].count / (double)ONE_HIT;
        t->heap.n = 0;
        expand(t, &match, pf, NONE);
        if (!t->offered) continue;
        escape += log(unseen(t, &match) / (match.score + unseen(t, &match)));
        if (mode == SINGLE) {
            int32_t best;
            while ((best = best_kid(t)) != NONE) {
                Path path = t->kids.items[best];
                int32_t row = emit(&d, &path, path.at);
                if (path.depth == depth || d.n == budget) break;
                expand(t, &path, pf, row);
            }
            break;
        }
        push_kids(t, NONE);
        if (mode == PARALLEL)
            seen = take_branches(t, pf, depth, &d, branch);
        else
            seen = take_tree(t, pf, depth, &d);
    }
    free(branch);
    return d.n;
}

/* ---------------------------------------------------------------- files */

/* Copies the live output nodes in array order, the first `room` of them; parents[] holds array indices, at[] each node's own.
 * Returns how many there are. */
int32_t trie_dump(const Trie *t, int32_t room, int32_t *at, int32_t *tokens, int32_t *parents, uint32_t *counts,
                  uint32_t *stamps) {
    const Forest *f = &t->output;
    int32_t n = 0;
    for (int32_t k = 0; k < f->top; k++) {
        if (f->nodes[k].parent == FREE) continue;
        if (n < room) {
            at[n] = k;
            tokens[n] = f->nodes[k].token;
            parents[n] = f->nodes[k].parent;
            counts[n] = f->nodes[k].count;
            stamps[n] = f->nodes[k].stamp;
        }
        n++;
    }
    return n;
}

/* Fills an empty output forest; parents come before children and siblings oldest first. 0 when memory ran out. */
int trie_restore(Trie *t, int32_t n, const int32_t *tokens, const int32_t *parents, const uint32_t *counts,
                 const uint32_t *stamps, uint32_t tick) {
    Forest *f = &t->output;
    forest_resize(f, n);
    for (int32_t i = 0; i < n; i++) {
        int32_t k = forest_add(f, parents[i], tokens[i]);
        if (k == NONE) return 0;
        f->nodes[k].count = counts[i];
        f->nodes[k].stamp = stamps[i];
    }
    t->tick = tick;
    return 1;
}

/* How many tokens have been fed: the clock of stamps. */
uint32_t trie_tick(const Trie *t) { return t->tick; }
