/* What the device modules need of a vendor's runtime: one table of plain functions, implemented by acl.c over
 * libascendcl.so and by cuda.c over libcuda.so.1, both found at run time. All return 0 or the vendor's
 * error code; none is called with the GIL held for longer than a look-up takes. */
#ifndef EMS_DEVICE_H
#define EMS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "copy.h"

struct ems_runtime;

/* What ems_registered() can answer. */
enum ems_registration {
    EMS_REGISTRATION_NONE = 0,   /* copies work, but a call returns when its copy has ended */
    EMS_REGISTRATION_MAPPED = 1, /* the device sees the memory; copies as above */
    EMS_REGISTRATION_PINNED = 2, /* copies are asynchronous */
};

#define EMS_HOST (-1)    /* the runtime does not know the address: it is none of a device */
#define EMS_UNKNOWN (-2) /* this runtime cannot tell */

/* Opens the library at `path`. On failure returns NULL and writes a sentence. */
struct ems_runtime *ems_runtime_open(const char *path, char *error, size_t nerror);
/* Name of the n-th optional call that the library lacks, or NULL. */
const char *ems_runtime_missing(const struct ems_runtime *runtime, size_t n);
void ems_runtime_text(struct ems_runtime *runtime, int code, char *text, size_t ntext);
/* Whether the code says that the thread has no context, or one of another device. */
int ems_runtime_wants_context(int code);
/* Whether a thread can do without `enter` until a call says so. */
extern const int ems_runtime_context_lazily;

int ems_runtime_init(struct ems_runtime *runtime);
int ems_runtime_version(struct ems_runtime *runtime, int version[3]);
int ems_runtime_count(struct ems_runtime *runtime, int *count);
int ems_runtime_locate(struct ems_runtime *runtime, uint64_t address, int *device, uint32_t *page);
/* Makes a device current in this thread; `previous` is for ems_runtime_leave. */
int ems_runtime_enter(struct ems_runtime *runtime, int device, int *previous);
int ems_runtime_leave(struct ems_runtime *runtime, int previous);
/* The stream of those who name none, of the current device: NULL where only NULL names it. */
int ems_runtime_default_stream(struct ems_runtime *runtime, void **stream);
int ems_runtime_stream_create(struct ems_runtime *runtime, void **stream);
int ems_runtime_stream_destroy(struct ems_runtime *runtime, void *stream);
/* Waits until everything submitted has ended, at most timeout_ms (negative: without limit). */
int ems_runtime_synchronize(struct ems_runtime *runtime, void *stream, int timeout_ms, int *ended);
/* Ends what was submitted; the stream is good for nothing afterwards. *able = 0: there is no such call. */
int ems_runtime_abort(struct ems_runtime *runtime, void *stream, int *able);
int ems_runtime_event_create(struct ems_runtime *runtime, void **event);
int ems_runtime_event_destroy(struct ems_runtime *runtime, void *event);
int ems_runtime_record(struct ems_runtime *runtime, void *event, void *stream);
int ems_runtime_wait(struct ems_runtime *runtime, void *stream, void *event);
int ems_runtime_host_alloc(struct ems_runtime *runtime, size_t nbytes, void **address);
int ems_runtime_host_free(struct ems_runtime *runtime, void *address);
int ems_runtime_register(struct ems_runtime *runtime, void *address, size_t nbytes, int *how);
int ems_runtime_unregister(struct ems_runtime *runtime, void *address);

/* Copies of one submission; sizes are those of both sides. */
struct ems_copies {
    size_t count;
    void **targets;
    void **sources;
    size_t *sizes;
};

/* Puts copies between the host and a device on a stream, as one submission where the runtime can; *failed is
 * the copy that was refused, or SIZE_MAX. What stands before it may be under way. */
int ems_runtime_submit(struct ems_runtime *runtime, int to_host, int device,
                       const struct ems_copies *copies, void *stream, size_t *failed);

/* ---- the same for all ---- */

/* A call of a vendor's library, and where its address goes in a struct of function pointers. */
struct ems_symbol {
    const char *name;
    size_t offset;
    int optional;
};

#define EMS_LENGTH(array) (sizeof(array) / sizeof *(array))

/* Opens the library at `path`, which should be `what`, and writes the addresses of its calls. 0, or -1 and a sentence:
 * it cannot be loaded, or lacks a call that is not optional. What was opened stays for good: threads of its own may run in it. */
int ems_symbols_bind(void *calls, const struct ems_symbol *symbols, size_t count, const char *path,
                     const char *what, char *error, size_t nerror);
/* Name of the n-th call that the library lacks, or NULL. */
const char *ems_symbols_missing(const void *calls, const struct ems_symbol *symbols, size_t count,
                                size_t n);

/* Describes the pieces of keys first .. first + count and a run of host memory, in the order of keys; runs that
 * touch on both sides become one. With `places` a key lies at base + its offset, else the keys not masked
 * out follow each other from base on, each at a multiple of EMS_STAGING_ALIGNMENT. 0, or -1 without memory. */
int ems_copies_make(struct ems_copies *copies, const struct ems_spans *spans, size_t first,
                    size_t count, unsigned char *base, const struct ems_place *places,
                    const unsigned char *mask, int to_host);
void ems_copies_free(struct ems_copies *copies);

/* The first piece of a batch of which the first or the last byte cannot be read, SIZE_MAX if there is none. The
 * kernel is asked: it fails where the CPU would die. */
size_t ems_first_unreadable(const struct ems_spans *spans);

#define EMS_STAGING_ALIGNMENT ((uint64_t)64)

/* Which device owns which 2 MiB of addresses, as far as was seen. Devices never share such a piece: it is the
 * granularity at which drivers map. */
struct ems_atlas {
    uint64_t *blocks; /* address >> EMS_ATLAS_SHIFT, 0 = free */
    int *devices;
    size_t size, used; /* a power of two */
};

#define EMS_ATLAS_SHIFT 21

/* The device, or EMS_UNKNOWN. */
int ems_atlas_find(const struct ems_atlas *atlas, uint64_t address);
/* Notes it; without memory, or full, forgets everything instead. */
void ems_atlas_note(struct ems_atlas *atlas, uint64_t address, int device);
void ems_atlas_clear(struct ems_atlas *atlas);

#endif
