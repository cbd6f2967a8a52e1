// Nearest centroids of rows on a GPU. gpu.py compiles this file and launches its kernels. The code of a row in a
// clustering is the number of its nearest centroid, the one with the largest score. Scores that float32 cannot order
// are compared in float64, where products of two float32 are exact and are added in the order of the columns. Of equal
// scores the lowest number wins. So the codes equal those of a CPU, and do not depend on the order of thread blocks or
// of atomic additions.
//
// tests/gpu/emulator.hpp defines the CUDA words of this file for a C++ compiler, so that tests run it on a CPU.

#include "philox.cuh"

constexpr int THREADS = 128;  // number of threads of a block; gpu.py launches blocks of this size
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 4096;  // number of centroids whose sums or counts a thread block has in shared memory at a time
constexpr int NO_CENTROID = 0x7fffffff;  // code of a centroid that does not belong to a clustering
constexpr float LOWEST = -3.402823466e+38f;
constexpr unsigned EVERY_LANE = 0xffffffffu;

using byte = unsigned char;

// Replaces `value` and `index` by `other` and `at` if `other` is larger, or equal with a lower index.
template <class T>
__device__ __forceinline__ void take_larger(T& value, int& index, T other, int at) {
    if (other > value || (other == value && at < index)) {
        value = other;
        index = at;
    }
}

// Gives thread 0 the largest value of all threads of a block, and its index. All threads must call this function.
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

// Bytes b are stored as signed bytes b - 128, because tensor cores multiply signed bytes. Floats are stored unchanged.
__device__ __forceinline__ float to_stored(float value) { return value; }
__device__ __forceinline__ signed char to_stored(byte value) { return static_cast<signed char>(value - 128); }
__device__ __forceinline__ float from_stored(float value) { return value; }
__device__ __forceinline__ float from_stored(signed char value) { return value + 128.0f; }

// The product of a row x and centroid j, from the product of the stored values. For bytes, `start` is 128 times the sum
// of x - 128, and `sums` is 128 times the sum of each centroid w: (x - 128)(w - 128) + 128 (x - 128) + 128 w = x w.
__device__ __forceinline__ float product(const float* stored, int j, int, const int*) { return stored[j]; }
__device__ __forceinline__ float product(const int* stored, int j, int start, const int* sums) {
    return static_cast<float>(stored[j] + start + __ldg(sums + j));
}

// One warp per row: writes the q `columns` of rows `x` (n, p) as stored values to `out`, with zeros up to `width`.
// `gaps` receives the least difference of two scores of the row that rounding cannot exchange: 0 for whole numbers with
// a norm up to `exact_length`, whose scores are exact. `starts` receives 128 times the sum of the stored values.
template <class T, class Stored>
__device__ __forceinline__ void gather(const T* x, int p, int n, const int* columns, int q, int width, double slope,
                                       double least, double exact_length, Stored* out, double* gaps, int* starts) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    float total = 0.0f;
    int fractions = 0, sum = 0;
    if (row < n) {
        const T* from = x + static_cast<size_t>(row) * p;
        Stored* to = out + static_cast<size_t>(row) * width;
        for (int c = lane; c < q; c += 32) {
            const T number = from[__ldg(columns + c)];
            const float value = number;
            to[c] = to_stored(number);
            total += value * value;
            fractions |= floorf(value) != value;
            if (sizeof(T) == 1) sum += static_cast<int>(to[c]);
        }
        for (int c = q + lane; c < width; c += 32) to[c] = 0;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        total += __shfl_down_sync(EVERY_LANE, total, step);
        fractions |= __shfl_down_sync(EVERY_LANE, fractions, step);
        sum += __shfl_down_sync(EVERY_LANE, sum, step);
    }
    if (row < n && lane == 0) {
        // An upper bound of the norm of the row; 1e-21 per number covers numbers below 1e-23, whose squares underflow.
        const float length = sqrtf(total) * (1.0f + 9.5367431640625e-7f * (q + 2)) + 1e-21f * q;
        gaps[row] = !fractions && length <= exact_length ? 0.0 : 2.0 * (slope * length + least);
        starts[row] = 128 * sum;
    }
}

// One warp per row: finds the 32 best of the k scores of a row; lane i has the i-th best score. Scores that float32
// cannot order are computed again in float64. Then the code of a clustering is the number, within the clustering, of
// its best centroid among these 32; it is NO_CENTROID if another centroid could be better.
template <class Product, class Stored>
__device__ __forceinline__ void take(const Product* products, int stride, int n, int k, const Stored* x,
                                     const Stored* w, int q, int width, const float* scale, const float* bias,
                                     const double* exact, const double* gaps, const int* starts, const int* sums,
                                     const int* numbers, int clusterings, int* codes) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n) return;
    const Product* mine = products + static_cast<size_t>(row) * stride;
    const int start = starts[row];
    float best = LOWEST;
    int index = NO_CENTROID;
    for (int first = 0; first < k; first += 32) {
        const int j = first + lane;
        const float score = j < k ? product(mine, j, start, sums) * __ldg(scale + j) + __ldg(bias + j) : LOWEST;
        unsigned hits = __ballot_sync(EVERY_LANE, score > __shfl_sync(EVERY_LANE, best, 31));
        for (; hits; hits &= hits - 1) {
            const int from = __ffs(hits) - 1;
            const float value = __shfl_sync(EVERY_LANE, score, from);
            const float before = __shfl_up_sync(EVERY_LANE, best, 1);
            const int at = __shfl_up_sync(EVERY_LANE, index, 1);
            if (best < value) {
                const bool moved = lane > 0 && before < value;
                best = moved ? before : value;
                index = moved ? at : first + from;
            }
        }
    }
    const bool used = index != NO_CENTROID;
    const double gap = gaps[row], before = __shfl_up_sync(EVERY_LANE, best, 1);
    const double after = __shfl_down_sync(EVERY_LANE, best, 1), last = __shfl_sync(EVERY_LANE, best, 31);
    double score = best;
    if (used && ((lane > 0 && before - score < gap) || (lane < 31 && score - after < gap))) {
        const Stored *left = x + static_cast<size_t>(row) * width, *right = w + static_cast<size_t>(index) * width;
        double total = 0.0;
        for (int c = 0; c < q; ++c)
            total += static_cast<double>(from_stored(left[c])) * static_cast<double>(from_stored(right[c]));
        score = total * exact[index] + exact[k + index];
    }
    const bool counts = used && (k <= 32 || score >= last + gap);
    for (int s = 0; s < clusterings; ++s) {
        int code = counts ? __ldg(numbers + static_cast<size_t>(index) * clusterings + s) : NO_CENTROID;
        double top = code == NO_CENTROID ? LOWEST : score;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const double other = __shfl_xor_sync(EVERY_LANE, top, step);
            take_larger(top, code, other, __shfl_xor_sync(EVERY_LANE, code, step));
        }
        if (lane == 0) codes[static_cast<size_t>(row) * clusterings + s] = code;
    }
}

#define KERNELS(T, NAME, Stored, Product)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) mbn_gather_##NAME(                                       \
        const T* x, int p, int n, const int* columns, int q, int width, double slope, double least,                \
        double exact_length, Stored* out, double* gaps, int* starts) {                                             \
        gather(x, p, n, columns, q, width, slope, least, exact_length, out, gaps, starts);                         \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) mbn_take_##NAME(                                         \
        const Product* products, int stride, int n, int k, const Stored* x, const Stored* w, int q, int width,     \
        const float* scale, const float* bias, const double* exact, const double* gaps, const int* starts,         \
        const int* sums, const int* numbers, int clusterings, int* codes) {                                        \
        take(products, stride, n, k, x, w, q, width, scale, bias, exact, gaps, starts, sums, numbers, clusterings, \
             codes);                                                                                               \
    }

KERNELS(float, f32, float, float)
KERNELS(byte, u8, signed char, int)

// One thread block per CSR row: adds the products of its entries and the entries of centroids in the same column. The
// centroids of a column are all different, so no two threads add to one sum. Each sum is in the order of the columns.
// Then each warp finds the best centroids of some clusterings; `tops` has their scores between groups of centroids.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_sparse(const float* data, const int* indices, const int* indptr, const int* start, const int* centroid,
               const float* value, int k, const double* exact, const int* numbers, int clusterings, double* tops,
               int* codes) {
    __shared__ double sums[TILE];
    const int row = blockIdx.x, t = threadIdx.x;
    const size_t mine = static_cast<size_t>(row) * clusterings;
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
        for (int s = t / 32; s < clusterings; s += WARPS) {
            double best = first ? tops[mine + s] : LOWEST;
            int code = first ? codes[mine + s] : NO_CENTROID;
            for (int j = t % 32; j < width; j += 32) {
                const int number = __ldg(numbers + static_cast<size_t>(first + j) * clusterings + s);
                if (number != NO_CENTROID)
                    take_larger(best, code, sums[j] * exact[first + j] + exact[k + first + j], number);
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                const double other = __shfl_xor_sync(EVERY_LANE, best, step);
                take_larger(best, code, other, __shfl_xor_sync(EVERY_LANE, code, step));
            }
            __syncwarp();
            if (t % 32 == 0) {
                tops[mine + s] = best;
                codes[mine + s] = code;
            }
        }
        __syncthreads();
    }
}

// One thread per 32 numbers, clusterings along y: marks each number in the mask of a clustering if its random byte is
// below `share`. The random numbers are those of cpu/draws.py. `drawn` receives the count of marked numbers.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_draw(unsigned long long key0, unsigned long long key1, int layer, int first, int clusterings, long long n,
             int share, int* drawn, byte* masks) {
    const long long at = 32ll * (blockIdx.x * THREADS + threadIdx.x);
    for (int s = blockIdx.y; s < clusterings; s += gridDim.y) {
        byte* mask = masks + static_cast<size_t>(s) * n;
        int count = 0;
        if (at < n) {
            const Words words = philox(at / 32 + 1, 0, first + s, layer, key0, key1);
            const unsigned long long four[] = {words.a, words.b, words.c, words.d};
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (at + i >= n) continue;
                const bool chosen = static_cast<int>(four[i / 8] >> 8 * (i % 8) & 255) < share;
                mask[at + i] = chosen;
                count += chosen;
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) count += __shfl_down_sync(EVERY_LANE, count, step);
        if (threadIdx.x % 32 == 0 && count) atomicAdd(drawn + s, count);
    }
}

// Returns the sum of `value` over the threads before this one; `total` receives that over all. All threads call it.
__device__ __forceinline__ int scan_before(int value, int& total) {
    __shared__ int sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(EVERY_LANE, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    __syncthreads();  // the next call writes the array again
    return before + sum - value;
}

// One thread block per clustering: marks or unmarks random numbers in a mask until m of n numbers are marked; `drawn` is
// the count of marked numbers before, and `word` the first word of the random stream. In each step every thread draws
// one number. A number changes if no thread with a lower number has drawn it in this step, as if one thread drew them all.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_complete(unsigned long long key0, unsigned long long key1, int layer, int first, long long n, long long m,
                 long long word, const int* drawn, byte* masks) {
    __shared__ unsigned long long numbers[THREADS];
    const int t = threadIdx.x, s = blockIdx.x;
    byte* mask = masks + static_cast<size_t>(s) * n;
    const bool member = drawn[s] > m;
    long long missing = member ? drawn[s] - m : m - drawn[s];
    for (word += t; missing > 0; word += THREADS) {
        const unsigned long long number = word_of(philox(word / 4 + 1, 0, first + s, layer, key0, key1), word % 4) % n;
        numbers[t] = number;
        __syncthreads();  // also makes the changes of the last step visible
        bool chosen = mask[number] == member;
        for (int i = 0; i < t && chosen; ++i) chosen = numbers[i] != number;
        int total;
        const int before = scan_before(chosen, total);
        if (chosen && before < missing) mask[number] = !member;
        missing -= total;
    }
}

// One thread block per clustering: writes the m marked numbers of a mask to `out` in rising order.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_list_marked(const byte* masks, long long n, long long m, int* out) {
    const byte* mask = masks + static_cast<size_t>(blockIdx.x) * n;
    int* list = out + blockIdx.x * m;
    for (long long begin = 0; begin < n; begin += THREADS) {
        const long long number = begin + threadIdx.x;
        const bool marked = number < n && mask[number];
        int total;
        const int before = scan_before(marked, total);
        if (marked) list[before] = static_cast<int>(number);
        list += total;
    }
}

// One thread block per clustering of the layer below and (along y) clustering s of the upper layer: sorts the k
// centroids of s by their code in the layer below, so that centroids with the same code are contiguous in `members`.
// `start` (below + 1) has the first index of each code. Centroids whose code s does not use (`units`) are left out.
extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_lists(const int* codes, const byte* units, int sets, int clusterings, int k, int below, int* start, int* members) {
    const int v = blockIdx.x, t = threadIdx.x;
    for (int s = blockIdx.y; s < sets; s += gridDim.y) {
        const size_t column = static_cast<size_t>(s) * clusterings + v;
        const int* code = codes + static_cast<size_t>(s) * k * clusterings + v;
        const byte* used = units + column * below;
        int* ends = start + column * (below + 1) + 1;  // counts of centroids per code, then first indices, then ends
        for (int c = t; c <= below; c += THREADS) ends[c - 1] = 0;
        __syncthreads();
        for (int j = t; j < k; j += THREADS) {
            const int c = code[static_cast<size_t>(j) * clusterings];
            if (used[c]) atomicAdd(ends + c, 1);
        }
        __syncthreads();
        int carry = 0;
        for (int first = 0; first < below; first += THREADS) {
            const int c = first + t;
            int total;
            const int before = scan_before(c < below ? ends[c] : 0, total);
            if (c < below) ends[c] = carry + before;
            carry += total;
        }
        __syncthreads();
        for (int j = t; j < k; j += THREADS) {
            const int c = code[static_cast<size_t>(j) * clusterings];
            if (used[c]) members[column * k + atomicAdd(ends + c, 1)] = j;
        }
    }
}

// One thread block per row and (along y) clustering of the upper layer: counts, for each centroid, the codes of the
// row that it shares, and writes the centroid with the largest count to codes (rows, sets).
template <class Code>
__device__ __forceinline__ void count(const int* x, int sets, int clusterings, int below, const int* start,
                                      const int* members, int k, Code* codes) {
    __shared__ int counts[TILE];
    const int t = threadIdx.x;
    const int* mine = x + static_cast<size_t>(blockIdx.x) * clusterings;
    for (int s = blockIdx.y; s < sets; s += gridDim.y) {
        int best = -1, index = NO_CENTROID;
        for (int first = 0; first < k; first += TILE) {
            const int width = min(TILE, k - first);
            for (int j = t; j < width; j += THREADS) counts[j] = 0;
            __syncthreads();
            for (int v = t; v < clusterings; v += THREADS) {
                const size_t column = static_cast<size_t>(s) * clusterings + v;
                const int* list = start + column * (below + 1) + mine[v];
                const int* member = members + column * k;
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
        if (t == 0) codes[static_cast<size_t>(blockIdx.x) * sets + s] = static_cast<Code>(index);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_count_u16(const int* x, int sets, int clusterings, int below, const int* start, const int* members, int k,
                  unsigned short* codes) {
    count(x, sets, clusterings, below, start, members, k, codes);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mbn_count_i32(const int* x, int sets, int clusterings, int below, const int* start, const int* members, int k,
                  int* codes) {
    count(x, sets, clusterings, below, start, members, k, codes);
}
