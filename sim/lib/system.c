// Functions of the system as a whole: versions, units (none), excluded GPUs (none), confidential computing (off).
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <string.h>

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER(c);
    return put_string(version, length, c.world->machine.driver);
}

// The library's own versions need no nvmlInit, so that a program can report them after a version mismatch.
NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    START(c);
    return put_string(version, length, c.world->machine.nvml);
}

static nvmlReturn_t put_cuda_version(const struct call *c, int *version)
{
    REQUIRE(version != NULL);
    *version = (int)c->world->machine.cuda;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    START(c);
    return put_cuda_version(&c, version);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    START(c);
    return put_cuda_version(&c, version);
}

// "r580_00" of driver 580.126.09.
NVML_API nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_t *info, unsigned int length)
{
    char branch[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
    ENTER(c);
    REQUIRE(info != NULL);
    TRY(check_version(info->version, nvmlSystemDriverBranchInfo_v1));
    int digits = (int)strcspn(c.world->machine.driver, ".");
    snprintf(branch, sizeof(branch), "r%.*s_00", digits > 8 ? 8 : digits, c.world->machine.driver);
    unsigned int room = sizeof(info->branch);
    return put_string(info->branch, length < room ? length : room, branch);
}

// The name of a process, from /proc as the real library has it.
NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    char path[64], text[256] = "";
    ENTER(c);
    REQUIRE(name != NULL && length > 0);
    snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return NVML_ERROR_NOT_FOUND;
    size_t got = fread(text, 1, sizeof(text) - 1, f);
    fclose(f);
    text[got] = '\0';
    if (strlen(text) >= length)
        text[length - 1] = '\0';
    return put_string(name, length, text);
}

NVML_API nvmlReturn_t nvmlSystemGetHicVersion(unsigned int *count, nvmlHwbcEntry_t *entries)
{
    ENTER(c);
    (void)entries;
    return put_uint(count, 0);
}

NVML_API nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
    ENTER(c);
    return put_uint(count, 0);
}

NVML_API nvmlReturn_t nvmlUnitGetHandleByIndex(unsigned int index, nvmlUnit_t *unit)
{
    ENTER(c);
    (void)index;
    (void)unit;
    return NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count)
{
    ENTER(c);
    return put_uint(count, 0);
}

NVML_API nvmlReturn_t nvmlGetExcludedDeviceInfoByIndex(unsigned int index, nvmlExcludedDeviceInfo_t *info)
{
    ENTER(c);
    (void)index;
    (void)info;
    return NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlSystemGetConfComputeCapabilities(nvmlConfComputeSystemCaps_t *capabilities)
{
    ENTER(c);
    REQUIRE(capabilities != NULL);
    memset(capabilities, 0, sizeof(*capabilities));
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetConfComputeState(nvmlConfComputeSystemState_t *state)
{
    ENTER(c);
    REQUIRE(state != NULL);
    memset(state, 0, sizeof(*state));
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetConfComputeSettings(nvmlSystemConfComputeSettings_t *settings)
{
    ENTER(c);
    REQUIRE(settings != NULL);
    TRY(check_version(settings->version, nvmlSystemConfComputeSettings_v1));
    memset(settings, 0, sizeof(*settings));
    settings->version = nvmlSystemConfComputeSettings_v1;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetConfComputeGpusReadyState(unsigned int *accepting)
{
    ENTER(c);
    return put_uint(accepting, 1);
}
