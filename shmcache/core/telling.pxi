# What a session tells to all processes. Included by _core.pyx.

cdef enum:
    TOLD_MAX = 32  # at least both kinds of words of a telemetry row


cdef class Telling:
    """Adds what one session's report says to its process's row of the segment, as it changes.

    Why: called at every change, so it costs 0.1 us while nothing did. A field that has the same
    object as last time is passed by; a counter that was taken back waits until it is above what was
    told; gauges are told as differences, because several sessions share a row.
    Death: what was told stays in the counters; whoever cleans up takes the gauges.
    Fork: silent in a child, and once the pool is closed.
    """

    cdef Attachment _pool
    cdef object _report
    cdef uint64_t _nonce
    cdef int _counters, _gauges
    cdef Py_ssize_t[TOLD_MAX] _counter_at
    cdef Py_ssize_t[TOLD_MAX] _gauge_at
    cdef uint64_t[TOLD_MAX] _counted
    cdef uint64_t[TOLD_MAX] _stood
    cdef list _seen

    def __init__(self, Attachment pool not None, report, counters, gauges):
        """`counters` and `gauges` name fields of the report, by the numbers of their words."""
        if max(len(counters), len(gauges)) > TOLD_MAX:
            raise ValueError("a telemetry row has not so many words")
        if len(counters) > SHMC_SESSION_COUNTERS_MAX or len(gauges) > SHMC_GAUGES_MAX:
            raise ValueError("a telemetry row has not so many words")
        self._pool, self._report = pool, report
        self._nonce = pool._nonce_here()
        self._counters, self._gauges = len(counters), len(gauges)
        self._seen = [None] * len(counters)
        for k, name in enumerate(counters):
            self._counter_at[k] = _member_offset(type(report), name)
        for k, name in enumerate(gauges):
            self._gauge_at[k] = _member_offset(type(report), name)

    cdef bint _speaks(self):
        return (not self._pool._closed and shmc_is_mine(self._pool._handle)
                and shmc_nonce(self._pool._handle) == self._nonce)

    def count(self):
        """Tell how far the counters have grown."""
        cdef int k
        cdef uint64_t now
        cdef object value
        if not self._speaks():
            return
        for k in range(self._counters):
            value = <object>(<PyObject **>(<char *><PyObject *>self._report
                                           + self._counter_at[k]))[0]
            if value is <object>PyList_GET_ITEM(self._seen, k):
                continue
            self._seen[k] = value
            now = value
            if now > self._counted[k]:
                shmc_tell(self._pool._handle, k, now - self._counted[k])
                self._counted[k] = now

    def stand(self, int gauge, uint64_t now):
        """Tell one gauge: of a field, or behind them of the caller's own."""
        if gauge < 0 or gauge >= SHMC_GAUGES_MAX:
            raise IndexError("a telemetry row has not so many gauges")
        if now != self._stood[gauge] and self._speaks():
            shmc_tell(self._pool._handle, SHMC_SESSION_COUNTERS_MAX + gauge,
                      now - self._stood[gauge])
            self._stood[gauge] = now

    def stand_all(self):
        """Tell all gauges that are fields, as the report has them."""
        cdef int k
        for k in range(self._gauges):
            self.stand(k, <object>(<PyObject **>(<char *><PyObject *>self._report
                                                 + self._gauge_at[k]))[0])

    def end(self):
        """Tell the last counts, and that nothing is there any more."""
        cdef int k
        self.count()
        for k in range(SHMC_GAUGES_MAX):
            self.stand(k, 0)


cdef Py_ssize_t _member_offset(object kind, str name) except -1:
    """Where objects of the class keep this slot."""
    member = getattr(kind, name)
    if type(member) is not types.MemberDescriptorType:
        raise TypeError(f"{name} is not a slot of {kind.__name__}")
    return (<PyMemberDescrObject *>member).d_member.offset
