// Handles. Each is the address of one byte in a static array, and the index in the array identifies the object. So any
// pointer can be checked without reading it, nothing is allocated, and no handle becomes invalid.
#define _GNU_SOURCE
#include "sim.h"

struct nvmlDevice_st {
    char unused;
};
struct nvmlGpuInstance_st {
    char unused;
};
struct nvmlComputeInstance_st {
    char unused;
};

enum { GIS = MAX_GPUS * MAX_GI, CIS = GIS * MAX_CI };

static struct nvmlDevice_st devices[MAX_GPUS + CIS]; // the GPUs, then the MIG devices
static struct nvmlGpuInstance_st gpu_instances[GIS];
static struct nvmlComputeInstance_st compute_instances[CIS];

static size_t gi_index(struct target t) { return (size_t)t.slot * MAX_GI + t.gi; }
static size_t ci_index(struct target t) { return gi_index(t) * MAX_CI + t.ci; }

static struct target from_ci_index(size_t index)
{
    return (struct target){
        .slot = (unsigned int)(index / MAX_CI / MAX_GI),
        .gi = (unsigned int)(index / MAX_CI % MAX_GI),
        .ci = (unsigned int)(index % MAX_CI),
    };
}

// The index of a pointer in an array of bytes. False: it points elsewhere.
static bool index_of(const void *pointer, const void *array, size_t size, size_t *index)
{
    uintptr_t at = (uintptr_t)pointer, start = (uintptr_t)array;
    if (at < start || at - start >= size)
        return false;
    *index = at - start;
    return true;
}

nvmlDevice_t device_handle(struct target t)
{
    size_t index = t.gi == NO_INSTANCE ? t.slot : (size_t)MAX_GPUS + ci_index(t);
    return (nvmlDevice_t){&devices[index]};
}

bool device_target(nvmlDevice_t device, struct target *t)
{
    size_t index;
    if (!index_of(device.handle, devices, sizeof(devices), &index))
        return false;
    if (index < MAX_GPUS)
        *t = (struct target){(unsigned int)index, NO_INSTANCE, NO_INSTANCE};
    else
        *t = from_ci_index(index - MAX_GPUS);
    return true;
}

nvmlGpuInstance_t gpu_instance_handle(struct target t) { return (nvmlGpuInstance_t){&gpu_instances[gi_index(t)]}; }

bool gpu_instance_target(nvmlGpuInstance_t instance, struct target *t)
{
    size_t index;
    if (!index_of(instance.handle, gpu_instances, sizeof(gpu_instances), &index))
        return false;
    *t = (struct target){(unsigned int)(index / MAX_GI), (unsigned int)(index % MAX_GI), NO_INSTANCE};
    return true;
}

nvmlComputeInstance_t compute_instance_handle(struct target t)
{
    return (nvmlComputeInstance_t){&compute_instances[ci_index(t)]};
}

bool compute_instance_target(nvmlComputeInstance_t instance, struct target *t)
{
    size_t index;
    if (!index_of(instance.handle, compute_instances, sizeof(compute_instances), &index))
        return false;
    *t = from_ci_index(index);
    return true;
}
