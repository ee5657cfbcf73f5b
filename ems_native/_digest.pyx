# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Digests of keys and of block hashes: keyed BLAKE2b over a name and what is named.

The same bytes as ``hashlib.blake2b`` gives; native, because a call asks for a thousand of them.
"""

from __future__ import annotations

from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy


cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    bint PyLong_CheckExact(object value)
    bint PyUnicode_CheckExact(object value)
    Py_ssize_t PyUnicode_GET_LENGTH(object value)
    const char *PyUnicode_AsUTF8AndSize(object value, Py_ssize_t *nbytes) except NULL


cdef extern from "blake2b.h" nogil:
    cdef struct ems_blake2b:
        size_t buffered

    void ems_blake2b_start(ems_blake2b *state, const void *key, size_t key_bytes,
                           size_t digest_bytes)
    void ems_blake2b_update(ems_blake2b *state, const void *data, size_t nbytes)
    void ems_blake2b_finish(ems_blake2b *state, void *digest, size_t nbytes)


cdef extern from *:
    """
    static inline void ems_put_little(uint8_t *target, uint64_t value, int nbytes)
    {
        for (int i = 0; i < nbytes; i++)
            target[i] = (uint8_t)(value >> 8 * i);
    }
    """
    void ems_put_little(uint8_t *target, int64_t value, int nbytes) nogil


DIGEST_BYTES = 16
cdef int64_t BYTES_MARK = <int64_t>1 << 31


cdef class BlockNames:
    """Names the blocks of one namespace: 16 bytes for each hash.

    Args:
        key: of the keyed digest, 1 to 64 bytes.
        space: names the namespace; of fixed length, or two of them could run into each other.

    What is hashed behind ``space``: the length of the number in bytes (4, little endian), the
    number in two's complement (8 bytes, or as many as it needs if those do not hold it), and 8
    bytes of count for a block that has one. A hash that is bytes, 1 to 64 of them, goes in as they
    are; its length has the highest bit set, so that it is never the hash of a number.
    """

    cdef ems_blake2b _state

    def __init__(self, bytes key not None, bytes space not None):
        if not 1 <= len(key) <= 64:
            raise ValueError(f"key has {len(key)} bytes, must have 1 to 64")
        ems_blake2b_start(&self._state, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), DIGEST_BYTES)
        ems_blake2b_update(&self._state, PyBytes_AS_STRING(space), PyBytes_GET_SIZE(space))

    def of_keys(self, key_list, Py_ssize_t most, encode):
        """Return the digests of keys, one after the other.

        A str of 1 to ``most`` characters goes in as two bytes of length (little endian), its UTF-8
        and two zero bytes; of anything else, what ``encode(index, key)`` returns.
        """
        cdef Py_ssize_t n, k, nbytes
        cdef const char *text
        cdef bytes out, other
        cdef uint8_t *target
        cdef uint8_t length[2]
        cdef uint8_t nothing[2]
        cdef ems_blake2b state
        # A private tuple: `encode` may run the caller's code, which cannot change it.
        cdef tuple keys = tuple(key_list)
        n = len(keys)
        out = PyBytes_FromStringAndSize(NULL, 16 * n)
        target = <uint8_t *>PyBytes_AS_STRING(out)
        ems_put_little(nothing, 0, 2)
        for k in range(n):
            key = keys[k]
            state = self._state
            text = NULL
            if PyUnicode_CheckExact(key) and 0 < PyUnicode_GET_LENGTH(key) <= most:
                try:
                    text = PyUnicode_AsUTF8AndSize(key, &nbytes)
                except UnicodeEncodeError:  # a lone surrogate
                    text = NULL
            if text is not NULL:
                ems_put_little(length, nbytes, 2)
                ems_blake2b_update(&state, length, 2)
                ems_blake2b_update(&state, text, nbytes)
                ems_blake2b_update(&state, nothing, 2)
            else:
                other = encode(k, key)
                ems_blake2b_update(&state, PyBytes_AS_STRING(other), PyBytes_GET_SIZE(other))
            ems_blake2b_finish(&state, target + 16 * k, DIGEST_BYTES)
        return out

    def digests(self, hashes, bytes counts=None, int64_t whole=0, bint texts=False):
        """Return the digests of ``hashes`` (ints; with ``texts`` also bytes), one after the other.

        ``counts`` (int64 each) are noted where they differ from ``whole``.

        Raises TypeError with the index of the first element that is no int (a bool is none), and
        with ``texts`` not 1 to 64 bytes either, as its argument.
        """
        cdef Py_ssize_t n, k, nbytes
        cdef const int64_t *tokens = NULL
        cdef bytes out
        cdef uint8_t *target
        cdef uint8_t encoded[20]
        cdef ems_blake2b state
        cdef long long number
        cdef int overflow
        # A private tuple: what an element does when it is asked for its number cannot change it.
        cdef tuple numbers = tuple(hashes)
        n = len(numbers)
        if counts is not None:
            if PyBytes_GET_SIZE(counts) < n * 8:
                raise ValueError(f"{n} hashes, counts has {len(counts)} bytes")
            tokens = <const int64_t *>PyBytes_AS_STRING(counts)
        out = PyBytes_FromStringAndSize(NULL, 16 * n)
        target = <uint8_t *>PyBytes_AS_STRING(out)
        for k in range(n):
            value = numbers[k]
            state = self._state
            if texts and PyBytes_CheckExact(value):
                nbytes = PyBytes_GET_SIZE(value)
                if not 1 <= nbytes <= 64:
                    raise TypeError(k)
                ems_put_little(encoded, nbytes | BYTES_MARK, 4)
                ems_blake2b_update(&state, encoded, 4)
                ems_blake2b_update(&state, PyBytes_AS_STRING(value), nbytes)
            else:
                if not PyLong_CheckExact(value):
                    value = _number(value)
                    if value is None:
                        raise TypeError(k)
                number = PyLong_AsLongLongAndOverflow(value, &overflow)
                if overflow == 0:
                    ems_put_little(encoded, 8, 4)
                    ems_put_little(encoded + 4, number, 8)
                    ems_blake2b_update(&state, encoded, 12)
                else:
                    _update_huge(&state, value)
            if tokens is not NULL and tokens[k] != whole:
                ems_put_little(encoded, tokens[k], 8)
                ems_blake2b_update(&state, encoded, 8)
            ems_blake2b_finish(&state, target + 16 * k, DIGEST_BYTES)
        return out


def has_duplicates(bytes digests not None):
    """Whether two of these digests of 16 bytes are equal."""
    cdef const char *all_of_them = PyBytes_AS_STRING(digests)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(digests) // 16, k, size = 16
    cdef uint32_t *table
    cdef uint64_t at
    cdef bint found = False
    if n < 2:
        return False
    while size < 2 * n:
        size *= 2
    table = <uint32_t *>calloc(size, sizeof(uint32_t))  # 0: free, else the index plus 1
    if table is NULL:
        raise MemoryError(f"no memory to compare {n} digests")
    for k in range(n):
        memcpy(&at, all_of_them + 16 * k, 8)
        at &= size - 1
        while table[at] != 0:
            if memcmp(all_of_them + 16 * (table[at] - 1), all_of_them + 16 * k, 16) == 0:
                found = True
                break
            at = (at + 1) & (size - 1)
        if found:
            break
        table[at] = k + 1
    free(table)
    return found


cdef object _number(object value):
    """Return what stands for a number as an exact int, or None."""
    # A bool is an int to Python and none to us; that of numpy is no subclass and has no index.
    if isinstance(value, bool):
        return None
    try:
        return int(value.__index__())
    except Exception:
        return None


cdef int _update_huge(ems_blake2b *state, object value) except -1:
    cdef bytes raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    cdef uint8_t length[4]
    if PyBytes_GET_SIZE(raw) > 0x7fffffff:
        raise OverflowError("a hash of more than 2**31 bytes")
    ems_put_little(length, PyBytes_GET_SIZE(raw), 4)
    ems_blake2b_update(state, length, 4)
    ems_blake2b_update(state, PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw))
    return 0
