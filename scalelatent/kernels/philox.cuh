// Random numbers of Philox 4x64-10, identical to those of philox.py.
struct Words {
    unsigned long long a, b, c, d;
};

__device__ __forceinline__ Words philox(unsigned long long c0, unsigned long long c1, unsigned long long c2,
                                        unsigned long long c3, unsigned long long k0, unsigned long long k1) {
    const unsigned long long m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
    for (int round = 0; round < 10; ++round) {
        const unsigned long long high0 = __umul64hi(m0, c0), low0 = m0 * c0;
        const unsigned long long high1 = __umul64hi(m1, c2), low1 = m1 * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B97F4A7C15ull;
        k1 += 0xBB67AE8584CAA73Bull;
    }
    return {c0, c1, c2, c3};
}

// Returns word number `i` (0 to 3).
__device__ __forceinline__ unsigned long long word_of(const Words& words, int i) {
    return i == 0 ? words.a : i == 1 ? words.b : i == 2 ? words.c : words.d;
}
