/* What EMS calls of the Ascend runtime (libascendcl.so), declared by ourselves: nothing of the vendor
 * is needed to build. Signatures, constants and limits are those of the vendor's public API reference,
 * CANN 8.0 to 9.0, a page for each call:
 *     https://gitcode.com/cann/runtime/blob/9.0.0/docs/api_docs/<name of the call>.md
 * (the same texts as https://www.hiascend.com/document/detail/en/canncommercial/850/API/appdevgapi/,
 * pages aclcppdevg_03_0106 aclrtMemcpyAsync, _1957 aclrtMemcpyBatchAsync, _1803 aclrtPointerGetAttributes,
 * _1804 aclrtHostRegister, _2128 aclrtHostRegisterV2, _1777 aclrtStreamAbort, _1870
 * aclrtCtxGetCurrentDefaultStream). `.ci/device_headers` compares this file with the headers that the
 * torch-npu wheel carries. */
#ifndef EMS_ACL_API_H
#define EMS_ACL_API_H

#include <stddef.h>
#include <stdint.h>

/* With the vendor's headers at hand the comparison names the vendor's types here. */
#ifndef EMS_ACL_ENUM
#define EMS_ACL_ENUM(type) uint32_t
#define EMS_ACL_POINTER_ATTRIBUTES struct ems_acl_pointer_attributes
#define EMS_ACL_BATCH_ATTRIBUTES struct ems_acl_batch_attributes
#endif

struct ems_acl_location { /* aclrtMemLocation */
    uint32_t id;
    uint32_t type;
};

struct ems_acl_pointer_attributes { /* aclrtPtrAttributes */
    struct ems_acl_location location;
    uint32_t page_size;
    uint32_t reserved[4];
};

struct ems_acl_batch_attributes { /* aclrtMemcpyBatchAttr */
    struct ems_acl_location target;
    struct ems_acl_location source;
    uint8_t reserved[16];
};

enum {
    EMS_ACL_LOCATION_HOST = 0,
    EMS_ACL_LOCATION_DEVICE = 1,

    EMS_ACL_HOST_TO_DEVICE = 1, /* aclrtMemcpyKind */
    EMS_ACL_DEVICE_TO_HOST = 2,

    EMS_ACL_STREAM_COMPLETE = 0, /* aclrtStreamStatus */

    EMS_ACL_HOST_MAPPED = 0,              /* aclrtHostRegisterType */
    EMS_ACL_HOST_REG_PINNED = 0x10000000, /* flag of aclrtHostRegisterV2 */

    EMS_ACL_REPEAT_INITIALIZE = 100002, /* aclError */
    EMS_ACL_API_NOT_SUPPORT = 200001,
    EMS_ACL_FEATURE_UNSUPPORTED = 200006,
    EMS_ACL_RT_CONTEXT_NULL = 107002,
    EMS_ACL_RT_STREAM_CONTEXT = 107003,
    EMS_ACL_RT_STREAM_ABORT = 107023,
    EMS_ACL_RT_STREAM_SYNC_TIMEOUT = 507046,
    EMS_ACL_RT_FEATURE_NOT_SUPPORT = 207000,
};

/* X(name, parameters): every call returns aclError (int). Beside them: const char *aclGetRecentErrMsg(). */
#define EMS_ACL_REQUIRED(X)                                                                        \
    X(aclInit, (const char *))                                                                     \
    X(aclrtSetDevice, (int32_t))                                                                   \
    X(aclrtGetDevice, (int32_t *))                                                                 \
    X(aclrtGetDeviceCount, (uint32_t *))                                                           \
    X(aclrtCreateStream, (void **))                                                                \
    X(aclrtDestroyStream, (void *))                                                                \
    X(aclrtSynchronizeStream, (void *))                                                            \
    X(aclrtCreateEvent, (void **))                                                                 \
    X(aclrtDestroyEvent, (void *))                                                                 \
    X(aclrtRecordEvent, (void *, void *))                                                          \
    X(aclrtStreamWaitEvent, (void *, void *))                                                      \
    X(aclrtMallocHost, (void **, size_t))                                                          \
    X(aclrtFreeHost, (void *))                                                                     \
    X(aclrtMemcpyAsync, (void *, size_t, const void *, size_t, EMS_ACL_ENUM(aclrtMemcpyKind), void *))

/* Newer than the oldest CANN that works, or not for every product: EMS does without them.
 * aclrtMemcpyBatchAsync: A2, A3, 350, from CANN 8.3, "for trial use". aclrtHostRegister: A2, A3, 350;
 * aclrtHostRegisterV2: from CANN 8.5. Both: addresses on 4 KiB, Linux above 5.10.
 * aclrtStreamAbort: A2, A3, 350. aclrtCtxGetCurrentDefaultStream, aclrtPointerGetAttributes: from CANN 8.2. */
#define EMS_ACL_OPTIONAL(X)                                                                        \
    X(aclrtPointerGetAttributes, (const void *, EMS_ACL_POINTER_ATTRIBUTES *))                     \
    X(aclrtMemcpyBatchAsync, (void **, size_t *, void **, size_t *, size_t,                        \
                              EMS_ACL_BATCH_ATTRIBUTES *, size_t *, size_t, size_t *, void *))     \
    X(aclrtHostRegister, (void *, uint64_t, EMS_ACL_ENUM(aclrtHostRegisterType), void **))         \
    X(aclrtHostRegisterV2, (void *, uint64_t, uint32_t))                                           \
    X(aclrtHostUnregister, (void *))                                                               \
    X(aclrtSynchronizeStreamWithTimeout, (void *, int32_t))                                        \
    X(aclrtStreamQuery, (void *, EMS_ACL_ENUM(aclrtStreamStatus) *))                               \
    X(aclrtStreamAbort, (void *))                                                                  \
    X(aclrtCtxGetCurrentDefaultStream, (void **))                                                  \
    X(aclrtGetVersion, (int32_t *, int32_t *, int32_t *))

#endif
