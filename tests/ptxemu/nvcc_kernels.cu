// Everyday CUDA C++ in several styles, for what nvcc makes of it: guards, loops, shuffles, shared memory, switch tables.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

extern "C" __global__ void silu_sum(const float* x, float* out, int n) {
    __shared__ float of_warp[8];
    float v = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[i] / (1.f + __expf(-x[i]));
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int i = 0; i < blockDim.x / 32; i++) sum += of_warp[i];
        atomicAdd(out, sum);
    }
}

extern "C" __global__ void convert(const __nv_bfloat16* x, __half* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __float2half(__bfloat162float(x[i]) * 1.5f);
}

extern "C" __global__ void integers(const int* a, const int* b, int* q, int* r, long long* m, int n) {
    int i = threadIdx.x;
    if (i >= n) return;
    q[i] = a[i] / b[i];
    r[i] = a[i] % b[i];
    m[i] = (long long)a[i] * b[i] / 7;
    switch (a[i] & 3) {
        case 0: q[i] += 1; break;
        case 1: q[i] -= 100; break;
        case 2: q[i] *= 3; break;
        default: q[i] ^= 5;
    }
}
