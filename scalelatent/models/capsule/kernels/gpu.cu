// The part of the E-step between the two matrix products, on the device. gpu.py compiles and launches this
// text; tests compare its results with reference.py.
//
// Each thread computes one row. The latent means are stored as (dimensions, rows), so that neighbouring
// threads read neighbouring numbers for any dimension. The other data of a row (its class, its weight, one
// line of the table of lambda) are small. Lengths are summed in the type of h, and all later arithmetic is
// float64. Sums over rows are trees of fixed shape over blocks of THREADS rows, without atomic adds, so all
// runs give the same bits.
//
// tests/gpu/emulator.hpp defines the CUDA words below for a C++ compiler, so that tests run this text on a
// CPU.

constexpr int THREADS = 128;  // rows of a thread block; gpu.py launches with the same number
constexpr int WARPS = THREADS / 32;
constexpr int AHEAD = 8;  // number of loads that a thread issues before it uses the first
constexpr unsigned EVERY_LANE = 0xffffffffu;

// The members as one int32 array: dims (members, capsules), first rows of h (members, capsules),
// total dimensions (members), labels (members, classes).
struct Members {
    const int *dims, *starts, *totals, *labels;
    int count, capsules, classes;
    int equal_dim;  // the dimension of every capsule, or 0 if dimensions differ

    __device__ Members(const int* wiring, int count, int capsules, int classes, int equal_dim)
        : dims(wiring),
          starts(wiring + count * capsules),
          totals(starts + count * capsules),
          labels(totals + count),
          count(count),
          capsules(capsules),
          classes(classes),
          equal_dim(equal_dim) {}

    // Capsule that should win; -1 if the member does not see the class, or there is no such class.
    __device__ int target(int member, int label) const {
        return label >= 0 && label < classes ? labels[member * classes + label] : -1;
    }
};

// lambda0 and lambda1 over t = beta / (beta + scale): 8 coefficients per cell.
struct Table {
    const double* coefficients;
    int cells;
    double scale;
};

struct Posterior {
    double right, wrong;  // P of the capsule that should win, largest P of the others
    double own, other;    // r - 1 of that capsule, and of the others
    bool lost;            // another capsule wins; the first capsule wins a tie
};

__device__ __forceinline__ float add_square(float v, float q) { return fmaf(v, v, q); }
__device__ __forceinline__ double add_square(double v, double q) { return fma(v, v, q); }

// One expression for every capsule of a row, so that equal lengths give equal bits.
__device__ __forceinline__ double score(double slope, double q, double floor, double size) {
    return fma(slope, q, floor * size);
}

__device__ __forceinline__ void look_up(const Table& table, double beta, double& lambda0, double& lambda1) {
    const double t = beta / (beta + table.scale) * table.cells;
    // A comparison with NaN is false, so such a row reads the last cell and still gives NaN.
    const int cell = t < table.cells - 1 ? static_cast<int>(t) : table.cells - 1;
    const double u = t - cell;
    const double2* c = reinterpret_cast<const double2*>(table.coefficients) + 4 * cell;
    const double2 a = __ldg(c), b = __ldg(c + 1), d = __ldg(c + 2), e = __ldg(c + 3);
    lambda0 = fma(fma(fma(b.y, u, b.x), u, a.y), u, a.x);
    lambda1 = fma(fma(fma(e.y, u, e.x), u, d.y), u, d.x);
}

// Calls close(i, |h_i|^2) for every capsule of a member. The loads of AHEAD rows of h are issued before the
// first is used. Behind the end, the last row is read again, so that no branch separates the loads.
template <class T, class Close>
__device__ __forceinline__ void for_each_capsule(const T* column, size_t stride, const int* dims, int total,
                                                 Close close) {
    int capsule = 0, left = __ldg(dims);
    T q = 0;
    for (int first = 0; first < total; first += AHEAD) {
        T v[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) v[a] = column[min(first + a, total - 1) * stride];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (first + a >= total) break;
            q = add_square(v[a], q);
            if (--left == 0) {
                close(capsule, q);
                q = 0;
                ++capsule;
                if (first + a + 1 < total) left = __ldg(dims + capsule);
            }
        }
    }
}

// Multiplies h in place: the rows of the target capsule by own, the rows of the other capsules by other.
template <class T>
__device__ __forceinline__ void scale_in_place(T* column, size_t stride, const int* dims, int total,
                                               int target, T own, T other) {
    int capsule = 0, left = __ldg(dims);
    for (int first = 0; first < total; first += AHEAD) {
        T v[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) v[a] = column[min(first + a, total - 1) * stride];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            if (first + a >= total) break;
            column[(first + a) * stride] = v[a] * (capsule == target ? own : other);
            if (--left == 0) {
                ++capsule;
                if (first + a + 1 < total) left = __ldg(dims + capsule);
            }
        }
    }
}

template <class T>
__device__ __forceinline__ Posterior posterior(const T* column, size_t stride, const int* dims, int total_dim,
                                               int equal_dim, int target, const Table& table) {
    double total = 0.0, right_q = 0.0, below = -1.0, above = -1.0;
    for_each_capsule(column, stride, dims, total_dim, [&](int i, T length) {
        const double q = length;
        total += q;
        if (i == target)
            right_q = q;
        else if (i < target)
            below = q > below ? q : below;
        else
            above = q > above ? q : above;
    });
    double lambda0, lambda1;
    look_up(table, 0.5 * total, lambda0, lambda1);
    // If h = 0, both lambdas are 0 and any fraction is right; 0 avoids 0 / 0.
    const double inverse = total > 0.0 ? 1.0 / total : 0.0;
    const double inv_d = 1.0 / total_dim, inv_d2 = 1.0 / (total_dim + 2.0);
    const double slope = lambda0 * inverse, floor = (1.0 - lambda0) * inv_d, size = __ldg(dims + target);
    if (equal_dim) {
        // P grows with the length, so the longest wrong capsule on either side of the target is the best there.
        below = below < 0.0 ? -1.0 : score(slope, below, floor, equal_dim);
        above = above < 0.0 ? -1.0 : score(slope, above, floor, equal_dim);
    } else {
        below = above = -1.0;
        for_each_capsule(column, stride, dims, total_dim, [&](int i, T length) {
            const double p = score(slope, length, floor, __ldg(dims + i));
            if (i < target)
                below = p > below ? p : below;
            else if (i > target)
                above = p > above ? p : above;
        });
    }
    Posterior out;
    out.right = score(slope, right_q, floor, size);
    out.wrong = below > above ? below : above;
    out.lost = below >= out.right || above > out.right;
    // Q / P - 1 with one denominator, so that no large terms cancel if Q is near P.
    const double common = (lambda1 - lambda0) * right_q * inverse + (1.0 - lambda1) * size * inv_d2 -
                          (1.0 - lambda0) * size * inv_d;
    out.other = common / out.right;
    out.own = (common + 2.0 * (1.0 - lambda1) * inv_d2) / out.right;
    return out;
}

// Sums the values of a thread block in a tree of fixed shape; thread 0 writes the sums `stride` apart. All
// threads must call it.
__device__ __forceinline__ void write_block_sums(double a, double b, bool use, double* out, size_t stride) {
    __shared__ double part[2][WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        a += __shfl_down_sync(EVERY_LANE, a, step);
        b += __shfl_down_sync(EVERY_LANE, b, step);
    }
    if (threadIdx.x % 32 == 0) {
        part[0][threadIdx.x / 32] = a;
        part[1][threadIdx.x / 32] = b;
    }
    const int active = __syncthreads_count(use);
    if (threadIdx.x == 0) {
        double sum_a = part[0][0], sum_b = part[1][0];
        for (int warp = 1; warp < WARPS; ++warp) {
            sum_a += part[0][warp];
            sum_b += part[1][warp];
        }
        out[0] = sum_a;
        out[stride] = sum_b;
        out[2 * stride] = active;
    }
    __syncthreads();  // because the next member overwrites part
}

// Returns the sum over the threads before this one; `total` is the sum over all. All threads must call it.
__device__ __forceinline__ int scan_before(int value, int& total) {
    __shared__ int sums[2][THREADS];
    const int t = threadIdx.x;
    int now = 0;
    sums[0][t] = value;
    __syncthreads();
#pragma unroll
    for (int step = 1; step < THREADS; step *= 2) {
        sums[1 - now][t] = sums[now][t] + (t >= step ? sums[now][t - step] : 0);
        now = 1 - now;
        __syncthreads();
    }
    const int before = sums[now][t] - value;
    total = sums[now][THREADS - 1];
    __syncthreads();
    return before;
}

// Processes one block of rows for all members. Dense: scales h in place. Otherwise: writes the factors of
// every row (members, 2, n), whether any member uses the row, and the number of used rows of this thread
// block. Sums go to partial (members, 3, thread blocks).
template <class T, bool DENSE>
__device__ __forceinline__ void estep(T* h, int n, const int* y, const double* weight, const Members& members,
                                      const double* nu, const Table& table, double* partial, T* factors,
                                      unsigned char* moved, int* counts) {
    const int row = blockIdx.x * THREADS + threadIdx.x;
    const bool inside = row < n;
    const int label = inside ? y[row] : -1;
    const double w = inside ? weight[row] : 0.0;
    T* column = h + row;
    bool moves = false;
    for (int r = 0; r < members.count; ++r) {
        const int* dims = members.dims + r * members.capsules;
        const int total_dim = __ldg(members.totals + r);
        double log_likelihood = 0.0, error = 0.0;
        bool use = false;
        if (inside) {
            const int target = members.target(r, label);
            const double unknown = nan("");
            Posterior p = {unknown, unknown, unknown, unknown, false};
            if (target >= 0) p = posterior(column, n, dims, total_dim, members.equal_dim, target, table);
            const double threshold = __ldg(nu + r);
            use = threshold <= 0.0 || p.wrong > threshold * p.right;
            log_likelihood = w * log(p.right);
            error = p.lost ? w : 0.0;
            const T own = use ? static_cast<T>(w * p.own) : T(0),
                    other = use ? static_cast<T>(w * p.other) : T(0);
            if (DENSE) {
                scale_in_place(column, n, dims, total_dim, target, own, other);
            } else {
                factors[2 * r * static_cast<size_t>(n) + row] = own;
                factors[(2 * r + 1) * static_cast<size_t>(n) + row] = other;
            }
        }
        moves |= use;
        write_block_sums(log_likelihood, error, use,
                         partial + 3 * r * static_cast<size_t>(gridDim.x) + blockIdx.x, gridDim.x);
        column += static_cast<size_t>(total_dim) * n;
    }
    if (!DENSE) {
        if (inside) moved[row] = moves;
        const int count = __syncthreads_count(moves);
        if (threadIdx.x == 0) counts[blockIdx.x] = count;
    }
}

// Writes P(y | x) of one member, (capsules, n); `out` holds the lengths first.
template <class T>
__device__ __forceinline__ void probabilities(const T* h, int n, const int* dims, int capsules, int total_dim,
                                              const Table& table, double* out) {
    const int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= n) return;
    double total = 0.0;
    for_each_capsule(h + row, n, dims, total_dim, [&](int i, T q) {
        out[static_cast<size_t>(i) * n + row] = q;
        total += q;
    });
    double lambda0, lambda1;
    look_up(table, 0.5 * total, lambda0, lambda1);
    const double slope = total > 0.0 ? lambda0 / total : 0.0, floor = (1.0 - lambda0) / total_dim;
    for (int i = 0; i < capsules; ++i) {
        double* p = out + static_cast<size_t>(i) * n + row;
        *p = score(slope, *p, floor, __ldg(dims + i));
    }
}

// Writes the residuals of the active rows without gaps, (dimensions, n_active). A grid row is a capsule.
template <class T>
__device__ __forceinline__ void gather(const T* h, int n, const int* y, const Members& members,
                                       const T* factors, const int* active, int n_active, T* out) {
    const int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= n_active) return;
    const int row = active[j], label = y[row];
    for (int c = blockIdx.y; c < members.count * members.capsules; c += gridDim.y) {
        const int r = c / members.capsules, i = c % members.capsules;
        const T factor =
            factors[(2 * r + (members.target(r, label) == i ? 0 : 1)) * static_cast<size_t>(n) + row];
        const int first = __ldg(members.starts + c), size = __ldg(members.dims + c);
        for (int a = first; a < first + size; ++a)
            out[a * static_cast<size_t>(n_active) + j] = h[a * static_cast<size_t>(n) + row] * factor;
    }
}

#define KERNELS(T, NAME)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
        capsule_dense_##NAME(T* h, int n, const int* y, const double* weight, const int* wiring, int count, \
                             int capsules, int classes, int equal_dim, const double* nu,                    \
                             const double* table, int cells, double scale, double* partial) {               \
        estep<T, true>(h, n, y, weight, Members(wiring, count, capsules, classes, equal_dim), nu,           \
                       Table{table, cells, scale}, partial, nullptr, nullptr, nullptr);                     \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) capsule_factors_##NAME(                           \
        T* h, int n, const int* y, const double* weight, const int* wiring, int count, int capsules,        \
        int classes, int equal_dim, const double* nu, const double* table, int cells, double scale,         \
        double* partial, T* factors, unsigned char* moved, int* counts) {                                   \
        estep<T, false>(h, n, y, weight, Members(wiring, count, capsules, classes, equal_dim), nu,          \
                        Table{table, cells, scale}, partial, factors, moved, counts);                       \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
        capsule_gather_##NAME(const T* h, int n, const int* y, const int* wiring, int count, int capsules,  \
                              int classes, const T* factors, const int* active, int n_active, T* out) {     \
        gather<T>(h, n, y, Members(wiring, count, capsules, classes, 0), factors, active, n_active, out);   \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
        capsule_probabilities_##NAME(const T* h, int n, const int* dims, int capsules, int total_dim,       \
                                     const double* table, int cells, double scale, double* out) {           \
        probabilities<T>(h, n, dims, capsules, total_dim, Table{table, cells, scale}, out);                 \
    }

KERNELS(float, f32)
KERNELS(double, f64)

// Thread block s sums line s of partial (sums, blocks). One further thread block, if launched, turns counts
// into the number of active rows before each thread block, and writes their total behind the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    capsule_finish_f64(const double* partial, int sums, int blocks, const int* counts, int* before,
                       double* result) {
    const int line = blockIdx.x, t = threadIdx.x;
    if (line < sums) {
        double sum = 0.0;
        for (int b = t; b < blocks; b += THREADS) sum += partial[line * static_cast<size_t>(blocks) + b];
        __shared__ double part[WARPS];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(EVERY_LANE, sum, step);
        if (t % 32 == 0) part[t / 32] = sum;
        __syncthreads();
        if (t == 0) {
            for (int warp = 1; warp < WARPS; ++warp) sum += part[warp];
            result[line] = sum;
        }
        return;
    }
    int carry = 0;
    for (int first = 0; first < blocks; first += THREADS) {
        const int b = first + t, value = b < blocks ? counts[b] : 0;
        int total;
        const int rank = scan_before(value, total);
        if (b < blocks) before[b] = carry + rank;
        carry += total;
    }
    if (t == 0) result[sums] = carry;
}

// Writes the numbers of the used rows in increasing order.
extern "C" __global__ void __launch_bounds__(THREADS)
    capsule_compact_i32(const unsigned char* moved, int n, const int* before, int* active) {
    const int row = blockIdx.x * THREADS + threadIdx.x;
    const int use = row < n && moved[row] ? 1 : 0;
    int total;
    const int rank = scan_before(use, total);
    if (use) active[before[blockIdx.x] + rank] = row;
}
