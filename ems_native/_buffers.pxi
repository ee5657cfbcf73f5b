# Callers' memory: one range of it, and a batch of ranges. Included by `_copy.pyx`.


# Signatures are open, so that arguments that do not fit one are refused like any other.
cdef object _MISSING = object()


cdef uint64_t _positive(object value, str name) except 0:
    """Return an argument as a number in 1..2**63-1 or raise what callers are to see."""
    cdef int overflow = 0
    cdef long long number
    if not isinstance(value, int) or isinstance(value, bool):
        raise _argument_error(_not_a_number(value, name))
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow > 0:
        # Not printed: an int of more than 4,300 digits cannot be.
        raise _argument_error(f"{name} has {value.bit_length()} bits, the limit is 2**63 - 1")
    if overflow < 0:
        raise _argument_error(f"{name} is negative, must be above 0")
    if number <= 0:
        raise _argument_error(f"{name} is {value}, must be above 0")
    return <uint64_t>number


cdef str _not_a_number(object value, str name):
    if value is builtins.len:
        return f"{name} is the builtin function len itself, pass a number of bytes"
    if callable(value):
        return f"{name} is {_kind(value)}, pass the int that it returns: call it"
    return f"{name} is {_kind(value)}, must be an int"


cdef str _kind(object value):
    """Name a value in an error; only small ones are printed, whose repr cannot fail."""
    if value is None:
        return "None"
    if type(value) in (bool, float) or (type(value) in (str, bytes) and len(value) <= 40):
        return f"{value!r} of type {type(value).__name__}"
    return f"of type {type(value).__name__}"


cdef str _device_of(object tensor):
    """Name the device of a tensor ("npu:1"); None for the CPU, and for what is no tensor."""
    try:
        device = tensor.device
        return None if device.type == "cpu" else str(device)
    except Exception:
        return None


# Hidden from the collector: in a cycle it would clear a memoryview whose export has not ended,
# which CPython does not survive. A wrapper that is freed ends its export; one that its own memory
# refers to is not freed.
@cython.no_gc
cdef class KvBufferWrapper:
    """One contiguous range of memory: a part of a value, or all of it.

    Args:
        data_ptr: address of the first byte, an int above 0, or the bound method that returns it
            (``tensor.data_ptr``, which is called at once and keeps its tensor alive as long as the
            wrapper lives).
        length: size in bytes, an int above 0.

    Raises:
        EmsException: ``EMS_INVALID_ARGUMENT``, naming the argument, its value and the limit.

    An address is trusted: the memory must stay valid until the calls that use the wrapper have
    ended. Immutable, so safe to share between threads and calls.
    """

    cdef readonly uint64_t data_ptr
    cdef readonly uint64_t length
    cdef readonly bint readonly
    cdef readonly str device
    cdef bint _exported
    cdef object _owner
    cdef Py_buffer _view

    def __init__(self, data_ptr=_MISSING, length=_MISSING, *extra, **unknown):
        cdef uint64_t address
        if length is _MISSING or data_ptr is _MISSING or extra or unknown:
            raise _argument_error("KvBufferWrapper takes two arguments, data_ptr and length")
        if self.data_ptr:
            raise _argument_error("a KvBufferWrapper cannot be changed, make a new one")
        owner = None
        if callable(data_ptr) and data_ptr is not builtins.len:
            owner = data_ptr
            try:
                data_ptr = data_ptr()
            except Exception as error:
                raise _argument_error(f"data_ptr() failed with {type(error).__name__}") from error
            address = _positive(data_ptr, "data_ptr()")
        else:
            address = _positive(data_ptr, "data_ptr")
        self.length = _positive(length, "length")
        if address > LIMIT - self.length:
            raise _argument_error(
                f"data_ptr {address:#x} plus length {self.length} is beyond 2**63"
            )
        if owner is not None:
            self.device = _device_of(getattr(owner, "__self__", None))
        self._owner = owner
        self.data_ptr = address

    @classmethod
    def from_tensor(cls, tensor=_MISSING, *extra, **unknown):
        """Wrap the memory of a torch tensor, on whatever device, and keep the tensor alive.

        Raises:
            EmsException: ``EMS_INVALID_ARGUMENT`` if it is no tensor, or one that is empty, not
                contiguous, or without memory (sparse, meta).
        """
        if tensor is _MISSING or extra or unknown:
            raise _argument_error("KvBufferWrapper.from_tensor takes one argument, tensor")
        try:
            contiguous = tensor.is_contiguous()
            nbytes = tensor.numel() * tensor.element_size()
            data_ptr = tensor.data_ptr
        except Exception as error:
            raise _argument_error(
                f"tensor is {_kind(tensor)}, must be a torch.Tensor with memory of its own"
                f" ({type(error).__name__}: {error})"
            ) from error
        if contiguous is not True:
            raise _argument_error(
                "tensor is not contiguous: give tensor.contiguous(), or a KvBufferWrapper for each"
                " contiguous part"
            )
        if nbytes == 0:
            raise _argument_error("tensor is empty, must have at least one element")
        return cls(data_ptr, nbytes)

    @classmethod
    def from_buffer(cls, obj=_MISSING, *extra, **unknown):
        """Wrap anything contiguous with the buffer protocol: bytes, array, mmap, numpy array, …

        The buffer is held until the wrapper is gone, so it can neither be freed nor resized before.
        A read-only one can be saved but not loaded into.

        Raises:
            EmsException: ``EMS_INVALID_ARGUMENT`` if ``obj`` has no buffer, or one that is empty or
                not contiguous.
        """
        cdef KvBufferWrapper self = cls.__new__(cls)
        if obj is _MISSING or extra or unknown:
            raise _argument_error("KvBufferWrapper.from_buffer takes one argument, obj")
        try:
            PyObject_GetBuffer(obj, &self._view, PyBUF_ANY_CONTIGUOUS)
        except Exception as error:
            raise _argument_error(
                f"obj is {_kind(obj)}, must give a contiguous buffer ({error}); for a tensor there"
                " is KvBufferWrapper.from_tensor"
            ) from error
        self._exported = True
        if self._view.len == 0:
            raise _argument_error(
                f"obj is an empty buffer ({_kind(obj)}), must have at least one byte"
            )
        self.length = <uint64_t>self._view.len
        self.readonly = self._view.readonly
        self.data_ptr = <uintptr_t>self._view.buf
        return self

    def __dealloc__(self):
        if self._exported:
            PyBuffer_Release(&self._view)

    def __reduce__(self):
        raise _argument_error(
            "a KvBufferWrapper holds an address of this process: it cannot be pickled or copied"
        )

    def __repr__(self):
        return f"{type(self).__name__}(data_ptr={self.data_ptr:#x}, length={self.length})"


cdef class Spans:
    """The memory of one batch: for each key the pieces whose concatenation is its value. Immutable.

    Keeps the wrappers it was made of alive, and by them what they hold.
    """

    cdef ems_spans _c
    cdef uint64_t *_first
    cdef ems_piece *_pieces
    cdef list _wrappers
    cdef readonly bytes lengths
    cdef readonly uint64_t nbytes
    cdef readonly bint readonly
    cdef readonly bint foreign
    cdef readonly Py_ssize_t npieces

    def __init__(self):
        raise TypeError("Spans are made by Spans.from_buffers or Spans.from_columns")

    @staticmethod
    def from_buffers(value_list):
        """Describe ``value_list[key][piece]``; what is wrong is named by its indices."""
        cdef Spans self = Spans.__new__(Spans)
        cdef Py_ssize_t nkeys, npieces = 0, k
        if not isinstance(value_list, (list, tuple)):
            raise _argument_error(
                f"value_list is {_kind(value_list)}, must be a list of lists of KvBufferWrapper"
            )
        nkeys = len(value_list)
        for k in range(nkeys):
            value = value_list[k]
            if not isinstance(value, (list, tuple)):
                raise _argument_error(
                    f"value_list[{k}] is {_kind(value)}, must be a list of KvBufferWrapper"
                )
            if not value:
                raise _argument_error(
                    f"value_list[{k}] is empty, must have at least one KvBufferWrapper"
                )
            npieces += len(value)
        self._allocate(nkeys, npieces)
        self._fill(value_list)
        return self

    @staticmethod
    def from_columns(bytes pieces not None, bytes first not None, owner):
        """Describe memory by columns that a planner made: for a caller that checked everything.

        ``pieces`` are pairs of address and size (u64), key after key; those of key ``k`` are
        ``first[k]`` to ``first[k + 1]`` (u64, one more than keys). ``owner`` is kept alive.
        """
        cdef Spans self = Spans.__new__(Spans)
        cdef Py_ssize_t nkeys = len(first) // 8 - 1, npieces = len(pieces) // 16, k
        cdef const uint64_t *starts = <const uint64_t *>PyBytes_AS_STRING(first)
        cdef uint64_t *lengths
        cdef uint64_t i, total, batch = 0
        if nkeys < 0 or starts[0] != 0 or starts[nkeys] != <uint64_t>npieces:
            raise ValueError(f"{npieces} pieces, {nkeys} keys: the columns do not fit")
        self._describe(nkeys, npieces)
        self._wrappers = [pieces, first, owner]
        self._c.first = starts
        self._c.pieces = <const ems_piece *>PyBytes_AS_STRING(pieces)
        lengths = <uint64_t *>self._c.lengths
        for k in range(nkeys):
            if starts[k] >= starts[k + 1] or starts[k + 1] > <uint64_t>npieces:
                raise ValueError(f"key {k} has pieces {starts[k]} to {starts[k + 1]}")
            total = 0
            for i in range(starts[k], starts[k + 1]):
                total += self._c.pieces[i].nbytes
            lengths[k] = total
            batch += total
        self.nbytes = batch
        return self

    cdef int _describe(self, Py_ssize_t nkeys, Py_ssize_t npieces) except -1:
        self.lengths = PyBytes_FromStringAndSize(NULL, nkeys * 8)
        self.npieces = npieces
        self._c.nkeys = nkeys
        self._c.lengths = <const uint64_t *>PyBytes_AS_STRING(self.lengths)
        return 0

    cdef int _allocate(self, Py_ssize_t nkeys, Py_ssize_t npieces) except -1:
        self._first = <uint64_t *>malloc((nkeys + 1) * sizeof(uint64_t))
        self._pieces = <ems_piece *>malloc((npieces + 1) * sizeof(ems_piece))
        if self._first is NULL or self._pieces is NULL:
            raise MemoryError(f"no memory to describe {npieces} buffers")
        self._describe(nkeys, npieces)
        self._wrappers = [None] * npieces
        self._c.first = self._first
        self._c.pieces = self._pieces
        return 0

    cdef int _fill(self, value_list) except -1:
        # Nothing in here runs Python code unless it fails, but the allocations before could have
        # (a garbage collection): sizes are checked again.
        cdef uint64_t *lengths = <uint64_t *>self._c.lengths
        cdef list wrappers = self._wrappers
        cdef Py_ssize_t nkeys = self._c.nkeys, npieces = self.npieces, at = 0, k, j, n
        cdef uint64_t total, batch = 0
        cdef KvBufferWrapper wrapper
        if len(value_list) != nkeys:
            raise _argument_error("value_list changed while it was read")
        for k in range(nkeys):
            value = value_list[k]
            n = len(value) if isinstance(value, (list, tuple)) else -1
            if n < 1 or at + n > npieces:
                raise _argument_error("value_list changed while it was read")
            self._first[k] = at
            total = 0
            for j in range(n):
                piece = (<list>value)[j] if isinstance(value, list) else (<tuple>value)[j]
                if not isinstance(piece, KvBufferWrapper):
                    raise _argument_error(
                        f"value_list[{k}][{j}] is {_kind(piece)}, must be a KvBufferWrapper"
                    )
                wrapper = <KvBufferWrapper>piece
                if wrapper.data_ptr == 0:
                    raise _argument_error(
                        f"value_list[{k}][{j}] was never initialised: call KvBufferWrapper.__init__"
                    )
                self._pieces[at].address = wrapper.data_ptr
                self._pieces[at].nbytes = wrapper.length
                if wrapper.readonly:
                    self.readonly = True
                if wrapper.device is not None:
                    self.foreign = True
                total += wrapper.length
                if total >= LIMIT:
                    raise _argument_error(f"value_list[{k}] is 2**63 bytes or longer")
                wrappers[at] = piece
                at += 1
            lengths[k] = total
            batch += total
            if batch >= LIMIT:
                raise _argument_error(f"value_list[:{k + 1}] is 2**63 bytes or longer")
        if at != npieces:
            raise _argument_error("value_list changed while it was read")
        self._first[nkeys] = at
        self.nbytes = batch
        return 0

    def __dealloc__(self):
        free(self._first)
        free(self._pieces)

    @property
    def handle(self):
        """Address of the C description, for the device modules; valid as long as the object."""
        return <uintptr_t>&self._c

    def staged(self, Py_ssize_t first, Py_ssize_t count, uintptr_t address, bytes mask=None):
        """Describe the same keys as they lie in a staging buffer: one piece each.

        Keys ``first`` to ``first + count`` (but for those with ``mask[k] == 0``) follow each other
        from ``address`` on, each at the next multiple of 64; no other key may be used.
        """
        cdef Spans other = Spans.__new__(Spans)
        cdef Py_ssize_t nkeys = self._c.nkeys, k
        cdef const unsigned char *chosen = NULL
        if first < 0 or count < 0 or first > nkeys - count:
            raise ValueError(f"keys {first} to {first + count} of {nkeys}")
        if mask is not None:
            if PyBytes_GET_SIZE(mask) < first + count:
                raise ValueError(f"mask has {len(mask)} bytes for {first + count} keys")
            chosen = <const unsigned char *>PyBytes_AS_STRING(mask)
        other._allocate(nkeys, nkeys)
        other.lengths = self.lengths
        other._c.lengths = <const uint64_t *>PyBytes_AS_STRING(self.lengths)
        other.nbytes = self.nbytes
        for k in range(nkeys):
            other._first[k] = k
            other._pieces[k].address = 0
            other._pieces[k].nbytes = self._c.lengths[k]
            if first <= k < first + count and (chosen is NULL or chosen[k]):
                other._pieces[k].address = address
                address += (self._c.lengths[k] + 63) // 64 * 64
        other._first[nkeys] = nkeys
        return other

    def where(self, Py_ssize_t piece):
        """Return ``(key, index in its value)`` of a piece counted over the batch."""
        cdef Py_ssize_t k = 0
        if not 0 <= piece < self.npieces:
            raise IndexError(f"piece {piece}, there are {self.npieces}")
        while <Py_ssize_t>self._c.first[k + 1] <= piece:
            k += 1
        return k, piece - <Py_ssize_t>self._c.first[k]

    def first_foreign(self):
        """Return ``(key, piece, device)`` of the first tensor that is not on the CPU, or None."""
        cdef Py_ssize_t at = 0
        if not self.foreign:
            return None
        while (<KvBufferWrapper>self._wrappers[at]).device is None:
            at += 1
        return *self.where(at), (<KvBufferWrapper>self._wrappers[at]).device

    @property
    def nkeys(self):
        """Number of keys."""
        return self._c.nkeys

    def length_of(self, Py_ssize_t k):
        """Return the number of bytes of key ``k``: the sum of its pieces."""
        if not 0 <= k < <Py_ssize_t>self._c.nkeys:
            raise IndexError(f"key {k}, there are {self._c.nkeys}")
        return self._c.lengths[k]

    def first_readonly(self):
        """Return ``(key, piece)`` of the first read-only buffer, or None."""
        cdef Py_ssize_t at = 0, k
        if not self.readonly:
            return None
        while not (<KvBufferWrapper>self._wrappers[at]).readonly:
            at += 1
        k = 0
        while <Py_ssize_t>self._first[k + 1] <= at:
            k += 1
        return k, at - <Py_ssize_t>self._first[k]

    def pieces_of(self, Py_ssize_t k):
        """Return ``[(address, nbytes), …]`` of key ``k``."""
        cdef uint64_t i
        self.length_of(k)
        return [
            (self._c.pieces[i].address, self._c.pieces[i].nbytes)
            for i in range(self._c.first[k], self._c.first[k + 1])
        ]

    def __reduce__(self):
        raise TypeError("Spans hold addresses of this process")
