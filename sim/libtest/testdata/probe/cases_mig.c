// MIG. GPU 3 of the machine is partitioned: 1g.10gb, two halves of a 3g.40gb, 1g.10gb+me.
#include "probe.h"
#include "cases.h"

void case_mig_devices(void)
{
    char text[96];
    unsigned int number, pending;
    nvmlDevice_t device, parent;
    init();
    parent = gpu(3);
    OK(NV(nvmlDeviceGetMigMode)(parent, &number, &pending));
    CHECK(number == NVML_DEVICE_MIG_ENABLE && pending == NVML_DEVICE_MIG_ENABLE);
    OK(NV(nvmlDeviceGetMaxMigDeviceCount)(parent, &number));
    CHECK(number == 7);
    device = mig(3, 1);
    CHECK(device.handle != parent.handle);
    OK(NV(nvmlDeviceIsMigDeviceHandle)(device, &number));
    CHECK(number == 1);
    OK(NV(nvmlDeviceIsMigDeviceHandle)(parent, &number));
    CHECK(number == 0);
    OK(NV(nvmlDeviceGetUUID)(device, text, sizeof(text)));
    SAME("MIG-00000003-0000-4000-8000-000000000101", text);
    OK(NV(nvmlDeviceGetName)(device, text, sizeof(text)));
    SAME("NVIDIA H100 80GB HBM3 MIG 2c.3g.40gb", text);
    OK(NV(nvmlDeviceGetGpuInstanceId)(device, &number));
    CHECK(number == 2);
    OK(NV(nvmlDeviceGetComputeInstanceId)(device, &number));
    CHECK(number == 0);
    OK(NV(nvmlDeviceGetIndex)(device, &number));
    CHECK(number == 1);
    OK(NV(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)(device, &parent));
    CHECK(parent.handle == gpu(3).handle);
    OK(NV(nvmlDeviceGetHandleByUUID)("MIG-00000003-0000-4000-8000-000000000101", &parent));
    CHECK(parent.handle == device.handle);
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(3), 4, &device));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(3), 7, &device));

    device = mig(3, 1);
    nvmlDeviceAttributes_t a;
    OK(NV(nvmlDeviceGetAttributes_v2)(device, &a));
    CHECK(a.multiprocessorCount == 32 && a.gpuInstanceSliceCount == 3 && a.computeInstanceSliceCount == 2);
    CHECK(a.memorySizeMB == 40448 && a.sharedCopyEngineCount == 3 && a.sharedDecoderCount == 3);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetAttributes_v2)(gpu(3), &a));
    nvmlMemory_t memory;
    OK(NV(nvmlDeviceGetMemoryInfo)(device, &memory));
    CHECK(memory.total == 40448ULL << 20 && memory.used + memory.free == memory.total);
    // All other values are those of the whole GPU.
    nvmlPciInfo_t pci;
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetPciInfo_v3)(device, &pci));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetMinorNumber)(device, &number));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetPowerUsage)(device, &number));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetGpuInstanceId)(gpu(3), &number));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)(gpu(3), &parent));
}

static void check_profiles(nvmlDevice_t device)
{
    nvmlGpuInstanceProfileInfo_t info;
    nvmlGpuInstanceProfileInfo_v2_t v2 = {.version = nvmlGpuInstanceProfileInfo_v2};
    OK(NV(nvmlDeviceGetGpuInstanceProfileInfo)(device, NVML_GPU_INSTANCE_PROFILE_3_SLICE, &info));
    CHECK(info.id == 9 && info.sliceCount == 3 && info.instanceCount == 2 && info.memorySizeMB == 40448);
    CHECK(info.multiprocessorCount == 60 && info.decoderCount == 3);
    OK(NV(nvmlDeviceGetGpuInstanceProfileInfoV)(device, NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, &v2));
    SAME("MIG 1g.10gb+me", v2.name);
    CHECK(v2.id == 20 && v2.ofaCount == 1);
    nvmlGpuInstanceProfileInfo_v3_t v3 = {.version = nvmlGpuInstanceProfileInfo_v3};
    OK(NV(nvmlDeviceGetGpuInstanceProfileInfoByIdV)(device, 9, (nvmlGpuInstanceProfileInfo_v2_t *)&v3));
    SAME("MIG 3g.40gb", v3.name);
    CHECK(v3.sliceCount == 3);
    v2.version = 0;
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetGpuInstanceProfileInfoV)(device, 0, &v2));
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetGpuInstanceProfileInfo)(device, 5, &info));
    WANT(NVML_ERROR_INVALID_ARGUMENT,
         NV(nvmlDeviceGetGpuInstanceProfileInfo)(device, NVML_GPU_INSTANCE_PROFILE_COUNT, &info));
    nvmlGpuInstancePlacement_t places[16];
    unsigned int count = 0;
    OK(NV(nvmlDeviceGetGpuInstancePossiblePlacements_v2)(device, 9, NULL, &count));
    CHECK(count == 2);
    OK(NV(nvmlDeviceGetGpuInstancePossiblePlacements_v2)(device, 9, places, &count));
    CHECK(places[1].start == 4 && places[1].size == 4);
    // Slices 0, 1 and 4 to 7 are in use, and 5 of 7 compute slices.
    OK(NV(nvmlDeviceGetGpuInstanceRemainingCapacity)(device, 19, &count));
    CHECK(count == 2);
    OK(NV(nvmlDeviceGetGpuInstanceRemainingCapacity)(device, 9, &count));
    CHECK(count == 0);
    OK(NV(nvmlDeviceGetGpuInstanceRemainingCapacity)(device, 20, &count));
    CHECK(count == 0); // one on a GPU
}

static void check_compute(nvmlGpuInstance_t gi)
{
    nvmlComputeInstance_t ci, all[16];
    nvmlComputeInstanceInfo_t info;
    nvmlComputeInstanceProfileInfo_t profile;
    unsigned int count;
    OK(NV(nvmlGpuInstanceGetComputeInstanceById)(gi, 1, &ci));
    OK(NV(nvmlComputeInstanceGetInfo_v2)(ci, &info));
    CHECK(info.id == 1 && info.profileId == 0 && info.placement.start == 2 && info.placement.size == 1);
    CHECK(info.device.handle == gpu(3).handle && info.gpuInstance.handle == gi.handle);
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlGpuInstanceGetComputeInstanceById)(gi, 2, &ci));
    OK(NV(nvmlGpuInstanceGetComputeInstances)(gi, 1, all, &count));
    CHECK(count == 1);
    OK(NV(nvmlGpuInstanceGetComputeInstanceProfileInfo)(gi, NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE, 0, &profile));
    CHECK(profile.id == 1 && profile.sliceCount == 2 && profile.multiprocessorCount == 32);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlGpuInstanceGetComputeInstanceProfileInfo)(gi, 3, 0, &profile));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlGpuInstanceGetComputeInstanceProfileInfo)(gi, 9, 0, &profile));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlGpuInstanceGetComputeInstanceProfileInfo)(gi, 0, 1, &profile));
    nvmlComputeInstanceProfileInfo_v2_t *v2 = malloc(sizeof(*v2));
    v2->version = nvmlComputeInstanceProfileInfo_v2;
    OK(NV(nvmlGpuInstanceGetComputeInstanceProfileInfoV)(gi, 0, 0, v2));
    SAME("MIG 1c.3g.40gb", v2->name);
    free(v2);
    OK(NV(nvmlGpuInstanceGetComputeInstanceRemainingCapacity)(gi, 0, &count));
    CHECK(count == 0);
    char *v1 = malloc(offsetof(nvmlComputeInstanceInfo_t, placement));
    OK(((nvmlReturn_t(*)(nvmlComputeInstance_t, void *))symbol("nvmlComputeInstanceGetInfo"))(all[0], v1));
    free(v1);
}

void case_mig_instances(void)
{
    nvmlGpuInstance_t gi, all[16];
    nvmlGpuInstanceInfo_t info;
    unsigned int count;
    init();
    nvmlDevice_t device = gpu(3);
    check_profiles(device);
    OK(NV(nvmlDeviceGetGpuInstanceById)(device, 2, &gi));
    OK(NV(nvmlGpuInstanceGetInfo)(gi, &info));
    CHECK(info.id == 2 && info.profileId == 9 && info.placement.start == 4 && info.placement.size == 4);
    CHECK(info.device.handle == device.handle);
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetGpuInstanceById)(device, 3, &gi));
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetGpuInstanceById)(device, 0xffffffff, &gi));
    OK(NV(nvmlDeviceGetGpuInstances)(device, 19, all, &count));
    CHECK(count == 1);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetGpuInstanceById)(gpu(0), 2, &gi));
    OK(NV(nvmlDeviceGetGpuInstanceById)(device, 2, &gi));
    check_compute(gi);
}

// MIG is turned off and on while a process runs.
void case_mig_off(void)
{
    unsigned int count, pending;
    char text[96];
    nvmlDevice_t device;
    init();
    nvmlDevice_t stale = mig(3, 1);
    set_state("gpu index=3 mig=disabled\nclearmig gpu=3\n");
    OK(NV(nvmlDeviceGetMigMode)(gpu(3), &count, &pending));
    CHECK(count == NVML_DEVICE_MIG_DISABLE);
    OK(NV(nvmlDeviceGetMaxMigDeviceCount)(gpu(3), &count));
    CHECK(count == 0);
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(3), 0, &device));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceGetUUID)(stale, text, sizeof(text)));
    WANT(NVML_ERROR_NOT_FOUND,
         NV(nvmlDeviceGetHandleByUUID)("MIG-00000003-0000-4000-8000-000000000101", &device));
    set_state("clearmig gpu=3\nmig gpu=3 index=0 uuid=MIG-x gi=0 ci=0 profile=7g.80gb memory=1048576 gicap=1 cicap=1\n");
    OK(NV(nvmlDeviceGetUUID)(mig(3, 0), text, sizeof(text)));
    SAME("MIG-x", text);
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(3), 1, &device));
    set_state(NULL);
    OK(NV(nvmlDeviceGetUUID)(stale, text, sizeof(text)));
}

// Arguments: the UUIDs of the MIG devices that are visible on GPU 3, in order.
void case_visible_migs(void)
{
    char text[96];
    nvmlDevice_t device;
    init();
    for (int i = 0; i < argument_count; i++) {
        unsigned int index;
        device = mig(3, (unsigned int)i);
        OK(NV(nvmlDeviceGetUUID)(device, text, sizeof(text)));
        SAME(arguments[i], text);
        OK(NV(nvmlDeviceGetIndex)(device, &index));
        CHECK(index == (unsigned int)i);
    }
    WANT(NVML_ERROR_NOT_FOUND,
         NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(3), (unsigned int)argument_count, &device));
}
