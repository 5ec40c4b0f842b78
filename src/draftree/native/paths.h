/* Paths below a match while a draft is chosen: a growing list, and a heap in the total order of drafts. Included by
 * trie.c only. */
#ifndef DRAFTREE_PATHS_H
#define DRAFTREE_PATHS_H

#include <stdint.h>
#include <stdlib.h>

/* A path below the match; p and o are its nodes in the prompt and the output forest, NONE where it has none. */
typedef struct {
    double score, logp;
    uint32_t o_stamp, p_stamp;
    int32_t depth, token, p, o, at; /* at: row of the parent in the result, or index of it in `trail` */
    int32_t known;                  /* tokens of the suffix that was found, and of the path below it */
} Path;

/* A list of paths that grows. */
typedef struct {
    Path *items;
    int32_t n, size;
} Paths;

/* Room for one more path; 0 when memory ran out. */
static int reserve(Paths *paths) {
    if (paths->n < paths->size) return 1;
    int32_t size = paths->size ? 2 * paths->size : 512;
    Path *items = realloc(paths->items, (size_t)size * sizeof(Path));
    if (!items) return 0;
    paths->items = items;
    paths->size = size;
    return 1;
}

/* The total order of drafts; two different paths never tie, because a tick touches one node per depth. */
static int better(const Path *a, const Path *b) {
    if (a->score != b->score) return a->score > b->score;
    if (a->depth != b->depth) return a->depth < b->depth;
    if (a->o_stamp != b->o_stamp) return a->o_stamp > b->o_stamp;
    if (a->p_stamp != b->p_stamp) return a->p_stamp > b->p_stamp;
    return a->token < b->token;
}

/* Adds a path to the heap, unless memory ran out. */
static void heap_push(Paths *heap, const Path *path) {
    if (!reserve(heap)) return;
    int32_t i = heap->n++;
    for (int32_t up; i > 0 && better(path, &heap->items[up = (i - 1) / 2]); i = up) heap->items[i] = heap->items[up];
    heap->items[i] = *path;
}

/* Takes the first path in the order of drafts from a heap that is not empty. */
static Path heap_pop(Paths *heap) {
    Path top = heap->items[0], last = heap->items[--heap->n];
    int32_t i = 0;
    for (int32_t kid; (kid = 2 * i + 1) < heap->n; i = kid) {
        if (kid + 1 < heap->n && better(&heap->items[kid + 1], &heap->items[kid])) kid++;
        if (!better(&heap->items[kid], &last)) break;
        heap->items[i] = heap->items[kid];
    }
    heap->items[i] = last;
    return top;
}

#endif
