/* model.c: random requests of several owners, each compared with a naive model of the contract.
 *
 * The model keeps plain arrays and recounts everything each time; it knows nothing of free lists,
 * chains or records. After each request the whole pool is compared and walked.
 */
#include "harness.h"

#define OWNERS       3
#define MANAGERS     5
#define RESERVATIONS 6

struct line {
    bool used;
    int owner;
    uint64_t id;
    struct usage usage;
    struct shmc_token token;
};

static struct {
    struct usage limits;
    struct usage peak;
    struct line managers[MANAGERS];
    struct line reservations[RESERVATIONS];
    uint64_t id_next;
    struct shmc_handle *owners[OWNERS];
} model;

/* ---- the model ------------------------------------------------------------------------------ */

static bool add(struct usage *sum, struct usage usage)
{
    bool fits = true;
    for (int axis = 0; axis < 4; axis++) {
        fits = fits && usage.axis[axis] <= UINT64_MAX - sum->axis[axis];
        sum->axis[axis] += usage.axis[axis];
    }
    return fits;
}

/* The sum of everything but these two; false when it leaves 64 bits. */
static bool sum_without(const struct line *one, const struct line *two, struct usage *sum)
{
    bool fits = true;
    *sum = NOTHING;
    for (int i = 0; i < MANAGERS; i++)
        if (model.managers[i].used && &model.managers[i] != one)
            fits = add(sum, model.managers[i].usage) && fits;
    for (int i = 0; i < RESERVATIONS; i++)
        if (model.reservations[i].used && &model.reservations[i] != two)
            fits = add(sum, model.reservations[i].usage) && fits;
    return fits;
}

static struct usage current(void)
{
    struct usage sum;
    EXPECT(sum_without(NULL, NULL, &sum));
    return sum;
}

static void raise_peaks(void)
{
    struct usage now = current();
    for (int axis = 0; axis < 4; axis++)
        if (now.axis[axis] <= model.limits.axis[axis] && now.axis[axis] > model.peak.axis[axis])
            model.peak.axis[axis] = now.axis[axis];
}

static struct line *find_manager(uint64_t id)
{
    for (int i = 0; i < MANAGERS; i++)
        if (model.managers[i].used && model.managers[i].id == id)
            return &model.managers[i];
    return NULL;
}

static struct line *unused(struct line *lines, int count)
{
    for (int i = 0; i < count; i++)
        if (!lines[i].used)
            return &lines[i];
    return NULL;
}

static enum shmc_status admitted(struct usage usage, int *axis)
{
    struct usage sum = current();
    if (!add(&sum, usage))
        return SHMC_ADMISSION_OVERFLOW;
    for (*axis = 0; *axis < 4; ++*axis)
        if (usage.axis[*axis] != 0 && sum.axis[*axis] > model.limits.axis[*axis])
            return SHMC_BUDGET_EXCEEDED;
    return unused(model.reservations, RESERVATIONS) == NULL ? SHMC_RESERVATIONS_FULL : SHMC_OK;
}

/* ---- random arguments ----------------------------------------------------------------------- */

static struct usage any_usage(void)
{
    struct usage usage = NOTHING;
    for (int axis = 0; axis < 4; axis++) {
        uint64_t limit = model.limits.axis[axis];
        switch (random_below(10)) {
        case 0:
            usage.axis[axis] = limit - random_below(2) * (limit != 0);
            break;
        case 1:
            usage.axis[axis] = random_below(8) == 0 ? UINT64_MAX - random_below(40) : limit + 1;
            break;
        case 2:
        case 3:
        case 4:
        case 5:
            usage.axis[axis] = random_below(limit / 4 + 2);
        }
    }
    return usage;
}

static uint64_t any_id(void)
{
    static const uint64_t ids[] = {0, 1, 2, 3, 4, 5, UINT64_MAX, UINT64_MAX - 1};
    return ids[random_below(sizeof ids / sizeof *ids)];
}

/* A line that is or was in use. */
static struct line *any_line(struct line *lines, int count)
{
    return &lines[random_below((uint64_t)count)];
}

static bool is_of(const struct line *line, int owner)
{
    return line->used && line->owner == owner;
}

/* ---- one request, in both worlds ------------------------------------------------------------ */

static void try_register(int owner)
{
    bool any = random_below(2) == 0;
    uint64_t id = any_id();
    enum shmc_status expected = SHMC_OK;
    struct line *line = unused(model.managers, MANAGERS);
    if (any)
        for (id = model.id_next; find_manager(id) != NULL;)
            id++;
    if (find_manager(id) != NULL)
        expected = SHMC_DUPLICATE_MANAGER;
    else if (line == NULL)
        expected = SHMC_MANAGERS_FULL;
    struct shmc_handle *handle = model.owners[owner];
    EXPECT_EQ(expected, any ? add_any_manager(handle) : add_manager(handle, id));
    if (expected != SHMC_OK)
        return;
    EXPECT_EQ(id, last.id);
    *line = (struct line){.used = true, .owner = owner, .id = id, .token = last.token};
    if (any)
        model.id_next = id + 1;
}

static void try_publish(int owner)
{
    uint64_t id = any_id();
    struct usage usage = any_usage();
    struct usage sum;
    struct line *line = find_manager(id);
    enum shmc_status expected = SHMC_UNKNOWN_MANAGER;
    if (line != NULL) {
        EXPECT(sum_without(line, NULL, &sum));
        expected = add(&sum, usage) ? SHMC_OK : SHMC_PUBLICATION_OVERFLOW;
    }
    EXPECT_EQ(expected, publish(model.owners[owner], id, usage));
    if (expected != SHMC_OK)
        return;
    line->usage = usage;
    EXPECT_USAGE(current(), aggregate());
    raise_peaks();
}

static void try_reserve(int owner)
{
    int axis = 0;
    struct usage usage = any_usage();
    struct usage sum = current();
    enum shmc_status expected = admitted(usage, &axis);
    EXPECT_EQ(expected, reserve(model.owners[owner], usage));
    if (expected == SHMC_BUDGET_EXCEEDED) {
        add(&sum, usage);
        EXPECT_BUDGET(axis, sum.axis[axis], model.limits.axis[axis]);
    }
    if (expected != SHMC_OK)
        return;
    *unused(model.reservations, RESERVATIONS) =
        (struct line){.used = true, .owner = owner, .usage = usage, .token = last.token};
    raise_peaks();
}

static void try_release(int owner)
{
    struct line *line = any_line(model.reservations, RESERVATIONS);
    bool live = is_of(line, owner);
    EXPECT_EQ(live ? SHMC_OK : SHMC_STALE, release(model.owners[owner], line->token));
    line->used = line->used && !live;
}

static void try_release_manager(int owner)
{
    struct line *line = any_line(model.managers, MANAGERS);
    bool live = is_of(line, owner);
    EXPECT_EQ(live ? SHMC_OK : SHMC_STALE, release_manager(model.owners[owner], line->token));
    line->used = line->used && !live;
}

static void try_publish_and_release(int owner)
{
    struct line *reservation = any_line(model.reservations, RESERVATIONS);
    uint64_t id = any_id();
    struct line *manager = find_manager(id);
    struct usage usage = any_usage();
    struct usage sum;
    enum shmc_status expected = SHMC_UNKNOWN_MANAGER;
    if (manager != NULL) {
        expected = SHMC_STALE;
        if (is_of(reservation, owner)) {
            EXPECT(sum_without(manager, reservation, &sum));
            expected = add(&sum, usage) ? SHMC_OK : SHMC_PUBLICATION_OVERFLOW;
        }
    }
    EXPECT_EQ(expected, publish_and_release(model.owners[owner], id, usage, reservation->token));
    if (expected != SHMC_OK)
        return;
    manager->usage = usage;
    reservation->used = false;
    EXPECT_USAGE(current(), aggregate());
    raise_peaks();
}

/* Another owner cleans up; the slot goes to a new handle. */
static void replace_owner(int owner)
{
    struct shmc_handle *old = model.owners[owner];
    reclaim(model.owners[random_below(OWNERS)], shmc_slot(old), shmc_nonce(old));
    for (int i = 0; i < MANAGERS; i++)
        model.managers[i].used = model.managers[i].used && model.managers[i].owner != owner;
    for (int i = 0; i < RESERVATIONS; i++)
        model.reservations[i].used =
            model.reservations[i].used && model.reservations[i].owner != owner;
    model.owners[owner] = attach(old->segment_fd);
    EXPECT_EQ(shmc_slot(old), shmc_slot(model.owners[owner]));
    shmc_close(old);
}

static void any_request(void)
{
    int owner = (int)random_below(OWNERS);
    switch (random_below(16)) {
    case 0:
    case 1:
    case 2:
        return try_register(owner);
    case 3:
    case 4:
    case 5:
        return try_publish(owner);
    case 6:
    case 7:
    case 8:
        return try_reserve(owner);
    case 9:
    case 10:
    case 11:
        return try_release(owner);
    case 12:
        return try_release_manager(owner);
    case 13:
    case 14:
        return try_publish_and_release(owner);
    default:
        return replace_owner(owner);
    }
}

static void count(const struct line *lines, int lines_count, int owner, uint64_t *used,
                  struct usage *sum)
{
    *used = 0;
    for (int i = 0; i < lines_count; i++)
        if (is_of(&lines[i], owner)) {
            ++*used;
            EXPECT(add(sum, lines[i].usage));
        }
}

static void expect_equal_worlds(void)
{
    struct shmc_held rows[OWNERS];
    uint64_t managers = 0;
    uint64_t reservations = 0;
    MUST(held(model.owners[0], rows));
    for (int owner = 0; owner < OWNERS; owner++) {
        struct shmc_held *row = &rows[shmc_slot(model.owners[owner])];
        uint64_t used[2];
        struct usage sum = NOTHING;
        count(model.managers, MANAGERS, owner, &used[0], &sum);
        count(model.reservations, RESERVATIONS, owner, &used[1], &sum);
        EXPECT_EQ(used[0], row->managers);
        EXPECT_EQ(used[1], row->reservations);
        EXPECT(memcmp(sum.axis, row->usage, sizeof sum.axis) == 0);
        managers += used[0];
        reservations += used[1];
    }
    EXPECT_LEVEL(model.owners[0], current(), model.peak);
    EXPECT_EQ(managers, last.report.managers);
    EXPECT_EQ(reservations, last.report.reservations);
    EXPECT_EQ(OWNERS, last.report.owners);
    EXPECT_CLEAN(model.owners[0]);
}

static uint64_t any_limit(void)
{
    return random_below(8) == 0 ? UINT64_MAX >> random_below(2) : 1 + random_below(40);
}

TEST(random_requests_behave_as_the_model_does)
{
    for (uint64_t round = 0; round < rounds(20); round++) {
        memset(&model, 0, sizeof model);
        model.id_next = 1;
        model.limits = U(any_limit(), any_limit() - 1, any_limit(), any_limit() - 1);
        int fd = new_segment(tables(model.limits, OWNERS, MANAGERS, RESERVATIONS));
        for (int owner = 0; owner < OWNERS; owner++)
            model.owners[owner] = attach(fd);
        for (int request = 0; request < 1000; request++) {
            any_request();
            expect_equal_worlds();
        }
        for (int owner = 0; owner < OWNERS; owner++)
            shmc_close(model.owners[owner]);
        close(fd);
    }
}
