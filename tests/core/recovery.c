/* recovery.c: a change is whole whatever word its maker died at, and a damaged record changes
 * nothing. */
#include "harness.h"

/* ---- records made by hand ------------------------------------------------------------------- */

/* The seal of a record is part of the format: this is its second implementation. */
static uint64_t seal(const struct shmc_redo *redo, uint64_t count)
{
    uint64_t sum = count;
    for (uint64_t i = 0; i < count && i < SHMC_REDO_WORDS_MAX; i++) {
        uint64_t offset = redo->words[i].offset;
        uint64_t mixed =
            (redo->words[i].value ^ (offset << 40) ^ (i << 32)) * 11400714819323198485ull;
        mixed += (offset + i) * 14029467366897019727ull;
        sum += mixed ^ (mixed >> 29);
    }
    return (sum << 8) | count;
}

static uint64_t *word_at(const struct shmc_handle *pool, uint64_t offset)
{
    return (uint64_t *)(pool->base + offset);
}

static uint64_t word_of(const struct shmc_handle *pool, const struct image *image, uint64_t offset)
{
    uint64_t word;
    offset -= pool->header.region_offset[SHMC_REGION_CONTROL];
    memcpy(&word, image->data + offset, sizeof word);
    return word;
}

/* ---- every change, dying at every word ------------------------------------------------------ */

/* Two owners and one to be; four managers in one chain, the last of them released again, so that
 * the next one takes a used entry; one reservation, so that the next one takes a new entry. */
static struct {
    struct shmc_handle *actor;
    struct shmc_handle *other;
    struct shmc_handle *newcomer; /* not yet joined */
    struct shmc_token first, middle, last;
    struct shmc_token reserved;
    uint64_t ids[5];
} scene;

static void set_scene(void)
{
    struct shmc_refusal refusal;
    int fd = new_segment(tables(U(1000, 1000, 1000, 1000), 4, 8, 8));
    scene.actor = attach(fd);
    scene.other = attach(fd);
    MUST(shmc_open(fd, true, &scene.newcomer, &refusal));
    uint64_t bucket = shmc_manager_bucket(scene.actor, 1);
    uint64_t id = 1;
    for (int found = 0; found < 5; id++)
        if (shmc_manager_bucket(scene.actor, id) == bucket)
            scene.ids[found++] = id;
    struct shmc_token *const tokens[] = {&scene.first, &scene.middle, &scene.last};
    for (int i = 0; i < 3; i++) {
        MUST(add_manager(scene.actor, scene.ids[i]));
        *tokens[i] = last.token;
        MUST(publish(scene.actor, scene.ids[i], U(1, 2, 3, 4)));
    }
    MUST(add_manager(scene.actor, scene.ids[3]));
    MUST(release_manager(scene.actor, last.token));
    MUST(reserve(scene.actor, U(10, 20, 30, 40)));
    scene.reserved = last.token;
}

static enum shmc_status change_join(void)
{
    return join(scene.newcomer);
}

static enum shmc_status change_register(void)
{
    return add_manager(scene.actor, scene.ids[4]);
}

static enum shmc_status change_register_any(void)
{
    return add_any_manager(scene.actor);
}

static enum shmc_status change_publish(void)
{
    return publish(scene.actor, scene.ids[1], U(100, 0, 3, 1000));
}

static enum shmc_status change_reserve(void)
{
    return reserve(scene.actor, U(5, 6, 7, 8));
}

static enum shmc_status change_release(void)
{
    return release(scene.actor, scene.reserved);
}

static enum shmc_status change_publish_and_release(void)
{
    return publish_and_release(scene.actor, scene.ids[0], U(11, 22, 33, 44), scene.reserved);
}

static enum shmc_status change_release_first(void)
{
    return release_manager(scene.actor, scene.first);
}

static enum shmc_status change_release_middle(void)
{
    return release_manager(scene.actor, scene.middle);
}

static enum shmc_status change_release_last(void)
{
    return release_manager(scene.actor, scene.last);
}

static enum shmc_status change_begin_reclaim(void)
{
    return reclaim_begin(scene.other, 0, shmc_nonce(scene.actor));
}

static enum shmc_status change_free_slot(void)
{
    MUST(reclaim_begin(scene.actor, 1, shmc_nonce(scene.other)));
    memset(scene.actor->redo->words, 0xff, sizeof scene.actor->redo->words);
    return reclaim_step(scene.actor, 1, shmc_nonce(scene.other), 0);
}

static enum shmc_status (*const changes[])(void) = {
    change_join,           change_register,     change_register_any,        change_publish,
    change_reserve,        change_release,      change_publish_and_release, change_release_first,
    change_release_middle, change_release_last, change_begin_reclaim,       change_free_slot,
};

/* The record that the last change left behind as scratch. */
static uint32_t left_words(const struct shmc_redo *redo)
{
    uint32_t count = 0;
    while (count < SHMC_REDO_WORDS_MAX && redo->words[count].offset != UINT64_MAX)
        count++;
    return count;
}

/* Everything as after the change, but for the record's words: of those the first few are stored. */
static void die_after(const struct image *before, const struct image *after, uint32_t count,
                      uint32_t stored)
{
    struct shmc_handle *pool = scene.actor;
    restore_image(pool, after);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t offset = pool->redo->words[i].offset;
        *word_at(pool, offset) =
            i < stored ? pool->redo->words[i].value : word_of(pool, before, offset);
    }
}

static void expect_recovery(const struct image *after, bool holder_died)
{
    struct shmc_handle *pool = scene.actor;
    uint64_t recoveries = pool->control->recoveries;
    if (holder_died) {
        uint64_t commit = pool->redo->commit;
        pool->redo->commit = 0; /* the child opens like anybody, and shall not repair */
        pid_t pid = child_that_stays(hold_the_lock, &pool->segment_fd);
        pool->redo->commit = commit;
        kill_child(pid);
    }
    MUST(report(pool));
    EXPECT_EQ(0, pool->redo->commit);
    EXPECT_EQ(recoveries + 1, pool->control->recoveries);
    pool->control->recoveries = recoveries;
    EXPECT(same_image(pool, after));
    EXPECT_CLEAN(pool);
}

/* A recoverer may have died too: its lock was consistent again and the record still there. */
static void expect_whole_change(enum shmc_status (*change)(void), bool holder_died)
{
    set_scene();
    struct shmc_handle *pool = scene.actor;
    struct image before = image_of(pool);
    memset(pool->redo->words, 0xff, sizeof pool->redo->words);
    MUST(change());
    struct image after = image_of(pool);
    uint32_t count = left_words(pool->redo);
    EXPECT(count > 0 && count < SHMC_REDO_WORDS_MAX);
    for (uint32_t stored = 0; stored <= count; stored++) {
        die_after(&before, &after, count, stored);
        pool->redo->commit = seal(pool->redo, count);
        expect_recovery(&after, holder_died);
    }
    die_after(&before, &after, count, 0); /* not committed: nothing happened, and all may go on */
    MUST(report(pool));
    EXPECT_CLEAN(pool);
    MUST(change());
    EXPECT_CLEAN(pool);
    free(before.data);
    free(after.data);
}

TEST(a_change_is_whole_wherever_a_recoverer_died)
{
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        expect_whole_change(changes[i], false);
}

TEST(a_change_is_whole_wherever_its_maker_died)
{
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        expect_whole_change(changes[i], true);
}

TEST(a_killed_holder_without_a_change_leaves_nothing)
{
    set_scene();
    struct image image = image_of(scene.actor);
    kill_child(child_that_stays(hold_the_lock, &scene.actor->segment_fd));
    MUST(report(scene.actor));
    EXPECT(same_image(scene.actor, &image)); /* also: no recovery is counted */
    MUST(reserve(scene.other, U(1)));
    EXPECT_CLEAN(scene.other);
    free(image.data);
}

/* ---- damaged records ------------------------------------------------------------------------ */

/* Puts the pool back as it was before it was poisoned. */
static void heal(struct shmc_handle *pool, const struct image *image)
{
    restore_image(pool, image);
    pool->redo->commit = 0;
    pool->gate->state = SHMC_POOL_ACTIVE;
}

static void expect_poison(struct shmc_handle *pool, const struct image *image)
{
    struct shmc_problem problem;
    EXPECT_STATUS(POISONED, report(pool));
    EXPECT_EQ(SHMC_POOL_POISONED, shmc_pool_state(pool));
    EXPECT(same_image(pool, image));
    MUST(check(pool, &problem, 1));
    EXPECT_EQ(1, last.problems_count);
    EXPECT_EQ(SHMC_PROBLEM_REDO_PENDING, problem.kind);
    EXPECT_STATUS(POISONED, reserve(pool, NOTHING));
}

/* A record of three words that is right in every way. */
static void write_record(struct shmc_handle *pool)
{
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t *word = &pool->control->peak[i];
        pool->redo->words[i].offset = (uint64_t)((uint8_t *)word - pool->base);
        pool->redo->words[i].value = *word + 1;
    }
    pool->redo->commit = seal(pool->redo, 3);
}

TEST(a_record_with_a_wrong_count_poisons)
{
    set_scene();
    struct image image = image_of(scene.actor);
    const uint64_t counts[] = {0, SHMC_REDO_WORDS_MAX + 1, 128, 255};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        write_record(scene.actor);
        scene.actor->redo->commit = seal(scene.actor->redo, counts[i]) | 1ull << 63;
        expect_poison(scene.actor, &image);
        heal(scene.actor, &image);
    }
    MUST(report(scene.actor));
    free(image.data);
}

TEST(every_flipped_bit_of_a_record_poisons)
{
    set_scene();
    struct image image = image_of(scene.actor);
    uint64_t *const first = &scene.actor->redo->words[0].offset;
    for (uint64_t bit = 0; bit < 64 * (1 + 2 * 3); bit++) {
        write_record(scene.actor);
        uint64_t *word = bit < 64 ? &scene.actor->redo->commit : first + bit / 64 - 1;
        *word ^= 1ull << (bit % 64);
        expect_poison(scene.actor, &image);
        heal(scene.actor, &image);
    }
    free(image.data);
}

TEST(a_record_of_exchanged_words_poisons)
{
    set_scene();
    struct image image = image_of(scene.actor);
    write_record(scene.actor);
    struct shmc_redo_word word = scene.actor->redo->words[0];
    scene.actor->redo->words[0] = scene.actor->redo->words[1];
    scene.actor->redo->words[1] = word;
    expect_poison(scene.actor, &image);
    free(image.data);
}

TEST(a_sealed_record_may_name_journaled_words_only)
{
    set_scene();
    struct shmc_handle *pool = scene.actor;
    struct image image = image_of(pool);
    const uint64_t *region = pool->header.region_offset;
    const uint64_t offsets[] = {
        0,
        region[SHMC_REGION_GATE],
        region[SHMC_REGION_GATE] + offsetof(struct shmc_gate, state),
        region[SHMC_REGION_REDO],
        region[SHMC_REGION_CONTROL] - 8,
        region[SHMC_REGION_CONTROL] + 1,
        region[SHMC_REGION_CONTROL] + 4,
        region[SHMC_REGION_PINS] - 4,
        region[SHMC_REGION_PINS],
        region[SHMC_REGION_EVENTS],
        region[SHMC_REGION_ARENA],
        pool->header.total_bytes,
        1ull << 63,
        UINT64_MAX - 7,
        UINT64_MAX,
        0 - region[SHMC_REGION_CONTROL],
    };
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        write_record(pool);
        pool->redo->words[2].offset = offsets[i];
        pool->redo->commit = seal(pool->redo, 3);
        expect_poison(pool, &image);
        heal(pool, &image);
    }
    const uint64_t ends[] = {region[SHMC_REGION_CONTROL], region[SHMC_REGION_PINS] - 8};
    for (size_t i = 0; i < 2; i++) {
        write_record(pool);
        pool->redo->words[2].offset = ends[i];
        pool->redo->commit = seal(pool->redo, 3);
        MUST(report(pool));
        heal(pool, &image);
    }
    free(image.data);
}

/* ---- any record ----------------------------------------------------------------------------- */

static uint64_t any_offset(const struct shmc_handle *pool)
{
    const uint64_t *region = pool->header.region_offset;
    uint64_t journaled = region[SHMC_REGION_PINS] - region[SHMC_REGION_CONTROL];
    switch (random_below(16)) {
    case 0:
        return random_u64();
    case 1:
        return random_below(pool->header.total_bytes * 2);
    case 2:
        return region[random_below(SHMC_REGIONS)] - random_below(2) * 8;
    case 3:
        return region[SHMC_REGION_CONTROL] + random_below(journaled);
    default:
        return region[SHMC_REGION_CONTROL] + random_below(journaled / 8) * 8;
    }
}

static bool is_journaled(const struct shmc_handle *pool, uint64_t offset)
{
    return offset >= pool->header.region_offset[SHMC_REGION_CONTROL] &&
           offset < pool->header.region_offset[SHMC_REGION_PINS] && offset % 8 == 0;
}

/* Writes a record of random words and says whether it is right. */
static bool write_any_record(struct shmc_handle *pool, uint64_t *count)
{
    struct shmc_redo *redo = pool->redo;
    bool right = true;
    *count = random_below(8) == 0 ? random_below(256) : 1 + random_below(SHMC_REDO_WORDS_MAX);
    for (uint64_t i = 0; i < SHMC_REDO_WORDS_MAX; i++) {
        redo->words[i].offset = any_offset(pool);
        if (random_below(4) != 0 && !is_journaled(pool, redo->words[i].offset))
            i--; /* else hardly any long record would be right */
    }
    for (uint64_t i = 0; i < SHMC_REDO_WORDS_MAX; i++) {
        redo->words[i].value = random_u64() >> random_below(64);
        right = right && (i >= *count || is_journaled(pool, redo->words[i].offset));
    }
    redo->commit = seal(redo, *count);
    if (random_below(4) == 0)
        redo->commit = (random_u64() & ~255ull) | *count;
    return right && *count >= 1 && *count <= SHMC_REDO_WORDS_MAX &&
           redo->commit == seal(redo, *count);
}

static void expect_stored(struct shmc_handle *pool, struct image *image, uint64_t count)
{
    uint64_t control = pool->header.region_offset[SHMC_REGION_CONTROL];
    struct shmc_control *expected = (struct shmc_control *)image->data;
    for (uint64_t i = 0; i < count; i++)
        memcpy(image->data + pool->redo->words[i].offset - control, &pool->redo->words[i].value, 8);
    expected->recoveries++;
    EXPECT(same_image(pool, image));
    EXPECT_EQ(0, pool->redo->commit);
}

/* Whether the record leaves control.evicting alone. */
static bool tries_no_eviction(const struct shmc_handle *pool, uint64_t count)
{
    uint64_t word = (uint64_t)((uint8_t *)&pool->control->evicting - pool->base);
    for (uint64_t i = 0; i < count; i++)
        if (pool->redo->words[i].offset == word)
            return false;
    return true;
}

TEST(any_record_is_stored_whole_or_poisons)
{
    uint64_t right = 0;
    uint64_t count;
    set_scene();
    struct shmc_handle *pool = scene.actor;
    struct image image = image_of(pool);
    struct outside outside = outside_of(pool);
    for (uint64_t round = 0; round < rounds(3000); round++) {
        struct image expected = image_of(pool);
        bool right_record = write_any_record(pool, &count);
        if (right_record && !tries_no_eviction(pool, count)) {
            report(pool); /* stored whole; then a block that never was is being evicted: damage */
        } else if (right_record) {
            right++;
            MUST(report(pool));
            expect_stored(pool, &expected, count);
        } else if (pool->redo->commit != 0) {
            EXPECT_STATUS(POISONED, report(pool));
            EXPECT(same_image(pool, &expected));
        }
        EXPECT(same_outside(pool, &outside));
        heal(pool, &image);
        free(expected.data);
    }
    EXPECT(right > 0);
    free(image.data);
    free(outside.data);
}
