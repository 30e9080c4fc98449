# What an arena hands out: blocks to fill and leases to read, with their views. Included by _core.pyx.
#
# A view holds its block or lease, and that holds the pool: nothing is given back under a reader.

# The last dtype that was asked for, and what numpy made of it: programs use few. Only types and
# dtypes are kept, for what they name never changes.
cdef object _usual_question = None
cdef cnp.dtype _usual_dtype = None


cdef cnp.dtype _plain_dtype(object question):
    """The dtype, if shared memory can hold its elements."""
    global _usual_question, _usual_dtype
    cdef cnp.dtype dtype = question if isinstance(question, cnp.dtype) else cnp.dtype(question)
    if dtype.hasobject:
        raise TypeError("shared memory holds no Python objects")
    if dtype.itemsize == 0:
        raise ValueError(f"elements of {dtype!r} have no size")
    if question is dtype or isinstance(question, type):
        _usual_question, _usual_dtype = question, dtype
    return dtype


cdef bint _fits(const cnp.PyArray_Dims *shape, uint64_t elements) except -1:
    """Whether an array of this shape has at most so many elements."""
    cdef int axis
    cdef bint empty = False
    for axis in range(shape.len):
        if shape.ptr[axis] < 0:
            raise ValueError("negative dimensions are not allowed")
        empty |= shape.ptr[axis] == 0
    if empty:
        return True
    for axis in range(shape.len):
        if <uint64_t>shape.ptr[axis] > elements:
            return False
        elements //= <uint64_t>shape.ptr[axis]
    return True


@cython.freelist(16)
@cython.no_gc_clear
cdef class Holding:
    """One or more blocks in the hands of this process, and how many views look at them.

    Contract: `release()` is idempotent; while views live it raises BufferError and changes
    nothing. Dropping the last reference releases, without ever waiting.
    Fork: inert in a child, unless views were alive at the fork: those hold for the child as well.
    """

    cdef Arena _pool
    cdef shmc_lease _one
    cdef shmc_lease *_leases   # of one or of many
    cdef uint64_t _count
    cdef uint32_t _era         # of the pool's handle that knows the pins
    cdef uint32_t _views
    cdef bint _released
    cdef PyObject *_next       # in the pool's list of holdings with views
    cdef PyObject *_previous
    cdef object __weakref__

    def __cinit__(self):
        self._released = True
        self._leases = &self._one

    def __init__(self):
        raise TypeError(f"{type(self).__name__} objects are made by a pool")

    def __dealloc__(self):
        if not self._released:
            self._released = True
            self._give_back(True)
        if self._leases != &self._one:
            free(self._leases)

    cdef void _hold(self, Arena pool, uint64_t count) noexcept:
        self._pool = pool
        self._count = count
        self._era = pool._era
        self._released = False

    cdef int _give_back(self, bint quietly) except -1:
        if self._pool._handle != NULL and self._era == self._pool._era:
            shmc_release(self._pool._handle, self._leases, self._count)
        return 0

    @property
    def pool(self):
        """The pool that the blocks are in."""
        return self._pool

    @property
    def released(self):
        """Whether this object gave its blocks back."""
        return bool(self._released)

    def release(self):
        """Give the blocks back. Raises BufferError while views live; a second call does nothing."""
        if self._released:
            return
        if self._views:
            raise BufferError(f"{self._views} views of the {type(self).__name__} are alive")
        self._released = True
        self._give_back(False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def __copy__(self):
        raise TypeError(f"a {type(self).__name__} cannot be copied")

    def __deepcopy__(self, memo):
        raise TypeError(f"a {type(self).__name__} cannot be copied")

    def __reduce_ex__(self, protocol):
        raise TypeError(f"a {type(self).__name__} cannot be pickled: send its key")

    # -- views

    cdef int _usable(self) except -1:
        if self._released:
            raise ValueError(f"the {type(self).__name__} was released")
        if self._pool._handle == NULL or self._era != self._pool._era or not shmc_is_mine(
                self._pool._handle):
            raise ValueError(f"the {type(self).__name__} is not of this process, or its pool is closed")
        return 0

    cdef bint _writable(self) noexcept:
        return False

    cdef void *_address(self, uint64_t index) noexcept:
        if self._writable():
            return shmc_write_address(self._pool._handle, &self._leases[index])
        return <void *>shmc_read_address(self._pool._handle, &self._leases[index])

    cdef int _add_view(self) except -1:
        self._usable()
        if self._views == 0:
            self._pool._link(self)
        self._views += 1
        return 0

    cdef void _drop_view(self) noexcept:
        self._views -= 1
        if self._views == 0:
            self._pool._unlink(self)

    cdef View _view(self, uint64_t index):
        cdef View view = View.__new__(View)
        self._add_view()
        view._holding = self
        view._address = self._address(index)
        view._bytes = self._leases[index].bytes
        view._is_writable = self._writable()
        return view

    cdef object _array(self, uint64_t index, object question, object shape):
        """What `np.ndarray(shape, dtype, view)` makes, by numpy's C interface: a fifth of the time."""
        cdef cnp.dtype dtype = (
            _usual_dtype if question is _usual_question else _plain_dtype(question))
        cdef cnp.PyArray_Dims dims
        cdef View view = self._view(index)
        cdef int flags = (
            cnp.NPY_ARRAY_CARRAY if view._is_writable else cnp.NPY_ARRAY_CARRAY_RO)
        cdef object array
        cnp.PyArray_IntpConverter(shape, &dims)
        try:
            if not _fits(&dims, view._bytes // <uint64_t>dtype.itemsize):
                raise ValueError(
                    f"an array of {dtype} {shape} does not fit {view._bytes} bytes")
            Py_INCREF(dtype)  # for the array to keep
            array = PyArray_NewFromDescr(
                <PyTypeObject *>cnp.ndarray, <PyArray_Descr *>dtype, dims.len, dims.ptr, NULL,
                view._address, flags, NULL)
        finally:
            PyDimMem_FREE(dims.ptr)
        cnp.set_array_base(array, view)
        return array


@cython.no_gc_clear
@cython.freelist(16)
cdef class View:
    """Keeps a holding, and lends its bytes to whoever asks by the buffer protocol."""

    cdef Holding _holding
    cdef void *_address
    cdef uint64_t _bytes
    cdef bint _is_writable

    def __init__(self):
        raise TypeError("View objects are made by a block or a lease")

    def __dealloc__(self):
        if self._holding is not None:
            self._holding._drop_view()

    cdef int _lend(self, Py_buffer *buffer, int flags) except -1:
        return PyBuffer_FillInfo(buffer, self, self._address, <Py_ssize_t>self._bytes,
                                 not self._is_writable, flags)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        self._lend(buffer, flags)


@cython.no_gc_clear
cdef class Lease(Holding):
    """The right to read one published block, as long as this object or a view of it lives.

    Shapes: `array(dtype, shape)` is a read-only numpy view without a copy; the buffer protocol gives
    the bytes. Units: `nbytes` as the publisher asked for.
    """

    @property
    def nbytes(self):
        """Bytes of the block, as asked for when it was allocated."""
        return self._one.bytes

    @property
    def generation(self):
        """With `block`, the name of this very content."""
        return self._one.generation

    @property
    def block(self):
        """Number of the block in the arena."""
        return self._one.block

    def array(self, dtype, shape):
        """A read-only array of this dtype and shape over the block's first bytes, without a copy.

        Raises ValueError when it does not fit, or after release.
        """
        return self._array(0, dtype, shape)

    def memoryview(self):
        """The block's bytes, read-only."""
        return memoryview(self._view(0))

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef View view = self._view(0)
        view._lend(buffer, flags)  # which makes the view the owner of the buffer

    def __dlpack__(self, **how):
        return self._array(0, "uint8", self._one.bytes).__dlpack__(**how)

    def __dlpack_device__(self):
        return (1, 0)  # kDLCPU

    def __len__(self):
        return self._one.bytes

    def __repr__(self):
        state = "released" if self._released else "live"
        return f"<Lease {state} block={self._one.block} nbytes={self._one.bytes}>"


@cython.no_gc_clear
cdef class LeaseRun(Holding):
    """Leases on the blocks of a run of keys, released together; `len()` says how many there are."""

    cdef uint64_t _at(self, object index) except? 0xffffffffffffffff:
        cdef Py_ssize_t position = index
        if position < 0:
            position += <Py_ssize_t>self._count
        if not 0 <= position < <Py_ssize_t>self._count:
            raise IndexError(f"a run of {self._count} blocks has no block {index}")
        return position

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return memoryview(self._view(self._at(index)))

    def nbytes(self, index):
        """Bytes of one block."""
        return self._leases[self._at(index)].bytes

    def array(self, index, dtype, shape):
        """As `Lease.array`, of the block at this place of the run."""
        return self._array(self._at(index), dtype, shape)

    def arrays(self, dtype, shape):
        """The arrays of all blocks, in order."""
        return [self._array(index, dtype, shape) for index in range(self._count)]

    def __repr__(self):
        return f"<LeaseRun {'released' if self._released else 'live'} of {self._count} blocks>"


@cython.no_gc_clear
cdef class Block(Holding):
    """Memory that this process fills: allocate, write, perhaps seal, publish.

    Contract: `seal`, `publish` and `release` raise BufferError while views live, and change nothing.
    Death: an unpublished block of a dead owner is free again after reclaim.
    """

    cdef uint64_t _capacity
    cdef uint64_t _guard
    cdef bint _sealed
    cdef bint _published
    cdef bint _busy  # being sealed or published by a thread that let others run

    cdef bint _writable(self) noexcept:
        return not self._sealed

    cdef int _give_back(self, bint quietly) except -1:
        cdef shmc_token token
        token.index = self._one.block
        token.generation = self._one.generation
        if quietly:
            self._pool._release_from_finalizer(SHMC_OP_DISCARD, token, self._guard)
        else:
            self._pool._release(SHMC_OP_DISCARD, token, self._guard)
        return 0

    @property
    def nbytes(self):
        """Bytes asked for."""
        return self._one.bytes

    @property
    def capacity(self):
        """Bytes charged on the host axis: the size of the block's class."""
        return self._capacity

    @property
    def sealed(self):
        """Whether the bytes can still be written."""
        return bool(self._sealed)

    def array(self, dtype, shape):
        """A writable array over the block's first bytes; read-only once sealed."""
        return self._array(0, dtype, shape)

    def memoryview(self):
        """The block's bytes; read-only once sealed."""
        return memoryview(self._view(0))

    def release(self):
        """Give the memory back. Raises BufferError while views live; a second call does nothing."""
        if self._busy:
            self._usable()
        Holding.release(self)

    def seal(self):
        """Make the bytes immutable. Raises BufferError while views live."""
        if not self._sealed:
            self._refuse_views()
            self._pool._seal(self)
            self._sealed = True

    def publish(self, key, *, parent=None, protected=False):
        """Make the block visible under the key; returns PublishResult(lease, created).

        A key that is there already: the lease is on the block that is there, this one's memory is
        free again, `created` is False. `parent` (a lease, a run, or a key) is the block before this
        one in its prefix: children are evicted before their parents. `protected` blocks are not
        evicted at all. Raises BufferError while views live, ValueError once released.
        """
        self._refuse_views()
        return self._pool._publish(self, key, parent, protected)

    cdef int _usable(self) except -1:
        Holding._usable(self)
        if self._busy:
            raise ValueError("the Block is being sealed or published by another thread")
        return 0

    cdef int _refuse_views(self) except -1:
        self._usable()
        if self._views:
            raise BufferError(f"{self._views} views of the block are alive")
        return 0

    def __repr__(self):
        state = ("published" if self._published else "released" if self._released
                 else "busy" if self._busy else "sealed" if self._sealed else "writing")
        return f"<Block {state} nbytes={self._one.bytes} capacity={self._capacity}>"


@cython.no_gc_clear
cdef class Claim(Token):
    """This process is making the block of a key; others that ask wait for it. Made by `claim()`."""

    cdef bytes _key

    cdef void _hold(self, Attachment pool, const shmc_request *request) noexcept:
        self._bind(pool, SHMC_OP_RELEASE_CLAIM, request.token)

    @property
    def key(self):
        """The key that is claimed."""
        return self._key

    def __repr__(self):
        return f"<Claim {'released' if self._released else 'live'} {self._key.hex()[:16]}>"
