// Inference in conditional RBMs on the device. gpu.py compiles and launches this file, tests compare its results with
// those of reference.py, and cpu/sum_product.py derives the formulas: one division per edge and sweep.
//
// One thread block works on a graph, or a cluster of BLOCKS blocks (compute capability 9.0 or later), whose blocks
// share the visible units. A warp takes one visible unit: its lanes go over the hidden units twice, for the messages
// to the visible unit and for those back. Then each thread takes hidden units, and multiplies their messages from the
// block's visible units in order; the blocks add the logs of these products in order. Messages are in global memory,
// or in the shared memory of the blocks of a cluster. Mantissa and exponent of a product are split after as many
// factors as float32 can hold, so that a unit and lane need one log. Every sum and product has a fixed order without
// atomics: the bits are the same in every run on one kind of GPU, for any batch.
//
// tests/gpu/emulator.hpp defines the CUDA words of this file for a C++ compiler: the tests run this text on a CPU.

constexpr int THREADS = 512;  // threads of a block; gpu.py launches with the same number
constexpr int WARPS = THREADS / 32;
[[maybe_unused]] constexpr int BLOCKS = 8;  // blocks of a cluster; gpu.py decides which graphs get one
constexpr unsigned EVERY_LANE = 0xffffffffu;
constexpr float LN2 = 0.693147180559945f;

#ifndef CLUSTER_BARRIER  // the emulator defines these two itself
// Waits for all threads of the cluster; afterwards every thread reads what any thread wrote before.
#define CLUSTER_BARRIER() asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory")
#define DYNAMIC_SHARED(name) extern __shared__ float name[]
#endif

enum Method { SUM, MIXED, MAX, MEAN };

// Returns the sum over a warp in all its lanes.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(EVERY_LANE, value, step);
    return value;
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ int larger(int a, int b) { return max(a, b); }

// Returns the largest of the threads' numbers, which are at least 0. All threads of the block call it.
template <class T>
__device__ __forceinline__ T block_largest(T value) {
    __shared__ T values[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = larger(value, __shfl_xor_sync(EVERY_LANE, value, step));
    __syncthreads();  // the last call's values have been read
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) value = larger(value, values[warp]);
    return value;
}

// Returns the sum of the threads' numbers, added in order. All threads of the block call it.
__device__ __forceinline__ double block_sum(double value) {
    __shared__ double values[THREADS];
    __syncthreads();  // the last call's values have been read
    values[threadIdx.x] = value;
    __syncthreads();
    double total = 0.0;
    for (int t = 0; t < THREADS; ++t) total += values[t];
    return total;
}

// A product of positive numbers as mantissa and exponent. The caller splits often enough to stay in float32.
struct Product {
    float mantissa = 1.0f;
    int exponent = 0;

    __device__ __forceinline__ void split() {
        int power;
        mantissa = frexpf(mantissa, &power);
        exponent += power;
    }
    __device__ __forceinline__ float log() const { return logf(mantissa) + LN2 * static_cast<float>(exponent); }
};

// Computes the sigmoids of log odds and of minus log odds with full relative precision; |log odds| is cut at limit.
__device__ __forceinline__ void beliefs(float log_odds, float limit, float& on, float& off) {
    const float small = expf(-fminf(fabsf(log_odds), limit)), large = 1.0f / (1.0f + small);
    on = log_odds >= 0.0f ? large : small * large;
    off = log_odds >= 0.0f ? small * large : large;
}

__device__ __forceinline__ float max_message(float w, float cavity) {
    return fmaxf(w + cavity, 0.0f) - fmaxf(cavity, 0.0f);
}

// Returns log(1 + e^l).
__device__ __forceinline__ double log_partition(float l) {
    const double odds = l;
    return fmax(odds, 0.0) + log1p(exp(-fabs(odds)));
}

// Waits for all threads of all blocks of one graph.
template <int SHARING>
__device__ __forceinline__ void meet() {
    if constexpr (SHARING > 1)
        CLUSTER_BARRIER();
    else
        __syncthreads();
}

// Infers one graph with SHARING blocks. A lane keeps the beliefs th and uh of its hidden units in registers, at most
// HELD of each (h <= 32 HELD), or reads them again for each visible unit (HELD = 0).
// a, w: (v, h); a is exp(W) for SUM and MIXED, else W.
// m: messages, (graphs, v, h), unless KEPT. tv, th: beliefs that a unit is 1; uh: that a hidden unit is 0.
// c: null, or P(v_i = 1 | h_j = 1) of the last sweep, (graphs, v, h); then log_z is computed as well.
// part (graphs, SHARING, h), moves and shares (graphs, SHARING): numbers that the blocks of a graph exchange.
template <Method METHOD, int SHARING, bool KEPT, int HELD>
__device__ void infer(const float* __restrict__ a, const float* __restrict__ w, int v, int h, const float* bv,
                      const float* bh, int sweeps, float tol, int factors, float limit, float* m, float* tv,
                      float* th, float* uh, float* lv, float* lh, int* done, float* change, float* c, double* log_z,
                      float* part, float* moves, double* shares) {
    const int graph = blockIdx.x / SHARING, rank = blockIdx.x % SHARING;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Visible units of this block, and hidden units whose messages it adds up.
    const int some = (v + SHARING - 1) / SHARING, begin = min(rank * some, v), end = min(begin + some, v);
    const int few = (h + SHARING - 1) / SHARING, left = min(rank * few, h), right = min(left + few, h);
    const size_t edges = static_cast<size_t>(v) * h, own = static_cast<size_t>(begin) * h;
    bv += static_cast<size_t>(graph) * v, tv += static_cast<size_t>(graph) * v, lv += static_cast<size_t>(graph) * v;
    bh += static_cast<size_t>(graph) * h, th += static_cast<size_t>(graph) * h, lh += static_cast<size_t>(graph) * h;
    uh += static_cast<size_t>(graph) * h, part += static_cast<size_t>(graph) * SHARING * h;
    moves += graph * SHARING, shares += graph * SHARING;
    a += own, w += own;
    if (c) c += graph * edges + own;
    if constexpr (KEPT) {
        DYNAMIC_SHARED(pool);
        m = pool;
    } else if (METHOD == SUM || METHOD == MAX) {
        m += graph * edges + own;
    }
    for (int j = left + threadIdx.x; j < right; j += THREADS) {
        lh[j] = bh[j];
        beliefs(bh[j], limit, th[j], uh[j]);
    }
    for (int i = begin + threadIdx.x; i < end; i += THREADS) {
        float off;
        beliefs(bv[i], limit, tv[i], off);
        lv[i] = METHOD == MIXED ? 0.0f : bv[i];  // no unit is decided before the first sweep
    }
    if (METHOD == SUM || METHOD == MAX)
        for (size_t k = threadIdx.x; k < static_cast<size_t>(end - begin) * h; k += THREADS)
            m[k] = METHOD == SUM ? 1.0f : 0.0f;
    meet<SHARING>();
    bool met = false;  // the sweep before met tol; this sweep computes the pair beliefs
    for (int sweep = 1; sweep <= sweeps; ++sweep) {
        const bool last = c && (met || sweep == sweeps);
        float moved = 0.0f;
        double bethe = 0.0;
        [[maybe_unused]] float on_held[HELD + 1], off_held[HELD + 1];
#pragma unroll
        for (int k = 0; k < HELD; ++k)
            if (lane + 32 * k < h) on_held[k] = th[lane + 32 * k], off_held[k] = uh[lane + 32 * k];
        // Calls f(j, P(h_j = 1), P(h_j = 0)) for the hidden units of this lane, in order.
        const auto each_hidden = [&](auto f) {
            if constexpr (HELD > 0) {
#pragma unroll
                for (int k = 0; k < HELD; ++k)
                    if (lane + 32 * k < h) f(lane + 32 * k, on_held[k], off_held[k]);
            } else {
                for (int j = lane; j < h; j += 32) f(j, th[j], uh[j]);
            }
        };
        for (int first = begin; first < end; first += WARPS) {  // warps without a unit loop too, for the barriers
            const int i = first + warp;
            const size_t row = static_cast<size_t>(i - begin) * h;
            float sum = 0.0f;
            if (i < end) {
                Product top, bottom;
                const bool decided = lv[i] > 0.0f;
                int held = 0;
                each_hidden([&](int j, float t, float u) {
                    if (METHOD == MAX) {
                        const float message = max_message(a[row + j], lh[j] - m[row + j]);
                        m[row + j] = message;
                        sum += message;
                    } else if (METHOD == MEAN) {
                        sum = fmaf(a[row + j], t, sum);
                    } else {
                        const float r = METHOD == SUM ? m[row + j] : decided ? a[row + j] : 1.0f, ru = r * u;
                        top.mantissa *= fmaf(a[row + j], t, ru);
                        bottom.mantissa *= t + ru;
                        if (++held == factors) top.split(), bottom.split(), held = 0;
                    }
                });
                if (METHOD == SUM || METHOD == MIXED) {
                    top.split(), bottom.split();
                    top.mantissa /= bottom.mantissa, top.exponent -= bottom.exponent;
                    sum = top.log();
                }
            }
            const float l = warp_sum(sum) + (i < end ? bv[i] : 0.0f);
            if (i >= end) continue;
            float on, off;
            beliefs(l, limit, on, off);
            moved = fmaxf(moved, fabsf(on - tv[i]));
            if (METHOD == SUM || METHOD == MAX)
                each_hidden([&](int j, float t, float u) {
                    if (METHOD == MAX) {
                        m[row + j] = max_message(a[row + j], l - m[row + j]);
                        return;
                    }
                    const float ru = m[row + j] * u, n = fmaf(a[row + j], t, ru);
                    const float x = on * (t + ru), y = off * n, both = x + y, whole = fmaf(a[row + j], x, y);
                    m[row + j] = __fdividef(whole, both);  // error: two units in the last place; both < 2^126
                    if (last) {
                        c[row + j] = a[row + j] * x / whole;
                        bethe += logf(both / n);
                    }
                });
            __syncwarp();  // no lane reads the unit's old belief any more
            if (lane == 0) lv[i] = l, tv[i] = on;
        }
        __syncthreads();
        for (int j = threadIdx.x; j < h; j += THREADS) {  // messages from this block's units
            Product product;
            float sum = 0.0f;
            int held = 0;
            for (int i = begin; i < end; ++i) {
                const size_t at = static_cast<size_t>(i - begin) * h + j;
                if (METHOD == SUM) {
                    product.mantissa *= m[at];
                    if (++held == factors) product.split(), held = 0;
                } else if (METHOD == MIXED) {
                    sum += lv[i] > 0.0f ? w[at] : 0.0f;
                } else {
                    sum = METHOD == MAX ? sum + m[at] : fmaf(w[at], tv[i], sum);
                }
            }
            part[static_cast<size_t>(rank) * h + j] = METHOD == SUM ? product.log() : sum;
        }
        meet<SHARING>();
        for (int j = left + threadIdx.x; j < right; j += THREADS) {
            float sum = part[j];
            for (int other = 1; other < SHARING; ++other) sum += part[static_cast<size_t>(other) * h + j];
            const float before = th[j], l = bh[j] + sum;
            lh[j] = l;
            beliefs(l, limit, th[j], uh[j]);
            moved = fmaxf(moved, fabsf(th[j] - before));
        }
        // Without a tolerance only the last sweep reports how far beliefs moved.
        const bool asked = tol >= 0.0f || sweep == sweeps;
        if (asked) moved = block_largest(moved);
        if (last) {
            for (int i = begin + threadIdx.x; i < end; i += THREADS) bethe += log_partition(lv[i]);
            for (int j = left + threadIdx.x; j < right; j += THREADS) bethe += log_partition(lh[j]);
            bethe = block_sum(bethe);
        }
        if (threadIdx.x == 0) moves[rank] = moved, shares[rank] = bethe;
        meet<SHARING>();
        for (int other = 0; other < SHARING; ++other) moved = fmaxf(moved, moves[other]);
        if (rank == 0 && threadIdx.x == 0) {
            done[graph] = sweep;
            if (!met && asked) change[graph] = moved;
            if (last) {
                log_z[graph] = 0.0;
                for (int other = 0; other < SHARING; ++other) log_z[graph] += shares[other];
            }
        }
        if (met || (moved <= tol && !c)) break;
        met = moved <= tol;
    }
}

#define KERNELS(NAME, ATTRIBUTES, METHOD, SHARING, KEPT, HELD)                                                       \
    extern "C" __global__ void ATTRIBUTES __launch_bounds__(THREADS, 2)                                              \
        crbm_##NAME(const float* a, const float* w, int v, int h, const float* bv, const float* bh, int sweeps,      \
                    float tol, int factors, float limit, float* m, float* tv, float* th, float* uh,                  \
                    float* lv, float* lh, int* done, float* change, float* c, double* log_z, float* part,            \
                    float* moves, double* shares) {                                                                  \
        infer<METHOD, SHARING, KEPT, HELD>(a, w, v, h, bv, bh, sweeps, tol, factors, limit, m, tv, th, uh, lv,       \
                                     lh, done, change, c, log_z, part, moves, shares);                               \
    }
KERNELS(sum_product, , SUM, 1, false, 0)
KERNELS(mixed_product, , MIXED, 1, false, 0)
KERNELS(max_product, , MAX, 1, false, 0)
KERNELS(mean_field, , MEAN, 1, false, 0)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)
KERNELS(sum_product_cluster, CLUSTER, SUM, BLOCKS, false, 0)
KERNELS(sum_product_kept, CLUSTER, SUM, BLOCKS, true, 0)
KERNELS(sum_product_held_kept, CLUSTER, SUM, BLOCKS, true, 8)
KERNELS(mixed_product_cluster, CLUSTER, MIXED, BLOCKS, false, 0)
KERNELS(max_product_cluster, CLUSTER, MAX, BLOCKS, false, 0)
KERNELS(max_product_kept, CLUSTER, MAX, BLOCKS, true, 0)
KERNELS(mean_field_cluster, CLUSTER, MEAN, BLOCKS, false, 0)
#undef CLUSTER
#endif
#undef KERNELS

// One thread per edge adds the pair beliefs P(v_i = 1 | h_j = 1) P(h_j = 1) of the graphs, in their order.
template <class T>
__device__ __forceinline__ void add_pairs(const float* c, const float* th, int graphs, int v, int h, T* pairs) {
    const size_t edges = static_cast<size_t>(v) * h, k = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (k >= edges) return;
    T total = pairs[k];
    for (int n = 0; n < graphs; ++n) total += static_cast<T>(th[static_cast<size_t>(n) * h + k % h] * c[n * edges + k]);
    pairs[k] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_add_pairs_f4(const float* c, const float* th, int graphs, int v, int h, float* pairs) {
    add_pairs(c, th, graphs, v, h, pairs);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_add_pairs_f8(const float* c, const float* th, int graphs, int v, int h, double* pairs) {
    add_pairs(c, th, graphs, v, h, pairs);
}

// The gradients of several chains of rows, whose messages are computed together. starts: first row of each chain, and
// the end of the last one. Sums over rows have the order of the rows, and no number depends on the other chains.

constexpr int POSITIVE_ROWS = 8, TILE = 64;  // rows that share the reads of W, and units of v in shared memory at a time

// Computes P(h_j = 1 | v, x), (rows, h), from b = bh + Whx x; one block per POSITIVE_ROWS rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_positive(const float* w, const float* seen, const float* b, int rows, int v, int h, float limit,
                  float* positive) {
    __shared__ float tile[POSITIVE_ROWS][TILE];
    const int first = blockIdx.x * POSITIVE_ROWS, held = min(POSITIVE_ROWS, rows - first);
    for (int left = 0; left < h; left += THREADS) {
        const int j = left + threadIdx.x;
        float sums[POSITIVE_ROWS] = {};
        for (int base = 0; base < v; base += TILE) {
            __syncthreads();  // the tile before has been read
            for (int k = threadIdx.x; k < POSITIVE_ROWS * TILE; k += THREADS) {
                const int row = k / TILE, i = base + k % TILE;
                tile[row][k % TILE] = row < held && i < v ? seen[static_cast<size_t>(first + row) * v + i] : 0.0f;
            }
            __syncthreads();
            for (int i = base; j < h && i < min(base + TILE, v); ++i) {
                const float weight = w[static_cast<size_t>(i) * h + j];
#pragma unroll
                for (int row = 0; row < POSITIVE_ROWS; ++row) sums[row] = fmaf(tile[row][i - base], weight, sums[row]);
            }
        }
#pragma unroll
        for (int row = 0; row < POSITIVE_ROWS; ++row) {
            const size_t at = static_cast<size_t>(first + row) * h + j;
            float off;
            if (j < h && row < held) beliefs(b[at] + sums[row], limit, positive[at], off);
        }
    }
}

// Subtracts beliefs from the outputs v and from the positive phase: dv (rows, v) and dh (rows, h). measures (2, rows)
// is the log-loss of each row and its number of wrong units. One block per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_negative(const float* lv, const float* lh, const float* seen, const float* positive, int rows, int v, int h,
                  float limit, float* dv, float* dh, float* measures) {
    const size_t of_v = static_cast<size_t>(blockIdx.x) * v, of_h = static_cast<size_t>(blockIdx.x) * h;
    double loss = 0.0, wrong = 0.0;
    float on, off;
    for (int i = threadIdx.x; i < v; i += THREADS) {
        const float l = lv[of_v + i], one = seen[of_v + i];
        beliefs(l, limit, on, off);
        dv[of_v + i] = one - on;
        loss += log_partition(l) - static_cast<double>(l) * one;
        wrong += (l > 0.0f) != (one > 0.0f);
    }
    for (int j = threadIdx.x; j < h; j += THREADS) {
        beliefs(lh[of_h + j], limit, on, off);
        dh[of_h + j] = positive[of_h + j] - on;
    }
    loss = block_sum(loss), wrong = block_sum(wrong);
    if (threadIdx.x == 0) {
        measures[blockIdx.x] = static_cast<float>(loss);
        measures[rows + blockIdx.x] = static_cast<float>(wrong);
    }
}

// Adds the gradient of W of ``graphs`` rows, from row ``first`` on, to the gradients of their chains. Without c (null)
// P(v_i = 1, h_j = 1) is the product of the beliefs. One thread computes an edge; blockIdx.y is the chain.
extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_chain_weights(const float* c, const float* th, const float* seen, const float* positive, const float* dv,
                       const float* dh, const int* starts, int chains, int first, int graphs, int v, int h, int stride,
                       float* out) {
    const size_t edges = static_cast<size_t>(v) * h, k = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (k >= edges) return;
    const int i = static_cast<int>(k / h), j = static_cast<int>(k % h);
    for (int chain = blockIdx.y; chain < chains; chain += gridDim.y) {
        float total = out[static_cast<size_t>(chain) * stride + k];
        for (int n = max(first, starts[chain]); n < min(first + graphs, starts[chain + 1]); ++n) {
            const size_t of_v = static_cast<size_t>(n) * v + i, of_h = static_cast<size_t>(n) * h + j;
            const float pair = c ? th[static_cast<size_t>(n - first) * h + j] * c[(n - first) * edges + k]
                                 : (seen[of_v] - dv[of_v]) * (positive[of_h] - dh[of_h]);
            total += seen[of_v] * positive[of_h] - pair;
        }
        out[static_cast<size_t>(chain) * stride + k] = total;
    }
}

// Writes the sums of the columns of dv and dh over the rows of each chain; one thread per unit, blockIdx.y is the chain.
extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_chain_biases(const float* dv, const float* dh, const int* starts, int chains, int v, int h, int stride,
                      float* out) {
    const int unit = blockIdx.x * THREADS + threadIdx.x, width = unit < v ? v : h, column = unit < v ? unit : unit - v;
    if (unit >= v + h) return;
    for (int chain = blockIdx.y; chain < chains; chain += gridDim.y) {
        float total = 0.0f;
        for (int n = starts[chain]; n < starts[chain + 1]; ++n)
            total += (unit < v ? dv : dh)[static_cast<size_t>(n) * width + column];
        out[static_cast<size_t>(chain) * stride + unit] = total;
    }
}

// A gradient step on the device. Its bits are those of update.py and gradient.py on a processor: each product and sum
// is rounded as there, so that a fit may take some steps on a GPU and others on a processor.

constexpr int INFINITE = 0x7f800000;  // bits of infinity; those of NaN without its sign are larger
constexpr int LEVELS = 10;            // levels of the tree that adds the gradients of MOST_CHAINS = 1023 chains

__device__ __forceinline__ float ascended(float theta, float rate, float gradient) {
    return __fadd_rn(theta, __fmul_rn(rate, gradient));
}

__device__ __forceinline__ int magnitude_bits(float value) { return __float_as_int(fabsf(value)); }

// Writes the next parameters [0, count) from the gradients of the chains, (chains, stride), which are added in float64
// as a tree of pairs of neighbours. Couplings are [0, edges), and biases [weights, count). Each block writes the
// largest |coupling| of its parameters to ``largest``; a bias counts only if it is not finite.
extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_ascend(const float* theta, const float* gradients, int chains, int stride, int edges, int weights, int count,
                float rate, float* next, int* largest) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    int most = 0;
    if (i < count) {
        double held[LEVELS];  // sums of 1, 2, 4, ... neighbours, like the digits of a binary number
        for (int chain = 0; chain < chains; ++chain) {
            double sum = 0.0 + gradients[static_cast<size_t>(chain) * stride + i];
            bool carried = true;
#pragma unroll
            for (int level = 0; level < LEVELS; ++level) {
                const bool full = chain >> level & 1;
                if (carried && full) sum = held[level] + sum;
                if (carried && !full) held[level] = sum, carried = false;
            }
        }
        double total = 0.0;
        bool started = false;
#pragma unroll
        for (int level = 0; level < LEVELS; ++level)
            if (chains >> level & 1) total = started ? held[level] + total : held[level], started = true;
        next[i] = ascended(theta[i], rate, static_cast<float>(total));
        const int bits = magnitude_bits(next[i]);
        if (i < edges || (i >= weights && bits >= INFINITE)) most = bits;
    }
    most = block_largest(most);
    if (threadIdx.x == 0) largest[blockIdx.x] = most;
}

// Writes theta + (rate left)^T right to ``next``, (units, features); left is (rows, units), right (rows, features).
extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_ascend_outer(const float* theta, const float* left, const float* right, int rows, int units, int features,
                      float rate, float* next) {
    const int k = blockIdx.x * THREADS + threadIdx.x, i = k / features, j = k % features;
    if (i >= units) return;
    float sum = 0.0f;
    for (int n = 0; n < rows; ++n)
        sum = fmaf(__fmul_rn(rate, left[static_cast<size_t>(n) * units + i]), right[static_cast<size_t>(n) * features + j],
                   sum);
    next[k] = __fadd_rn(theta[k], sum);
}

// Writes the next biases of v and h from the sums of the columns of dv and dh; ``largest`` is as in crbm_ascend.
extern "C" __global__ void __launch_bounds__(THREADS)
    crbm_ascend_biases(const float* theta, const float* dv, const float* dh, int rows, int v, int h, float rate,
                       float* next, int* largest) {
    const int unit = blockIdx.x * THREADS + threadIdx.x, width = unit < v ? v : h, column = unit < v ? unit : unit - v;
    int most = 0;
    if (unit < v + h) {
        const float* const differences = unit < v ? dv : dh;
        float total = differences[column];
        for (int n = 1; n < rows; ++n) total = __fadd_rn(total, differences[static_cast<size_t>(n) * width + column]);
        next[unit] = ascended(theta[unit], rate, total);
        if (magnitude_bits(next[unit]) >= INFINITE) most = magnitude_bits(next[unit]);
    }
    most = block_largest(most);
    if (threadIdx.x == 0) largest[blockIdx.x] = most;
}
