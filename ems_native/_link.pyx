# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The client's end of the write channel: waits for an answer awake for a moment, then asleep.

Who sleeps in the kernel needs 5 to 40 us to wake, as long as the server needs for the answer. It is
worth to stay awake only while answers come at once; where they do not (all processors are busy, or
the server's step is a long one), the link learns to sleep.
"""

from __future__ import annotations

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT
from libc.stdint cimport uint64_t

import os


cdef extern from "clock.h" nogil:
    uint64_t ems_now_ns()

cdef extern from "link.h" nogil:
    int ems_link_send(int fd, const char *data, size_t nbytes, size_t *sent, uint64_t deadline_ns)
    ssize_t ems_link_receive_awake(int fd, char *data, size_t nbytes, uint64_t until_ns)
    ssize_t ems_link_receive(int fd, char *data, size_t nbytes, uint64_t deadline_ns)


cdef enum:
    RECEIVE_BYTES = 32768


cdef class Link:
    """Sends and receives over a connected stream socket, whose owner keeps it open meanwhile.

    One thread at a time. Both raise `TimeoutError` when nothing went on until the deadline
    (CLOCK_MONOTONIC), `OSError` for what the system says, and what a signal handler raises.

    Args:
        fd: of the socket.
        awake_ns: how long it stays awake for its peer.
    """

    cdef int _fd
    cdef uint64_t _awake_ns
    cdef unsigned int _rest, _misses

    def __cinit__(self, int fd, uint64_t awake_ns):
        self._fd = fd
        # Pointless where the peer shares the only processor.
        self._awake_ns = awake_ns if len(os.sched_getaffinity(0)) > 1 else 0
        self._rest = self._misses = 0

    def send(self, const unsigned char[::1] data, uint64_t deadline_ns):
        """Send all of it."""
        cdef size_t sent = 0
        cdef size_t nbytes = data.shape[0]
        cdef int why
        if nbytes == 0:
            return
        while True:
            with nogil:
                why = ems_link_send(self._fd, <const char *>&data[0], nbytes, &sent, deadline_ns)
            if why == 0:
                return
            _explain(why)

    def receive(self, uint64_t deadline_ns):
        """Receive what comes first, at most 32 KiB; nothing at the end of the stream."""
        cdef char data[RECEIVE_BYTES]
        cdef ssize_t got = -EAGAIN
        cdef uint64_t now
        cdef bint awake = self._stays_awake()
        if awake:
            now = ems_now_ns()
            with nogil:
                got = ems_link_receive_awake(
                    self._fd, data, RECEIVE_BYTES, min(deadline_ns, now + self._awake_ns)
                )
            self._learn(got != -EAGAIN)
        while got < 0:
            if got != -EAGAIN:
                _explain(<int>got)
            with nogil:
                got = ems_link_receive(self._fd, data, RECEIVE_BYTES, deadline_ns)
        return PyBytes_FromStringAndSize(data, got)

    cdef bint _stays_awake(self):
        if not self._awake_ns:
            return False
        if self._rest:
            self._rest -= 1
            return False
        return True

    cdef void _learn(self, bint hit):
        # After n vain waits in a row it sleeps 2 ** n times, so that vain waits cost next to
        # nothing, and one that is not vain is found again.
        if hit:
            self._misses = 0
        else:
            self._misses = min(self._misses + 1, <unsigned int>6)
            self._rest = <unsigned int>1 << self._misses


cdef int _explain(int why) except -1:
    if why == -EINTR:
        PyErr_CheckSignals()
        return 0
    if why == -ETIMEDOUT:
        raise TimeoutError("nothing went on until the deadline")
    raise OSError(-why, os.strerror(-why))
