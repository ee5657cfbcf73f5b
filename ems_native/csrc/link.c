#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "link.h"

#include "clock.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

static int sleep_for(int fd, short events, uint64_t deadline_ns)
{
    struct pollfd one = {.fd = fd, .events = events};
    uint64_t now = ems_now_ns();
    uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    struct timespec timeout = {
        .tv_sec = (time_t)(left / 1000000000u),
        .tv_nsec = (long)(left % 1000000000u),
    };
    int ready = ppoll(&one, 1, &timeout, NULL);

    if (ready < 0)
        return -errno;
    return ready ? 0 : -ETIMEDOUT;
}

int ems_link_send(int fd, const char *data, size_t nbytes, size_t *sent, uint64_t deadline_ns)
{
    while (*sent < nbytes) {
        ssize_t done = send(fd, data + *sent, nbytes - *sent, MSG_DONTWAIT | MSG_NOSIGNAL);

        if (done >= 0) {
            *sent += (size_t)done;
            continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return -errno;
        int why = sleep_for(fd, POLLOUT, deadline_ns);

        if (why)
            return why;
    }
    return 0;
}

ssize_t ems_link_receive_awake(int fd, char *data, size_t nbytes, uint64_t until_ns)
{
    do {
        ssize_t got = recv(fd, data, nbytes, MSG_DONTWAIT);

        if (got >= 0)
            return got;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return -errno;
        /* The kernel likes to wake a peer on the processor of whoever wrote to it. It runs there as
         * soon as this thread yields, and so does anybody else who needs the processor. */
        sched_yield();
    } while (ems_now_ns() < until_ns);
    return -EAGAIN;
}

ssize_t ems_link_receive(int fd, char *data, size_t nbytes, uint64_t deadline_ns)
{
    for (;;) {
        ssize_t got = recv(fd, data, nbytes, MSG_DONTWAIT);

        if (got >= 0)
            return got;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return -errno;
        int why = sleep_for(fd, POLLIN, deadline_ns);

        if (why)
            return why;
    }
}
