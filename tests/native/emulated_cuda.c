/* A CUDA driver for tests: the calls that EMS uses, over the emulated NPU's devices, streams and copies. It shows that
 * the CUDA back end calls what it should, in an order that works; how a GPU behaves it cannot show.
 *
 * BATCH=13: cuMemcpyBatchAsync_v2; BATCH=12: the call of CUDA 12.8; BATCH=0: neither. */
#include "ascendcl.h"

#include <string.h>

aclError aclInit(const char *configPath);
aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtSetDevice(int32_t deviceId);
aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes);
aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtCreateEvent(aclrtEvent *event);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtMallocHost(void **hostPtr, size_t size);
aclError aclrtFreeHost(void *hostPtr);
aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag);
aclError aclrtHostUnregister(void *ptr);
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
aclError aclrtMemcpyBatchAsync(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches,
                               aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex,
                               aclrtStream stream);

#define DEPTH 16
static __thread int stack[DEPTH], depth;

static int told(int code)
{
    return code == 107002 || code == 107003 ? 201 : code;
}

int cuInit(unsigned flags)
{
    int code = aclInit(NULL);

    return flags ? 1 : code == 100002 ? 0 : code;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

int cuDeviceGetCount(int *count)
{
    return aclrtGetDeviceCount((uint32_t *)count);
}

int cuGetErrorString(int error, const char **text)
{
    *text = error == 700 ? "an illegal memory access was encountered" : "something failed";
    return 0;
}

int cuGetErrorName(int error, const char **text)
{
    *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = (void *)(uintptr_t)(device + 1);
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    int code;

    if (depth == DEPTH)
        return 1;
    code = aclrtSetDevice((int)(uintptr_t)context - 1);
    if (code == 0)
        stack[depth++] = (int)(uintptr_t)context - 1;
    return code;
}

int cuCtxPopCurrent_v2(void **context)
{
    if (!depth)
        return 201;
    *context = (void *)(uintptr_t)(stack[--depth] + 1);
    return depth ? aclrtSetDevice(stack[depth - 1]) : 0;
}

int cuPointerGetAttribute(void *value, unsigned attribute, unsigned long long address)
{
    aclrtPtrAttributes found;

    if (aclrtPointerGetAttributes((void *)(uintptr_t)address, &found) != 0)
        return 3;
    if (found.location.type == ACL_MEM_LOCATION_TYPE_UNREGISTERED)
        return 1;
    if (attribute == 2)
        *(unsigned *)value = found.location.type == ACL_MEM_LOCATION_TYPE_DEVICE ? 2 : 1;
    else if (attribute == 9)
        *(int *)value = (int)found.location.id;
    else
        return 1;
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags)
{
    return flags == 1 ? told(aclrtCreateStream(stream)) : 1;
}

int cuStreamDestroy_v2(void *stream)
{
    return told(aclrtDestroyStream(stream));
}

int cuStreamQuery(void *stream)
{
    aclrtStreamStatus status = ACL_STREAM_STATUS_COMPLETE;
    int code = aclrtStreamQuery(stream, &status);

    return code ? told(code) : status == ACL_STREAM_STATUS_COMPLETE ? 0 : 600;
}

int cuStreamSynchronize(void *stream)
{
    return told(aclrtSynchronizeStream(stream));
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    return flags ? 1 : told(aclrtStreamWaitEvent(stream, event));
}

int cuEventCreate(void **event, unsigned flags)
{
    return flags == 2 ? told(aclrtCreateEvent(event)) : 1;
}

int cuEventDestroy_v2(void *event)
{
    return told(aclrtDestroyEvent(event));
}

int cuEventRecord(void *event, void *stream)
{
    return told(aclrtRecordEvent(event, stream));
}

int cuMemHostAlloc(void **address, size_t size, unsigned flags)
{
    return flags == 1 ? told(aclrtMallocHost(address, size)) : 1;
}

int cuMemFreeHost(void *address)
{
    return told(aclrtFreeHost(address));
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    aclrtPtrAttributes found;

    if (flags != 1)
        return 1;
    if (aclrtPointerGetAttributes(address, &found) == 0 && found.location.type == ACL_MEM_LOCATION_TYPE_HOST)
        return 712;
    return told(aclrtHostRegisterV2(address, size, ACL_HOST_REG_PINNED));
}

int cuMemHostUnregister(void *address)
{
    return told(aclrtHostUnregister(address));
}

int cuMemcpyHtoDAsync_v2(unsigned long long target, const void *source, size_t size, void *stream)
{
    return told(aclrtMemcpyAsync((void *)(uintptr_t)target, size, source, size, ACL_MEMCPY_HOST_TO_DEVICE, stream));
}

int cuMemcpyDtoHAsync_v2(void *target, unsigned long long source, size_t size, void *stream)
{
    return told(aclrtMemcpyAsync(target, size, (void *)(uintptr_t)source, size, ACL_MEMCPY_DEVICE_TO_HOST, stream));
}

#if BATCH
struct attributes {
    unsigned order, source_type;
    int source_id;
    unsigned target_type;
    int target_id;
    unsigned flags;
};

static int batch(unsigned long long *targets, unsigned long long *sources, size_t *sizes, size_t count,
                 struct attributes *attributes, size_t *from, size_t nattributes, size_t *failed, void *stream)
{
    aclrtMemcpyBatchAttr there;

    if (!stream || attributes->order != 1 || attributes->flags)
        return 1;
    memset(&there, 0, sizeof there);
    there.srcLoc.type = attributes->source_type == 1 ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
    there.dstLoc.type = attributes->target_type == 1 ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
    return told(aclrtMemcpyBatchAsync((void **)targets, sizes, (void **)sources, sizes, count, &there, from,
                                      nattributes, failed, stream));
}
#endif

#if BATCH == 13
int cuMemcpyBatchAsync_v2(unsigned long long *targets, unsigned long long *sources, size_t *sizes, size_t count,
                          void *attributes, size_t *from, size_t nattributes, void *stream)
{
    size_t failed;

    return batch(targets, sources, sizes, count, attributes, from, nattributes, &failed, stream);
}
#elif BATCH == 12
int cuMemcpyBatchAsync(unsigned long long *targets, unsigned long long *sources, size_t *sizes, size_t count,
                       void *attributes, size_t *from, size_t nattributes, size_t *failed, void *stream)
{
    return batch(targets, sources, sizes, count, attributes, from, nattributes, failed, stream);
}
#endif
