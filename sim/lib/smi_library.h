// The driver's library as nvidia-smi uses it: loading, and the errors of loading. A part of smi.c.
#ifndef GPU_SIM_SMI_LIBRARY_H
#define GPU_SIM_SMI_LIBRARY_H

#include "nvml.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { TEXT = 256 };

// The functions of the library in use. One that is missing, as in an older driver, returns FUNCTION_NOT_FOUND.
#define FUNCTIONS(X)                                                                                         \
    X(nvmlInit_v2, (void))                                                                                   \
    X(nvmlShutdown, (void))                                                                                  \
    X(nvmlSystemGetDriverVersion, (char *, unsigned int))                                                    \
    X(nvmlSystemGetCudaDriverVersion_v2, (int *))                                                            \
    X(nvmlSystemGetNVMLVersion, (char *, unsigned int))                                                      \
    X(nvmlDeviceGetCount_v2, (unsigned int *))                                                               \
    X(nvmlDeviceGetHandleByIndex_v2, (unsigned int, nvmlDevice_t *))                                         \
    X(nvmlDeviceGetName, (nvmlDevice_t, char *, unsigned int))                                               \
    X(nvmlDeviceGetUUID, (nvmlDevice_t, char *, unsigned int))                                               \
    X(nvmlDeviceGetSerial, (nvmlDevice_t, char *, unsigned int))                                             \
    X(nvmlDeviceGetVbiosVersion, (nvmlDevice_t, char *, unsigned int))                                       \
    X(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t, nvmlPciInfo_t *))                                              \
    X(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t, nvmlMemory_v2_t *))                                         \
    X(nvmlDeviceGetBAR1MemoryInfo, (nvmlDevice_t, nvmlBAR1Memory_t *))                                       \
    X(nvmlDeviceGetMigMode, (nvmlDevice_t, unsigned int *, unsigned int *))                                  \
    X(nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t, unsigned int *))                                        \
    X(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t, unsigned int, nvmlDevice_t *))                     \
    X(nvmlDeviceGetGpuInstanceId, (nvmlDevice_t, unsigned int *))                                            \
    X(nvmlDeviceGetComputeInstanceId, (nvmlDevice_t, unsigned int *))                                        \
    X(nvmlDeviceGetAttributes_v2, (nvmlDevice_t, nvmlDeviceAttributes_t *))                                  \
    X(nvmlDeviceGetPersistenceMode, (nvmlDevice_t, nvmlEnableState_t *))                                     \
    X(nvmlDeviceGetDisplayActive, (nvmlDevice_t, nvmlEnableState_t *))                                       \
    X(nvmlDeviceGetTotalEccErrors,                                                                           \
      (nvmlDevice_t, nvmlMemoryErrorType_t, nvmlEccCounterType_t, unsigned long long *))                     \
    X(nvmlDeviceGetFanSpeed, (nvmlDevice_t, unsigned int *))                                                 \
    X(nvmlDeviceGetTemperature, (nvmlDevice_t, nvmlTemperatureSensors_t, unsigned int *))                    \
    X(nvmlDeviceGetPerformanceState, (nvmlDevice_t, nvmlPstates_t *))                                        \
    X(nvmlDeviceGetPowerUsage, (nvmlDevice_t, unsigned int *))                                               \
    X(nvmlDeviceGetEnforcedPowerLimit, (nvmlDevice_t, unsigned int *))                                       \
    X(nvmlDeviceGetUtilizationRates, (nvmlDevice_t, nvmlUtilization_t *))                                    \
    X(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t, int *, int *))                                      \
    X(nvmlDeviceSetPersistenceMode, (nvmlDevice_t, nvmlEnableState_t))                                       \
    X(nvmlDeviceGetComputeMode, (nvmlDevice_t, nvmlComputeMode_t *))                                         \
    X(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *))          \
    X(nvmlDeviceGetGraphicsRunningProcesses_v3, (nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *))         \
    X(nvmlDeviceGetMPSComputeRunningProcesses_v3, (nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *))       \
    X(gpuSimGetBusId, (unsigned int, char *, unsigned int))                                                  \
    X(gpuSimReset, (unsigned int))

#define DECLARE(name, arguments) static nvmlReturn_t(*p_##name) arguments;
FUNCTIONS(DECLARE)
static const char *(*p_nvmlErrorString)(nvmlReturn_t);
#define CALL(name, ...) (p_##name != NULL ? p_##name(__VA_ARGS__) : NVML_ERROR_FUNCTION_NOT_FOUND)

static bool load(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == NULL)
        return false;
#define BIND(name, arguments) p_##name = (__typeof__(p_##name))dlsym(library, #name);
    FUNCTIONS(BIND)
    p_nvmlErrorString = (__typeof__(p_nvmlErrorString))dlsym(library, "nvmlErrorString");
    return p_nvmlErrorString != NULL;
}

// Prints the driver's part of NVML's version, and of that the first two numbers: "580.126" of "13.580.126.09".
static void print_library_version(const char *version)
{
    const char *driver = strchr(version, '.');
    driver = driver != NULL ? driver + 1 : version;
    size_t length = strcspn(driver, ".");
    if (driver[length] == '.')
        length += 1 + strcspn(driver + length + 1, ".");
    printf("NVML library version: %.*s\n", (int)length, driver);
}

static int initialize(void)
{
    char version[TEXT] = "";
    if (!load()) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA "
             "Display Driver is properly installed and present in your system.\n"
             "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n");
        return NVML_ERROR_LIBRARY_NOT_FOUND;
    }
    nvmlReturn_t result = CALL(nvmlInit_v2);
    if (result == NVML_SUCCESS)
        return 0;
    if (result == NVML_ERROR_DRIVER_NOT_LOADED) {
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
             "NVIDIA driver is installed and running.\n");
        return (int)result;
    }
    printf("Failed to initialize NVML: %s\n", p_nvmlErrorString(result));
    if (result == NVML_ERROR_LIB_RM_VERSION_MISMATCH && CALL(nvmlSystemGetNVMLVersion, version, TEXT) == NVML_SUCCESS)
        print_library_version(version);
    return result > 255 ? 255 : (int)result;
}

// The exit status of a result: its number, as in the real nvidia-smi.
static int exit_status(nvmlReturn_t result) { return result > 255 ? 255 : (int)result; }

#endif
