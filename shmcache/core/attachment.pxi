# One process's place in one segment. Included by _core.pyx, whose docstring says what holds here.

cdef struct Pending:
    shmc_operation operation
    shmc_token token


cdef object _AT_ONCE = 0  # the usual timeout, known by identity


cdef void _name_token(shmc_request *request, shmc_operation operation, shmc_token token) noexcept:
    """What gives back a token, or a block that is not published."""
    request.operation = operation
    request.token = token
    request.lease.block = token.index
    request.lease.generation = token.generation


cdef class Attachment:
    """One process's place in one segment: the handle, its calls in flight, its pending releases."""

    cdef shmc_handle *_handle
    cdef int _fd
    cdef bint _owns_slot       # False: an observer, which holds nothing
    cdef bint _closed
    cdef uint32_t _calls       # in flight in this process
    cdef uint32_t _era         # counts reopenings after a fork
    cdef uint32_t _waiting     # threads waiting for capacity
    cdef Pending *_pending     # releases that met a taken lock in a finalizer
    cdef size_t _pending_count
    cdef size_t _pending_room
    cdef size_t _tokens        # alive; room for all of them is kept in _pending
    cdef readonly str name
    cdef readonly object id
    cdef readonly object limits
    cdef object __weakref__

    def __cinit__(self):
        self._fd = -1
        self._closed = True

    def _attach(self, int fd, str name, object limits_type, bint owns_slot):
        """Take over `fd`, open its segment, join it unless this only observes. Once per object."""
        if self.id is not None:
            os.close(fd)
            raise TypeError("this handle has been attached before")
        cdef shmc_refusal refusal
        cdef int status = shmc_open(fd, owns_slot, &self._handle, &refusal)
        if status != SHMC_OK:
            error = _open_error(status, &refusal, "open")  # before anything can change errno
            os.close(fd)
            raise error
        cdef const shmc_header *header = shmc_header_of(self._handle)
        self._fd = fd
        self._owns_slot = owns_slot
        self._closed = False
        self.name = name
        self.id = header.pool_id
        self.limits = limits_type(
            header.geometry.limits[0], header.geometry.limits[1],
            header.geometry.limits[2], header.geometry.limits[3])
        if owns_slot:
            try:
                self._join()
            except BaseException:
                self.close()
                raise

    def __dealloc__(self):
        if not self._closed:
            if shmc_is_mine(self._handle):
                self._leave_quietly()
            self._unmap()
        free(self._pending)

    # -- requests

    cdef int _run(self, shmc_request *request, bint at_once=False) except -1:
        """Perform the request; returns its status. Raises for a closed handle or a held lock.

        With `at_once` a held lock is the status BUSY.
        """
        cdef int status
        if self._closed:
            raise SegmentError.Closed(self.name)
        if self._pending_count:
            self._drain()
        status = shmc_perform(self._handle, request, 0)
        if status == SHMC_BUSY and at_once:
            return status
        if status == SHMC_BUSY or status == SHMC_FORKED or status == SHMC_NOT_JOINED:
            status = self._run_slowly(request, status)
            if status == SHMC_BUSY:
                raise self._lock_held()
        if self._pending_count:
            self._drain()
        return status

    cdef int _run_slowly(self, shmc_request *request, int status) except -1:
        """The final status; BUSY when the lock stayed taken up to the deadline.

        The wait is counted in slices and not by a clock: a waiter that was stopped, or a host that
        slept, has not waited, and finds the lock free.
        """
        cdef uint64_t waited_ns = 0
        cdef uint32_t era = self._era
        self._calls += 1
        try:
            while True:
                if status == SHMC_FORKED:
                    self._reopen()
                    era = self._era
                    self._calls += 1
                elif status == SHMC_NOT_JOINED:
                    if not self._owns_slot or request.operation == SHMC_OP_JOIN:
                        return status
                    self._join()
                elif status != SHMC_BUSY or waited_ns >= <uint64_t>LOCK_DEADLINE_NS:
                    return status
                with nogil:
                    status = shmc_perform(self._handle, request, SLICE_NS)
                if status == SHMC_BUSY:
                    waited_ns += SLICE_NS
                    era = self._serve_signals()
        finally:
            if era == self._era:
                self._calls -= 1

    cdef uint32_t _serve_signals(self) except? 0:
        """Run signal handlers in the middle of a call; returns the era after them.

        Meanwhile the call is not counted as in flight: a handler may close this handle, and would
        wait for the very call it interrupted.
        """
        cdef uint32_t era = self._era
        self._calls -= 1
        try:
            PyErr_CheckSignals()
        except BaseException:
            if era == self._era:
                self._calls += 1
            raise
        self._calls += 1
        if self._closed:
            raise SegmentError.Closed(self.name)
        return self._era

    def _lock_held(self):
        """The error that names who holds the lock."""
        cdef int tid = shmc_lock_holder(self._handle)
        pid, state = tid, "unknown"
        try:
            with open(f"/proc/{tid}/status", encoding="utf-8", errors="replace") as status:
                fields = dict(line.split(":", 1) for line in status if ":" in line)
            pid, state = int(fields["Tgid"]), fields["State"].split()[0]
        except (OSError, KeyError, ValueError, IndexError):
            pass
        return SegmentError.LockHeld(pid, state, LOCK_DEADLINE_NS)

    cdef int _join(self) except -1:
        cdef shmc_request request
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_JOIN
        cdef int status = self._run(&request)
        if status == SHMC_OWNERS_FULL and self._sweep():
            status = self._run(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        return 0

    cdef int _reopen(self) except -1:
        """In a forked child: map the segment again, a stranger to the parent's slot and tokens."""
        cdef shmc_handle *handle = NULL
        cdef int fd = self._fd
        if shmc_is_mine(self._handle):
            return 0  # another thread of the child was first
        if not shmc_descriptor_intact(self._handle):
            # It was closed, and perhaps reused, by whoever forked: daemons close everything.
            fd = self._find_again()
            if self._closed:
                close_descriptor(fd)  # by another thread, or by a signal handler
                raise SegmentError.Closed(self.name)
            if shmc_is_mine(self._handle):
                close_descriptor(fd)  # another thread was faster in finding it
                return 0
        self._reserve_views()
        try:
            handle = self._open_same(fd)
        except BaseException:
            if fd != self._fd:
                close_descriptor(fd)
            raise
        cdef shmc_handle *previous = self._handle
        self._fd = fd
        self._handle = handle
        self._calls = 0
        self._waiting = 0
        self._pending_count = 0
        self._era += 1
        try:
            self._adopt(previous)
        finally:
            shmc_close(previous)
        return 0

    cdef void _reserve_views(self) noexcept:
        """Let nothing be mapped where views look; the subclass knows of views."""

    cdef int _adopt(self, shmc_handle *previous) except -1:
        """Take over what must go on in this process; the subclass knows of views."""
        return 0

    cdef bint _linger(self) except -1:
        """Whether something outlives a close and keeps the handle; the subclass knows of views."""
        return False

    cdef int _check_closable(self) except -1:
        """Raises when something forbids to close."""
        return 0

    cdef shmc_handle *_open_same(self, int fd) except NULL:
        """A new handle on the segment that this object was attached to."""
        cdef shmc_handle *handle = NULL
        cdef shmc_refusal refusal
        cdef int status = shmc_open(fd, self._owns_slot, &handle, &refusal)
        if status != SHMC_OK:
            raise _open_error(status, &refusal, "open")
        if shmc_header_of(handle).pool_id != self.id:
            shmc_close(handle)
            raise SegmentError.Retired(self.name)  # another epoch took the name meanwhile
        return handle

    def _find_again(self):
        """A new descriptor of the same segment; the subclass knows its name."""
        raise SegmentError.Closed(self.name)

    # -- releasing

    cdef int _keep_room(self) except -1:
        """Room for every live token in the pending list, so that a finalizer need not allocate."""
        cdef size_t room
        cdef void *pending
        if self._tokens + self._pending_count < self._pending_room:
            return 0
        room = 16 if self._pending_room == 0 else self._pending_room * 2
        pending = realloc(self._pending, room * sizeof(Pending))
        if pending == NULL:
            raise MemoryError()
        self._pending = <Pending *>pending
        self._pending_room = room
        return 0

    cdef int _run_for_token(self, shmc_request *request, bint at_once=False) except -1:
        """Perform what makes a token. It is counted before: other threads may keep room as well."""
        cdef int status = SHMC_BUSY
        self._keep_room()
        self._tokens += 1
        try:
            status = self._run(request, at_once)
        finally:
            if status != SHMC_OK:
                self._tokens -= 1
        return status

    cdef void _postpone(self, shmc_operation operation, shmc_token token) noexcept:
        if self._pending_count < self._pending_room:
            self._pending[self._pending_count].operation = operation
            self._pending[self._pending_count].token = token
            self._pending_count += 1

    cdef void _drain(self) noexcept:
        """Release what finalizers could not, as far as the lock is free."""
        cdef shmc_request request
        cdef Pending last
        while self._pending_count:
            last = self._pending[self._pending_count - 1]
            _name_token(&request, last.operation, last.token)
            if shmc_perform(self._handle, &request, 0) == SHMC_BUSY:
                return
            if self._pending_count:
                self._pending_count -= 1

    cdef int _release(self, shmc_operation operation, shmc_token token, uint64_t guard) except -1:
        """An explicit release: in effect on return, or queued when the lock's holder is stopped.

        The token counts until the end: its room in the queue must not be given away meanwhile.
        """
        cdef shmc_request request
        _name_token(&request, operation, token)
        try:
            if not self._closed and guard == shmc_process_guard():
                self._run(&request)
        except SegmentError.LockHeld:
            self._postpone(operation, token)
        except SegmentError.Closed:
            pass  # by a signal handler, which gave everything back
        except BaseException:
            self._postpone(operation, token)  # a signal handler raised: the charge must still go
            raise
        finally:
            self._tokens -= 1
        return 0

    cdef void _release_from_finalizer(self, shmc_operation operation, shmc_token token,
                                      uint64_t guard) noexcept:
        cdef shmc_request request
        _name_token(&request, operation, token)
        if not self._closed and guard == shmc_process_guard():
            if shmc_perform(self._handle, &request, 0) == SHMC_BUSY:
                self._postpone(operation, token)
        self._tokens -= 1

    # -- the contract's calls

    def register_manager(self, manager):
        """Register a manager (None: under a free id) with zero usage; returns its membership."""
        cdef shmc_request request
        request.operation = SHMC_OP_REGISTER
        request.allocate_id = manager is None
        request.id = 0 if manager is None else _read_u64(manager, "manager")
        cdef CachePoolMembership membership = CachePoolMembership.__new__(CachePoolMembership)
        cdef int status = self._run_for_token(&request)
        if status == SHMC_MANAGERS_FULL and self._sweep():
            status = self._run_for_token(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        membership._hold(self, &request)
        return membership

    def update_manager(self, manager, usage):
        """Replace what the manager has published; returns the new aggregate of the whole pool."""
        cdef shmc_request request
        request.operation = SHMC_OP_UPDATE
        request.id = _read_u64(manager, "manager")
        _read_usage(usage, request.usage)
        cdef int status = self._run(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        return _make_usage(request.aggregate)

    def publish_and_release(self, manager, usage, CachePoolReservation reservation not None):
        """Publish `usage` and release the reservation as one change; returns the new aggregate.

        No other process can see both charges, and peaks move once, after both.
        """
        cdef shmc_request request
        if reservation._released or reservation._pool is not self:
            raise ValueError("the reservation was released already, or belongs to another pool")
        if reservation._guard != shmc_process_guard():
            raise ValueError("the reservation belongs to the process that this one was forked from")
        request.operation = SHMC_OP_PUBLISH_AND_RELEASE
        request.id = _read_u64(manager, "manager")
        request.token = reservation._token
        _read_usage(usage, request.usage)
        cdef int status = self._run(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        if not reservation._released:
            reservation._released = True
            self._tokens -= 1
        return _make_usage(request.aggregate)

    def reserve(self, usage, *, timeout=0):
        """Admit `usage` on all axes or raise the refusal; wait up to `timeout` seconds for room.

        A refusal first reclaims dead owners. `timeout=None` waits for ever; expiry raises it. The
        charge lasts as long as the token: `with`, `release()`, or dropping it gives it back. What
        bounds the wait for the lock itself is LockHeld, after 10 s.
        """
        deadline_ns = 0 if timeout is _AT_ONCE else self._deadline_ns(timeout)
        token = self._reserve_now(usage, False)
        if type(token) is CachePoolReservation:
            return token
        return self._reserve_patiently(usage, deadline_ns, token)

    def reserve_transfer(self, bytes, *, timeout=0):
        """`reserve` on the transfer axis alone."""
        usage = _usage_type(transfer_in_flight_bytes=u64(bytes, "bytes"))
        return self.reserve(usage, timeout=timeout)

    def _reserve_once(self, usage):
        """One admission: the token, or the refusal as a value; other errors are raised."""
        return self._reserve_now(usage, False)

    def _reserve_at_once(self, usage):
        """The same without waiting for the lock: None when it is taken."""
        return self._reserve_now(usage, True)

    cdef object _reserve_now(self, object usage, bint at_once):
        cdef shmc_request request
        request.operation = SHMC_OP_RESERVE
        _read_usage(usage, request.usage)
        # Made before it is needed: nothing may fail between an admission and its token.
        cdef CachePoolReservation token = CachePoolReservation.__new__(CachePoolReservation)
        cdef int status = self._run_for_token(&request, at_once)
        if status == SHMC_OK:
            token._hold(self, &request)
            return token
        if status == SHMC_BUSY:
            return None
        error = _error(self, status, &request)
        if status == SHMC_BUDGET_EXCEEDED or status == SHMC_RESERVATIONS_FULL:
            return error
        raise error

    def report(self):
        """All totals and peaks at one instant."""
        cdef shmc_request request
        request.operation = SHMC_OP_REPORT
        cdef int status = self._run(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        cdef shmc_report *r = &request.report
        return _report_type(
            self.id, r.managers, r.current[0], r.peak[0], r.current[1], r.peak[1],
            r.current[2], r.peak[2], r.current[3], r.peak[3], self.limits)

    # -- owners

    def _owner_rows(self):
        """(slot, state, nonce, pid, start ticks, attach sequence, verdict) of each slot in use."""
        cdef shmc_owner_view *views
        cdef int *verdicts
        cdef uint32_t slot, k, count = 0
        self._ready()
        views = <shmc_owner_view *>calloc(self._owners_max(), sizeof(shmc_owner_view))
        verdicts = <int *>calloc(self._owners_max(), sizeof(int))
        try:
            if views == NULL or verdicts == NULL:
                raise MemoryError()
            # No Python object is made meanwhile: the collector may run code that closes the pool.
            for slot in range(self._owners_max()):
                if shmc_owner_view_of(self._handle, slot, &views[count]):
                    verdicts[count] = shmc_owner_verdict(self._handle, &views[count])
                    count += 1
            return [(views[k].slot, views[k].state, views[k].nonce, views[k].pid,
                     views[k].start_ticks, views[k].attach_seq, verdicts[k])
                    for k in range(count)]
        finally:
            free(views)
            free(verdicts)

    def _owner_pidfd(self, uint32_t slot, nonce):
        """A descriptor that is readable once this owner is dead, or -1; belongs to the handle."""
        cdef shmc_owner_view view
        self._ready()
        if slot >= self._owners_max() or not shmc_owner_view_of(self._handle, slot, &view):
            return -1
        if view.nonce != nonce:
            return -1
        return shmc_owner_pidfd(self._handle, &view)

    def _held_rows(self):
        """(managers, reservations, four axes) of every slot at one instant."""
        cdef shmc_request request
        cdef uint32_t count = self._capacity(2)
        cdef shmc_held *rows = <shmc_held *>calloc(count, sizeof(shmc_held))
        if rows == NULL:
            raise MemoryError()
        try:
            request.operation = SHMC_OP_HELD
            request.held_rows = rows
            status = self._run(&request)
            if status != SHMC_OK:
                raise _error(self, status, &request)
            return [(rows[k].managers, rows[k].reservations, _make_usage(rows[k].usage))
                    for k in range(count)]
        finally:
            free(rows)

    def _find_dead(self):
        """(slot, nonce, pid) of owners proved dead, and of slots left half-cleaned."""
        cdef shmc_owner_view *dead
        cdef uint32_t count, k
        self._ready()
        count = self._owners_max()
        dead = <shmc_owner_view *>calloc(count, sizeof(shmc_owner_view))
        if dead == NULL:
            raise MemoryError()
        try:
            count = shmc_find_dead(self._handle, dead, count)
            return [(dead[k].slot, dead[k].nonce, dead[k].pid) for k in range(count)]
        finally:
            free(dead)

    def _reclaim(self, uint32_t slot, nonce, bint forget_files=False):
        """Empty one owner's slot in chunks; returns (entries, usage) that this call gave back.

        None when others did all of it, or all that is left are files that cannot be deleted. With
        `forget_files` their charge is released all the same.
        """
        cdef shmc_request request
        cdef uint64_t released = 0, given = 0
        cdef uint64_t[AXES] usage
        cdef char[SHMC_OWNER_PATH_BYTES] paths
        cdef int status, axis
        memset(usage, 0, sizeof(usage))
        memset(&request, 0, sizeof(request))
        request.owner_slot = slot
        request.owner_nonce = nonce
        request.paths = paths
        request.operation = SHMC_OP_RECLAIM_BEGIN
        status = self._run(&request)
        request.operation = SHMC_OP_RECLAIM_STEP
        while status == SHMC_OK or status == SHMC_MORE:
            status = self._run(&request)
            if status != SHMC_OK and status != SHMC_MORE and status != SHMC_LIVE_FILES:
                break
            released += request.released
            for axis in range(AXES):
                usage[axis] += request.usage[axis]
                given |= request.usage[axis]
            if status == SHMC_OK:
                return released, _make_usage(usage)
            if status == SHMC_LIVE_FILES:
                status = self._files_gone(&request, forget_files)
        if status != SHMC_STALE and status != SHMC_LIVE_FILES:
            raise _error(self, status, &request)
        return (released, _make_usage(usage)) if released or given else None

    cdef int _files_gone(self, shmc_request *request, bint forget) except -1:
        """Delete the live files of an owner that is being reclaimed; LIVE_FILES if some remain."""
        cdef int status
        paths = request.paths[:request.paths_bytes]
        if not self._delete_live_files(paths, request.owner_nonce) and not forget:
            return SHMC_LIVE_FILES
        request.operation = SHMC_OP_FILES_GONE
        status = self._run(request)
        request.operation = SHMC_OP_RECLAIM_STEP
        return status

    def _delete_live_files(self, paths, nonce):
        """Whether an owner's files are gone; the subclass knows how to delete them."""
        return False

    def _set_paths(self, bytes paths):
        """Tell where this owner may have live files from now on, each path with a zero behind it."""
        cdef shmc_request request
        request.operation = SHMC_OP_SET_PATHS
        request.paths = paths
        request.paths_bytes = len(paths)
        cdef int status = self._run(&request)
        if status == SHMC_TOO_LARGE:
            raise SegmentError.LiveDirectoriesFull(len(paths), SHMC_OWNER_PATH_BYTES)
        if status != SHMC_OK:
            raise _error(self, status, &request)

    def _owner_paths(self, uint32_t slot, nonce):
        """Where an owner has live files, as in its slot; read without the lock."""
        cdef char[SHMC_OWNER_PATH_BYTES] paths
        cdef uint64_t size = 0
        self._ready()
        if slot < self._owners_max():
            size = shmc_owner_paths(self._handle, slot, nonce, paths)
        return paths[:size]

    def _sweep(self):
        """Reclaim every dead owner; returns how many there were."""
        dead = self._find_dead()
        for slot, nonce, _ in dead:
            self._reclaim(slot, nonce)
        return len(dead)

    def _retire(self, attach_seq):
        """End the epoch; False when an owner attached since `attach_seq` was read.

        With None, whoever is attached: this needs no lock, so it also ends a pool whose lock is lost.
        """
        cdef shmc_request request
        cdef int status
        self._ready()
        if attach_seq is not None:
            request.operation = SHMC_OP_RETIRE
            request.attach_seq = attach_seq
            status = self._run(&request)
            if status == SHMC_OWNERS_CHANGED:
                return False
            if status not in (SHMC_OK, SHMC_RETIRED, SHMC_POISONED):
                raise _error(self, status, &request)
        shmc_retire(self._handle)
        return True

    # -- checking, waiting, leaving

    def _check(self, uint32_t problems_max):
        """(kind, index, expected, actual) of the first findings, and how many there are in all."""
        cdef shmc_request request
        cdef shmc_problem *problems = <shmc_problem *>calloc(problems_max, sizeof(shmc_problem))
        cdef uint32_t k
        if problems == NULL:
            raise MemoryError()
        try:
            request.operation = SHMC_OP_CHECK
            request.problems = problems
            request.problems_max = problems_max
            status = self._run(&request)
            if status != SHMC_OK:
                raise _error(self, status, &request)
            found = [(problems[k].kind, problems[k].index, problems[k].expected,
                      problems[k].actual)
                     for k in range(min(problems_max, request.problems_count))]
            return found, request.problems_count
        finally:
            free(problems)

    def _state(self):
        """0 active, 1 retired, 2 poisoned; read without the lock."""
        self._ready()
        return <int>shmc_pool_state_of(self._handle)

    def _told(self):
        """The words of all telemetry rows, summed: the sessions' counters, then the gauges."""
        cdef uint32_t word
        self._ready()
        return [shmc_told(self._handle, word)
                for word in range(SHMC_SESSION_COUNTERS_MAX + SHMC_GAUGES_MAX)]

    def _nonce_here(self):
        """This process's owner; 0 once closed, and in a forked child before its first use."""
        if self._closed or not shmc_is_mine(self._handle):
            return 0
        return shmc_nonce(self._handle)

    def _attach_seq(self):
        """How many owners have attached so far; read without the lock."""
        self._ready()
        return shmc_attach_seq(self._handle)

    cdef uint32_t _owners_max(self) noexcept:
        return shmc_header_of(self._handle).geometry.owners_max

    def _capacity(self, int table):
        """Of the managers (0), reservations (1), owners (2) or claims (3) table."""
        self._ready()
        cdef const shmc_geometry *geometry = &shmc_header_of(self._handle).geometry
        return (geometry.managers_max, geometry.reservations_max, geometry.owners_max,
                geometry.claims_max)[table]

    def _geometry(self):
        """The numbers the segment was created with, as the fields of a `SegmentGeometry`."""
        self._ready()
        cdef const shmc_header *header = shmc_header_of(self._handle)
        cdef const shmc_geometry *geometry = &header.geometry
        return dict(
            arena_bytes=geometry.arena_bytes, blocks_max=geometry.blocks_max,
            block_bytes_max=geometry.block_bytes_max, claims_max=geometry.claims_max,
            free_low_bytes=geometry.free_low_bytes, free_high_bytes=geometry.free_high_bytes,
            owners_max=geometry.owners_max, managers_max=geometry.managers_max,
            reservations_max=geometry.reservations_max, mode=geometry.mode,
            eviction_policy=geometry.eviction_policy, flags=geometry.flags)

    def _facts(self):
        """(total bytes, bytes before the arena, created ns, slot or -1, nonce)."""
        self._ready()
        cdef const shmc_header *header = shmc_header_of(self._handle)
        cdef uint32_t slot = shmc_slot(self._handle)
        return (header.total_bytes, header.region_offset[<int>SHMC_REGION_ARENA], header.created_ns,
                -1 if slot == UINT32_MAX else slot, shmc_nonce(self._handle))

    def _redo_offset(self):
        """Where in the segment the bytes begin that requests change under the lock."""
        self._ready()
        return shmc_header_of(self._handle).region_offset[<int>SHMC_REGION_REDO]

    def _wait_begin(self):
        """Join the threads that wait for capacity; returns the release counter as it is now."""
        self._ready()
        self._waiting += 1
        if self._waiting == 1:
            shmc_waiter_set(self._handle, True)
        return shmc_release_counter(self._handle)

    def _wait_end(self):
        """Leave the threads that wait for capacity."""
        if self._waiting:
            self._waiting -= 1
            if self._waiting == 0 and not self._closed:
                shmc_waiter_set(self._handle, False)

    def _release_count(self):
        """The release counter as it is now."""
        self._ready()
        return shmc_release_counter(self._handle)

    def _wait_release(self, uint32_t seen, uint64_t wait_ns):
        """Sleep until a release after `seen`, at most `wait_ns`; returns the counter."""
        cdef uint32_t era = self._era
        self._ready()
        self._calls += 1
        try:
            with nogil:
                shmc_wait_release(self._handle, seen, wait_ns)
            era = self._serve_signals()
            return shmc_release_counter(self._handle)
        finally:
            if era == self._era:
                self._calls -= 1

    cdef int _ready(self) except -1:
        """Open, and of this process."""
        if self._closed:
            raise SegmentError.Closed(self.name)
        if not shmc_is_mine(self._handle):
            self._reopen()
        return 0

    @property
    def closed(self):
        """Whether `close` was called, or attaching failed."""
        return bool(self._closed)

    def fileno(self):
        """The descriptor of the segment. Raises Closed when somebody else closed it."""
        self._ready()
        if not shmc_descriptor_intact(self._handle):
            raise SegmentError.Closed(self.name)
        return self._fd

    def close(self):
        """Give back all that is held through this handle and leave. Idempotent, silent.

        Views of leases go on to be right: what they look at is held until they are gone. Raises
        BufferError while views of unpublished blocks live.

        Waits for calls of other threads to end, and serves signals. An exception of a signal
        handler during that wait leaves the handle open.
        """
        if self._closed:
            return
        if shmc_is_mine(self._handle):
            self._check_closable()
        self._closed = True
        shmc_ring()  # who waits for several pools is a call in flight, too
        try:
            while self._calls and shmc_is_mine(self._handle):  # they see _closed at the next slice
                time.sleep(0.001)
        except BaseException:
            self._closed = False
            raise
        if shmc_is_mine(self._handle) and self._linger():
            return
        try:
            if shmc_is_mine(self._handle):
                self._leave()
        finally:
            self._unmap()

    cdef int _leave(self) except -1:
        """The orderly way out, in slices; a slot that cannot be left is swept like a dead one's."""
        cdef shmc_request request
        cdef char[SHMC_OWNER_PATH_BYTES] paths
        cdef int status
        cdef uint64_t deadline_ns = <uint64_t>time.monotonic_ns() + <uint64_t>LOCK_DEADLINE_NS
        memset(&request, 0, sizeof(request))
        request.paths = paths
        request.owner_slot = shmc_slot(self._handle)
        request.owner_nonce = shmc_nonce(self._handle)
        request.operation = SHMC_OP_RECLAIM_BEGIN
        if request.owner_slot == UINT32_MAX:
            return 0
        while <uint64_t>time.monotonic_ns() < deadline_ns:
            with nogil:
                status = shmc_perform(self._handle, &request, SLICE_NS)
            if status == SHMC_OK and request.operation != SHMC_OP_RECLAIM_STEP:
                request.operation = SHMC_OP_RECLAIM_STEP
            elif status == SHMC_LIVE_FILES:
                if not self._delete_live_files(
                        request.paths[:request.paths_bytes], request.owner_nonce):
                    return 0
                request.operation = SHMC_OP_FILES_GONE
                deadline_ns = <uint64_t>time.monotonic_ns() + <uint64_t>LOCK_DEADLINE_NS
            elif status == SHMC_BUSY:
                PyErr_CheckSignals()
            elif status != SHMC_MORE:
                return 0
        return 0

    cdef void _leave_quietly(self) noexcept:
        """The same from a finalizer: as far as the lock is free."""
        cdef shmc_request request
        cdef int status
        memset(&request, 0, sizeof(request))
        request.owner_slot = shmc_slot(self._handle)
        request.owner_nonce = shmc_nonce(self._handle)
        if request.owner_slot == UINT32_MAX:
            return
        request.operation = SHMC_OP_RECLAIM_BEGIN
        if shmc_perform(self._handle, &request, 0) != SHMC_OK:
            return
        request.operation = SHMC_OP_RECLAIM_STEP
        status = SHMC_MORE
        while status == SHMC_MORE:
            status = shmc_perform(self._handle, &request, 0)

    cdef void _unmap(self) noexcept:
        cdef bint intact = shmc_descriptor_intact(self._handle)
        shmc_close(self._handle)
        self._handle = NULL
        self._closed = True
        if intact:
            close_descriptor(self._fd)
        self._fd = -1
