# cython: language_level=3, boundscheck=False, wraparound=False, binding=True
"""Bind the C engine: one attachment, its tokens, and the table from statuses to errors.

Why         Admission must cost about what a lock costs, and a token must give back its charge
            from any finalizer of any thread without ever waiting there. Both want extension
            types.
Contract    `Attachment` is subclassed once, by `CacheResidencyPool`, which adds whatever is slow:
            files, sweeping before a refusal, waiting for capacity. Nothing here decides a policy.
Concurrency Fast calls keep the GIL and try the lock for a few microseconds. When it stays taken
            they release the GIL and wait in slices; signals are served between slices, before the
            lock is held, so a handler may call into the pool.
Death       As the engine says. A token whose process forked is inert in the child.
Fork        The first use of an inherited attachment opens the segment anew, as a new owner.
Errors      One table: a status without an entry is a mistake that a test finds.

core/engine.pxi declares the engine, core/attachment.pxi is the attachment, core/telling.pxi what
sessions tell all processes, core/watching.pxi the sleep of who waits for several pools,
core/tokens.pxi the tokens, core/arena.pxi what an attachment does in the arena, core/leases.pxi
what that hands out, core/sections.pxi locks for what is above.
"""
cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t, UINT32_MAX
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from posix.unistd cimport close as close_descriptor
from cpython.list cimport PyList_GET_ITEM
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF

import collections
import os
import threading
import time
import types

from shmcache.bounds import LOCK_DEADLINE_NS, LOCK_SLICE_NS, u64
from shmcache.errors import CachePoolError, CacheResidencyError, ContractError, SegmentError

include "core/engine.pxi"

cnp.import_array()

cdef enum:
    AXES = 4

cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyArray_Descr:
        pass

    # Steals the reference to its descr, which Cython cannot say of an object.
    object PyArray_NewFromDescr(
        PyTypeObject *subtype, PyArray_Descr *descr, int nd, const cnp.npy_intp *dims,
        const cnp.npy_intp *strides, void *data, int flags, PyObject *obj)
    void PyDimMem_FREE(cnp.npy_intp *dims)

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

    ctypedef struct PyMemberDef:
        Py_ssize_t offset

    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member

cdef uint64_t SLICE_NS = LOCK_SLICE_NS

STATE_ACTIVE, STATE_RETIRED, STATE_POISONED = (
    SHMC_POOL_ACTIVE, SHMC_POOL_RETIRED, SHMC_POOL_POISONED)
VERDICT_ALIVE, VERDICT_DEAD, VERDICT_UNKNOWN = SHMC_ALIVE, SHMC_DEAD, SHMC_UNKNOWN
OWNER_CLEANING = SHMC_OWNER_CLEANING
LAYOUT_VERSION = SHMC_VERSION
FLAG_VERIFY_FIRST, FLAG_VERIFY_ALWAYS, FLAG_HUGE_THP, FLAG_HUGETLB = (
    SHMC_FLAG_VERIFY_FIRST, SHMC_FLAG_VERIFY_ALWAYS, SHMC_FLAG_HUGE_THP, SHMC_FLAG_HUGETLB)
OP_INVALIDATE, OP_PROTECT = SHMC_OP_INVALIDATE, SHMC_OP_PROTECT

# ---- values of higher layers, told once by pool/ -----------------------------------------------

cdef object _usage_type = None
cdef object _report_type = None
cdef tuple _resources = ()
cdef object _publish_result = None
cdef object _new_tuple = tuple.__new__  # makes a named tuple without the Python of its own __new__
# Where a usage keeps its four fields: reading them as attributes would cost half of an admission.
cdef Py_ssize_t _usage_offsets[AXES]


def bind_publish_result(publish_result):
    """Tell the binding what a publication answers."""
    global _publish_result
    _publish_result = publish_result


def bind_values(usage_type, report_type, resources):
    """Tell the binding the classes of usages and reports; `resources` in the order of the axes."""
    global _usage_type, _report_type, _resources
    for axis, field in enumerate(usage_type.__struct_fields__):
        _usage_offsets[axis] = _member_offset(usage_type, field)
    _usage_type, _report_type, _resources = usage_type, report_type, tuple(resources)


cdef int _read_usage(object usage, uint64_t *axes) except -1:
    cdef int axis
    cdef PyObject *value
    if type(usage) is not _usage_type:
        raise TypeError(f"usage must be a CachePoolUsage, not {type(usage).__name__}")
    for axis in range(AXES):
        value = (<PyObject **>(<char *><PyObject *>usage + _usage_offsets[axis]))[0]
        if value == NULL:
            raise TypeError("usage has a field without a value")
        axes[axis] = <object>value
    return 0


cdef uint64_t _read_u64(object value, str what) except? 0xffffffffffffffff:
    """As `u64`, which is called only with what is not a small number."""
    cdef int overflow = 0
    cdef long long number
    if type(value) is int:
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and number >= 0:
            return <uint64_t>number
    return u64(value, what)


cdef object _make_usage(const uint64_t *axes):
    return _usage_type(axes[0], axes[1], axes[2], axes[3])


# ---- statuses and errors -----------------------------------------------------------------------

cdef object _error(Attachment pool, int status, const shmc_request *request):
    if status == SHMC_BUDGET_EXCEEDED:
        return CachePoolError.BudgetExceeded(
            _resources[request.axis], request.required, request.budget)
    if status == SHMC_DUPLICATE_MANAGER:
        return CachePoolError.DuplicateManager(request.id)
    if status == SHMC_UNKNOWN_MANAGER:
        return CachePoolError.UnknownManager(request.id)
    make = _ERRORS.get(status)
    if make is None:
        return SegmentError.Corrupt(f"the engine answered {status_name(status)}")
    return make(pool)


# Statuses that need nothing but the pool to be told; the three above carry numbers of the request.
cdef dict _ERRORS = {
    SHMC_POISONED: lambda pool: CachePoolError.Poisoned(),
    SHMC_CORRUPT: lambda pool: CachePoolError.Poisoned(),
    SHMC_RETIRED: lambda pool: SegmentError.Retired(pool.name),
    SHMC_LOST_SLOT: lambda pool: SegmentError.Corrupt("this process lost its owner slot"),
    SHMC_PUBLICATION_OVERFLOW: lambda pool: CachePoolError.AccountingOverflow(
        "manager_publication"),
    SHMC_ADMISSION_OVERFLOW: lambda pool: CachePoolError.AccountingOverflow(
        "admission_validation"),
    SHMC_MANAGERS_FULL: lambda pool: SegmentError.TableFull("managers", pool._capacity(0)),
    SHMC_RESERVATIONS_FULL: lambda pool: SegmentError.TableFull(
        "reservations", pool._capacity(1)),
    SHMC_OWNERS_FULL: lambda pool: SegmentError.OwnersFull(pool._capacity(2)),
    SHMC_STALE: lambda pool: ValueError("the reservation or block was released already"),
    SHMC_CLAIMS_FULL: lambda pool: SegmentError.TableFull("claims", pool._capacity(3)),
    SHMC_CLASSES_FULL: lambda pool: SegmentError.TableFull("block sizes", SHMC_CLASSES_MAX),
    SHMC_NO_ARENA: lambda pool: SegmentError.NoArena(pool.name),
    SHMC_NOT_JOINED: lambda pool: TypeError("an observer holds nothing: attach to the pool"),
}


def status_name(int status):
    """The engine's name of a status."""
    return shmc_status_name(<shmc_status>status).decode()


def status_table():
    """(name, retry, has an error) of every status, for the test that proves the table total."""
    carried = (SHMC_BUDGET_EXCEEDED, SHMC_DUPLICATE_MANAGER, SHMC_UNKNOWN_MANAGER,
               SHMC_ARENA_FULL, SHMC_TOO_LARGE, SHMC_LIVE_FILES)
    return [
        (status_name(status), bool(shmc_status_retry(<shmc_status>status)),
         status in _ERRORS or status in carried)
        for status in range(SHMC_STATUS_COUNT)
    ]


cdef object _open_error(int status, const shmc_refusal *refusal, str call):
    if status == SHMC_REFUSED:
        check = shmc_check_name_text(refusal.check).decode().lower()
        return SegmentError.Refused(check, refusal.expected, refusal.actual)
    return SegmentError.HostError.of(call, OSError(errno, ""))


# ---- segments without a handle -----------------------------------------------------------------

cdef int _read_geometry(object spec, shmc_geometry *geometry) except -1:
    memset(geometry, 0, sizeof(shmc_geometry))
    geometry.limits[0] = spec.limits.device_bytes
    geometry.limits[1] = spec.limits.host_bytes
    geometry.limits[2] = spec.limits.transfer_in_flight_bytes
    geometry.limits[3] = spec.limits.disk_bytes
    geometry.arena_bytes = spec.arena_bytes
    geometry.blocks_max = spec.blocks_max
    geometry.block_bytes_max = spec.block_bytes_max
    geometry.free_low_bytes = spec.free_low_bytes
    geometry.free_high_bytes = spec.free_high_bytes
    geometry.claims_max = spec.claims_max
    geometry.owners_max = spec.owners_max
    geometry.managers_max = spec.managers_max
    geometry.reservations_max = spec.reservations_max
    geometry.eviction_policy = spec.eviction_policy
    geometry.flags = spec.flags
    geometry.mode = spec.mode
    return 0


def segment_bytes(spec):
    """Bytes of a segment of this geometry; 0 when the engine refuses the geometry."""
    cdef shmc_geometry geometry
    _read_geometry(spec, &geometry)
    return shmc_segment_bytes(&geometry)


def tables_bytes(spec):
    """The same of what stands before the arena."""
    cdef shmc_geometry geometry
    _read_geometry(spec, &geometry)
    return shmc_tables_bytes(&geometry)


def format_segment(int fd, spec):
    """Write a valid, empty segment into the file, which has `segment_bytes(spec)` bytes."""
    cdef shmc_geometry geometry
    cdef shmc_refusal refusal
    _read_geometry(spec, &geometry)
    cdef int status = shmc_format(fd, &geometry, &refusal)
    if status != SHMC_OK:
        raise _open_error(status, &refusal, "format")


def nonce_is_local(nonce):
    """Whether an attachment of this very process has this nonce."""
    return bool(shmc_nonce_is_local(nonce))


def problem_texts():
    """What each kind of finding of `verify` means, by its number."""
    return [shmc_problem_text(<shmc_problem_kind>kind).decode()
            for kind in range(SHMC_PROBLEM_KINDS)]


include "core/sections.pxi"
include "core/attachment.pxi"
include "core/watching.pxi"
include "core/telling.pxi"

cdef class Arena(Attachment)  # in arena.pxi; what it hands out comes first

include "core/tokens.pxi"
include "core/leases.pxi"
include "core/arena.pxi"
