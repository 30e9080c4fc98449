# The sleep of the one thread that waits for several pools. Included by _core.pyx.


def ring():
    """Wake the thread that sleeps in `sleep_until_release`, or let its next sleep end at once."""
    shmc_ring()


def rung():
    """How often the bell was rung; read it before looking at what is rung for."""
    return shmc_rung()


def sleep_until_release(list pools, list seen, uint32_t rung, uint64_t wait_ns):
    """Sleep until a pool's counter differs from `seen`, or a ring after `rung`, at most `wait_ns`.

    A call in flight of each pool, whose close rings and waits for it; closed ones are passed over.
    """
    cdef Py_ssize_t count = len(pools), k
    cdef uint32_t open_count = 0
    cdef shmc_handle **handles = <shmc_handle **>calloc(count + 1, sizeof(shmc_handle *))
    cdef uint32_t *words = <uint32_t *>calloc(count + 1, sizeof(uint32_t))
    cdef int64_t *eras = <int64_t *>calloc(count + 1, sizeof(int64_t))  # of the counted; else -1
    cdef Attachment pool
    try:
        if handles == NULL or words == NULL or eras == NULL:
            raise MemoryError()
        # No Python object is made meanwhile: the collector may run code that closes a pool.
        for k in range(count):
            pool = pools[k]
            eras[k] = -1
            if pool._closed or not shmc_is_mine(pool._handle):
                continue
            words[open_count] = seen[k]
            eras[k] = pool._era
            pool._calls += 1
            handles[open_count] = pool._handle
            open_count += 1
        with nogil:
            shmc_wait_any(handles, words, open_count, rung, wait_ns)
        for k in range(count):
            pool = pools[k]
            if pool._era == eras[k]:
                pool._calls -= 1
    finally:
        free(handles)
        free(words)
        free(eras)
