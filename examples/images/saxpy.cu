// y = a * x + y, for the images beside it. They were made by CUDA 13.0.88, from PyPI (nvidia-cuda-nvcc, nvidia-nvvm,
// nvidia-cuda-crt, nvidia-cuda-runtime), with
//
//   nvcc -fatbin -Xfatbin --compress-mode=none -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
//       -gencode 'arch=compute_100,code=[sm_100,compute_100]' -o saxpy.fatbin saxpy.cu
//   nvcc -cubin -arch=sm_80 -o saxpy_sm80.cubin saxpy.cu
extern "C" __global__ void saxpy(float *y, const float *x, float a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
