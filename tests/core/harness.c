/* harness.c: runs one named test; the helpers of harness.h. */
#include "harness.h"

#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#define TESTS_MAX  256
#define WATCHDOG_S 100
#define WAIT_NS    30000000000ull /* for the lock: longer than any test holds it */

static struct test {
    const char *name;
    void (*run)(void);
} tests[TESTS_MAX];
static size_t tests_count;
static uint64_t seed;

void add_test(const char *name, void (*run)(void))
{
    if (tests_count == TESTS_MAX)
        abort();
    tests[tests_count++] = (struct test){name, run};
}

static uint64_t number_of_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoull(text, NULL, 0) : otherwise;
}

#ifndef FUZZING
int main(int count, char **arguments)
{
    seed = number_of_environment("ENGINE_TEST_SEED", shmc_os_random());
    random_start(0);
    alarm(WATCHDOG_S);
    for (size_t i = 0; i < tests_count; i++) {
        if (count != 2 || strcmp(tests[i].name, arguments[1]) != 0)
            continue;
        printf("ENGINE_TEST_SEED=%llu\n", (unsigned long long)seed);
        fflush(stdout); /* before a child inherits it */
        tests[i].run();
        printf("%s ok\n", tests[i].name);
        return 0;
    }
    fprintf(stderr, "name one test\n");
    return 2;
}
#endif

/* ---- failing --------------------------------------------------------------------------------- */

extern void __sanitizer_print_stack_trace(void) __attribute__((weak));

void fail(const char *file, int line, const char *format, ...)
{
    va_list values;
    fprintf(stderr, "%s:%d: ", file, line);
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    if (__sanitizer_print_stack_trace != NULL)
        __sanitizer_print_stack_trace();
#ifdef FUZZING
    abort(); /* which a fuzzer takes for a finding, and keeps the input */
#else
    _exit(1);
#endif
}

void expect_eq(const char *file, int line, const char *what, uint64_t expected, uint64_t actual)
{
    if (expected != actual)
        fail(file, line, "%s is %llu (%#llx), not %llu (%#llx)", what, (unsigned long long)actual,
             (unsigned long long)actual, (unsigned long long)expected,
             (unsigned long long)expected);
}

void expect_status(const char *file, int line, const char *what, enum shmc_status expected,
                   enum shmc_status actual)
{
    if (expected != actual)
        fail(file, line, "%s is %s, not %s", what, shmc_status_name(actual),
             shmc_status_name(expected));
}

/* ---- randomness ------------------------------------------------------------------------------ */

#ifndef FUZZING /* there tests/fuzz/choices.c chooses */
static _Thread_local uint64_t random_state;

void random_start(uint64_t stream)
{
    random_state = seed + (stream << 32);
}

/* splitmix64 */
uint64_t random_u64(void)
{
    uint64_t mixed = random_state += 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebull;
    return mixed ^ (mixed >> 31);
}

uint64_t random_below(uint64_t limit)
{
    return random_u64() % limit;
}
#endif

uint64_t rounds(uint64_t usual)
{
    return usual * number_of_environment("ENGINE_TEST_FACTOR", 1);
}

/* ---- segments and handles -------------------------------------------------------------------- */

struct shmc_geometry tables(struct usage limits, uint32_t owners, uint32_t managers,
                            uint32_t reservations)
{
    struct shmc_geometry geometry = {.owners_max = owners,
                                     .managers_max = managers,
                                     .reservations_max = reservations,
                                     .mode = 0600};
    memcpy(geometry.limits, limits.axis, sizeof geometry.limits);
    return geometry;
}

int new_file(uint64_t bytes, uint32_t mode)
{
    int fd = memfd_create("engine test", MFD_CLOEXEC);
    EXPECT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && fchmod(fd, mode) == 0);
    return fd;
}

int new_segment(struct shmc_geometry geometry)
{
    struct shmc_refusal refusal = {0};
    int fd = new_file(shmc_segment_bytes(&geometry), geometry.mode);
    MUST(shmc_format(fd, &geometry, &refusal));
    return fd;
}

struct shmc_geometry arena(uint64_t arena_bytes, uint64_t blocks, uint64_t block_bytes_max)
{
    struct shmc_geometry geometry = tables(U(1, arena_bytes, 1, 1), 4, 8, 8);
    geometry.arena_bytes = arena_bytes;
    geometry.blocks_max = blocks;
    geometry.block_bytes_max = block_bytes_max;
    geometry.claims_max = 8;
    return geometry;
}

static struct shmc_handle *open_handle(int fd, bool as_owner)
{
    struct shmc_handle *handle = NULL;
    struct shmc_refusal refusal = {0};
    MUST(shmc_open(fd, as_owner, &handle, &refusal));
    return handle;
}

struct shmc_handle *observe(int fd)
{
    return open_handle(fd, false);
}

struct shmc_handle *attach(int fd)
{
    struct shmc_handle *handle = open_handle(fd, true);
    MUST(join(handle));
    return handle;
}

struct shmc_handle *new_pool(struct usage limits)
{
    return attach(new_segment(tables(limits, 4, 8, 8)));
}

/* ---- requests -------------------------------------------------------------------------------- */

_Thread_local struct shmc_request last;

static enum shmc_status perform(struct shmc_handle *handle, struct shmc_request request)
{
    last = request;
    return shmc_perform(handle, &last, WAIT_NS);
}

static enum shmc_status perform_usage(struct shmc_handle *handle, struct shmc_request request,
                                      struct usage usage)
{
    memcpy(request.usage, usage.axis, sizeof request.usage);
    return perform(handle, request);
}

#define REQUEST(name, ...) ((struct shmc_request){.operation = SHMC_OP_##name, __VA_ARGS__})

enum shmc_status join(struct shmc_handle *handle)
{
    return perform(handle, REQUEST(JOIN));
}

enum shmc_status add_manager(struct shmc_handle *handle, uint64_t id)
{
    return perform(handle, REQUEST(REGISTER, .id = id));
}

enum shmc_status add_any_manager(struct shmc_handle *handle)
{
    return perform(handle, REQUEST(REGISTER, .allocate_id = true));
}

enum shmc_status publish(struct shmc_handle *handle, uint64_t id, struct usage usage)
{
    return perform_usage(handle, REQUEST(UPDATE, .id = id), usage);
}

enum shmc_status reserve(struct shmc_handle *handle, struct usage usage)
{
    return perform_usage(handle, REQUEST(RESERVE), usage);
}

enum shmc_status release_manager(struct shmc_handle *handle, struct shmc_token token)
{
    return perform(handle, REQUEST(RELEASE_MANAGER, .token = token));
}

enum shmc_status release(struct shmc_handle *handle, struct shmc_token token)
{
    return perform(handle, REQUEST(RELEASE_RESERVATION, .token = token));
}

enum shmc_status publish_and_release(struct shmc_handle *handle, uint64_t id, struct usage usage,
                                     struct shmc_token token)
{
    return perform_usage(handle, REQUEST(PUBLISH_AND_RELEASE, .id = id, .token = token), usage);
}

enum shmc_status report(struct shmc_handle *handle)
{
    return perform(handle, REQUEST(REPORT));
}

enum shmc_status held(struct shmc_handle *handle, struct shmc_held *rows)
{
    return perform(handle, REQUEST(HELD, .held_rows = rows));
}

enum shmc_status reclaim_begin(struct shmc_handle *handle, uint32_t slot, uint64_t nonce)
{
    return perform(handle, REQUEST(RECLAIM_BEGIN, .owner_slot = slot, .owner_nonce = nonce));
}

enum shmc_status reclaim_step(struct shmc_handle *handle, uint32_t slot, uint64_t nonce,
                              uint64_t cursor)
{
    return perform(
        handle, REQUEST(RECLAIM_STEP, .owner_slot = slot, .owner_nonce = nonce, .cursor = cursor));
}

enum shmc_status files_gone(struct shmc_handle *handle, uint32_t slot, uint64_t nonce)
{
    return perform(handle, REQUEST(FILES_GONE, .owner_slot = slot, .owner_nonce = nonce));
}

enum shmc_status set_paths(struct shmc_handle *handle, const char *paths, uint64_t bytes)
{
    char copy[SHMC_OWNER_PATH_BYTES + 8];
    memcpy(copy, paths, bytes);
    return perform(handle, REQUEST(SET_PATHS, .paths = copy, .paths_bytes = bytes));
}

enum shmc_status retire(struct shmc_handle *handle, uint64_t attach_seq)
{
    return perform(handle, REQUEST(RETIRE, .attach_seq = attach_seq));
}

enum shmc_status check(struct shmc_handle *handle, struct shmc_problem *problems, uint32_t max)
{
    return perform(handle, REQUEST(CHECK, .problems = problems, .problems_max = max));
}

/* ---- the arena ------------------------------------------------------------------------------- */

static struct shmc_request about_key(enum shmc_operation operation, uint64_t key)
{
    return (struct shmc_request){.operation = operation, .key = {key}};
}

enum shmc_status allocate(struct shmc_handle *handle, uint64_t bytes)
{
    enum shmc_status status = perform(handle, REQUEST(ALLOCATE, .bytes = bytes));
    while (status == SHMC_MORE)
        status = shmc_perform(handle, &last, WAIT_NS);
    return status;
}

enum shmc_status seal_block(struct shmc_handle *handle, struct shmc_lease lease)
{
    return perform(handle, REQUEST(SEAL, .lease = lease));
}

enum shmc_status publish_block(struct shmc_handle *handle, struct shmc_lease lease, uint64_t key)
{
    struct shmc_request request = about_key(SHMC_OP_PUBLISH, key);
    request.lease = lease;
    return perform(handle, request);
}

enum shmc_status discard(struct shmc_handle *handle, struct shmc_lease lease)
{
    return perform(handle, REQUEST(DISCARD, .lease = lease));
}

enum shmc_status invalidate(struct shmc_handle *handle, uint64_t key)
{
    return perform(handle, about_key(SHMC_OP_INVALIDATE, key));
}

enum shmc_status protect(struct shmc_handle *handle, uint64_t key, bool protect)
{
    struct shmc_request request = about_key(SHMC_OP_PROTECT, key);
    request.protect = protect;
    return perform(handle, request);
}

enum shmc_status evict(struct shmc_handle *handle, uint64_t bytes)
{
    enum shmc_status status = perform(handle, REQUEST(EVICT, .bytes = bytes));
    for (uint64_t freed = last.released; status == SHMC_MORE; freed += last.released) {
        last.bytes = bytes - freed;
        status = shmc_perform(handle, &last, WAIT_NS);
    }
    return status;
}

bool lookup(struct shmc_handle *handle, uint64_t key, struct shmc_lease *lease)
{
    const uint64_t words[SHMC_KEY_WORDS] = {key};
    uint64_t found;
    MUST(shmc_match(handle, words, 1, lease, &found));
    return found == 1;
}

struct shmc_lease store(struct shmc_handle *handle, uint64_t key, uint64_t bytes)
{
    MUST(allocate(handle, bytes));
    memset(shmc_write_address(handle, &last.lease), (int)key, bytes);
    MUST(publish_block(handle, last.lease, key));
    EXPECT(last.created);
    return last.lease;
}

struct usage aggregate(void)
{
    struct usage usage;
    memcpy(usage.axis, last.aggregate, sizeof usage.axis);
    return usage;
}

uint32_t reclaim(struct shmc_handle *by, uint32_t slot, uint64_t nonce)
{
    uint32_t steps = 1;
    MUST(reclaim_begin(by, slot, nonce));
    enum shmc_status status = reclaim_step(by, slot, nonce, 0);
    for (; status == SHMC_MORE || status == SHMC_LIVE_FILES; steps++) {
        if (status == SHMC_LIVE_FILES)
            MUST(files_gone(by, slot, nonce));
        status = reclaim_step(by, slot, nonce, last.cursor);
    }
    MUST(status);
    return steps;
}

void detach(struct shmc_handle *handle)
{
    reclaim(handle, shmc_slot(handle), shmc_nonce(handle));
}

/* ---- what must hold -------------------------------------------------------------------------- */

void expect_clean(const char *file, int line, struct shmc_handle *handle)
{
    struct shmc_problem problems[8];
    MUST(check(handle, problems, 8));
    for (uint32_t i = 0; i < last.problems_count && i < 8; i++)
        fprintf(stderr, "%s, at %lld: expected %llu, found %llu\n",
                shmc_problem_text(problems[i].kind), (long long)problems[i].index,
                (unsigned long long)problems[i].expected, (unsigned long long)problems[i].actual);
    if (last.problems_count != 0)
        fail(file, line, "%u problems", last.problems_count);
}

void expect_usage(const char *file, int line, const char *what, struct usage expected,
                  struct usage actual)
{
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        if (expected.axis[axis] != actual.axis[axis])
            fail(file, line, "%s on axis %u is %llu, not %llu", what, axis,
                 (unsigned long long)actual.axis[axis], (unsigned long long)expected.axis[axis]);
}

void expect_level(const char *file, int line, struct shmc_handle *handle, struct usage current,
                  struct usage peak)
{
    struct usage found;
    MUST(report(handle));
    memcpy(found.axis, last.report.current, sizeof found.axis);
    expect_usage(file, line, "current", current, found);
    memcpy(found.axis, last.report.peak, sizeof found.axis);
    expect_usage(file, line, "peak", peak, found);
}

static uint8_t *journaled(const struct shmc_handle *handle, uint64_t *bytes)
{
    *bytes = handle->header.region_offset[SHMC_REGION_PINS] -
             handle->header.region_offset[SHMC_REGION_CONTROL];
    return handle->base + handle->header.region_offset[SHMC_REGION_CONTROL];
}

struct image image_of(const struct shmc_handle *handle)
{
    struct image image;
    const uint8_t *from = journaled(handle, &image.bytes);
    image.data = malloc(image.bytes);
    EXPECT(image.data != NULL);
    memcpy(image.data, from, image.bytes);
    return image;
}

bool same_image(const struct shmc_handle *handle, const struct image *image)
{
    uint64_t bytes;
    const uint8_t *now = journaled(handle, &bytes);
    return bytes == image->bytes && memcmp(now, image->data, bytes) == 0;
}

void restore_image(struct shmc_handle *handle, const struct image *image)
{
    uint64_t bytes;
    memcpy(journaled(handle, &bytes), image->data, image->bytes);
}

/* The gate's words in use and everything journaled lie between what must not change. */
static void copy_outside(const struct shmc_handle *handle, uint8_t *to)
{
    uint64_t gate = handle->header.region_offset[SHMC_REGION_GATE];
    uint64_t redo = handle->header.region_offset[SHMC_REGION_REDO];
    uint64_t pins = handle->header.region_offset[SHMC_REGION_PINS];
    memcpy(to, handle->base, gate);
    memcpy(to + gate, handle->base + gate + sizeof(struct shmc_gate),
           redo - gate - sizeof(struct shmc_gate));
    to += redo - sizeof(struct shmc_gate);
    memcpy(to, handle->base + pins, handle->mapped_bytes - pins);
    struct shmc_telemetry_row *rows =
        (void *)(to + handle->header.region_offset[SHMC_REGION_TELEMETRY] - pins);
    for (uint32_t slot = 0; slot < handle->header.geometry.owners_max; slot++)
        memset(rows[slot].gauges, 0, sizeof rows[slot].gauges); /* cleaners do */
}

static uint64_t outside_bytes(const struct shmc_handle *handle)
{
    return handle->header.region_offset[SHMC_REGION_REDO] - sizeof(struct shmc_gate) +
           handle->mapped_bytes - handle->header.region_offset[SHMC_REGION_PINS];
}

struct outside outside_of(struct shmc_handle *handle)
{
    struct outside outside = {.bytes = outside_bytes(handle)};
    uint64_t pins = handle->header.region_offset[SHMC_REGION_PINS];
    memset(handle->gate + 1, 0xa5,
           handle->header.region_bytes[SHMC_REGION_GATE] - sizeof(struct shmc_gate));
    memset(handle->base + pins, 0xa5, handle->mapped_bytes - pins);
    outside.data = malloc(outside.bytes);
    EXPECT(outside.data != NULL);
    copy_outside(handle, outside.data);
    return outside;
}

bool same_outside(const struct shmc_handle *handle, const struct outside *outside)
{
    uint8_t *now = malloc(outside->bytes);
    EXPECT(now != NULL && outside->bytes == outside_bytes(handle));
    copy_outside(handle, now);
    bool same = memcmp(now, outside->data, outside->bytes) == 0;
    free(now);
    return same;
}

/* ---- processes and waiting ------------------------------------------------------------------- */

void in_child(void (*run)(void *), void *argument)
{
    int status;
    pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        die_with_parent();
        run(argument);
        _exit(0);
    }
    EXPECT(waitpid(pid, &status, 0) == pid);
    EXPECT_EQ(0, status);
}

pid_t child_that_stays(void (*run)(void *), void *argument)
{
    int done[2];
    char byte = 0;
    EXPECT(pipe(done) == 0);
    pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        die_with_parent();
        run(argument);
        EXPECT(write(done[1], &byte, 1) == 1);
        for (;;)
            pause();
    }
    close(done[1]);
    if (read(done[0], &byte, 1) != 1)
        FAIL("the child died before it was ready");
    close(done[0]);
    return pid;
}

void hold_the_lock(void *fd)
{
    EXPECT(pthread_mutex_lock(&observe(*(int *)fd)->gate->mutex) == 0);
}

void die_with_parent(void)
{
    EXPECT(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
}

void kill_child(pid_t pid)
{
    EXPECT(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
}

void wait_for(bool (*condition)(void *), void *argument)
{
    const struct timespec millisecond = {.tv_nsec = 1000000};
    while (!condition(argument))
        nanosleep(&millisecond, NULL);
}

bool thread_sleeps(void *thread)
{
    char text[256] = "";
    pid_t number = __atomic_load_n((pid_t *)thread, __ATOMIC_ACQUIRE);
    if (number == 0)
        return false;
    snprintf(text, sizeof text, "/proc/self/task/%d/stat", number);
    FILE *stat = fopen(text, "r");
    if (stat == NULL)
        return false;
    bool read = fgets(text, sizeof text, stat) != NULL;
    fclose(stat);
    const char *name_end = strrchr(text, ')');
    return read && name_end != NULL && name_end[2] == 'S';
}
