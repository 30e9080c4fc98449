/* probe.c: a process that stands where no Python program can: inside the lock, or half-way through
 * cleaning up after an owner.
 *
 *   probe hold PATH              joins, takes the lock, says "held"; then obeys letters: r reserves
 *                                a device byte (the lock stays taken), u unlocks, l locks
 *                                again; answers each by the letter and the status
 *   probe judge PATH             says "SLOT PID VERDICT" of every owner, then "end"
 *   probe clock                  says how many ns lie between two looks at the wall clock
 *   probe clean PATH SLOT NONCE  begins the cleaning, does one chunk, says "half STATUS RELEASED";
 *                                after a letter does the rest and says "done STATUS RELEASED"
 *
 * It is linked with the engine, whole or with a safeguard compiled out. The end of its input ends
 * it without any farewell: whatever it holds, it dies holding. With PROBE_CLOCK_JUMPS (and the
 * linker's --wrap) its wall clock goes an hour ahead and an hour back at every look.
 */
#include "internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LOCK_WAIT_NS 60000000000ull

#ifdef PROBE_CLOCK_JUMPS
int __real_clock_gettime(clockid_t clock, struct timespec *now);

static time_t jump_s(void)
{
    static bool ahead;
    ahead = !ahead;
    return ahead ? 3600 : -3600;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = __real_clock_gettime(clock, now);
    if (clock == CLOCK_REALTIME)
        now->tv_sec += jump_s();
    return result;
}

time_t __wrap_time(time_t *now)
{
    struct timespec real;
    __wrap_clock_gettime(CLOCK_REALTIME, &real);
    if (now != NULL)
        *now = real.tv_sec;
    return real.tv_sec;
}

int __wrap_gettimeofday(struct timeval *now, void *zone)
{
    (void)zone;
    *now = (struct timeval){.tv_sec = __wrap_time(NULL)};
    return 0;
}
#endif

static void give_up(const char *what, const char *why)
{
    fprintf(stderr, "probe: %s: %s\n", what, why);
    exit(2);
}

static struct shmc_handle *open_pool(const char *path, bool as_owner)
{
    struct shmc_handle *handle;
    struct shmc_refusal refusal;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        give_up(path, "cannot be opened");
    enum shmc_status status = shmc_open(fd, as_owner, &handle, &refusal);
    if (status != SHMC_OK)
        give_up(path, shmc_status_name(status));
    struct shmc_request join = {.operation = SHMC_OP_JOIN};
    if (as_owner && (status = shmc_perform(handle, &join, LOCK_WAIT_NS)) != SHMC_OK)
        give_up("join", shmc_status_name(status));
    return handle;
}

/* The next letter of the input; the end of the input is the end of the process. */
static int next_letter(void)
{
    char letter = '\n';
    while (letter == '\n')
        if (read(STDIN_FILENO, &letter, 1) != 1)
            _exit(0);
    return letter;
}

static enum shmc_status obey(struct shmc_handle *handle, int letter)
{
    struct shmc_request request = {.operation = SHMC_OP_RESERVE, .usage = {1}};
    switch (letter) {
    case 'l':
        return shmc_lock(handle, LOCK_WAIT_NS);
    case 'u':
        shmc_unlock(handle);
        return SHMC_OK;
    case 'r':
        return shmc_accounts_reserve(handle, &request);
    default:
        give_up("hold", "no such letter");
        return SHMC_SYSTEM;
    }
}

static void hold(const char *path)
{
    struct shmc_handle *handle = open_pool(path, true);
    if (shmc_lock(handle, LOCK_WAIT_NS) != SHMC_OK)
        give_up(path, "cannot be locked");
    puts("held");
    for (;;) {
        int letter = next_letter();
        printf("%c %s\n", letter, shmc_status_name(obey(handle, letter)));
    }
}

static void judge(const char *path)
{
    static const char *const verdicts[] = {
        [SHMC_ALIVE] = "alive", [SHMC_DEAD] = "dead", [SHMC_UNKNOWN] = "unknown"};
    struct shmc_handle *handle = open_pool(path, false);
    for (uint32_t slot = 0; slot < shmc_header(handle)->geometry.owners_max; slot++) {
        struct shmc_owner_view view;
        if (shmc_owner_view(handle, slot, &view))
            printf("%u %" PRIu64 " %s\n", slot, view.pid,
                   verdicts[shmc_owner_verdict(handle, &view)]);
    }
    puts("end");
}

static void look_at_the_clock(void)
{
    uint64_t first = shmc_os_realtime_ns();
    uint64_t second = shmc_os_realtime_ns();
    printf("%" PRIu64 "\n", first > second ? first - second : second - first);
}

static void clean(const char *path, uint32_t slot, uint64_t nonce)
{
    struct shmc_handle *handle = open_pool(path, false);
    struct shmc_request request = {
        .operation = SHMC_OP_RECLAIM_BEGIN, .owner_slot = slot, .owner_nonce = nonce};
    enum shmc_status status = shmc_perform(handle, &request, LOCK_WAIT_NS);
    uint64_t released = 0;
    request.operation = SHMC_OP_RECLAIM_STEP;
    if (status == SHMC_OK) {
        status = shmc_perform(handle, &request, LOCK_WAIT_NS);
        released = request.released;
    }
    printf("half %s %" PRIu64 "\n", shmc_status_name(status), released);
    next_letter();
    for (released = 0; status == SHMC_MORE; released += request.released)
        status = shmc_perform(handle, &request, LOCK_WAIT_NS);
    printf("done %s %" PRIu64 "\n", shmc_status_name(status), released);
}

int main(int count, char **words)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count == 3 && strcmp(words[1], "hold") == 0)
        hold(words[2]);
    else if (count == 3 && strcmp(words[1], "judge") == 0)
        judge(words[2]);
    else if (count == 2 && strcmp(words[1], "clock") == 0)
        look_at_the_clock();
    else if (count == 5 && strcmp(words[1], "clean") == 0)
        clean(words[2], (uint32_t)strtoul(words[3], NULL, 10), strtoull(words[4], NULL, 10));
    else
        give_up("usage", "hold PATH | judge PATH | clock | clean PATH SLOT NONCE");
    return 0;
}
