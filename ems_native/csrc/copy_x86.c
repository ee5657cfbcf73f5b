/* AVX2 and AVX-512 loops. Compiled without -m flags: `target` marks the functions, `supported` asks the CPU first. */
#include "copy.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "checksum.h"

#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

static void fence(void)
{
    _mm_sfence();
}

/* ---- AVX2 ---- */

static int avx2_supported(void)
{
    return __builtin_cpu_supports("avx2");
}

AVX2 static inline __m256i avx2_product(__m256i words, const uint64_t *key)
{
    __m256i keyed = _mm256_add_epi32(words, _mm256_load_si256((const __m256i *)key));

    return _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
}

AVX2 static inline uint64_t avx2_total(__m256i sums)
{
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));

    return (uint64_t)_mm_cvtsi128_si64(half) + (uint64_t)_mm_extract_epi64(half, 1);
}

AVX2 static uint64_t avx2_sum(const void *source, size_t nbytes)
{
    const unsigned char *from = source;
    __m256i even = _mm256_setzero_si256(), odd = even;
    size_t at = 0;

    for (; at + 64 <= nbytes; at += 64) {
        const uint64_t *key = ems_checksum_keys + at / 8;

        even = _mm256_add_epi64(even, avx2_product(_mm256_loadu_si256((const __m256i *)(from + at)), key));
        odd = _mm256_add_epi64(odd, avx2_product(_mm256_loadu_si256((const __m256i *)(from + at + 32)), key + 4));
    }
    return avx2_total(_mm256_add_epi64(even, odd)) + ems_checksum_words(from + at, at, nbytes - at);
}

AVX2 static uint64_t avx2_copy_chunks(void *target, const void *source, size_t nchunks, uint64_t chunk)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    uint64_t total = 0;

    for (size_t i = 0; i < nchunks; i++) {
        __m256i even = _mm256_setzero_si256(), odd = even;
        const uint64_t *key = ems_checksum_keys;

        for (size_t at = 0; at < EMS_CHUNK; at += 64, to += 64, from += 64, key += 8) {
            __m256i a = _mm256_loadu_si256((const __m256i *)from);
            __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));

            _mm256_stream_si256((__m256i *)to, a);
            _mm256_stream_si256((__m256i *)(to + 32), b);
            even = _mm256_add_epi64(even, avx2_product(a, key));
            odd = _mm256_add_epi64(odd, avx2_product(b, key + 4));
        }
        total += ems_checksum_mix(avx2_total(_mm256_add_epi64(even, odd)), chunk + i, EMS_CHUNK);
    }
    return total;
}

AVX2 static void avx2_stream(void *target, const void *source, size_t nbytes)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    size_t head = -(uintptr_t)to & 63;

    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; nbytes -= 64, to += 64, from += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));

        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
    }
    memcpy(to, from, nbytes);
}

const struct ems_kernel ems_kernel_avx2 = {"avx2", avx2_supported, avx2_sum, avx2_copy_chunks, avx2_stream, fence};

/* ---- AVX-512 ---- */

static int avx512_supported(void)
{
    return __builtin_cpu_supports("avx512f");
}

AVX512 static inline __m512i avx512_product(__m512i words, const uint64_t *key)
{
    __m512i keyed = _mm512_add_epi32(words, _mm512_load_si512(key));

    return _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
}

AVX512 static uint64_t avx512_sum(const void *source, size_t nbytes)
{
    const unsigned char *from = source;
    __m512i sums = _mm512_setzero_si512();
    size_t at = 0;

    for (; at + 64 <= nbytes; at += 64)
        sums = _mm512_add_epi64(sums, avx512_product(_mm512_loadu_si512(from + at), ems_checksum_keys + at / 8));
    return (uint64_t)_mm512_reduce_add_epi64(sums) + ems_checksum_words(from + at, at, nbytes - at);
}

AVX512 static uint64_t avx512_copy_chunks(void *target, const void *source, size_t nchunks, uint64_t chunk)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    uint64_t total = 0;

    for (size_t i = 0; i < nchunks; i++) {
        __m512i sums = _mm512_setzero_si512();
        const uint64_t *key = ems_checksum_keys;

        for (size_t at = 0; at < EMS_CHUNK; at += 64, to += 64, from += 64, key += 8) {
            __m512i words = _mm512_loadu_si512(from);

            _mm512_stream_si512((__m512i *)to, words);
            sums = _mm512_add_epi64(sums, avx512_product(words, key));
        }
        total += ems_checksum_mix((uint64_t)_mm512_reduce_add_epi64(sums), chunk + i, EMS_CHUNK);
    }
    return total;
}

AVX512 static void avx512_stream(void *target, const void *source, size_t nbytes)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    size_t head = -(uintptr_t)to & 63;

    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; nbytes -= 64, to += 64, from += 64)
        _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
    memcpy(to, from, nbytes);
}

const struct ems_kernel ems_kernel_avx512 = {"avx512",           avx512_supported, avx512_sum,
                                             avx512_copy_chunks, avx512_stream,    fence};

#endif
