/* fuzz_blocks.c: a fuzzer damages words of the arena's tables, and chooses what is asked then.
 *
 * The damage, the requests and what must hold are those of tests/core/arena_damage.c; here the
 * choices come from libFuzzer, which prefers those that reach new lines of the engine.
 */
#include "../core/arena_damage.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct stage stages[SHMC_POLICIES];
    random_from(data, size);
    enum shmc_policy policy = (enum shmc_policy)random_below(SHMC_POLICIES);
    struct stage *stage = &stages[policy];
    if (stage->tables == NULL)
        *stage = new_stage(policy);
    for (uint64_t changes = 1 + random_below(8); changes > 0; changes--) {
        uint64_t *word = any_place(stage->owners[0]);
        *word = any_word(*word);
    }
    shake(stage);
    EXPECT(same_neighbours(stage));
    heal(stage);
    return 0;
}
