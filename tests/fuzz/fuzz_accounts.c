/* fuzz_accounts.c: the same for owners, managers, reservations, the totals and the redo record.
 *
 * As tests/core/damage.c does it, with libFuzzer's choices. A record is written now and then, so
 * that recovery meets one.
 */
#include "../core/damage.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct stage stage;
    random_from(data, size);
    if (stage.pool == NULL)
        stage = new_stage();
    uint64_t words = stage.image.bytes / 8;
    for (uint64_t changes = random_below(8); changes > 0; changes--) {
        uint64_t *word = (uint64_t *)stage.pool->control + random_below(words);
        *word = any_word(*word);
    }
    if (random_below(4) == 0) {
        struct shmc_redo *redo = stage.pool->redo;
        for (uint64_t i = random_below(6); i < 6; i++) {
            redo->words[i].offset = any_word(stage.pool->header.region_offset[random_below(8)]);
            redo->words[i].value = any_word(0);
        }
        redo->commit = any_word(redo->commit);
    }
    shake(&stage);
    heal(&stage);
    stage.pool->redo->commit = 0;
    return 0;
}
