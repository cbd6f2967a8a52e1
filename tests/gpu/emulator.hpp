// CUDA words for a C++ compiler: the tests include this and then a .cu file, and run its kernels on a
// processor.
//
// Thread blocks run one after the other; the threads of a block are fibres that take turns at every
// barrier, so __shared__ memory is plain static memory. Shuffles and __syncthreads_count are barriers too:
// they must be reached by all threads of the block, which is stricter than CUDA.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct double2 {
    double x, y;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

inline int min(int a, int b) { return a < b ? a : b; }

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

struct Fibre {
    ucontext_t context;  // its stack; later turns jump, which unlike swapcontext asks nothing of the system
    jmp_buf resume;
    bool started = false;
    std::vector<char> stack;
    bool done = false;
    long barriers = 0;
};

static std::vector<Fibre> fibres;
static jmp_buf scheduler;
static unsigned current = 0;
static std::vector<unsigned char> exchange;  // 8 bytes a thread
static void (*entry)(void*) = nullptr;
static void* payload = nullptr;

inline void barrier() {
    ++fibres[current].barriers;
    if (!_setjmp(fibres[current].resume)) _longjmp(scheduler, 1);
}

static void start() {
    entry(payload);
    fibres[current].done = true;
    _longjmp(scheduler, 1);
}

// Give a thread its turn: back when it waits at a barrier, or has ended. No locals, so none is lost in the
// jump.
__attribute__((noinline)) static void give_turn() {
    if (_setjmp(scheduler)) return;
    if (fibres[current].started) _longjmp(fibres[current].resume, 1);
    fibres[current].started = true;
    setcontext(&fibres[current].context);
}

// All threads of one block, to the end. Threads that have ended while others wait at a barrier are an error.
inline void run_block(unsigned threads) {
    fibres.resize(threads);
    exchange.assign(8 * threads, 0);
    for (auto& fibre : fibres) {
        fibre.done = fibre.started = false;
        fibre.barriers = 0;
        fibre.stack.resize(STACK);
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.data();
        fibre.context.uc_stack.ss_size = STACK;
        fibre.context.uc_link = nullptr;
        makecontext(&fibre.context, start, 0);
    }
    for (unsigned alive = threads; alive;) {
        alive = 0;
        for (current = 0; current < threads; ++current) {
            if (fibres[current].done) continue;
            threadIdx.x = current;
            give_turn();
            alive += !fibres[current].done;
        }
        if (alive && alive != threads) {
            std::fprintf(stderr, "emulator: %u of %u threads wait at a barrier\n", alive, threads);
            std::abort();
        }
    }
    for (auto& fibre : fibres) {
        if (fibre.barriers != fibres[0].barriers) std::abort();
    }
}

// Value of another thread; both barriers are reached by all threads.
template <class T>
inline T from_thread(T value, unsigned thread) {
    static_assert(sizeof(T) <= 8, "values of up to 8 bytes");
    *reinterpret_cast<T*>(&exchange[8 * threadIdx.x]) = value;
    barrier();
    const T out = *reinterpret_cast<T*>(&exchange[8 * thread]);
    barrier();
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
void run(void (*kernel)(P...), unsigned grid_x, unsigned grid_y, unsigned threads, void** arguments,
         std::index_sequence<I...>) {
    auto body = [&] { kernel(*static_cast<P*>(arguments[I])...); };
    payload = &body;
    entry = [](void* p) { (*static_cast<decltype(body)*>(p))(); };
    gridDim.x = grid_x;
    gridDim.y = grid_y;
    blockDim.x = threads;
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) run_block(threads);
    }
    payload = nullptr;
}

template <class... P>
void launch(void (*kernel)(P...), unsigned grid_x, unsigned grid_y, unsigned threads, void** arguments) {
    run(kernel, grid_x, grid_y, threads, arguments, std::index_sequence_for<P...>());
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
inline T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return emulator::from_thread(value, threadIdx.x ^ mask);
}

// Lanes run one after the other up to the next barrier.
inline void __syncwarp() {}

#define EMULATE(NAME)                                                                                 \
    extern "C" void emulate_##NAME(unsigned grid_x, unsigned grid_y, unsigned threads, void** args) { \
        emulator::launch(NAME, grid_x, grid_y, threads, args);                                        \
    }                                                                                                 \
    extern "C" const char* signature_##NAME() { return emulator::signature(NAME); }
