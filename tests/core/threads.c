/* threads.c: many threads on one handle, and on handles of their own; meant for -fsanitize=thread.
 *
 * The sanitizer knows addresses, so it sees races only between threads that share a mapping: those
 * on one handle. Handles of their own are other mappings, as in other processes; there the result
 * is what counts.
 */
#include "harness.h"

#include <time.h>

#ifdef __SANITIZE_THREAD__
/* The sanitizer of this compiler does not know the call and would see no lock taken; it does know
 * the older one, which reads another clock. */
int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until)
{
    struct timespec now;
    struct timespec real;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &real);
    int64_t wait_ns = (until->tv_sec - now.tv_sec) * 1000000000ll + until->tv_nsec - now.tv_nsec;
    int64_t until_ns = real.tv_sec * 1000000000ll + real.tv_nsec + wait_ns;
    real.tv_sec = until_ns / 1000000000ll;
    real.tv_nsec = until_ns % 1000000000ll;
    return pthread_mutex_timedlock(mutex, &real);
}
#endif

#define THREADS  4
#define REQUESTS 15000
#define LATE_NS  1000000ull

struct worker {
    struct shmc_handle *pool; /* NULL: opens its own, again and again */
    int fd;
    uint64_t number;
};

struct holding {
    struct shmc_token tokens[8];
    uint32_t count;
};

static void expect_one_of(enum shmc_status status, enum shmc_status one, enum shmc_status two)
{
    if (status != SHMC_OK && status != one && status != two)
        FAIL("%s", shmc_status_name(status));
}

static void hold(struct shmc_handle *pool, struct holding *mine)
{
    enum shmc_status status = reserve(pool, U(1 + random_below(40), random_below(3), 1, 0));
    expect_one_of(status, SHMC_BUDGET_EXCEEDED, SHMC_RESERVATIONS_FULL);
    if (status == SHMC_OK)
        mine->tokens[mine->count++] = last.token;
}

static void let_go(struct shmc_handle *pool, struct holding *mine, uint64_t id)
{
    struct shmc_token token = mine->tokens[--mine->count];
    if (random_below(2) == 0)
        MUST(release(pool, token));
    else
        MUST(publish_and_release(pool, id, U(random_below(9)), token));
}

/* Everything that reads shared words without the lock. */
static void look_around(struct shmc_handle *pool)
{
    struct shmc_owner_view view;
    for (uint32_t slot = 0; slot < shmc_header(pool)->geometry.owners_max; slot++)
        if (shmc_owner_view(pool, slot, &view))
            EXPECT(view.nonce != 0 && view.pid == (uint64_t)getpid());
    EXPECT_EQ(SHMC_POOL_ACTIVE, shmc_pool_state(pool));
    EXPECT(shmc_attach_seq(pool) >= 1);
    EXPECT(shmc_lock_holder(pool) >= 0);
    EXPECT(shmc_is_mine(pool) && shmc_nonce_is_local(shmc_nonce(pool)));
}

/* As the binding waits: flag, counter, try, sleep. Bounded, for nobody may ever release. */
static void wait_for_room(struct shmc_handle *pool, struct holding *mine)
{
    shmc_waiter_set(pool, true);
    for (int tries = 0; tries < 3 && mine->count < 8; tries++) {
        uint32_t seen = shmc_release_counter(pool);
        enum shmc_status status = reserve(pool, U(90));
        expect_one_of(status, SHMC_BUDGET_EXCEEDED, SHMC_RESERVATIONS_FULL);
        if (status == SHMC_OK) {
            mine->tokens[mine->count++] = last.token;
            break;
        }
        shmc_wait_release(pool, seen, LATE_NS);
    }
    shmc_waiter_set(pool, false);
}

/* An owner that comes and is cleaned up after through the shared mapping, under the eyes of those
 * who look around. */
static void be_visited(struct shmc_handle *pool)
{
    struct shmc_handle *visitor = attach(pool->segment_fd);
    expect_one_of(reserve(visitor, U(1)), SHMC_BUDGET_EXCEEDED, SHMC_RESERVATIONS_FULL);
    reclaim(pool, shmc_slot(visitor), shmc_nonce(visitor));
    shmc_close(visitor);
}

static void look_or_wait(struct shmc_handle *pool, struct holding *mine)
{
    struct shmc_held rows[2 * THREADS];
    switch (random_below(8)) {
    case 0:
        EXPECT_CLEAN(pool);
        break;
    case 1:
        MUST(held(pool, rows));
        break;
    case 2:
        wait_for_room(pool, mine);
        break;
    case 3:
        MUST(report(pool));
        break;
    case 4:
        be_visited(pool);
        break;
    default:
        look_around(pool);
    }
}

static void use(struct shmc_handle *pool, uint64_t requests)
{
    struct holding mine = {.count = 0};
    MUST(add_any_manager(pool));
    struct shmc_token membership = last.token;
    uint64_t id = last.id;
    for (uint64_t i = 0; i < requests; i++) {
        uint64_t choice = random_below(10);
        if (choice < 4 && mine.count < 8)
            hold(pool, &mine);
        else if (choice < 8 && mine.count > 0)
            let_go(pool, &mine, id);
        else if (choice == 8)
            MUST(publish(pool, id, U(random_below(20), random_below(3), 0, 0)));
        else
            look_or_wait(pool, &mine);
    }
    while (mine.count > 0)
        let_go(pool, &mine, id);
    MUST(release_manager(pool, membership));
}

static void *share_a_handle(void *argument)
{
    struct worker *worker = argument;
    random_start(worker->number + 1);
    MUST(join(worker->pool)); /* the first wins, the others find it done */
    use(worker->pool, rounds(REQUESTS));
    return NULL;
}

static void *open_handles(void *argument)
{
    struct worker *worker = argument;
    random_start(worker->number + 1);
    for (uint64_t round = 0; round < rounds(20); round++) {
        struct shmc_handle *pool = attach(worker->fd);
        use(pool, REQUESTS / 20);
        expect_one_of(reserve(pool, U(1)), SHMC_BUDGET_EXCEEDED, SHMC_RESERVATIONS_FULL);
        detach(pool);
        shmc_close(pool);
    }
    return NULL;
}

static void run_threads(struct worker *workers, void *(*run)(void *))
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        EXPECT(pthread_create(&threads[i], NULL, run, &workers[i]) == 0);
    for (int i = 0; i < THREADS; i++)
        EXPECT(pthread_join(threads[i], NULL) == 0);
}

static void expect_empty(struct shmc_handle *pool, uint64_t owners)
{
    MUST(report(pool));
    EXPECT_EQ(owners, last.report.owners);
    for (uint32_t axis = 0; axis < SHMC_AXES; axis++)
        EXPECT_EQ(0, last.report.current[axis]);
    EXPECT_EQ(0, last.report.managers);
    EXPECT_EQ(0, last.report.reservations);
    EXPECT_EQ(0, last.report.recoveries);
    for (int word = 0; word < (int)SHMC_WAITER_WORDS; word++)
        EXPECT_EQ(0, pool->gate->waiters[word]);
    EXPECT_CLEAN(pool);
}

/* Limits and tables are tight, so that refusals are as common as success. */
static int tight_segment(void)
{
    return new_segment(tables(U(150, 1000, 1000, 1), 2 * THREADS, THREADS, 12));
}

TEST(threads_share_a_handle)
{
    struct shmc_refusal refusal;
    struct shmc_handle *pool;
    struct worker workers[THREADS];
    MUST(shmc_open(tight_segment(), true, &pool, &refusal));
    for (uint64_t i = 0; i < THREADS; i++)
        workers[i] = (struct worker){.pool = pool, .number = i};
    run_threads(workers, share_a_handle);
    expect_empty(pool, 1);
}

TEST(threads_open_handles_of_their_own)
{
    struct worker workers[THREADS];
    int fd = tight_segment();
    for (uint64_t i = 0; i < THREADS; i++)
        workers[i] = (struct worker){.fd = fd, .number = i};
    run_threads(workers, open_handles);
    expect_empty(observe(fd), 0);
}
