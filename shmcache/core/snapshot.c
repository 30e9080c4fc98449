/* snapshot.c: copies of the tables, for people and for tools.
 *
 * Why         Figures that were read one after the other need not add up; those of one hold of the
 *             lock do. A dump is read where the pool is not.
 * Contract    Called with the lock held. Changes nothing. A snapshot checks what it counts, as any
 *             request; a copy trusts nothing and works in any state of the pool.
 * Cost        A snapshot is linear in the entries ever used and the slabs, a copy in the bytes of
 *             all tables: others wait meanwhile.
 */
#include "internal.h"

#include <string.h>

static void copy_owners(const struct shmc_handle *handle, struct shmc_snapshot *snapshot)
{
    snapshot->owners_count = 0;
    for (uint32_t slot = 0; slot < handle->header.geometry.owners_max; slot++)
        if (shmc_owner_view(handle, slot, &snapshot->owners[snapshot->owners_count]))
            snapshot->owners_count++;
}

static void copy_managers(const struct shmc_handle *handle, struct shmc_snapshot *snapshot)
{
    const struct shmc_table *table = &handle->managers;
    snapshot->managers_count = 0;
    for (uint64_t index = 0; index < *table->mark; index++)
        if (SHMC_ENTRY_STATE(table->entries[index].state) == SHMC_ENTRY_LIVE)
            snapshot->managers[snapshot->managers_count++] = table->entries[index];
}

/* Fills a snapshot whose pointers have room for whole tables. */
enum shmc_status shmc_snapshot_take(struct shmc_handle *handle, struct shmc_snapshot *snapshot)
{
    enum shmc_status status = shmc_accounts_held(handle, snapshot->held); /* checks the marks */
    if (status != SHMC_OK)
        return status;
    shmc_accounts_report(handle, &snapshot->report);
    copy_owners(handle, snapshot);
    copy_managers(handle, snapshot);
    memset(&snapshot->arena, 0, sizeof snapshot->arena);
    if (handle->arena_bytes != 0) {
        shmc_arena_report(handle, &snapshot->arena);
        memcpy(snapshot->slabs, handle->slabs, handle->header.slabs_max * sizeof *snapshot->slabs);
    }
    return SHMC_OK;
}

/* All bytes of the segment before the arena. */
void shmc_snapshot_copy(const struct shmc_handle *handle, uint8_t *copy)
{
    const uint8_t *base = shmc_region(handle, SHMC_REGION_HEADER);
    memcpy(copy, base, handle->header.region_offset[SHMC_REGION_ARENA]);
}
