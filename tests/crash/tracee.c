/* tracee.c: a child process that runs one job of the engine, an instruction at a time if asked.
 *
 * Contract    A stepped child prepares, stops, and from then on does one instruction per
 *             tracee_step(). Where a job begins and ends is told by a word on a shared page, so
 *             nothing here depends on addresses or on a processor.
 * Death       Children are killed when the harness ends, however it ends.
 * Source      ptrace(2), get_robust_list(2), process_vm_readv(2).
 */
#include "crash.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define POLL_NS 100000 /* between two looks at something that must happen */

void act_as(struct shmc_handle *handle, struct actor actor)
{
    handle->slot = actor.slot;
    handle->nonce = actor.nonce;
    if (handle->counts == NULL || actor.slot == SHMC_NO_SLOT)
        return;
    handle->row = shmc_pin_row(handle, actor.slot);
    for (uint64_t block = 0; block < handle->header.geometry.blocks_max; block++)
        handle->counts[block] = handle->row[block / 64] >> block % 64 & 1;
}

/* ---- in the child ------------------------------------------------------------------------ */

static volatile struct board *own_board;

static void count_signal(int signal)
{
    (void)signal;
    own_board->signals++;
}

static enum shmc_status perform_once(struct shmc_handle *handle, int kind,
                                     struct shmc_request *request, uint64_t slice_ns)
{
    uint64_t found;
    if (kind == JOB_MATCH)
        return shmc_match(handle, request->key, 1, &request->lease, &found);
    if (kind == JOB_REQUEST)
        return shmc_perform(handle, request, slice_ns);
    shmc_release(handle, &request->lease, 1);
    return SHMC_OK;
}

/* One request of the job; true when another one follows. */
static bool perform_next(struct shmc_handle *handle, int kind, struct shmc_request *request,
                         uint64_t slice_ns)
{
    enum shmc_operation operation = request->operation;
    enum shmc_status status = perform_once(handle, kind, request, slice_ns);
    own_board->status = status;
    if (status == SHMC_BUSY) {
        own_board->busy++;
        return slice_ns != 0 && own_board->signals == 0;
    }
    if (next_of_reclaim(operation, status, &request->operation)) {
        request->cursor = 0;
        return true;
    }
    return status == SHMC_MORE;
}

static struct shmc_handle *child_opens(const struct job *job)
{
    struct shmc_handle *handle;
    struct shmc_refusal refusal;
    bool as_owner = job->request.operation == SHMC_OP_JOIN || job->with_blocks;
    if (shmc_open(job->segment_fd, as_owner, &handle, &refusal) != SHMC_OK)
        _exit(EXIT_BROKEN);
    act_as(handle, job->actor);
    own_board->mutex = (uint64_t)(uintptr_t)&handle->gate->mutex;
    return handle;
}

static void child_main(const struct job *job, bool stepped)
{
    struct shmc_request request = job->request;
    struct shmc_handle *handle = child_opens(job);
    for (uint32_t i = 0; i < job->head_start; i++)
        perform_next(handle, job->kind, &request, 0);
    if (stepped)
        raise(SIGSTOP);
    own_board->stage = STAGE_RUNNING;
    while (perform_next(handle, job->kind, &request, job->slice_ns))
        ;
    if (job->reopens) {
        shmc_close(handle);
        handle = child_opens(job);
        perform_next(handle, job->kind, &request, job->slice_ns);
        shmc_close(handle);
    }
    own_board->stage = STAGE_DONE;
    raise(SIGSTOP); /* the harness has seen enough: it kills */
    _exit(EXIT_CLEAN);
}

/* ---- starting ---------------------------------------------------------------------------- */

static void start(struct tracee *tracee, const struct job *job, bool stepped)
{
    tracee->board =
        mmap(NULL, SHMC_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tracee->board == MAP_FAILED)
        broken("no page for a child: %s", strerror(errno));
    fflush(NULL);
    tracee->board->status = SHMC_STATUS_COUNT; /* none yet */
    own_board = tracee->board;
    tracee->pid = fork();
    if (tracee->pid < 0)
        broken("fork: %s", strerror(errno));
    if (tracee->pid != 0)
        return;
    struct sigaction action = {.sa_handler = count_signal};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigaction(SIGTERM, &action, NULL);
    if (stepped && ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        _exit(EXIT_CANNOT_TRACE);
    child_main(job, stepped);
}

void tracee_start_free(struct tracee *tracee, const struct job *job)
{
    start(tracee, job, false);
}

void tracee_start_stepped(struct tracee *tracee, const struct job *job)
{
    int status = 0;
    size_t bytes;
    start(tracee, job, true);
    if (waitpid(tracee->pid, &status, 0) != tracee->pid || !WIFSTOPPED(status)) {
        if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_CANNOT_TRACE)
            exit(EXIT_CANNOT_TRACE);
        broken("a child did not get ready (%x)", (unsigned)status);
    }
    ptrace(PTRACE_SETOPTIONS, tracee->pid, NULL, PTRACE_O_EXITKILL | PTRACE_O_TRACESYSGOOD);
    if (syscall(SYS_get_robust_list, tracee->pid, &tracee->robust_head, &bytes) != 0)
        broken("get_robust_list: %s", strerror(errno));
    while (tracee->board->stage != STAGE_RUNNING)
        if (!tracee_step(tracee))
            broken("a child ended before its job");
}

/* ---- moving ------------------------------------------------------------------------------ */

bool tracee_step(struct tracee *tracee)
{
    int status = 0;
    if (ptrace(PTRACE_SINGLESTEP, tracee->pid, NULL, NULL) != 0)
        broken("single step: %s", strerror(errno));
    if (waitpid(tracee->pid, &status, 0) != tracee->pid)
        broken("waitpid: %s", strerror(errno));
    if (WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP)
        return true;
    if (!WIFSTOPPED(status))
        tracee->pid = 0;
    violation("a job ended in an unexpected way: wait status %x", (unsigned)status);
    return false;
}

bool tracee_step_to(struct tracee *tracee, uint64_t instructions)
{
    for (uint64_t i = 0; i < instructions; i++)
        if (tracee->board->stage == STAGE_DONE || !tracee_step(tracee))
            return false;
    return true;
}

void tracee_run(struct tracee *tracee)
{
    ptrace(PTRACE_CONT, tracee->pid, NULL, NULL);
}

bool tracee_run_to_call(struct tracee *tracee, long number)
{
    struct __ptrace_syscall_info info = {0};
    int status = 0;
    while (tracee->board->stage != STAGE_DONE) {
        ptrace(PTRACE_SYSCALL, tracee->pid, NULL, NULL);
        if (waitpid(tracee->pid, &status, 0) != tracee->pid || !WIFSTOPPED(status))
            return false;
        if (WSTOPSIG(status) != (SIGTRAP | 0x80))
            continue;
        ptrace(PTRACE_GET_SYSCALL_INFO, tracee->pid, sizeof info, &info);
        if (info.op == PTRACE_SYSCALL_INFO_ENTRY && (long)info.entry.nr == number)
            return true;
    }
    return false;
}

void tracee_begin_call_exit(struct tracee *tracee)
{
    ptrace(PTRACE_SYSCALL, tracee->pid, NULL, NULL);
}

bool tracee_stopped(struct tracee *tracee)
{
    int status = 0;
    return waitpid(tracee->pid, &status, WNOHANG) == tracee->pid && WIFSTOPPED(status);
}

bool tracee_sleeps(const struct tracee *tracee)
{
    struct shmc_process_stat stat;
    return shmc_os_process_stat(tracee->pid, &stat) && stat.state == 'S';
}

void tracee_signal(const struct tracee *tracee, int signal)
{
    kill(tracee->pid, signal);
}

void tracee_kill(struct tracee *tracee)
{
    if (tracee->pid != 0) {
        kill(tracee->pid, SIGKILL);
        while (waitpid(tracee->pid, NULL, 0) == tracee->pid)
            ; /* a stop that was not looked at may come before the end */
    }
    tracee->pid = 0;
    if (tracee->board != NULL)
        munmap((void *)tracee->board, SHMC_PAGE_BYTES);
    tracee->board = NULL;
}

/* ---- looking ----------------------------------------------------------------------------- */

bool tracee_reads(const struct tracee *tracee, uint64_t address, void *bytes, size_t count)
{
    struct iovec here = {.iov_base = bytes, .iov_len = count};
    struct iovec there = {.iov_base = (void *)(uintptr_t)address, .iov_len = count};
    return process_vm_readv(tracee->pid, &here, 1, &there, 1, 0) == (ssize_t)count;
}

/* The kernel's struct robust_list_head: entries are addresses, with bit 0 marking another kind. */
struct robust_head {
    uint64_t first; /* the head itself when the list is empty */
    int64_t word_offset;
    uint64_t pending;
};

struct robust_view tracee_robust_view(const struct tracee *tracee)
{
    struct robust_head head;
    struct robust_view view = {0};
    if (!tracee_reads(tracee, tracee->robust_head, &head, sizeof head))
        broken("cannot read a child: %s", strerror(errno));
    uint64_t word = tracee->board->mutex + offsetof(pthread_mutex_t, __data.__lock);
    view.listed =
        head.first != tracee->robust_head && head.first + (uint64_t)head.word_offset == word;
    if (head.pending != 0)
        view.pending = (head.pending & ~1ull) + (uint64_t)head.word_offset;
    return view;
}

bool tracee_at_system_call(const struct tracee *tracee)
{
#if defined(__x86_64__)
    static const uint8_t system_call[] = {0x0f, 0x05};
    struct user_regs_struct registers;
    uint8_t code[sizeof system_call];
    return ptrace(PTRACE_GETREGS, tracee->pid, NULL, &registers) == 0 &&
           tracee_reads(tracee, registers.rip, code, sizeof code) &&
           memcmp(code, system_call, sizeof code) == 0;
#else
    (void)tracee;
    return false;
#endif
}

uint64_t now_ns(void)
{
    return shmc_os_monotonic_ns();
}

bool poll_until(uint64_t deadline_ns)
{
    struct timespec pause = {.tv_nsec = POLL_NS};
    nanosleep(&pause, NULL);
    return now_ns() < deadline_ns;
}
