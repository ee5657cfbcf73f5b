# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Which ranges of registered memory a block is made of: slots in, pieces out.

A *slot* is the place of one token; a block of the registered memory has ``block_size`` of them. A
*component* is one registered tensor (K or V of a layer): in it the bytes of a block's slots follow
each other, blocks are a stride apart. The value of a key is, component after component, the bytes
of its slots in their order. No Python runs per slot or per piece.
"""

from __future__ import annotations

from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDED_RO, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport (
    int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
)
from libc.stdlib cimport free, malloc, realloc


cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    bint PyLong_CheckExact(object value)
    int _PyBytes_Resize(PyObject **string, Py_ssize_t newsize) except -1
    Py_ssize_t Py_REFCNT(PyObject *value)


cdef uint64_t LIMIT = <uint64_t>1 << 63
cdef size_t MOST_EXPECTED = <size_t>4 << 20  # pieces, 64 MiB
cdef object _argument_error = ValueError


def set_argument_error(factory):
    """Let ``factory(text)`` make what wrong arguments raise; ``ValueError`` until then."""
    global _argument_error
    _argument_error = factory


# What a big plan was written in, kept for the next one, which has it when nobody else does: new
# pages cost more than to plan in them (4,096 blocks of 122 pieces: 1.8 us a block, 0.8 without).
cdef PyObject *_spare_column = NULL
cdef PyObject *_spare_pieces = NULL
cdef Py_ssize_t SPARE_LEAST = 64 << 10
cdef Py_ssize_t SPARE_MOST = 16 << 20


cdef int _keep(PyObject **spare, bytes used) except -1:
    if SPARE_LEAST <= PyBytes_GET_SIZE(used) <= SPARE_MOST:
        Py_XDECREF(spare[0])
        spare[0] = <PyObject *>used
        Py_INCREF(used)
    return 0


cdef bytes _new_column(Py_ssize_t nbytes):
    cdef bytes column
    # A reference of our own only.
    if _spare_column is not NULL and Py_REFCNT(_spare_column) == 1:
        column = <bytes>_spare_column
        if PyBytes_GET_SIZE(column) == nbytes:
            return column
    column = PyBytes_FromStringAndSize(NULL, nbytes)
    _keep(&_spare_column, column)
    return column


# ---- columns of numbers ----


def int64s(values, str name not None, bint bools=False):
    """Return a list, tuple, range, array, numpy array or tensor of whole numbers as int64 bytes.

    What is wrong is named by ``name`` and index. Bools are numbers only if ``bools``.
    """
    cdef bytes out = None
    if isinstance(values, (str, bytes, bytearray)):
        raise _argument_error(f"{name} is of type {type(values).__name__}, must be a list of ints")
    if not isinstance(values, (list, tuple)) and PyObject_CheckBuffer(values):
        out = _from_buffer(values, bools)
        if out is not None:
            return out
    return _from_list(_as_sequence(values, name), name, bools)


def sequence(values, str name not None):
    """Return ``values`` as a list or tuple; a range, an array, a tensor become one."""
    return _as_sequence(values, name)


cdef object _as_sequence(object values, str name):
    if isinstance(values, (list, tuple)):
        return values
    if isinstance(values, range):
        return list(values)
    try:
        values = values.tolist()
    except Exception:
        values = values if values is None else type(values)
    else:
        if isinstance(values, list):
            return values
    kind = "None" if values is None else f"of type {getattr(values, '__name__', '?')}"
    raise _argument_error(f"{name} is {kind}, must be a list of ints")


cdef bytes _from_list(object values, str name, bint bools):
    cdef Py_ssize_t n = len(values), i
    cdef bytes out = _new_column(8 * n)
    cdef int64_t *target = <int64_t *>PyBytes_AS_STRING(out)
    cdef int overflow = 0
    if isinstance(values, list):
        # No Python code runs here, so that nobody can change the list.
        for i in range(n):
            value = (<list>values)[i]
            if not PyLong_CheckExact(value):
                break
            target[i] = PyLong_AsLongLongAndOverflow(value, &overflow)
            if overflow:
                break
        else:
            return out
    # A private tuple: what an element does when it is asked for its number cannot change it.
    cdef tuple numbers = tuple(values)
    n = len(numbers)
    out = PyBytes_FromStringAndSize(NULL, 8 * n)
    target = <int64_t *>PyBytes_AS_STRING(out)
    for i in range(n):
        value = numbers[i]
        if not PyLong_CheckExact(value):
            value = _number(value, name, i, bools)
        target[i] = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            raise _argument_error(
                f"{name}[{i}] has {value.bit_length()} bits, must be from -2**63 to 2**63 - 1"
            )
    return out


cdef object _number(object value, str name, Py_ssize_t i, bint bools):
    if isinstance(value, bool) and not bools:
        raise _argument_error(f"{name}[{i}] is {value}, a bool, must be an int")
    try:
        return int(value.__index__())
    except Exception:
        raise _argument_error(
            f"{name}[{i}] is {_shown(value)}, must be an int"
        ) from None


cdef str _shown(object value):
    kind = type(value).__name__
    if isinstance(value, (str, float)):
        return f"{repr(value)[:60]} of type {kind}"
    return "None" if value is None else f"of type {kind}"


ctypedef fused whole:
    int8_t
    int16_t
    int32_t
    int64_t
    uint8_t
    uint16_t
    uint32_t


cdef void _widen(int64_t *target, const char *source, Py_ssize_t n, Py_ssize_t stride, whole *kind):
    cdef Py_ssize_t i
    for i in range(n):
        target[i] = (<const whole *>(source + i * stride))[0]


cdef bytes _from_buffer(object values, bint bools):
    """Return the numbers of a buffer, or None when it has to be read element by element."""
    cdef Py_buffer view
    cdef bytes out
    cdef int64_t *target
    cdef str form
    cdef Py_ssize_t n
    try:
        PyObject_GetBuffer(values, &view, PyBUF_STRIDED_RO | PyBUF_FORMAT)
    except Exception:
        return None
    try:
        if view.ndim != 1 or view.format is NULL:
            return None
        form = (<bytes>view.format).decode("latin-1").lstrip("@=<")
        n = view.shape[0]
        out = _new_column(8 * n)
        target = <int64_t *>PyBytes_AS_STRING(out)
        if form in ("b", "h", "i", "l", "q", "n"):
            if view.itemsize == 8:
                _widen[int64_t](target, <char *>view.buf, n, view.strides[0], NULL)
            elif view.itemsize == 4:
                _widen[int32_t](target, <char *>view.buf, n, view.strides[0], NULL)
            elif view.itemsize == 2:
                _widen[int16_t](target, <char *>view.buf, n, view.strides[0], NULL)
            else:
                _widen[int8_t](target, <char *>view.buf, n, view.strides[0], NULL)
        elif form in ("B", "H", "I", "L") and view.itemsize < 8:
            if view.itemsize == 4:
                _widen[uint32_t](target, <char *>view.buf, n, view.strides[0], NULL)
            elif view.itemsize == 2:
                _widen[uint16_t](target, <char *>view.buf, n, view.strides[0], NULL)
            else:
                _widen[uint8_t](target, <char *>view.buf, n, view.strides[0], NULL)
        elif form == "?" and bools:
            _widen[uint8_t](target, <char *>view.buf, n, view.strides[0], NULL)
        else:
            return None
        return out
    finally:
        PyBuffer_Release(&view)


def total(bytes column not None, int64_t low, int64_t high):
    """Return (index of the first number outside ``low..high`` or -1, sum of those before it)."""
    cdef const int64_t *numbers = <const int64_t *>PyBytes_AS_STRING(column)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(column) // 8, i
    cdef int64_t found = 0
    for i in range(n):
        if not low <= numbers[i] <= high:
            return i, found
        found += numbers[i]
    return -1, found


def leading_zeros(bytes column not None):
    """Return the number of zeros before the ones, and the index of what is neither or -1."""
    cdef const int64_t *numbers = <const int64_t *>PyBytes_AS_STRING(column)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(column) // 8, zeros = 0, i
    while zeros < n and numbers[zeros] == 0:
        zeros += 1
    for i in range(zeros, n):
        if numbers[i] != 1:
            return zeros, i
    return zeros, -1


# ---- registered memory ----


cdef struct component:
    uint64_t address
    uint64_t block_stride
    uint64_t token_bytes


cdef struct piece:
    uint64_t address
    uint64_t nbytes


cdef struct run:
    uint64_t block
    uint64_t offset
    uint64_t count


cdef class Pages:
    """The registered memory of one layer group.

    Args:
        num_blocks: blocks of every component.
        block_size: slots of a block.
        components: ``(address, block_stride, token_bytes)`` each, in bytes.
    """

    cdef component *_components
    cdef Py_ssize_t _n
    cdef readonly int64_t num_blocks
    cdef readonly int64_t block_size
    cdef readonly uint64_t token_bytes

    def __init__(self, int64_t num_blocks, int64_t block_size, list components not None):
        cdef Py_ssize_t i, n = len(components)
        cdef component *one
        if self._components is not NULL:
            raise ValueError("Pages cannot be changed")
        if (num_blocks < 1 or block_size < 1 or n < 1
                or num_blocks > (<int64_t>1 << 62) // block_size):
            raise ValueError(f"{num_blocks} blocks of {block_size} slots, {n} components")
        self._components = <component *>malloc(n * sizeof(component))
        if self._components is NULL:
            raise MemoryError(f"no memory to describe {n} components")
        for i in range(n):
            one = &self._components[i]
            one.address, one.block_stride, one.token_bytes = components[i]
            if (not one.address or not one.token_bytes
                    or one.token_bytes > LIMIT // <uint64_t>block_size // <uint64_t>n
                    or one.block_stride > (LIMIT - one.address) // <uint64_t>num_blocks):
                raise ValueError(f"component {i} is {components[i]}")
            self.token_bytes += one.token_bytes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._n = n

    def __dealloc__(self):
        free(self._components)

    @property
    def slots(self):
        """Number of slots."""
        return self.num_blocks * self.block_size


cdef class _Columns:
    """Pieces of keys, growing in the bytes that are returned.

    Pages that are touched for the first time are what planning costs: nothing is copied, what is
    not needed in the end was never touched, and those of the last plan are used again.
    """

    cdef PyObject *grown
    cdef piece *pieces
    cdef uint64_t *first
    cdef run *runs
    cdef size_t npieces, piece_room, nkeys, key_room, run_room
    cdef size_t nexpected  # keys

    def __cinit__(self, size_t nexpected):
        self.nexpected = nexpected or 1

    def __dealloc__(self):
        Py_XDECREF(self.grown)
        free(self.first)
        free(self.runs)

    cdef int room_for_runs(self, size_t n) except -1:
        if n > self.run_room:
            free(self.runs)
            self.run_room = 0
            self.runs = <run *>malloc(n * sizeof(run))
            if self.runs is NULL:
                raise MemoryError(f"no memory to plan {n} runs")
            self.run_room = n
        return 0

    cdef int resize(self, size_t npieces) except -1:
        global _spare_pieces
        cdef bytes fresh
        self.piece_room = 0
        if (self.grown is NULL and _spare_pieces is not NULL
                and Py_REFCNT(_spare_pieces) == 1):
            self.grown = _spare_pieces
            _spare_pieces = NULL
        if self.grown is NULL:
            fresh = PyBytes_FromStringAndSize(NULL, npieces * sizeof(piece))
            Py_INCREF(fresh)
            self.grown = <PyObject *>fresh
        else:
            _PyBytes_Resize(&self.grown, npieces * sizeof(piece))  # NULL if it fails
        self.pieces = <piece *>PyBytes_AS_STRING(<bytes>self.grown)
        self.piece_room = npieces
        return 0

    cdef int add(self, Pages pages, size_t nruns) except -1:
        """Add a key that is made of the first ``nruns`` of ``runs``."""
        cdef size_t wanted = self.npieces + nruns * <size_t>pages._n, start = self.npieces, i
        cdef piece *last
        cdef component *one
        cdef Py_ssize_t c
        cdef uint64_t address, nbytes
        cdef void *grown
        if wanted > self.piece_room:
            # Keys are usually alike.
            if self.grown is NULL and wanted * self.nexpected < MOST_EXPECTED:
                self.resize(wanted * self.nexpected)
            else:
                self.resize(wanted + wanted // 2)
        if self.nkeys >= self.key_room:
            self.key_room = 2 * self.key_room + 64
            grown = realloc(self.first, self.key_room * sizeof(uint64_t))
            if grown is NULL:
                raise MemoryError(f"no memory to plan {self.key_room} keys")
            self.first = <uint64_t *>grown
        self.first[self.nkeys] = start
        self.nkeys += 1
        for c in range(pages._n):
            one = &pages._components[c]
            for i in range(nruns):
                address = (one.address + self.runs[i].block * one.block_stride
                           + self.runs[i].offset * one.token_bytes)
                nbytes = self.runs[i].count * one.token_bytes
                if self.npieces > start:
                    last = &self.pieces[self.npieces - 1]
                    if last.address + last.nbytes == address:
                        last.nbytes += nbytes
                        continue
                self.pieces[self.npieces].address = address
                self.pieces[self.npieces].nbytes = nbytes
                self.npieces += 1
        return 0

    cdef tuple finished(self):
        cdef bytes pieces, first
        if self.npieces == 0:
            pieces = b""
        else:
            self.resize(self.npieces)
            pieces = <bytes>self.grown
            _keep(&_spare_pieces, pieces)
        first = PyBytes_FromStringAndSize(NULL, (self.nkeys + 1) * sizeof(uint64_t))
        cdef uint64_t *target = <uint64_t *>PyBytes_AS_STRING(first)
        cdef size_t k
        for k in range(self.nkeys):
            target[k] = self.first[k]
        target[self.nkeys] = self.npieces
        return pieces, first


def plan_slots(Pages pages not None, bytes slots not None, bytes counts not None,
               Py_ssize_t first, str name not None):
    """Return the pieces of keys made of slots: ``counts[k]`` slots each, one key after the other.

    The slots of the first key start at index ``first``. Counts must be positive and have been
    checked to fit. Returns ``(pieces, first)``: columns for ``Spans.from_columns``.
    """
    cdef const int64_t *slot = <const int64_t *>PyBytes_AS_STRING(slots)
    cdef const int64_t *count = <const int64_t *>PyBytes_AS_STRING(counts)
    cdef Py_ssize_t nslots = PyBytes_GET_SIZE(slots) // 8, nkeys = PyBytes_GET_SIZE(counts) // 8
    cdef Py_ssize_t k, at = first, end
    cdef uint64_t size = pages.block_size, limit = pages.num_blocks * pages.block_size, here
    cdef uint64_t n, longest
    cdef size_t nruns
    cdef _Columns columns = _Columns(nkeys)
    if first < 0:
        raise ValueError(f"first is {first}")
    for k in range(nkeys):
        if count[k] < 1 or count[k] > nslots - at:
            raise ValueError(f"key {k} has {count[k]} of {nslots - at} slots")
        columns.room_for_runs(count[k])
        end = at + count[k]
        nruns = 0
        while at < end:
            here = <uint64_t>slot[at]
            if here >= limit:  # a negative one is huge as an unsigned number
                raise _argument_error(
                    f"{name}[{at}] is {slot[at]}, the registered blocks have slots 0 to {limit - 1}"
                )
            columns.runs[nruns].block = here // size
            columns.runs[nruns].offset = here % size
            longest = size - here % size
            if longest > <uint64_t>(end - at):
                longest = end - at
            n = 1
            while n < longest and <uint64_t>slot[at + <Py_ssize_t>n] == here + n:
                n += 1
            columns.runs[nruns].count = n
            nruns += 1
            at += n
        columns.add(pages, nruns)
    return columns.finished()


def plan_ranges(list groups not None, list starts not None, list lengths not None):
    """Return the pieces of chunks that are ranges of slots, for several groups.

    Keys come chunk after chunk, within a chunk group after group; a group whose length is 0 has
    none there. Ranges must have been checked. Returns ``(pieces, first, ends)``: ``ends[i]``
    (int64) is the number of keys up to and with chunk ``i``.
    """
    cdef Py_ssize_t ngroups = len(groups), n, g, i
    cdef int64_t start, left, offset, part
    cdef Pages pages
    cdef size_t nruns
    cdef bytes ends
    cdef int64_t *end
    cdef _Columns columns
    if not ngroups == len(starts) == len(lengths) or not ngroups:
        raise ValueError(f"{ngroups} groups, {len(starts)} starts, {len(lengths)} lengths")
    n = len(starts[0]) // 8
    for g in range(ngroups):
        if len(<bytes?>starts[g]) != 8 * n or len(<bytes?>lengths[g]) != 8 * n:
            raise ValueError(f"group {g} has not {n} chunks")
    columns = _Columns(n * ngroups)
    ends = PyBytes_FromStringAndSize(NULL, 8 * n)
    end = <int64_t *>PyBytes_AS_STRING(ends)
    for i in range(n):
        for g in range(ngroups):
            pages = <Pages?>groups[g]
            start = (<const int64_t *>PyBytes_AS_STRING(<bytes>starts[g]))[i]
            left = (<const int64_t *>PyBytes_AS_STRING(<bytes>lengths[g]))[i]
            if left == 0:
                continue
            if left < 0 or start < 0 or left > pages.num_blocks * pages.block_size - start:
                raise ValueError(f"chunk {i} of group {g} is slots {start} to {start + left}")
            columns.room_for_runs(left // pages.block_size + 2)
            nruns = 0
            while left:
                offset = start % pages.block_size
                part = min(left, pages.block_size - offset)
                columns.runs[nruns].block = start // pages.block_size
                columns.runs[nruns].offset = offset
                columns.runs[nruns].count = part
                nruns += 1
                start += part
                left -= part
            columns.add(pages, nruns)
        end[i] = columns.nkeys
    pieces, first = columns.finished()
    return pieces, first, ends
