#include "checksum.h"

#include <string.h>

uint64_t ems_checksum_keys[EMS_CHUNK / 8] __attribute__((aligned(64)));

/* splitmix64 from a fixed seed: part of the memory format, as stored checksums depend on it. */
void ems_checksum_setup(void)
{
    uint64_t state = UINT64_C(0x454D535F76310001);

    for (size_t i = 0; i < EMS_CHUNK / 8; i++) {
        uint64_t x = (state += UINT64_C(0x9E3779B97F4A7C15));

        x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
        x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
        ems_checksum_keys[i] = x ^ (x >> 31);
    }
}

static inline uint64_t word_product(uint64_t word, uint64_t key)
{
    uint64_t low = (uint32_t)((uint32_t)word + (uint32_t)key);
    uint64_t high = (uint32_t)((uint32_t)(word >> 32) + (uint32_t)(key >> 32));

    return low * high;
}

static inline uint64_t from_little_endian(uint64_t word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(word);
#else
    return word;
#endif
}

uint64_t ems_checksum_words(const void *source, size_t start, size_t nbytes)
{
    const unsigned char *bytes = source;
    const uint64_t *key = ems_checksum_keys + start / 8;
    uint64_t sum = 0, word;

    for (; nbytes >= 8; nbytes -= 8, bytes += 8, key++) {
        memcpy(&word, bytes, 8);
        sum += word_product(from_little_endian(word), *key);
    }
    if (nbytes) {
        word = 0;
        memcpy(&word, bytes, nbytes);
        sum += word_product(from_little_endian(word), *key);
    }
    return sum;
}
