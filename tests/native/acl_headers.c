/* Compiled against the vendor's headers, never run: csrc/acl_api.h says what they say. */
#include <acl/acl_rt.h>

#define EMS_ACL_ENUM(type) type
#define EMS_ACL_POINTER_ATTRIBUTES aclrtPtrAttributes
#define EMS_ACL_BATCH_ATTRIBUTES aclrtMemcpyBatchAttr
#include "acl_api.h"

#define SAME(name, parameters)                                                                     \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&name), aclError(*) parameters), #name);
EMS_ACL_REQUIRED(SAME)
EMS_ACL_OPTIONAL(SAME)

_Static_assert(__builtin_types_compatible_p(aclError, int), "aclError");
_Static_assert(__builtin_types_compatible_p(__typeof__(aclGetRecentErrMsg()), const char *), "text");
_Static_assert(sizeof(aclrtMemcpyKind) == 4 && sizeof(aclrtHostRegisterType) == 4 &&
                   sizeof(aclrtStreamStatus) == 4 && sizeof(aclrtMemLocationType) == 4,
               "enums are passed as 32 bits");

#define SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs);
#define PLACE(ours, field, theirs, member)                                                         \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, member), #theirs "." #member);
SIZE(struct ems_acl_location, aclrtMemLocation)
PLACE(struct ems_acl_location, id, aclrtMemLocation, id)
PLACE(struct ems_acl_location, type, aclrtMemLocation, type)
SIZE(struct ems_acl_pointer_attributes, aclrtPtrAttributes)
PLACE(struct ems_acl_pointer_attributes, location, aclrtPtrAttributes, location)
PLACE(struct ems_acl_pointer_attributes, page_size, aclrtPtrAttributes, pageSize)
SIZE(struct ems_acl_batch_attributes, aclrtMemcpyBatchAttr)
PLACE(struct ems_acl_batch_attributes, target, aclrtMemcpyBatchAttr, dstLoc)
PLACE(struct ems_acl_batch_attributes, source, aclrtMemcpyBatchAttr, srcLoc)

/* Their error codes are `static const int`: no constant expressions in C, so the comparison is left to the optimiser,
 * which must find it true. */
extern void differs(void) __attribute__((error("a constant differs from the vendor's")));
#define EQUAL(ours, theirs)                                                                        \
    if ((long)(ours) != (long)(theirs))                                                            \
        differs();

void constants(void)
{
    EQUAL(EMS_ACL_LOCATION_HOST, ACL_MEM_LOCATION_TYPE_HOST)
    EQUAL(EMS_ACL_LOCATION_DEVICE, ACL_MEM_LOCATION_TYPE_DEVICE)
    EQUAL(EMS_ACL_HOST_TO_DEVICE, ACL_MEMCPY_HOST_TO_DEVICE)
    EQUAL(EMS_ACL_DEVICE_TO_HOST, ACL_MEMCPY_DEVICE_TO_HOST)
    EQUAL(EMS_ACL_STREAM_COMPLETE, ACL_STREAM_STATUS_COMPLETE)
    EQUAL(EMS_ACL_HOST_MAPPED, ACL_HOST_REGISTER_MAPPED)
    EQUAL(EMS_ACL_HOST_REG_PINNED, ACL_HOST_REG_PINNED)
    EQUAL(EMS_ACL_REPEAT_INITIALIZE, ACL_ERROR_REPEAT_INITIALIZE)
    EQUAL(EMS_ACL_API_NOT_SUPPORT, ACL_ERROR_API_NOT_SUPPORT)
    EQUAL(EMS_ACL_FEATURE_UNSUPPORTED, ACL_ERROR_FEATURE_UNSUPPORTED)
    EQUAL(EMS_ACL_RT_CONTEXT_NULL, ACL_ERROR_RT_CONTEXT_NULL)
    EQUAL(EMS_ACL_RT_STREAM_CONTEXT, ACL_ERROR_RT_STREAM_CONTEXT)
    EQUAL(EMS_ACL_RT_STREAM_ABORT, ACL_ERROR_RT_STREAM_ABORT)
    EQUAL(EMS_ACL_RT_STREAM_SYNC_TIMEOUT, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT)
    EQUAL(EMS_ACL_RT_FEATURE_NOT_SUPPORT, ACL_ERROR_RT_FEATURE_NOT_SUPPORT)
}
