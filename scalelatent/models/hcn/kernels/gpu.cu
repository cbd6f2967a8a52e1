// Sweeps of hierarchical compositional networks on a GPU: message updates of the AND-OR trees of all pixels.
// gpu.py compiles this file and launches the kernels; reference.py defines the results.
//
// A tree is the OR of the pairs (feature position, weight) that can turn on one pixel. A thread block updates the
// trees of one chain (a sequence of minibatches that one task learns), or of one image, one after another. The
// threads of a block share the pairs of a tree. All numbers are whole numbers, whose sums are identical in any
// order, so the results are identical to those of a CPU. cpu/trees.py explains the formulas for the messages.
//
// tests/gpu/emulator.hpp defines the CUDA keywords for a C++ compiler, so that tests run this file on a CPU.

#include "philox.cuh"

constexpr int THREADS = 256;  // number of threads of a thread block, the same as in gpu.py
constexpr int WARPS = THREADS / 32;
constexpr int LEAST = -(1 << 30);  // a number below all messages of pairs, in units of 1/256 nat
constexpr unsigned EVERY_LANE = 0xffffffffu;
// Bits of the code that gpu.py passes: which log odds, of weights or of positions, to copy to shared memory.
constexpr int W_SHARED = 1, S_SHARED = 2;

#ifndef DYNAMIC_SHARED  // the emulator of the tests has another definition
#define DYNAMIC_SHARED(name) extern __shared__ float name[]
#endif

// Returns the shared memory whose size gpu.py chooses at the launch.
__device__ __forceinline__ int* dynamic_memory() {
    DYNAMIC_SHARED(memory);
    return reinterpret_cast<int*>(memory);
}

__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }

struct Shape {
    int channels, height, width, high, wide, h, w, features;
};

// Tree of a pixel: `rows` rows of `run` pairs each. s and w are the indices of the first position in S and of the first
// weight in W. b is the log odds of the pixel, and `index` is its number in all images of the chain. `layer` is image
// times channels plus channel, and `image` is the number of the image.
struct Tree {
    int rows, run, s, w, b, index, layer, image;
};

__device__ __forceinline__ Tree tree_of(const Shape& shape, const int* evidence, int index) {
    const int plane = shape.height * shape.width, layer = index / plane, y = (index - layer * plane) / shape.width;
    const int x = index - layer * plane - y * shape.width, channel = layer % shape.channels;
    const int r = larger(0, y - shape.h + 1), c = larger(0, x - shape.w + 1);
    const int cols = smaller(shape.wide - 1, x) - c + 1;
    const int i = r - y + shape.h - 1, j = c - x + shape.w - 1;
    Tree tree;
    tree.rows = smaller(shape.high - 1, y) - r + 1;
    tree.run = cols * shape.features;
    tree.s = (r * shape.wide + c) * shape.features;
    tree.w = ((channel * shape.h + i) * shape.w + j) * shape.features;
    tree.b = evidence[index];
    tree.index = index;
    tree.layer = layer;
    tree.image = layer / shape.channels;
    return tree;
}

// Returns the tree that lane `lane` of the warp holds.
__device__ __forceinline__ Tree tree_of_lane(const Tree& own, int lane) {
    return {__shfl_sync(EVERY_LANE, own.rows, lane), __shfl_sync(EVERY_LANE, own.run, lane),
            __shfl_sync(EVERY_LANE, own.s, lane), __shfl_sync(EVERY_LANE, own.w, lane),
            __shfl_sync(EVERY_LANE, own.b, lane), __shfl_sync(EVERY_LANE, own.index, lane),
            __shfl_sync(EVERY_LANE, own.layer, lane), __shfl_sync(EVERY_LANE, own.image, lane)};
}

// Returns to each thread the sum of `total` over all threads of the thread block.
__device__ __forceinline__ int add_up(int total) {
    __shared__ int sums[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(EVERY_LANE, total, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp];
    return total;  // the caller has a barrier before the next call writes to `sums`
}

// Gives each thread the largest and the second largest value of all threads of the thread block.
__device__ __forceinline__ void largest_two(int& first, int& second) {
    __shared__ int firsts[WARPS], seconds[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const int other = __shfl_xor_sync(EVERY_LANE, first, step);
        const int next = __shfl_xor_sync(EVERY_LANE, second, step);
        second = larger(smaller(first, other), larger(second, next));
        first = larger(first, other);
    }
    if (threadIdx.x % 32 == 0) {
        firsts[threadIdx.x / 32] = first;
        seconds[threadIdx.x / 32] = second;
    }
    __syncthreads();
    first = firsts[0];
    second = seconds[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) {
        second = larger(smaller(first, firsts[warp]), larger(second, seconds[warp]));
        first = larger(first, firsts[warp]);
    }
}

// Returns the message to the position of a pair from the log odds of the weight, or the reverse. g is the message of
// the OR to the pair.
__device__ __forceinline__ int message(int other, int g) {
    return larger(0, other + g) - larger(0, other);
}

// Updates the messages of a tree to the pairs of this thread. A warp updates every WARPS-th row, so that no pair needs
// a division. KEPT is the number of stored messages per pair, and M is the type of a stored message; if KEPT is 1, the
// weights are fixed and get no messages. s_step and w_step are the numbers of elements from one row to the next in S
// and in W. ON is true if the pixel is more likely on than off, b > 0. `held` gets 1 for each row with nonzero messages
// to weights, and 0 for the other rows. Returns true if a stored message changed.
template <int KEPT, bool ON, class M>
__device__ __forceinline__ bool update(const Tree& tree, int s_step, int w_step, int* s, int* w, M* to_s, M* to_w,
                                       unsigned char* held, float damping) {
    const int b = tree.b, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0, first = LEAST, second = LEAST;
    for (int row = warp; row < tree.rows; row += WARPS) {
        const int *places = s + tree.s + row * s_step, *weights = w + tree.w + row * w_step;
        const int base = row * tree.run;  // number of the first message of the row
        for (int k = lane; k < tree.run; k += 32) {
            const int in_s = places[k] - (KEPT ? to_s[base + k] : 0);
            const int in_w = weights[k] - (KEPT == 2 ? to_w[base + k] : 0);
            const int t = smaller(in_s + in_w, smaller(in_s, in_w));
            if (ON) {
                second = larger(second, smaller(first, t));
                first = larger(first, t);
            } else {
                total += smaller(larger(t, 0), -b);
            }
        }
    }
    if (ON)
        largest_two(first, second);
    else
        total = add_up(smaller(total, -2 * b));  // a larger sum has the same effect, but could overflow int
    const int rest = smaller(b, larger(0, -first)), top = smaller(b, larger(0, -second));
    bool changed = false;
    for (int row = warp; row < tree.rows; row += WARPS) {
        int *places = s + tree.s + row * s_step, *weights = w + tree.w + row * w_step;
        const int base = row * tree.run;
        bool nonzero = false;
        int next_place = lane < tree.run ? places[lane] : 0, next_weight = lane < tree.run ? weights[lane] : 0;
        for (int k = lane; k < tree.run; k += 32) {
            const int place = next_place, weight = next_weight;
            if (k + 32 < tree.run) {  // read the next pair now, so that it does not wait for the writes of this one
                next_place = places[k + 32];
                next_weight = weights[k + 32];
            }
            const int old_s = KEPT ? to_s[base + k] : 0, old_w = KEPT == 2 ? to_w[base + k] : 0;
            const int in_s = place - old_s, in_w = weight - old_w;
            const int t = smaller(in_s + in_w, smaller(in_s, in_w));
            const int g = !ON ? smaller(0, b + total - smaller(larger(t, 0), -b)) : t == first ? top : rest;
            int change = message(in_w, g) - old_s;
            if (KEPT == 2) change = static_cast<int>(rintf(damping * static_cast<float>(change)));
            if (change) places[k] = place + change;
            if (KEPT) {
                to_s[base + k] = static_cast<M>(old_s + change);
                changed |= change != 0;
            }
            if (KEPT == 1) continue;
            change = message(in_s, g) - old_w;
            if (KEPT == 2) {
                change = static_cast<int>(rintf(damping * static_cast<float>(change)));
                to_w[base + k] = static_cast<M>(old_w + change);
                changed |= change != 0;
                nonzero |= old_w + change != 0;
            }
            if (change) weights[k] = weight + change;
        }
        if (KEPT == 2) {
            const bool kept = __ballot_sync(EVERY_LANE, nonzero) != 0;
            if (lane == 0) held[row] = kept;
        }
    }
    return changed;
}

// Updates the trees of one thread block in the given order of pixels; returns the number of trees with a changed
// message.
template <int KEPT, class M>
__device__ __forceinline__ int walk(const Shape& shape, const int* evidence, const int* order, int pixels, int* s,
                                    int* w, M* to_s, M* to_w, unsigned char* held, int room, const int* begins,
                                    float damping) {
    const int plane = shape.height * shape.width, places = shape.high * shape.wide * shape.features;
    const int s_step = shape.wide * shape.features, w_step = shape.w * shape.features;
    int moved = 0;
    for (int begin = 0; begin < pixels; begin += 32) {
        // Each lane of a warp finds the tree of one of 32 pixels, so the reads and divisions of 32 trees take the time
        // of one.
        const int last = pixels - 1 - begin;
        const Tree own = tree_of(shape, evidence, order[begin + smaller(last, threadIdx.x % 32)]);
        for (int lane = 0; lane <= smaller(last, 31); ++lane) {
            const Tree tree = tree_of_lane(own, lane);
            // An unknown pixel sends messages of 0, which may replace stored ones.
            if (tree.b == 0 && KEPT != 2) continue;
            const size_t kept =
                KEPT ? static_cast<size_t>(tree.layer) * room + begins[tree.index - tree.layer * plane] : 0;
            int* own_s = s + static_cast<size_t>(tree.image) * places;
            M *own_to_s = to_s + kept, *own_to_w = to_w + (KEPT == 2 ? kept : 0);
            unsigned char* rows = held + (KEPT == 2 ? static_cast<size_t>(tree.index) * shape.h : 0);
            const bool changed =
                tree.b > 0 ? update<KEPT, true>(tree, s_step, w_step, own_s, w, own_to_s, own_to_w, rows, damping)
                           : update<KEPT, false>(tree, s_step, w_step, own_s, w, own_to_s, own_to_w, rows, damping);
            if (KEPT)
                moved += __syncthreads_count(changed) != 0;  // also a barrier, after which all log odds are written
            else
                __syncthreads();
        }
    }
    return moved;
}

// Log odds (beliefs) of positions s and of weights w of a thread block. The constructor copies those that `held` names
// (bits W_SHARED and S_SHARED) to shared memory, and `put_back` copies them back to global memory.
struct Beliefs {
    int *s, *w;

    __device__ __forceinline__ Beliefs(int* s, int* w, size_t places, int weights, int held) : s(s), w(w) {
        int* free = dynamic_memory();
        if (held & W_SHARED) {
            for (int k = threadIdx.x; k < weights; k += THREADS) free[k] = w[k];
            this->w = free;
            free += weights;
        }
        if (held & S_SHARED) {
            for (size_t k = threadIdx.x; k < places; k += THREADS) free[k] = s[k];
            this->s = free;
        }
        __syncthreads();
    }

    // No barrier is needed here, because `walk` ends with a barrier.
    __device__ __forceinline__ void put_back(int* s, int* w, size_t places, int weights, int held) const {
        if (held & W_SHARED)
            for (int k = threadIdx.x; k < weights; k += THREADS) w[k] = this->w[k];
        if (held & S_SHARED)
            for (size_t k = threadIdx.x; k < places; k += THREADS) s[k] = this->s[k];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    hcn_sweep(const int* evidence, const int* order, int pixels, int images, int channels, int height, int width,
              int h, int w, int features, int* s, int* weights, int held) {
    const Shape shape = {channels, height, width, height - h + 1, width - w + 1, h, w, features};
    const size_t chain = blockIdx.x, places = static_cast<size_t>(images) * shape.high * shape.wide * features;
    const int count = channels * h * w * features;
    s += chain * places;
    weights += chain * count;
    const Beliefs beliefs(s, weights, places, count, held);
    walk<0, short>(shape, evidence + chain * pixels, order + chain * pixels, pixels, beliefs.s, beliefs.w, nullptr,
                   nullptr, nullptr, 0, nullptr, 1.0f);
    beliefs.put_back(s, weights, places, count, held);
}

// Updates all trees of a chain once; the stored messages have the type M.
template <class M>
__device__ __forceinline__ void sweep_messages(const int* evidence, const int* order, int pixels, int images,
                                               int channels, int height, int width, int h, int w, int features,
                                               int* s, int* weights, int shared, M* to_s, M* to_w,
                                               unsigned char* held, int room, const int* begins, float damping,
                                               int* moved) {
    const Shape shape = {channels, height, width, height - h + 1, width - w + 1, h, w, features};
    const size_t chain = blockIdx.x, places = static_cast<size_t>(images) * shape.high * shape.wide * features;
    const size_t messages = chain * images * channels * room;
    const int size = channels * h * w * features;
    s += chain * places;
    weights += chain * size;
    const Beliefs beliefs(s, weights, places, size, shared);
    const int count = walk<2, M>(shape, evidence + chain * pixels, order + chain * pixels, pixels, beliefs.s, beliefs.w,
                                 to_s + messages, to_w + messages, held + chain * pixels * h, room, begins, damping);
    beliefs.put_back(s, weights, places, size, shared);
    if (threadIdx.x == 0) moved[chain] = count;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hcn_sweep_messages(const int* evidence, const int* order, int pixels, int images, int channels, int height,
                            int width, int h, int w, int features, int* s, int* weights, int shared, short* to_s,
                            short* to_w, unsigned char* held, int room, const int* begins, float damping, int* moved) {
    sweep_messages(evidence, order, pixels, images, channels, height, width, h, w, features, s, weights, shared, to_s,
                   to_w, held, room, begins, damping, moved);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hcn_sweep_wide_messages(const int* evidence, const int* order, int pixels, int images, int channels, int height,
                            int width, int h, int w, int features, int* s, int* weights, int shared, int* to_s,
                            int* to_w, unsigned char* held, int room, const int* begins, float damping, int* moved) {
    sweep_messages(evidence, order, pixels, images, channels, height, width, h, w, features, s, weights, shared, to_s,
                   to_w, held, room, begins, damping, moved);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    hcn_decode_images(const int* evidence, const int* order, int pixels, int channels, int height, int width, int h,
                      int w, int features, int* s, int* weights, int shared, short* to_s, int room, const int* begins,
                      int sweeps, int* moved) {
    const Shape shape = {channels, height, width, height - h + 1, width - w + 1, h, w, features};
    const size_t row = blockIdx.x, places = static_cast<size_t>(shape.high) * shape.wide * features;
    const int size = channels * h * w * features;
    s += row * places;
    const Beliefs beliefs(s, weights, places, size, shared);
    int count = 0;
    for (int sweep = 0; sweep < sweeps; ++sweep) {
        count = walk<1, short>(shape, evidence + row * pixels, order + row * pixels, pixels, beliefs.s, beliefs.w,
                               to_s + row * channels * room, nullptr, nullptr, room, begins, 1.0f);
        if (count == 0) break;
    }
    beliefs.put_back(s, weights, places, size, shared & S_SHARED);  // all rows share the weights, which are fixed
    if (threadIdx.x == 0) moved[row] = count;
}

// Each thread writes one random permutation of 0 to n - 1 by a Fisher-Yates shuffle; pixel_order.py defines it.
extern "C" __global__ void __launch_bounds__(THREADS)
    hcn_shuffle(unsigned long long seed, unsigned long long word, unsigned long long epoch, const long long* rows,
                int count, int n, int* out) {
    const int k = blockIdx.x * THREADS + threadIdx.x;
    if (k >= count) return;
    int* order = out + static_cast<size_t>(k) * n;
    for (int i = 0; i < n; ++i) order[i] = i;
    Words words = {};
    for (int step = 0; step < n - 1; ++step) {
        const int turn = step % 4;
        if (turn == 0) words = philox(step / 4 + 1, 0, rows[k], epoch, seed, word);
        const unsigned long long drawn = word_of(words, turn);
        const int i = n - 1 - step;
        const int j = static_cast<int>(((drawn >> 32) * static_cast<unsigned long long>(i + 1)) >> 32);
        const int kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}
