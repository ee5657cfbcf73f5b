/* Devices, their memory, and what they know of the memory of the host. */
#define _GNU_SOURCE
#include "emulated.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRAIN ((size_t)512)         /* what the allocator rounds to, as the real one does */
#define ALIGNMENT ((size_t)2 << 20) /* of a device's memory */

/* ---- devices and their memory ---- */

struct range {
    size_t offset, size;
    struct range *next; /* by offset */
};

static struct device {
    char *visible, *secret;
    struct range *used;
} devices[MOST_DEVICES];

__thread int current = -1;

static int open_device(int id)
{
    struct device *device = devices + id;
    size_t size = (size_t)settings[MEMORY];
    char *space;
    int file;

    if (device->visible)
        return 0;
    file = memfd_create("emulated-npu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size) != 0)
        return fault(MEMORY_ALLOCATION, "no memory for device %d", id);
    space = mmap(NULL, size + 2 * ALIGNMENT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    device->secret = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (space == MAP_FAILED || device->secret == MAP_FAILED)
        return fault(MEMORY_ALLOCATION, "no addresses for device %d", id);
    space = (char *)(((uintptr_t)space + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    device->visible = mmap(space, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
    close(file);
    return 0;
}

int device_of(const void *address)
{
    for (int id = 0; id < MOST_DEVICES; id++)
        if (devices[id].visible && (const char *)address >= devices[id].visible &&
            (const char *)address < devices[id].visible + settings[MEMORY])
            return id;
    return -1;
}

char *real_place(int id, const void *address, size_t nbytes)
{
    size_t offset;

    if (id < 0 || device_of(address) != id)
        return NULL;
    offset = (size_t)((const char *)address - devices[id].visible);
    for (struct range *range = devices[id].used; range; range = range->next)
        if (offset >= range->offset && offset - range->offset <= range->size &&
            nbytes <= range->size - (offset - range->offset))
            return devices[id].secret + offset;
    return NULL;
}

/* ---- pinned memory of the host ---- */

static struct pinned {
    char *address;
    size_t size;
    int registered;
    struct pinned *next;
} *all_pinned;

int is_pinned(const void *address, size_t nbytes)
{
    for (struct pinned *pinned = all_pinned; pinned; pinned = pinned->next)
        if ((const char *)address >= pinned->address &&
            (const char *)address + nbytes <= pinned->address + pinned->size)
            return 1;
    return 0;
}

static void pin(void *address, size_t size, int registered)
{
    struct pinned *pinned = malloc(sizeof *pinned);

    *pinned = (struct pinned){address, size, registered, all_pinned};
    all_pinned = pinned;
}

static int unpin(void *address, int registered)
{
    for (struct pinned **at = &all_pinned; *at; at = &(*at)->next) {
        struct pinned *pinned = *at;

        if (pinned->address == address && pinned->registered == registered) {
            *at = pinned->next;
            free(pinned);
            return 1;
        }
    }
    return 0;
}

/* ---- the calls ---- */

aclError aclrtGetDeviceCount(uint32_t *found)
{
    CALL(aclrtGetDeviceCount);
    *found = (uint32_t)settings[DEVICES];
    return 0;
}

aclError aclrtSetDevice(int32_t deviceId)
{
    int code;

    CALL(aclrtSetDevice);
    if (deviceId < 0 || deviceId >= settings[DEVICES])
        return fault(INVALID_DEVICE, "device %d of %ld", deviceId, settings[DEVICES]);
    pthread_mutex_lock(&lock);
    code = open_device(deviceId);
    if (code == 0 && !default_stream(deviceId))
        code = fault(MEMORY_ALLOCATION, "no thread for a stream");
    if (code == 0)
        current = deviceId;
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtGetDevice(int32_t *deviceId)
{
    CALL(aclrtGetDevice);
    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    *deviceId = current;
    return 0;
}

aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy)
{
    struct range **at, *range;
    size_t offset = 0, rounded = (size + GRAIN - 1) / GRAIN * GRAIN;

    (void)policy;
    CALL(aclrtMalloc);
    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    if (!size)
        return fault(PARAM_INVALID, "size is 0");
    pthread_mutex_lock(&lock);
    for (at = &devices[current].used; *at && (*at)->offset - offset < rounded; at = &(*at)->next)
        offset = (*at)->offset + (*at)->size;
    if (!*at && (size_t)settings[MEMORY] - offset < rounded) {
        pthread_mutex_unlock(&lock);
        return fault(MEMORY_ALLOCATION, "device %d has no %zu bytes left", current, size);
    }
    range = malloc(sizeof *range);
    *range = (struct range){offset, rounded, *at};
    *at = range;
    *devPtr = devices[current].visible + offset;
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtFree(void *devPtr)
{
    int id, code = 0;
    struct range **at;

    CALL(aclrtFree);
    pthread_mutex_lock(&lock);
    id = device_of(devPtr);
    at = id < 0 ? NULL : &devices[id].used;
    while (at && *at && devices[id].visible + (*at)->offset != (char *)devPtr)
        at = &(*at)->next;
    if (at && *at) {
        struct range *range = *at;

        *at = range->next;
        free(range);
    } else {
        code = fault(PARAM_INVALID, "%p was not allocated", devPtr);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtMallocHost(void **hostPtr, size_t size)
{
    CALL(aclrtMallocHost);
    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    *hostPtr = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*hostPtr == MAP_FAILED)
        return fault(MEMORY_ALLOCATION, "the host has no %zu bytes left", size);
    pthread_mutex_lock(&lock);
    pin(*hostPtr, size, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtFreeHost(void *hostPtr)
{
    size_t size = 0;

    CALL(aclrtFreeHost);
    pthread_mutex_lock(&lock);
    for (struct pinned *pinned = all_pinned; pinned; pinned = pinned->next)
        if (pinned->address == hostPtr && !pinned->registered)
            size = pinned->size;
    unpin(hostPtr, 0);
    pthread_mutex_unlock(&lock);
    if (!size)
        return fault(PARAM_INVALID, "%p is no memory of aclrtMallocHost", hostPtr);
    munmap(hostPtr, size);
    return 0;
}

static int register_host(void *ptr, uint64_t size)
{
    int code = 0;

    if ((uintptr_t)ptr % 4096 || !size)
        return fault(PARAM_INVALID, "%p is not on a page", ptr);
    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    if (settings[UNREGISTERED])
        return fault(FEATURE_NOT_SUPPORT, "this product registers nothing");
    pthread_mutex_lock(&lock);
    if (is_pinned(ptr, 1))
        code = fault(PARAM_INVALID, "%p is registered", ptr);
    else
        pin(ptr, size, 1);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr)
{
    (void)type;
    CALL(aclrtHostRegister);
    *devPtr = ptr;
    return register_host(ptr, size);
}

aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag)
{
    CALL(aclrtHostRegisterV2);
    if (flag != ACL_HOST_REG_PINNED)
        return fault(PARAM_INVALID, "flag %x", flag);
    return register_host(ptr, size);
}

aclError aclrtHostUnregister(void *ptr)
{
    int found;

    CALL(aclrtHostUnregister);
    pthread_mutex_lock(&lock);
    found = unpin(ptr, 1);
    pthread_mutex_unlock(&lock);
    return found ? 0 : fault(PARAM_INVALID, "%p is not registered", ptr);
}

aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes)
{
    int id;

    CALL(aclrtPointerGetAttributes);
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    id = device_of(ptr);
    if (id >= 0 && !real_place(id, ptr, 1))
        id = -1;
    attributes->location.type = id >= 0              ? ACL_MEM_LOCATION_TYPE_DEVICE
                                : is_pinned(ptr, 1) ? ACL_MEM_LOCATION_TYPE_HOST
                                                    : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    attributes->location.id = id >= 0 ? (uint32_t)id : 0;
    attributes->pageSize = id >= 0 ? 2 << 20 : 4096;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Copies between a device and the host at once, past all streams; nothing is counted. */
int emulated_npu_move(void *device, void *host, size_t nbytes, int to_host)
{
    char *real;

    pthread_mutex_lock(&lock);
    real = real_place(device_of(device), device, nbytes);
    if (real && to_host)
        memcpy(host, real, nbytes);
    else if (real)
        memcpy(real, host, nbytes);
    pthread_mutex_unlock(&lock);
    return real ? 0 : PARAM_INVALID;
}
