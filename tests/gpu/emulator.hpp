// CUDA words for a C++ compiler: the tests include this file and then a .cu file, and run its kernels on a
// processor.
//
// The threads of a block are fibres that take turns at every barrier, so __shared__ memory is plain static
// memory. Shuffles and __syncthreads_count are barriers too: all threads of the block must reach them, which is
// stricter than CUDA. Blocks run one after the other; the blocks of a cluster take turns at its barriers.
//
// Threads and blocks take turns forwards, backwards or in an order that is drawn anew at each barrier. A kernel
// that needs one of these orders has a race. Before a block gets its turn, static shared memory is filled with
// bytes 0xFF, NaN or -1, so that numbers which the block has not written are seen. It follows that a block must
// not need its static memory beyond a barrier of its cluster; dynamic shared memory belongs to the block until
// the block ends. CLUSTER blocks may meet, in kernels that ask.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define DYNAMIC_SHARED(name) float* const name = emulator::at->shared.data()
#define CLUSTER_BARRIER() emulator::cluster_barrier()

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct double2 {
    double x, y;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }

inline int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

template <class T>
inline T __ldg(const T* p) {
    return *p;
}

// Threads take turns only at barriers.
template <class T>
inline T atomicAdd(T* p, T value) {
    const T before = *p;
    *p += value;
    return before;
}

namespace emulator {

constexpr size_t STACK = 1 << 16;
constexpr unsigned CLUSTER = 8;

struct Fibre {
    ucontext_t context;  // its stack; later turns jump, which unlike swapcontext asks nothing of the system
    jmp_buf resume;
    bool started = false;
    std::vector<char> stack;
    bool done = false, in_cluster = false, in_warp = false;  // waits for other blocks, for other lanes
    long barriers = 0;
};

struct Block {
    unsigned index = 0;
    bool busy = false;
    std::vector<Fibre> fibres;
    std::vector<float> shared;
};

enum Turns { FORWARD, REVERSED, SHUFFLED };
static Turns turns = FORWARD;
static std::minstd_rand drawn;  // the same orders in each launch
static std::vector<std::pair<void*, size_t>> static_shared;

static std::vector<std::unique_ptr<Block>> places;  // of the blocks that have begun and not ended
static Block* at = nullptr;
static jmp_buf scheduler;
static unsigned current = 0;
static std::vector<unsigned char> exchange;  // 8 bytes a thread
static void (*entry)(void*) = nullptr;
static void* payload = nullptr;

[[noreturn]] inline void fail(const char* text, unsigned some, unsigned all) {
    std::fprintf(stderr, "emulator: %u of %u %s\n", some, all, text);
    std::abort();
}

inline void wait() {
    if (!_setjmp(at->fibres[current].resume)) _longjmp(scheduler, 1);
}

inline void barrier() {
    ++at->fibres[current].barriers;
    wait();
}

// Numbers from 0 to n in the order in which they get their turns.
inline std::vector<unsigned> order(unsigned n) {
    std::vector<unsigned> out(n);
    std::iota(out.begin(), out.end(), 0u);
    if (turns == REVERSED) std::reverse(out.begin(), out.end());
    if (turns == SHUFFLED) std::shuffle(out.begin(), out.end(), drawn);
    return out;
}

// Fill memory with what gives NaN or -1.
inline void poison(void* memory, size_t size) { std::memset(memory, 0xFF, size); }

// Each thread calls this for a variable in static shared memory, before it uses the variable: emulation.py
// replaces `__shared__ int a;` by `static int a; emulator::share(a);`.
template <class A>
void share(A& variable) {
    for (const auto& [memory, size] : static_shared) {
        if (memory == &variable) return;
    }
    static_shared.emplace_back(&variable, sizeof(variable));
    poison(&variable, sizeof(variable));
}

inline void warp_barrier() {
    at->fibres[current].in_warp = true;
    wait();
}

inline void cluster_barrier() {
    at->fibres[current].in_cluster = true;
    barrier();
}

static void start() {
    entry(payload);
    at->fibres[current].done = true;
    _longjmp(scheduler, 1);
}

// Give a thread its turn: back when it waits at a barrier, or has ended. No locals, so none is lost in the
// jump.
__attribute__((noinline)) static void give_turn() {
    if (_setjmp(scheduler)) return;
    if (at->fibres[current].started) _longjmp(at->fibres[current].resume, 1);
    at->fibres[current].started = true;
    setcontext(&at->fibres[current].context);
}

// Threads of a block up to their next barrier. Lanes that wait for their warp go on when all of its lanes do.
inline void run_to_barrier(Block& block) {
    for (bool first = true, again = true; again; first = false) {
        again = false;
        for (unsigned thread : order(block.fibres.size())) {
            auto& fibre = block.fibres[thread];
            if (fibre.done || !(first || fibre.in_warp)) continue;
            fibre.in_warp = false;
            threadIdx.x = current = thread;
            give_turn();
            again |= fibre.in_warp;
        }
        for (unsigned warp = 0; warp < block.fibres.size(); warp += 32) {
            const unsigned lanes = std::min<unsigned>(32, block.fibres.size() - warp);
            const auto begin = block.fibres.begin() + warp;
            const unsigned waiting = std::count_if(begin, begin + lanes, [](auto& f) { return f.in_warp; });
            if (waiting && waiting != lanes) fail("lanes wait for their warp", waiting, lanes);
        }
    }
}

// All threads of a block up to a barrier of its cluster (false) or to the end (true). Threads that have ended
// or gone to other blocks while others of their block wait at a barrier are an error.
inline bool run_block(Block& block) {
    at = &block;
    blockIdx.x = block.index;
    for (const auto& [memory, size] : static_shared) poison(memory, size);
    const unsigned threads = block.fibres.size();
    for (auto& fibre : block.fibres) fibre.in_cluster = false;
    for (;;) {
        run_to_barrier(block);
        unsigned alive = 0, away = 0;
        for (auto& fibre : block.fibres) alive += !fibre.done, away += fibre.in_cluster;
        if (alive && alive != threads) fail("threads wait at a barrier", alive, threads);
        if (away && away != threads) fail("threads wait for their cluster", away, threads);
        if (!alive || away) break;
    }
    for (auto& fibre : block.fibres) {
        if (fibre.barriers != block.fibres[0].barriers) std::abort();
    }
    block.busy = !block.fibres[0].done;
    return !block.busy;
}

inline Block& begin_block(unsigned index, unsigned threads, unsigned shared) {
    unsigned place = 0;
    while (place < places.size() && places[place]->busy) ++place;
    if (place == places.size()) places.push_back(std::make_unique<Block>());
    Block& block = *places[place];
    block.index = index;
    block.shared.assign(shared / sizeof(float), std::numeric_limits<float>::quiet_NaN());
    block.fibres.resize(threads);
    exchange.assign(8 * threads, 0);
    for (auto& fibre : block.fibres) {
        fibre.done = fibre.started = fibre.in_warp = false;
        fibre.barriers = 0;
        fibre.stack.resize(STACK);
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(fibre.stack.data(), STACK);  // the last fibre left guards in it
#endif
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = STACK;
        fibre.context.uc_link = nullptr;
        makecontext(&fibre.context, start, 0);
    }
    return block;
}

// The blocks of a cluster to the end; blocks that know of none end one after the other.
inline void run_cluster(unsigned first, unsigned blocks, unsigned threads, unsigned shared) {
    std::vector<Block*> waiting;
    for (unsigned rank : order(blocks)) {
        Block& block = begin_block(first + rank, threads, shared);
        if (!run_block(block)) waiting.push_back(&block);
    }
    while (!waiting.empty()) {
        if (waiting.size() != CLUSTER) fail("blocks wait for their cluster", waiting.size(), CLUSTER);
        std::vector<Block*> still;
        for (unsigned place : order(waiting.size())) {
            if (!run_block(*waiting[place])) still.push_back(waiting[place]);
        }
        waiting = still;
    }
}

// Value of another thread of the warp; both barriers are reached by all its threads.
template <class T>
inline T from_thread(T value, unsigned thread) {
    static_assert(sizeof(T) <= 8, "values of up to 8 bytes");
    *reinterpret_cast<T*>(&exchange[8 * threadIdx.x]) = value;
    warp_barrier();
    const T out = *reinterpret_cast<T*>(&exchange[8 * thread]);
    warp_barrier();
    return out;
}

// One letter a parameter, P before a pointer: what the caller must pass.
template <class P>
std::string letter() {
    if constexpr (std::is_pointer_v<P>) {
        return "P" + letter<std::remove_const_t<std::remove_pointer_t<P>>>();
    } else if constexpr (std::is_same_v<P, float>) {
        return "f";
    } else if constexpr (std::is_same_v<P, double>) {
        return "d";
    } else if constexpr (std::is_same_v<P, int>) {
        return "i";
    } else if constexpr (std::is_same_v<P, short>) {
        return "h";
    } else if constexpr (std::is_same_v<P, unsigned short>) {
        return "H";
    } else if constexpr (std::is_same_v<P, long long>) {
        return "q";
    } else if constexpr (std::is_same_v<P, unsigned long long>) {
        return "Q";
    } else if constexpr (std::is_same_v<P, signed char>) {
        return "b";
    } else {
        static_assert(std::is_same_v<P, unsigned char>, "a new parameter type: give it numpy's letter");
        return "B";
    }
}

template <class... P>
const char* signature(void (*)(P...)) {
    static std::string text;
    text.clear();
    ((text += letter<P>() + " "), ...);
    return text.c_str();
}

template <class... P, size_t... I>
void run(void (*kernel)(P...), unsigned grid_x, unsigned grid_y, unsigned threads, unsigned shared,
         void** arguments, std::index_sequence<I...>) {
    auto body = [&] { kernel(*static_cast<P*>(arguments[I])...); };
    payload = &body;
    entry = [](void* p) { (*static_cast<decltype(body)*>(p))(); };
    gridDim.x = grid_x;
    gridDim.y = grid_y;
    blockDim.x = threads;
    const unsigned clusters = (grid_x + CLUSTER - 1) / CLUSTER;
    for (unsigned y : order(grid_y)) {
        blockIdx.y = y;
        for (unsigned cluster : order(clusters))
            run_cluster(cluster * CLUSTER, std::min(CLUSTER, grid_x - cluster * CLUSTER), threads, shared);
    }
    payload = nullptr;
}

template <class... P>
void launch(void (*kernel)(P...), unsigned grid_x, unsigned grid_y, unsigned threads, unsigned shared,
            void** arguments) {
    run(kernel, grid_x, grid_y, threads, shared, arguments, std::index_sequence_for<P...>());
}

}  // namespace emulator

inline void __syncthreads() { emulator::barrier(); }

inline int __syncthreads_count(int value) {
    int count = 0;
    *reinterpret_cast<int*>(&emulator::exchange[8 * threadIdx.x]) = value != 0;
    emulator::barrier();
    for (unsigned t = 0; t < blockDim.x; ++t) count += *reinterpret_cast<int*>(&emulator::exchange[8 * t]);
    emulator::barrier();
    return count;
}

// A lane whose source lies outside its warp keeps its own value, as in CUDA.
template <class T>
inline T __shfl_down_sync(unsigned, T value, unsigned step) {
    const unsigned t = threadIdx.x;
    return emulator::from_thread(value, t % 32 + step < 32 ? t + step : t);
}

template <class T>
inline T __shfl_up_sync(unsigned, T value, unsigned step) {
    const unsigned t = threadIdx.x;
    return emulator::from_thread(value, t % 32 >= step ? t - step : t);
}

template <class T>
inline T __shfl_sync(unsigned, T value, unsigned lane) {
    return emulator::from_thread(value, threadIdx.x / 32 * 32 + lane);
}

inline unsigned __ballot_sync(unsigned, bool value) {
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        bits |= static_cast<unsigned>(__shfl_sync(0xffffffffu, static_cast<int>(value), lane)) << lane;
    return bits;
}

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <class T>
inline T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return emulator::from_thread(value, threadIdx.x ^ mask);
}

inline void __syncwarp() { emulator::warp_barrier(); }

extern "C" void emulator_set_turns(int turns) {
    emulator::turns = static_cast<emulator::Turns>(turns);
    emulator::drawn.seed(1);
}

#define EMULATE(NAME)                                                                                  \
    extern "C" void emulate_##NAME(unsigned grid_x, unsigned grid_y, unsigned threads, unsigned shared, \
                                   void** args) {                                                       \
        emulator::launch(NAME, grid_x, grid_y, threads, shared, args);                                  \
    }                                                                                                   \
    extern "C" const char* signature_##NAME() { return emulator::signature(NAME); }
