/* orders.c: a reader against an eviction, and two threads of one owner, in every order.
 *
 * Why         Leasing takes no lock. That it is safe depends on the order of a handful of accesses
 *             to shared words on each side, so every order of those is tried.
 * Contract    The engine is compiled with SHMC_INTERLEAVE: before each access to a word it calls
 *             shmc_point(). Actors are coroutines of one thread; accesses to blocks, index, pins,
 *             counts and the leaf lock are the points at which another may go on. All schedules
 *             with at most BOUND preemptions are run, each in a fresh segment; an actor that waits
 *             for the leaf lock lets the others go on, which counts as none. With a SEED, so many
 *             schedules are drawn instead, with a switch at one point in five.
 *             While a lease is held its block must be the same incarnation under the same key, and
 *             nobody may find it out of use; at the end the full check must find nothing.
 * Limits      One thread: what only another core's store buffer can do is for stress.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include "atomics.h"
#include "internal.h"

#define ACTORS_MAX   3u
#define STACK_BYTES  (256u << 10)
#define CHOICES_MAX  4096u
#define BLOCK_BYTES  64u
#define BLOCKS       2u
#define LEASES_MAX   4u

static const uint64_t KEY_A[SHMC_KEY_WORDS] = {1, 2, 3, 4};
static const uint64_t KEY_B[SHMC_KEY_WORDS] = {5, 6, 7, 8};

struct actor {
    ucontext_t context;
    char *stack;
    void (*run)(uint32_t self);
    bool done;
    const uint32_t *waits; /* for this leaf lock, as long as it is taken */
};

static struct actor actors[ACTORS_MAX];
static uint32_t actors_count;
static ucontext_t scheduler;
static int running = -1; /* -1: the scheduler, whose accesses are no points */
static struct shmc_handle *reader, *writer;
static int segment_fd;
static uint64_t violations_count;

static uint32_t holders[2]; /* of the leaf locks of reader and writer */
static struct shmc_lease held[ACTORS_MAX];
static const uint64_t *held_key[ACTORS_MAX];

static void violation(const char *what)
{
    if (violations_count++ == 0)
        printf("violation: %s\n", what);
}

static void die(const char *what)
{
    fprintf(stderr, "broken: %s\n", what);
    exit(3);
}

/* ---- points ------------------------------------------------------------------------------ */

static bool in_region(const struct shmc_handle *handle, const void *word, enum shmc_region region)
{
    uint64_t offset = (uint64_t)((const uint8_t *)word - handle->base);
    return offset - handle->header.region_offset[region] < handle->header.region_bytes[region];
}

static bool matters(const struct shmc_handle *handle, const void *word)
{
    const uint8_t *counts = (const uint8_t *)handle->counts;
    return in_region(handle, word, SHMC_REGION_BLOCKS) ||
           in_region(handle, word, SHMC_REGION_INDEX) ||
           in_region(handle, word, SHMC_REGION_PINS) ||
           (const uint32_t *)word == &handle->leaf ||
           ((const uint8_t *)word >= counts && (const uint8_t *)word < counts + BLOCKS * 4);
}

/* What must hold at every moment: a held block is what it was when it was leased. */
static void check_held(void)
{
    for (uint32_t i = 0; i < actors_count; i++) {
        if (held_key[i] == NULL)
            continue;
        const struct shmc_block *block = &reader->blocks[held[i].block];
        uint64_t state = SHMC_BLOCK_STATE(block->state);
        if (block->generation != held[i].generation || !shmc_same_key(block->key, held_key[i]) ||
            (state != SHMC_BLOCK_PUBLISHED && state != SHMC_BLOCK_EVICTING &&
             state != SHMC_BLOCK_DOOMED))
            violation("a leased block was given to somebody else");
    }
}

void shmc_point(const void *word)
{
    if (running < 0 || (!matters(reader, word) && !matters(writer, word)))
        return;
    struct actor *actor = &actors[running];
    bool is_leaf = word == (const void *)&reader->leaf || word == (const void *)&writer->leaf;
    actor->waits = is_leaf ? word : NULL;
    swapcontext(&actor->context, &scheduler);
    if (is_leaf && *actor->waits == 0)
        holders[actor->waits == &writer->leaf] = (uint32_t)running; /* it takes it now */
    check_held();
}

/* ---- actors ------------------------------------------------------------------------------ */

static void entry(int self)
{
    actors[self].run((uint32_t)self);
    actors[self].done = true;
    swapcontext(&actors[self].context, &scheduler);
}

/* Leases the key, looks at it for some moments, gives it back; twice. */
static void read_key_a(uint32_t self)
{
    for (uint32_t round = 0; round < 2; round++) {
        uint64_t found = 0;
        struct shmc_lease lease;
        if (shmc_match(reader, KEY_A, 1, &lease, &found) != SHMC_OK || found == 0)
            continue;
        held[self] = lease;
        held_key[self] = KEY_A;
        check_held();
        (void)shmc_load_acquire(&reader->blocks[lease.block].generation); /* some moments */
        (void)shmc_load_acquire(&reader->blocks[lease.block].generation);
        held_key[self] = NULL;
        shmc_release(reader, &lease, 1);
    }
}

static void store(const uint64_t *key)
{
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = BLOCK_BYTES};
    if (shmc_perform(writer, &request, 0) != SHMC_OK)
        return;
    request.operation = SHMC_OP_PUBLISH;
    memcpy(request.key, key, sizeof request.key);
    if (shmc_perform(writer, &request, 0) == SHMC_OK)
        shmc_release(writer, &request.lease, 1);
}

static void evict_any(void)
{
    struct shmc_request request = {.operation = SHMC_OP_EVICT, .bytes = BLOCK_BYTES};
    shmc_perform(writer, &request, 0);
}

/* Evicts what can go, and stores another block, in its place, under another key. */
static void replace(uint32_t self)
{
    (void)self;
    evict_any();
    store(KEY_B);
}

/* Evicts the block and stores it again, in the same place under the same key, then replaces it. */
static void renew(uint32_t self)
{
    evict_any();
    store(KEY_A);
    replace(self);
}

/* ---- one schedule ------------------------------------------------------------------------ */

static void must(enum shmc_status status, const char *what)
{
    if (status != SHMC_OK)
        die(what);
}

static struct shmc_handle *join(void)
{
    struct shmc_handle *handle;
    struct shmc_refusal refusal;
    struct shmc_request request = {.operation = SHMC_OP_JOIN};
    must(shmc_open(segment_fd, true, &handle, &refusal), "open");
    must(shmc_perform(handle, &request, 0), "join");
    return handle;
}

static uint8_t *pristine;
static uint64_t changing_bytes; /* up to what only counts */

/* A segment with one place that holds KEY_A, leased by nobody. */
static void make_segment(void)
{
    const struct shmc_geometry geometry = {.limits = {1, 1u << 20, 1, 1},
                                           .arena_bytes = BLOCK_BYTES,
                                           .blocks_max = BLOCKS,
                                           .block_bytes_max = BLOCK_BYTES,
                                           .owners_max = 2,
                                           .managers_max = 1,
                                           .reservations_max = 1,
                                           .mode = 0600};
    struct shmc_refusal refusal;
    segment_fd = memfd_create("interleave", MFD_CLOEXEC);
    if (segment_fd < 0 || fchmod(segment_fd, 0600) != 0 ||
        ftruncate(segment_fd, (off_t)shmc_segment_bytes(&geometry)) != 0)
        die("memfd");
    must(shmc_format(segment_fd, &geometry, &refusal), "format");
    reader = join();
    writer = join();
    struct shmc_request request = {.operation = SHMC_OP_ALLOCATE, .bytes = BLOCK_BYTES};
    must(shmc_perform(writer, &request, 0), "allocate");
    request.operation = SHMC_OP_PUBLISH;
    memcpy(request.key, KEY_A, sizeof request.key);
    must(shmc_perform(writer, &request, 0), "publish");
    shmc_release(writer, &request.lease, 1);
    changing_bytes = reader->header.region_offset[SHMC_REGION_TELEMETRY];
    pristine = malloc(changing_bytes);
    memcpy(pristine, reader->base, changing_bytes);
}

static void reset(void)
{
    memcpy(reader->base, pristine, changing_bytes);
    memset(reader->counts, 0, BLOCKS * sizeof *reader->counts);
    memset(writer->counts, 0, BLOCKS * sizeof *writer->counts);
    reader->leaf = writer->leaf = 0;
    memset(held_key, 0, sizeof held_key);
    for (uint32_t i = 0; i < actors_count; i++) {
        getcontext(&actors[i].context);
        actors[i].context.uc_stack.ss_sp = actors[i].stack;
        actors[i].context.uc_stack.ss_size = STACK_BYTES;
        actors[i].context.uc_link = NULL;
        actors[i].done = false;
        actors[i].waits = NULL;
        makecontext(&actors[i].context, (void (*)(void))entry, 1, (int)i);
    }
}

static void expect_clean_end(void)
{
    struct shmc_problem problem;
    struct shmc_request request = {
        .operation = SHMC_OP_CHECK, .problems = &problem, .problems_max = 1};
    if (shmc_perform(reader, &request, 0) != SHMC_OK || request.problems_count != 0)
        violation("the tables are not sound at the end");
    for (uint32_t slot = 0; slot < 2; slot++)
        if (shmc_pin_row(reader, slot)[0] != 0)
            violation("a pin is left that nobody holds");
}

/* ---- all schedules ----------------------------------------------------------------------- */

#define SWITCH_ONE_IN 5u
static uint64_t random_state; /* 0: schedules are enumerated */

struct choice {
    uint32_t actor;     /* who went on */
    uint32_t usual;     /* who goes on in the first schedule that comes here */
    uint32_t ready;     /* a bit for each who could */
    uint32_t before;    /* who had gone on before */
    uint32_t preempted; /* preemptions up to and with this choice */
    bool could_go_on;   /* the one before could have */
};

static struct choice choices[CHOICES_MAX];
static uint32_t fixed;         /* choices that are prescribed in this run */
static uint32_t prescribed[CHOICES_MAX];

/* Whoever leaves it comes to a point at the same word: it must not wait for itself. */
static uint32_t leaf_holder(const uint32_t *leaf)
{
    return holders[leaf == &writer->leaf];
}

static bool ready(uint32_t actor)
{
    const uint32_t *waits = actors[actor].waits;
    return !actors[actor].done && (waits == NULL || *waits == 0 || actor == leaf_holder(waits));
}

static uint32_t ready_mask(void)
{
    uint32_t mask = 0;
    for (uint32_t i = 0; i < actors_count; i++)
        mask |= (uint32_t)ready(i) << i;
    return mask;
}

/* Somebody who is ready, else somebody who waits; actors_count when all are done. */
static uint32_t usual_next(void)
{
    uint32_t next = 0;
    while (next < actors_count && !ready(next))
        next++;
    if (next == actors_count)
        for (next = 0; next < actors_count && actors[next].done; next++)
            ;
    return next;
}

static uint64_t random_below(uint64_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % limit;
}

static uint32_t some_ready(uint32_t usual)
{
    uint32_t chosen = (uint32_t)random_below(actors_count);
    return ready(chosen) ? chosen : usual;
}

/* Runs one schedule: as prescribed, then each as long as it can. Returns the number of choices. */
static uint32_t run_schedule(void)
{
    uint32_t count = 0, last = 0;
    reset();
    for (;;) {
        bool can = ready(last);
        uint32_t usual = can ? last : usual_next();
        uint32_t next = count < fixed ? prescribed[count] : usual;
        if (random_state != 0 && random_below(SWITCH_ONE_IN) == 0)
            next = some_ready(usual);
        if (next == actors_count)
            break;
        if (count == CHOICES_MAX)
            die("a schedule does not end");
        uint32_t before = count == 0 ? 0 : choices[count - 1].preempted;
        choices[count] = (struct choice){
            .actor = next,
            .usual = usual,
            .ready = ready_mask(),
            .before = last,
            .preempted = before + (next != last && can && count != 0),
            .could_go_on = can && count != 0,
        };
        count++;
        last = next;
        running = (int)next;
        swapcontext(&scheduler, &actors[next].context);
        running = -1;
        if (violations_count != 0)
            break;
    }
    if (violations_count == 0)
        expect_clean_end();
    return count;
}

/* The next schedule in depth-first order: the last choice that can be another one is. */
static bool advance(uint32_t count, uint32_t bound)
{
    for (uint32_t i = count; i-- > 0;) {
        const struct choice *choice = &choices[i];
        uint32_t before = i == 0 ? 0 : choices[i - 1].preempted;
        uint32_t tried = (choice->actor + actors_count - choice->usual) % actors_count;
        for (uint32_t k = tried + 1; k < actors_count; k++) {
            uint32_t other = (choice->usual + k) % actors_count;
            uint32_t preempted = before + (other != choice->before && choice->could_go_on);
            if ((choice->ready >> other & 1) == 0 || preempted > bound)
                continue;
            for (uint32_t j = 0; j < i; j++)
                prescribed[j] = choices[j].actor;
            prescribed[i] = other;
            fixed = i + 1;
            return true;
        }
    }
    return false;
}

static uint64_t explore(uint32_t bound)
{
    uint64_t schedules = 0;
    fixed = 0;
    for (;;) {
        uint32_t count = run_schedule();
        schedules++;
        if (violations_count != 0 || !advance(count, bound))
            return schedules;
    }
}

/* So many schedules with a switch at one point in five: deeper orders than can be enumerated. */
static uint64_t explore_at_random(uint64_t schedules)
{
    uint64_t done = 0;
    for (; done < schedules && violations_count == 0; done++)
        run_schedule();
    return done;
}

int main(int count, char **arguments)
{
    if (count != 3 && count != 4)
        die("usage: orders SCENE BOUND, or orders SCENE SCHEDULES SEED");
    uint32_t bound = (uint32_t)atoi(arguments[2]);
    random_state = count == 4 ? strtoull(arguments[3], NULL, 10) | 1 : 0;
    actors[0].run = read_key_a;
    actors[1].run = strcmp(arguments[1], "renew") == 0 ? renew : replace;
    actors[2].run = read_key_a;
    actors_count = strcmp(arguments[1], "threads") == 0 ? 3 : 2;
    for (uint32_t i = 0; i < actors_count; i++)
        actors[i].stack = malloc(STACK_BYTES);
    make_segment();
    uint64_t schedules = random_state != 0 ? explore_at_random(bound) : explore(bound);
    printf("scene=%s bound=%u schedules=%llu violations=%llu\n", arguments[1], bound,
           (unsigned long long)schedules, (unsigned long long)violations_count);
    return violations_count == 0 ? 0 : 1;
}
