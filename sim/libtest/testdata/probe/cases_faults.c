// Injected faults, visibility, events and threads.
#define _GNU_SOURCE
#include "probe.h"
#include "cases.h"

#include <pthread.h>
#include <unistd.h>

void case_faults(void)
{
    char text[96];
    unsigned int number;
    init();
    nvmlDevice_t device = gpu(2);
    set_state("fault function=nvmlDeviceGetUUID gpu=2 return=999\n");
    WANT(NVML_ERROR_UNKNOWN, NV(nvmlDeviceGetUUID)(device, text, sizeof(text)));
    OK(NV(nvmlDeviceGetName)(device, text, sizeof(text)));
    OK(NV(nvmlDeviceGetUUID)(gpu(1), text, sizeof(text)));
    // A name without a version means all versions.
    set_state("fault function=nvmlDeviceGetCount return=23\n");
    WANT(NVML_ERROR_INSUFFICIENT_RESOURCES, NV(nvmlDeviceGetCount_v2)(&number));
    WANT(NVML_ERROR_INSUFFICIENT_RESOURCES, NV(nvmlDeviceGetCount)(&number));
    set_state("fault function=nvmlDeviceGetHandleByIndex_v2 gpu=1 return=4\n");
    WANT(NVML_ERROR_NO_PERMISSION, NV(nvmlDeviceGetHandleByIndex_v2)(1, &device));
    OK(NV(nvmlDeviceGetHandleByIndex)(1, &device));
    set_state("fault function=* gpu=0 return=16\n");
    WANT(NVML_ERROR_RESET_REQUIRED, NV(nvmlDeviceGetHandleByIndex_v2)(0, &device));
    WANT(NVML_ERROR_RESET_REQUIRED, NV(nvmlDeviceGetHandleByPciBusId_v2)("0000:1b:00.0", &device));
    OK(NV(nvmlDeviceGetHandleByIndex_v2)(1, &device));
    CHECK(gpu_count() == 4);
    // Stubs fail too, as do functions of the other GPU of a pair and of a MIG device's GPU.
    nvmlGpuTopologyLevel_t level;
    nvmlDevice_t part = mig(3, 0);
    set_state("fault function=nvmlDeviceGetTopologyCommonAncestor gpu=2 return=17\n"
              "fault function=nvmlDeviceSetDefaultFanSpeed gpu=1 return=8\n"
              "fault function=nvmlDeviceGetUUID gpu=3 return=21\n");
    WANT(NVML_ERROR_OPERATING_SYSTEM, NV(nvmlDeviceGetTopologyCommonAncestor)(gpu(1), gpu(2), &level));
    WANT(NVML_ERROR_INSUFFICIENT_POWER, NV(nvmlDeviceSetDefaultFanSpeed_v2)(gpu(1), 0));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceSetDefaultFanSpeed_v2)(gpu(0), 0));
    WANT(NVML_ERROR_NO_DATA, NV(nvmlDeviceGetUUID)(part, text, sizeof(text)));
    // A fault with a malformed or unknown GPU has no effect.
    set_state("fault function=* gpu=x return=999\nfault function=* gpu=128 return=999\nfault gpu=127 kind=lost\n");
    for (unsigned int i = 0; i < 4; i++)
        OK(NV(nvmlDeviceGetUUID)(gpu(i), text, sizeof(text)));
    set_state("fault function=nvmlInit return=999\n");
    WANT(NVML_ERROR_UNKNOWN, NV(nvmlInit_v2)());
    OK(NV(nvmlInitWithFlags)(0));
}

void case_lost(void)
{
    char text[96];
    unsigned int number;
    nvmlDevice_t other;
    nvmlGpuTopologyLevel_t level;
    init();
    nvmlDevice_t device = gpu(1), part = mig(3, 0);
    set_state("fault gpu=1 kind=lost\nfault gpu=3 kind=gone\n");
    CHECK(gpu_count() == 4);
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlDeviceGetHandleByIndex_v2)(1, &other));
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlDeviceGetHandleByUUID)("GPU-00000001-0000-4000-8000-000000000001", &other));
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlDeviceGetUUID)(device, text, sizeof(text)));
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlDeviceGetTopologyCommonAncestor)(gpu(0), device, &level));
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlDeviceSetPersistenceMode)(device, NVML_FEATURE_ENABLED));
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlDeviceGetUUID)(part, text, sizeof(text)));
    OK(NV(nvmlDeviceGetUUID)(gpu(2), text, sizeof(text)));
    // A GPU that is gone is not enumerated by the next process, or after the last shutdown.
    OK(NV(nvmlShutdown)());
    init();
    CHECK(gpu_count() == 3);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetUUID)(part, text, sizeof(text)));
    set_state(NULL); // comes back
    OK(NV(nvmlDeviceGetUUID)(device, text, sizeof(text)));
    OK(NV(nvmlShutdown)());
    init();
    CHECK(gpu_count() == 4);
    OK(NV(nvmlDeviceGetMinorNumber)(gpu(3), &number));
}

static volatile bool hanging_ended;

static void *hanging(void *slot)
{
    char text[96];
    nvmlDevice_t *device = slot;
    OK(NV(nvmlDeviceGetUUID)(*device, text, sizeof(text)));
    hanging_ended = true;
    return NULL;
}

void case_hang(void)
{
    char text[96];
    pthread_t thread;
    init();
    nvmlDevice_t device = gpu(2);
    set_state("fault function=nvmlDeviceGetUUID gpu=2 hang=1\n");
    CHECK(pthread_create(&thread, NULL, hanging, &device) == 0);
    usleep(50000);
    double start = seconds();
    for (int i = 0; i < 1000; i++) { // other GPUs, other functions, init and events go on
        OK(NV(nvmlDeviceGetUUID)(gpu(1), text, sizeof(text)));
        OK(NV(nvmlDeviceGetName)(device, text, sizeof(text)));
    }
    init();
    OK(NV(nvmlShutdown)());
    CHECK(seconds() - start < 20 && !hanging_ended);
    set_state("latency ns=1\n");
    CHECK(pthread_join(thread, NULL) == 0 && hanging_ended);
}

// Arguments: the expected result of nvmlInit, and of the other two functions.
void case_init_answers(void)
{
    int want = atoi(arguments[0]);
    unsigned int count;
    WANT(want, NV(nvmlInit_v2)());
    WANT(want, NV(nvmlInit)());
    WANT(want, NV(nvmlInitWithFlags)(0));
    WANT(want == 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED, NV(nvmlDeviceGetCount_v2)(&count));
}

// Arguments: the minors of the GPUs that must be enumerated, in order.
void case_enumerates(void)
{
    init();
    CHECK(gpu_count() == (unsigned int)argument_count);
    for (int i = 0; i < argument_count; i++) {
        unsigned int minor, index;
        OK(NV(nvmlDeviceGetMinorNumber)(gpu((unsigned int)i), &minor));
        OK(NV(nvmlDeviceGetIndex)(gpu((unsigned int)i), &index));
        CHECK(minor == (unsigned int)atoi(arguments[i]) && index == (unsigned int)i);
    }
}

void case_events(void)
{
    nvmlEventSet_t set, none = {NULL};
    nvmlEventData_t data;
    unsigned long long types;
    init();
    set_state("event seq=7 gpu=1 type=8 data=31\n"); // before the registration: not ours
    OK(NV(nvmlDeviceGetSupportedEventTypes)(gpu(1), &types));
    CHECK((types & nvmlEventTypeXidCriticalError) != 0);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceRegisterEvents)(gpu(1), nvmlEventTypeXidCriticalError, none));
    OK(NV(nvmlEventSetCreate)(&set));
    OK(NV(nvmlDeviceRegisterEvents)(gpu(1), nvmlEventTypeXidCriticalError, set));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceRegisterEvents)(gpu(1), 1ULL << 40, set));
    double start = seconds();
    WANT(NVML_ERROR_TIMEOUT, NV(nvmlEventSetWait_v2)(set, &data, 60));
    double took = seconds() - start;
    CHECK(took >= 0.060 && took < 1);
    WANT(NVML_ERROR_TIMEOUT, NV(nvmlEventSetWait_v2)(set, &data, 0));
    set_state("event seq=7 gpu=1 type=8 data=31\nevent seq=9 gpu=1 type=8 data=79\nevent seq=8 gpu=1 type=8 data=48\n"
              "event seq=10 gpu=2 type=8 data=1\nevent seq=11 gpu=1 type=16 data=2\n");
    OK(NV(nvmlEventSetWait_v2)(set, &data, 1000));
    CHECK(data.eventData == 48 && data.eventType == nvmlEventTypeXidCriticalError);
    CHECK(data.device.handle == gpu(1).handle && data.gpuInstanceId == 0xffffffff);
    OK(NV(nvmlEventSetWait_v2)(set, &data, 1000));
    CHECK(data.eventData == 79);
    WANT(NVML_ERROR_TIMEOUT, NV(nvmlEventSetWait_v2)(set, &data, 20));
    set_state("fault gpu=1 kind=lost\n");
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlEventSetWait_v2)(set, &data, 1000));
    OK(NV(nvmlEventSetFree)(set));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlEventSetWait_v2)(set, &data, 1000));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlEventSetFree)(set));
}

static void *waiting(void *set)
{
    nvmlEventData_t data;
    return (void *)(long)NV(nvmlEventSetWait_v2)(*(nvmlEventSet_t *)set, &data, 10000);
}

// A wait ends when its event comes, when its set is freed, and when the library is shut down.
void case_events_waiting(void)
{
    static const nvmlReturn_t want[] = {NVML_SUCCESS, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_UNINITIALIZED};
    for (int i = 0; i < 3; i++) {
        nvmlEventSet_t set;
        pthread_t thread;
        void *result;
        init();
        OK(NV(nvmlEventSetCreate)(&set));
        OK(NV(nvmlDeviceRegisterEvents)(gpu(0), nvmlEventTypeXidCriticalError, set));
        double start = seconds();
        CHECK(pthread_create(&thread, NULL, waiting, &set) == 0);
        usleep(30000);
        if (i == 0)
            set_state("event seq=1 gpu=0 type=8 data=79\n");
        if (i == 1)
            OK(NV(nvmlEventSetFree)(set));
        OK(i == 2 ? NV(nvmlShutdown)() : NVML_SUCCESS);
        CHECK(pthread_join(thread, &result) == 0);
        WANT(i == 2 && (long)result == NVML_ERROR_INVALID_ARGUMENT ? NVML_ERROR_INVALID_ARGUMENT : want[i],
             (long)result);
        CHECK(seconds() - start < 3);
        OK(i < 2 ? NV(nvmlShutdown)() : NVML_SUCCESS);
    }
}
