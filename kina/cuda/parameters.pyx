# cython: annotation_typing=False
"""Arguments of a launch: each is checked, converted and put where the kernel looks for it.

Source: CUDA Driver API, "Execution Control" (cuLaunchKernel with the `extra` parameter buffer).
"""

cimport cython
from cpython.object cimport PyTypeObject
from libc.math cimport fabs, isfinite
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from kina._core.dtype cimport DType, TypedScalar, dtype_by_id, is_numpy_scalar, pack_scalar
from kina._core.status cimport check
from kina._core.storage cimport (
    KINA_DEVICE_CUDA,
    KINA_DEVICE_CUDA_MANAGED,
    KINA_TENSOR_C_CONTIGUOUS,
    KINA_TENSOR_MISALIGNED,
    KINA_TENSOR_READ_ONLY,
    KINA_TENSOR_SELF_OVERLAP,
    kina_dl_exchange_api,
    kina_release,
    kina_retain,
    kina_tensor,
    kina_tensor_address,
)
from kina._core.tensor cimport Tensor
from kina.cuda.borrowed cimport (
    ask_streams,
    borrow,
    kina_borrowed,
    lease_object,
    look_at_laziness,
    order_borrowed,
    table_of,
)
from kina.cuda.captured cimport follow_capture, may_be_captured
from kina.cuda.handles cimport kina_raw_block, kina_ref
from kina.cuda.refs cimport (
    DeviceBytes,
    TensorMut,
    TensorRef,
    check_aligned,
    check_borrow,
    check_writable,
    look_at_block,
    span_of,
)
from kina.cuda.retire cimport lease_storage
from kina.cuda.signature cimport PARAMETER_SCALAR, PARAMETER_TENSOR, PARAMETER_WORKSPACE, kina_parameter

from kina.errors import (
    ArgumentError,
    DTypeError,
    ForeignDeviceError,
    ForeignRuntimeError,
    InvalidLayoutError,
    NonContiguousError,
    SessionClosedError,
    UnsupportedError,
)

__all__ = []

cdef enum:
    FEW_BORROWED = 16   # arguments that are borrowed without an allocation

cdef double FLOAT_LIMIT = 3.4028235677973366e38  # from there on a finite double rounds to no finite float


cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030C0000
    #define kina_is_small(value) PyUnstable_Long_IsCompact((PyLongObject *)(value))
    #define kina_small(value) PyUnstable_Long_CompactValue((PyLongObject *)(value))
    #else /* an int of at most one digit */
    #define kina_is_small(value) (Py_SIZE(value) >= -1 && Py_SIZE(value) <= 1)
    #define kina_small(value) (Py_SIZE(value) * (Py_ssize_t)((PyLongObject *)(value))->ob_digit[0])
    #endif

    static inline void kina_put(char *target, const void *number, int nbytes) {
        switch (nbytes) { /* little endian, as every host of a CUDA device is */
        case 8: memcpy(target, number, 8); break;
        case 4: memcpy(target, number, 4); break;
        case 2: memcpy(target, number, 2); break;
        default: memcpy(target, number, 1);
        }
    }

    /* Store a Python int if it fits `nbytes`; 0 where it does not (the slow path then says why). */
    static int kina_store_unsigned(PyObject *value, int nbytes, char *target) {
        unsigned long long number;
        if (kina_is_small(value)) {
            if (kina_small(value) < 0) return 0;
            number = (unsigned long long)kina_small(value);
        } else {
            number = PyLong_AsUnsignedLongLong(value);
            if (number == (unsigned long long)-1 && PyErr_Occurred()) {
                PyErr_Clear();
                return 0;
            }
        }
        if (nbytes < 8 && number >> (8 * nbytes)) return 0;
        kina_put(target, &number, nbytes);
        return 1;
    }
    static int kina_store_signed(PyObject *value, int nbytes, char *target) {
        int overflow = 0;
        long long number, limit;
        if (kina_is_small(value)) {
            number = kina_small(value);
        } else {
            number = PyLong_AsLongLongAndOverflow(value, &overflow);
            if (overflow || (number == -1 && PyErr_Occurred())) {
                PyErr_Clear();
                return 0;
            }
        }
        limit = nbytes < 8 ? (1LL << (8 * nbytes - 1)) - 1 : 0x7FFFFFFFFFFFFFFFLL;
        if (number > limit || number < -limit - 1) return 0;
        kina_put(target, &number, nbytes);
        return 1;
    }
    """
    bint store_unsigned "kina_store_unsigned"(PyObject *value, int nbytes, char *target)
    bint store_signed "kina_store_signed"(PyObject *value, int nbytes, char *target)
    # Borrowed arguments stay pointers on this path: a reference of ours to each would be counted up and down.
    PyTypeObject *Py_TYPE(PyObject *value)
    bint PyLong_CheckExact(PyObject *value)
    bint PyFloat_CheckExact(PyObject *value)
    double PyFloat_AS_DOUBLE(PyObject *value)
    bint unlikely(bint condition)  # Cython's own


@cython.no_gc  # nothing it refers to can refer back
cdef class Parameters:
    """Parameters()"""

    def __dealloc__(self):
        free(self.slots)
        free(self.offsets)
        free(self.sizes)
        with nogil:
            kina_release(self.runtime)

    cdef int add(self, size_t offset, size_t size) except -1:
        cdef size_t *grown
        if self.count == self.capacity:
            self.capacity = max(8, 2 * self.capacity)
            grown = <size_t *> realloc(self.offsets, self.capacity * sizeof(size_t))
            if grown != NULL:
                self.offsets = grown
                grown = <size_t *> realloc(self.sizes, self.capacity * sizeof(size_t))
            if grown == NULL:
                raise MemoryError("no host memory for a function")
            self.sizes = grown
        self.offsets[self.count] = offset
        self.sizes[self.count] = size
        self.padded = self.padded or offset != self.nbytes
        self.nbytes = max(self.nbytes, offset + size)
        self.count += 1
        return 0

    cdef int match(self, object declared) except -1:
        cdef Signature signature = self.signature
        cdef int i
        if self.nbytes > MAX_PARAMETER_BYTES:
            raise UnsupportedError(f"{self.name} takes {self.nbytes} bytes of parameters, more than the "
                                   f"{MAX_PARAMETER_BYTES} a launch can carry", operation="function")
        if signature is None:
            return 0
        if signature.count != self.count:
            raise ArgumentError(
                f"the signature of {self.name} has {signature.count} parameter(s), the kernel {self.count}",
                operation="function",
            )
        for i in range(signature.count):
            if <size_t> signature.parameters[i].nbytes != self.sizes[i]:
                raise ArgumentError(
                    f"parameter {i} of {self.name} takes {self.sizes[i]} bytes in the kernel, "
                    f"{signature.parameters[i].nbytes} by its signature ({signature.text!r})", operation="function",
                )
            if declared is not None and len(declared) == self.count and not signature.fits(i, declared[i]):
                raise ArgumentError(
                    f"parameter {i} of {self.name} is declared .{declared[i]} in the kernel, "
                    f"{signature.words[i]!r} by its signature ({signature.text!r})", operation="function",
                )
        return self.plan()

    cdef int plan(self) except -1:
        """The slots, in the order in which they are filled."""
        cdef kina_parameter *parameter
        cdef kina_slot *slot
        cdef DType dtype
        cdef int i
        slot = self.slots = <kina_slot *> calloc(max(1, self.count), sizeof(kina_slot))
        if slot == NULL:
            raise MemoryError("no host memory for a function")
        for group in range(3):
            for i in range(self.count):
                parameter = &self.signature.parameters[i]
                if group != (0 if parameter.kind == PARAMETER_SCALAR else 1 if parameter.writable else 2):
                    continue
                slot.position = i
                slot.offset = self.offsets[i]
                slot.nbytes = parameter.nbytes
                slot.kind = parameter.kind
                slot.letter = parameter.letter
                slot.writable = parameter.writable
                slot.looked_at = KINA_TENSOR_C_CONTIGUOUS | KINA_TENSOR_MISALIGNED
                if slot.writable:
                    slot.looked_at |= KINA_TENSOR_READ_ONLY | KINA_TENSOR_SELF_OVERLAP
                if parameter.dtype_id >= 0:
                    dtype = dtype_by_id(parameter.dtype_id)
                    slot.dtype = <void *> dtype
                self.numbers += group == 0
                self.written += group <= 1
                slot += 1
        return 0

    # ------------------------------------------------------------------------------------ the long ways

    cdef PyObject *borrowed_tensor(self, kina_slot *slot, PyObject *given, kina_ref **own) except NULL:
        """The tensor of a ref or a workspace; whoever passed that holds it."""
        cdef object argument = <object> given
        cdef int i = slot.position
        cdef TensorRef ref
        cdef Tensor tensor
        if slot.kind == PARAMETER_WORKSPACE:
            tensor = self.tensor_of(i, argument)
            own[0] = &(<DeviceBytes> argument).c
            return <PyObject *> tensor
        if not isinstance(argument, TensorRef):
            raise ArgumentError(
                f"argument {i} of {self.name} is a tensor of {self.signature.dtypes[i].name}, got "
                f"{type(argument).__name__}: session.from_host uploads an array, session.adopt takes in one of the "
                "device whose type has no C exchange table of DLPack", operation="launch",
            )
        ref = <TensorRef> argument
        if not ref.c.alive:
            raise SessionClosedError(f"argument {i} of {self.name} is a ref that has ended", operation="launch")
        if slot.writable and not ref.c.writable:
            raise ArgumentError(f"argument {i} of {self.name} is written: pass a mut, not a ref", operation="launch")
        own[0] = &ref.c
        return <PyObject *> ref._tensor

    cdef Tensor tensor_of(self, int i, object workspace):
        if not isinstance(workspace, DeviceBytes):
            raise ArgumentError(f"argument {i} of {self.name} is a workspace (raw.workspace), got "
                                f"{type(workspace).__name__}", operation="launch")
        if not (<DeviceBytes> workspace).c.alive:
            raise SessionClosedError(f"argument {i} of {self.name} is a workspace that has ended", operation="launch")
        return (<DeviceBytes> workspace)._tensor

    cdef int refuse_count(self, Py_ssize_t count) except -1:
        raise ArgumentError(f"{self.name} takes {self.count} argument(s), got {count}", operation="launch")

    cdef int refuse_aliases(self, kina_slot *one, kina_slot *other) except -1:
        cdef int i = one.position
        cdef int j = other.position
        raise InvalidLayoutError(
            f"arguments {min(i, j)} and {max(i, j)} of {self.name} overlap, and argument "
            f"{i if one.writable else j} is written", operation="launch",
        )

    cdef int refuse_tensor(self, kina_slot *slot, PyObject *argument) except -1:
        cdef Tensor tensor = <Tensor> argument
        cdef int i = slot.position
        cdef kina_runtime *runtime = self.runtime
        where = f"argument {i} of {self.name}"
        if tensor.c.storage.runtime != runtime.stream.runtime:
            if (tensor.c.device.device_type not in (KINA_DEVICE_CUDA, KINA_DEVICE_CUDA_MANAGED)
                    or tensor.c.device.device_id != runtime.device.ordinal):
                raise ForeignDeviceError(f"{where} lives on {tensor.device}, the kernel runs on cuda:"
                                         f"{runtime.device.ordinal}", operation="launch")
            raise ForeignRuntimeError(f"{where} belongs to another Runtime: take it in with session.adopt(tensor)",
                                      operation="launch")
        if tensor._dtype is not self.signature.dtypes[i]:
            raise DTypeError(f"{where} is declared {self.signature.dtypes[i].name}, got {tensor._dtype.name}",
                             operation="launch")
        if not tensor.c.flags & KINA_TENSOR_C_CONTIGUOUS:
            raise NonContiguousError(
                f"{where} has shape {tensor.shape} with strides {tensor.strides}: a kernel that takes strides gets "
                "them as arguments and the tensor as raw.ref or raw.mut, without a signature", operation="launch",
            )
        check_aligned(tensor, "launch")
        check_writable(tensor, "launch")
        return 0

    cdef int pack_number(self, kina_slot *slot, PyObject *given, char *target) except -1:
        cdef object argument = <object> given
        cdef int i = slot.position
        cdef DType dtype = self.signature.dtypes[i]
        if dtype is None:
            return self.pack_struct(slot, argument, target)
        if isinstance(argument, (Tensor, TensorRef)):
            raise ArgumentError(f"argument {i} of {self.name} is a scalar {dtype.name}, got {type(argument).__name__}",
                                operation="launch")
        try:
            if isinstance(argument, TypedScalar):
                if (<TypedScalar> argument).dtype is not dtype:
                    raise ArgumentError(f"it is a {(<TypedScalar> argument).dtype.name}")
                memcpy(target, (<TypedScalar> argument).raw, dtype.itemsize)
                return 0
            pack_scalar(dtype, argument, target)
        except ArgumentError as error:
            raise ArgumentError(f"argument {i} of {self.name} is a scalar {dtype.name}: {error}",
                                operation="launch") from None
        return 0

    cdef int pack_struct(self, kina_slot *slot, object argument, char *target) except -1:
        cdef int nbytes = slot.nbytes
        cdef int i = slot.position
        cdef bytes octets
        if type(argument) is bytes:
            octets = argument
        elif is_numpy_scalar(argument) and argument.dtype.kind == "V":
            octets = argument.tobytes()
        else:
            raise ArgumentError(f"argument {i} of {self.name} is a struct: bytes, or a NumPy scalar of a structured "
                                f"dtype, not {type(argument).__name__}", operation="launch")
        if len(octets) != nbytes:
            raise ArgumentError(f"argument {i} of {self.name} is a struct of {nbytes} bytes, got {len(octets)}",
                                operation="launch")
        memcpy(target, <const char *> octets, nbytes)
        return 0

    cdef int pack_foreign(self, PyObject **arguments, char *buffer) except -1:
        """The tensors of a launch, some of which are other libraries'. What may run anybody's code comes first: what is
        leased until then may be sealed by it, and the spans are scratch. Waits come last: a launch that is refused has
        enqueued none."""
        cdef kina_runtime *runtime = self.runtime
        cdef kina_slot *slot = self.slots + self.numbers
        cdef kina_slot *end = self.slots + self.count
        cdef kina_borrowed few[FEW_BORROWED]
        cdef kina_borrowed *lent = few
        cdef const kina_dl_exchange_api *api
        cdef int count = 0
        cdef int i
        if end - slot > FEW_BORROWED:
            lent = <kina_borrowed *> malloc((end - slot) * sizeof(kina_borrowed))
            if lent == NULL:
                raise MemoryError("no host memory for the arguments of a launch")
        try:
            while slot != end:
                if is_foreign(slot, arguments[slot.position]):
                    api = table_of(arguments[slot.position])
                    if api != NULL:
                        lent[count].argument = arguments[slot.position]
                        lent[count].position = slot.position
                        lent[count].api = api
                        look_at_laziness(&lent[count], <DType> slot.dtype, self.name)
                        count += 1
                slot += 1
            for i in range(count):
                borrow(&lent[i], self.signature.dtypes[lent[i].position], runtime.device.ordinal, self.name)
            ask_streams(lent, count, runtime.device.ordinal)
            look_again(runtime)
            pack_tensors(self, arguments, buffer, lent, count)
            check(order_borrowed(runtime, lent, count))
        finally:
            if lent != few:
                free(lent)
        return 0

    cdef int pack_borrowed(self, kina_slot *slot, kina_borrowed *lent, kina_raw_block *block, char *target) except -1:
        slot.low = lent.address if lent.nbytes != 0 else 0
        slot.high = slot.low + lent.nbytes
        if block.refs != NULL or block.outer != NULL:
            check_borrow(block, slot.low, slot.high, slot.writable, NULL, "launch")
        check(lease_object(self.runtime, lent.argument))
        (<uint64_t *> target)[0] = lent.address
        return 0

    cdef int pack_loose(self, PyObject **arguments, char *buffer) except -1:
        """Numbers first here too: their conversion may run anybody's code, which may end refs and seal what is leased
        already."""
        cdef int i
        for i in range(self.count):
            if not isinstance(<object> arguments[i], (TensorRef, DeviceBytes)):
                self.pack_untyped(i, <object> arguments[i], buffer + self.offsets[i])
        look_again(self.runtime)
        for i in range(self.count):
            if isinstance(<object> arguments[i], (TensorRef, DeviceBytes)):
                self.pack_untyped(i, <object> arguments[i], buffer + self.offsets[i])
        return 0

    cdef int pack_untyped(self, int i, object argument, char *target) except -1:
        cdef kina_runtime *runtime = self.runtime
        cdef size_t wanted = self.sizes[i]
        cdef Tensor tensor = None
        cdef uint64_t address
        cdef bytes octets
        if isinstance(argument, TensorRef):
            if not (<TensorRef> argument).c.alive:
                raise SessionClosedError(f"argument {i} of {self.name} is a ref that has ended", operation="launch")
            tensor = (<TensorRef> argument)._tensor
        elif isinstance(argument, DeviceBytes):
            tensor = self.tensor_of(i, argument)
        if tensor is not None:
            if tensor.c.storage.runtime != runtime.stream.runtime:
                raise ForeignRuntimeError(f"argument {i} of {self.name} belongs to another Runtime", operation="launch")
            if wanted != 8:
                raise ArgumentError(f"parameter {i} of {self.name} takes {wanted} bytes, an address has 8",
                                    operation="launch")
            check(lease_storage(runtime, tensor.c.storage))
            address = <uint64_t> <uintptr_t> kina_tensor_address(&tensor.c)
            memcpy(target, &address, 8)
            return 0
        if isinstance(argument, TypedScalar):
            octets = (<char *> (<TypedScalar> argument).raw)[:(<TypedScalar> argument).dtype.itemsize]
        elif type(argument) is bytes:
            octets = argument
        elif is_numpy_scalar(argument) and argument.dtype.kind in "biufcV":
            octets = argument.tobytes()
        else:
            raise ArgumentError(
                f"argument {i} of {self.name}: without a signature only typed scalars (kina.f32(2), np.float32(2)), "
                f"refs, workspaces and bytes are accepted, not {type(argument).__name__}", operation="launch",
            )
        if <size_t> len(octets) != wanted:
            raise ArgumentError(f"argument {i} of {self.name} has {len(octets)} bytes, its parameter {wanted}",
                                operation="launch")
        memcpy(target, <const char *> octets, wanted)
        return 0


cdef int look_again(kina_runtime *runtime) except -1:
    """Anybody's code has run: it may have left the block, or begun or ended a capture."""
    if may_be_captured(runtime):
        follow_capture(runtime, b"launch")
    look_at_block(runtime, b"launch")
    return 0


cdef Parameters make_parameters(kina_runtime *runtime, str name, Signature signature):
    cdef Parameters parameters = Parameters.__new__(Parameters)
    kina_retain(runtime)
    parameters.runtime = runtime
    parameters.name = name
    parameters.signature = signature
    return parameters


# ---------------------------------------------------------------------------------------------- the hot way

cdef int pack_arguments(Parameters parameters, PyObject **arguments, Py_ssize_t count, char *buffer) except -1:
    if unlikely(count != parameters.count):
        parameters.refuse_count(count)
    if parameters.padded:
        memset(buffer, 0, parameters.nbytes)
    if unlikely(parameters.signature is None):
        return parameters.pack_loose(arguments, buffer)
    return pack_typed(parameters, arguments, buffer)


cdef inline int pack_typed(Parameters parameters, PyObject **arguments, char *buffer) except -1:
    """Every argument at the offset that the driver reported, converted and checked as the signature says."""
    cdef kina_slot *slot = parameters.slots
    cdef kina_slot *tensors = slot + parameters.numbers
    cdef PyObject *argument
    cdef bint strange = False
    # Numbers first: their conversion may run anybody's code, and the spans of the tensors are scratch.
    while slot != tensors:
        argument = arguments[slot.position]
        if not store_number(slot, argument, buffer + slot.offset):
            parameters.pack_number(slot, argument, buffer + slot.offset)
            strange = True
        slot += 1
    if strange:
        look_again(parameters.runtime)
    return pack_tensors(parameters, arguments, buffer, NULL, 0)


cdef inline int pack_tensors(Parameters parameters, PyObject **arguments, char *buffer, kina_borrowed *lent,
                             int count) except -1:
    """`lent`: those of other libraries, in the order of the slots; NULL: if there are any, they are borrowed first."""
    cdef kina_slot *tensors = parameters.slots + parameters.numbers
    cdef kina_slot *reads = parameters.slots + parameters.written
    cdef kina_slot *end = parameters.slots + parameters.count
    cdef kina_slot *slot = tensors
    cdef kina_slot *other
    cdef kina_raw_block *block = parameters.runtime.block
    cdef PyObject *argument
    cdef kina_ref *own
    while slot != end:
        argument = arguments[slot.position]
        if unlikely(Py_TYPE(argument) != <PyTypeObject *> Tensor or slot.kind != PARAMETER_TENSOR):
            if lent == NULL and is_foreign(slot, argument):
                return parameters.pack_foreign(arguments, buffer)
            if count != 0 and lent.position == slot.position:
                parameters.pack_borrowed(slot, lent, block, buffer + slot.offset)
                lent += 1
                count -= 1
            else:
                own = NULL
                argument = parameters.borrowed_tensor(slot, argument, &own)
                pack_tensor(parameters, slot, argument, block, own, buffer + slot.offset)
        else:
            pack_tensor(parameters, slot, argument, block, NULL, buffer + slot.offset)
        # What is written overlaps no other argument of the same launch; the written ones come first.
        other = tensors
        while other != reads and other != slot:
            if unlikely(other.low < slot.high and slot.low < other.high):
                parameters.refuse_aliases(slot, other)
            other += 1
        slot += 1
    return 0


cdef inline bint is_foreign(kina_slot *slot, PyObject *argument) noexcept:
    """Where a tensor goes, and none of kina's own."""
    cdef PyTypeObject *kind = Py_TYPE(argument)
    return (slot.kind == PARAMETER_TENSOR and kind != <PyTypeObject *> Tensor and kind != <PyTypeObject *> TensorRef
            and kind != <PyTypeObject *> TensorMut)


cdef inline int pack_tensor(Parameters parameters, kina_slot *slot, PyObject *argument, kina_raw_block *block,
                            kina_ref *own, char *target) except -1:
    cdef kina_runtime *runtime = parameters.runtime
    cdef kina_tensor *tensor = &(<Tensor> argument).c
    if unlikely(tensor.storage.runtime != runtime.stream.runtime or <void *> (<Tensor> argument)._dtype != slot.dtype
                or tensor.flags & slot.looked_at != KINA_TENSOR_C_CONTIGUOUS):
        parameters.refuse_tensor(slot, argument)
    span_of(tensor, &slot.low, &slot.high)
    if unlikely(block.refs != NULL or block.outer != NULL):
        check_borrow(block, slot.low, slot.high, slot.writable, own, "launch")
    check(lease_storage(runtime, tensor.storage))
    (<uint64_t *> target)[0] = <uint64_t> <uintptr_t> kina_tensor_address(tensor)
    return 0


cdef inline bint store_number(kina_slot *slot, PyObject *argument, char *target) noexcept:
    """The short way for plain Python floats and ints that fit; everything else goes the long one."""
    cdef double value
    if PyFloat_CheckExact(argument):
        value = PyFloat_AS_DOUBLE(argument)
        if slot.letter == c"d":
            (<double *> target)[0] = value
            return True
        if slot.letter == c"f" and (fabs(value) < FLOAT_LIMIT or not isfinite(value)):
            (<float *> target)[0] = <float> value
            return True
    elif PyLong_CheckExact(argument):
        if slot.letter == c"u":
            return store_unsigned(argument, slot.nbytes, target)
        if slot.letter == c"i":
            return store_signed(argument, slot.nbytes, target)
    return False
