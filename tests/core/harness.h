/* harness.h: what the tests of the engine share; a test is a named function.
 *
 * The program runs the test its first argument names, in a process of its own, and prints
 * "NAME ok". A failed expectation prints both sides, the line and (with a sanitizer) the stack, and
 * ends the process. Nothing is cleaned up after a test: its process ends, its segments are memfds.
 */
#ifndef HARNESS_H
#define HARNESS_H

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

#define TEST(name)                                                                                 \
    static void name(void);                                                                        \
    __attribute__((constructor)) static void add_##name(void)                                      \
    {                                                                                              \
        add_test(#name, name);                                                                     \
    }                                                                                              \
    static void name(void)

void add_test(const char *name, void (*run)(void));
_Noreturn void fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define FAIL(...)         fail(__FILE__, __LINE__, __VA_ARGS__)
#define EXPECT(condition) ((condition) ? (void)0 : FAIL("not true: %s", #condition))
#define EXPECT_EQ(expected, actual)                                                                \
    expect_eq(__FILE__, __LINE__, #actual, (uint64_t)(expected), (uint64_t)(actual))
#define EXPECT_STATUS(name, call) expect_status(__FILE__, __LINE__, #call, SHMC_##name, (call))
#define MUST(call)                EXPECT_STATUS(OK, call)

void expect_eq(const char *file, int line, const char *what, uint64_t expected, uint64_t actual);
void expect_status(const char *file, int line, const char *what, enum shmc_status expected,
                   enum shmc_status actual);

/* ---- randomness: one stream per thread; seeded by ENGINE_TEST_SEED or anew, and printed ------ */

void random_start(uint64_t stream);
uint64_t random_u64(void);
uint64_t random_below(uint64_t limit);

#ifdef FUZZING
void random_from(const uint8_t *data, size_t size); /* instead of a seed */
#endif

/* How often a randomised test repeats itself: its own figure times ENGINE_TEST_FACTOR. */
uint64_t rounds(uint64_t usual);

/* ---- bytes per axis: device, host, transfer, disk -------------------------------------------- */

struct usage {
    uint64_t axis[SHMC_AXES];
};

#define U(...)  ((struct usage){{__VA_ARGS__}})
#define NOTHING U(0, 0, 0, 0)
#define ROOMY   U(1ull << 40, 1ull << 40, 1ull << 40, 1ull << 40)

/* ---- segments and handles -------------------------------------------------------------------- */

/* Tables without an arena. */
struct shmc_geometry tables(struct usage limits, uint32_t owners, uint32_t managers,
                            uint32_t reservations);
int new_file(uint64_t bytes, uint32_t mode); /* a memfd */
int new_segment(struct shmc_geometry geometry);
struct shmc_handle *observe(int fd);               /* opened without a slot */
struct shmc_handle *attach(int fd);                /* opened and joined */
struct shmc_handle *new_pool(struct usage limits); /* a small segment, attached */
/* As tables(), with an arena. */
struct shmc_geometry arena(uint64_t arena_bytes, uint64_t blocks, uint64_t block_bytes_max);

/* ---- requests: the status returned, the results in `last` of the calling thread -------------- */

extern _Thread_local struct shmc_request last;

enum shmc_status join(struct shmc_handle *handle);
enum shmc_status add_manager(struct shmc_handle *handle, uint64_t id);
enum shmc_status add_any_manager(struct shmc_handle *handle);
enum shmc_status publish(struct shmc_handle *handle, uint64_t id, struct usage usage);
enum shmc_status reserve(struct shmc_handle *handle, struct usage usage);
enum shmc_status release_manager(struct shmc_handle *handle, struct shmc_token token);
enum shmc_status release(struct shmc_handle *handle, struct shmc_token token);
enum shmc_status publish_and_release(struct shmc_handle *handle, uint64_t id, struct usage usage,
                                     struct shmc_token token);
enum shmc_status report(struct shmc_handle *handle);
enum shmc_status held(struct shmc_handle *handle, struct shmc_held *rows);
enum shmc_status reclaim_begin(struct shmc_handle *handle, uint32_t slot, uint64_t nonce);
enum shmc_status reclaim_step(struct shmc_handle *handle, uint32_t slot, uint64_t nonce,
                              uint64_t cursor);
enum shmc_status files_gone(struct shmc_handle *handle, uint32_t slot, uint64_t nonce);
enum shmc_status set_paths(struct shmc_handle *handle, const char *paths, uint64_t bytes);
enum shmc_status retire(struct shmc_handle *handle, uint64_t attach_seq);
enum shmc_status check(struct shmc_handle *handle, struct shmc_problem *problems, uint32_t max);

struct usage aggregate(void); /* of the last publication */

/* Keys are small numbers in the tests. A block's lease is in `last`, and so is what it was given
 * instead; allocate() and evict() repeat a request that answers MORE. */
enum shmc_status allocate(struct shmc_handle *handle, uint64_t bytes);
enum shmc_status seal_block(struct shmc_handle *handle, struct shmc_lease lease);
enum shmc_status publish_block(struct shmc_handle *handle, struct shmc_lease lease, uint64_t key);
enum shmc_status discard(struct shmc_handle *handle, struct shmc_lease lease);
enum shmc_status invalidate(struct shmc_handle *handle, uint64_t key);
enum shmc_status protect(struct shmc_handle *handle, uint64_t key, bool protect);
enum shmc_status evict(struct shmc_handle *handle, uint64_t bytes);
bool lookup(struct shmc_handle *handle, uint64_t key, struct shmc_lease *lease);
/* Allocates, fills with the key's bytes, publishes; expects that all of it succeeds. */
struct shmc_lease store(struct shmc_handle *handle, uint64_t key, uint64_t bytes);

/* Gives back all that an owner holds, and its slot; returns the number of steps it took. */
uint32_t reclaim(struct shmc_handle *by, uint32_t slot, uint64_t nonce);
void detach(struct shmc_handle *handle); /* reclaims its own slot; the handle stays open */

/* ---- what must hold -------------------------------------------------------------------------- */

#define EXPECT_CLEAN(handle)                expect_clean(__FILE__, __LINE__, handle)
#define EXPECT_LEVEL(handle, current, peak) expect_level(__FILE__, __LINE__, handle, current, peak)
#define EXPECT_USAGE(expected, actual) expect_usage(__FILE__, __LINE__, #actual, expected, actual)
/* The last request was refused on this axis with these numbers. */
#define EXPECT_BUDGET(name, needed, limit)                                                         \
    (EXPECT_EQ(name, last.axis), EXPECT_EQ(needed, last.required), EXPECT_EQ(limit, last.budget))

void expect_clean(const char *file, int line, struct shmc_handle *handle);
void expect_level(const char *file, int line, struct shmc_handle *handle, struct usage current,
                  struct usage peak);
void expect_usage(const char *file, int line, const char *what, struct usage expected,
                  struct usage actual);

/* A copy of every byte that a redo record may change; its holder frees the data. */
struct image {
    uint64_t bytes;
    uint8_t *data;
};

struct image image_of(const struct shmc_handle *handle);
bool same_image(const struct shmc_handle *handle, const struct image *image);
void restore_image(struct shmc_handle *handle, const struct image *image);

/* A copy of every mapped byte that no request may change: the header, the gate's unused bytes, and
 * the regions that are written without the lock. Filled with a pattern first where it is empty. */
struct outside {
    uint64_t bytes;
    uint8_t *data;
};

struct outside outside_of(struct shmc_handle *handle);
bool same_outside(const struct shmc_handle *handle, const struct outside *outside);

/* ---- processes and waiting ------------------------------------------------------------------- */

/* Runs the function in a forked child and expects it to return. */
void in_child(void (*run)(void *), void *argument);
/* Forks; the child runs the function and then sleeps until the parent kills it. Returns when the
 * function is done. */
pid_t child_that_stays(void (*run)(void *), void *argument);
void hold_the_lock(void *fd); /* for child_that_stays */
void kill_child(pid_t pid);
void die_with_parent(void); /* for children: a failed test leaves nobody behind */
void wait_for(bool (*condition)(void *), void *argument); /* polls; the watchdog ends it */
bool thread_sleeps(void *thread); /* of this process; false while *thread is 0 */

#endif
