/* An emulated NPU: a test double of libascendcl.so that behaves, as far as EMS uses it, like the real one.
 *
 * The memory of a device is a memfd mapped twice: where its pointers point it is PROT_NONE, so whoever touches
 * it without these calls dies; the copies go through a second mapping that nobody else knows. A stream is a
 * thread with a queue, so what is not synchronised goes wrong visibly. Arguments are checked, calls and bytes
 * counted; errors, delays and hangs are injected by emulated_npu_set() or, before the first call, by
 * environment variables EMULATED_NPU_<NAME>:
 *
 *     devices=8  memory=268435456 (bytes of each device)
 *     copy_delay_us=N     before each copy            hang=1     copies do not end (until 0, or an abort)
 *     fail_call=N         the N-th runtime call from now on fails; fail_name=NAME counts only that call
 *     fail_code=N         with this code              fail_copy=N  the N-th copy executed fails, later
 *     unregistered=1      registration of host memory is refused
 */
#include "emulated.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what the tests turn ---- */

static const char *const setting_names[SETTINGS] = {"devices",   "memory",    "copy_delay_us", "hang",
                                                    "fail_call", "fail_code", "fail_copy",     "unregistered"};
long settings[SETTINGS] = {8, 256 << 20, 0, 0, 0, INTERNAL_ERROR, 0, 0};
static char fail_name[64];

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int initialised;

/* ---- counters ---- */

#define MOST_COUNTERS 64
static struct {
    const char *name;
    uint64_t value;
} counters[MOST_COUNTERS];
static uint64_t all_calls;

void count(const char *name, uint64_t n)
{
    for (int i = 0; i < MOST_COUNTERS; i++) {
        if (!counters[i].name)
            counters[i].name = name;
        if (strcmp(counters[i].name, name) == 0) {
            counters[i].value += n;
            return;
        }
    }
}

/* ---- errors ---- */

static __thread char message[512];
static __thread int message_new;

int fault(int code, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    message_new = 1;
    return code;
}

const char *aclGetRecentErrMsg(void)
{
    if (!message_new)
        return NULL;
    message_new = 0;
    return message;
}

static void configure(void)
{
    char name[64];
    const char *text;

    for (int i = 0; i < SETTINGS; i++) {
        snprintf(name, sizeof name, "EMULATED_NPU_%s", setting_names[i]);
        for (char *at = name; *at; at++)
            if (*at >= 'a' && *at <= 'z')
                *at -= 'a' - 'A';
        if ((text = getenv(name)) && *text)
            settings[i] = atol(text);
    }
    if ((text = getenv("EMULATED_NPU_FAIL_NAME")))
        snprintf(fail_name, sizeof fail_name, "%s", text);
    if (settings[DEVICES] > MOST_DEVICES)
        settings[DEVICES] = MOST_DEVICES;
}

int begin(const char *name)
{
    int code = 0;

    pthread_once(&once, configure);
    pthread_mutex_lock(&lock);
    count(name, 1);
    all_calls++;
    if (settings[FAIL_CALL] > 0 && (!*fail_name || strcmp(fail_name, name) == 0) && --settings[FAIL_CALL] == 0)
        code = fault((int)settings[FAIL_CODE], "%s: injected failure", name);
    else if (!initialised && strcmp(name, "aclInit") != 0)
        code = fault(UNINITIALIZE, "%s before aclInit", name);
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- the process ---- */

aclError aclInit(const char *configPath)
{
    int again;

    (void)configPath;
    CALL(aclInit);
    pthread_mutex_lock(&lock);
    again = initialised;
    initialised = 1;
    pthread_mutex_unlock(&lock);
    return again ? fault(REPEAT_INITIALIZE, "aclInit was called before") : 0;
}

aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion)
{
    *majorVersion = 1, *minorVersion = 17, *patchVersion = 0;
    return 0;
}

/* ---- for tests ---- */

void emulated_npu_set(const char *name, const char *value)
{
    pthread_once(&once, configure);
    pthread_mutex_lock(&lock);
    if (strcmp(name, "fail_name") == 0)
        snprintf(fail_name, sizeof fail_name, "%s", value);
    for (int i = 0; i < SETTINGS; i++)
        if (strcmp(setting_names[i], name) == 0)
            settings[i] = atol(value);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

uint64_t emulated_npu_count(const char *name)
{
    uint64_t value = 0;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST_COUNTERS && counters[i].name; i++)
        if (strcmp(counters[i].name, name) == 0)
            value = counters[i].value;
    if (strcmp(name, "calls") == 0)
        value = all_calls;
    pthread_mutex_unlock(&lock);
    return value;
}

void emulated_npu_reset_counts(void)
{
    pthread_mutex_lock(&lock);
    memset(counters, 0, sizeof counters);
    all_calls = 0;
    pthread_mutex_unlock(&lock);
}
