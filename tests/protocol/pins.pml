/* pins.pml: readers that lease a block without the lock, against who evicts it and uses it again.
 *
 * One block. Owner 0 has two threads, which share a count and a leaf lock; owner 1 has one, and may
 * be killed; the evictor may be killed at any step while it holds the lock, and another goes on.
 * A plain store may stay in its processor's buffer until a fence: `late` holds what is not yet seen.
 * While a lease is held, the block's bytes must be those of the key that was asked for (G3, G4).
 *
 * Negative controls: NO_REREAD, NO_READER_FENCE, NO_FENCE, NAIVE_COUNTS, MASK_RESET, BLIND_EVICTION,
 * NO_PUT_BACK, CLEAN_THE_LIVING.
 *
 * A comment `C file function: text` names the line of the engine that a step stands for.
 */
#define ROUNDS 2 /* of eviction and use under another key */
#ifndef LEASES
#define LEASES 1 /* of each reader */
#endif

mtype = { FREE, PUBLISHED, EVICTING };

mtype state = PUBLISHED;
byte key = 1;
byte content = 1;
bool evicting = false; /* control.evicting */
bool locked = false;

bool pin[2];       /* what is in memory */
bool late[2];      /* a store of a bit that is still in its processor's buffer ... */
bool late_value[2]; /* ... and its value */
byte counts[2];
bool leaf[2];
bool dead[2];

bool late_state = false; /* the same for NO_FENCE's store of EVICTING */

/* A processor sees its own stores; others do not until they have left the buffer. */
inline store_pin(owner, value) {
    atomic { late_value[owner] = value; late[owner] = true }
}

inline fence(owner) {
    atomic { if :: late[owner] -> pin[owner] = late_value[owner]; late[owner] = false :: else fi }
}

/* Buffers empty themselves some time. */
proctype Buffers() {
end:
    do
    :: atomic { late[0] -> pin[0] = late_value[0]; late[0] = false }
    :: atomic { late[1] -> pin[1] = late_value[1]; late[1] = false }
    :: atomic { late_state -> state = EVICTING; late_state = false }
    od
}

inline enter_leaf(owner) {
#ifdef NAIVE_COUNTS
    skip
#else
    /* C pins.c shmc_leaf_try: if (shmc_exchange32_acquire(&handle->leaf, 1) == 0) */
    atomic { !leaf[owner] -> leaf[owner] = true }
#endif
}

inline leave_leaf(owner) {
#ifdef NAIVE_COUNTS
    skip
#else
    /* C pins.c shmc_leaf_leave: shmc_store32_release(&handle->leaf, 0); */
    leaf[owner] = false
#endif
}

inline set_pin(owner) {
#ifdef NAIVE_COUNTS
    atomic { counts[owner]++; was = counts[owner] - 1 }
    if :: was == 0 -> store_pin(owner, true); fence(owner) :: else fi
#else
    /* C pins.c shmc_pin: if (handle->counts[block]++ == 0) */
    if
    :: counts[owner] == 0 ->
        /* C pins.c shmc_pin: shmc_store_release(word, shmc_load_relaxed(word) | bit_of(block)); */
        store_pin(owner, true)
    :: else
    fi;
    counts[owner]++
#endif
}

inline clear_pin(owner) {
#ifdef NAIVE_COUNTS
    atomic { counts[owner]--; was = counts[owner] }
    if :: was == 0 -> store_pin(owner, false); fence(owner) :: else fi
#else
    /* C pins.c shmc_unpin: if (--handle->counts[block] != 0) */
    counts[owner]--;
    if
    :: counts[owner] == 0 ->
        /* C pins.c shmc_unpin: shmc_store_release(word, shmc_load_relaxed(word) & ~bit_of(block)); */
        store_pin(owner, false)
    :: else
    fi
#endif
}

#define MORTAL(owner) if :: owner == 1 && !dead[1] && may_die -> goto killed :: true fi

proctype Reader(byte owner; byte wanted; bool may_die) {
    byte left = LEASES;
    byte was = 0;
    bool good;
    do
    :: left > 0 ->
        left--;
        enter_leaf(owner);
#ifdef NO_REREAD
        good = (state == PUBLISHED);
#endif
        set_pin(owner);
        MORTAL(owner);
#ifndef NO_READER_FENCE
        /* C pins.c fence_pins: shmc_fence_seq_cst(); */
        fence(owner);
#endif
#ifndef NO_REREAD
        /* C pins.c read_pinned: if (SHMC_BLOCK_STATE(shmc_load_seq_cst(&block->state)) != SHMC_BLOCK_PUBLISHED) */
        good = (state == PUBLISHED);
#endif
        /* C pins.c read_pinned: return shmc_same_key(block->key, key) && shmc_fits_arena(handle, lease->place, lease->bytes); */
        good = good && (key == wanted);
        MORTAL(owner);
        if
        :: good ->
            leave_leaf(owner);
            assert(content == wanted);
            MORTAL(owner);
            assert(content == wanted);
            enter_leaf(owner);
            clear_pin(owner)
        :: else ->
            clear_pin(owner)
        fi;
        leave_leaf(owner)
    :: else -> break
    od;
    goto over;
killed:
    /* Its buffer empties itself, and its bit stays. */
    atomic { fence(owner); dead[owner] = true }
over:
    skip
}

inline put_back() {
    /* C room.c put_back: shmc_store_release(&block->state, state); */
    state = PUBLISHED;
    /* C room.c put_back: shmc_store_release(&handle->control->evicting, 0); */
    evicting = false
}

/* Killed here, the lock's next holder puts back what was being tried. */
#define DIE if :: deaths < 2 -> deaths++; locked = false; goto again :: true fi

proctype Evictor() {
    byte rounds = ROUNDS;
    byte deaths = 0;
again:
    do
    :: rounds > 0 ->
        atomic { !locked -> locked = true };
#ifndef NO_PUT_BACK
        /* C lock.c shmc_lock: if (shmc_load_relaxed(&handle->control->evicting) != 0 && !shmc_blocks_recover(handle)) */
        if :: evicting -> put_back() :: else fi;
#endif
        assert(state == PUBLISHED || state == FREE);
        /* A dead owner's row is cleared under the lock. */
#ifdef CLEAN_THE_LIVING
        if :: pin[1] = false :: true fi;
#else
        if :: dead[1] -> pin[1] = false :: else fi;
#endif
        if
        :: state == PUBLISHED ->
            /* C room.c shmc_close_to_readers: shmc_store_release(&handle->control->evicting, note); */
            evicting = true;
            DIE;
#ifdef NO_FENCE
            late_state = true;
#else
            /* C room.c shmc_close_to_readers: shmc_exchange_seq_cst(&block->state, SHMC_BLOCK_EVICTING); */
            state = EVICTING;
#endif
            DIE;
            /* C room.c shmc_close_to_readers: if (!shmc_is_pinned(handle, index)) */
            if
#ifdef BLIND_EVICTION
            :: true ->
#else
            :: !pin[0] && !pin[1] ->
#endif
                DIE;
                /* C room.c evict: shmc_redo_set(handle, &handle->control->evicting, 0); */
                /* C room.c evict: shmc_redo_commit(handle); */
                atomic {
                    late_state = false;
                    state = FREE;
                    evicting = false;
#ifdef MASK_RESET
                    pin[0] = false; pin[1] = false;
#endif
                }
            :: else ->
                atomic { late_state = false; state = PUBLISHED };
                evicting = false
            fi
        :: state == FREE ->
            /* Allocated, filled, published under another key: the bytes change before the state. */
            content = 0;
#ifdef MASK_RESET
            pin[0] = false; pin[1] = false;
#endif
            key = 3 - key;
            content = key;
            atomic { state = PUBLISHED; rounds-- }
        fi;
        locked = false
    :: else -> break
    od
}

init {
    atomic {
        run Buffers();
        run Reader(0, 1, false);
        run Reader(0, 2, false);
        run Reader(1, 1, true);
        run Evictor()
    };
    _nr_pr == 2;
    /* A killed owner's bit only delays; the bits of the living are as their counts. */
    assert(!late[0] -> (pin[0] == (counts[0] > 0)) : true)
}
