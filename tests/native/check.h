/* What the test programs share. */
#ifndef EMS_CHECK_H
#define EMS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            _Exit(1);                                                                              \
        }                                                                                          \
    } while (0)

#endif
