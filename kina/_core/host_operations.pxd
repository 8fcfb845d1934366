from kina._core.resource cimport MemoryResource
from kina._core.tensor cimport Tensor

# a + b, a * b, a @ b on host tensors of one dtype, NumPy's shapes and rules. `out` is None or the tensor to
# write; without it the result's memory comes from `memory` (None: the host's own resource).
cdef Tensor host_add(Tensor a, Tensor b, Tensor out, MemoryResource memory)
cdef Tensor host_multiply(Tensor a, Tensor b, Tensor out, MemoryResource memory)
cdef Tensor host_matmul(Tensor a, Tensor b, Tensor out, MemoryResource memory)
