// Initialization and shutdown, and the identity of devices. The machine: testMachine in machine_test.go.
#include "probe.h"
#include "cases.h"

void case_lifecycle(void)
{
    unsigned int count;
    nvmlDevice_t device;
    WANT(NVML_ERROR_UNINITIALIZED, NV(nvmlDeviceGetCount_v2)(&count));
    WANT(NVML_ERROR_UNINITIALIZED, NV(nvmlDeviceGetHandleByIndex_v2)(0, &device));
    WANT(NVML_ERROR_UNINITIALIZED, NV(nvmlShutdown)());
    init();
    OK(NV(nvmlInit)());
    OK(NV(nvmlInitWithFlags)(NVML_INIT_FLAG_NO_GPUS));
    OK(NV(nvmlShutdown)());
    OK(NV(nvmlShutdown)());
    OK(NV(nvmlDeviceGetCount_v2)(&count));
    OK(NV(nvmlShutdown)());
    WANT(NVML_ERROR_UNINITIALIZED, NV(nvmlDeviceGetCount_v2)(&count));
    WANT(NVML_ERROR_UNINITIALIZED, NV(nvmlShutdown)());
    init();
    CHECK(gpu_count() == 4);
}

// Opening and closing the library repeatedly leaks no memory, by the leak checker.
void case_reload(void)
{
    for (int i = 0; i < 5; i++) {
        char text[96];
        init();
        OK(NV(nvmlDeviceGetUUID)(gpu(0), text, sizeof(text)));
        set_state(i % 2 != 0 ? "latency ns=1\n" : NULL);
        OK(NV(nvmlDeviceGetUUID)(gpu(0), text, sizeof(text)));
        OK(NV(nvmlShutdown)());
        reload();
    }
}

void case_strings(void)
{
    SAME("Success", NV(nvmlErrorString)(NVML_SUCCESS));
    SAME("GPU is lost", NV(nvmlErrorString)(NVML_ERROR_GPU_IS_LOST));
    SAME("Driver/library version mismatch", NV(nvmlErrorString)(NVML_ERROR_LIB_RM_VERSION_MISMATCH));
    for (int code = -5; code < 2000; code++)
        CHECK(strlen(NV(nvmlErrorString)((nvmlReturn_t)code)) > 0);
    SAME("Unknown Error", NV(nvmlErrorString)((nvmlReturn_t)1234));

    char text[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE];
    int cuda = 0;
    OK(NV(nvmlSystemGetNVMLVersion)(text, sizeof(text))); // the library's own versions need no init
    SAME("13.580.126.09", text);
    OK(NV(nvmlSystemGetCudaDriverVersion)(&cuda));
    CHECK(cuda == 13000);
    WANT(NVML_ERROR_UNINITIALIZED, NV(nvmlSystemGetDriverVersion)(text, sizeof(text)));
    init();
    OK(NV(nvmlSystemGetDriverVersion)(text, sizeof(text)));
    SAME("580.126.09", text);
    OK(NV(nvmlSystemGetCudaDriverVersion_v2)(&cuda));
    CHECK(cuda == 13000);
    // Whole or not at all, and never past the end.
    char *small = malloc(10), *exact = malloc(11);
    WANT(NVML_ERROR_INSUFFICIENT_SIZE, NV(nvmlSystemGetDriverVersion)(small, 10));
    WANT(NVML_ERROR_INSUFFICIENT_SIZE, NV(nvmlSystemGetDriverVersion)(small, 0));
    OK(NV(nvmlSystemGetDriverVersion)(exact, 11));
    SAME("580.126.09", exact);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlSystemGetDriverVersion)(NULL, 80));
    free(small);
    free(exact);
    nvmlSystemDriverBranchInfo_t branch = {.version = nvmlSystemDriverBranchInfo_v1};
    OK(NV(nvmlSystemGetDriverBranch)(&branch, sizeof(branch.branch)));
    SAME("r580_00", branch.branch);
}

static void check_pci(nvmlDevice_t device)
{
    nvmlPciInfo_t pci;
    OK(NV(nvmlDeviceGetPciInfo_v3)(device, &pci));
    SAME("00000000:43:00.0", pci.busId);
    SAME("0000:43:00.0", pci.busIdLegacy);
    CHECK(pci.domain == 0 && pci.bus == 0x43 && pci.device == 0);
    CHECK(pci.pciDeviceId == 0x233010de && pci.pciSubSystemId == 0x16c110de);
    // Callers of the old versions have smaller structures; nothing after them may be touched.
    char *v2 = malloc(offsetof(nvmlPciInfo_t, busId)), *v1 = malloc(offsetof(nvmlPciInfo_t, pciSubSystemId));
    OK(((nvmlReturn_t(*)(nvmlDevice_t, void *))symbol("nvmlDeviceGetPciInfo_v2"))(device, v2));
    SAME("0000:43:00.0", v2);
    OK(((nvmlReturn_t(*)(nvmlDevice_t, void *))symbol("nvmlDeviceGetPciInfo"))(device, v1));
    SAME("0000:43:00.0", v1);
    free(v1);
    free(v2);
    nvmlPciInfoExt_t ext = {.version = nvmlPciInfoExt_v1};
    OK(NV(nvmlDeviceGetPciInfoExt)(device, &ext));
    SAME("00000000:43:00.0", ext.busId);
    CHECK(ext.baseClass == 3 && ext.subClass == 2);
    ext.version = 17;
    WANT(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NV(nvmlDeviceGetPciInfoExt)(device, &ext));
}

void case_identity(void)
{
    char text[96];
    unsigned int number;
    init();
    nvmlDevice_t device = gpu(1);
    OK(NV(nvmlDeviceGetUUID)(device, text, sizeof(text)));
    SAME("GPU-00000001-0000-4000-8000-000000000001", text);
    OK(NV(nvmlDeviceGetName)(device, text, sizeof(text)));
    SAME("NVIDIA H100 80GB HBM3", text);
    OK(NV(nvmlDeviceGetSerial)(device, text, sizeof(text)));
    SAME("1650000001", text);
    OK(NV(nvmlDeviceGetBoardPartNumber)(device, text, sizeof(text)));
    SAME("692-2G520-0200-000", text);
    OK(NV(nvmlDeviceGetVbiosVersion)(device, text, sizeof(text)));
    SAME("96.00.74.00.01", text);
    OK(NV(nvmlDeviceGetGspFirmwareVersion)(device, text));
    SAME("580.126.09", text);
    OK(NV(nvmlDeviceGetInforomImageVersion)(device, text, sizeof(text)));
    OK(NV(nvmlDeviceGetMinorNumber)(device, &number));
    CHECK(number == 5); // not the index
    OK(NV(nvmlDeviceGetIndex)(device, &number));
    CHECK(number == 1);
    check_pci(device);
}

void case_numbers(void)
{
    unsigned int number;
    int major, minor, same;
    nvmlBrandType_t brand;
    init();
    nvmlDevice_t device = gpu(0);
    OK(NV(nvmlDeviceGetBrand)(device, &brand));
    CHECK(brand == NVML_BRAND_NVIDIA);
    OK(NV(nvmlDeviceGetArchitecture)(device, &number));
    CHECK(number == NVML_DEVICE_ARCH_HOPPER);
    OK(NV(nvmlDeviceGetCudaComputeCapability)(device, &major, &minor));
    CHECK(major == 9 && minor == 0);
    OK(NV(nvmlDeviceGetNumGpuCores)(device, &number));
    CHECK(number == 132 * 128);
    OK(NV(nvmlDeviceGetBoardId)(device, &number));
    CHECK(number == 0x1b00);
    OK(NV(nvmlDeviceGetMultiGpuBoard)(device, &number));
    CHECK(number == 0);
    OK(NV(nvmlDeviceOnSameBoard)(device, gpu(1), &same));
    CHECK(same == 0);
    OK(NV(nvmlUnitGetCount)(&number));
    CHECK(number == 0);
    OK(NV(nvmlGetExcludedDeviceCount)(&number));
    CHECK(number == 0);
    nvmlConfComputeSystemState_t state;
    OK(NV(nvmlSystemGetConfComputeState)(&state));
    CHECK(state.ccFeature == NVML_CC_SYSTEM_FEATURE_DISABLED);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetNumaNodeId)(device, &number));
}

static void want_index(unsigned int want, nvmlDevice_t device)
{
    unsigned int index;
    OK(NV(nvmlDeviceGetIndex)(device, &index));
    CHECK(index == want);
}

void case_lookup(void)
{
    nvmlDevice_t device;
    init();
    OK(NV(nvmlDeviceGetHandleByUUID)("GPU-00000002-0000-4000-8000-000000000002", &device));
    want_index(2, device);
    CHECK(device.handle == gpu(2).handle);
    static const char *const addresses[] = {"0000:43:00.0", "00000000:43:00.0", "43:00.0", "0000:43:00", "43:0"};
    for (size_t i = 0; i < sizeof(addresses) / sizeof(addresses[0]); i++) {
        OK(NV(nvmlDeviceGetHandleByPciBusId_v2)(addresses[i], &device));
        want_index(1, device);
    }
    OK(NV(nvmlDeviceGetHandleBySerial)("1650000002", &device));
    want_index(2, device);
    nvmlUUID_t uuid = {.version = nvmlUUID_v1, .type = NVML_UUID_TYPE_BINARY,
                       .value.bytes = {0, 0, 0, 1, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 1}};
    OK(NV(nvmlDeviceGetHandleByUUIDV)(&uuid, &device));
    want_index(1, device);
    uuid.type = NVML_UUID_TYPE_ASCII;
    memset(uuid.value.str, 'x', sizeof(uuid.value.str)); // without an end
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetHandleByUUIDV)(&uuid, &device));
    uuid.version = 0;
    WANT(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NV(nvmlDeviceGetHandleByUUIDV)(&uuid, &device));

    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetHandleByIndex_v2)(4, &device));
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetHandleByUUID)("GPU-ffffffff-0000-4000-8000-000000000002", &device));
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetHandleByUUID)("", &device));
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetHandleBySerial)("", &device));
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetHandleByPciBusId_v2)("0000:44:00.0", &device));
    static const char *const wrong[] = {"", "x", "0000:43:00.0 ", "0000:43:00.0:0000:43:00.0:0000:43", "-1:43:00.0"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetHandleByPciBusId_v2)(wrong[i], &device));
}

void case_arguments_checked(void)
{
    char text[96];
    unsigned int number;
    init();
    nvmlDevice_t null = {NULL}, wild = {(struct nvmlDevice_st *)0x1234567}, local = {(struct nvmlDevice_st *)&null};
    nvmlDevice_t unseen = {(struct nvmlDevice_st *)((char *)gpu(0).handle + 17)}; // a GPU that is not there
    nvmlDevice_t beyond = {(struct nvmlDevice_st *)((char *)gpu(0).handle + (16 << 20))};
    nvmlDevice_t bad[] = {null, wild, local, unseen, beyond};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetUUID)(bad[i], text, sizeof(text)));
        WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetMinorNumber)(bad[i], &number));
        WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceSetPersistenceMode)(bad[i], NVML_FEATURE_ENABLED));
    }
    nvmlDevice_t device = gpu(0);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetUUID)(device, NULL, 96));
    WANT(NVML_ERROR_INSUFFICIENT_SIZE, NV(nvmlDeviceGetUUID)(device, text, 40));
    OK(NV(nvmlDeviceGetUUID)(device, text, 41));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetMinorNumber)(device, NULL));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetHandleByIndex_v2)(0, NULL));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetCount_v2)(NULL));
    nvmlGpuInstance_t gi = {NULL};
    nvmlGpuInstanceInfo_t info;
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlGpuInstanceGetInfo)(gi, &info));
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2 + 1};
    WANT(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, NV(nvmlDeviceGetMemoryInfo_v2)(device, &memory));
}

void case_consumer_card(void)
{
    unsigned int percent, count;
    nvmlEnableState_t state;
    nvmlPciInfoExt_t ext = {.version = nvmlPciInfoExt_v1};
    char text[96];
    init();
    nvmlDevice_t device = gpu(0);
    OK(NV(nvmlDeviceGetNumFans)(device, &count));
    CHECK(count > 0);
    OK(NV(nvmlDeviceGetFanSpeed)(device, &percent));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetFanSpeed_v2)(device, count, &percent));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetEccMode)(device, &state, &state));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetMigMode)(device, &count, &percent));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetSerial)(device, text, sizeof(text)));
    OK(NV(nvmlDeviceGetPciInfoExt)(device, &ext));
    CHECK(ext.subClass == 0);
}
