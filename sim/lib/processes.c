// Processes with memory on a GPU, which the state file lists, and accounting.
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Whether a process runs that has the pid and was started then. A zombie does not: its memory on the GPU is free.
static bool process_runs(unsigned int pid, uint64_t start)
{
    char path[64], text[1024];
    snprintf(path, sizeof(path), "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (size <= 0)
        return false;
    text[size] = '\0';
    const char *field = strrchr(text, ')'); // the name before it may have spaces
    if (field == NULL || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X')
        return false;
    for (int i = 2; i < 22 && field != NULL; i++)
        field = strchr(field + 1, ' ');
    return field != NULL && (start == 0 || strtoull(field + 1, NULL, 10) == start);
}

// Whether a process is on the GPU of a call, or on its MIG device.
static bool is_on(const struct call *c, const struct process *p)
{
    if (p->gpu != c->slot)
        return false;
    return c->mig == NULL || (p->gi == c->mig->gi && (p->ci == UINT32_MAX || p->ci == c->mig->ci));
}

// The memory of all processes, in bytes. Compute instances share the memory of their GPU instance.
uint64_t process_memory(const struct call *c)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < c->world->process_count; i++) {
        const struct process *p = &c->world->processes[i];
        if (p->gpu == c->slot && (c->mig == NULL || p->gi == c->mig->gi) && process_runs(p->pid, p->start))
            sum += p->memory;
    }
    return sum;
}

bool gpu_has_process(const struct world *w, unsigned int slot)
{
    for (size_t i = 0; i < w->process_count; i++)
        if (w->processes[i].gpu == slot && process_runs(w->processes[i].pid, w->processes[i].start))
            return true;
    return false;
}

// Copies the processes of a type. Each version of the element is a beginning of the latest one.
static nvmlReturn_t put_processes(const struct call *c, enum process_type type, unsigned int *count, void *list,
                                  size_t element)
{
    REQUIRE(count != NULL);
    unsigned int found = 0, room = list != NULL ? *count : 0;
    for (size_t i = 0; i < c->world->process_count; i++) {
        const struct process *p = &c->world->processes[i];
        if (p->type != type || !is_on(c, p) || !process_runs(p->pid, p->start))
            continue;
        nvmlProcessInfo_t info;
        memset(&info, 0, sizeof(info));
        info.pid = p->pid;
        info.usedGpuMemory = p->memory;
        info.gpuInstanceId = p->gi;
        info.computeInstanceId = p->ci;
        if (found < room)
            memcpy((char *)list + found * element, &info, element);
        found++;
    }
    *count = found;
    return found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

// All lists of processes, whose versions differ in the element.
#define PROCESS_LIST(name, element, type)                                                      \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, element *list)        \
    {                                                                                          \
        ENTER_DEVICE(c, device, EITHER);                                                       \
        return put_processes(&c, type, count, list, sizeof(element));                          \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, PROCESS_COMPUTE)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, PROCESS_COMPUTE)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, PROCESS_COMPUTE)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, PROCESS_GRAPHICS)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, PROCESS_GRAPHICS)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, PROCESS_GRAPHICS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, PROCESS_MPS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, PROCESS_MPS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, PROCESS_MPS)

NVML_API nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(mode != NULL);
    *mode = gpu_value(c.gpu, ACCOUNTING_MODE, 0) != 0 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(mode == NVML_FEATURE_DISABLED || mode == NVML_FEATURE_ENABLED);
    if (mode == NVML_FEATURE_ENABLED)
        return value_set(c.slot, ACCOUNTING_MODE, 1);
    TRY(accounts_clear(c.slot));
    return value_unset(c.slot, ACCOUNTING_MODE);
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned int *size)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(size, 4000);
}

NVML_API nvmlReturn_t nvmlDeviceClearAccountingPids(nvmlDevice_t device)
{
    ENTER_DEVICE(c, device, FEATURE);
    return accounts_clear(c.slot);
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(count != NULL);
    unsigned int found = 0, room = pids != NULL ? *count : 0;
    for (size_t i = 0; i < c.world->account_count; i++) {
        if (c.world->accounts[i].gpu != c.slot)
            continue;
        if (found < room)
            pids[found] = c.world->accounts[i].pid;
        found++;
    }
    *count = found;
    return found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(stats != NULL);
    if (gpu_value(c.gpu, ACCOUNTING_MODE, 0) == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    for (size_t i = 0; i < c.world->account_count; i++) {
        const struct process *p = &c.world->accounts[i];
        if (p->gpu != c.slot || p->pid != pid)
            continue;
        memset(stats, 0, sizeof(*stats));
        stats->maxMemoryUsage = p->memory;
        stats->isRunning = process_runs(p->pid, p->start);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}
