/* recording.c: one job, stepped through once, as a row of pictures of what each death would leave.
 *
 * Why         A death between two instructions leaves the segment as it is between them, but for
 *             the lock, to which the kernel does something known. So one run gives all kill
 *             points.
 * Contract    Snapshots differ from their predecessors; instructions that change nothing are only
 *             counted. At each instruction the child is audited: it never holds a lock that the
 *             kernel would not find, never enters the kernel while it holds the lock, and when it
 *             is done the kernel has nothing left to find.
 */
#include "crash.h"

#include <stdlib.h>
#include <string.h>

uint8_t *snapshot_at(const struct world *world, const struct recording *recording, size_t index)
{
    return recording->snapshots + index * world->image_bytes;
}

/* Keeps the segment as it is now, unless it is as it was. */
static void keep(const struct world *world, struct recording *recording)
{
    const uint8_t *now = world->stepped.handle->base;
    if (recording->count != 0 &&
        memcmp(now, snapshot_at(world, recording, recording->count - 1), world->image_bytes) == 0)
        return;
    if (recording->count == recording->capacity) {
        recording->capacity = recording->capacity * 2 + 64;
        recording->snapshots =
            must_allocate(recording->snapshots, recording->capacity * world->image_bytes);
    }
    memcpy(snapshot_at(world, recording, recording->count++), now, world->image_bytes);
}

static void audit(const struct world *world, const struct tracee *tracee, const char *name)
{
    struct robust_view view = tracee_robust_view(tracee);
    bool held = lock_is_held_by(&world->stepped, tracee->pid);
    uint64_t word = tracee->board->mutex;
    if (held && !view.listed && view.pending != word)
        violation("%s: holds a lock that its death would not free", name);
    if (held && tracee_at_system_call(tracee))
        violation("%s: enters the kernel while it holds the lock", name);
    if (tracee->board->stage == STAGE_DONE && (held || view.listed || view.pending != 0))
        violation("%s: is done, and the kernel still knows of its lock", name);
}

struct recording record(struct world *world, const struct job *job, const uint8_t *image,
                        const char *name)
{
    struct recording recording = {0};
    struct tracee tracee;
    segment_load(&world->stepped, image, world->image_bytes);
    tracee_start_stepped(&tracee, job);
    keep(world, &recording);
    while (tracee.board->stage != STAGE_DONE && tracee_step(&tracee)) {
        recording.instructions++;
        keep(world, &recording);
        audit(world, &tracee, name);
    }
    recording.status = (enum shmc_status)tracee.board->status;
    pid_t pid = tracee.pid;
    tracee_kill(&tracee);
    for (size_t i = 0; i < recording.count; i++)
        kernel_releases(world, snapshot_at(world, &recording, i), pid);
    return recording;
}

static void add_state(const struct world *world, struct states *states, const uint8_t *snapshot)
{
    size_t bytes = world->image_bytes;
    states->images = must_allocate(states->images, (states->count + 1) * bytes);
    uint8_t *state = states->images + states->count * bytes;
    memcpy(state, snapshot, bytes);
    make_logical(world, state);
    if (states->count == 0 || memcmp(state, state - bytes, bytes) != 0)
        states->count++;
}

struct states committed_states(const struct world *world, const uint8_t *first,
                               const struct recording *recording)
{
    struct states states = {0};
    add_state(world, &states, first);
    for (size_t i = 1; i < recording->count; i++) {
        bool was_pending = pending_commit(world, snapshot_at(world, recording, i - 1)) != 0;
        if (was_pending && pending_commit(world, snapshot_at(world, recording, i)) == 0)
            add_state(world, &states, snapshot_at(world, recording, i));
    }
    add_state(world, &states, snapshot_at(world, recording, recording->count - 1));
    return states;
}
