/* engine.c: the engine's own speed, and the physical limit beside it, without Python.
 *
 * Prints one JSON object of nanoseconds: a pair of lock and unlock of one robust process-shared
 * mutex, reserve and release, an update, a report, a lock that finds and replays a redo record, and
 * a memcpy of 256 KiB. It includes redo.c to be able to leave a record behind.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "redo.c"

#define ROUNDS      9
#define CALLS       200000
#define COPY_BYTES  (256u << 10)
#define LIMIT_BYTES (1ull << 40)

static struct shmc_handle *handle;
static struct shmc_request request;
static pthread_mutex_t *mutex;
static char *source, *target;

static void lock_pair(void)
{
    pthread_mutex_lock(mutex);
    pthread_mutex_unlock(mutex);
}

static void perform(enum shmc_operation operation)
{
    request.operation = operation;
    if (shmc_perform(handle, &request, 0) != SHMC_OK)
        exit(1);
}

static void reserve_release(void)
{
    perform(SHMC_OP_RESERVE);
    perform(SHMC_OP_RELEASE_RESERVATION);
}

static void update(void)
{
    request.usage[SHMC_HOST] ^= 1;
    perform(SHMC_OP_UPDATE);
}

static void report(void)
{
    perform(SHMC_OP_REPORT);
}

/* A reserve whose holder died after the commit word: the words are still in the record. */
static void recover(void)
{
    perform(SHMC_OP_RESERVE);
    handle->redo->commit = commit_word(handle->redo, handle->redo_count);
    perform(SHMC_OP_RELEASE_RESERVATION);
}

static void copy(void)
{
    memcpy(target, source, COPY_BYTES);
}

static int by_value(const void *left, const void *right)
{
    double difference = *(const double *)left - *(const double *)right;
    return difference < 0 ? -1 : difference > 0;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void measure(const char *name, void (*call)(void), int calls, const char *end)
{
    double results[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        double started = seconds();
        for (int i = 0; i < calls; i++)
            call();
        results[round] = (seconds() - started) * 1e9 / calls;
    }
    qsort(results, ROUNDS, sizeof *results, by_value);
    printf("\"%s\": %.2f%s", name, results[ROUNDS / 2], end);
}

static void open_segment(void)
{
    struct shmc_geometry geometry = {
        .limits = {LIMIT_BYTES, LIMIT_BYTES, LIMIT_BYTES, LIMIT_BYTES},
        .owners_max = 64,
        .managers_max = 1024,
        .reservations_max = 8192,
        .mode = 0600,
    };
    struct shmc_refusal refusal;
    int fd = memfd_create("shmcache-bench", MFD_CLOEXEC);
    if (fd < 0 || fchmod(fd, 0600) != 0 ||
        ftruncate(fd, (off_t)shmc_segment_bytes(&geometry)) != 0 ||
        shmc_format(fd, &geometry, &refusal) != SHMC_OK ||
        shmc_open(fd, true, &handle, &refusal) != SHMC_OK)
        exit(1);
    mutex = &handle->gate->mutex;
    perform(SHMC_OP_JOIN);
    request.id = 7;
    perform(SHMC_OP_REGISTER);
}

int main(void)
{
    open_segment();
    request.usage[SHMC_HOST] = 64;
    source = calloc(2, COPY_BYTES);
    target = source + COPY_BYTES;
    printf("{");
    measure("lock_pair_ns", lock_pair, CALLS, ", ");
    measure("reserve_release_ns", reserve_release, CALLS, ", ");
    measure("update_ns", update, CALLS, ", ");
    measure("report_ns", report, CALLS, ", ");
    measure("reserve_recover_release_ns", recover, CALLS, ", ");
    measure("memcpy_256k_ns", copy, 2000, "}\n");
    return 0;
}
