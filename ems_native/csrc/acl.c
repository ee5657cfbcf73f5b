/* device.h over the Ascend runtime. */
#include "acl_api.h"
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Copies in one call; longer batches are cut. */
#define BATCH_MOST ((size_t)4096)
#define POLL_NS 20000

struct acl_calls {
#define FIELD(name, parameters) int(*name) parameters;
    EMS_ACL_REQUIRED(FIELD)
    EMS_ACL_OPTIONAL(FIELD)
#undef FIELD
    const char *(*aclGetRecentErrMsg)(void);
};

struct ems_runtime {
    struct acl_calls acl;
    int batch_refused; /* the library has the call, the product does not */
};

const int ems_runtime_context_lazily = 1;

#define REQUIRED(name, parameters) {#name, offsetof(struct acl_calls, name), 0},
#define OPTIONAL(name, parameters) {#name, offsetof(struct acl_calls, name), 1},
static const struct ems_symbol symbols[] = {
    EMS_ACL_REQUIRED(REQUIRED) EMS_ACL_OPTIONAL(OPTIONAL)
    OPTIONAL(aclGetRecentErrMsg, (void))
};

struct ems_runtime *ems_runtime_open(const char *path, char *error, size_t nerror)
{
    struct ems_runtime *runtime = calloc(1, sizeof *runtime);

    if (!runtime) {
        snprintf(error, nerror, "no memory");
        return NULL;
    }
    if (ems_symbols_bind(&runtime->acl, symbols, EMS_LENGTH(symbols), path, "the Ascend runtime", error, nerror)) {
        free(runtime);
        return NULL;
    }
    return runtime;
}

const char *ems_runtime_missing(const struct ems_runtime *runtime, size_t n)
{
    return ems_symbols_missing(&runtime->acl, symbols, EMS_LENGTH(symbols), n);
}

void ems_runtime_text(struct ems_runtime *runtime, int code, char *text, size_t ntext)
{
    const char *recent = runtime->acl.aclGetRecentErrMsg ? runtime->acl.aclGetRecentErrMsg() : NULL;

    snprintf(text, ntext, "ACL error %d%s%s", code, recent && *recent ? ": " : "",
             recent ? recent : "");
}

int ems_runtime_wants_context(int code)
{
    return code == EMS_ACL_RT_CONTEXT_NULL || code == EMS_ACL_RT_STREAM_CONTEXT;
}

int ems_runtime_init(struct ems_runtime *runtime)
{
    int code = runtime->acl.aclInit(NULL);

    return code == EMS_ACL_REPEAT_INITIALIZE ? 0 : code;
}

int ems_runtime_version(struct ems_runtime *runtime, int version[3])
{
    int32_t major = 0, minor = 0, patch = 0;
    int code = 0;

    if (runtime->acl.aclrtGetVersion)
        code = runtime->acl.aclrtGetVersion(&major, &minor, &patch);
    version[0] = major, version[1] = minor, version[2] = patch;
    return code;
}

int ems_runtime_count(struct ems_runtime *runtime, int *count)
{
    uint32_t devices = 0;
    int code = runtime->acl.aclrtGetDeviceCount(&devices);

    *count = (int)devices;
    return code;
}

int ems_runtime_locate(struct ems_runtime *runtime, uint64_t address, int *device, uint32_t *page)
{
    struct ems_acl_pointer_attributes found = {0};

    *device = EMS_HOST;
    *page = 0;
    if (!runtime->acl.aclrtPointerGetAttributes) {
        *device = EMS_UNKNOWN;
        return 0;
    }
    /* It answers for memory of its own only; for others it fails or says that it does not know them. */
    if (runtime->acl.aclrtPointerGetAttributes((const void *)(uintptr_t)address, &found) == 0 &&
        found.location.type == EMS_ACL_LOCATION_DEVICE) {
        *device = (int)found.location.id;
        *page = found.page_size;
    }
    return 0;
}

int ems_runtime_enter(struct ems_runtime *runtime, int device, int *previous)
{
    int32_t current = -1;

    if (runtime->acl.aclrtGetDevice(&current) != 0)
        current = -1;
    *previous = current == device ? -1 : current;
    return current == device ? 0 : runtime->acl.aclrtSetDevice(device);
}

int ems_runtime_leave(struct ems_runtime *runtime, int previous)
{
    return previous < 0 ? 0 : runtime->acl.aclrtSetDevice(previous);
}

int ems_runtime_default_stream(struct ems_runtime *runtime, void **stream)
{
    *stream = NULL;
    return runtime->acl.aclrtCtxGetCurrentDefaultStream
               ? runtime->acl.aclrtCtxGetCurrentDefaultStream(stream)
               : 0;
}

int ems_runtime_stream_create(struct ems_runtime *runtime, void **stream)
{
    return runtime->acl.aclrtCreateStream(stream);
}

int ems_runtime_stream_destroy(struct ems_runtime *runtime, void *stream)
{
    return runtime->acl.aclrtDestroyStream(stream);
}

static int poll_stream(struct ems_runtime *runtime, void *stream, int timeout_ms, int *ended)
{
    struct timespec pause = {0, POLL_NS}, from, now;
    uint32_t status = 0;
    int code;

    clock_gettime(CLOCK_MONOTONIC, &from);
    for (;;) {
        code = runtime->acl.aclrtStreamQuery(stream, &status);
        *ended = code != 0 || status == EMS_ACL_STREAM_COMPLETE;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (*ended || (now.tv_sec - from.tv_sec) * 1000 + (now.tv_nsec - from.tv_nsec) / 1000000 >= timeout_ms)
            return code;
        nanosleep(&pause, NULL);
    }
}

int ems_runtime_synchronize(struct ems_runtime *runtime, void *stream, int timeout_ms, int *ended)
{
    int code;

    *ended = 1;
    if (timeout_ms < 0 || (!runtime->acl.aclrtSynchronizeStreamWithTimeout && !runtime->acl.aclrtStreamQuery)) {
        code = runtime->acl.aclrtSynchronizeStream(stream);
    } else if (runtime->acl.aclrtSynchronizeStreamWithTimeout) {
        code = runtime->acl.aclrtSynchronizeStreamWithTimeout(stream, timeout_ms ? timeout_ms : 1);
        if (code == EMS_ACL_RT_STREAM_SYNC_TIMEOUT) {
            *ended = 0;
            code = 0;
        }
    } else {
        code = poll_stream(runtime, stream, timeout_ms, ended);
    }
    return code;
}

int ems_runtime_abort(struct ems_runtime *runtime, void *stream, int *able)
{
    *able = runtime->acl.aclrtStreamAbort != NULL;
    return *able ? runtime->acl.aclrtStreamAbort(stream) : 0;
}

int ems_runtime_event_create(struct ems_runtime *runtime, void **event)
{
    return runtime->acl.aclrtCreateEvent(event);
}

int ems_runtime_event_destroy(struct ems_runtime *runtime, void *event)
{
    return runtime->acl.aclrtDestroyEvent(event);
}

int ems_runtime_record(struct ems_runtime *runtime, void *event, void *stream)
{
    return runtime->acl.aclrtRecordEvent(event, stream);
}

int ems_runtime_wait(struct ems_runtime *runtime, void *stream, void *event)
{
    return runtime->acl.aclrtStreamWaitEvent(stream, event);
}

int ems_runtime_host_alloc(struct ems_runtime *runtime, size_t nbytes, void **address)
{
    return runtime->acl.aclrtMallocHost(address, nbytes);
}

int ems_runtime_host_free(struct ems_runtime *runtime, void *address)
{
    return runtime->acl.aclrtFreeHost(address);
}

int ems_runtime_register(struct ems_runtime *runtime, void *address, size_t nbytes, int *how)
{
    void *mapped = NULL;
    int code = EMS_ACL_API_NOT_SUPPORT;

    *how = EMS_REGISTRATION_NONE;
    if (!runtime->acl.aclrtHostUnregister)
        return code;
    if (runtime->acl.aclrtHostRegisterV2) {
        code = runtime->acl.aclrtHostRegisterV2(address, nbytes, EMS_ACL_HOST_REG_PINNED);
        if (code == 0) {
            *how = EMS_REGISTRATION_PINNED;
            return 0;
        }
    }
    if (runtime->acl.aclrtHostRegister) {
        code = runtime->acl.aclrtHostRegister(address, nbytes, EMS_ACL_HOST_MAPPED, &mapped);
        if (code == 0)
            *how = EMS_REGISTRATION_MAPPED;
    }
    return code;
}

int ems_runtime_unregister(struct ems_runtime *runtime, void *address)
{
    return runtime->acl.aclrtHostUnregister(address);
}

static int submit_batch(struct ems_runtime *runtime, int to_host, int device,
                        const struct ems_copies *copies, void *stream, size_t *failed)
{
    struct ems_acl_location there = {(uint32_t)device, EMS_ACL_LOCATION_DEVICE};
    struct ems_acl_location here = {0, EMS_ACL_LOCATION_HOST};
    struct ems_acl_batch_attributes attributes = {
        .target = to_host ? here : there, .source = to_host ? there : here};

    for (size_t at = 0; at < copies->count; at += BATCH_MOST) {
        size_t count = copies->count - at < BATCH_MOST ? copies->count - at : BATCH_MOST;
        size_t from = 0, wrong = SIZE_MAX;
        int code = runtime->acl.aclrtMemcpyBatchAsync(copies->targets + at, copies->sizes + at,
                                                      copies->sources + at, copies->sizes + at, count,
                                                      &attributes, &from, 1, &wrong, stream);

        if (code != 0) {
            *failed = wrong == SIZE_MAX ? SIZE_MAX : at + wrong;
            return code;
        }
    }
    return 0;
}

static int is_unsupported(int code)
{
    return code == EMS_ACL_API_NOT_SUPPORT || code == EMS_ACL_FEATURE_UNSUPPORTED ||
           code == EMS_ACL_RT_FEATURE_NOT_SUPPORT;
}

int ems_runtime_submit(struct ems_runtime *runtime, int to_host, int device,
                       const struct ems_copies *copies, void *stream, size_t *failed)
{
    uint32_t kind = to_host ? EMS_ACL_DEVICE_TO_HOST : EMS_ACL_HOST_TO_DEVICE;

    *failed = SIZE_MAX;
    if (runtime->acl.aclrtMemcpyBatchAsync && !runtime->batch_refused) {
        int code = submit_batch(runtime, to_host, device, copies, stream, failed);

        if (!is_unsupported(code))
            return code;
        runtime->batch_refused = 1;
    }
    for (size_t i = 0; i < copies->count; i++) {
        int code = runtime->acl.aclrtMemcpyAsync(copies->targets[i], copies->sizes[i],
                                                 copies->sources[i], copies->sizes[i], kind, stream);

        if (code != 0) {
            *failed = i;
            return code;
        }
    }
    return 0;
}
