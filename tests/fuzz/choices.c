/* choices.c: what a fuzzer decides, in place of the random numbers of tests/core/harness.c.
 *
 * Choices are bytes of its input, then zeros. One takes a byte where that is enough, so that a
 * change of one byte changes one choice.
 */
#include "../core/harness.h"

static const uint8_t *input;
static size_t input_left;

void random_from(const uint8_t *data, size_t size)
{
    input = data;
    input_left = size;
}

static uint64_t from_input(size_t bytes)
{
    uint64_t value = 0;
    for (; bytes > 0 && input_left > 0; bytes--, input_left--)
        value = value << 8 | *input++;
    return value;
}

void random_start(uint64_t stream)
{
    (void)stream;
}

uint64_t random_u64(void)
{
    return from_input(8);
}

uint64_t random_below(uint64_t limit)
{
    return from_input(limit <= 256 ? 1 : 8) % limit;
}
