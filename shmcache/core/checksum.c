/* checksum.c: whether a block still has the bytes that were published.
 *
 * Why         Shared memory is input: a stray write of a buggy neighbour through its writable
 *             mapping must not become a wrong answer, for those who choose to pay for the look.
 * Contract    The publisher's checksum lies in the block's descriptor; 0 says that none was taken.
 *             With VERIFY_FIRST a process compares once per block and generation, with
 *             VERIFY_ALWAYS at each lease. Not cryptographic.
 * Cost        About a memcpy's read: four independent lanes of eight bytes.
 * Source      The round of XXH64 (Collet), which is known to mix well enough for accidents.
 */
#include "atomics.h"
#include "internal.h"

#include <string.h>

#define LANES   4u
#define PRIME_1 0x9e3779b185ebca87ull
#define PRIME_2 0xc2b2ae3d27d4eb4full
#define PRIME_3 0x165667b19e3779f9ull

static uint64_t rotate(uint64_t value, uint32_t bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t round_of(uint64_t lane, uint64_t word)
{
    return rotate(lane + word * PRIME_2, 31) * PRIME_1;
}

uint64_t shmc_checksum(const void *data, uint64_t bytes)
{
    const uint8_t *next = data;
    const uint8_t *end = next + bytes;
    uint64_t lanes[LANES] = {PRIME_1 + PRIME_2, PRIME_2, 0, 0 - PRIME_1};
    uint64_t words[LANES];
    for (; (uint64_t)(end - next) >= sizeof words; next += sizeof words) {
        memcpy(words, next, sizeof words);
        for (uint32_t lane = 0; lane < LANES; lane++)
            lanes[lane] = round_of(lanes[lane], words[lane]);
    }
    memset(words, 0, sizeof words);
    memcpy(words, next, (size_t)(end - next));
    uint64_t sum = bytes * PRIME_3;
    for (uint32_t lane = 0; lane < LANES; lane++)
        sum = rotate(sum ^ round_of(lanes[lane], words[lane]), 27) * PRIME_1 + PRIME_3;
    sum = (sum ^ sum >> 33) * PRIME_2;
    sum = (sum ^ sum >> 29) * PRIME_3;
    sum ^= sum >> 32;
    return sum != 0 ? sum : 1;
}

enum shmc_fidelity shmc_verify_lease(struct shmc_handle *handle, const struct shmc_lease *lease)
{
    uint32_t flags = handle->header.geometry.flags;
    uint64_t expected = shmc_load_relaxed(&handle->blocks[lease->block].checksum);
    if ((flags & (SHMC_FLAG_VERIFY_FIRST | SHMC_FLAG_VERIFY_ALWAYS)) == 0 || expected == 0)
        return SHMC_NOT_CHECKED;
    uint32_t generation = (uint32_t)lease->generation;
    if (handle->verified != NULL && handle->verified[lease->block] == generation)
        return SHMC_NOT_CHECKED;
    if (shmc_checksum(shmc_read_address(handle, lease), lease->bytes) != expected) {
        struct shmc_telemetry_row *rows = shmc_region(handle, SHMC_REGION_TELEMETRY);
        uint64_t *word = &rows[handle->slot].counters[SHMC_COUNTER_BAD_CHECKSUMS];
        shmc_store_release(word, shmc_load_relaxed(word) + 1);
        return SHMC_DAMAGED;
    }
    if (handle->verified != NULL)
        handle->verified[lease->block] = generation;
    return SHMC_FAITHFUL;
}
