/* redo.c: make several stores one change, whatever instruction the writer dies at.
 *
 * Why         A total, a free list and an entry's state must change together. Undo and
 *             recounting both leave cases that cannot be decided; after-images need only be
 *             stored again.
 * Contract    With the lock held: begin, put each (word, value), commit. Words are read as they
 *             were until commit returns; get and set see the record itself, for changes that
 *             touch one word several times (lists). Recovery is called with the lock held and is
 *             idempotent.
 * Death       before the commit word: the record is scratch, nothing happened; after it: the
 *             change is decided, and every later holder first stores all words again; the
 *             clearing store may be lost: storing the same values again is harmless because
 *             nobody changed them meanwhile (that needs the lock).
 * Errors      A record whose checksum, count or offsets are impossible is damage: SHMC_CORRUPT.
 * Cost        One multiplication and two stores per word, one store per word again at commit.
 * Source      Redo logging with full after-images; no log sequence numbers, for there is one
 *             record.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

#define COUNT_MASK 0xffull

/* Independent multiplications, so that they overlap; order matters through the index. */
static uint64_t mix(uint64_t offset, uint64_t value, uint64_t index)
{
    return (value ^ (offset << 40) ^ (index << 32)) * 0x9e3779b97f4a7c15ull +
           (offset + index) * 0xc2b2ae3d27d4eb4full;
}

static uint64_t commit_word(const struct shmc_redo *redo, uint32_t count)
{
    uint64_t sum = count;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t mixed = mix(redo->words[i].offset, redo->words[i].value, i);
        sum += mixed ^ (mixed >> 29);
    }
    return (sum << 8) | count;
}

static void apply(struct shmc_handle *handle, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct shmc_redo_word *word = &handle->redo->words[i];
        shmc_store_release((uint64_t *)(handle->base + word->offset), word->value);
        shmc_step_barrier();
    }
}

void shmc_redo_begin(struct shmc_handle *handle, enum shmc_operation operation)
{
    SHMC_ASSERT(handle->redo->commit == 0);
    handle->redo_count = 0;
    handle->redo_seen = 0;
    handle->redo->operation = operation;
}

/* One of 64 bits for an offset: tells most words that are not in the record at once. */
static uint64_t seen_bit(uint64_t offset)
{
    return 1ull << ((offset * 0x9e3779b97f4a7c15ull) >> 58);
}

/* The word's entry in the record being written, or NULL. */
static struct shmc_redo_word *pending(const struct shmc_handle *handle, uint64_t offset)
{
    if ((handle->redo_seen & seen_bit(offset)) == 0)
        return NULL;
    for (uint32_t i = 0; i < handle->redo_count; i++)
        if (handle->redo->words[i].offset == offset)
            return &handle->redo->words[i];
    return NULL;
}

uint64_t shmc_redo_get(const struct shmc_handle *handle, const uint64_t *word)
{
    uint64_t offset = (uint64_t)((const uint8_t *)word - handle->base);
    const struct shmc_redo_word *entry = pending(handle, offset);
    return entry != NULL ? entry->value : shmc_load_relaxed(word);
}

void shmc_redo_set(struct shmc_handle *handle, uint64_t *word, uint64_t value)
{
    struct shmc_redo_word *entry = pending(handle, (uint64_t)((uint8_t *)word - handle->base));
    if (entry != NULL)
        entry->value = value;
    else
        shmc_redo_put(handle, word, value);
}

void shmc_redo_put(struct shmc_handle *handle, uint64_t *word, uint64_t value)
{
    SHMC_ASSERT(handle->redo_count < SHMC_REDO_WORDS_MAX);
    struct shmc_redo_word *slot = &handle->redo->words[handle->redo_count++];
    slot->offset = (uint64_t)((uint8_t *)word - handle->base);
    slot->value = value;
    handle->redo_seen |= seen_bit(slot->offset);
}

void shmc_redo_commit(struct shmc_handle *handle)
{
    if (handle->redo_count == 0)
        return;
#ifdef SHMC_MUTANT_NO_REDO
    apply(handle, handle->redo_count); /* and nothing to do it from again */
    memset(handle->redo->words, 0xff, sizeof handle->redo->words);
#else
    struct shmc_redo *redo = handle->redo;
    uint64_t word = commit_word(redo, handle->redo_count);
    shmc_step_barrier(); /* payload of the entries and the record's words come first */
    shmc_store_release(&redo->commit, word);
    shmc_step_barrier();
    apply(handle, handle->redo_count);
    shmc_store_release(&redo->commit, 0);
#endif
    shmc_step_barrier();
}

enum shmc_status shmc_redo_recover(struct shmc_handle *handle)
{
    struct shmc_redo *redo = handle->redo;
    uint64_t commit = shmc_load_acquire(&redo->commit);
    uint32_t count = (uint32_t)(commit & COUNT_MASK);
    SHMC_CHECK(count >= 1 && count <= SHMC_REDO_WORDS_MAX);
    SHMC_CHECK(commit == commit_word(redo, count));
    uint64_t first = handle->header.region_offset[SHMC_REGION_CONTROL];
    uint64_t end = handle->header.region_offset[SHMC_REGION_PINS];
    for (uint32_t i = 0; i < count; i++) {
        uint64_t offset = redo->words[i].offset;
        SHMC_CHECK(offset >= first && offset < end && offset % sizeof(uint64_t) == 0);
    }
    apply(handle, count);
    shmc_store_release(&redo->commit, 0);
    shmc_step_barrier();
    handle->control->recoveries++;
    return SHMC_OK;
}
