// All functions: stubs, malformed arguments, many threads.
#define _GNU_SOURCE
#include "probe.h"
#include "cases.h"

#include <pthread.h>

typedef nvmlReturn_t (*any)(void *, void *, void *, void *, void *, void *);

// Splits "NAME" or "NAME@"; true for the second, whose first argument is a device.
static bool takes_device(const char *argument, char name[128])
{
    size_t length = strcspn(argument, "@");
    snprintf(name, 128, "%.*s", (int)length, argument);
    return argument[length] == '@';
}

// Arguments: stubs, as for takes_device.
void case_stubs(void)
{
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < argument_count; i++) {
            char name[128];
            bool of_a_device = takes_device(arguments[i], name);
            void *device = round == 0 ? NULL : (void *)gpu(0).handle;
            nvmlReturn_t want = round == 0 ? NVML_ERROR_UNINITIALIZED : NVML_ERROR_NOT_SUPPORTED;
            nvmlReturn_t got = ((any)symbol(name))(device, NULL, NULL, NULL, NULL, NULL);
            if (got != want)
                fprintf(stderr, "%s = %d, want %d\n", name, (int)got, (int)want);
            CHECK(got == want);
            if (round == 1 && of_a_device)
                WANT(NVML_ERROR_INVALID_ARGUMENT, ((any)symbol(name))(NULL, NULL, NULL, NULL, NULL, NULL));
        }
        if (round == 0)
            init();
    }
}

// Calls a function with a handle or a buffer first, and nothing or the buffer for the others. The buffer starts with
// zeros, so versions in it are wrong and counts zero.
static void sweep_one(const char *argument, void *handle, void *buffer)
{
    char name[128];
    void *first = takes_device(argument, name) ? handle : buffer;
    any f = (any)symbol(name);
    f(first, NULL, NULL, NULL, NULL, NULL);
    f(first, buffer, buffer, buffer, buffer, buffer);
    f(first, NULL, buffer, NULL, buffer, NULL);
    f(first, buffer, NULL, buffer, NULL, buffer);
    f(buffer, buffer, buffer, buffer, buffer, buffer);
    f(NULL, NULL, NULL, NULL, NULL, NULL);
}

// Arguments: functions, as for takes_device. None may crash on any machine. Their results do not matter.
void case_sweep(void)
{
    static _Alignas(64) char buffer[1 << 16];
    nvmlDevice_t device, part;
    if (NV(nvmlInit_v2)() != NVML_SUCCESS)
        return;
    unsigned int count = 0;
    NV(nvmlDeviceGetCount_v2)(&count);
    for (unsigned int i = 0; i <= count && i < 3; i++) {
        device.handle = part.handle = NULL;
        if (i < count && NV(nvmlDeviceGetHandleByIndex_v2)(i, &device) == NVML_SUCCESS)
            NV(nvmlDeviceGetMigDeviceHandleByIndex)(device, 0, &part);
        for (int n = 0; n < argument_count; n++) {
            memset(buffer, 0, sizeof(buffer));
            sweep_one(arguments[n], device.handle, buffer);
            memset(buffer, 0, sizeof(buffer));
            sweep_one(arguments[n], part.handle, buffer);
        }
    }
}

static void *busy(void *number)
{
    char text[96];
    unsigned int index = (unsigned int)(long)number % 4, count;
    unsigned long long big;
    for (int i = 0; i < 2000; i++) {
        nvmlDevice_t device, part;
        nvmlPciInfo_t pci;
        nvmlEventSet_t set;
        nvmlEventData_t data;
        if (i % 50 == 0) {
            OK(NV(nvmlInit_v2)());
            OK(NV(nvmlShutdown)());
        }
        if (NV(nvmlDeviceGetHandleByIndex_v2)(index, &device) != NVML_SUCCESS)
            continue;
        NV(nvmlDeviceGetUUID)(device, text, sizeof(text));
        NV(nvmlDeviceGetPciInfo_v3)(device, &pci);
        if (NV(nvmlDeviceGetMigDeviceHandleByIndex)(device, 0, &part) == NVML_SUCCESS)
            NV(nvmlDeviceGetName)(part, text, sizeof(text));
        OK(NV(nvmlEventSetCreate)(&set));
        NV(nvmlDeviceRegisterEvents)(device, nvmlEventTypeXidCriticalError, set);
        NV(nvmlEventSetWait_v2)(set, &data, 0);
        OK(NV(nvmlEventSetFree)(set));
        NV(nvmlDeviceGetTotalEnergyConsumption)(device, &big);
        OK(NV(nvmlDeviceGetCount_v2)(&count));
        CHECK(count == 4);
    }
    return NULL;
}

// Many threads call while the state changes under them.
void case_threads(void)
{
    enum { THREADS = 6 };
    static const char *const states[] = {
        "fault gpu=1 kind=lost\n", "clearmig gpu=3\n", "latency ns=1000\nfault function=nvmlDeviceGetUUID return=999\n",
        "event seq=5 gpu=0 type=8 data=1\n", "gpu index=3 mig=disabled\n", "garbage \xff\xfe = = =\n",
    };
    pthread_t threads[THREADS];
    init();
    for (long i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, busy, (void *)i) == 0);
    for (int i = 0; i < 200; i++)
        set_state(states[i % 6]);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}
