/* fuzz_header.c: a fuzzer writes the header, with a right checksum; who attaches is refused, or
 * what differs was the creator's to choose.
 */
#include "../core/refusals.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static struct shmc_header good;
    random_from(data, size);
    if (fd == -1) {
        fd = new_segment(with_arena());
        good = header_of(fd);
    }
    struct shmc_header header = good;
    struct shmc_refusal refusal;
    for (uint64_t changes = 1 + random_below(5); changes > 0; changes--) {
        uint64_t *word = (uint64_t *)&header + random_below(sizeof header / 8);
        *word = interesting_word(*word);
    }
    if (random_below(8) == 0)
        write_header(fd, &header);
    else
        write_sealed_header(fd, &header);
    if (open_and_close(fd, &refusal) == SHMC_OK)
        EXPECT(differ_only_in_choices(good, header));
    else
        EXPECT(refusal.check != SHMC_CHECK_NONE);
    return 0;
}
