/* redo.pml: one lock, one redo record, and a SIGKILL at any step of a change or of a recovery.
 *
 * A change makes two words one step: a worker's own count and the total. Whoever takes the lock and
 * has looked for a record must find them equal. `DIE` before a step: the process is killed there,
 * the kernel frees the lock and marks it, and another process takes its place.
 *
 * Negative controls: NO_REDO, COMMIT_FIRST, PLAIN_LOCK, EARLY_CLEAR. It is no control to look for a
 * record only after a death: the kernel marks the lock again when who recovers dies, too.
 *
 * A comment `C file function: text` names the line of the engine that a step stands for.
 */
#define WORKERS 2
#define CHANGES 2
#define DEATHS  3

byte holder = 0; /* 0: free; else worker plus one */
bool owner_died = false;

byte total = 0;
byte count[WORKERS];
byte done[WORKERS];

byte record_total = 0; /* the record's two words, and whose count the second is */
byte record_count = 0;
byte record_of = 0;
bool commit = false;

byte deaths = 0;

#ifdef PLAIN_LOCK
#define FREE_LOCK skip
#else
#define FREE_LOCK holder = 0; owner_died = true
#endif

/* In the place of every step a process may be killed instead. */
#define STEP(action)                                                                               \
    if                                                                                             \
    :: action                                                                                      \
    :: atomic { deaths < DEATHS -> deaths++; if :: holder == me + 1 -> FREE_LOCK :: else fi;       \
                goto born }                                                                        \
    fi

inline store_again() {
    /* C redo.c apply: shmc_store_release((uint64_t *)(handle->base + word->offset), word->value); */
    STEP(total = record_total);
    STEP(count[record_of] = record_count);
}

inline look() {
    /* C lock.c shmc_lock: if (shmc_load_relaxed(&handle->redo->commit) != 0 && shmc_redo_recover(handle) != SHMC_OK) */
    if
    :: commit ->
#ifdef EARLY_CLEAR
        STEP(commit = false);
#endif
        /* C redo.c shmc_redo_recover: apply(handle, count); */
        store_again();
        /* C redo.c shmc_redo_recover: shmc_store_release(&redo->commit, 0); */
        STEP(commit = false)
    :: else
    fi
}

proctype Worker(byte me) {
    byte n = 0;
born:
    do
    :: n < CHANGES ->
        /* C lock.c acquire: int error = pthread_mutex_trylock(mutex); */
        atomic { holder == 0 -> holder = me + 1 }
        look();
        /* C lock.c shmc_lock: pthread_mutex_consistent(mutex); */
        STEP(owner_died = false);
        assert(total == count[0] + count[1]);
        assert(count[me] >= done[me]);
#ifdef NO_REDO
        STEP(total = total + 1);
        STEP(count[me] = count[me] + 1);
#else
#ifdef COMMIT_FIRST
        STEP(commit = true);
#endif
        /* C redo.c shmc_redo_put: slot->value = value; */
        STEP(record_total = total + 1);
        STEP(d_step { record_of = me; record_count = count[me] + 1 });
        /* C redo.c shmc_redo_commit: shmc_store_release(&redo->commit, word); */
        STEP(commit = true);
        /* C redo.c shmc_redo_commit: apply(handle, handle->redo_count); */
        store_again();
        /* C redo.c shmc_redo_commit: shmc_store_release(&redo->commit, 0); */
        STEP(commit = false);
#endif
        /* C lock.c shmc_unlock: pthread_mutex_unlock(&handle->gate->mutex); */
        atomic { holder = 0; done[me]++; n++ }
    :: else -> break
    od
}

init {
    atomic { run Worker(0); run Worker(1) }
    _nr_pr == 1;
    /* Whoever comes next finds it whole, or makes it so. */
    if
    :: commit -> total = record_total; count[record_of] = record_count
    :: else
    fi;
    assert(total == count[0] + count[1]);
    assert(count[0] >= done[0] && count[1] >= done[1]);
    assert(total <= 2 * CHANGES + deaths)
}
