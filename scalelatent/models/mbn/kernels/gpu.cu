// The kernels of a bootstrap network on the device. gpu.py compiles and launches this text; tests compare it with
// reference.py.
//
// The codes are those of a CPU. Scores that float32 cannot order are compared in float64, where products of two float32
// are exact and sums go over the columns in order; of equal scores the lowest index wins (on integers equal distances
// have equal scores, see cpu/dense.py). Counts are integers. So the codes do not depend on the order of thread blocks or
// of atomic additions.
//
// tests/gpu/emulator.hpp defines the CUDA words of this file for a C++ compiler: the tests run this text on a CPU.

constexpr int THREADS = 128;  // threads of a block; gpu.py launches with the same number
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 4096;  // centroids whose sums or counts are in the shared memory of a thread block
constexpr int NO_CENTROID = 0x7fffffff;
constexpr float LOWEST = -3.402823466e+38f;
constexpr unsigned EVERY_LANE = 0xffffffffu;

using byte = unsigned char;

// Keeps the larger value, and of equal values the lower index.
template <class T>
__device__ __forceinline__ void take_larger(T& value, int& index, T other, int at) {
    if (other > value || (other == value && at < index)) {
        value = other;
        index = at;
    }
}

// Finds the largest value of a thread block for thread 0. All threads call it.
template <class T>
__device__ __forceinline__ void block_largest(T& value, int& index) {
    __shared__ T values[WARPS];
    __shared__ int indices[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const T other = __shfl_down_sync(EVERY_LANE, value, step);
        const int at = __shfl_down_sync(EVERY_LANE, index, step);
        take_larger(value, index, other, at);
    }
    if (threadIdx.x % 32 == 0) {
        values[threadIdx.x / 32] = value;
        indices[threadIdx.x / 32] = index;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < WARPS; ++warp) take_larger(value, index, values[warp], indices[warp]);
    __syncthreads();  // the next call writes the arrays again
}

// One warp per row: writes the columns of a clustering as float32, and an upper bound of the row's length on them.
template <class T>
__device__ __forceinline__ void gather(const T* x, int p, int n, const int* columns, int q, float* out,
                                       float* lengths) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    float total = 0.0f;
    if (row < n) {
        const T* from = x + static_cast<size_t>(row) * p;
        float* to = out + static_cast<size_t>(row) * q;
        for (int c = lane; c < q; c += 32) {
            const float value = from[__ldg(columns + c)];
            to[c] = value;
            total += value * value;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_down_sync(EVERY_LANE, total, step);
    // Squares of numbers below 1e-23 underflow.
    if (row < n && lane == 0) lengths[row] = sqrtf(total) * (1.0f + 9.5367431640625e-7f * (q + 2)) + 1e-21f * q;
}

#define KERNELS(T, NAME)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) mbn_gather_##NAME(                                \
        const T* x, int p, int n, const int* columns, int q, float* out, float* lengths) {                  \
        gather<T>(x, p, n, columns, q, out, lengths);                                                       \
    }

KERNELS(float, f32)
KERNELS(byte, u8)

// One warp per row: finds the best of the k scores, and whether the second best is within the bound of the rounding.
// Then `floors` is the least score that the true winner can have.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_best(const float* products, int n, int k, const float* scale, const float* bias, const float* lengths,
             double slope, double least, int* codes, float* floors, byte* doubtful) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    float best = LOWEST, second = LOWEST;
    int index = NO_CENTROID;
    if (row < n) {
        const float* mine = products + static_cast<size_t>(row) * k;
        for (int j = lane; j < k; j += 32) {
            const float score = mine[j] * __ldg(scale + j) + __ldg(bias + j);
            if (score > best) {
                second = best;
                best = score;
                index = j;
            } else if (score > second) {
                second = score;
            }
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_down_sync(EVERY_LANE, best, step);
        const float next = __shfl_down_sync(EVERY_LANE, second, step);
        const int at = __shfl_down_sync(EVERY_LANE, index, step);
        const bool wins = other > best || (other == best && at < index);
        second = fmaxf(wins ? best : second, wins ? next : other);
        best = wins ? other : best;
        index = wins ? at : index;
    }
    if (row < n && lane == 0) {
        const double lowest = best - 2.0 * (slope * lengths[row] + least);
        codes[row] = index == NO_CENTROID ? 0 : index;
        // Rounded down, because it is compared with float32 scores.
        floors[row] = static_cast<float>(lowest - 1e-7 * fabs(lowest));
        doubtful[row] = second >= lowest;
    }
}

// One thread block per row: compares the scores of a doubtful row that are within the bound in float64.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_decide(const float* products, const float* x, const float* w, int q, int k, const float* scale,
               const float* bias, const double* exact, const float* floors, const byte* doubtful, int* codes) {
    const int row = blockIdx.x;
    if (!doubtful[row]) return;
    const float* mine = products + static_cast<size_t>(row) * k;
    const float *left = x + static_cast<size_t>(row) * q, floor = floors[row];
    double best = LOWEST;
    int index = NO_CENTROID;
    for (int j = threadIdx.x; j < k; j += THREADS) {
        if (!(mine[j] * __ldg(scale + j) + __ldg(bias + j) >= floor)) continue;
        const float* right = w + static_cast<size_t>(j) * q;
        double total = 0.0;
        for (int c = 0; c < q; ++c) total += static_cast<double>(left[c]) * static_cast<double>(right[c]);
        take_larger(best, index, total * exact[j] + exact[k + j], j);
    }
    block_largest(best, index);
    if (threadIdx.x == 0 && index != NO_CENTROID) codes[row] = index;
}

// One thread block per row: multiplies its entries in order with the postings of their columns. The centroids of a
// column are all different, so no two threads add to one sum, and each sum goes from left to right.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_sparse(const float* data, const int* indices, const int* indptr, const int* start, const int* centroid,
               const float* value, int k, const double* exact, int* codes) {
    __shared__ double sums[TILE];
    const int row = blockIdx.x, t = threadIdx.x;
    double best = LOWEST;
    int index = NO_CENTROID;
    for (int first = 0; first < k; first += TILE) {
        const int width = min(TILE, k - first);
        for (int j = t; j < width; j += THREADS) sums[j] = 0.0;
        __syncthreads();
        for (int e = indptr[row]; e < indptr[row + 1]; ++e) {
            const double entry = data[e];
            const int column = indices[e], end = __ldg(start + column + 1);
            for (int at = __ldg(start + column) + t; at < end; at += THREADS) {
                const int j = __ldg(centroid + at) - first;
                if (j >= 0 && j < width) sums[j] += entry * static_cast<double>(__ldg(value + at));
            }
            __syncthreads();
        }
        for (int j = t; j < width; j += THREADS)
            take_larger(best, index, sums[j] * exact[first + j] + exact[k + first + j], first + j);
        __syncthreads();
    }
    block_largest(best, index);
    if (t == 0) codes[row] = index == NO_CENTROID ? 0 : index;
}

// One thread block per row: counts the members of the lists of its codes in shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_count(const int* x, int clusterings, int below, const int* start, const int* members, int stride,
              int k, int* codes) {
    __shared__ int counts[TILE];
    const int t = threadIdx.x;
    const int* mine = x + static_cast<size_t>(blockIdx.x) * clusterings;
    int best = -1, index = NO_CENTROID;
    for (int first = 0; first < k; first += TILE) {
        const int width = min(TILE, k - first);
        for (int j = t; j < width; j += THREADS) counts[j] = 0;
        __syncthreads();
        for (int v = t; v < clusterings; v += THREADS) {
            const int* list = start + static_cast<size_t>(v) * (below + 1) + mine[v];
            const int* member = members + static_cast<size_t>(v) * stride;
            const int end = __ldg(list + 1);
            for (int m = __ldg(list); m < end; ++m) {
                const int j = __ldg(member + m) - first;
                if (j >= 0 && j < width) atomicAdd(counts + j, 1);
            }
        }
        __syncthreads();
        for (int j = t; j < width; j += THREADS) take_larger(best, index, counts[j], first + j);
        __syncthreads();
    }
    block_largest(best, index);
    if (t == 0) codes[blockIdx.x] = index;
}
