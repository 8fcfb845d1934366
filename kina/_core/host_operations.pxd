from kina._core.tensor cimport Tensor

# a + b, a * b, a @ b on host tensors of one dtype, NumPy's shapes and rules. `out` is None or the tensor to
# write.
cdef Tensor host_add(Tensor a, Tensor b, Tensor out)
cdef Tensor host_multiply(Tensor a, Tensor b, Tensor out)
cdef Tensor host_matmul(Tensor a, Tensor b, Tensor out)
