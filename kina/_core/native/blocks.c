#include "blocks.h"

#include <stdlib.h>
#include <string.h>

enum {
    SLAB_BLOCKS = 128,
    WALKED = 32 /* blocks of a size's own list that are looked at when no larger list has one */
};

typedef struct slab {
    struct slab *next;
    kina_block blocks[SLAB_BLOCKS];
} slab;

/* ------------------------------------------------------------------------------------------- where a size is listed */

typedef struct {
    unsigned row, column;
} place;

/* Sizes below 2 * COLUMNS units have a list each; above, each doubling has COLUMNS lists. */
static place place_of(size_t units) {
    place found = {0, (unsigned)units};
    if (units >= KINA_INDEX_COLUMNS) {
        unsigned highest = 63u - (unsigned)__builtin_clzll(units);
        found.row = highest - 3;
        found.column = (unsigned)(units >> (highest - 4)) & (KINA_INDEX_COLUMNS - 1);
    }
    return found;
}

/* The first list all of whose blocks have `units` or more. */
static place place_above(size_t units) {
    if (units >= 2 * KINA_INDEX_COLUMNS) units += ((size_t)1 << (59 - __builtin_clzll(units))) - 1;
    return place_of(units);
}

static void list_put(kina_index *index, kina_block *block, unsigned shift) {
    place at = place_of(block->size >> shift);
    kina_block **list = &index->lists[at.row][at.column];
    block->previous = NULL;
    block->next = *list;
    if (*list) (*list)->previous = block;
    *list = block;
    index->columns[at.row] |= 1u << at.column;
    index->rows |= (uint64_t)1 << at.row;
}

static void list_remove(kina_index *index, kina_block *block, unsigned shift) {
    place at = place_of(block->size >> shift);
    if (block->next) block->next->previous = block->previous;
    if (block->previous) {
        block->previous->next = block->next;
        return;
    }
    index->lists[at.row][at.column] = block->next;
    if (block->next) return;
    index->columns[at.row] &= ~(1u << at.column);
    if (index->columns[at.row] == 0) index->rows &= ~((uint64_t)1 << at.row);
}

static void age_append(kina_index *index, kina_block *block) {
    block->newer = NULL;
    block->older = index->newest;
    if (index->newest) index->newest->newer = block;
    else index->oldest = block;
    index->newest = block;
}

static void age_remove(kina_index *index, kina_block *block) {
    if (block->older) block->older->newer = block->newer;
    else index->oldest = block->newer;
    if (block->newer) block->newer->older = block->older;
    else index->newest = block->older;
}

static void index_put(kina_heap *heap, kina_index *index, kina_block *block) {
    block->index = index;
    list_put(index, block, heap->shift);
    age_append(index, block);
    index->bytes += block->size;
}

static void index_remove(kina_heap *heap, kina_block *block) {
    kina_index *index = block->index;
    list_remove(index, block, heap->shift);
    age_remove(index, block);
    index->bytes -= block->size;
    block->index = NULL;
}

size_t kina_index_largest(const kina_index *index) {
    size_t largest = 0;
    if (index->rows) {
        unsigned row = 63u - (unsigned)__builtin_clzll(index->rows);
        unsigned column = 31u - (unsigned)__builtin_clz(index->columns[row]);
        for (const kina_block *block = index->lists[row][column]; block; block = block->next)
            if (block->size > largest) largest = block->size;
    }
    return largest;
}

/* ------------------------------------------------------------------------------------------ taken blocks by address */

static size_t slot_of(const kina_heap *heap, uintptr_t address) {
    uint64_t mixed = (uint64_t)(address >> heap->shift) * 0x9e3779b97f4a7c15u;
    return (size_t)(mixed >> 20) & (heap->map_slots - 1);
}

static void map_put(kina_heap *heap, kina_block *block) {
    size_t slot = slot_of(heap, block->address);
    while (heap->map[slot]) slot = (slot + 1) & (heap->map_slots - 1);
    heap->map[slot] = block;
    heap->taken += 1;
}

static void map_remove(kina_heap *heap, kina_block *block) {
    size_t mask = heap->map_slots - 1;
    size_t hole = slot_of(heap, block->address);
    while (heap->map[hole] != block) hole = (hole + 1) & mask;
    heap->taken -= 1;
    /* Those that were pushed on by it move back, so that no mark has to stay. */
    for (size_t slot = (hole + 1) & mask; heap->map[slot]; slot = (slot + 1) & mask) {
        size_t wanted = slot_of(heap, heap->map[slot]->address);
        if (((slot - wanted) & mask) >= ((slot - hole) & mask)) {
            heap->map[hole] = heap->map[slot];
            hole = slot;
        }
    }
    heap->map[hole] = NULL;
}

kina_block *kina_heap_lookup(const kina_heap *heap, uintptr_t address) {
    if (heap->map_slots == 0) return NULL;
    size_t slot = slot_of(heap, address);
    while (heap->map[slot] && heap->map[slot]->address != address) slot = (slot + 1) & (heap->map_slots - 1);
    return heap->map[slot];
}

static int map_grow(kina_heap *heap, size_t wanted) {
    kina_block **old = heap->map;
    size_t old_slots = heap->map_slots;
    size_t slots = old_slots ? old_slots : 1024;
    while (slots / 2 < wanted) slots *= 2;
    if (slots == old_slots) return 0;
    kina_block **grown = calloc(slots, sizeof(*grown));
    if (!grown) return -1;
    heap->map = grown;
    heap->map_slots = slots;
    heap->taken = 0;
    for (size_t i = 0; i < old_slots; i++)
        if (old[i]) map_put(heap, old[i]);
    free(old);
    return 0;
}

/* -------------------------------------------------------------------------------------------------- the descriptors */

int kina_heap_reserve(kina_heap *heap, size_t count) {
    if (map_grow(heap, heap->taken + count) != 0) return -1;
    while (heap->spares < count) {
        slab *added = malloc(sizeof(*added));
        if (!added) return -1;
        added->next = heap->slabs;
        heap->slabs = added;
        for (int i = 0; i < SLAB_BLOCKS; i++) {
            added->blocks[i].next = heap->spare;
            heap->spare = &added->blocks[i];
        }
        heap->spares += SLAB_BLOCKS;
    }
    return 0;
}

static kina_block *block_new(kina_heap *heap) {
    kina_block *block = heap->spare;
    heap->spare = block->next;
    heap->spares -= 1;
    memset(block, 0, sizeof(*block));
    return block;
}

static void block_end(kina_heap *heap, kina_block *block) {
    block->next = heap->spare;
    heap->spare = block;
    heap->spares += 1;
}

void kina_heap_clear(kina_heap *heap) {
    for (kina_chunk *chunk = heap->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    for (slab *each = heap->slabs, *next; each; each = next) {
        next = each->next;
        free(each);
    }
    free(heap->map);
    memset(heap, 0, sizeof(*heap));
}

/* -------------------------------------------------------------------------------------------------- chunks and blocks */

kina_block *kina_heap_add(kina_heap *heap, kina_chunk *chunk, uintptr_t begin, size_t size) {
    kina_block *block = block_new(heap);
    block->address = begin;
    block->size = size;
    block->chunk = chunk;
    chunk->first = block;
    chunk->previous = NULL;
    chunk->next = heap->chunks;
    if (heap->chunks) heap->chunks->previous = chunk;
    heap->chunks = chunk;
    heap->chunk_count += 1;
    heap->reserved_bytes += chunk->bytes;
    map_put(heap, block);
    return block;
}

void kina_heap_remove(kina_heap *heap, kina_chunk *chunk) {
    index_remove(heap, chunk->first);
    block_end(heap, chunk->first);
    if (chunk->next) chunk->next->previous = chunk->previous;
    if (chunk->previous) chunk->previous->next = chunk->next;
    else heap->chunks = chunk->next;
    heap->chunk_count -= 1;
    heap->reserved_bytes -= chunk->bytes;
}

kina_block *kina_heap_find(const kina_heap *heap, const kina_index *index, size_t size) {
    size_t units = size >> heap->shift;
    if (index->bytes < size) return NULL;
    place at = place_above(units);
    if (at.row < KINA_INDEX_ROWS) {
        uint32_t columns = index->columns[at.row] & (~0u << at.column);
        if (columns == 0) {
            uint64_t rows = index->rows & (at.row + 1 < 64 ? ~(uint64_t)0 << (at.row + 1) : 0);
            if (rows) {
                at.row = (unsigned)__builtin_ctzll(rows);
                columns = index->columns[at.row];
            }
        }
        if (columns) return index->lists[at.row][__builtin_ctz(columns)];
    }
    /* Only blocks of nearly this size are left: some may be large enough. */
    at = place_of(units);
    kina_block *block = index->lists[at.row][at.column];
    for (int walked = 0; block && walked < WALKED; block = block->next, walked++)
        if (block->size >= size) return block;
    return NULL;
}

/* `added` follows `block`, whose end it takes over. */
static void link_after(kina_block *block, kina_block *added) {
    added->chunk = block->chunk;
    added->before = block;
    added->after = block->after;
    if (block->after) block->after->before = added;
    block->after = added;
}

kina_block *kina_heap_take(kina_heap *heap, kina_block *block, size_t size) {
    kina_index *index = block->index;
    if (block->size == size) {
        index_remove(heap, block);
    } else {
        /* The rest keeps the descriptor, and with it its age; the front gets a new one. */
        kina_block *front = block_new(heap);
        list_remove(index, block, heap->shift);
        front->address = block->address;
        front->size = size;
        front->chunk = block->chunk;
        front->before = block->before;
        front->after = block;
        if (block->before) block->before->after = front;
        else block->chunk->first = front;
        block->before = front;
        block->address += size;
        block->size -= size;
        list_put(index, block, heap->shift);
        index->bytes -= size;
        block = front;
    }
    map_put(heap, block);
    return block;
}

kina_block *kina_heap_cut(kina_heap *heap, kina_block *block, size_t size) {
    kina_block *rest = block_new(heap);
    rest->address = block->address + size;
    rest->size = block->size - size;
    block->size = size;
    link_after(block, rest);
    map_put(heap, rest);
    return rest;
}

/* A block that is listed nowhere joins what is free around it in `index`. */
static void settle(kina_heap *heap, kina_block *block, kina_index *index, uint64_t epoch) {
    kina_block *before = block->before, *after = block->after;
    block->epoch = epoch;
    if (after && after->index == index) {
        if (after->epoch > block->epoch) block->epoch = after->epoch;
        index_remove(heap, after);
        block->size += after->size;
        block->after = after->after;
        if (block->after) block->after->before = block;
        block_end(heap, after);
    }
    if (before && before->index == index) {
        if (before->epoch > block->epoch) block->epoch = before->epoch;
        index_remove(heap, before);
        before->size += block->size;
        before->epoch = block->epoch;
        before->after = block->after;
        if (before->after) before->after->before = before;
        block_end(heap, block);
        block = before;
    }
    index_put(heap, index, block);
}

void kina_heap_give(kina_heap *heap, kina_block *block, kina_index *index, uint64_t epoch) {
    map_remove(heap, block);
    settle(heap, block, index, epoch);
}

void kina_heap_move(kina_heap *heap, kina_block *block, kina_index *index, uint64_t epoch) {
    index_remove(heap, block);
    settle(heap, block, index, epoch);
}
