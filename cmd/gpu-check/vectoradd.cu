// Adds two vectors on the GPU and checks the sum: the least that shows that a container can compute.
#include <cstdio>
#include <cuda_runtime.h>

#define CHECK(call)                                                                        \
    do {                                                                                   \
        cudaError_t err = (call);                                                          \
        if (err != cudaSuccess) {                                                          \
            fprintf(stderr, "%s: %s (%d)\n", #call, cudaGetErrorString(err), (int)err);    \
            return 1;                                                                      \
        }                                                                                  \
    } while (0)

__global__ void add(const float *a, const float *b, float *sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}

int main() {
    const int n = 1 << 20;
    static float a[n], b[n], sum[n];
    for (int i = 0; i < n; i++) {
        a[i] = (float)i;
        b[i] = 2.0f * (float)i;
    }
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    float *da, *db, *dsum;
    CHECK(cudaMalloc(&da, sizeof a));
    CHECK(cudaMalloc(&db, sizeof b));
    CHECK(cudaMalloc(&dsum, sizeof sum));
    CHECK(cudaMemcpy(da, a, sizeof a, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b, sizeof b, cudaMemcpyHostToDevice));
    add<<<(n + 255) / 256, 256>>>(da, db, dsum, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(sum, dsum, sizeof sum, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        if (sum[i] != 3.0f * (float)i) {
            fprintf(stderr, "sum[%d] is %f\n", i, sum[i]);
            return 1;
        }
    }
    printf("%d devices, added %d pairs on %s\n", devices, n, prop.name);
    return 0;
}
