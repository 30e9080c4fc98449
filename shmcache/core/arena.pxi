# The arena of an attached segment: store, find, lease. Included by _core.pyx.

cdef enum:
    KEY_BYTES = 32


cdef int _read_key(object key, uint64_t *words) except -1:
    """A key of 32 bytes, from bytes or anything with a buffer of that size."""
    cdef Py_buffer buffer
    if type(key) is bytes:
        if PyBytes_GET_SIZE(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        memcpy(words, PyBytes_AS_STRING(key), KEY_BYTES)
        return 0
    if not PyObject_CheckBuffer(key):
        raise TypeError(f"a key is {KEY_BYTES} bytes, not {type(key).__name__}")
    PyObject_GetBuffer(key, &buffer, PyBUF_SIMPLE)
    try:
        if buffer.len != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {buffer.len}")
        memcpy(words, buffer.buf, KEY_BYTES)
    finally:
        PyBuffer_Release(&buffer)
    return 0


cdef dict _totals(const shmc_arena_report *report):
    return dict(
        used_blocks=report.used_blocks, used_bytes=report.used_bytes,
        slabs_used=report.slabs_used, draining=report.draining, stored=report.stored,
        evicted=report.evicted, invalidated=report.invalidated, duplicates=report.duplicates,
        unindexed=report.unindexed, slabs_moved=report.slabs_moved)


cdef list _class_rows(const shmc_arena_report *report, const uint64_t *leased):
    """Of the classes in use."""
    cdef uint32_t index
    return [
        (report.classes[index].block_bytes, report.classes[index].slabs,
         report.classes[index].used, report.classes[index].published,
         report.classes[index].counts[<int>SHMC_QUEUE_DOOMED],
         report.classes[index].counts[<int>SHMC_QUEUE_PROTECTED], leased[index])
        for index in range(SHMC_CLASSES_MAX) if report.classes[index].slabs
    ]


cdef list _holding_rows(const shmc_holding *rows, uint32_t owners):
    cdef uint32_t slot
    return [(rows[slot].leased_blocks, rows[slot].leased_bytes, rows[slot].private_blocks,
             rows[slot].private_bytes) for slot in range(owners)]


cdef class _Snapshot:
    """Room for a snapshot of the engine's, and what it says."""

    cdef shmc_snapshot rows
    cdef uint32_t owners_max, slabs_max
    cdef uint64_t slab_bytes
    cdef int *verdicts
    cdef uint64_t *counters
    cdef shmc_holding *pinned  # by slot
    cdef uint64_t[64] leased

    cdef int make_room(self, const shmc_header *header) except -1:
        cdef const shmc_geometry *geometry = &header.geometry
        self.owners_max, self.slabs_max = geometry.owners_max, header.slabs_max
        self.slab_bytes = header.slab_bytes
        self.rows.owners = <shmc_owner_view *>calloc(self.owners_max, sizeof(shmc_owner_view))
        self.rows.held = <shmc_held *>calloc(self.owners_max, sizeof(shmc_held))
        self.rows.managers = <shmc_entry *>calloc(geometry.managers_max, sizeof(shmc_entry))
        self.rows.slabs = <shmc_slab *>calloc(self.slabs_max + 1, sizeof(shmc_slab))
        self.verdicts = <int *>calloc(self.owners_max, sizeof(int))
        self.counters = <uint64_t *>calloc(self.owners_max * SHMC_COUNTERS, sizeof(uint64_t))
        self.pinned = <shmc_holding *>calloc(self.owners_max, sizeof(shmc_holding))
        if (self.rows.owners == NULL or self.rows.held == NULL or self.rows.managers == NULL
                or self.rows.slabs == NULL or self.verdicts == NULL or self.counters == NULL
                or self.pinned == NULL):
            raise MemoryError()
        return 0

    def __dealloc__(self):
        free(self.rows.owners)
        free(self.rows.held)
        free(self.rows.managers)
        free(self.rows.slabs)
        free(self.verdicts)
        free(self.counters)
        free(self.pinned)

    cdef tuple told(self, pool_id, limits):
        cdef const shmc_report *r = &self.rows.report
        cdef const shmc_entry *entry
        cdef uint64_t k
        report = _report_type(
            pool_id, r.managers, r.current[0], r.peak[0], r.current[1], r.peak[1],
            r.current[2], r.peak[2], r.current[3], r.peak[3], limits)
        managers = []
        for k in range(self.rows.managers_count):
            entry = &self.rows.managers[k]
            managers.append((entry.id, SHMC_ENTRY_OWNER(entry.state), _make_usage(entry.usage)))
        owners = [self.owner(k) for k in range(self.rows.owners_count)]
        return (report, (r.reservations, r.recoveries), owners, managers,
                self.arena() if self.slabs_max else None)

    cdef tuple owner(self, uint32_t k):
        cdef const shmc_owner_view *view = &self.rows.owners[k]
        cdef const shmc_held *held = &self.rows.held[view.slot]
        cdef const shmc_holding *pinned = &self.pinned[view.slot]
        cdef uint32_t counter
        return (
            (view.slot, view.state, view.nonce, view.pid, view.start_ticks, view.attach_seq,
             self.verdicts[k]),
            (held.managers, held.reservations, _make_usage(held.usage)),
            (pinned.leased_blocks, pinned.leased_bytes, pinned.private_blocks,
             pinned.private_bytes),
            tuple([self.counters[k * SHMC_COUNTERS + counter] for counter in range(SHMC_COUNTERS)]))

    cdef tuple arena(self):
        cdef const shmc_arena_report *report = &self.rows.arena
        cdef uint32_t index
        cdef uint64_t kind
        slabs = []
        for index in range(self.slabs_max):
            kind = SHMC_SLAB_CLASS(self.rows.slabs[index].state)
            if SHMC_SLAB_STATE(self.rows.slabs[index].state) and kind < SHMC_CLASSES_MAX:
                slabs.append((report.classes[kind].block_bytes, self.rows.slabs[index].used))
            else:
                slabs.append((0, 0))
        return _totals(report), _class_rows(report, self.leased), slabs, self.slab_bytes


cdef class Arena(Attachment):
    """An attachment with what its process holds in the arena."""

    cdef PyObject *_viewed  # holdings with views, doubly linked
    cdef bint _lingering    # closed, but views live

    # -- the list of holdings with views

    cdef void _link(self, Holding holding) noexcept:
        holding._previous = NULL
        holding._next = self._viewed
        if self._viewed != NULL:
            (<Holding><object>self._viewed)._previous = <PyObject *>holding
        self._viewed = <PyObject *>holding

    cdef void _unlink(self, Holding holding) noexcept:
        if holding._previous != NULL:
            (<Holding><object>holding._previous)._next = holding._next
        else:
            self._viewed = holding._next
        if holding._next != NULL:
            (<Holding><object>holding._next)._previous = holding._previous
        if self._viewed == NULL and self._lingering:
            self._lingering = False
            if shmc_is_mine(self._handle):
                self._leave_quietly()
            self._unmap()

    def _has_views(self):
        """Whether views of blocks of this pool are alive."""
        return self._viewed != NULL

    def _ready_here(self):
        """In a forked child: open, also when it is closed but for what views look at."""
        cdef bint closed = self._closed and self._lingering
        if closed:
            self._closed = False
        try:
            self._ready()
        finally:
            if closed:
                self._closed = True

    cdef bint _lease_again(self, Holding holding) noexcept:
        cdef uint64_t index
        for index in range(holding._count):
            if not shmc_lease_again(self._handle, &holding._leases[index]):
                shmc_release(self._handle, holding._leases, index)
                return False
        return True

    cdef int _move_views(self, shmc_handle *previous) except -1:
        """Let the present handle hold what views look at; what it cannot, faults."""
        cdef list lost = []  # made first: the collector may drop views
        cdef PyObject *item = self._viewed
        cdef Holding holding
        cdef uint64_t index
        cdef bint written = False
        while item != NULL:
            holding = <Holding><object>item
            if holding._writable():
                written = True  # nothing may be mapped where it writes
            elif self._lease_again(holding):
                holding._era = self._era
            else:
                lost.append(holding)
            item = holding._next
        if shmc_keep_views(self._handle, previous, bool(lost), written):
            for holding in lost:
                for index in range(holding._count):
                    shmc_forbid_view(self._handle, &holding._leases[index])
        return 0

    cdef void _reserve_views(self) noexcept:
        if self._viewed != NULL:
            shmc_views_reserve(self._handle)

    cdef int _adopt(self, shmc_handle *previous) except -1:
        if self._viewed != NULL:
            self._join()
            self._move_views(previous)
        return 0

    cdef bint _linger(self) except -1:
        """While closing: a new owner holds what views look at; False when there is nothing to hold.

        Where nobody can join any more (a full table, a pool that has ended) the present owner stays
        as it is, until the last view has gone.
        """
        cdef shmc_handle *previous = self._handle
        cdef shmc_handle *following
        cdef PyObject *item = self._viewed
        if item == NULL:
            return False
        self._lingering = True
        following = self._open_same(self._fd)
        self._handle = following
        self._closed = False
        try:
            self._join()
        except BaseException as error:
            self._handle = previous
            shmc_close(following)
            if isinstance(error, (SegmentError, CachePoolError)):
                return True
            raise
        finally:
            self._closed = True
        self._era += 1
        self._move_views(previous)
        self._handle = previous
        try:
            self._leave()
        finally:
            self._handle = following
            shmc_close(previous)
        return True

    cdef int _check_closable(self) except -1:
        cdef PyObject *item = self._viewed
        while item != NULL:
            if isinstance(<object>item, Block):
                raise BufferError("a view of a block that is not published is alive")
            item = (<Holding><object>item)._next
        return 0

    # -- allocate

    def allocate(self, nbytes, *, manager=None, reservation=None, timeout=0):
        """A block of `nbytes` bytes to fill, charged on the host axis with the size of its class.

        What is not leased is evicted as needed. When everything is: reclaims dead owners, waits up
        to `timeout` seconds (None: for ever), then raises SegmentError.ArenaFull, or BudgetExceeded
        when it is the host axis that is full. `reservation` is consumed in the same change.
        `manager` is who the block is attributed to. The bytes are whatever they were.
        """
        deadline_ns = 0 if timeout is _AT_ONCE else self._deadline_ns(timeout)
        answer = self._allocate_now(nbytes, manager, reservation, False)
        if type(answer) is Block:
            return answer
        return self._allocate_patiently(nbytes, manager, reservation, deadline_ns, answer)

    def _allocate_once(self, nbytes, manager, reservation):
        """One attempt: the block, or the refusal as a value; other errors are raised."""
        return self._allocate_now(nbytes, manager, reservation, False)

    def _allocate_at_once(self, nbytes, manager, reservation):
        """The same without waiting for the lock: None when it is taken."""
        return self._allocate_now(nbytes, manager, reservation, True)

    cdef object _allocate_now(self, object nbytes, object manager,
                              CachePoolReservation reservation, bint at_once):
        cdef shmc_request request
        cdef int status
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_ALLOCATE
        request.bytes = _read_u64(nbytes, "nbytes")
        if request.bytes == 0:
            raise ValueError("a block has at least one byte")
        if manager is not None:
            request.has_manager = True
            request.id = _read_u64(manager, "manager")
        if reservation is not None:
            if (reservation._released or reservation._pool is not self
                    or reservation._guard != shmc_process_guard()):
                raise ValueError("the reservation was released already, or is another pool's")
            request.has_reservation = True
            request.token = reservation._token
        cdef Block block = Block.__new__(Block)  # made before it is needed
        status = SHMC_MORE
        while status == SHMC_MORE:
            status = self._run_for_token(&request, at_once)
        if status == SHMC_BUSY:
            return None
        if status == SHMC_OK:
            block._one = request.lease
            block._capacity = request.capacity
            block._guard = shmc_process_guard()
            block._hold(self, 1)
            if reservation is not None and not reservation._released:
                reservation._released = True
                self._tokens -= 1
            return block
        error = self._arena_error(status, &request)
        if status == SHMC_BUDGET_EXCEEDED or status == SHMC_ARENA_FULL:
            return error
        raise error

    cdef object _arena_error(self, int status, const shmc_request *request):
        if status == SHMC_ARENA_FULL:
            return SegmentError.ArenaFull(request.bytes, ())
        if status == SHMC_TOO_LARGE:
            return SegmentError.BlockTooLarge(
                request.bytes, shmc_header_of(self._handle).geometry.block_bytes_max)
        return _error(self, status, request)

    cdef int _seal(self, Block block) except -1:
        cdef shmc_request request
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_SEAL
        request.lease = block._one
        cdef int status
        block._busy = True
        try:
            status = self._run(&request)
        finally:
            block._busy = False
        if status != SHMC_OK:
            raise _error(self, status, &request)
        return 0

    cdef object _publish(self, Block block, object key, object parent, bint protected):
        cdef shmc_request request
        cdef Holding of_parent
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_PUBLISH
        request.lease = block._one
        request.protect = protected
        _read_key(key, request.key)
        if isinstance(parent, Holding):
            of_parent = parent
            of_parent._usable()
            if of_parent._pool is not self:
                raise ValueError("the parent is a block of another pool")
            if of_parent._count:
                request.parent_kind = SHMC_PARENT_LEASE
                request.parent = of_parent._leases[of_parent._count - 1]
        elif parent is not None:
            request.parent_kind = SHMC_PARENT_KEY
            _read_key(parent, request.parent_key)
        cdef Lease lease = Lease.__new__(Lease)
        cdef int status
        block._busy = True
        try:
            if self._verifies():
                request.checksum = self._checksum(block)
            status = self._run(&request)
        finally:
            block._busy = False
        if status != SHMC_OK:
            raise _error(self, status, &request)
        lease._one = request.lease
        lease._hold(self, 1)
        block._released = True
        block._published = True
        self._tokens -= 1
        return _new_tuple(_publish_result, (lease, True if request.created else False))

    cdef uint64_t _checksum(self, Block block) except? 0:
        """Of the block's bytes; other threads run meanwhile, and a close waits."""
        cdef uint64_t checksum
        cdef uint32_t era = self._era
        cdef void *address = shmc_write_address(self._handle, &block._one)
        self._calls += 1
        with nogil:
            checksum = shmc_checksum(address, block._one.bytes)
        if era == self._era:
            self._calls -= 1
        return checksum

    # -- find

    def lookup(self, key):
        """A lease on the block published under the key, or None."""
        cdef uint64_t[4] words
        cdef shmc_lease found_lease
        cdef uint64_t found = 0
        cdef int status = SHMC_FORKED
        cdef Lease lease
        _read_key(key, words)
        if not self._closed:
            status = shmc_match(self._handle, words, 1, &found_lease, &found)
        if status != SHMC_OK:
            found = self._match_slowly(status, words, 1, &found_lease)
        if found == 0:
            return None
        try:
            lease = Lease.__new__(Lease)
        except MemoryError:
            shmc_release(self._handle, &found_lease, 1)
            raise
        lease._one = found_lease
        lease._hold(self, 1)
        if self._verifies() and self._faithful(&lease._one, words, 1) == 0:
            lease._released = True
            return None
        return lease

    def match(self, keys):
        """Leases on the longest run of present keys from the first on, as one LeaseRun.

        Shapes: keys is (n, 32) uint8, or a sequence of 32-byte keys; the run may be empty.
        """
        cdef Py_buffer buffer
        cdef uint64_t found = 0, count
        cdef int status
        if isinstance(keys, (list, tuple)):
            for key in keys:
                if type(key) is not bytes or len(key) != KEY_BYTES:
                    raise ValueError(f"each key has {KEY_BYTES} bytes")
            keys = b"".join(keys)
        cdef LeaseRun run = LeaseRun.__new__(LeaseRun)
        PyObject_GetBuffer(keys, &buffer, PyBUF_C_CONTIGUOUS)
        try:
            if buffer.len % KEY_BYTES or buffer.itemsize != 1:
                raise ValueError(f"keys are (n, {KEY_BYTES}) uint8, unlike {buffer.len} bytes")
            count = <uint64_t>buffer.len // KEY_BYTES
            if count > 1:
                run._leases = <shmc_lease *>malloc(count * sizeof(shmc_lease))
                if run._leases == NULL:
                    run._leases = &run._one
                    raise MemoryError()
            status = SHMC_FORKED
            if not self._closed:
                status = shmc_match(self._handle, <uint64_t *>buffer.buf, count, run._leases, &found)
            if status != SHMC_OK:
                found = self._match_slowly(status, <uint64_t *>buffer.buf, count, run._leases)
            run._hold(self, found)
            if found and self._verifies():
                run._count = self._faithful(run._leases, <uint64_t *>buffer.buf, found)
        finally:
            PyBuffer_Release(&buffer)
        return run

    cdef uint64_t _match_slowly(self, int status, const uint64_t *keys, uint64_t count,
                                shmc_lease *leases) except? 0xffffffffffffffff:
        """After a status that a lookup alone cannot answer: a fork, a handle that has to join."""
        cdef shmc_request request
        cdef uint64_t found = 0
        self._ready()
        if status == SHMC_FORKED or (status == SHMC_NOT_JOINED and self._owns_slot):
            self._join()
            status = shmc_match(self._handle, keys, count, leases, &found)
        if status != SHMC_OK:
            memset(&request, 0, sizeof(request))
            raise _error(self, status, &request)
        return found

    cdef bint _verifies(self) noexcept:
        return (shmc_header_of(self._handle).geometry.flags & (
            SHMC_FLAG_VERIFY_FIRST | SHMC_FLAG_VERIFY_ALWAYS)) != 0

    cdef uint64_t _faithful(self, shmc_lease *leases, const uint64_t *keys,
                            uint64_t count) except? 0xffffffffffffffff:
        """How many of the leased blocks, from the first on, have the bytes that were published.

        The rest is released; a damaged one is withdrawn, and counted.
        """
        cdef shmc_request request
        cdef shmc_fidelity fidelity
        cdef uint64_t index
        for index in range(count):
            fidelity = shmc_verify_lease(self._handle, &leases[index])
            if fidelity == SHMC_DAMAGED:
                memset(&request, 0, sizeof(request))
                request.operation = SHMC_OP_INVALIDATE
                request.named = True
                request.lease = leases[index]
                memcpy(request.key, keys + index * 4, KEY_BYTES)
                self._run(&request)  # while all are leased: when it raises, the caller holds all
                shmc_release(self._handle, &leases[index], count - index)
                return index
        return count

    def contains(self, key):
        """Whether a block is published under the key; leases nothing and counts as no use."""
        cdef uint64_t[4] words
        cdef shmc_lease lease
        _read_key(key, words)
        self._ready_to_lease()
        return bool(shmc_contains(self._handle, words, &lease))

    def _stat(self, key):
        """(nbytes, capacity, generation, uses, protected, leased) or None."""
        cdef uint64_t[4] words
        cdef shmc_block_stat stat
        _read_key(key, words)
        self._ready_to_lease()
        if not shmc_stat(self._handle, words, &stat):
            return None
        return (stat.bytes, stat.capacity, stat.generation, stat.uses, bool(stat.is_protected),
                bool(stat.leased))

    cdef int _ready_to_lease(self) except -1:
        """Open, of this process, joined, and not ended."""
        cdef uint64_t found
        cdef int status = SHMC_FORKED
        if not self._closed:
            status = shmc_match(self._handle, NULL, 0, NULL, &found)
        if status != SHMC_OK:
            self._match_slowly(status, NULL, 0, NULL)
        return 0

    # -- withdraw, protect, evict

    def _for_key(self, int operation, key, bint flag):
        """One request that names a key; whether the key was present."""
        cdef shmc_request request
        memset(&request, 0, sizeof(request))
        request.operation = <shmc_operation>operation
        request.protect = flag
        _read_key(key, request.key)
        cdef int status = self._run(&request)
        if status != SHMC_OK and status != SHMC_ABSENT:
            raise _error(self, status, &request)
        return status == SHMC_OK

    def _evict(self, nbytes):
        """Evict until `nbytes` are free again or nothing more can go; returns the bytes freed."""
        cdef shmc_request request
        cdef uint64_t freed = 0
        cdef uint64_t goal = nbytes
        cdef int status = SHMC_MORE
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_EVICT
        while status == SHMC_MORE and freed < goal:
            request.bytes = goal - freed
            request.released = 0
            status = self._run(&request)
            freed += request.released
        if status not in (SHMC_OK, SHMC_MORE, SHMC_ARENA_FULL, SHMC_NO_ARENA):
            raise _error(self, status, &request)
        return freed

    # -- claim

    def _claim_once(self, key):
        """The claim, or None when another owner has it."""
        return self._claim_now(key, False)

    def _claim_at_once(self, key):
        """The same without waiting for the lock: False when it is taken."""
        return self._claim_now(key, True)

    cdef object _claim_now(self, object key, bint at_once):
        cdef shmc_request request
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_CLAIM
        _read_key(key, request.key)
        cdef Claim claim = Claim.__new__(Claim)
        claim._key = bytes(key)
        cdef int status = self._run_for_token(&request, at_once)
        if status == SHMC_BUSY:
            return False
        if status == SHMC_OK:
            claim._hold(self, &request)
            return claim
        if status == SHMC_CLAIMED:
            return None
        raise _error(self, status, &request)

    # -- reading

    def _arena_numbers(self):
        """(totals by name, rows of the classes in use, holdings per slot) of the arena."""
        cdef shmc_request request
        cdef shmc_arena_report report
        cdef uint64_t[64] leased
        cdef shmc_holding *rows
        cdef uint32_t index, owners
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_ARENA_REPORT
        request.arena_report = &report
        cdef int status = self._run(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        owners = self._owners_max()
        rows = <shmc_holding *>calloc(owners, sizeof(shmc_holding))
        if rows == NULL:
            raise MemoryError()
        shmc_census(self._handle, rows, leased)
        try:
            return _totals(&report), _class_rows(&report, leased), _holding_rows(rows, owners)
        finally:
            free(rows)

    def _snapshot(self):
        """Everything but blocks at one instant: (report, (reservations, recoveries), rows of
        owners, of managers, arena or None).

        A row of an owner: (slot, state, nonce, pid, start ticks, attach sequence, verdict), what it
        holds, what it has pins on, its counters. The arena: totals, rows of classes, slabs. Leases
        and counters are as they were a moment later.
        """
        cdef _Snapshot taken = _Snapshot()
        cdef shmc_request request
        cdef uint32_t k, counter
        cdef shmc_owner_view *owner
        self._ready()
        taken.make_room(shmc_header_of(self._handle))
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_SNAPSHOT
        request.snapshot = &taken.rows
        cdef int status = self._run(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        # No Python object is made meanwhile: the collector may run code that closes the pool.
        if shmc_header_of(self._handle).slabs_max:
            shmc_census(self._handle, taken.pinned, taken.leased)
        for k in range(taken.rows.owners_count):
            owner = &taken.rows.owners[k]
            taken.verdicts[k] = shmc_owner_verdict(self._handle, owner)
            for counter in range(SHMC_COUNTERS):
                taken.counters[k * SHMC_COUNTERS + counter] = shmc_read_counter(
                    self._handle, owner.slot, <shmc_counter>counter) - owner.counted[counter]
        return taken.told(self.id, self.limits)

    def _copy_tables(self):
        """All bytes of the segment before the arena, at one instant, in any state of the pool."""
        cdef shmc_request request
        self._ready()
        copy = bytearray(self._facts()[1])
        cdef unsigned char[::1] room = copy
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_COPY
        request.copy = &room[0]
        cdef int status = self._run(&request)
        if status != SHMC_OK:
            raise _error(self, status, &request)
        return copy

    def _arena_used(self):
        """Bytes of all blocks that are not free."""
        cdef shmc_request request
        cdef shmc_arena_report report
        memset(&request, 0, sizeof(request))
        request.operation = SHMC_OP_ARENA_REPORT
        request.arena_report = &report
        cdef int status = self._run(&request)
        if status == SHMC_NO_ARENA:
            return 0
        if status != SHMC_OK:
            raise _error(self, status, &request)
        return report.used_bytes

    def _prefault(self, uint64_t offset, uint64_t nbytes):
        """Fill this process's page tables for a part of the arena."""
        cdef bint done
        cdef int error = 0
        cdef uint32_t era
        self._ready()
        era = self._era
        self._calls += 1
        try:
            with nogil:
                done = shmc_prefault(self._handle, offset, nbytes)
                if not done:
                    error = errno
            era = self._serve_signals()
        finally:
            if era == self._era:
                self._calls -= 1
        if not done:
            raise SegmentError.HostError.of("madvise", OSError(error, ""))

    def _counters(self):
        """(hits, misses, hits the policy did not see, bad checksums) summed over all slots."""
        cdef uint32_t slot
        cdef uint64_t[4] sums
        cdef int counter
        self._ready()
        for counter in range(4):
            sums[counter] = 0
            for slot in range(self._owners_max()):
                sums[counter] += shmc_read_counter(self._handle, slot, <shmc_counter>counter)
        return sums[0], sums[1], sums[2], sums[3]

    def _slab_facts(self):
        """(bytes of a slab, number of slabs)."""
        self._ready()
        cdef const shmc_header *header = shmc_header_of(self._handle)
        return header.slab_bytes, header.slabs_max
