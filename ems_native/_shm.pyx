# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Shared memory: mappings at huge-page alignment, page preparation, atomic counters, the clock.

Addresses are plain integers and stay valid until their owner unmaps them: nothing here keeps a
mapping alive.
"""

from __future__ import annotations

from libc.errno cimport EAGAIN, EINTR, EINVAL, errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t

import os


cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <sys/vfs.h>
    #include <time.h>

    #ifndef MADV_POPULATE_READ
    #define MADV_POPULATE_READ 22
    #define MADV_POPULATE_WRITE 23
    #endif
    #ifndef MADV_COLLAPSE
    #define MADV_COLLAPSE 25
    #endif

    #define EMS_HUGE ((size_t)2 << 20)

    static size_t ems_round_huge(size_t nbytes)
    {
        return (nbytes + EMS_HUGE - 1) & ~(EMS_HUGE - 1);
    }

    /* A mapping owns its address range up to the next huge page: the kernel rounds those of
     * hugetlbfs itself, and an inaccessible rest behind the others does no harm. So munmap need
     * not know which kind it was. */
    static void *ems_map(int fd, size_t nbytes, int protection)
    {
        size_t owned = ems_round_huge(nbytes), slack = owned + EMS_HUGE;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        char *area = mmap(NULL, slack, PROT_NONE, flags, -1, 0);
        char *start;

        if (area == MAP_FAILED)
            return NULL;
        start = (char *)(((uintptr_t)area + EMS_HUGE - 1) & ~(uintptr_t)(EMS_HUGE - 1));
        if (mmap(start, nbytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
            int why = errno;

            munmap(area, slack);
            errno = why;
            return NULL;
        }
        if (start > area)
            munmap(area, (size_t)(start - area));
        if (area + slack > start + owned)
            munmap(start + owned, (size_t)(area + slack - (start + owned)));
        madvise(start, nbytes, MADV_DONTFORK);
        madvise(start, nbytes, MADV_DONTDUMP);
        return start;
    }

    static int ems_unmap(void *start, size_t nbytes)
    {
        return munmap(start, ems_round_huge(nbytes));
    }

    static int ems_populate(void *start, size_t nbytes, int write)
    {
        return madvise(start, nbytes, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    }

    static int ems_collapse(void *start, size_t nbytes)
    {
        return madvise(start, nbytes, MADV_COLLAPSE);
    }

    static int ems_statfs_magic(const char *path, int64_t *magic)
    {
        struct statfs facts;

        if (statfs(path, &facts))
            return -1;
        *magic = (int64_t)(unsigned long)facts.f_type;
        return 0;
    }

    static uint64_t ems_monotonic_ns(void)
    {
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }

    static inline void ems_counter_add(uint64_t *counter, int64_t n)
    {
        __atomic_fetch_add(counter, (uint64_t)n, __ATOMIC_RELAXED);
    }

    static inline uint64_t ems_counter_get(const uint64_t *counter)
    {
        return __atomic_load_n(counter, __ATOMIC_RELAXED);
    }

    static inline void ems_counter_clear(uint64_t *counter)
    {
        __atomic_store_n(counter, 0, __ATOMIC_RELAXED);
    }
    """
    int PROT_READ
    int PROT_WRITE
    size_t EMS_HUGE
    void *ems_map(int fd, size_t nbytes, int protection) nogil
    int ems_unmap(void *start, size_t nbytes) nogil
    int ems_populate(void *start, size_t nbytes, int write) nogil
    int ems_collapse(void *start, size_t nbytes) nogil
    int ems_statfs_magic(const char *path, int64_t *magic) nogil
    uint64_t ems_monotonic_ns() nogil
    void ems_counter_add(uint64_t *counter, int64_t n) nogil
    uint64_t ems_counter_get(const uint64_t *counter) nogil
    void ems_counter_clear(uint64_t *counter) nogil


cdef object _os_error(int number, str what):
    return OSError(number, f"{what}: {os.strerror(number)}")


def map_file(int fd, size_t nbytes, bint writable):
    """Map the first ``nbytes`` of ``fd``, shared, at a multiple of 2 MiB.

    A forked child does not inherit the mapping, a core dump does not hold it.
    """
    cdef void *start
    cdef int protection = PROT_READ | PROT_WRITE if writable else PROT_READ
    if nbytes == 0:
        raise ValueError("nbytes is 0, a mapping has at least one byte")
    with nogil:
        start = ems_map(fd, nbytes, protection)
    if start is NULL:
        raise _os_error(errno, f"cannot map {nbytes} bytes")
    return <uintptr_t>start


def unmap(uintptr_t address, size_t nbytes):
    """Undo ``map_file`` with the same size."""
    cdef int failed
    if address == 0 or address % EMS_HUGE:
        raise ValueError(f"address {address:#x} is not one that map_file returned")
    with nogil:
        failed = ems_unmap(<void *>address, nbytes)
    if failed:
        raise _os_error(errno, f"cannot unmap {nbytes} bytes at {address:#x}")


def populate(uintptr_t address, size_t nbytes, bint write):
    """Fault in a page-aligned range of a mapping, for writing or reading.

    False if the kernel cannot (before 5.14).
    """
    cdef int failed, number = 0
    while True:
        with nogil:
            failed = ems_populate(<void *>address, nbytes, write)
            if failed:
                number = errno
        if not failed:
            return True
        if number == EINVAL:
            return False
        if number != EINTR and number != EAGAIN:
            raise _os_error(number, f"cannot populate {nbytes} bytes at {address:#x}")


def collapse(uintptr_t address, size_t nbytes):
    """Ask for huge pages in a range of populated tmpfs memory; never raises.

    True if all aligned 2 MiB of the range are huge pages now, and there is at least one.
    """
    cdef int failed
    cdef uintptr_t start = (address + EMS_HUGE - 1) // EMS_HUGE * EMS_HUGE
    cdef uintptr_t end = (address + nbytes) // EMS_HUGE * EMS_HUGE
    if end <= start:
        return False
    with nogil:
        failed = ems_collapse(<void *>start, end - start)
    return failed == 0


def filesystem_magic(path):
    """Return the type of the file system of ``path`` (statfs ``f_type``; 0x01021994 is tmpfs)."""
    cdef bytes encoded = os.fsencode(path)
    cdef const char *name = encoded
    cdef int64_t magic = 0
    cdef int failed
    with nogil:
        failed = ems_statfs_magic(name, &magic)
    if failed:
        raise OSError(errno, os.strerror(errno), path)
    return magic


def monotonic_ns():
    """Return CLOCK_MONOTONIC in nanoseconds: the clock of deadlines and heartbeats."""
    return ems_monotonic_ns()


cdef class Counters:
    """``count`` unsigned 64-bit counters at ``address``, which the caller keeps mapped."""

    cdef uint64_t *_words
    cdef readonly Py_ssize_t count

    def __cinit__(self, uintptr_t address, Py_ssize_t count):
        if address == 0 or address % 8:
            raise ValueError(f"address {address:#x} is not a multiple of 8 above 0")
        if count <= 0:
            raise ValueError(f"count is {count}, must be positive")
        self._words = <uint64_t *>address
        self.count = count

    def add(self, Py_ssize_t i, int64_t n):
        """Add ``n`` to counter ``i`` atomically (modulo 2**64)."""
        self._check(i)
        ems_counter_add(self._words + i, n)

    def get(self, Py_ssize_t i):
        """Return counter ``i``."""
        self._check(i)
        return ems_counter_get(self._words + i)

    def snapshot(self):
        """Return all counters; each by itself is atomic, the list is not."""
        return [ems_counter_get(self._words + i) for i in range(self.count)]

    def clear(self):
        """Set all counters to zero."""
        cdef Py_ssize_t i
        for i in range(self.count):
            ems_counter_clear(self._words + i)

    cdef int _check(self, Py_ssize_t i) except -1:
        if not 0 <= i < self.count:
            raise IndexError(f"counter {i}, there are {self.count}")
        return 0
