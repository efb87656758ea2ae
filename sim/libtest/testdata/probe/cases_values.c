// Topology, NVLink and readings.
#include "probe.h"
#include "cases.h"

#include <limits.h>

static int ancestor(unsigned int a, unsigned int b)
{
    nvmlGpuTopologyLevel_t level;
    OK(NV(nvmlDeviceGetTopologyCommonAncestor)(gpu(a), gpu(b), &level));
    return (int)level;
}

void case_topology(void)
{
    nvmlDevice_t near[4];
    unsigned int count = 0;
    unsigned long set[4];
    init();
    CHECK(ancestor(0, 1) == NVML_TOPOLOGY_SINGLE && ancestor(1, 0) == NVML_TOPOLOGY_SINGLE);
    CHECK(ancestor(0, 2) == NVML_TOPOLOGY_NODE && ancestor(3, 0) == NVML_TOPOLOGY_SYSTEM);
    OK(NV(nvmlDeviceGetTopologyNearestGpus)(gpu(0), NVML_TOPOLOGY_NODE, &count, NULL));
    CHECK(count == 2);
    OK(NV(nvmlDeviceGetTopologyNearestGpus)(gpu(0), NVML_TOPOLOGY_NODE, &count, near));
    CHECK(near[0].handle == gpu(1).handle && near[1].handle == gpu(2).handle);
    count = 1;
    OK(NV(nvmlDeviceGetTopologyNearestGpus)(gpu(0), NVML_TOPOLOGY_SYSTEM, &count, near));
    CHECK(count == 1);
    OK(NV(nvmlDeviceGetMemoryAffinity)(gpu(3), 4, set, NVML_AFFINITY_SCOPE_NODE));
    CHECK(set[0] == 1UL << 1 && set[1] == 0);
    OK(NV(nvmlDeviceGetCpuAffinity)(gpu(3), 4, set));
    CHECK(set[0] == 0xffUL << 56 && set[1] == (1UL << 48) - 1);
    unsigned long *one = malloc(sizeof(*one));
    OK(NV(nvmlDeviceGetCpuAffinity)(gpu(3), 1, one));
    free(one);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetCpuAffinity)(gpu(3), 0, set));
}

void case_nvlink(void)
{
    nvmlEnableState_t state;
    nvmlPciInfo_t pci;
    nvmlIntNvLinkDeviceType_t type;
    nvmlGpuP2PStatus_t status;
    unsigned int number;
    init();
    OK(NV(nvmlDeviceGetNvLinkState)(gpu(0), 0, &state));
    CHECK(state == NVML_FEATURE_ENABLED);
    OK(NV(nvmlDeviceGetNvLinkState)(gpu(0), 1, &state));
    CHECK(state == NVML_FEATURE_DISABLED);
    OK(NV(nvmlDeviceGetNvLinkState)(gpu(0), 2, &state));
    CHECK(state == NVML_FEATURE_ENABLED);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetNvLinkState)(gpu(0), 3, &state));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetNvLinkState)(gpu(0), UINT_MAX, &state));
    OK(NV(nvmlDeviceGetNvLinkVersion)(gpu(0), 0, &number));
    CHECK(number == NVML_NVLINK_VERSION_4_0);
    OK(NV(nvmlDeviceGetNvLinkRemotePciInfo_v2)(gpu(0), 2, &pci));
    SAME("00000000:C3:00.0", pci.busId);
    OK(NV(nvmlDeviceGetNvLinkRemoteDeviceType)(gpu(0), 0, &type));
    CHECK(type == NVML_NVLINK_DEVICE_TYPE_SWITCH);
    OK(NV(nvmlDeviceGetNvLinkCapability)(gpu(0), 0, NVML_NVLINK_CAP_P2P_SUPPORTED, &number));
    CHECK(number == 1);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetNvLinkRemotePciInfo_v2)(gpu(0), 1, &pci));
    OK(NV(nvmlDeviceGetP2PStatus)(gpu(0), gpu(3), NVML_P2P_CAPS_INDEX_NVLINK, &status));
    CHECK(status == NVML_P2P_STATUS_OK);
    OK(NV(nvmlDeviceGetP2PStatus)(gpu(0), gpu(2), NVML_P2P_CAPS_INDEX_NVLINK, &status));
    CHECK(status == NVML_P2P_STATUS_NOT_SUPPORTED); // GPU 2 has no links

    nvmlGpuFabricInfo_t fabric;
    OK(NV(nvmlDeviceGetGpuFabricInfo)(gpu(0), &fabric));
    CHECK(fabric.state == NVML_GPU_FABRIC_STATE_COMPLETED && fabric.status == NVML_SUCCESS);
    nvmlGpuFabricInfo_v2_t *v2 = malloc(sizeof(*v2));
    v2->version = nvmlGpuFabricInfo_v2;
    OK(NV(nvmlDeviceGetGpuFabricInfoV)(gpu(0), (nvmlGpuFabricInfoV_t *)v2));
    CHECK(v2->version == nvmlGpuFabricInfo_v2 && v2->state == NVML_GPU_FABRIC_STATE_COMPLETED);
    v2->version = 99;
    WANT(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NV(nvmlDeviceGetGpuFabricInfoV)(gpu(0), (nvmlGpuFabricInfoV_t *)v2));
    free(v2);
}

void case_no_nvlink(void)
{
    nvmlEnableState_t state;
    nvmlGpuFabricInfo_t fabric;
    init();
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetNvLinkState)(gpu(2), 0, &state));
    OK(NV(nvmlDeviceGetGpuFabricInfo)(gpu(2), &fabric));
    CHECK(fabric.state == NVML_GPU_FABRIC_STATE_NOT_SUPPORTED);
}

void case_telemetry(void)
{
    unsigned int a, b, c, d;
    unsigned long long big;
    nvmlUtilization_t busy;
    nvmlEnableState_t on, off;
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    init();
    nvmlDevice_t device = gpu(0);
    OK(NV(nvmlDeviceGetTemperature)(device, NVML_TEMPERATURE_GPU, &a));
    CHECK(a > 10 && a < 60);
    OK(NV(nvmlDeviceGetPowerUsage)(device, &a));
    OK(NV(nvmlDeviceGetEnforcedPowerLimit)(device, &b));
    OK(NV(nvmlDeviceGetPowerManagementLimitConstraints)(device, &c, &d));
    CHECK(a < b && b == 700000 && c < d && d == b);
    OK(NV(nvmlDeviceGetClockInfo)(device, NVML_CLOCK_SM, &a));
    OK(NV(nvmlDeviceGetMaxClockInfo)(device, NVML_CLOCK_SM, &b));
    CHECK(a < b);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetClockInfo)(device, NVML_CLOCK_COUNT, &a));
    unsigned int clocks[512], count = 1;
    WANT(NVML_ERROR_INSUFFICIENT_SIZE, NV(nvmlDeviceGetSupportedGraphicsClocks)(device, 2619, &count, clocks));
    CHECK(count > 1 && count < 512);
    OK(NV(nvmlDeviceGetSupportedGraphicsClocks)(device, 2619, &count, clocks));
    CHECK(clocks[0] == b && clocks[count - 1] < clocks[0]);
    OK(NV(nvmlDeviceGetUtilizationRates)(device, &busy));
    CHECK(busy.gpu == 0);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetUtilizationRates)(gpu(3), &busy)); // MIG is on
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetFanSpeed)(device, &a));
    OK(NV(nvmlDeviceGetEccMode)(device, &on, &off));
    CHECK(on == NVML_FEATURE_ENABLED);
    OK(NV(nvmlDeviceGetTotalEccErrors)(device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC, &big));
    CHECK(big == 0);
    OK(NV(nvmlDeviceGetRemappedRows)(device, &a, &b, &c, &d));
    CHECK(a == 0 && b == 0 && c == 0 && d == 0);
    WANT(NVML_ERROR_NOT_SUPPORTED,
         NV(nvmlDeviceGetRetiredPages)(device, NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR, &a, NULL));
    OK(NV(nvmlDeviceGetMemoryInfo_v2)(device, &memory));
    CHECK(memory.total == 85520809984 && memory.reserved + memory.free + memory.used == memory.total);
    count = 5;
    OK(NV(nvmlDeviceGetComputeRunningProcesses_v3)(device, &count, NULL));
    CHECK(count == 0);
    OK(NV(nvmlDeviceGetMaxPcieLinkGeneration)(device, &a));
    CHECK(a == 5);
    nvmlDriverModel_t model;
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetDriverModel_v2)(device, &model, &model));
}

void case_field_values(void)
{
    nvmlFieldValue_t f[] = {
        {.fieldId = NVML_FI_DEV_NVLINK_LINK_COUNT},
        {.fieldId = NVML_FI_DEV_NVLINK_GET_STATE, .scopeId = 1},
        {.fieldId = NVML_FI_DEV_NVLINK_GET_STATE, .scopeId = 2},
        {.fieldId = NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON},
        {.fieldId = NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT},
        {.fieldId = NVML_FI_DEV_ECC_DBE_VOL_TOTAL},
        {.fieldId = NVML_FI_DEV_REMAPPED_PENDING},
        {.fieldId = NVML_FI_DEV_POWER_INSTANT},
        {.fieldId = NVML_FI_DEV_GET_GPU_RECOVERY_ACTION},
        {.fieldId = NVML_FI_DEV_NVLINK_GET_STATE, .scopeId = 0xffffffff},
        {.fieldId = NVML_FI_DEV_RETIRED_DBE},
        {.fieldId = 0},
        {.fieldId = NVML_FI_MAX},
    };
    static const struct { nvmlReturn_t result; unsigned int value; } want[] = {
        {NVML_SUCCESS, 3}, {NVML_SUCCESS, 0}, {NVML_SUCCESS, 1}, {NVML_SUCCESS, 26562}, {NVML_SUCCESS, 2},
        {NVML_SUCCESS, 0}, {NVML_SUCCESS, 0}, {NVML_SUCCESS, 71000}, {NVML_SUCCESS, 0},
        {NVML_ERROR_INVALID_ARGUMENT, 0}, {NVML_ERROR_NOT_SUPPORTED, 0}, {NVML_ERROR_INVALID_ARGUMENT, 0},
        {NVML_ERROR_INVALID_ARGUMENT, 0},
    };
    int count = sizeof(f) / sizeof(f[0]);
    init();
    OK(NV(nvmlDeviceGetFieldValues)(gpu(0), count, f));
    for (int i = 0; i < count; i++) {
        fprintf(stderr, "field %u: %d, %u\n", f[i].fieldId, (int)f[i].nvmlReturn, f[i].value.uiVal);
        CHECK(f[i].nvmlReturn == want[i].result && f[i].value.uiVal == want[i].value);
        CHECK(f[i].timestamp > 0);
    }
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetFieldValues)(gpu(0), 0, f));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetFieldValues)(gpu(0), -1, f));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetFieldValues)(gpu(0), 1, NULL));
}
