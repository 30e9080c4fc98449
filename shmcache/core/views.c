/* views.c: addresses that readers look at, when the handle that mapped them has gone.
 *
 * Why         An array over a lease is a bare address. A forked child inherits the array and not
 *             the mapping, and a handle may be closed under it: then the bytes must stay what they
 *             were, at the same address, or fault. Another block's bytes must never be shown.
 * Contract    Called by who has leased what the views show (shmc_lease_again). What could not be
 *             leased is forbidden: it faults from then on. New leases are never shown through a
 *             mapping in which something is forbidden, for the place may get another block.
 * Concurrency A handle is replaced by one thread, which is alone in a child.
 * Death       Nothing here is shared.
 *             A child's inherited view of a block that its parent was writing faults as well: the
 *             child's own mapping must never come to lie there.
 * Errors      A range that was taken meanwhile, or more than SHMC_KEPT_MAX: all views fault.
 */
#include "internal.h"

#include <string.h>

/* In a forked child, before anything else is mapped there: keeps all others out of the addresses
 * that inherited views look at, and write to, until the segment is mapped there or the handle is
 * closed. */
void shmc_views_reserve(struct shmc_handle *handle)
{
    uint8_t *bases[SHMC_KEPT_MAX + 2] = {handle->read_base, handle->write_base};
    uint32_t count = 2;
    uint32_t done = 0;
    if (handle->read_base == NULL || handle->reserved)
        return;
    for (uint32_t i = 0; i < handle->kept_count; i++)
        if (!handle->kept[i].empty) /* unlike mappings, a reservation is inherited */
            bases[count++] = handle->kept[i].base;
    while (done < count && shmc_os_reserve(bases[done], handle->arena_mapped))
        done++;
    handle->reserved = done == count;
    while (!handle->reserved && done > 0)
        shmc_os_unmap(bases[--done], handle->arena_mapped);
}

/* Maps the segment where views of the parent look. All of it or nothing: half would show what
 * nobody leases, so what cannot be had stays reserved. */
static bool inherit(struct shmc_handle *next, struct shmc_handle *previous)
{
    uint64_t offset = next->header.region_offset[SHMC_REGION_ARENA];
    uint64_t bytes = next->arena_mapped;
    bool mapped = previous->reserved &&
                  shmc_os_map_again(previous->read_base, next->segment_fd, offset, bytes);
    for (uint32_t i = 0; i < previous->kept_count && mapped; i++)
        mapped = previous->kept[i].empty ||
                 shmc_os_map_again(previous->kept[i].base, next->segment_fd, offset, bytes);
    if (mapped || !previous->reserved)
        return mapped;
    shmc_os_forbid(previous->read_base, bytes);
    for (uint32_t i = 0; i < previous->kept_count; i++)
        shmc_os_forbid(previous->kept[i].base, bytes);
    previous->reserved = false;
    return false;
}

static void keep(struct shmc_handle *handle, uint8_t *base, bool empty)
{
    handle->kept[handle->kept_count].base = base;
    handle->kept[handle->kept_count++].empty = empty;
}

bool shmc_keep_views(struct shmc_handle *next, struct shmc_handle *previous, bool apart,
                     bool written)
{
    bool forked = !shmc_is_mine(previous);
    if (previous->kept_count + 2 > SHMC_KEPT_MAX) {
        previous->reserved = false; /* for ever */
        return false;
    }
    if (forked && !inherit(next, previous))
        return false;
    memcpy(next->kept, previous->kept, sizeof next->kept);
    next->kept_count = previous->kept_count;
    if (apart) {
        keep(next, previous->read_base, false);
    } else {
        shmc_os_unmap(next->read_base, next->arena_mapped);
        next->read_base = previous->read_base;
    }
    if (forked && written)
        keep(next, previous->write_base, true);
    else if (forked)
        shmc_os_unmap(previous->write_base, next->arena_mapped);
    previous->read_base = NULL;
    previous->kept_count = 0;
    previous->reserved = false;
    return true;
}

void shmc_forbid_view(struct shmc_handle *handle, const struct shmc_lease *lease)
{
    for (uint32_t i = 0; i < handle->kept_count; i++)
        shmc_os_forbid(handle->kept[i].base + lease->place, lease->bytes);
}

/* Gives back all addresses of the arena that this handle has mapped or, in a child, reserved. */
void shmc_views_drop(struct shmc_handle *handle)
{
    if (handle->write_base != NULL)
        shmc_os_unmap(handle->write_base, handle->arena_mapped);
    if (handle->read_base != NULL)
        shmc_os_unmap(handle->read_base, handle->arena_mapped);
    for (uint32_t i = 0; i < handle->kept_count; i++)
        shmc_os_unmap(handle->kept[i].base, handle->arena_mapped);
}

bool shmc_prefault(const struct shmc_handle *handle, uint64_t offset, uint64_t bytes)
{
    if (!shmc_is_mine(handle) || handle->write_base == NULL || offset >= handle->arena_mapped)
        return true;
    uint64_t left = handle->arena_mapped - offset;
    bytes = bytes < left ? bytes : left;
    return shmc_os_populate(handle->write_base + offset, bytes, true) &&
           shmc_os_populate(handle->read_base + offset, bytes, false);
}
