/* What the files of the emulated NPU share; see control.c for what it is. */
#ifndef EMULATED_NPU_H
#define EMULATED_NPU_H

#include "ascendcl.h"

#include <pthread.h>

enum {
    PARAM_INVALID = 107000,
    INVALID_DEVICE = 107001,
    CONTEXT_NULL = 107002,
    STREAM_CONTEXT = 107003,
    STREAM_ABORT = 107023,
    UNINITIALIZE = 100001,
    REPEAT_INITIALIZE = 100002,
    MEMORY_ALLOCATION = 207001,
    FEATURE_NOT_SUPPORT = 207000,
    INTERNAL_ERROR = 507000,
    SYS_DMA = 507013,
    SYNC_TIMEOUT = 507046,
};

#define MOST_DEVICES 16

enum { DEVICES, MEMORY, COPY_DELAY_US, HANG, FAIL_CALL, FAIL_CODE, FAIL_COPY, UNREGISTERED, SETTINGS };

/* ---- control.c ---- */

#define HIDDEN __attribute__((visibility("hidden")))

HIDDEN extern long settings[SETTINGS];
HIDDEN extern pthread_mutex_t lock; /* of everything */
HIDDEN extern pthread_cond_t changed;

/* Needs the lock. */
HIDDEN void count(const char *name, uint64_t n);
/* Notes a text for aclGetRecentErrMsg and returns the code. */
HIDDEN int fault(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Every call begins here: counts, and fails if it is to. */
HIDDEN int begin(const char *name);

#define CALL(name)                                                                                 \
    do {                                                                                           \
        int injected = begin(#name);                                                               \
        if (injected)                                                                              \
            return injected;                                                                       \
    } while (0)

/* ---- memory.c ---- */

HIDDEN extern __thread int current; /* device of this thread, -1 for none */

/* The device whose memory an address lies in, or -1. Needs the lock. */
HIDDEN int device_of(const void *address);
/* Where the bytes really are, if all of them belong to one allocation. Needs the lock. */
HIDDEN char *real_place(int id, const void *address, size_t nbytes);
/* Whether memory of the host is page-locked. Needs the lock. */
HIDDEN int is_pinned(const void *address, size_t nbytes);

/* ---- streams.c ---- */

/* The default stream of a device, made at need. Needs the lock. */
HIDDEN aclrtStream default_stream(int device);

#endif
