/* crash.h: kill the engine between any two instructions and look at what is left.
 *
 * Why         The engine promises that a request happens wholly or not at all, whatever instruction
 *             its process dies at. That is a claim about every instruction, so every instruction is
 *             tried: a child runs one job under ptrace, one step at a time.
 * Contract    tracee.c runs jobs of the engine in children: stepped, free, stopped, killed.
 *             world.c furnishes a small segment and says what must hold after a death in it.
 *             recording.c steps through a job once and keeps what each death would leave. sweep.c
 *             kills at every instruction, arena.c in the arena; orders.c forces the rare orders of
 *             several processes; main.c is the command line.
 * Death       Of the harness: its children die with it (PTRACE_O_EXITKILL, PR_SET_PDEATHSIG), and
 *             the segments are memfds without a name.
 * Errors      violation() reports and counts; the run goes on until VIOLATIONS_MAX. A harness that
 *             cannot do its work exits with EXIT_BROKEN: that is no finding about the engine.
 */
#ifndef CRASH_H
#define CRASH_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "internal.h"

enum {
    EXIT_CLEAN = 0,
    EXIT_VIOLATED = 1,
    EXIT_BROKEN = 3,
    EXIT_REFUSED = 4,       /* the engine would not make a segment */
    EXIT_CANNOT_TRACE = 77, /* ptrace is not permitted here */
};

#define VIOLATIONS_MAX 5u
#define SLICE_NS       (50ull * 1000 * 1000)
#define WATCHDOG_NS    (2000ull * 1000 * 1000) /* ten times the 200 ms of promise G5 */

void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
void broken(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
uint32_t violations(void);
void *must_allocate(void *memory, size_t bytes); /* realloc, or the end of the harness */

/* ---- tracee.c: a child that runs one job ------------------------------------------------- */

/* Who a handle speaks for. Any handle may act as any owner: the slot and the nonce are all of it.
 */
struct actor {
    uint32_t slot; /* SHMC_NO_SLOT: not joined */
    uint64_t nonce;
};

void act_as(struct shmc_handle *handle, struct actor actor);

/* RECLAIM_BEGIN goes on until the slot is free, as if the files had been deleted; everything else
 * is one request. */
struct job {
    int segment_fd;
    struct actor actor;
    struct shmc_request request;
    uint64_t slice_ns;   /* 0: one try; otherwise BUSY is followed by another slice */
    uint32_t head_start; /* requests done before the job counts as running */
    bool reopens;        /* afterwards closes, opens, and does it again */
    bool with_blocks;    /* the child maps the arena and knows its actor's leases */
    enum {
        JOB_REQUEST,
        JOB_MATCH,   /* leases request.key, without the lock */
        JOB_RELEASE, /* gives request.lease back, without the lock */
    } kind;
};

enum stage {
    STAGE_PREPARING,
    STAGE_RUNNING,
    STAGE_DONE,
};

/* A page that the child writes and the harness reads. */
struct board {
    uint32_t stage;
    uint32_t status;  /* of the last request */
    uint32_t busy;    /* slices that ended without the lock */
    uint32_t signals; /* SIGTERMs handled; ends a wait */
    uint64_t mutex;   /* address of the lock in the child */
};

struct tracee {
    pid_t pid; /* 0: gone */
    volatile struct board *board;
    uint64_t robust_head; /* address of its list of held robust locks */
};

/* Stepped children stop when their job is prepared; free ones run. */
void tracee_start_stepped(struct tracee *tracee, const struct job *job);
void tracee_start_free(struct tracee *tracee, const struct job *job);
/* One instruction; false when the child ended instead, which is a violation unless it was done. */
bool tracee_step(struct tracee *tracee);
/* Steps from the first instruction of the job; false when it ended before that many. */
bool tracee_step_to(struct tracee *tracee, uint64_t instructions);
/* Lets a stepped child run freely. */
void tracee_run(struct tracee *tracee);
/* Runs to the entry of, or from there to the exit from, the next such system call. */
bool tracee_run_to_call(struct tracee *tracee, long number);
void tracee_begin_call_exit(struct tracee *tracee);
bool tracee_stopped(struct tracee *tracee);
/* Whether it sleeps in the kernel. */
bool tracee_sleeps(const struct tracee *tracee);
void tracee_signal(const struct tracee *tracee, int signal);
/* SIGKILL, then reap. */
void tracee_kill(struct tracee *tracee);

/* What the kernel would find at the child's death. */
struct robust_view {
    bool listed;      /* the segment's lock is on its list */
    uint64_t pending; /* address of the word it is about to lock or unlock, or 0 */
};
struct robust_view tracee_robust_view(const struct tracee *tracee);
bool tracee_reads(const struct tracee *tracee, uint64_t address, void *bytes, size_t count);
/* Whether the next instruction enters the kernel; false where that cannot be told. */
bool tracee_at_system_call(const struct tracee *tracee);

uint64_t now_ns(void);
/* One short pause of a polling loop; false when the deadline has passed. */
bool poll_until(uint64_t deadline_ns);

/* ---- world.c: a furnished segment, and what must hold in it ------------------------------ */

enum {
    NEIGHBOUR, /* alive */
    VICTIM,    /* does the job */
    FRIEND,    /* alive */
    DEAD,      /* died some time ago, holding things */
    NEWCOMER,  /* not joined */
    ACTORS
};

enum furniture {
    FREE_LIST, /* released entries wait on the free lists */
    MARK_PATH, /* free lists are empty: the next entry is one never used */
    FURNITURES
};

#define RESERVATIONS_MAX 16u
#define MANAGERS_MAX     8u
#define OWNERS_MAX       8u

#define ID_FRIEND        100u /* these four share a bucket, in this order of registration */
#define ID_VICTIM        105u
#define ID_NEIGHBOUR     116u
#define ID_DEAD          121u
#define ID_UNUSED        132u /* falls into the same bucket */
#define ID_VICTIM_SECOND 101u
#define ID_DEAD_SECOND   1u /* stands where the search for an unused id starts */
#define ID_SPARE         102u

struct segment {
    int fd;
    struct shmc_handle *handle;
};

struct world {
    struct segment stepped;  /* where jobs run */
    struct segment observed; /* where copies are recovered and judged */
    size_t image_bytes;      /* everything up to the pins */
    uint8_t *image[FURNITURES];
    struct actor actors[ACTORS];
    struct shmc_token victim_manager;
    struct shmc_token victim_reservation;
    struct shmc_token stale_reservation; /* released by the victim before */
};

void world_make(struct world *world);
void segment_make(struct segment *segment, uint32_t reservations_max);
void segment_load(const struct segment *segment, const uint8_t *image, size_t bytes);
enum shmc_status perform_as(const struct segment *segment, struct actor actor,
                            struct shmc_request *request);
/* After an operation of a reclaim that gave this status, the next one; false: the same, or none. */
bool next_of_reclaim(enum shmc_operation operation, enum shmc_status status,
                     enum shmc_operation *next);
/* All of BEGIN, STEP and FILES_GONE, as a sweep of a process that is no owner. */
enum shmc_status reclaim(const struct segment *segment, struct actor dead);
/* Joins, or ends the harness. */
struct actor must_join(const struct segment *segment, uint64_t nonce);

/* What the kernel does to the lock in an image when the thread that may hold it dies. */
void kernel_releases(const struct world *world, uint8_t *image, pid_t holder);
bool lock_is_held_by(const struct segment *segment, pid_t pid);
void *image_region(const struct world *world, const uint8_t *image, enum shmc_region region);
uint64_t pending_commit(const struct world *world, const uint8_t *image);

/* Blanks what means nothing: the lock, the record, waiters, and payload of what is FREE. */
void make_logical(const struct world *world, uint8_t *image);

/* What a death in `before` may leave: one of these logical states. */
struct expectation {
    const char *name;
    const uint8_t *before;
    const uint8_t *states; /* logical */
    size_t states_count;
};

/* Recovers a copy of the snapshot through each kind of first call, compares it, reclaims the dead
 * and uses every entry. `recovered`: receives the logical state after recovery, or NULL. */
void judge(struct world *world, const struct expectation *expectation, const uint8_t *snapshot,
           uint8_t *recovered);
/* CHECK on a segment; counts and reports its problems as violations. */
void expect_clean(const struct segment *segment, const char *name);

/* ---- recording.c: every death of one job ------------------------------------------------- */

/* Each different state of the segment during a job, with the lock as the kernel would leave it. */
struct recording {
    uint8_t *snapshots;
    size_t count;
    size_t capacity;
    uint64_t instructions;
    enum shmc_status status; /* what the job returned */
};

/* Does the job on this image, in world->stepped. Snapshots are for the caller to free. */
struct recording record(struct world *world, const struct job *job, const uint8_t *image,
                        const char *name);
uint8_t *snapshot_at(const struct world *world, const struct recording *recording, size_t index);

/* The logical states from the first on, each after a record committed: the only ones that a death
 * may leave. */
struct states {
    uint8_t *images; /* for the caller to free */
    size_t count;
};
struct states committed_states(const struct world *world, const uint8_t *first,
                               const struct recording *recording);

/* ---- sweep.c, arena.c and orders.c: the experiments -------------------------------------- */

struct options {
    uint64_t every;    /* of nested sweeps: each n-th snapshot */
    uint64_t kills;    /* of real kills: at most this many points of an operation, spread evenly */
    const char *only;  /* name of one case, or NULL */
    bool all_cleaners; /* kill the cleaner of every case, not of the chosen ones */
    bool waiter;       /* of real kills: another process waits for the lock */
};

void sweep(const struct options *options);
void kill_for_real(const struct options *options);
void sweep_blocks(const struct options *options);
void fence(const struct options *options);
void stopped_holder(const struct options *options);
void stranded_sleeper(const struct options *options);
void pending_word(const struct options *options);
void damage(const struct options *options);

#endif
