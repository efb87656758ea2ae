// The devices that a part of MPS may use, from the driver's library.
#ifndef GPU_SIM_MPS_DEVICES_H
#define GPU_SIM_MPS_DEVICES_H

#include "nvml.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>

enum { MPS_UUID = 96 };

struct mps_nvml {
    nvmlReturn_t (*init)(void);
    nvmlReturn_t (*by_uuid)(const char *, nvmlDevice_t *);
    nvmlReturn_t (*uuid)(nvmlDevice_t, char *, unsigned int);
};

// The driver's library, initialized once. NULL: no usable driver.
static inline const struct mps_nvml *mps_library(void)
{
    static struct mps_nvml nvml;
    if (nvml.init != NULL)
        return &nvml;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == NULL)
        return NULL;
#define MPS_BIND(field, symbol) nvml.field = (__typeof__(nvml.field))dlsym(library, symbol)
    MPS_BIND(by_uuid, "nvmlDeviceGetHandleByUUID");
    MPS_BIND(uuid, "nvmlDeviceGetUUID");
    MPS_BIND(init, "nvmlInit_v2");
#undef MPS_BIND
    if (nvml.by_uuid == NULL || nvml.uuid == NULL || nvml.init == NULL || nvml.init() != NVML_SUCCESS) {
        nvml.init = NULL;
        return NULL;
    }
    return &nvml;
}

static inline bool mps_device_exists(const char *uuid)
{
    nvmlDevice_t device;
    const struct mps_nvml *nvml = mps_library();
    return nvml != NULL && nvml->by_uuid(uuid, &device) == NVML_SUCCESS;
}

#endif
