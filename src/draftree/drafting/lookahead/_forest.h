/* A counted forest of token branches: the store under the Lookahead trie (section 4.3 of the paper).
 * Nodes live in one array and are found by a hash of (parent, token), so one more token on a branch is one
 * look-up however wide the tree is. Siblings are linked most recently touched first. When the forest is full, a
 * clock hand walks the array, halves what it passes and frees what falls under one hit: a few steps for each new
 * node instead of one long stop. Included by _trie.c only. */
#ifndef DRAFTREE_FOREST_H
#define DRAFTREE_FOREST_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NONE (-1)
#define FREE (-2)         /* value of `parent` in a freed node */
#define ONE_HIT 256u      /* counts are fixed point: halving stays exact, so both twins agree for ever */
#define MAX_COUNT (1u << 31)
#define HAND_STEPS 64     /* most nodes the hand visits for one new node: the bound on a stall */

typedef struct {
    int32_t token, parent;
    int32_t child, next, prev; /* first child; siblings. `next` also threads the free list */
    uint32_t count;            /* hits x ONE_HIT */
    uint32_t stamp;            /* tick of the last touch */
    uint32_t pins;             /* open cursors that stand here; the hand leaves pinned nodes alone */
} Node;

typedef struct {
    Node *nodes;
    int32_t *slots; /* linear probing, NONE = empty */
    int32_t size, top, live, keys, free_head, hand;
    int64_t n_slots;
    int64_t max_nodes, per_key; /* per_key 0: only max_nodes bounds */
    int prune;
} Forest;

typedef struct {
    int32_t node, depth;
} Cursor;

static int64_t slot_of(const Forest *f, int32_t parent, int32_t token) {
    uint64_t h = ((uint64_t)(uint32_t)parent << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9ull;
    return (int64_t)(((h >> 32) * (uint64_t)f->n_slots) >> 32);
}

static void slot_put(Forest *f, int32_t k) {
    int64_t i = slot_of(f, f->nodes[k].parent, f->nodes[k].token);
    while (f->slots[i] != NONE)
        if (++i == f->n_slots) i = 0;
    f->slots[i] = k;
}

/* Backward shift: no tombstones, so a forest that turns over for ever keeps its probe lengths. */
static void slot_drop(Forest *f, int32_t k) {
    int64_t n = f->n_slots, i = slot_of(f, f->nodes[k].parent, f->nodes[k].token), j;
    while (f->slots[i] != k)
        if (++i == n) i = 0;
    for (j = i;;) {
        if (++j == n) j = 0;
        int32_t other = f->slots[j];
        if (other == NONE) break;
        int64_t home = slot_of(f, f->nodes[other].parent, f->nodes[other].token);
        int64_t from_home = j >= home ? j - home : j - home + n, from_hole = j >= i ? j - i : j - i + n;
        if (from_home >= from_hole) {
            f->slots[i] = other;
            i = j;
        }
    }
    f->slots[i] = NONE;
}

static int32_t forest_find(const Forest *f, int32_t parent, int32_t token) {
    if (!f->live) return NONE;
    int64_t i = slot_of(f, parent, token);
    int32_t k;
    while ((k = f->slots[i]) != NONE) {
        if (f->nodes[k].parent == parent && f->nodes[k].token == token) return k;
        if (++i == f->n_slots) i = 0;
    }
    return NONE;
}

static int forest_resize(Forest *f, int64_t size) {
    if (size > f->max_nodes) size = f->max_nodes;
    if (size <= f->size) return 0;
    int64_t n_slots = size + size / 2 + 2;
    Node *nodes = realloc(f->nodes, (size_t)size * sizeof(Node));
    if (!nodes) return 0;
    f->nodes = nodes;
    int32_t *slots = malloc((size_t)n_slots * sizeof(int32_t));
    if (!slots) return 0;
    memset(slots, 0xff, (size_t)n_slots * sizeof(int32_t));
    free(f->slots);
    f->slots = slots;
    f->n_slots = n_slots;
    f->size = (int32_t)size;
    for (int32_t k = 0; k < f->top; k++)
        if (nodes[k].parent != FREE) slot_put(f, k);
    return 1;
}

static void forest_init(Forest *f, int64_t max_nodes, int64_t per_key, int prune) {
    memset(f, 0, sizeof *f);
    f->max_nodes = max_nodes;
    f->per_key = per_key;
    f->prune = prune;
    f->free_head = NONE;
}

static void forest_drop(Forest *f) {
    free(f->nodes);
    free(f->slots);
    forest_init(f, f->max_nodes, f->per_key, f->prune);
}

static int64_t forest_bytes(const Forest *f) {
    return (int64_t)f->size * (int64_t)sizeof(Node) + f->n_slots * (int64_t)sizeof(int32_t);
}

static void unlink_sibling(Forest *f, int32_t k) {
    Node *n = &f->nodes[k];
    if (n->prev != NONE)
        f->nodes[n->prev].next = n->next;
    else
        f->nodes[n->parent].child = n->next;
    if (n->next != NONE) f->nodes[n->next].prev = n->prev;
}

static void link_front(Forest *f, int32_t k) {
    Node *n = &f->nodes[k], *parent = &f->nodes[n->parent];
    n->prev = NONE;
    n->next = parent->child;
    if (n->next != NONE) f->nodes[n->next].prev = k;
    parent->child = k;
}

static int removable(const Node *n) { return n->child == NONE && !n->pins && n->count < ONE_HIT; }

/* Frees a spent leaf, and then its parents for as long as they are spent leaves themselves. */
static void forest_remove(Forest *f, int32_t k) {
    while (k != NONE && removable(&f->nodes[k])) {
        int32_t parent = f->nodes[k].parent;
        slot_drop(f, k);
        if (parent != NONE)
            unlink_sibling(f, k);
        else
            f->keys--;
        f->nodes[k].parent = FREE;
        f->nodes[k].next = f->free_head;
        f->free_head = k;
        f->live--;
        k = parent;
    }
}

/* True when one more node may be stored; sweeps at most HAND_STEPS nodes to get there. */
static int forest_make_room(Forest *f, int new_key) {
    for (int step = 0;; step++) {
        int64_t limit = f->max_nodes;
        if (f->prune && f->per_key) {
            int64_t by_key = f->per_key * (f->keys + new_key);
            if (by_key < limit) limit = by_key;
        }
        if (f->live < limit) return 1;
        if (!f->prune || step == HAND_STEPS) return 0;
        if (f->hand >= f->top) f->hand = 0;
        Node *n = &f->nodes[f->hand];
        if (n->parent != FREE) {
            n->count /= 2;
            forest_remove(f, f->hand);
        }
        f->hand++;
    }
}

static int32_t forest_add(Forest *f, int32_t parent, int32_t token) {
    int32_t k = f->free_head;
    if (k != NONE)
        f->free_head = f->nodes[k].next;
    else {
        if (f->top == f->size && !forest_resize(f, f->size < 256 ? 256 : (int64_t)f->size + f->size / 2)) return NONE;
        k = f->top++;
    }
    f->nodes[k] = (Node){token, parent, NONE, NONE, NONE, 0, 0, 0};
    if (parent != NONE)
        link_front(f, k);
    else
        f->keys++;
    f->live++;
    slot_put(f, k);
    return k;
}

/* Counts one hit on the child `token` of `parent`, made if there is room; NONE when it was refused. */
static int32_t forest_hit(Forest *f, int32_t parent, int32_t token, uint32_t tick) {
    int32_t k = forest_find(f, parent, token);
    if (k == NONE) {
        if (!forest_make_room(f, parent == NONE)) return NONE;
        k = forest_add(f, parent, token);
        if (k == NONE) return NONE;
    } else if (parent != NONE && f->nodes[k].prev != NONE) {
        unlink_sibling(f, k);
        link_front(f, k);
    }
    Node *n = &f->nodes[k];
    if (n->count < MAX_COUNT) n->count += ONE_HIT;
    n->stamp = tick;
    return k;
}

/* One more token of a text: it prolongs every open branch and, unless it ends the text, opens its own. */
static int32_t forest_feed(Forest *f, Cursor *cursors, int32_t n, int32_t token, uint32_t tick, int32_t branch_length,
                           int ends) {
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        Cursor c = cursors[i];
        int32_t k = forest_hit(f, c.node, token, tick);
        f->nodes[c.node].pins--;
        if (k == NONE || ends || c.depth + 1 >= branch_length) continue;
        f->nodes[k].pins++;
        cursors[kept++] = (Cursor){k, c.depth + 1};
    }
    if (ends) return 0;
    int32_t root = forest_hit(f, NONE, token, tick);
    if (root != NONE) {
        f->nodes[root].pins++;
        cursors[kept++] = (Cursor){root, 0};
    }
    return kept;
}

static void forest_close(Forest *f, const Cursor *cursors, int32_t n) {
    for (int32_t i = 0; i < n; i++) f->nodes[cursors[i].node].pins--;
}

#endif
