/* census.c: who leases what, counted from the rows of pins.
 *
 * Why         Leases are counted per process and nowhere else; people who look for their memory,
 *             and the error that says that an arena is full, want to know who holds it.
 * Contract    Takes no lock and changes nothing. What it says was true of each block at some moment
 *             of the walk. Every index is checked: the words may be anything.
 * Cost        One load per 64 blocks and owner, and one block per pin.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

/* The class of a block, or NULL when that cannot be said. */
static const struct shmc_class *class_of(const struct shmc_handle *handle, uint64_t block)
{
    struct shmc_slab *slab;
    struct shmc_class *class;
    return shmc_slab_of(handle, block, &slab, &class) == SHMC_OK ? class : NULL;
}

static void count_word(const struct shmc_handle *handle, uint32_t slot, uint64_t word,
                       uint64_t bits, struct shmc_holding *row)
{
    for (; bits != 0; bits &= bits - 1) {
        uint64_t block = word * 64 + (uint64_t)__builtin_ctzll(bits);
        if (block >= handle->header.geometry.blocks_max)
            return;
        const struct shmc_class *class = class_of(handle, block);
        uint64_t state = shmc_load_relaxed(&handle->blocks[block].state);
        uint64_t bytes = class != NULL ? shmc_load_relaxed(&class->block_bytes) : 0;
        if (state == SHMC_BLOCK_OF(SHMC_BLOCK_WRITING, slot) ||
            state == SHMC_BLOCK_OF(SHMC_BLOCK_SEALED, slot)) {
            row->private_blocks++;
            row->private_bytes += bytes;
        } else if (state == SHMC_BLOCK_PUBLISHED || state == SHMC_BLOCK_DOOMED) {
            row->leased_blocks++;
            row->leased_bytes += bytes;
        }
    }
}

static void count_leased(const struct shmc_handle *handle, uint64_t word, uint64_t bits,
                         uint64_t *leased)
{
    for (; bits != 0; bits &= bits - 1) {
        uint64_t block = word * 64 + (uint64_t)__builtin_ctzll(bits);
        if (block >= handle->header.geometry.blocks_max)
            return;
        const struct shmc_class *class = class_of(handle, block);
        if (class != NULL &&
            shmc_load_relaxed(&handle->blocks[block].state) == SHMC_BLOCK_PUBLISHED)
            leased[class - handle->classes]++;
    }
}

void shmc_census(const struct shmc_handle *handle, struct shmc_holding *rows, uint64_t *leased)
{
    uint32_t owners = handle->header.geometry.owners_max;
    uint64_t words = (handle->header.geometry.blocks_max + 63) / 64;
    memset(rows, 0, owners * sizeof *rows);
    memset(leased, 0, SHMC_CLASSES_MAX * sizeof *leased);
    for (uint64_t word = 0; word < words; word++) {
        uint64_t anybody = 0;
        for (uint32_t slot = 0; slot < owners; slot++) {
            uint64_t active = shmc_load_relaxed(&handle->control->active[slot / 64]);
            if ((active >> slot % 64 & 1) == 0)
                continue;
            uint64_t bits = shmc_load_relaxed(&shmc_pin_row(handle, slot)[word]);
            anybody |= bits;
            if (bits != 0)
                count_word(handle, slot, word, bits, &rows[slot]);
        }
        count_leased(handle, word, anybody, leased);
    }
}
