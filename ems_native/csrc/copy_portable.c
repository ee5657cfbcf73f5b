/* The twin that every CPU can run: memcpy, then the sum from the cache. */
#include <string.h>

#include "checksum.h"
#include "copy.h"

static int supported(void)
{
    return 1;
}

static uint64_t sum(const void *source, size_t nbytes)
{
    return ems_checksum_words(source, 0, nbytes);
}

static uint64_t copy_chunks(void *target, const void *source, size_t nchunks, uint64_t chunk)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    uint64_t total = 0;

    for (size_t i = 0; i < nchunks; i++, to += EMS_CHUNK, from += EMS_CHUNK) {
        memcpy(to, from, EMS_CHUNK);
        total += ems_checksum_mix(ems_checksum_words(to, 0, EMS_CHUNK), chunk + i, EMS_CHUNK);
    }
    return total;
}

static void stream(void *target, const void *source, size_t nbytes)
{
    memcpy(target, source, nbytes);
}

static void fence(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

const struct ems_kernel ems_kernel_portable = {"portable",  supported, sum,
                                               copy_chunks, stream,    fence};
