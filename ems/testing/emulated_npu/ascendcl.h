/* The calls of the Ascend runtime that the emulated NPU has, under their public names. Compiled with
 * -DEMULATED_NPU_VENDOR_HEADERS the vendor's headers take the place of these declarations, so that a compiler
 * compares the two. */
#ifndef EMULATED_NPU_ASCENDCL_H
#define EMULATED_NPU_ASCENDCL_H

#include <stddef.h>
#include <stdint.h>

#ifdef EMULATED_NPU_VENDOR_HEADERS
#include <acl/acl_rt.h>
#else

typedef int aclError;
typedef void *aclrtStream;
typedef void *aclrtEvent;

typedef enum { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST } aclrtMemcpyKind;
typedef enum { ACL_MEM_MALLOC_HUGE_FIRST } aclrtMemMallocPolicy;
typedef enum { ACL_HOST_REGISTER_MAPPED = 0 } aclrtHostRegisterType;
typedef enum { ACL_STREAM_STATUS_COMPLETE = 0, ACL_STREAM_STATUS_NOT_READY = 1 } aclrtStreamStatus;
typedef enum {
    ACL_MEM_LOCATION_TYPE_HOST = 0,
    ACL_MEM_LOCATION_TYPE_DEVICE,
    ACL_MEM_LOCATION_TYPE_UNREGISTERED,
} aclrtMemLocationType;

typedef struct {
    uint32_t id;
    aclrtMemLocationType type;
} aclrtMemLocation;

typedef struct {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;

typedef struct {
    aclrtMemLocation dstLoc;
    aclrtMemLocation srcLoc;
    uint8_t rsv[16];
} aclrtMemcpyBatchAttr;

#define ACL_HOST_REG_PINNED 0x10000000UL

#endif
#endif
