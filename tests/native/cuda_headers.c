/* Compiled against the vendor's headers, never run: csrc/cuda_api.h says what they say. */
#define __CUDA_API_VERSION_INTERNAL /* every version of each call under its own symbol */
#include <cuda.h>

#define EMS_CUDA_ENUM(type) type
#define EMS_CUDA_BATCH_ATTRIBUTES CUmemcpyAttributes
#define EMS_CUDA_HANDLE(type) type
#include "cuda_api.h"

#define SAME(field, symbol, parameters)                                                            \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&symbol), CUresult(*) parameters), #symbol);
EMS_CUDA_REQUIRED(SAME)
EMS_CUDA_OPTIONAL(SAME)

_Static_assert(sizeof(CUresult) == 4 && sizeof(CUpointer_attribute) == 4, "enums are 32 bits");

#define SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs);
#define PLACE(ours, field, theirs, member)                                                         \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, member), #theirs "." #member);
SIZE(struct ems_cuda_location, CUmemLocation)
PLACE(struct ems_cuda_location, type, CUmemLocation, type)
PLACE(struct ems_cuda_location, id, CUmemLocation, id)
SIZE(struct ems_cuda_batch_attributes, CUmemcpyAttributes)
PLACE(struct ems_cuda_batch_attributes, source_order, CUmemcpyAttributes, srcAccessOrder)
PLACE(struct ems_cuda_batch_attributes, source, CUmemcpyAttributes, srcLocHint)
PLACE(struct ems_cuda_batch_attributes, target, CUmemcpyAttributes, dstLocHint)
PLACE(struct ems_cuda_batch_attributes, flags, CUmemcpyAttributes, flags)

#define EQUAL(ours, theirs) _Static_assert((long)(ours) == (long)(theirs), #theirs);
EQUAL(EMS_CUDA_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE)
EQUAL(EMS_CUDA_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED)
EQUAL(EMS_CUDA_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT)
EQUAL(EMS_CUDA_NOT_READY, CUDA_ERROR_NOT_READY)
EQUAL(EMS_CUDA_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
EQUAL(EMS_CUDA_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED)
EQUAL(EMS_CUDA_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
EQUAL(EMS_CUDA_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
EQUAL(EMS_CUDA_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE)
EQUAL(EMS_CUDA_SOURCE_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
EQUAL(EMS_CUDA_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE)
EQUAL(EMS_CUDA_LOCATION_HOST, CU_MEM_LOCATION_TYPE_HOST)
EQUAL(EMS_CUDA_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING)
EQUAL(EMS_CUDA_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING)
EQUAL(EMS_CUDA_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE)
EQUAL(EMS_CUDA_HOST_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE)
