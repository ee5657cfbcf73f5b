# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Copies between callers' memory and the pool, with the checksum made on the way.

Everything that can be wrong is checked while the GIL is held; then one block without it per batch.
Addresses are trusted: that a mapping or a buffer is alive is the business of the caller (``Spans``
keeps its wrappers, and they their objects).
"""

from __future__ import annotations

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy as c_memcpy

import builtins
import os


cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1


cdef extern from "place.h" nogil:
    cdef struct ems_place:
        uint64_t length


cdef extern from "copy.h" nogil:
    cdef struct ems_piece:
        uint64_t address
        uint64_t nbytes

    cdef struct ems_spans:
        size_t nkeys
        const uint64_t *first
        const uint64_t *lengths
        const ems_piece *pieces

    cdef struct ems_copy_limits:
        const int *cancelled
        uint64_t deadline_ns

    const char *ems_copy_setup(const char *name)
    cdef struct ems_batch:
        const ems_spans *spans
        size_t first, count
        unsigned char *base
        ems_place *places
        const unsigned char *mask
        const ems_copy_limits *limits
        int into_pool, verify
        uint32_t *arrived

    size_t ems_copy_batch(const ems_batch *batch, int *reason)
    void ems_copy_set_threads(unsigned count)
    uint64_t ems_checksum(const void *source, size_t nbytes)
    void ems_stream_copy(void *target, const void *source, size_t nbytes)


cdef extern from *:
    """
    #include <sched.h>
    #include <unistd.h>

    static inline void ems_flag_raise(int *flag)
    {
        __atomic_store_n(flag, 1, __ATOMIC_RELEASE);
    }

    static inline int ems_flag_get(const int *flag)
    {
        return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    }

    static inline int ems_piece_is_there(const uint32_t *arrived, uint32_t piece)
    {
        return __atomic_load_n(arrived, __ATOMIC_ACQUIRE) > piece;
    }

    /* Awake at first: a piece takes less time than to fall asleep and be woken. */
    static inline void ems_await_piece(const uint32_t *arrived, uint32_t piece)
    {
        for (unsigned turn = 0; !ems_piece_is_there(arrived, piece); turn++)
            if (turn < 200)
                sched_yield();
            else
                usleep(20);
    }

    static inline void ems_pieces_end(uint32_t *arrived)
    {
        __atomic_store_n(arrived, UINT32_MAX, __ATOMIC_RELEASE);
    }
    """
    void ems_flag_raise(int *flag) nogil
    int ems_flag_get(const int *flag) nogil
    int ems_piece_is_there(const uint32_t *arrived, uint32_t piece) nogil
    void ems_await_piece(const uint32_t *arrived, uint32_t piece) nogil
    void ems_pieces_end(uint32_t *arrived) nogil


cdef uint64_t LIMIT = <uint64_t>1 << 63
cdef object _argument_error = ValueError
cdef str _implementation = ""


def set_argument_error(factory):
    """Let ``factory(text)`` make what wrong arguments raise; ``ValueError`` until then."""
    global _argument_error
    _argument_error = factory


def _select(name=None):
    """Choose the inner loops by name, or the best of this CPU; for tests, with no copy running."""
    global _implementation
    cdef bytes encoded
    cdef const char *chosen
    if name is None:
        chosen = ems_copy_setup(NULL)
    else:
        encoded = name.encode()
        chosen = ems_copy_setup(encoded)
    if chosen is NULL:
        raise ValueError(f"copy implementation {name!r} does not exist on this machine")
    _implementation = chosen.decode()


def implementation():
    """Return the name of the inner loops in use."""
    return _implementation


def set_threads(unsigned count):
    """Let ``count`` threads copy one big batch, the caller's among them; 1 until told otherwise."""
    ems_copy_set_threads(count)


try:
    _select(os.environ.get("EMS_COPY_IMPL") or None)
except ValueError as error:
    raise ImportError(f"EMS_COPY_IMPL: {error}") from None


include "_buffers.pxi"


cdef class CancelFlag:
    """Set once, by any thread; a copy that looks at it ends within a slice."""

    cdef int _flag

    def set(self):
        """Cancel: for good, as there is no way back."""
        ems_flag_raise(&self._flag)

    @property
    def is_set(self):
        """Whether ``set`` was called."""
        return ems_flag_get(&self._flag) != 0


cdef class Arrivals:
    """How many pieces of each key a copy out of the pool has brought so far."""

    cdef uint32_t _pieces

    def wait(self, uint32_t piece):
        """Return when piece number ``piece`` of all keys is there, or the copy has ended."""
        if not ems_piece_is_there(&self._pieces, piece):
            with nogil:
                ems_await_piece(&self._pieces, piece)

    def end(self):
        """Let nobody wait any more."""
        ems_pieces_end(&self._pieces)


cdef ems_place *_check_batch(Spans spans, Py_ssize_t first, Py_ssize_t count, Py_buffer *view,
                             const unsigned char *mask) except NULL:
    """Check the keys of a batch against its places: every length must be that of the place."""
    cdef ems_place *places = <ems_place *>view.buf
    cdef Py_ssize_t k
    if first < 0 or count < 0 or first > <Py_ssize_t>spans._c.nkeys - count:
        raise ValueError(f"keys {first} to {first + count} of {spans._c.nkeys}")
    if view.len < (first + count) * 40:
        raise ValueError(
            f"places has {view.len} bytes, {first + count} keys need {(first + count) * 40}"
        )
    if <uintptr_t>places % 8:
        raise ValueError("places is not aligned to 8 bytes")
    for k in range(first, first + count):
        if (mask is NULL or mask[k]) and places[k].length != spans._c.lengths[k]:
            have, room = spans._c.lengths[k], places[k].length
            raise ValueError(f"key {k} has {have} bytes, its place {room}")
    return places


def copy_in(Spans spans not None, Py_ssize_t first, Py_ssize_t count, uintptr_t base,
            bytearray places not None, CancelFlag cancel, uint64_t deadline_ns, bytes mask=None):
    """Copy the pieces of ``count`` keys into their places behind ``base``.

    The checksums are written into ``places``. Keys with ``mask[k] == 0`` are left out. Returns the
    next key that is not completely done and why: 0 all done, 1 the deadline (CLOCK_MONOTONIC ns,
    0 = none) passed, 2 cancelled. The GIL is released.
    """
    cdef const unsigned char *chosen = NULL
    cdef ems_copy_limits limits
    cdef ems_batch batch
    cdef Py_buffer view
    cdef size_t key
    cdef int reason = 0
    if mask is not None:
        if PyBytes_GET_SIZE(mask) < first + count:
            raise ValueError(f"mask has {len(mask)} bytes for {first + count} keys")
        chosen = <const unsigned char *>PyBytes_AS_STRING(mask)
    limits.cancelled = NULL if cancel is None else &cancel._flag
    limits.deadline_ns = deadline_ns
    PyObject_GetBuffer(places, &view, PyBUF_WRITABLE)
    try:
        batch = ems_batch(
            &spans._c, first, count, <unsigned char *>base,
            _check_batch(spans, first, count, &view, chosen), chosen, &limits, True, False, NULL,
        )
        with nogil:
            key = ems_copy_batch(&batch, &reason)
    finally:
        PyBuffer_Release(&view)
    return key, reason


def copy_out(Spans spans not None, Py_ssize_t first, Py_ssize_t count, uintptr_t base,
             bytearray places not None, CancelFlag cancel, uint64_t deadline_ns, bint verify,
             Arrivals arrivals=None):
    """Copy the values of ``count`` keys from their places behind ``base`` to their pieces.

    Returns the next key that is not completely done and why: 0 all done, 1 the deadline passed,
    2 cancelled, 3 (only with ``verify``) the bytes of that key, which were copied, have another
    checksum than its place. The GIL is released.

    With ``arrivals`` the first piece of all keys is copied first, then the second, and so on; it is
    told of each. Then checksums are compared at the end, and no key is done before.
    """
    cdef ems_copy_limits limits
    cdef ems_batch batch
    cdef Py_buffer view
    cdef size_t key
    cdef int reason = 0
    cdef uint32_t *arrived = NULL
    if arrivals is not None:
        arrived = &arrivals._pieces
    if spans.readonly:
        raise ValueError(f"piece {spans.first_readonly()} of the batch is read-only")
    limits.cancelled = NULL if cancel is None else &cancel._flag
    limits.deadline_ns = deadline_ns
    PyObject_GetBuffer(places, &view, PyBUF_SIMPLE)
    try:
        batch = ems_batch(
            &spans._c, first, count, <unsigned char *>base,
            _check_batch(spans, first, count, &view, NULL), NULL, &limits, False, verify,
            arrived,
        )
        with nogil:
            key = ems_copy_batch(&batch, &reason)
    finally:
        PyBuffer_Release(&view)
    return key, reason


def checksum(uintptr_t address, size_t nbytes):
    """Return the checksum of a value that lies at ``address``."""
    cdef uint64_t value
    with nogil:
        value = ems_checksum(<const void *>address, nbytes)
    return value


def memcpy(uintptr_t dst, uintptr_t src, size_t nbytes):
    """Copy with the C library: the roof that benchmarks compare with."""
    with nogil:
        c_memcpy(<void *>dst, <const void *>src, nbytes)


def stream_copy(uintptr_t dst, uintptr_t src, size_t nbytes):
    """Copy past the caches, whatever the size."""
    with nogil:
        ems_stream_copy(<void *>dst, <const void *>src, nbytes)


def memcpy_many(list dsts not None, list srcs not None, size_t nbytes):
    """Copy ``nbytes`` from each of ``srcs`` to its partner in ``dsts`` with the C library."""
    cdef Py_ssize_t n = len(dsts), i
    cdef uintptr_t *pairs
    if len(srcs) != n:
        raise ValueError(f"{n} targets and {len(srcs)} sources")
    pairs = <uintptr_t *>malloc((2 * n + 1) * sizeof(uintptr_t))
    if pairs is NULL:
        raise MemoryError(f"no memory for {n} addresses")
    try:
        for i in range(n):
            pairs[2 * i] = dsts[i]
            pairs[2 * i + 1] = srcs[i]
        with nogil:
            for i in range(n):
                c_memcpy(<void *>pairs[2 * i], <const void *>pairs[2 * i + 1], nbytes)
    finally:
        free(pairs)
