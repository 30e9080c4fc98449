# Locks that a signal handler cannot leave taken: part of _core.pyx.
#
# A handler runs between two bytecodes, and may raise there: after a Python `__enter__` has taken its
# lock and before the `with` that called it knows of it. Here taking a lock and telling of it are one
# call of C, as for a lock of `threading` itself.

cdef uint64_t forks = 0


def _count_fork():
    global forks
    forks += 1


# Not a comparison of pids: that is a system call each time a lock is taken.
os.register_at_fork(after_in_child=_count_fork)


cdef class SectionLock:
    """What a subclass does under its lock, and nobody can get between: a context manager.

    `_late` is a deque of calls, run by `_run_late` with the lock held, on the way in and out;
    `_make_true` is called when a section was cut short by anything but an error of a contract. Once
    `_poisoned`, every section raises ManagerPoisoned. Not reentrant.
    """

    cdef object _acquire, _release
    cdef readonly object _late
    cdef public bint _poisoned
    cdef uint64_t _born

    def __cinit__(self, *args):
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release
        self._late = collections.deque()
        self._born = forks

    @property
    def is_foreign(self):
        """Whether this is a forked child's copy, which owns nothing."""
        return self._born != forks

    def __enter__(self):
        if self._born != forks:
            raise RuntimeError("this session belongs to the parent process: make one after fork")
        self._acquire()
        try:
            if self._poisoned:
                raise CacheResidencyError.ManagerPoisoned
            if self._late:
                self._run_late()
        except BaseException:
            self._release()
            raise

    def __exit__(self, kind, error, trace):
        try:
            if kind is not None and not issubclass(kind, ContractError):
                self._make_true()
            if self._late:
                self._run_late()
        finally:
            self._release()
        if self._late:
            self._run_if_free()

    def _run_if_free(self):
        """Run what is late unless somebody has the lock: they look after releasing it."""
        while self._late and self._acquire(False):
            try:
                self._run_late()
            finally:
                self._release()


cdef class Attempt:
    """`with Attempt(lock) as taken:` holds the lock for the block if it was free; never waits."""

    cdef object _lock
    cdef bint _taken

    def __cinit__(self, lock):
        self._lock = lock

    def __enter__(self):
        self._taken = self._lock.acquire(False)
        return self._taken

    def __exit__(self, kind, error, trace):
        if self._taken:
            self._lock.release()
