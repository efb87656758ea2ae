// Modes and settings as they are after boot with the persistence daemon, and processes, of which there are none.
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

static nvmlReturn_t put_state(nvmlEnableState_t *to, nvmlEnableState_t state)
{
    REQUIRE(to != NULL);
    *to = state;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_state(mode, NVML_FEATURE_ENABLED);
}

NVML_API nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_state(mode, gpu_is_data_center(c.gpu) ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED);
}

NVML_API nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, nvmlEnableState_t *active)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_state(active, NVML_FEATURE_DISABLED);
}

// The file with the compute mode of a GPU, as a digit.
static bool compute_mode_file(char *to, size_t size, const struct gpu *g)
{
    char name[2 * TEXT_MAX];
    snprintf(name, sizeof(name), "/run/gpu-sim/compute-mode.%s", g->uuid);
    return node_path(to, size, name);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    char path[PATH_MAX], digit;
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(mode != NULL);
    *mode = NVML_COMPUTEMODE_DEFAULT;
    int fd = compute_mode_file(path, sizeof(path), c.gpu) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0 && read(fd, &digit, 1) == 1 && digit > '0' && digit < '0' + NVML_COMPUTEMODE_COUNT)
        *mode = (nvmlComputeMode_t)(digit - '0');
    if (fd >= 0)
        close(fd);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
    char path[PATH_MAX];
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)mode < NVML_COMPUTEMODE_COUNT);
    char digit = (char)('0' + mode);
    bool has_file = compute_mode_file(path, sizeof(path), c.gpu);
    int fd = has_file ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
    if (fd < 0)
        return NVML_ERROR_NO_PERMISSION;
    bool written = write(fd, &digit, 1) == 1;
    close(fd);
    return written ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

NVML_API nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(mode != NULL);
    *mode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_state(mode, NVML_FEATURE_DISABLED);
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned int *size)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(size, 4000);
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    ENTER_DEVICE(c, device, FEATURE);
    (void)pids;
    return put_uint(count, 0);
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(stats != NULL);
    (void)pid;
    return NVML_ERROR_NOT_SUPPORTED; // as while accounting is off
}

// All lists of processes, whose versions differ in the element. They are empty.
#define PROCESS_LIST(name, element)                                                            \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, element *list)        \
    {                                                                                          \
        ENTER_DEVICE(c, device, EITHER);                                                       \
        (void)list;                                                                            \
        return put_uint(count, 0);                                                             \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)
