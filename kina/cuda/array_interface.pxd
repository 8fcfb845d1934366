from kina._core.tensor cimport Tensor
from kina.cuda.handles cimport kina_runtime

# A tensor over the memory of an object with `__cuda_array_interface__`, which it holds; the Runtime's stream waits, on
# the device, for the one that the producer names. By the thread that has the Runtime open, with the context current.
# Runs the producer's code, whatever that does. DLPackError naming the field, DTypeError, ForeignDeviceError.
cdef Tensor adopt_cuda_array(kina_runtime *runtime, object source)
