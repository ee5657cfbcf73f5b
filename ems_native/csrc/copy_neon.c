/* NEON loops (every aarch64 CPU has them). STNP says "will not be read soon", as streaming stores
 * do on x86. */
#include "copy.h"

#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#include <arm_neon.h>
#include <string.h>

#include "checksum.h"

static int supported(void)
{
    return 1;
}

static void fence(void)
{
    __asm__ volatile("dmb ish" ::: "memory");
}

static inline void store_pair(unsigned char *to, uint32x4_t a, uint32x4_t b)
{
    __asm__ volatile("stnp %q1, %q2, [%0]" ::"r"(to), "w"(a), "w"(b) : "memory");
}

static inline uint64x2_t add_product(uint64x2_t sums, uint32x4_t words, const uint64_t *key)
{
    uint64x2_t keyed =
        vreinterpretq_u64_u32(vaddq_u32(words, vreinterpretq_u32_u64(vld1q_u64(key))));

    return vmlal_u32(sums, vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
}

static inline uint32x4_t load(const unsigned char *from)
{
    return vreinterpretq_u32_u8(vld1q_u8(from));
}

static uint64_t sum(const void *source, size_t nbytes, const void *later)
{
    const unsigned char *from = source, *fetch = later;
    uint64x2_t even = vdupq_n_u64(0), odd = even;
    size_t at = 0;

    for (; at + 64 <= nbytes; at += 64) {
        const uint64_t *key = ems_checksum_keys + at / 8;

        if (fetch)
            __builtin_prefetch(fetch + at, 0, 2);
        even = add_product(even, load(from + at), key);
        odd = add_product(odd, load(from + at + 16), key + 2);
        even = add_product(even, load(from + at + 32), key + 4);
        odd = add_product(odd, load(from + at + 48), key + 6);
    }
    return vaddvq_u64(vaddq_u64(even, odd)) + ems_checksum_words(from + at, at, nbytes - at);
}

static void stream_lines(unsigned char *to, const unsigned char *from, size_t nbytes,
                         const unsigned char *next)
{
    for (size_t at = 0; at < nbytes; at += 64) {
        uint32x4_t a, b, c, d;

        if (next)
            __builtin_prefetch(next + at, 0, 3);
        a = load(from + at), b = load(from + at + 16);
        c = load(from + at + 32), d = load(from + at + 48);
        store_pair(to + at, a, b);
        store_pair(to + at + 32, c, d);
    }
}

static void stream(void *target, const void *source, size_t nbytes, const void *next)
{
    ems_stream_split(target, source, nbytes, next, stream_lines);
}

const struct ems_kernel ems_kernel_neon = {"neon", supported, sum, stream, fence};

#endif
