/* index.c: from a key to the block that is published under it.
 *
 * Why         A lookup must find its block with two cache misses and no lock; a crash must not
 *             leave half an insertion; nothing may ever have to be moved or rebuilt.
 * Contract    Two-choice buckets of eight words, one word per entry: a tag of 39 bits, a block,
 *             a bit that says "in use". Insert and delete change one word, by a redo record. An
 *             entry is a hint: whoever follows it compares the whole key in the block.
 * Concurrency Read without the lock, word by word. A word that is stale leads to a block in
 *             another state or with another key, which its reader notices (pins.c).
 * Errors      Both buckets full: the block is not stored, which is counted. Not seen in
 *             10^7 insertions into a full table of a million.
 * Source      Two-choice hashing (Azar et al.); no tombstones, no displacement.
 */
#include "atomics.h"
#include "internal.h"

#define CROWDED 5u /* of SHMC_BUCKET_ENTRIES */

static uint64_t rotate(uint64_t value, uint32_t bits)
{
    return value << bits | value >> (64 - bits);
}

/* Keys are hashes as a rule, and small numbers in somebody's test: both must spread. */
static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 32) * 0xd6e8feb86659fd93ull;
    value = (value ^ value >> 32) * 0xd6e8feb86659fd93ull;
    return value ^ value >> 32;
}

static uint64_t scale(uint64_t hash32, uint64_t buckets)
{
    return hash32 * buckets >> 32;
}

struct shmc_key_hash shmc_index_hash(const struct shmc_handle *handle, const uint64_t *key)
{
    uint64_t hash = mix(key[0] ^ rotate(key[1], 17) ^ rotate(key[2], 31) ^ rotate(key[3], 47));
    uint64_t buckets = handle->header.index_buckets;
    return (struct shmc_key_hash){
        .first = handle->index + scale(hash >> 32, buckets) * SHMC_BUCKET_ENTRIES,
        .second = handle->index + scale(hash & UINT32_MAX, buckets) * SHMC_BUCKET_ENTRIES,
        .tag = mix(hash + 0x9e3779b97f4a7c15ull) >> SHMC_TAG_SHIFT,
    };
}

/* With the lock held, the block named by an entry is the right one exactly when it is PUBLISHED
 * under the key. */
static bool is_published_as(const struct shmc_handle *handle, uint64_t block, const uint64_t *key)
{
    if (block >= handle->header.geometry.blocks_max)
        return false;
    const struct shmc_block *candidate = &handle->blocks[block];
    return SHMC_BLOCK_STATE(shmc_load_relaxed(&candidate->state)) == SHMC_BLOCK_PUBLISHED &&
           shmc_same_key(candidate->key, key);
}

static uint64_t *find_in(const struct shmc_handle *handle, uint64_t *bucket, uint64_t tag,
                         const uint64_t *key, uint64_t *block)
{
    for (uint32_t i = 0; i < SHMC_BUCKET_ENTRIES; i++) {
        uint64_t candidate;
        if (shmc_index_matches(bucket[i], tag, &candidate) &&
            is_published_as(handle, candidate, key)) {
            *block = candidate;
            return &bucket[i];
        }
    }
    return NULL;
}

uint64_t *shmc_index_find(const struct shmc_handle *handle, const uint64_t *key, uint64_t *block)
{
    struct shmc_key_hash hash = shmc_index_hash(handle, key);
    uint64_t *word = find_in(handle, hash.first, hash.tag, key, block);
    return word != NULL ? word : find_in(handle, hash.second, hash.tag, key, block);
}

static uint32_t used_entries(const uint64_t *bucket, uint64_t **empty)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < SHMC_BUCKET_ENTRIES; i++) {
        if ((bucket[i] & SHMC_ENTRY_USED) != 0)
            used++;
        else
            *empty = (uint64_t *)&bucket[i];
    }
    return used;
}

bool shmc_index_put(struct shmc_handle *handle, const uint64_t *key, uint64_t block)
{
    struct shmc_key_hash hash = shmc_index_hash(handle, key);
    uint64_t *empty[2] = {NULL, NULL};
    uint32_t first = used_entries(hash.first, &empty[0]);
    uint32_t second = used_entries(hash.second, &empty[1]);
    /* The first bucket unless it is crowded: most lookups then need no second one. */
    uint64_t *word = first < CROWDED || first <= second ? empty[0] : empty[1];
    if (word == NULL)
        return false;
    shmc_redo_put(handle, word, hash.tag << SHMC_TAG_SHIFT | block << 1 | SHMC_ENTRY_USED);
    return true;
}

/* For the full check: whether the entry at this word is how the block would be found. */
bool shmc_index_names(const struct shmc_handle *handle, uint64_t word, uint64_t block)
{
    if (handle->blocks[block].state != SHMC_BLOCK_PUBLISHED)
        return false;
    struct shmc_key_hash hash = shmc_index_hash(handle, handle->blocks[block].key);
    const uint64_t *bucket = handle->index + word / SHMC_BUCKET_ENTRIES * SHMC_BUCKET_ENTRIES;
    uint64_t named;
    return (bucket == hash.first || bucket == hash.second) &&
           shmc_index_matches(handle->index[word], hash.tag, &named) && named == block;
}
