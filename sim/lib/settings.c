// Modes: as they are after boot with the persistence daemon, and their changes.
#define _GNU_SOURCE
#include "sim.h"

static nvmlReturn_t put_state(nvmlEnableState_t *to, nvmlEnableState_t state)
{
    REQUIRE(to != NULL);
    *to = state;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_state(mode, gpu_value(c.gpu, PERSISTENCE_MODE, 1) != 0 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED);
}

NVML_API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(mode == NVML_FEATURE_DISABLED || mode == NVML_FEATURE_ENABLED);
    if (mode == NVML_FEATURE_ENABLED)
        return value_unset(c.slot, PERSISTENCE_MODE);
    return value_set(c.slot, PERSISTENCE_MODE, 0);
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

NVML_API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(mode != NULL);
    *mode = (nvmlComputeMode_t)gpu_value(c.gpu, COMPUTE_MODE, NVML_COMPUTEMODE_DEFAULT);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)mode < NVML_COMPUTEMODE_COUNT);
    if (mode == NVML_COMPUTEMODE_DEFAULT)
        return value_unset(c.slot, COMPUTE_MODE);
    return value_set(c.slot, COMPUTE_MODE, mode);
}

NVML_API nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(mode != NULL);
    *mode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
    return NVML_SUCCESS;
}
