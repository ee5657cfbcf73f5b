/* AVX2 loops. Compiled without -m flags: `target` marks the functions, `supported` asks the CPU
 * first.
 *
 * There are no 512-bit ones. Measured on Zen 4, one thread, in turns with these, over 1 GiB, GB/s of
 * (AVX2; stores of 64 bytes and sums of 32; stores and sums of 64): load 256 x 64 KiB 22.2; 22.0;
 * 21.9, from scattered places 19.2; 19.2; 17.3, save 22.5; 22.1; 21.5, bare copy 22.5; 22.7; 20.3,
 * load 32 x 2 MiB 21.9; 22.1; 21.1.
 * Nothing to gain, up to a tenth to lose, and CPUs that lower their clock for them. */
#include "copy.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "checksum.h"

#define AVX2 __attribute__((target("avx2")))

static void fence(void)
{
    _mm_sfence();
}

static int supported(void)
{
    return __builtin_cpu_supports("avx2");
}

AVX2 static inline __m256i load(const unsigned char *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}

AVX2 static inline __m256i product(__m256i words, const uint64_t *key)
{
    __m256i keyed = _mm256_add_epi32(words, _mm256_load_si256((const __m256i *)key));

    return _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
}

AVX2 static inline uint64_t add_lanes(__m256i sums)
{
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));

    return (uint64_t)_mm_cvtsi128_si64(half) + (uint64_t)_mm_extract_epi64(half, 1);
}

AVX2 static uint64_t sum(const void *source, size_t nbytes, const void *later)
{
    const unsigned char *from = source;
    const char *fetch = later;
    __m256i even = _mm256_setzero_si256(), odd = even;
    size_t at = 0;

    for (; at + 64 <= nbytes; at += 64) {
        const uint64_t *key = ems_checksum_keys + at / 8;

        if (fetch)
            _mm_prefetch(fetch + at, _MM_HINT_T1);
        even = _mm256_add_epi64(even, product(load(from + at), key));
        odd = _mm256_add_epi64(odd, product(load(from + at + 32), key + 4));
    }
    return add_lanes(_mm256_add_epi64(even, odd)) + ems_checksum_words(from + at, at, nbytes - at);
}

AVX2 static void stream_lines(unsigned char *to, const unsigned char *from, size_t nbytes,
                              const unsigned char *next)
{
    for (size_t at = 0; at < nbytes; at += 64) {
        __m256i a, b;

        if (next)
            _mm_prefetch((const char *)next + at, _MM_HINT_T0);
        a = load(from + at);
        b = load(from + at + 32);
        _mm256_stream_si256((__m256i *)(to + at), a);
        _mm256_stream_si256((__m256i *)(to + at + 32), b);
    }
}

static void stream(void *target, const void *source, size_t nbytes, const void *next)
{
    ems_stream_split(target, source, nbytes, next, stream_lines);
}

const struct ems_kernel ems_kernel_avx2 = {"avx2", supported, sum, stream, fence};

#endif
