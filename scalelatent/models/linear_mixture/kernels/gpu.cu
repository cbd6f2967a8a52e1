// GPU kernels of mixtures of linear models, except products of cuBLAS. gpu.py compiles and launches this text, and
// tests compare it with reference.py. Sums run over rows and features in ascending order.
//
// tests/gpu/emulator.hpp defines the CUDA keywords below for a C++ compiler.

constexpr int THREADS = 128;  // threads of a block; gpu.py launches with the same number
constexpr int MOST_TANGENTS = 7;  // kinds of tangents: the length of reference.TANGENTS
constexpr float INFINITE = 3.402823466e+38f;

__device__ __forceinline__ long long thread_number() {
    return static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
}

// z = x[rows] - means[member], or without rows z = x - means; one number per thread.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_centre(const float* x, const int* rows, const int* member, const float* means, int n, int p, float* z) {
    const long long at = thread_number();
    if (at >= static_cast<long long>(n) * p) return;
    const int i = static_cast<int>(at / p), f = static_cast<int>(at % p);
    const long long row = rows ? rows[i] : i, of = member ? member[i] : 0;
    z[at] = x[row * p + f] - means[of * p + f];
}

// Squared lengths of rows; one row per thread.
extern "C" __global__ void __launch_bounds__(THREADS) lm_lengths(const float* z, int n, int p, float* lengths) {
    const long long i = thread_number();
    if (i >= n) return;
    float total = 0.0f;
    for (int f = 0; f < p; ++f) total += z[i * p + f] * z[i * p + f];
    lengths[i] = total;
}

// Scores of rows from their products with the columns b, W of each component, and with d if each feature has its own.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_scores(const float* products, const float* own, const float* lengths, const float* d, const float* c, int n,
              int k, int width, float* scores) {
    const long long at = thread_number();
    if (at >= static_cast<long long>(n) * k) return;
    const long long i = at / k;
    const int q = static_cast<int>(at % k);
    const float* h = products + at * width;
    float e = (own ? own[at] : lengths[i] * d[q]) + c[q] + h[0];
    for (int j = 1; j < width; ++j) e -= h[j] * h[j];
    scores[at] = e;
}

// The smallest score of each class, below INFINITE, and the first component that has it; one thread block per row
// and class, classes along y.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_best(const float* scores, int k, int classes, const int* starts, int first, float* best, int* index) {
    __shared__ float values[THREADS];
    __shared__ int places[THREADS];
    const int i = blockIdx.x, t = threadIdx.x;
    for (int c = blockIdx.y; c < classes; c += gridDim.y) {
        float value = INFINITE;
        int place = 0x7fffffff;
        for (int q = starts[c] + t; q < starts[c + 1]; q += THREADS) {
            const float e = scores[static_cast<long long>(i) * k + q - first];
            if (e < value) {
                value = e;
                place = q;
            }
        }
        values[t] = value;
        places[t] = place;
        __syncthreads();
        for (int step = THREADS / 2; step > 0; step /= 2) {
            if (t < step && (values[t + step] < values[t] ||
                             (values[t + step] == values[t] && places[t + step] < places[t]))) {
                values[t] = values[t + step];
                places[t] = places[t + step];
            }
            __syncthreads();
        }
        if (t == 0) {  // only this thread writes these two places for the next class
            const long long at = static_cast<long long>(i) * classes + c;
            const bool none = places[0] == 0x7fffffff;
            best[at] = values[0];
            index[at] = none ? starts[c] : places[0];
        }
    }
}

// Codes B'R of residuals under the basis (K, q, p) of their component; one code per thread.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_codes(const float* z, const int* member, const float* bases, int n, int p, int q, float* codes) {
    const long long at = thread_number();
    if (at >= static_cast<long long>(n) * q) return;
    const long long i = at / q, j = at % q;
    const float *row = z + i * p, *basis = bases + (static_cast<long long>(member[i]) * q + j) * p;
    float total = 0.0f;
    for (int f = 0; f < p; ++f) total += row[f] * basis[f];
    codes[at] = total;
}

// For each group adds sum r code R to scatter (q, p), and for `lines` = q + 2 also sum r R to totals (p) and
// sum r R∘R to squares (p); one number per thread, groups along y.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_scatter(const float* z, const float* codes, const float* weights, const int* starts, int groups, int p, int q,
               int lines, double* scatter, double* totals, double* squares) {
    const long long at = thread_number();
    if (at >= static_cast<long long>(lines) * p) return;
    const int j = static_cast<int>(at / p), f = static_cast<int>(at % p);
    for (int g = blockIdx.y; g < groups; g += gridDim.y) {
        if (starts[g] == starts[g + 1]) continue;
        double total = 0.0;
        for (long long i = starts[g]; i < starts[g + 1]; ++i) {
            const float x = z[i * p + f];
            const float by = j < q ? codes[i * q + j] : j == q ? 1.0f : x;
            total += weights[i] * (by * x);
        }
        const long long line = static_cast<long long>(g) * p + f;
        double& sum = j < q ? scatter[static_cast<long long>(g) * q * p + at] : j == q ? totals[line] : squares[line];
        sum += total;
    }
}

// For each group adds sum r code code' to grams (q, q); one number per thread, groups along y.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_grams(const float* codes, const float* weights, const int* starts, int groups, int q, double* grams) {
    const long long at = thread_number();
    if (at >= static_cast<long long>(q) * q) return;
    const long long j = at / q, m = at % q;
    for (int g = blockIdx.y; g < groups; g += gridDim.y) {
        double total = 0.0;
        for (long long i = starts[g]; i < starts[g + 1]; ++i)
            total += weights[i] * (codes[i * q + j] * codes[i * q + m]);
        grams[static_cast<long long>(g) * q * q + at] += total;
    }
}

// For each group adds sum r |t|^2 of each kind of tangents to traces (kinds); one number per thread, groups along y.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_traces(const float* lengths, const float* weights, const int* starts, int groups, int kinds, double* traces) {
    const int t = static_cast<int>(thread_number());
    if (t >= kinds) return;
    for (int g = blockIdx.y; g < groups; g += gridDim.y) {
        double total = 0.0;
        for (long long i = starts[g]; i < starts[g + 1]; ++i)
            total += static_cast<double>(weights[i]) * lengths[i * kinds + t];
        traces[static_cast<long long>(g) * kinds + t] += total;
    }
}

// Tangents (n, kinds, p) from derivatives. Fields (kinds, 2, p) are their factors; NaN stands for thickness.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_tangents(const float* gx, const float* gy, const float* fields, int n, int kinds, int p, float* out) {
    const long long at = thread_number();
    if (at >= static_cast<long long>(n) * kinds * p) return;
    const int f = static_cast<int>(at % p), t = static_cast<int>(at / p % kinds);
    const long long i = at / p / kinds;
    const float u = gx[i * p + f], v = gy[i * p + f];
    const float by_u = fields[2 * t * p + f], by_v = fields[(2 * t + 1) * p + f];
    out[at] = by_u != by_u ? sqrtf(u * u + v * v) : by_u * u + by_v * v;
}

// For each pair of row and candidate: products of the t tangents and the row with the columns W, b (K, width, p),
// and with each other under d (K, p or 1). One product per thread, pairs along y.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_products(const float* z, const float* tangents, const int* candidates, const float* columns, const float* d,
                int pairs, int some, int t, int p, int width, int own, float* products) {
    const int each = (t + 1) * (width + t + 1), at = static_cast<int>(thread_number());
    if (at >= each) return;
    const int j = at / (width + t + 1), m = at % (width + t + 1), other = m - width;
    for (long long pair = blockIdx.y; pair < pairs; pair += gridDim.y) {
        const long long i = pair / some, q = candidates[pair];
        const float* left = j < t ? tangents + (i * t + j) * p : z + i * p;
        const float* right = m < width ? columns + (q * width + m) * p
                                       : other < t ? tangents + (i * t + other) * p : z + i * p;
        float total = 0.0f;
        for (int f = 0; f < p; ++f) {
            const float by = m < width ? 1.0f : own ? d[q * p + f] : d[q];
            total += left[f] * right[f] * by;
        }
        products[pair * each + at] = total;
    }
}

// The score of each pair of row and candidate minus b' G^-1 b, by Cholesky; one pair per thread. All loops over
// tangents have a constant length, so that the compiler unrolls them and keeps G and b in registers.
extern "C" __global__ void __launch_bounds__(THREADS)
    lm_distances(const float* products, const int* candidates, const float* c, int pairs, int t, int width,
                 double gamma, double least, float* out) {
    const long long pair = thread_number();
    if (pair >= pairs) return;
    const int line = width + t + 1, h = width - 1;
    const float* a = products + pair * (t + 1) * line;
    const auto product = [&](int j, int k) {
        double s = a[j * line + width + k];
        for (int m = 0; m < h; ++m) s -= static_cast<double>(a[j * line + m]) * a[k * line + m];
        return s;
    };
    double g[MOST_TANGENTS][MOST_TANGENTS], b[MOST_TANGENTS], top = 0.0;
#pragma unroll
    for (int j = 0; j < MOST_TANGENTS; ++j) {
#pragma unroll
        for (int k = 0; k <= j; ++k) g[j][k] = j < t ? product(j, k) : 0.0;
        b[j] = j < t ? product(t, j) + 0.5 * a[j * line + h] : 0.0;
        if (j < t) g[j][j] += gamma * a[j * line + width + j];
        if (g[j][j] > top) top = g[j][j];
    }
    double score = product(t, t) + a[t * line + h] + c[candidates[pair]];
#pragma unroll
    for (int i = 0; i < MOST_TANGENTS; ++i) {
        double pivot = g[i][i], y = b[i];
#pragma unroll
        for (int k = 0; k < i; ++k) {
            pivot -= g[i][k] * g[i][k];
            y -= g[i][k] * b[k];
        }
        const bool none = pivot <= least * top;
        const double root = none ? 1.0 : sqrt(pivot);
#pragma unroll
        for (int j = i + 1; j < MOST_TANGENTS; ++j) {
            double s = g[j][i];
#pragma unroll
            for (int k = 0; k < i; ++k) s -= g[j][k] * g[i][k];
            g[j][i] = none ? 0.0 : s / root;
        }
        b[i] = none ? 0.0 : y / root;
        score -= b[i] * b[i];
    }
    out[pair] = static_cast<float>(score);
}
