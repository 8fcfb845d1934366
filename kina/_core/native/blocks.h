/* What a pool knows of its memory: chunks, the blocks that they are cut into, and where free ones are found.
 *
 * Pure bookkeeping beside the memory, which is never touched: no lock, no thread, no stream. Two-level segregated fit
 * (Masmano, Ripoll, Crespo, Real: "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004), with one
 * index for each stream that has freed memory and one for what anybody may have; neighbours merge within an index.
 */
#ifndef KINA_BLOCKS_H
#define KINA_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

enum { KINA_INDEX_ROWS = 48, KINA_INDEX_COLUMNS = 16 };

typedef struct kina_block {
    uintptr_t address;
    size_t size;                       /* a multiple of the heap's unit */
    struct kina_block *before, *after; /* neighbours in the chunk, by address */
    struct kina_chunk *chunk;
    struct kina_index *index;           /* where it is listed as free; NULL while it is taken */
    struct kina_block *next, *previous; /* free blocks of about its size */
    struct kina_block *newer, *older;   /* free blocks of its index, in the order in which they came */
    uint64_t epoch; /* of its release, for whoever keeps the index; ascending from oldest to newest */
} kina_block;

typedef struct kina_index {
    uint64_t rows; /* bit r: some list of row r holds a block */
    uint32_t columns[KINA_INDEX_ROWS];
    kina_block *lists[KINA_INDEX_ROWS][KINA_INDEX_COLUMNS];
    kina_block *oldest, *newest;
    size_t bytes;
} kina_index;

typedef struct kina_chunk {
    struct kina_chunk *next, *previous;
    void *base; /* as the upstream gave it */
    size_t bytes;
    kina_block *first;
} kina_chunk;

typedef struct kina_heap {
    unsigned shift;    /* the unit is 1 << shift bytes */
    kina_block **map;  /* taken blocks by address: open addressing, linear probing */
    size_t map_slots;  /* a power of two, or 0 */
    size_t taken;      /* blocks in the map */
    kina_block *spare; /* descriptors that are not in use */
    size_t spares;
    void *slabs; /* what the descriptors were allocated in */
    kina_chunk *chunks;
    size_t chunk_count;
    size_t reserved_bytes; /* of all chunks */
} kina_heap;

/* Free all of the bookkeeping; the chunks' memory is not its business. */
void kina_heap_clear(kina_heap *heap);

/* Host memory for `count` more taken blocks, so that nothing below can fail: 0, or -1 if there is none. */
int kina_heap_reserve(kina_heap *heap, size_t count);

/* A new chunk as one taken block from `begin` on; needs a reserve of 1 and a chunk of calloc. Never fails. */
kina_block *kina_heap_add(kina_heap *heap, kina_chunk *chunk, uintptr_t begin, size_t size);
/* Forget a chunk that is one free block. The caller frees it. */
void kina_heap_remove(kina_heap *heap, kina_chunk *chunk);

/* A free block of `index` of at least `size` bytes, or NULL. */
kina_block *kina_heap_find(const kina_heap *heap, const kina_index *index, size_t size);
/* Take the first `size` bytes of a free block. Needs a reserve of 1. */
kina_block *kina_heap_take(kina_heap *heap, kina_block *block, size_t size);
/* Cut a taken block after `size` bytes; what follows is another taken block, returned. Needs a reserve of 1. */
kina_block *kina_heap_cut(kina_heap *heap, kina_block *block, size_t size);
/* A taken block becomes free in `index`, as its newest, and merges with its free neighbours there. */
void kina_heap_give(kina_heap *heap, kina_block *block, kina_index *index, uint64_t epoch);
/* A free block becomes one of another index, and merges there. */
void kina_heap_move(kina_heap *heap, kina_block *block, kina_index *index, uint64_t epoch);
/* The taken block that begins at `address`, or NULL. */
kina_block *kina_heap_lookup(const kina_heap *heap, uintptr_t address);
/* Of the blocks that an index lists. */
size_t kina_index_largest(const kina_index *index);

#endif
