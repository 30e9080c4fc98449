/* waiting.pml: who waits for capacity, who gives it back, and a wake-up that nobody may lose.
 *
 * A waiter tells that it waits, remembers the release counter, tries, and sleeps only while the
 * counter is what it remembered. Who gives back looks for waiters after the lock, counts, and wakes
 * all. It may be killed in between: then a slice of the wait ends by itself, which SLICES allows.
 * Nobody may sleep for ever while there is room: that would be an invalid end state.
 *
 * Negative controls: TOLD_LATE, SEEN_LATE, WAKE_FIRST; DEATHS without SLICES.
 *
 * A comment `C file function: text` names the line of the engine that a step stands for.
 */
#define WAITERS  2
#define CAPACITY 1

byte used = CAPACITY; /* all of it, by somebody who gives it back */
bool locked = false;
bool waits[WAITERS]; /* gate.waiters */
byte counter = 0;    /* gate.release_counter */
byte seen[WAITERS];
bool asleep[WAITERS];

inline lock() {
    atomic { !locked -> locked = true }
}

inline wake() {
    /* C operations.c shmc_wake_waiters: if (!any_waiter(handle)) */
    if
    :: waits[0] || waits[1] ->
        /* C operations.c shmc_wake_waiters: shmc_add32_seq_cst(&handle->gate->release_counter, 1); */
        counter++;
        /* C operations.c shmc_wake_waiters: shmc_os_futex_wake_all(&handle->gate->release_counter); */
        atomic { asleep[0] = false; asleep[1] = false }
    :: else
    fi
}

inline give_back() {
#ifdef WAKE_FIRST
    wake();
#endif
    lock();
    used--;
    locked = false;
#ifdef DEATHS
    if :: goto killed :: true fi;
#endif
#ifndef WAKE_FIRST
    /* C operations.c shmc_perform: leave(handle, request); */
    /* C operations.c shmc_perform: shmc_wake_waiters(handle); */
    wake()
#endif
}

proctype Waiter(byte me) {
    bool got = false;
#ifndef TOLD_LATE
    /* C operations.c shmc_waiter_set: shmc_or_seq_cst(word, bit); */
    waits[me] = true;
#endif
    do
    :: !got ->
#ifndef SEEN_LATE
        /* C operations.c shmc_release_counter: shmc_load32_acquire(&handle->gate->release_counter) */
        seen[me] = counter;
#endif
        lock();
        if
        :: used < CAPACITY -> used++; got = true
        :: else
        fi;
        locked = false;
        if
        :: got -> break
        :: else
        fi;
#ifdef SEEN_LATE
        seen[me] = counter;
#endif
#ifdef TOLD_LATE
        waits[me] = true;
#endif
        /* C operations.c shmc_wait_release: shmc_os_futex_wait(&handle->gate->release_counter, seen, wait_ns); */
        atomic { if :: counter == seen[me] -> asleep[me] = true :: else fi };
        if
        :: !asleep[me]
#ifdef SLICES
        :: asleep[me] = false
#endif
        fi
    od;
    waits[me] = false;
    give_back();
killed:
    skip
}

proctype Holder() {
    give_back();
killed:
    skip
}

init {
    atomic { run Holder(); run Waiter(0); run Waiter(1) };
    _nr_pr == 1;
    assert(used == 0)
}
