# The Python side of csrc/device.h, included by `_acl.pyx` and `_cuda.pyx`: one text for both.

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport SIZE_MAX, uint32_t, uint64_t, uintptr_t


cdef extern from "copy.h" nogil:
    cdef struct ems_piece:
        uint64_t address
        uint64_t nbytes

    cdef struct ems_place:
        uint64_t length

    cdef struct ems_spans:
        size_t nkeys
        const uint64_t *first
        const uint64_t *lengths
        const ems_piece *pieces


cdef extern from "device.h" nogil:
    cdef struct ems_runtime:
        pass

    cdef struct ems_copies:
        size_t count

    cdef struct ems_atlas:
        size_t used

    int EMS_HOST, EMS_UNKNOWN
    const int ems_runtime_context_lazily

    ems_runtime *ems_runtime_open(const char *path, char *error, size_t nerror)
    const char *ems_runtime_missing(const ems_runtime *runtime, size_t n)
    void ems_runtime_text(ems_runtime *runtime, int code, char *text, size_t ntext)
    int ems_runtime_wants_context(int code)
    int ems_runtime_init(ems_runtime *runtime)
    int ems_runtime_version(ems_runtime *runtime, int *version)
    int ems_runtime_count(ems_runtime *runtime, int *count)
    int ems_runtime_locate(ems_runtime *runtime, uint64_t address, int *device, uint32_t *page)
    int ems_runtime_enter(ems_runtime *runtime, int device, int *previous)
    int ems_runtime_leave(ems_runtime *runtime, int previous)
    int ems_runtime_default_stream(ems_runtime *runtime, void **stream)
    int ems_runtime_stream_create(ems_runtime *runtime, void **stream)
    int ems_runtime_stream_destroy(ems_runtime *runtime, void *stream)
    int ems_runtime_synchronize(ems_runtime *runtime, void *stream, int timeout_ms, int *ended)
    int ems_runtime_abort(ems_runtime *runtime, void *stream, int *able)
    int ems_runtime_event_create(ems_runtime *runtime, void **event)
    int ems_runtime_event_destroy(ems_runtime *runtime, void *event)
    int ems_runtime_record(ems_runtime *runtime, void *event, void *stream)
    int ems_runtime_wait(ems_runtime *runtime, void *stream, void *event)
    int ems_runtime_host_alloc(ems_runtime *runtime, size_t nbytes, void **address)
    int ems_runtime_host_free(ems_runtime *runtime, void *address)
    int ems_runtime_register(ems_runtime *runtime, void *address, size_t nbytes, int *how)
    int ems_runtime_unregister(ems_runtime *runtime, void *address)
    int ems_runtime_submit(ems_runtime *runtime, int to_host, int device,
                           const ems_copies *copies, void *stream, size_t *failed)
    int ems_copies_make(ems_copies *copies, const ems_spans *spans, size_t first, size_t count,
                        unsigned char *base, const ems_place *places, const unsigned char *mask,
                        int to_host)
    void ems_copies_free(ems_copies *copies)
    size_t ems_first_unreadable(const ems_spans *spans)
    int ems_atlas_find(const ems_atlas *atlas, uint64_t address)
    void ems_atlas_note(ems_atlas *atlas, uint64_t address, int device)
    void ems_atlas_clear(ems_atlas *atlas)


cdef object _fault_type = RuntimeError
cdef object _context_type = RuntimeError


def set_fault_types(fault, context):
    """Name the exceptions for a call that failed, and for one in a thread without its device.

    After the second one may ``enter`` the device and call again. ``RuntimeError`` until then.
    """
    global _fault_type, _context_type
    _fault_type, _context_type = fault, context


def first_unreadable(uintptr_t spans):
    """Return the first piece of a batch that this process cannot read, or None.

    ``spans`` is ``Spans.handle``. None too where the kernel does not let one ask.
    """
    cdef size_t piece
    with nogil:
        piece = ems_first_unreadable(<const ems_spans *>spans)
    return None if piece == SIZE_MAX else piece


HOST = EMS_HOST
UNKNOWN = EMS_UNKNOWN


cdef class Runtime:
    """A vendor's library, found at ``path``: streams, events, copies. Handles are numbers.

    Raises ``OSError`` when there is no such library, or when it lacks a call that EMS needs. All
    methods may be used by any thread; those that can take long release the GIL.
    """

    cdef ems_runtime *_c
    cdef ems_atlas _atlas
    cdef readonly str path
    cdef bint _ready

    def __init__(self, str path not None):
        cdef char error[1024]
        cdef bytes name = path.encode()
        cdef const char *name_c = name
        if self._c is not NULL:
            raise ValueError("a Runtime is opened once")
        with nogil:
            self._c = ems_runtime_open(name_c, error, sizeof(error))
        if self._c is NULL:
            raise OSError((<bytes>error).decode("utf-8", "replace"))
        self.path = path

    def __dealloc__(self):
        ems_atlas_clear(&self._atlas)

    def __reduce__(self):
        raise TypeError("a Runtime is of this process")

    cdef object _fault(self, int code, str what):
        cdef char text[2048]
        ems_runtime_text(self._c, code, text, sizeof(text))
        kind = _context_type if ems_runtime_wants_context(code) else _fault_type
        return kind(f"{what}: " + (<bytes>text).decode("utf-8", "replace").strip())

    @property
    def missing(self):
        """Names of the calls that the library lacks and that EMS can do without."""
        cdef size_t n = 0
        names = []
        while ems_runtime_missing(self._c, n) is not NULL:
            names.append(ems_runtime_missing(self._c, n).decode())
            n += 1
        return names

    @property
    def context_lazily(self):
        """Whether a thread needs ``enter`` only after a fault that says so."""
        return ems_runtime_context_lazily != 0

    def init(self):
        """Initialise the runtime, unless somebody did; idempotent."""
        cdef int code = 0
        if not self._ready:
            with nogil:
                code = ems_runtime_init(self._c)
            if code:
                raise self._fault(code, "initialisation")
            self._ready = True

    def version(self):
        """Return ``(major, minor, patch)``."""
        cdef int numbers[3]
        cdef int code = ems_runtime_version(self._c, numbers)
        if code:
            raise self._fault(code, "version")
        return numbers[0], numbers[1], numbers[2]

    def device_count(self):
        """Return how many devices there are."""
        cdef int code, count = 0
        with nogil:
            code = ems_runtime_count(self._c, &count)
        if code:
            raise self._fault(code, "count of devices")
        return count

    def locate(self, uint64_t address):
        """Ask the runtime: ``(device, page size)``; the device may be HOST or UNKNOWN."""
        cdef int device = EMS_HOST
        cdef uint32_t page = 0
        cdef int code = ems_runtime_locate(self._c, address, &device, &page)
        if code:
            raise self._fault(code, f"attributes of {address:#x}")
        return device, page

    def classify(self, uintptr_t spans, int guess):
        """Find whose memory a batch is: ``(device, None)``, or ``(_, index)`` of an odd piece.

        ``spans`` is ``Spans.handle``. A device that the runtime cannot tell is ``guess``. Addresses
        of devices are remembered, so that a second batch in the same memory asks nothing.
        """
        cdef const ems_spans *batch = <const ems_spans *>spans
        cdef int device, owner = EMS_HOST
        cdef uint64_t i
        for i in range(batch.first[batch.nkeys]):
            device = self._owner(batch.pieces[i].address, guess)
            # A piece that begins on a device and ends outside of it is refused by the copy.
            if i == 0:
                owner = device
            elif device != owner:
                return owner, i
        return owner, None

    cdef int _owner(self, uint64_t address, int guess) except? -77:
        cdef int code, device = ems_atlas_find(&self._atlas, address)
        cdef uint32_t page = 0
        if device == EMS_UNKNOWN:
            code = ems_runtime_locate(self._c, address, &device, &page)
            if code:
                raise self._fault(code, f"attributes of {address:#x}")
            if device == EMS_UNKNOWN:
                return guess
            if device >= 0:
                ems_atlas_note(&self._atlas, address, device)
        return device

    def forget(self):
        """Forget the addresses that were seen: some of them may be somebody else's now."""
        ems_atlas_clear(&self._atlas)

    def enter(self, int device):
        """Make a device current in this thread; pass what is returned to ``leave``."""
        cdef int code, previous = -1
        with nogil:
            code = ems_runtime_enter(self._c, device, &previous)
        if code:
            raise self._fault(code, f"device {device}")
        return previous

    def leave(self, int previous):
        """Make what was current before ``enter`` current again."""
        cdef int code
        with nogil:
            code = ems_runtime_leave(self._c, previous)
        if code:
            raise self._fault(code, "device of before")

    def default_stream(self):
        """Return the default stream of the current device; 0 where it has no handle."""
        cdef void *stream = NULL
        cdef int code = ems_runtime_default_stream(self._c, &stream)
        if code:
            raise self._fault(code, "default stream")
        return <uintptr_t>stream

    def create_stream(self):
        """Return a new stream of the current device."""
        cdef void *stream = NULL
        cdef int code
        with nogil:
            code = ems_runtime_stream_create(self._c, &stream)
        if code:
            raise self._fault(code, "new stream")
        return <uintptr_t>stream

    def destroy_stream(self, uintptr_t stream):
        """Give a stream back; nothing may be under way on it."""
        cdef int code
        with nogil:
            code = ems_runtime_stream_destroy(self._c, <void *>stream)
        if code:
            raise self._fault(code, "end of a stream")

    def synchronize(self, uintptr_t stream, int timeout_ms):
        """Wait until a stream has done everything, at most so long (negative: for ever).

        Returns whether it has. Raises when something on it failed, or it was aborted: then too it
        has ended.
        """
        cdef int code, ended = 0
        with nogil:
            code = ems_runtime_synchronize(self._c, <void *>stream, timeout_ms, &ended)
        if code:
            raise self._fault(code, "copy")
        return ended != 0

    def abort(self, uintptr_t stream):
        """End what is under way on a stream; False when the runtime has no such call."""
        cdef int code, able = 0
        with nogil:
            code = ems_runtime_abort(self._c, <void *>stream, &able)
        if code:
            raise self._fault(code, "abort of a stream")
        return able != 0

    def create_event(self):
        """Return a new event of the current device."""
        cdef void *event = NULL
        cdef int code = ems_runtime_event_create(self._c, &event)
        if code:
            raise self._fault(code, "new event")
        return <uintptr_t>event

    def destroy_event(self, uintptr_t event):
        """Give an event back."""
        cdef int code = ems_runtime_event_destroy(self._c, <void *>event)
        if code:
            raise self._fault(code, "end of an event")

    def record(self, uintptr_t event, uintptr_t stream):
        """Let an event happen when a stream has done what it was given until now."""
        cdef int code
        with nogil:
            code = ems_runtime_record(self._c, <void *>event, <void *>stream)
        if code:
            raise self._fault(code, "event on the current stream")

    def wait(self, uintptr_t stream, uintptr_t event):
        """Let a stream wait for an event before it does what comes after."""
        cdef int code
        with nogil:
            code = ems_runtime_wait(self._c, <void *>stream, <void *>event)
        if code:
            raise self._fault(code, "order of streams")

    def allocate(self, size_t nbytes):
        """Return the address of pinned memory of the host."""
        cdef void *address = NULL
        cdef int code
        with nogil:
            code = ems_runtime_host_alloc(self._c, nbytes, &address)
        if code:
            raise self._fault(code, f"{nbytes} bytes of pinned memory")
        return <uintptr_t>address

    def free(self, uintptr_t address):
        """Give pinned memory back."""
        cdef int code
        with nogil:
            code = ems_runtime_host_free(self._c, <void *>address)
        if code:
            raise self._fault(code, "end of pinned memory")

    def register(self, uintptr_t address, size_t nbytes):
        """Make memory of the host known to the current device: 1 mapped, 2 pinned."""
        cdef int code, how = 0
        with nogil:
            code = ems_runtime_register(self._c, <void *>address, nbytes, &how)
        if code:
            raise self._fault(code, "registration of host memory")
        return how

    def unregister(self, uintptr_t address):
        """Undo ``register``."""
        cdef int code
        with nogil:
            code = ems_runtime_unregister(self._c, <void *>address)
        if code:
            raise self._fault(code, "end of a registration")

    def submit_to_host(self, uintptr_t spans, Py_ssize_t first, Py_ssize_t count, int device,
                       uintptr_t staging, uintptr_t stream, bytes mask=None):
        """Put the copies of ``count`` keys to ``staging`` on a stream.

        There each key not masked out begins at the next multiple of 64.
        """
        cdef const unsigned char *chosen = NULL
        if mask is not None:
            if PyBytes_GET_SIZE(mask) < first + count:
                raise ValueError(f"mask has {len(mask)} bytes for {first + count} keys")
            chosen = <const unsigned char *>PyBytes_AS_STRING(mask)
        self._submit(<const ems_spans *>spans, first, count, device, staging, NULL, chosen,
                     stream, 1)

    def submit_to_device(self, uintptr_t spans, Py_ssize_t first, Py_ssize_t count, int device,
                         uintptr_t base, places not None, uintptr_t stream):
        """Put the copies of ``count`` keys from their places behind ``base`` on a stream."""
        cdef Py_buffer view
        PyObject_GetBuffer(places, &view, PyBUF_SIMPLE)
        try:
            if view.len < 40 * (first + count):
                raise ValueError(f"places has {view.len} bytes for {first + count} keys")
            self._submit(<const ems_spans *>spans, first, count, device, base,
                         <const ems_place *>view.buf, NULL, stream, 0)
        finally:
            PyBuffer_Release(&view)

    cdef int _submit(self, const ems_spans *spans, Py_ssize_t first, Py_ssize_t count, int device,
                     uintptr_t base, const ems_place *places, const unsigned char *mask,
                     uintptr_t stream, int to_host) except -1:
        cdef ems_copies copies
        cdef size_t failed = SIZE_MAX, total = 0
        cdef int code = -1, made
        if first < 0 or count < 0 or first + count > <Py_ssize_t>spans.nkeys:
            raise ValueError(f"keys {first} to {first + count} of {spans.nkeys}")
        with nogil:
            made = ems_copies_make(&copies, spans, first, count, <unsigned char *>base, places,
                                   mask, to_host)
            if made == 0:
                total = copies.count
                code = ems_runtime_submit(self._c, to_host, device, &copies, <void *>stream,
                                          &failed)
                ems_copies_free(&copies)
        if made:
            raise MemoryError("no memory to describe a batch")
        if code:
            where = "" if failed == SIZE_MAX else f" at copy {failed} of {total}"
            raise self._fault(code, f"submission of {total} copies{where}")
        return 0
