/* atomics.h: every access to a word that another process or a crash may see half-way.
 *
 * The memory order is in the name, never a parameter; no other file of the engine names one.
 * Two different dangers are told apart:
 *
 *   - another process reads or writes without the lock: acquire, release and seq_cst below;
 *   - the process dies between two instructions: its retired stores are all visible, so only the
 *     compiler could reorder them. shmc_step_barrier() forbids exactly that, at no run-time cost.
 */
#ifndef SHMC_ATOMICS_H
#define SHMC_ATOMICS_H

#include <stdbool.h>
#include <stdint.h>

/* Tests that try every interleaving compile a scheduler into each access to a shared word. */
#ifdef SHMC_INTERLEAVE
void shmc_point(const void *word);
#define SHMC_POINT(word) shmc_point(word)
#else
#define SHMC_POINT(word) ((void)0)
#endif

static inline uint64_t shmc_load_relaxed(const uint64_t *word)
{
    SHMC_POINT(word);
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline uint64_t shmc_load_acquire(const uint64_t *word)
{
    SHMC_POINT(word);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline uint64_t shmc_load_seq_cst(const uint64_t *word)
{
    SHMC_POINT(word);
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static inline uint32_t shmc_load32_acquire(const uint32_t *word)
{
    SHMC_POINT(word);
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline int shmc_load_int(const int *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline void shmc_store_release(uint64_t *word, uint64_t value)
{
    SHMC_POINT(word);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void shmc_store32_release(uint32_t *word, uint32_t value)
{
    SHMC_POINT(word);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t shmc_exchange_seq_cst(uint64_t *word, uint64_t value)
{
    SHMC_POINT(word);
    return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
}

static inline uint32_t shmc_exchange32_acquire(uint32_t *word, uint32_t value)
{
    SHMC_POINT(word);
    return __atomic_exchange_n(word, value, __ATOMIC_ACQUIRE);
}

static inline uint64_t shmc_or_seq_cst(uint64_t *word, uint64_t bits)
{
    SHMC_POINT(word);
    return __atomic_fetch_or(word, bits, __ATOMIC_SEQ_CST);
}

static inline uint64_t shmc_and_seq_cst(uint64_t *word, uint64_t bits)
{
    SHMC_POINT(word);
    return __atomic_fetch_and(word, bits, __ATOMIC_SEQ_CST);
}

static inline void shmc_add_relaxed(uint64_t *word, uint64_t value)
{
    SHMC_POINT(word);
    __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}

static inline uint32_t shmc_add32_seq_cst(uint32_t *word, uint32_t value)
{
    SHMC_POINT(word);
    return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
}

/* Replaces expected by desired; false, and nothing changed, when the word holds something else. */
static inline bool shmc_replace_seq_cst(uint64_t *word, uint64_t expected, uint64_t desired)
{
    SHMC_POINT(word);
    return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

/* No load after it is done before a store that comes before it. */
static inline void shmc_fence_seq_cst(void)
{
#ifdef __SANITIZE_THREAD__
    uint32_t nobody_s = 0; /* the sanitizer knows no fences; an exchange is one on our machines */
    __atomic_exchange_n(&nobody_s, 1, __ATOMIC_SEQ_CST);
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

static inline void shmc_prefetch(const void *address)
{
    __builtin_prefetch(address);
}

/* Orders the stores before it and after it as a dying process leaves them. */
static inline void shmc_step_barrier(void)
{
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static inline void shmc_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
