/* device.h over the CUDA driver. */
#include "cuda_api.h"
#include "device.h"
#include "clock.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define MOST_DEVICES 64
#define SPIN_NS 200000 /* how long a wait spins before it sleeps: a copy of a few MiB takes this long */
#define POLL_NS 20000

struct cuda_calls {
#define FIELD(field, symbol, parameters) int(*field) parameters;
    EMS_CUDA_REQUIRED(FIELD)
    EMS_CUDA_OPTIONAL(FIELD)
#undef FIELD
};

struct ems_runtime {
    struct cuda_calls cuda;
    void *contexts[MOST_DEVICES]; /* primary ones, kept: torch uses the same */
    int batch_refused;
};

const int ems_runtime_context_lazily = 0;

#define REQUIRED(field, symbol, parameters) {#symbol, offsetof(struct cuda_calls, field), 0},
#define OPTIONAL(field, symbol, parameters) {#symbol, offsetof(struct cuda_calls, field), 1},
static const struct ems_symbol symbols[] = {EMS_CUDA_REQUIRED(REQUIRED) EMS_CUDA_OPTIONAL(OPTIONAL)};

struct ems_runtime *ems_runtime_open(const char *path, char *error, size_t nerror)
{
    struct ems_runtime *runtime = calloc(1, sizeof *runtime);

    if (!runtime) {
        snprintf(error, nerror, "no memory");
        return NULL;
    }
    if (ems_symbols_bind(&runtime->cuda, symbols, EMS_LENGTH(symbols), path, "the CUDA driver", error, nerror)) {
        free(runtime);
        return NULL;
    }
    return runtime;
}

const char *ems_runtime_missing(const struct ems_runtime *runtime, size_t n)
{
    if (runtime->cuda.batch || runtime->cuda.batch_12)
        return NULL;
    return n == 0 ? "cuMemcpyBatchAsync" : NULL;
}

void ems_runtime_text(struct ems_runtime *runtime, int code, char *text, size_t ntext)
{
    const char *name = NULL, *meaning = NULL;

    runtime->cuda.error_name((uint32_t)code, &name);
    runtime->cuda.error_string((uint32_t)code, &meaning);
    snprintf(text, ntext, "CUDA error %d %s: %s", code, name ? name : "", meaning ? meaning : "unknown");
}

int ems_runtime_wants_context(int code)
{
    return code == EMS_CUDA_INVALID_CONTEXT;
}

int ems_runtime_init(struct ems_runtime *runtime)
{
    return runtime->cuda.init(0);
}

int ems_runtime_version(struct ems_runtime *runtime, int version[3])
{
    int number = 0, code = runtime->cuda.version(&number);

    version[0] = number / 1000, version[1] = number % 1000 / 10, version[2] = number % 10;
    return code;
}

int ems_runtime_count(struct ems_runtime *runtime, int *count)
{
    int code = runtime->cuda.count(count);

    if (code == 0 && *count > MOST_DEVICES)
        *count = MOST_DEVICES;
    return code;
}

int ems_runtime_locate(struct ems_runtime *runtime, uint64_t address, int *device, uint32_t *page)
{
    uint32_t type = 0;
    int ordinal = 0;
    /* A driver that nobody initialised owns no memory, and one that does not know an address says so. */
    int code = runtime->cuda.pointer_attribute(&type, EMS_CUDA_POINTER_MEMORY_TYPE, address);

    *device = EMS_HOST;
    *page = 0;
    if (code == EMS_CUDA_INVALID_VALUE || code == EMS_CUDA_NOT_INITIALIZED)
        return 0;
    if (code == 0 && type == EMS_CUDA_MEMORY_DEVICE) {
        code = runtime->cuda.pointer_attribute(&ordinal, EMS_CUDA_POINTER_DEVICE_ORDINAL, address);
        if (code == 0)
            *device = ordinal;
    }
    return code;
}

int ems_runtime_enter(struct ems_runtime *runtime, int device, int *previous)
{
    int code = 0;

    *previous = -1;
    if (device < 0 || device >= MOST_DEVICES)
        return EMS_CUDA_INVALID_VALUE;
    if (!runtime->contexts[device]) /* two threads at once retain it twice, no harm */
        code = runtime->cuda.retain(&runtime->contexts[device], device);
    if (code == 0)
        code = runtime->cuda.push(runtime->contexts[device]);
    if (code == 0)
        *previous = 0;
    return code;
}

int ems_runtime_leave(struct ems_runtime *runtime, int previous)
{
    void *context;

    return previous < 0 ? 0 : runtime->cuda.pop(&context);
}

int ems_runtime_default_stream(struct ems_runtime *runtime, void **stream)
{
    *stream = NULL;
    return 0;
}

int ems_runtime_stream_create(struct ems_runtime *runtime, void **stream)
{
    return runtime->cuda.stream_create(stream, EMS_CUDA_STREAM_NON_BLOCKING);
}

int ems_runtime_stream_destroy(struct ems_runtime *runtime, void *stream)
{
    return runtime->cuda.stream_destroy(stream);
}

int ems_runtime_synchronize(struct ems_runtime *runtime, void *stream, int timeout_ms, int *ended)
{
    struct timespec pause = {0, POLL_NS};
    uint64_t from = ems_now_ns(), waited = 0;

    for (*ended = 1;;) {
        int code = runtime->cuda.stream_query(stream);

        if (code != EMS_CUDA_NOT_READY)
            return code;
        waited = ems_now_ns() - from;
        if (timeout_ms >= 0 && waited >= (uint64_t)timeout_ms * 1000000) {
            *ended = 0;
            return 0;
        }
        if (waited < SPIN_NS)
            sched_yield();
        else if (timeout_ms < 0)
            return runtime->cuda.stream_synchronize(stream);
        else
            nanosleep(&pause, NULL);
    }
}

int ems_runtime_abort(struct ems_runtime *runtime, void *stream, int *able)
{
    *able = 0; /* the driver has no such call */
    return 0;
}

int ems_runtime_event_create(struct ems_runtime *runtime, void **event)
{
    return runtime->cuda.event_create(event, EMS_CUDA_EVENT_DISABLE_TIMING);
}

int ems_runtime_event_destroy(struct ems_runtime *runtime, void *event)
{
    return runtime->cuda.event_destroy(event);
}

int ems_runtime_record(struct ems_runtime *runtime, void *event, void *stream)
{
    return runtime->cuda.event_record(event, stream);
}

int ems_runtime_wait(struct ems_runtime *runtime, void *stream, void *event)
{
    return runtime->cuda.stream_wait(stream, event, 0);
}

int ems_runtime_host_alloc(struct ems_runtime *runtime, size_t nbytes, void **address)
{
    return runtime->cuda.host_alloc(address, nbytes, EMS_CUDA_HOST_PORTABLE);
}

int ems_runtime_host_free(struct ems_runtime *runtime, void *address)
{
    return runtime->cuda.host_free(address);
}

int ems_runtime_register(struct ems_runtime *runtime, void *address, size_t nbytes, int *how)
{
    int code = runtime->cuda.host_register(address, nbytes, EMS_CUDA_HOST_PORTABLE);

    /* Portable: registered for one device, it is for all. */
    if (code == EMS_CUDA_ALREADY_REGISTERED)
        code = 0;
    *how = code ? EMS_REGISTRATION_NONE : EMS_REGISTRATION_PINNED;
    return code;
}

int ems_runtime_unregister(struct ems_runtime *runtime, void *address)
{
    return runtime->cuda.host_unregister(address);
}

static int submit_batch(struct ems_runtime *runtime, int to_host, int device,
                        const struct ems_copies *copies, void *stream, size_t *failed)
{
    struct ems_cuda_location there = {EMS_CUDA_LOCATION_DEVICE, device};
    struct ems_cuda_location here = {EMS_CUDA_LOCATION_HOST, 0};
    struct ems_cuda_batch_attributes attributes = {
        .source_order = EMS_CUDA_SOURCE_ORDER_STREAM,
        .source = to_host ? there : here,
        .target = to_host ? here : there,
    };
    unsigned long long *targets = (unsigned long long *)copies->targets;
    unsigned long long *sources = (unsigned long long *)copies->sources;
    size_t from = 0;

    _Static_assert(sizeof(void *) == sizeof(unsigned long long), "CUdeviceptr is a 64-bit address");
    if (runtime->cuda.batch)
        return runtime->cuda.batch(targets, sources, copies->sizes, copies->count, &attributes, &from, 1,
                                   stream);
    return runtime->cuda.batch_12(targets, sources, copies->sizes, copies->count, &attributes, &from, 1,
                                  failed, stream);
}

int ems_runtime_submit(struct ems_runtime *runtime, int to_host, int device,
                       const struct ems_copies *copies, void *stream, size_t *failed)
{
    int code = 0;

    *failed = SIZE_MAX;
    if ((runtime->cuda.batch || runtime->cuda.batch_12) && !runtime->batch_refused && copies->count > 1) {
        code = submit_batch(runtime, to_host, device, copies, stream, failed);
        if (code != EMS_CUDA_NOT_SUPPORTED)
            return code;
        runtime->batch_refused = 1;
    }
    for (size_t i = 0; i < copies->count; i++) {
        uintptr_t target = (uintptr_t)copies->targets[i], source = (uintptr_t)copies->sources[i];

        code = to_host ? runtime->cuda.to_host((void *)target, source, copies->sizes[i], stream)
                       : runtime->cuda.to_device(target, (void *)source, copies->sizes[i], stream);
        if (code != 0) {
            *failed = i;
            return code;
        }
    }
    return 0;
}
