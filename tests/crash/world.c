/* world.c: a small furnished segment, and everything that must hold in it after a death.
 *
 * Why         "Nothing is lost" can only be judged where something is at stake: live owners hold
 *             entries between those of the victim, one owner died before, the free lists are in
 *             use, and managers share a bucket with the victim's in its middle.
 * Contract    Images are copies of the segment's bytes up to the pins. A snapshot is judged in a
 *             second segment, by handles of a process that had no part in the experiment.
 */
#include "crash.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEGMENT_MODE 0600u
#define FIRST_NONCE  0x1000u
#define GONE_NONCE   0x2000u
#define FILLER_NONCE 0x3000u
#define PROBLEMS_MAX 4u

static uint32_t violations_found;

void violation(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("violation: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    if (++violations_found == VIOLATIONS_MAX)
        exit(EXIT_VIOLATED);
}

void broken(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("broken harness: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(EXIT_BROKEN);
}

uint32_t violations(void)
{
    return violations_found;
}

void *must_allocate(void *memory, size_t bytes)
{
    memory = realloc(memory, bytes);
    if (memory == NULL)
        broken("no memory");
    return memory;
}

/* ---- segments ---------------------------------------------------------------------------- */

static int memory_file(uint64_t bytes)
{
    int fd = memfd_create("shmcache.crash", MFD_CLOEXEC);
    if (fd < 0 || fchmod(fd, SEGMENT_MODE) != 0 || ftruncate(fd, (off_t)bytes) != 0)
        broken("no memory file: %s", strerror(errno));
    return fd;
}

static struct shmc_handle *must_open(int fd)
{
    struct shmc_handle *handle;
    struct shmc_refusal refusal;
    enum shmc_status status = shmc_open(fd, false, &handle, &refusal);
    if (status != SHMC_OK)
        broken("open: %s", shmc_status_name(status));
    return handle;
}

void segment_make(struct segment *segment, uint32_t reservations_max)
{
    const struct shmc_geometry geometry = {
        .limits = {1000, 1000, 100, 500},
        .owners_max = OWNERS_MAX,
        .managers_max = MANAGERS_MAX,
        .reservations_max = reservations_max,
        .mode = SEGMENT_MODE,
    };
    struct shmc_refusal refusal;
    segment->fd = memory_file(shmc_segment_bytes(&geometry));
    enum shmc_status status = shmc_format(segment->fd, &geometry, &refusal);
    if (status == SHMC_REFUSED) {
        printf("refused: %s\n", shmc_check_name_text(refusal.check));
        exit(EXIT_REFUSED);
    }
    if (status != SHMC_OK)
        broken("format: %s", shmc_status_name(status));
    segment->handle = must_open(segment->fd);
}

/* A segment with the same header: images of one fit the other. */
static void segment_twin(struct segment *twin, const struct segment *segment)
{
    uint64_t bytes = segment->handle->header.total_bytes;
    twin->fd = memory_file(bytes);
    if (pwrite(twin->fd, segment->handle->base, bytes, 0) != (ssize_t)bytes)
        broken("cannot copy a segment: %s", strerror(errno));
    twin->handle = must_open(twin->fd);
}

void segment_load(const struct segment *segment, const uint8_t *image, size_t bytes)
{
    memcpy(segment->handle->base, image, bytes);
}

enum shmc_status perform_as(const struct segment *segment, struct actor actor,
                            struct shmc_request *request)
{
    act_as(segment->handle, actor);
    return shmc_perform(segment->handle, request, 0);
}

bool next_of_reclaim(enum shmc_operation operation, enum shmc_status status,
                     enum shmc_operation *next)
{
    bool begins = operation == SHMC_OP_RECLAIM_BEGIN || operation == SHMC_OP_FILES_GONE;
    if (begins && status == SHMC_OK)
        *next = SHMC_OP_RECLAIM_STEP;
    else if (status == SHMC_LIVE_FILES)
        *next = SHMC_OP_FILES_GONE;
    else
        return false;
    return true;
}

enum shmc_status reclaim(const struct segment *segment, struct actor dead)
{
    const struct actor sweeper = {.slot = SHMC_NO_SLOT};
    struct shmc_request request = {
        .operation = SHMC_OP_RECLAIM_BEGIN, .owner_slot = dead.slot, .owner_nonce = dead.nonce};
    enum shmc_status status;
    do
        status = perform_as(segment, sweeper, &request);
    while (next_of_reclaim(request.operation, status, &request.operation) || status == SHMC_MORE);
    return status;
}

/* ---- furniture --------------------------------------------------------------------------- */

static struct shmc_request must(const struct segment *segment, struct actor actor,
                                struct shmc_request request)
{
    enum shmc_status status = perform_as(segment, actor, &request);
    if (status != SHMC_OK)
        broken("furnishing: operation %d gives %s", (int)request.operation,
               shmc_status_name(status));
    return request;
}

struct actor must_join(const struct segment *segment, uint64_t nonce)
{
    struct actor actor = {.slot = SHMC_NO_SLOT, .nonce = nonce};
    must(segment, actor, (struct shmc_request){.operation = SHMC_OP_JOIN});
    actor.slot = segment->handle->slot;
    return actor;
}

static struct shmc_token must_register(const struct segment *segment, struct actor actor,
                                       uint64_t id)
{
    struct shmc_request request = {.operation = SHMC_OP_REGISTER, .id = id};
    struct shmc_token token = must(segment, actor, request).token;
    request = (struct shmc_request){
        .operation = SHMC_OP_UPDATE, .id = id, .usage = {40 + id % 10, 30, id % 5, 20}};
    must(segment, actor, request);
    return token;
}

static struct shmc_token must_reserve(const struct segment *segment, struct actor actor,
                                      uint64_t amount)
{
    struct shmc_request request = {.operation = SHMC_OP_RESERVE,
                                   .usage = {amount, amount / 2, 1, 0}};
    return must(segment, actor, request).token;
}

static void must_set_paths(const struct segment *segment, struct actor actor)
{
    static char paths[] = "/live";
    must(segment, actor,
         (struct shmc_request){
             .operation = SHMC_OP_SET_PATHS, .paths = paths, .paths_bytes = sizeof paths});
}

static void must_release(const struct segment *segment, struct actor actor,
                         enum shmc_operation operation, struct shmc_token token)
{
    must(segment, actor, (struct shmc_request){.operation = operation, .token = token});
}

static void furnish(struct world *world, const struct segment *segment)
{
    struct actor *actors = world->actors;
    struct shmc_token spare[3];
    for (uint32_t i = 0; i < NEWCOMER; i++)
        actors[i] = must_join(segment, FIRST_NONCE + i);
    actors[NEWCOMER] = (struct actor){SHMC_NO_SLOT, FIRST_NONCE + NEWCOMER};
    if (reclaim(segment, must_join(segment, GONE_NONCE)) != SHMC_OK)
        broken("furnishing: an owner cannot leave");
    must_set_paths(segment, actors[DEAD]);
    must_set_paths(segment, actors[VICTIM]);
    must_register(segment, actors[DEAD], ID_DEAD_SECOND);
    must_register(segment, actors[FRIEND], ID_FRIEND);
    world->victim_manager = must_register(segment, actors[VICTIM], ID_VICTIM);
    must_register(segment, actors[NEIGHBOUR], ID_NEIGHBOUR);
    must_register(segment, actors[DEAD], ID_DEAD);
    must_register(segment, actors[VICTIM], ID_VICTIM_SECOND);
    must_release(segment, actors[NEIGHBOUR], SHMC_OP_RELEASE_MANAGER,
                 must_register(segment, actors[NEIGHBOUR], ID_SPARE));
    for (uint32_t i = 0; i < 3; i++) {
        must_reserve(segment, actors[DEAD], 10);
        spare[i] = must_reserve(segment, actors[VICTIM], 4);
        must_reserve(segment, actors[i % 2 == 0 ? NEIGHBOUR : FRIEND], 20);
        world->victim_reservation = must_reserve(segment, actors[VICTIM], 30);
    }
    for (uint32_t i = 0; i < 3; i++)
        must_release(segment, actors[VICTIM], SHMC_OP_RELEASE_RESERVATION, spare[i]);
    world->stale_reservation = spare[0];
    segment->handle->gate->waiters[0] =
        1u << actors[FRIEND].slot | 1u << actors[VICTIM].slot | 1u << actors[DEAD].slot;
}

static uint8_t *image_of(const struct world *world, const struct segment *segment)
{
    uint8_t *image = must_allocate(NULL, world->image_bytes);
    return memcpy(image, segment->handle->base, world->image_bytes);
}

void world_make(struct world *world)
{
    segment_make(&world->stepped, RESERVATIONS_MAX);
    segment_twin(&world->observed, &world->stepped);
    const struct segment *segment = &world->stepped;
    world->image_bytes = segment->handle->header.region_offset[SHMC_REGION_PINS];
    furnish(world, segment);
    world->image[FREE_LIST] = image_of(world, segment);
    const struct shmc_control *control = segment->handle->control;
    while (control->reservation_free != SHMC_NO_INDEX)
        must_reserve(segment, world->actors[FRIEND], 4);
    must_register(segment, world->actors[NEIGHBOUR], ID_SPARE);
    if (control->manager_free != SHMC_NO_INDEX || control->manager_mark == MANAGERS_MAX ||
        control->reservation_mark == RESERVATIONS_MAX)
        broken("furnishing: the tables are not as meant");
    world->image[MARK_PATH] = image_of(world, segment);
}

/* ---- images ------------------------------------------------------------------------------ */

void *image_region(const struct world *world, const uint8_t *image, enum shmc_region region)
{
    return (uint8_t *)(uintptr_t)image + world->stepped.handle->header.region_offset[region];
}

void kernel_releases(const struct world *world, uint8_t *image, pid_t holder)
{
    struct shmc_gate *gate = image_region(world, image, SHMC_REGION_GATE);
    uint32_t *word = (uint32_t *)&gate->mutex.__data.__lock;
    if ((*word & FUTEX_TID_MASK) == (uint32_t)holder)
        *word = (*word & FUTEX_WAITERS) | FUTEX_OWNER_DIED;
}

bool lock_is_held_by(const struct segment *segment, pid_t pid)
{
    uint32_t word = (uint32_t)*(volatile int *)&segment->handle->gate->mutex.__data.__lock;
    return (word & FUTEX_TID_MASK) == (uint32_t)pid;
}

uint64_t pending_commit(const struct world *world, const uint8_t *image)
{
    const struct shmc_redo *redo = image_region(world, image, SHMC_REGION_REDO);
    return redo->commit;
}

static void blank_free_entries(struct shmc_entry *entries, uint64_t max, uint64_t mark)
{
    for (uint64_t i = 0; i < max; i++) {
        if (entries[i].state != SHMC_ENTRY_FREE)
            continue;
        uint64_t next = i < mark ? entries[i].next : 0;
        entries[i] = (struct shmc_entry){.next = next};
    }
}

void make_logical(const struct world *world, uint8_t *image)
{
    struct shmc_gate *gate = image_region(world, image, SHMC_REGION_GATE);
    struct shmc_control *control = image_region(world, image, SHMC_REGION_CONTROL);
    struct shmc_owner *owners = image_region(world, image, SHMC_REGION_OWNERS);
    *gate = (struct shmc_gate){.state = gate->state};
    memset(image_region(world, image, SHMC_REGION_REDO), 0, sizeof(struct shmc_redo));
    control->recoveries = 0;
    for (uint32_t i = 0; i < OWNERS_MAX; i++)
        if (owners[i].state == SHMC_OWNER_FREE)
            owners[i] = (struct shmc_owner){.held = owners[i].held};
    blank_free_entries(image_region(world, image, SHMC_REGION_MANAGERS), MANAGERS_MAX,
                       control->manager_mark);
    blank_free_entries(image_region(world, image, SHMC_REGION_RESERVATIONS), RESERVATIONS_MAX,
                       control->reservation_mark);
}

/* ---- judging ----------------------------------------------------------------------------- */

void expect_clean(const struct segment *segment, const char *name)
{
    struct shmc_problem problems[PROBLEMS_MAX];
    struct shmc_request request = {
        .operation = SHMC_OP_CHECK, .problems = problems, .problems_max = PROBLEMS_MAX};
    enum shmc_status status = shmc_perform(segment->handle, &request, 0);
    if (status != SHMC_OK)
        violation("%s: check gives %s", name, shmc_status_name(status));
    else if (request.problems_count != 0)
        violation("%s: %s: at %lld %lld expected, %lld found (%u problems)", name,
                  shmc_problem_text(problems[0].kind), (long long)problems[0].index,
                  (long long)problems[0].expected, (long long)problems[0].actual,
                  request.problems_count);
}

static bool is_live(const struct shmc_entry *entry)
{
    return SHMC_ENTRY_STATE(entry->state) == SHMC_ENTRY_LIVE;
}

static bool is_others(const struct world *world, uint64_t slot)
{
    return slot == world->actors[NEIGHBOUR].slot || slot == world->actors[FRIEND].slot;
}

/* What the living hold, and nothing else, once the dead are `gone`; before that only the former.
 * Adds up what they hold and returns their number of entries. */
static uint64_t expect_others(const struct world *world, const struct expectation *expectation,
                              enum shmc_region table, bool gone, uint64_t *sum)
{
    const struct shmc_entry *before = image_region(world, expectation->before, table);
    const struct shmc_entry *now = shmc_region(world->observed.handle, table);
    uint64_t max = table == SHMC_REGION_MANAGERS ? MANAGERS_MAX : RESERVATIONS_MAX;
    uint64_t held = 0;
    for (uint64_t i = 0; i < max; i++) {
        bool others = is_live(&before[i]) && is_others(world, SHMC_ENTRY_OWNER(before[i].state));
        if (now[i].generation < before[i].generation ||
            (is_live(&now[i]) && !is_live(&before[i]) && now[i].generation == before[i].generation))
            violation("%s: entry %llu has a generation that was used", expectation->name,
                      (unsigned long long)i);
        if (!others && gone && now[i].state != SHMC_ENTRY_FREE)
            violation("%s: entry %llu of the dead remains", expectation->name,
                      (unsigned long long)i);
        if (!others)
            continue;
        struct shmc_entry unlinked = now[i];
        unlinked.next = before[i].next; /* a chain may lose its dead */
        if (memcmp(&unlinked, &before[i], sizeof unlinked) != 0)
            violation("%s: entry %llu of a living owner changed", expectation->name,
                      (unsigned long long)i);
        held++;
        for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
            sum[axis] += now[i].usage[axis];
    }
    return held;
}

static void expect_other_owners(const struct world *world, const struct expectation *expectation,
                                bool gone)
{
    const struct shmc_owner *before = image_region(world, expectation->before, SHMC_REGION_OWNERS);
    const struct shmc_handle *handle = world->observed.handle;
    for (uint32_t slot = 0; slot < OWNERS_MAX; slot++) {
        bool others = is_others(world, slot);
        if (others && memcmp(&handle->owners[slot], &before[slot], sizeof *before) != 0)
            violation("%s: living owner %u changed", expectation->name, slot);
        if (!others && gone && handle->owners[slot].state != SHMC_OWNER_FREE)
            violation("%s: slot %u of the dead is not free", expectation->name, slot);
    }
    if (gone && handle->gate->waiters[0] != 1u << world->actors[FRIEND].slot)
        violation("%s: waiter flags are %llx", expectation->name,
                  (unsigned long long)handle->gate->waiters[0]);
}

/* Whoever has this nonce is declared dead. */
static void expect_reclaim(const struct world *world, const char *name, uint64_t nonce)
{
    const struct segment *segment = &world->observed;
    for (uint32_t slot = 0; slot < OWNERS_MAX; slot++) {
        const struct shmc_owner *owner = &segment->handle->owners[slot];
        if (owner->state == SHMC_OWNER_FREE || owner->nonce != nonce)
            continue;
        enum shmc_status status = reclaim(segment, (struct actor){.slot = slot, .nonce = nonce});
        if (status != SHMC_OK)
            violation("%s: reclaim of slot %u gives %s", name, slot, shmc_status_name(status));
    }
}

/* C21: what is in neither list can be taken by nobody, so everything is taken. */
static void expect_takes(const struct world *world, const struct expectation *expectation,
                         struct shmc_request request, enum shmc_status full, uint64_t expected)
{
    struct actor actor = world->actors[NEIGHBOUR];
    struct shmc_token tokens[RESERVATIONS_MAX];
    const struct shmc_entry *before = NULL;
    if (request.operation == SHMC_OP_RESERVE)
        before = image_region(world, expectation->before, SHMC_REGION_RESERVATIONS);
    else if (request.operation == SHMC_OP_REGISTER)
        before = image_region(world, expectation->before, SHMC_REGION_MANAGERS);
    enum shmc_operation back = request.operation == SHMC_OP_RESERVE ? SHMC_OP_RELEASE_RESERVATION
                                                                    : SHMC_OP_RELEASE_MANAGER;
    enum shmc_status status = SHMC_OK;
    uint64_t taken = 0;
    for (; taken <= expected; taken++) {
        if (request.operation == SHMC_OP_JOIN)
            actor = (struct actor){.slot = SHMC_NO_SLOT, .nonce = FILLER_NONCE + taken};
        status = perform_as(&world->observed, actor, &request);
        if (status != SHMC_OK)
            break;
        if (taken < RESERVATIONS_MAX)
            tokens[taken] = request.token;
        if (before != NULL && request.token.generation <= before[request.token.index].generation)
            violation("%s: a token has a name that was used", expectation->name);
    }
    if (status != full || taken != expected)
        violation("%s: %llu of %llu entries could be taken, then %s", expectation->name,
                  (unsigned long long)taken, (unsigned long long)expected,
                  shmc_status_name(status));
    expect_clean(&world->observed, expectation->name);
    for (uint64_t i = 0; request.operation != SHMC_OP_JOIN && i < taken; i++) {
        struct shmc_request release = {.operation = back, .token = tokens[i]};
        status = perform_as(&world->observed, actor, &release);
        if (status != SHMC_OK)
            violation("%s: release gives %s", expectation->name, shmc_status_name(status));
    }
}

/* What files occupy is charged as long as somebody has to delete them, and nothing else is. */
static void expect_files_charged(const struct segment *segment, const char *name, uint32_t slot)
{
    const struct actor sweeper = {.slot = SHMC_NO_SLOT};
    const struct shmc_handle *handle = segment->handle;
    const struct shmc_entry *managers = handle->managers.entries;
    struct shmc_request request = {.operation = SHMC_OP_RECLAIM_BEGIN,
                                   .owner_slot = slot,
                                   .owner_nonce = handle->owners[slot].nonce};
    uint64_t files[MANAGERS_MAX][SHMC_AXES] = {0};
    for (uint32_t i = 0; i < MANAGERS_MAX; i++)
        files[i][SHMC_DISK] = managers[i].usage[SHMC_DISK];
    enum shmc_status status = perform_as(segment, sweeper, &request);
    request.operation = SHMC_OP_RECLAIM_STEP;
    if (status == SHMC_OK)
        status = perform_as(segment, sweeper, &request);
    if (status != SHMC_LIVE_FILES)
        violation("%s: files of the dead are forgotten (%s)", name, shmc_status_name(status));
    for (uint32_t i = 0; i < MANAGERS_MAX; i++)
        if (managers[i].state == SHMC_ENTRY_LIVE_OF(slot) &&
            memcmp(files[i], managers[i].usage, sizeof files[i]) != 0)
            violation("%s: a dead manager keeps more, or less, than its files", name);
    expect_clean(segment, name);
}

/* The dead are declared dead: all of theirs returns, and everything can be used. */
static void expect_nothing_lost(struct world *world, const struct expectation *expectation)
{
    const struct segment *segment = &world->observed;
    const struct shmc_control *control = segment->handle->control;
    const char *name = expectation->name;
    uint64_t sum[SHMC_AXES] = {0};
    for (uint32_t slot = 0; slot < OWNERS_MAX; slot++)
        if (!is_others(world, slot) && segment->handle->owners[slot].path_bytes != 0)
            expect_files_charged(segment, name, slot);
    expect_reclaim(world, name, world->actors[VICTIM].nonce);
    expect_reclaim(world, name, world->actors[DEAD].nonce);
    expect_reclaim(world, name, world->actors[NEWCOMER].nonce);
    expect_clean(segment, name);
    expect_other_owners(world, expectation, true);
    uint64_t managers = expect_others(world, expectation, SHMC_REGION_MANAGERS, true, sum);
    uint64_t reservations = expect_others(world, expectation, SHMC_REGION_RESERVATIONS, true, sum);
    if (memcmp(sum, control->current, sizeof sum) != 0)
        violation("%s: the totals are not what the living hold", name);
    expect_takes(world, expectation, (struct shmc_request){.operation = SHMC_OP_RESERVE},
                 SHMC_RESERVATIONS_FULL, RESERVATIONS_MAX - reservations);
    expect_takes(world, expectation,
                 (struct shmc_request){.operation = SHMC_OP_REGISTER, .allocate_id = true},
                 SHMC_MANAGERS_FULL, MANAGERS_MAX - managers);
    expect_takes(world, expectation, (struct shmc_request){.operation = SHMC_OP_JOIN},
                 SHMC_OWNERS_FULL, OWNERS_MAX - 2);
    expect_clean(segment, name);
}

/* C46: any request may be the first after a death; none may hang, poison or leave the record. */
static void expect_first_calls(const struct world *world, const struct expectation *expectation,
                               const uint8_t *snapshot)
{
    struct shmc_held rows[OWNERS_MAX];
    const struct shmc_request firsts[] = {
        {.operation = SHMC_OP_CHECK},
        {.operation = SHMC_OP_HELD, .held_rows = rows},
        {.operation = SHMC_OP_RESERVE, .usage = {1}},
        {.operation = SHMC_OP_UPDATE, .id = ID_NEIGHBOUR, .usage = {1, 2, 3, 4}},
        {.operation = SHMC_OP_RECLAIM_BEGIN,
         .owner_slot = world->actors[DEAD].slot,
         .owner_nonce = world->actors[DEAD].nonce},
    };
    for (uint32_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
        struct shmc_request request = firsts[i];
        segment_load(&world->observed, snapshot, world->image_bytes);
        enum shmc_status status = perform_as(&world->observed, world->actors[NEIGHBOUR], &request);
        bool gone = request.operation == SHMC_OP_RECLAIM_BEGIN && status == SHMC_STALE;
        bool retired = status == SHMC_RETIRED;
        if (status != SHMC_OK && !gone && !retired)
            violation("%s: operation %d first gives %s", expectation->name, (int)request.operation,
                      shmc_status_name(status));
        expect_clean(&world->observed, expectation->name);
    }
}

static void expect_state(const struct world *world, const struct expectation *expectation,
                         const uint8_t *logical)
{
    for (size_t i = 0; i < expectation->states_count; i++)
        if (memcmp(logical, expectation->states + i * world->image_bytes, world->image_bytes) == 0)
            return;
    violation("%s: neither the state before nor the one after", expectation->name);
}

void judge(struct world *world, const struct expectation *expectation, const uint8_t *snapshot,
           uint8_t *recovered)
{
    struct shmc_request report = {.operation = SHMC_OP_REPORT};
    uint64_t sum[SHMC_AXES] = {0};
    expect_first_calls(world, expectation, snapshot);
    segment_load(&world->observed, snapshot, world->image_bytes);
    enum shmc_status status =
        perform_as(&world->observed, (struct actor){.slot = SHMC_NO_SLOT}, &report);
    if (status != SHMC_OK && status != SHMC_RETIRED)
        violation("%s: report gives %s", expectation->name, shmc_status_name(status));
    expect_clean(&world->observed, expectation->name);
    uint8_t *logical = image_of(world, &world->observed);
    make_logical(world, logical);
    expect_state(world, expectation, logical);
    if (recovered != NULL)
        memcpy(recovered, logical, world->image_bytes);
    free(logical);
    expect_other_owners(world, expectation, false);
    expect_others(world, expectation, SHMC_REGION_MANAGERS, false, sum);
    expect_others(world, expectation, SHMC_REGION_RESERVATIONS, false, sum);
    if (status == SHMC_OK)
        expect_nothing_lost(world, expectation);
}
