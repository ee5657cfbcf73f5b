/* Streams, which are threads; events; copies. */
#define _GNU_SOURCE
#include "emulated.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SLICE ((size_t)64 << 10) /* between looks at an abort */
#define MAGIC_STREAM 0x5354524dU
#define MAGIC_EVENT 0x4556454eU

struct event {
    uint32_t magic;
    int device;
    uint64_t recorded, happened;
};

struct task {
    enum { COPY, FILL, RECORD, WAIT } kind;
    void *target;
    const void *source;
    size_t nbytes;
    int to_host, value;
    long delay_us;
    struct event *event;
    uint64_t generation;
    struct task *next;
};

struct stream {
    uint32_t magic;
    int device, error, aborting, ending, busy;
    uint64_t submitted, done;
    struct task *first, **last;
    pthread_t thread;
};

/* Needs the lock; false when the stream was aborted meanwhile. */
static int pause_for(struct stream *stream, long microseconds)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += microseconds / 1000000;
    until.tv_nsec += microseconds % 1000000 * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (!stream->aborting && pthread_cond_timedwait(&changed, &lock, &until) == 0)
        ;
    return !stream->aborting;
}

static void move(struct stream *stream, struct task *task)
{
    char *real;

    if (task->delay_us && !pause_for(stream, task->delay_us))
        return;
    while (task->kind == COPY && settings[HANG] && !stream->aborting)
        pthread_cond_wait(&changed, &lock);
    if (stream->aborting)
        return;
    if (task->kind == COPY && settings[FAIL_COPY] > 0 && --settings[FAIL_COPY] == 0) {
        stream->error = SYS_DMA;
        return;
    }
    real = real_place(stream->device, task->kind == COPY && task->to_host ? task->source : task->target, task->nbytes);
    if (!real) { /* freed since */
        stream->error = SYS_DMA;
        return;
    }
    for (size_t done = 0; done < task->nbytes && !stream->aborting; done += SLICE) {
        size_t part = task->nbytes - done < SLICE ? task->nbytes - done : SLICE;

        /* The host's memory can go away below a real device too, but then nobody may have wanted it. */
        pthread_mutex_unlock(&lock);
        if (task->kind == FILL)
            memset(real + done, task->value, part);
        else if (task->to_host)
            memcpy((char *)task->target + done, real + done, part);
        else
            memcpy(real + done, (const char *)task->source + done, part);
        pthread_mutex_lock(&lock);
    }
    if (task->kind == COPY) {
        count("copies", 1);
        count(task->to_host ? "bytes_to_host" : "bytes_to_device", task->nbytes);
    }
}

static void run(struct stream *stream, struct task *task)
{
    if (task->kind == RECORD) {
        if (task->event->happened < task->generation)
            task->event->happened = task->generation;
    } else if (task->kind == WAIT) {
        while (task->event->happened < task->generation && !stream->aborting)
            pthread_cond_wait(&changed, &lock);
    } else if (!stream->error) {
        move(stream, task);
    }
}

static void *work(void *argument)
{
    struct stream *stream = argument;

    pthread_mutex_lock(&lock);
    while (!stream->ending) {
        struct task *task = stream->first;

        if (!task) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        stream->first = task->next;
        if (!stream->first)
            stream->last = &stream->first;
        stream->busy = 1;
        run(stream, task);
        stream->busy = 0;
        stream->done++;
        free(task);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static struct stream *new_stream(int device)
{
    struct stream *stream = calloc(1, sizeof *stream);

    stream->magic = MAGIC_STREAM;
    stream->device = device;
    stream->last = &stream->first;
    if (pthread_create(&stream->thread, NULL, work, stream) != 0) {
        free(stream);
        return NULL;
    }
    return stream;
}

static struct stream *normal[MOST_DEVICES];

aclrtStream default_stream(int device)
{
    if (!normal[device])
        normal[device] = new_stream(device);
    return normal[device];
}

/* The stream of a handle, if this thread may use it. Needs the lock. */
static int find_stream(aclrtStream handle, struct stream **found)
{
    struct stream *stream = handle;

    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    if (!stream)
        stream = normal[current];
    if (stream->magic != MAGIC_STREAM)
        return fault(PARAM_INVALID, "%p is no stream", handle);
    if (stream->device != current)
        return fault(STREAM_CONTEXT, "the stream is of device %d, the context of device %d", stream->device, current);
    *found = stream;
    return 0;
}

static int put(struct stream *stream, struct task task)
{
    struct task *copy;

    if (stream->error)
        return fault(stream->error, "the stream failed before");
    copy = malloc(sizeof *copy);
    *copy = task;
    copy->next = NULL;
    *stream->last = copy;
    stream->last = &copy->next;
    stream->submitted++;
    pthread_cond_broadcast(&changed);
    return 0;
}

/* Needs the lock. Negative: for ever. */
static int drain(struct stream *stream, int timeout_ms)
{
    uint64_t goal = stream->submitted;
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (stream->done < goal) {
        if (timeout_ms < 0)
            pthread_cond_wait(&changed, &lock);
        else if (pthread_cond_timedwait(&changed, &lock, &until) != 0 && stream->done < goal)
            return fault(SYNC_TIMEOUT, "the stream was not done in %d ms", timeout_ms);
    }
    return stream->error ? fault(stream->error, "a task of the stream failed with code %d", stream->error) : 0;
}

/* ---- the calls: streams ---- */

aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *stream)
{
    CALL(aclrtCtxGetCurrentDefaultStream);
    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    *stream = normal[current];
    return 0;
}

aclError aclrtCreateStream(aclrtStream *stream)
{
    CALL(aclrtCreateStream);
    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    *stream = new_stream(current);
    return *stream ? 0 : fault(MEMORY_ALLOCATION, "no thread for a stream");
}

aclError aclrtDestroyStream(aclrtStream handle)
{
    struct stream *stream = handle;

    CALL(aclrtDestroyStream);
    pthread_mutex_lock(&lock);
    if (!stream || stream->magic != MAGIC_STREAM) {
        pthread_mutex_unlock(&lock);
        return fault(PARAM_INVALID, "%p is no stream", handle);
    }
    if (stream->first || stream->busy) {
        pthread_mutex_unlock(&lock);
        return fault(PARAM_INVALID, "the stream is not done");
    }
    stream->ending = 1;
    stream->magic = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return 0;
}

static int synchronize(aclrtStream handle, int timeout_ms)
{
    struct stream *stream = NULL;
    int code;

    pthread_mutex_lock(&lock);
    code = find_stream(handle, &stream);
    if (code == 0)
        code = drain(stream, timeout_ms);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtSynchronizeStream(aclrtStream stream)
{
    CALL(aclrtSynchronizeStream);
    return synchronize(stream, -1);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)
{
    CALL(aclrtSynchronizeStreamWithTimeout);
    if (timeout == 0 || timeout < -1)
        return fault(PARAM_INVALID, "timeout is %d", timeout);
    return synchronize(stream, timeout);
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status)
{
    struct stream *stream = NULL;
    int code;

    CALL(aclrtStreamQuery);
    pthread_mutex_lock(&lock);
    code = find_stream(handle, &stream);
    if (code == 0) {
        *status = stream->done < stream->submitted ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
        code = stream->error ? fault(stream->error, "a task of the stream failed") : 0;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtStreamAbort(aclrtStream handle)
{
    struct stream *stream = NULL;
    int code;

    CALL(aclrtStreamAbort);
    if (!handle)
        return fault(PARAM_INVALID, "the default stream cannot be aborted");
    pthread_mutex_lock(&lock);
    code = find_stream(handle, &stream);
    if (code == 0) {
        stream->aborting = 1;
        stream->error = STREAM_ABORT;
        pthread_cond_broadcast(&changed);
        while (stream->done < stream->submitted)
            pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- the calls: events ---- */

aclError aclrtCreateEvent(aclrtEvent *event)
{
    struct event *made;

    CALL(aclrtCreateEvent);
    if (current < 0)
        return fault(CONTEXT_NULL, "this thread has no context");
    made = calloc(1, sizeof *made);
    made->magic = MAGIC_EVENT;
    made->device = current;
    *event = made;
    return 0;
}

aclError aclrtDestroyEvent(aclrtEvent handle)
{
    struct event *event = handle;

    CALL(aclrtDestroyEvent);
    if (!event || event->magic != MAGIC_EVENT)
        return fault(PARAM_INVALID, "%p is no event", handle);
    event->magic = 0; /* kept: a stream may still look at it */
    return 0;
}

static int put_event(struct event *event, aclrtStream handle, int record)
{
    struct stream *stream = NULL;
    struct task task = {.kind = record ? RECORD : WAIT, .event = event};
    int code;

    if (!event || event->magic != MAGIC_EVENT)
        return fault(PARAM_INVALID, "%p is no event", (void *)event);
    pthread_mutex_lock(&lock);
    code = find_stream(handle, &stream);
    if (code == 0) {
        task.generation = record ? ++event->recorded : event->recorded;
        code = put(stream, task);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)
{
    CALL(aclrtRecordEvent);
    return put_event(event, stream, 1);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)
{
    CALL(aclrtStreamWaitEvent);
    return put_event(event, stream, 0);
}

/* ---- the calls: copies ---- */

/* Checks one copy; needs the lock. */
static int check_copy(struct stream *stream, void *dst, size_t destMax, const void *src, size_t n, int to_host)
{
    const void *device = to_host ? src : dst, *host = to_host ? dst : src;

    if (!dst || !src || !n)
        return fault(PARAM_INVALID, "nothing to copy");
    if (n > destMax)
        return fault(PARAM_INVALID, "%zu bytes to a place of %zu", n, destMax);
    if (!real_place(stream->device, device, n))
        return fault(PARAM_INVALID, "%p and %zu bytes are not allocated on device %d", device, n, stream->device);
    if (device_of(host) >= 0)
        return fault(PARAM_INVALID, "%p is memory of a device", host);
    return 0;
}

static int put_copies(aclrtStream handle, void **dsts, size_t *destMaxs, const void **srcs, size_t *sizes, size_t n,
                      int to_host, size_t *failIndex)
{
    struct stream *stream = NULL;
    int code, pinned = 1;

    pthread_mutex_lock(&lock);
    code = find_stream(handle, &stream);
    for (size_t i = 0; i < n && code == 0; i++) {
        code = check_copy(stream, dsts[i], destMaxs[i], srcs[i], sizes[i], to_host);
        if (code)
            *failIndex = i;
    }
    for (size_t i = 0; i < n && code == 0; i++) {
        pinned &= is_pinned(to_host ? dsts[i] : srcs[i], sizes[i]);
        code = put(stream, (struct task){.kind = COPY, .target = dsts[i], .source = srcs[i], .nbytes = sizes[i],
                                         .to_host = to_host, .delay_us = settings[COPY_DELAY_US]});
    }
    if (code == 0 && !pinned) /* as documented: memory that is not page-locked is copied before the call returns */
        code = drain(stream, -1);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t n, aclrtMemcpyKind kind,
                          aclrtStream stream)
{
    size_t failed = 0;

    CALL(aclrtMemcpyAsync);
    if (kind != ACL_MEMCPY_HOST_TO_DEVICE && kind != ACL_MEMCPY_DEVICE_TO_HOST)
        return fault(FEATURE_NOT_SUPPORT, "kind %d", (int)kind);
    return put_copies(stream, &dst, &destMax, &src, &n, 1, kind == ACL_MEMCPY_DEVICE_TO_HOST, &failed);
}

aclError aclrtMemcpyBatchAsync(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches,
                               aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex,
                               aclrtStream stream)
{
    CALL(aclrtMemcpyBatchAsync);
    *failIndex = SIZE_MAX;
    if (!numBatches || numAttrs != 1 || attrsIndexes[0] != 0)
        return fault(PARAM_INVALID, "%zu copies, %zu attributes", numBatches, numAttrs);
    if (attrs->dstLoc.type == attrs->srcLoc.type || (attrs->dstLoc.type != ACL_MEM_LOCATION_TYPE_DEVICE &&
                                                     attrs->srcLoc.type != ACL_MEM_LOCATION_TYPE_DEVICE))
        return fault(FEATURE_NOT_SUPPORT, "between location %d and %d", (int)attrs->srcLoc.type,
                     (int)attrs->dstLoc.type);
    return put_copies(stream, dsts, destMaxs, (const void **)srcs, sizes, numBatches,
                      attrs->srcLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE, failIndex);
}

/* ---- for tests ---- */

/* A kernel: after a while it fills memory with a byte. */
int emulated_npu_launch_fill(aclrtStream handle, void *target, size_t nbytes, int value, long delay_us)
{
    struct stream *stream = NULL;
    int code;

    pthread_mutex_lock(&lock);
    code = find_stream(handle, &stream);
    if (code == 0)
        code = put(stream, (struct task){.kind = FILL, .target = target, .nbytes = nbytes, .value = value,
                                         .delay_us = delay_us});
    pthread_mutex_unlock(&lock);
    return code;
}
