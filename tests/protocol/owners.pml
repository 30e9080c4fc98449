/* owners.pml: a slot whose owner dies, two cleaners, and its next owner.
 *
 * A verdict is taken without the lock, so it may be old news: the slot may have been cleaned and
 * taken again meanwhile. Every chunk of cleaning first compares the nonce it was told, under the
 * lock. Entries are released one per chunk; a cleaner may be killed between chunks. What the living
 * owner holds must stay (G6), what the dead held must all be given back (G5).
 *
 * Negative controls: NO_NONCE, UNFENCED_CLEANING, FREE_EARLY, GUESSED_DEATH.
 *
 * A comment `C file function: text` names the line of the engine that a step stands for.
 */
#define HELD  2
#define LIVES 2 /* the slot's owners, one after the other */

mtype = { FREE, ACTIVE, CLEANING };

mtype slot = FREE;
byte nonce = 0;
byte held = 0;       /* entries of the slot's present owner */
byte alive = 0;      /* the nonce of the living owner */
byte charged = 0;    /* the pool's total */
bool locked = false;
byte lives = 0;
byte deaths = 0;

inline lock() {
    atomic { !locked -> locked = true }
}

proctype Owner() {
    byte mine;
    do
    :: lives < LIVES ->
        lock();
        if
        :: slot == FREE ->
            assert(held == 0);
            /* C owners.c shmc_owners_join: shmc_store_release(&owner->nonce, handle->nonce); */
            atomic { lives++; mine = lives; nonce = mine; alive = mine }
            /* C owners.c shmc_owners_join: shmc_redo_put(handle, &owner->state, SHMC_OWNER_ACTIVE); */
            slot = ACTIVE;
            locked = false
        :: else ->
            locked = false;
            goto next
        fi;
        /* Takes what it holds, then lives on or is killed. */
        lock();
        atomic { held = HELD; charged = charged + HELD };
        locked = false;
        assert(slot == ACTIVE && nonce == mine && held == HELD);
        if
        :: alive = 0
        :: lives == LIVES -> break
        fi;
next:
        skip
    :: else -> break
    od
}

proctype Cleaner() {
    byte told;
    bool over;
    do
    :: lives < LIVES || alive == 0 ->
        /* The verdict, without the lock; what it is about may be over when it is acted upon. */
        told = nonce;
        if
#ifdef GUESSED_DEATH
        :: told != 0
#endif
        :: told != 0 && alive != told
        :: told == 0 -> goto next
        :: told != 0 && alive == told -> goto next
        fi;
        lock();
#ifdef NO_NONCE
        if :: slot == ACTIVE -> slot = CLEANING :: else fi;
#else
        /* C owners.c names_owner: return owner->state != SHMC_OWNER_FREE && owner->nonce == request->owner_nonce; */
        /* C owners.c shmc_owners_reclaim_begin: shmc_redo_put(handle, &owner->state, SHMC_OWNER_CLEANING); */
        if :: slot == ACTIVE && nonce == told -> slot = CLEANING :: else fi;
#endif
#ifdef FREE_EARLY
        if :: slot == CLEANING -> slot = FREE :: else fi;
#endif
        locked = false;
        over = false;
        do
        :: !over ->
            if
            :: deaths < 2 -> deaths++; goto next /* killed between chunks: another cleaner comes */
            :: true
            fi;
            lock();
            if
#if defined(NO_NONCE) || defined(UNFENCED_CLEANING)
            :: held > 0 && slot != FREE ->
#else
            /* C owners.c shmc_owners_reclaim_step: if (!names_owner(handle, request) || */
            :: slot == CLEANING && nonce == told && held > 0 ->
#endif
                held--;
                charged--
            :: else ->
                if
                :: slot == CLEANING && nonce == told && held == 0 -> slot = FREE; nonce = 0
                :: else
                fi;
                over = true
            fi;
            locked = false
        :: else -> break
        od;
next:
        skip
    :: else -> break
    od
}

init {
    atomic { run Owner(); run Cleaner(); run Cleaner() };
    _nr_pr == 1;
    assert(alive != 0 -> (slot == ACTIVE && held == HELD && charged == HELD) : true)
}
