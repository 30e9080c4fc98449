/* claims.c: who is making the block of which key.
 *
 * Why         Two workers that miss the same prefix would compute it twice. A claim lets the second
 *             wait for the first, and learn at once when the first has died.
 * Contract    Called with the lock held. A claim is an entry of a table like reservations, its key
 *             in the place of a usage, found by a chained index. It promises nothing about the
 *             block: whoever holds none may publish the key as well.
 * Death       As for reservations: it counts in its owner's held word, and reclaim gives it back.
 * Errors      CLAIMED with the owner that has it; CLAIMS_FULL.
 */
#include "atomics.h"
#include "internal.h"

_Static_assert(SHMC_KEY_WORDS == SHMC_AXES, "a key takes the place of a usage");

uint64_t shmc_claim_bucket(const struct shmc_handle *handle, const uint64_t *key)
{
    uint64_t mixed = (key[0] ^ key[1] ^ key[2] ^ key[3]) * 0x9e3779b97f4a7c15ull;
    return mixed >> 32 & (handle->header.claim_buckets - 1);
}

/* The word that links to the claim of the key, or that ends its chain. */
static enum shmc_status find_link(struct shmc_handle *handle, const uint64_t *key, uint64_t **link)
{
    uint64_t *word = &handle->claim_index[shmc_claim_bucket(handle, key)];
    for (uint64_t steps = 0; *word != SHMC_NO_INDEX; steps++) {
        SHMC_CHECK(*word < handle->claims.max && steps < handle->claims.max);
        struct shmc_entry *entry = &handle->claims.entries[*word];
        SHMC_CHECK(SHMC_ENTRY_STATE(entry->state) == SHMC_ENTRY_LIVE);
        if (shmc_same_key(entry->usage, key))
            break;
        word = &entry->next;
    }
    *link = word;
    return SHMC_OK;
}

enum shmc_status shmc_claims_take(struct shmc_handle *handle, struct shmc_request *request)
{
    uint64_t *link;
    uint64_t index;
    if (handle->claims.max == 0)
        return SHMC_NO_ARENA;
    enum shmc_status status = find_link(handle, request->key, &link);
    if (status != SHMC_OK)
        return status;
    if (*link != SHMC_NO_INDEX) {
        uint64_t slot = SHMC_ENTRY_OWNER(handle->claims.entries[*link].state);
        SHMC_CHECK(slot < handle->header.geometry.owners_max);
        request->owner_slot = (uint32_t)slot;
        request->owner_nonce = handle->owners[slot].nonce;
        return SHMC_CLAIMED;
    }
    shmc_redo_begin(handle, SHMC_OP_CLAIM);
    status = shmc_entry_take(handle, &handle->claims, &index);
    if (status != SHMC_OK)
        return status;
    uint64_t *bucket = &handle->claim_index[shmc_claim_bucket(handle, request->key)];
    shmc_entry_put_live(handle, &handle->claims, index, request->key, 0, &request->token);
    shmc_redo_put(handle, &handle->claims.entries[index].next, *bucket);
    shmc_redo_put(handle, bucket, index);
    shmc_redo_commit(handle);
    return SHMC_OK;
}

enum shmc_status shmc_claims_release(struct shmc_handle *handle, uint32_t owner,
                                     struct shmc_token token)
{
    uint64_t *link;
    enum shmc_status status = shmc_entry_find(handle, &handle->claims, owner, token);
    if (status == SHMC_OK)
        status = find_link(handle, handle->claims.entries[token.index].usage, &link);
    if (status != SHMC_OK)
        return status;
    SHMC_CHECK(*link == token.index);
    shmc_redo_begin(handle, SHMC_OP_RELEASE_CLAIM);
    shmc_redo_put(handle, link, handle->claims.entries[token.index].next);
    shmc_entry_put_free(handle, &handle->claims, token.index, owner);
    shmc_redo_commit(handle);
    return SHMC_OK;
}
