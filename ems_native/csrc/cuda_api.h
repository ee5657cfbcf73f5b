/* What EMS calls of the CUDA driver (libcuda.so.1), declared by ourselves; signatures and constants as in the
 * public reference, https://docs.nvidia.com/cuda/cuda-driver-api/ (modules group__CUDA__MEM,
 * group__CUDA__STREAM, group__CUDA__EVENT, group__CUDA__UNIFIED, group__CUDA__CTX, group__CUDA__PRIMARY__CTX).
 * The driver and not the run-time library: it is where the device is, and each of its calls has one symbol
 * for each signature it ever had, while cudaMemcpyBatchAsync lost a parameter in CUDA 13 under the same
 * name. `.ci/device_headers` compares this file with the headers of the nvidia-cuda-runtime wheels. */
#ifndef EMS_CUDA_API_H
#define EMS_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

#ifndef EMS_CUDA_ENUM
#define EMS_CUDA_ENUM(type) uint32_t
#define EMS_CUDA_BATCH_ATTRIBUTES struct ems_cuda_batch_attributes
#define EMS_CUDA_HANDLE(type) void *
#endif

struct ems_cuda_location { /* CUmemLocation */
    uint32_t type;
    int32_t id;
};

struct ems_cuda_batch_attributes { /* CUmemcpyAttributes */
    uint32_t source_order;
    struct ems_cuda_location source;
    struct ems_cuda_location target;
    uint32_t flags;
};

enum {
    EMS_CUDA_INVALID_VALUE = 1,
    EMS_CUDA_NOT_INITIALIZED = 3,
    EMS_CUDA_INVALID_CONTEXT = 201,
    EMS_CUDA_NOT_READY = 600,
    EMS_CUDA_ALREADY_REGISTERED = 712,
    EMS_CUDA_NOT_SUPPORTED = 801,

    EMS_CUDA_POINTER_MEMORY_TYPE = 2,
    EMS_CUDA_POINTER_DEVICE_ORDINAL = 9,
    EMS_CUDA_MEMORY_DEVICE = 2,

    EMS_CUDA_SOURCE_ORDER_STREAM = 1,
    EMS_CUDA_LOCATION_DEVICE = 1,
    EMS_CUDA_LOCATION_HOST = 2,

    EMS_CUDA_STREAM_NON_BLOCKING = 1,
    EMS_CUDA_EVENT_DISABLE_TIMING = 2,
    EMS_CUDA_HOST_PORTABLE = 1,
};

/* X(field, symbol, parameters) */
#define EMS_CUDA_REQUIRED(X)                                                                       \
    X(init, cuInit, (uint32_t))                                                                    \
    X(version, cuDriverGetVersion, (int *))                                                        \
    X(count, cuDeviceGetCount, (int *))                                                            \
    X(error_string, cuGetErrorString, (EMS_CUDA_ENUM(CUresult), const char **))                    \
    X(error_name, cuGetErrorName, (EMS_CUDA_ENUM(CUresult), const char **))                        \
    X(retain, cuDevicePrimaryCtxRetain, (EMS_CUDA_HANDLE(CUcontext) *, int))                       \
    X(push, cuCtxPushCurrent_v2, (EMS_CUDA_HANDLE(CUcontext)))                                     \
    X(pop, cuCtxPopCurrent_v2, (EMS_CUDA_HANDLE(CUcontext) *))                                     \
    X(pointer_attribute, cuPointerGetAttribute,                                                    \
      (void *, EMS_CUDA_ENUM(CUpointer_attribute), unsigned long long))                            \
    X(stream_create, cuStreamCreate, (EMS_CUDA_HANDLE(CUstream) *, uint32_t))                      \
    X(stream_destroy, cuStreamDestroy_v2, (EMS_CUDA_HANDLE(CUstream)))                             \
    X(stream_query, cuStreamQuery, (EMS_CUDA_HANDLE(CUstream)))                                    \
    X(stream_synchronize, cuStreamSynchronize, (EMS_CUDA_HANDLE(CUstream)))                        \
    X(stream_wait, cuStreamWaitEvent,                                                              \
      (EMS_CUDA_HANDLE(CUstream), EMS_CUDA_HANDLE(CUevent), uint32_t))                             \
    X(event_create, cuEventCreate, (EMS_CUDA_HANDLE(CUevent) *, uint32_t))                         \
    X(event_destroy, cuEventDestroy_v2, (EMS_CUDA_HANDLE(CUevent)))                                \
    X(event_record, cuEventRecord, (EMS_CUDA_HANDLE(CUevent), EMS_CUDA_HANDLE(CUstream)))          \
    X(host_alloc, cuMemHostAlloc, (void **, size_t, uint32_t))                                     \
    X(host_free, cuMemFreeHost, (void *))                                                          \
    X(host_register, cuMemHostRegister_v2, (void *, size_t, uint32_t))                             \
    X(host_unregister, cuMemHostUnregister, (void *))                                              \
    X(to_device, cuMemcpyHtoDAsync_v2,                                                             \
      (unsigned long long, const void *, size_t, EMS_CUDA_HANDLE(CUstream)))                       \
    X(to_host, cuMemcpyDtoHAsync_v2,                                                               \
      (void *, unsigned long long, size_t, EMS_CUDA_HANDLE(CUstream)))

/* CUDA 13.0 and CUDA 12.8; without both, a call for each piece. */
#define EMS_CUDA_OPTIONAL(X)                                                                       \
    X(batch, cuMemcpyBatchAsync_v2,                                                                \
      (unsigned long long *, unsigned long long *, size_t *, size_t, EMS_CUDA_BATCH_ATTRIBUTES *,  \
       size_t *, size_t, EMS_CUDA_HANDLE(CUstream)))                                               \
    X(batch_12, cuMemcpyBatchAsync,                                                                \
      (unsigned long long *, unsigned long long *, size_t *, size_t, EMS_CUDA_BATCH_ATTRIBUTES *,  \
       size_t *, size_t, size_t *, EMS_CUDA_HANDLE(CUstream)))

#endif
