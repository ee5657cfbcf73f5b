/* Bytes over a connected stream socket, awake for a moment before asleep.
 *
 * A thread that sleeps in the kernel needs 5 to 40 us to wake, more than the server needs for an
 * answer. All functions return -errno for failures and never raise SIGPIPE. */
#ifndef EMS_LINK_H
#define EMS_LINK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Send everything, asleep while the peer reads none. 0, -ETIMEDOUT, -EINTR with *sent moved on. */
int ems_link_send(int fd, const char *data, size_t nbytes, size_t *sent, uint64_t deadline_ns);

/* What is there at `until_ns` the latest, without sleep: bytes, 0 = the end, -EAGAIN = none. */
ssize_t ems_link_receive_awake(int fd, char *data, size_t nbytes, uint64_t until_ns);

/* What comes first, asleep: bytes, 0 = the end, -ETIMEDOUT, -EINTR. */
ssize_t ems_link_receive(int fd, char *data, size_t nbytes, uint64_t deadline_ns);

#endif
