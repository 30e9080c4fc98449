/* damage.c: whatever words a stranger leaves in the segment, every request answers.
 *
 * A request may succeed, refuse or poison; it may not crash, hang, or write outside its regions.
 * check.c must name each kind of damage, for it is how people learn what is wrong.
 */
#include "harness.h"

#define OWNERS       4
#define MANAGERS     8
#define RESERVATIONS 8

static uint64_t any_word(uint64_t word)
{
    switch (random_below(8)) {
    case 0:
        return random_u64();
    case 1:
        return word ^ (1ull << random_below(64));
    case 2:
        return word + 1;
    case 3:
        return word - 1;
    case 4:
        return UINT64_MAX;
    case 5:
        return 0;
    case 6:
        return SHMC_ENTRY_LIVE_OF(random_below(OWNERS + 2));
    default:
        return random_below(MANAGERS + 2);
    }
}

static struct usage any_usage(void)
{
    struct usage usage;
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        usage.axis[axis] = random_below(3) == 0 ? any_word(0) : random_below(10);
    return usage;
}

static struct shmc_token any_token(const struct shmc_table *table)
{
    uint64_t index = random_below(table->max);
    return (struct shmc_token){random_below(8) == 0 ? any_word(index) : index,
                               table->entries[index].generation};
}

/* One request of any kind with any arguments; its status. */
static enum shmc_status any_request(struct shmc_handle *pool)
{
    struct shmc_held rows[OWNERS];
    struct shmc_owner_view views[OWNERS];
    uint32_t slot = (uint32_t)random_below(OWNERS + 1);
    uint64_t nonce = slot < OWNERS ? pool->owners[slot].nonce : 0;
    switch (random_below(12)) {
    case 0:
        return add_manager(pool, random_below(MANAGERS));
    case 1:
        return add_any_manager(pool);
    case 2:
        return publish(pool, random_below(MANAGERS), any_usage());
    case 3:
    case 4:
        return reserve(pool, any_usage());
    case 5:
        return release_manager(pool, any_token(&pool->managers));
    case 6:
    case 7:
        return release(pool, any_token(&pool->reservations));
    case 8:
        return publish_and_release(pool, random_below(MANAGERS), any_usage(),
                                   any_token(&pool->reservations));
    case 9:
        return held(pool, rows);
    case 10:
        reclaim_begin(pool, slot, nonce);
        return reclaim_step(pool, slot, nonce, random_below(2) * any_word(0));
    default:
        shmc_find_dead(pool, views, OWNERS);
        return report(pool);
    }
}

struct stage {
    struct shmc_handle *pool;
    struct image image;
    struct outside outside;
};

static struct stage new_stage(void)
{
    struct stage stage = {.pool =
                              attach(new_segment(tables(ROOMY, OWNERS, MANAGERS, RESERVATIONS)))};
    struct shmc_handle *other = attach(stage.pool->segment_fd);
    struct shmc_token token;
    for (uint64_t id = 0; id < 4; id++)
        MUST(add_manager(id % 2 == 0 ? stage.pool : other, id));
    for (int i = 0; i < 4; i++)
        MUST(reserve(i % 2 == 0 ? stage.pool : other, U(5, 5, 5, 5)));
    token = last.token;
    MUST(release(other, token));
    MUST(publish(other, 3, U(7, 7, 7, 7)));
    stage.image = image_of(stage.pool);
    stage.outside = outside_of(stage.pool);
    return stage;
}

static void heal(const struct stage *stage)
{
    restore_image(stage->pool, &stage->image);
    memset(stage->pool->gate->waiters, 0, sizeof stage->pool->gate->waiters);
    stage->pool->gate->state = SHMC_POOL_ACTIVE;
}

static void leave_stage(struct stage *stage)
{
    free(stage->image.data);
    free(stage->outside.data);
}

/* Performs requests until the pool is poisoned or has stood twenty of them. */
static void shake(const struct stage *stage)
{
    struct shmc_problem problems[4];
    for (int i = 0; i < 20; i++) {
        enum shmc_status status = any_request(stage->pool);
        EXPECT(status < SHMC_STATUS_COUNT && status != SHMC_CORRUPT);
        if (status == SHMC_POISONED)
            break;
    }
    MUST(check(stage->pool, problems, 4));
    EXPECT(last.problems_count == 0 || shmc_pool_state(stage->pool) != SHMC_POOL_ACTIVE);
    EXPECT(same_outside(stage->pool, &stage->outside));
}

TEST(any_damaged_words_get_an_answer)
{
    struct stage stage = new_stage();
    uint64_t words = stage.image.bytes / 8;
    for (uint64_t round = 0; round < rounds(3000); round++) {
        uint64_t *first = (uint64_t *)stage.pool->control;
        for (uint64_t changes = 1 + random_below(6); changes > 0; changes--) {
            uint64_t *word = first + random_below(words);
            *word = any_word(*word);
        }
        shake(&stage);
        heal(&stage);
    }
    leave_stage(&stage);
}

/* Most words of the tables are unused; these are the ones that steer. */
TEST(any_damaged_steering_words_get_an_answer)
{
    struct stage stage = new_stage();
    struct shmc_handle *pool = stage.pool;
    for (uint64_t round = 0; round < rounds(3000); round++) {
        for (uint64_t changes = 1 + random_below(3); changes > 0; changes--) {
            uint64_t index = random_below(MANAGERS);
            uint64_t *const words[] = {
                &pool->control->manager_free,
                &pool->control->manager_mark,
                &pool->control->managers,
                &pool->control->reservation_free,
                &pool->control->reservation_mark,
                &pool->control->reservations,
                &pool->control->owners,
                &pool->control->current[index % SHMC_AXES],
                &pool->manager_index[index],
                &pool->managers.entries[index].state,
                &pool->managers.entries[index].next,
                &pool->managers.entries[index].id,
                &pool->reservations.entries[index].state,
                &pool->reservations.entries[index].next,
                &pool->owners[index % OWNERS].state,
                &pool->owners[index % OWNERS].held,
                &pool->owners[index % OWNERS].pid,
            };
            uint64_t *word = words[random_below(sizeof words / sizeof *words)];
            *word = any_word(*word);
        }
        shake(&stage);
        heal(&stage);
    }
    leave_stage(&stage);
}

TEST(any_noise_gets_an_answer)
{
    struct stage stage = new_stage();
    for (uint64_t round = 0; round < rounds(200); round++) {
        uint64_t *word = (uint64_t *)stage.pool->control;
        for (uint64_t i = 0; i < stage.image.bytes / 8; i++)
            word[i] = any_word(word[i]);
        shake(&stage);
        heal(&stage);
    }
    leave_stage(&stage);
}

/* ---- check.c names what is wrong ------------------------------------------------------------ */

static void expect_problem(const struct stage *stage, enum shmc_problem_kind kind)
{
    struct shmc_problem problems[64];
    bool found = false;
    MUST(check(stage->pool, problems, 64));
    for (uint32_t i = 0; i < last.problems_count && i < 64; i++)
        found = found || problems[i].kind == kind;
    if (!found)
        FAIL("not found: %s", shmc_problem_text(kind));
    EXPECT_EQ(SHMC_POOL_POISONED, shmc_pool_state(stage->pool));
    heal(stage);
    EXPECT_CLEAN(stage->pool);
}

TEST(check_names_broken_counts)
{
    struct stage stage = new_stage();
    struct shmc_control *control = stage.pool->control;
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++) {
        control->current[axis]--;
        expect_problem(&stage, SHMC_PROBLEM_TOTAL);
        control->peak[axis] = (1ull << 40) + 1;
        expect_problem(&stage, SHMC_PROBLEM_PEAK_ABOVE_LIMIT);
        stage.pool->reservations.entries[0].usage[axis] = UINT64_MAX; /* the recount overflows */
        expect_problem(&stage, SHMC_PROBLEM_TOTAL);
    }
    control->owners++;
    expect_problem(&stage, SHMC_PROBLEM_OWNER_COUNT);
    control->managers++;
    expect_problem(&stage, SHMC_PROBLEM_MANAGER_COUNT);
    control->reservations--;
    expect_problem(&stage, SHMC_PROBLEM_RESERVATION_COUNT);
    leave_stage(&stage);
}

TEST(check_names_broken_owners)
{
    struct stage stage = new_stage();
    struct shmc_owner *owners = stage.pool->owners;
    owners[3].state = SHMC_OWNER_CLEANING + 1;
    expect_problem(&stage, SHMC_PROBLEM_OWNER_STATE);
    owners[1].nonce = 0;
    expect_problem(&stage, SHMC_PROBLEM_OWNER_NONCE);
    owners[1].held++;
    expect_problem(&stage, SHMC_PROBLEM_OWNER_HELD);
    owners[2].held = 1;
    expect_problem(&stage, SHMC_PROBLEM_OWNER_HELD);
    owners[1].state = SHMC_OWNER_FREE; /* while entries name it */
    expect_problem(&stage, SHMC_PROBLEM_MANAGER_OWNER);
    leave_stage(&stage);
}

static void break_table(const struct stage *stage, struct shmc_table *table,
                        enum shmc_problem_kind state, enum shmc_problem_kind owner,
                        enum shmc_problem_kind free_list)
{
    table->entries[0].state = 7;
    expect_problem(stage, state);
    table->entries[table->max - 1].state = SHMC_ENTRY_LIVE; /* never used */
    expect_problem(stage, state);
    table->entries[0].state = SHMC_ENTRY_LIVE_OF(3); /* a FREE slot */
    expect_problem(stage, owner);
    table->entries[0].state = SHMC_ENTRY_LIVE_OF(OWNERS);
    expect_problem(stage, owner);
    *table->mark = table->max + 1;
    expect_problem(stage, free_list);
    *table->mark += 1;
    expect_problem(stage, free_list);
    *table->free = 0; /* LIVE */
    expect_problem(stage, free_list);
    *table->free = *table->mark;
    expect_problem(stage, free_list);
}

TEST(check_names_broken_tables)
{
    struct stage stage = new_stage();
    struct shmc_table *reservations = &stage.pool->reservations;
    break_table(&stage, &stage.pool->managers, SHMC_PROBLEM_MANAGER_STATE,
                SHMC_PROBLEM_MANAGER_OWNER, SHMC_PROBLEM_MANAGER_FREE_LIST);
    break_table(&stage, reservations, SHMC_PROBLEM_RESERVATION_STATE,
                SHMC_PROBLEM_RESERVATION_OWNER, SHMC_PROBLEM_RESERVATION_FREE_LIST);
    *reservations->free = SHMC_NO_INDEX; /* one entry is on no list */
    expect_problem(&stage, SHMC_PROBLEM_RESERVATION_FREE_LIST);
    reservations->entries[3].next = 3; /* a list without an end */
    expect_problem(&stage, SHMC_PROBLEM_RESERVATION_FREE_LIST);
    leave_stage(&stage);
}

TEST(check_names_a_broken_manager_index)
{
    struct stage stage = new_stage();
    struct shmc_handle *pool = stage.pool;
    struct shmc_entry *entries = pool->managers.entries;
    uint64_t *bucket = &pool->manager_index[shmc_manager_bucket(pool, 0)];
    *bucket = SHMC_NO_INDEX;
    expect_problem(&stage, SHMC_PROBLEM_MANAGER_INDEX);
    *bucket = MANAGERS;
    expect_problem(&stage, SHMC_PROBLEM_MANAGER_INDEX);
    entries[0].next = 0; /* a chain without an end */
    expect_problem(&stage, SHMC_PROBLEM_MANAGER_INDEX);
    *bucket = MANAGERS - 1; /* FREE */
    expect_problem(&stage, SHMC_PROBLEM_MANAGER_INDEX);
    entries[0].id = 1; /* twice, or in the wrong bucket */
    expect_problem(&stage, SHMC_PROBLEM_MANAGER_INDEX);
    leave_stage(&stage);
}

TEST(check_counts_more_problems_than_it_lists)
{
    struct stage stage = new_stage();
    struct shmc_problem problems[3] = {0};
    for (int i = 0; i < 4; i++)
        stage.pool->managers.entries[i].state = 7;
    MUST(check(stage.pool, problems, 2));
    EXPECT(last.problems_count > 4);
    EXPECT_EQ(0, problems[2].kind + problems[2].index + problems[2].actual);
    MUST(check(stage.pool, NULL, 0));
    EXPECT(last.problems_count > 4);
    leave_stage(&stage);
}
