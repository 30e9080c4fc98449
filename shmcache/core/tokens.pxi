# What an attachment hands out: charges that are given back exactly once. Included by _core.pyx.
#
# no_gc_clear: the collector must not take _pool away before __dealloc__ has used it. The only
# cycles through a token pass through the dictionary of the pool's subclass; that is cleared.

@cython.no_gc_clear
cdef class Token:
    """Ownership of one charge; gives it back once, however it ends.

    Contract: `release()` is idempotent, works from any thread and raises no contract error; `with`
    releases at the end; dropping the last reference releases without ever waiting.
    Fork: inert in a child. Copying or pickling raises TypeError: two tokens would release twice.
    """

    cdef Attachment _pool
    cdef shmc_token _token
    cdef uint64_t _guard
    cdef shmc_operation _release_operation
    cdef bint _released
    cdef object __weakref__

    def __cinit__(self):
        self._released = True  # what __new__ alone makes has no pool and holds nothing

    def __init__(self):
        raise TypeError(f"{type(self).__name__} objects are made by a pool")

    def __dealloc__(self):
        if not self._released:
            self._released = True
            self._pool._release_from_finalizer(self._release_operation, self._token, self._guard)

    @property
    def pool(self):
        """The pool that is charged; it stays open as long as this token lives."""
        return self._pool

    @property
    def released(self):
        """Whether the charge was given back through this token."""
        return bool(self._released)

    def release(self):
        """Give the charge back; a second call does nothing."""
        if not self._released:
            self._released = True
            self._pool._release(self._release_operation, self._token, self._guard)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def __copy__(self):
        raise TypeError(f"a {type(self).__name__} cannot be copied")

    def __deepcopy__(self, memo):
        raise TypeError(f"a {type(self).__name__} cannot be copied")

    def __reduce_ex__(self, protocol):
        raise TypeError(f"a {type(self).__name__} cannot be pickled")

    cdef void _bind(self, Attachment pool, shmc_operation release_operation,
                    shmc_token token) noexcept:
        self._pool = pool
        self._released = False
        self._token = token
        self._guard = shmc_process_guard()
        self._release_operation = release_operation


@cython.no_gc_clear
cdef class CachePoolReservation(Token):
    """Exact ownership of one admitted usage, made by `pool.reserve()`. Not bound to a manager."""

    cdef uint64_t _axes[AXES]

    cdef void _hold(self, Attachment pool, const shmc_request *request) noexcept:
        cdef int axis
        for axis in range(AXES):
            self._axes[axis] = request.usage[axis]
        self._bind(pool, SHMC_OP_RELEASE_RESERVATION, request.token)

    @property
    def usage(self):
        """What was admitted."""
        return _make_usage(self._axes)

    def __repr__(self):
        return f"<CachePoolReservation {'released' if self._released else 'live'} {self.usage}>"


@cython.no_gc_clear
cdef class CachePoolMembership(Token):
    """Keeps one manager, and what it last published, in the pool; made by `register_manager()`."""

    cdef uint64_t _manager

    cdef void _hold(self, Attachment pool, const shmc_request *request) noexcept:
        self._manager = request.id
        self._bind(pool, SHMC_OP_RELEASE_MANAGER, request.token)

    @property
    def manager(self):
        """The manager's id."""
        return self._manager

    def __repr__(self):
        state = "released" if self._released else "live"
        return f"<CachePoolMembership {state} manager={self._manager}>"
