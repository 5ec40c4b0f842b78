/* A counted forest of token branches: the store under the Lookahead trie (section 4.3 of the paper).
 * Nodes live in one array and are found by a hash of (parent, token), so one more token on a branch is one
 * look-up however wide the tree is. Siblings are linked most recently touched first. When the forest is full, a
 * clock hand walks the array, halves what it passes and frees what falls under one hit: a few steps for each new
 * node instead of one long stop. Included by trie.c only. */
#ifndef DRAFTREE_FOREST_H
#define DRAFTREE_FOREST_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NONE (-1)
#define FREE (-2)         /* value of `parent` in a freed node */
#define ONE_HIT 256u      /* counts are fixed point: halving stays exact, so both twins agree for ever */
#define MAX_COUNT (1u << 31)
#define EMPTY 0           /* slots hold node + 1, so that zeroed memory is an empty table */
#define MOVED (-1)
#define MIGRATE_STEPS 16
#define HAND_STEPS 64     /* most nodes the hand visits for one new node: the bound on a stall */

/* One token on a branch. */
typedef struct {
    int32_t token, parent;
    int32_t child, next, prev; /* first child; siblings. `next` also threads the free list */
    uint32_t count;            /* hits x ONE_HIT */
    uint32_t stamp;            /* tick of the last touch */
    uint32_t pins;             /* open cursors that stand here; the hand leaves pinned nodes alone */
} Node;

/* A hash table from (parent, token) to nodes. */
typedef struct {
    int32_t *slots; /* linear probing */
    int64_t n;
} Table;

/* The forest: its nodes, the table that finds them, and its bounds. */
typedef struct {
    Node *nodes;
    Table table, old; /* old: the table before the last growth, while it is moved over bit by bit */
    int64_t moved;
    int32_t size, top, live, keys, free_head, hand;
    int64_t max_nodes, per_key; /* per_key 0: only max_nodes bounds */
    int prune;
} Forest;

/* Where a text that is being fed stands on one of its open branches. */
typedef struct {
    int32_t node, depth;
} Cursor;

/* The slot at which the search for a child begins. */
static int64_t home_of(int64_t n_slots, int32_t parent, int32_t token) {
    uint64_t h = ((uint64_t)(uint32_t)parent << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9ull;
    return (int64_t)(((h >> 32) * (uint64_t)n_slots) >> 32);
}

/* The slot that holds the child `token` of `parent`, or NONE. */
static int64_t slot_find(const Forest *f, const Table *table, int32_t parent, int32_t token) {
    if (!table->n) return NONE;
    int64_t i = home_of(table->n, parent, token);
    for (int32_t held; (held = table->slots[i]) != EMPTY;) {
        if (held != MOVED && f->nodes[held - 1].parent == parent && f->nodes[held - 1].token == token) return i;
        if (++i == table->n) i = 0;
    }
    return NONE;
}

/* Enters a node into the table. */
static void slot_put(Forest *f, int32_t k) {
    Table *table = &f->table;
    int64_t i = home_of(table->n, f->nodes[k].parent, f->nodes[k].token);
    while (table->slots[i] != EMPTY)
        if (++i == table->n) i = 0;
    table->slots[i] = k + 1;
}

/* Takes a node out of the table that holds it. */
static void slot_drop(Forest *f, int32_t k) {
    Table *table = &f->table;
    int64_t n = table->n, i = slot_find(f, table, f->nodes[k].parent, f->nodes[k].token), j = i;
    if (i == NONE) { /* it has not moved house yet; the old table is thrown away soon, so a mark will do */
        f->old.slots[slot_find(f, &f->old, f->nodes[k].parent, f->nodes[k].token)] = MOVED;
        return;
    }
    /* Backward shift: no tombstones, so a forest that turns over for ever keeps its probe lengths. */
    for (;;) {
        if (++j == n) j = 0;
        int32_t held = table->slots[j];
        if (held == EMPTY) break;
        int64_t home = home_of(n, f->nodes[held - 1].parent, f->nodes[held - 1].token);
        int64_t from_home = j >= home ? j - home : j - home + n, from_hole = j >= i ? j - i : j - i + n;
        if (from_home >= from_hole) {
            table->slots[i] = held;
            i = j;
        }
    }
    table->slots[i] = EMPTY;
}

/* The child `token` of `parent`, or NONE. */
static int32_t forest_find(const Forest *f, int32_t parent, int32_t token) {
    int64_t i = slot_find(f, &f->table, parent, token);
    if (i != NONE) return f->table.slots[i] - 1;
    i = slot_find(f, &f->old, parent, token);
    return i != NONE ? f->old.slots[i] - 1 : NONE;
}

/* Moves some of the old table into the new one; all of it at once would stop the caller for milliseconds. */
static void forest_migrate(Forest *f, int64_t steps) {
    for (; f->old.n && steps > 0; steps--) {
        int32_t held = f->old.slots[f->moved];
        if (held != EMPTY && held != MOVED) {
            f->old.slots[f->moved] = MOVED; /* EMPTY stays: look-ups stop there */
            slot_put(f, held - 1);
        }
        if (++f->moved == f->old.n) {
            free(f->old.slots);
            f->old = (Table){NULL, 0};
        }
    }
}

/* Makes room for `size` nodes, or max_nodes of them; 0 when there are none more or memory ran out. */
static int forest_resize(Forest *f, int64_t size) {
    if (size > f->max_nodes) size = f->max_nodes;
    if (size <= f->size) return 0;
    forest_migrate(f, f->old.n);
    Node *nodes = realloc(f->nodes, (size_t)size * sizeof(Node));
    if (!nodes) return 0;
    f->nodes = nodes;
    Table table = {NULL, size + size / 2 + 2};
    table.slots = calloc((size_t)table.n, sizeof(int32_t));
    if (!table.slots) return 0;
    f->old = f->table;
    f->moved = 0;
    f->table = table;
    f->size = (int32_t)size;
    return 1;
}

/* An empty forest; memory is taken with the first node. */
static void forest_init(Forest *f, int64_t max_nodes, int64_t per_key, int prune) {
    memset(f, 0, sizeof *f);
    f->max_nodes = max_nodes;
    f->per_key = per_key;
    f->prune = prune;
    f->free_head = NONE;
}

/* Frees all nodes; the forest is as new. */
static void forest_drop(Forest *f) {
    free(f->nodes);
    free(f->table.slots);
    free(f->old.slots);
    forest_init(f, f->max_nodes, f->per_key, f->prune);
}

/* Bytes that nodes and tables take; room for nodes that were never there takes none. */
static int64_t forest_bytes(const Forest *f) {
    return (int64_t)f->top * (int64_t)sizeof(Node) + (f->table.n + f->old.n) * (int64_t)sizeof(int32_t);
}

/* Takes a node out of the list of its siblings. */
static void unlink_sibling(Forest *f, int32_t k) {
    Node *n = &f->nodes[k];
    if (n->prev != NONE)
        f->nodes[n->prev].next = n->next;
    else
        f->nodes[n->parent].child = n->next;
    if (n->next != NONE) f->nodes[n->next].prev = n->prev;
}

/* Puts a node in front of its siblings, as the most recently touched. */
static void link_front(Forest *f, int32_t k) {
    Node *n = &f->nodes[k], *parent = &f->nodes[n->parent];
    n->prev = NONE;
    n->next = parent->child;
    if (n->next != NONE) f->nodes[n->next].prev = k;
    parent->child = k;
}

/* Whether a node is a leaf of less than one hit on which no cursor stands. */
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
            if (n->count > 1) n->count /= 2; /* a share of nothing has no logarithm */
            forest_remove(f, f->hand);
        }
        f->hand++;
    }
}

/* A new child without hits, in front of its siblings; NONE when memory ran out. */
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
    forest_migrate(f, MIGRATE_STEPS);
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

/* The text ends: its cursors no longer hold their nodes. */
static void forest_close(Forest *f, const Cursor *cursors, int32_t n) {
    for (int32_t i = 0; i < n; i++) f->nodes[cursors[i].node].pins--;
}

#endif
