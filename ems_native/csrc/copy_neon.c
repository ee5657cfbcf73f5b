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

static uint64_t sum(const void *source, size_t nbytes)
{
    const unsigned char *from = source;
    uint64x2_t even = vdupq_n_u64(0), odd = even;
    size_t at = 0;

    for (; at + 32 <= nbytes; at += 32) {
        even = add_product(even, load(from + at), ems_checksum_keys + at / 8);
        odd = add_product(odd, load(from + at + 16), ems_checksum_keys + at / 8 + 2);
    }
    return vaddvq_u64(vaddq_u64(even, odd)) + ems_checksum_words(from + at, at, nbytes - at);
}

static uint64_t copy_chunks(void *target, const void *source, size_t nchunks, uint64_t chunk)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    uint64_t total = 0;

    for (size_t i = 0; i < nchunks; i++) {
        uint64x2_t even = vdupq_n_u64(0), odd = even;
        const uint64_t *key = ems_checksum_keys;

        for (size_t at = 0; at < EMS_CHUNK; at += 64, to += 64, from += 64, key += 8) {
            uint32x4_t a = load(from), b = load(from + 16), c = load(from + 32),
                       d = load(from + 48);

            store_pair(to, a, b);
            store_pair(to + 32, c, d);
            even = add_product(even, a, key);
            odd = add_product(odd, b, key + 2);
            even = add_product(even, c, key + 4);
            odd = add_product(odd, d, key + 6);
        }
        total += ems_checksum_mix(vaddvq_u64(vaddq_u64(even, odd)), chunk + i, EMS_CHUNK);
    }
    return total;
}

static void stream(void *target, const void *source, size_t nbytes)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    size_t head = -(uintptr_t)to & 63;

    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; nbytes -= 64, to += 64, from += 64) {
        uint32x4_t a = load(from), b = load(from + 16), c = load(from + 32), d = load(from + 48);

        store_pair(to, a, b);
        store_pair(to + 32, c, d);
    }
    memcpy(to, from, nbytes);
}

const struct ems_kernel ems_kernel_neon = {"neon", supported, sum, copy_chunks, stream, fence};

#endif
