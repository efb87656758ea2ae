// Event sets and system event sets: what they return, when a wait ends, what they cost.
#define _GNU_SOURCE
#include "probe.h"
#include "cases.h"

#include <pthread.h>
#include <unistd.h>

static nvmlEventSet_t set_of(unsigned int index, unsigned long long types)
{
    nvmlEventSet_t set;
    OK(NV(nvmlEventSetCreate)(&set));
    OK(NV(nvmlDeviceRegisterEvents)(gpu(index), types, set));
    return set;
}

static nvmlEventData_t next_event(nvmlEventSet_t set)
{
    nvmlEventData_t data;
    OK(NV(nvmlEventSetWait_v2)(set, &data, 1000));
    return data;
}

void case_event_data(void)
{
    unsigned long long types;
    nvmlEventData_t data;
    init();
    OK(NV(nvmlDeviceGetSupportedEventTypes)(gpu(3), &types));
    CHECK((types & nvmlEventTypeAll) == (nvmlEventTypeAll & ~(unsigned long long)nvmlEventTypePowerSourceChange));
    OK(NV(nvmlDeviceGetSupportedEventTypes)(gpu(2), &types));
    CHECK((types & nvmlEventMigConfigChange) == 0 && (types & nvmlEventTypeGpuRecoveryAction) != 0);
    nvmlEventSet_t set = set_of(3, types | nvmlEventMigConfigChange);
    set_state("event seq=1 gpu=3 type=8 data=31 gi=2 ci=1\nevent seq=2 gpu=3 type=8 data=79\n"
              "event seq=3 gpu=3 type=32768 data=1\nevent seq=4 gpu=3 type=16384\nevent seq=5 gpu=3 type=256\n"
              "event seq=6 gpu=3 type=2\nevent seq=7 gpu=3 type=2 system=1\n");
    data = next_event(set);
    CHECK(data.device.handle == gpu(3).handle && data.eventData == 31);
    CHECK(data.gpuInstanceId == 2 && data.computeInstanceId == 1);
    data = next_event(set);
    CHECK(data.eventData == 79 && data.gpuInstanceId == 0xffffffff && data.computeInstanceId == 0xffffffff);
    data = next_event(set);
    CHECK(data.eventType == nvmlEventTypeGpuRecoveryAction && data.eventData == 1);
    CHECK(next_event(set).eventType == nvmlEventTypeGpuUnavailableError);
    CHECK(next_event(set).eventType == nvmlEventMigConfigChange);
    CHECK(next_event(set).eventType == nvmlEventTypeDoubleBitEccError);
    WANT(NVML_ERROR_TIMEOUT, NV(nvmlEventSetWait_v2)(set, &data, 0)); // system events are not among them
    nvmlEventSet_t later = set_of(3, types);
    WANT(NVML_ERROR_TIMEOUT, NV(nvmlEventSetWait_v2)(later, &data, 0)); // events of the past are not replayed
    set_state("machine driver=570.86.10\n");
    OK(NV(nvmlDeviceGetSupportedEventTypes)(gpu(3), &types));
    CHECK((types & nvmlEventTypeXidCriticalError) != 0 && (types & nvmlEventTypeGpuRecoveryAction) == 0);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceRegisterEvents)(gpu(3), nvmlEventTypeAll, later));
}

// A lost GPU makes the wait return at once, again and again, and hides the events of the others in its set.
void case_lost_in_a_set(void)
{
    nvmlEventData_t data;
    init();
    nvmlEventSet_t both = set_of(0, nvmlEventTypeXidCriticalError), other = set_of(0, nvmlEventTypeXidCriticalError);
    nvmlDevice_t lost = gpu(1);
    OK(NV(nvmlDeviceRegisterEvents)(lost, nvmlEventTypeXidCriticalError, both));
    set_state("fault gpu=1 kind=lost\nevent seq=1 gpu=0 type=8 data=13\n");
    double start = seconds();
    for (int i = 0; i < 100; i++)
        WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlEventSetWait_v2)(both, &data, 10000));
    CHECK(seconds() - start < 5);
    CHECK(next_event(other).eventData == 13);
    WANT(NVML_ERROR_GPU_IS_LOST, NV(nvmlDeviceRegisterEvents)(lost, nvmlEventTypeXidCriticalError, other));
    set_state("event seq=1 gpu=0 type=8 data=13\n");
    CHECK(next_event(both).eventData == 13);
}

static nvmlReturn_t wait_for_system(nvmlSystemEventSet_t set, nvmlSystemEventData_v1_t *data, unsigned int size,
                                    unsigned int *count, unsigned int timeout)
{
    nvmlSystemEventSetWaitRequest_t request = {
        .version = nvmlSystemEventSetWaitRequest_v1, .timeoutms = timeout, .set = set, .data = data, .dataSize = size};
    nvmlReturn_t result = NV(nvmlSystemEventSetWait)(&request);
    *count = request.numEvent;
    return result;
}

void case_system_events(void)
{
    nvmlSystemEventSetCreateRequest_t create = {.version = nvmlSystemEventSetCreateRequest_v1};
    nvmlSystemEventData_v1_t data[2];
    unsigned int count;
    WANT(NVML_ERROR_UNINITIALIZED, NV(nvmlSystemEventSetCreate)(&create));
    init();
    set_state("event seq=1 gpu=1 type=1 system=1\n");
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlSystemEventSetCreate)(NULL));
    OK(NV(nvmlSystemEventSetCreate)(&create));
    nvmlSystemRegisterEventRequest_t both = {
        .version = nvmlSystemRegisterEventRequest_v1,
        .eventTypes = nvmlSystemEventTypeGpuDriverBind | nvmlSystemEventTypeGpuDriverUnbind,
        .set = create.set};
    OK(NV(nvmlSystemRegisterEvents)(&both));
    both.eventTypes = 4;
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlSystemRegisterEvents)(&both));
    both.version = 1;
    WANT(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NV(nvmlSystemRegisterEvents)(&both));
    double start = seconds();
    WANT(NVML_ERROR_TIMEOUT, wait_for_system(create.set, data, 2, &count, 60));
    CHECK(seconds() - start >= 0.060 && count == 0);
    set_state("event seq=2 gpu=1 type=1 system=1\nevent seq=3 gpu=3 type=2 system=1\nevent seq=4 gpu=1 type=2 system=1\n"
              "event seq=5 gpu=1 type=2\n");
    OK(wait_for_system(create.set, data, 2, &count, 1000));
    CHECK(count == 2 && data[0].eventType == nvmlSystemEventTypeGpuDriverUnbind && data[0].gpuId == 0x4300);
    CHECK(data[1].eventType == nvmlSystemEventTypeGpuDriverBind && data[1].gpuId == 0xdf00);
    OK(wait_for_system(create.set, data, 2, &count, 1000));
    CHECK(count == 1 && data[0].gpuId == 0x4300);
    WANT(NVML_ERROR_INVALID_ARGUMENT, wait_for_system(create.set, data, 0, &count, 0));
    nvmlSystemEventSetFreeRequest_t release = {.version = nvmlSystemEventSetFreeRequest_v1, .set = create.set};
    OK(NV(nvmlSystemEventSetFree)(&release));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlSystemEventSetFree)(&release));
    WANT(NVML_ERROR_INVALID_ARGUMENT, wait_for_system(create.set, data, 2, &count, 0));
}
