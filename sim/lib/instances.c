// GPU instances that exist, and their profiles, which are in the description.
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <string.h>

static const struct profile *profile_at(const struct call *c, size_t i)
{
    const struct profile *p = &c->world->profiles[i];
    return p->gpu == c->slot ? p : NULL;
}

// The GPU's profile with the driver's id, or NULL.
const struct profile *profile_by_id(const struct call *c, unsigned int id)
{
    for (size_t i = 0; i < c->world->profile_count; i++) {
        const struct profile *p = profile_at(c, i);
        if (p != NULL && p->id == id)
            return p;
    }
    return NULL;
}

static const struct profile *profile_by_code(const struct call *c, unsigned int code)
{
    for (size_t i = 0; i < c->world->profile_count; i++) {
        const struct profile *p = profile_at(c, i);
        if (p != NULL && p->code == code)
            return p;
    }
    return NULL;
}

// Finds a profile by id or code. Not supported: the GPU does not have it, or no MIG at all.
static nvmlReturn_t find_profile(const struct call *c, bool by_id, unsigned int which, const struct profile **p)
{
    REQUIRE(by_id || which < NVML_GPU_INSTANCE_PROFILE_COUNT);
    *p = by_id ? profile_by_id(c, which) : profile_by_code(c, which);
    if (c->gpu->mig == MIG_UNSUPPORTED || *p == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
                                                          nvmlGpuInstanceProfileInfo_t *info)
{
    const struct profile *p;
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(info != NULL);
    TRY(find_profile(&c, false, profile, &p));
    *info = (nvmlGpuInstanceProfileInfo_t){
        .id = p->id,
        .sliceCount = p->slices,
        .instanceCount = p->limit,
        .multiprocessorCount = p->sms,
        .copyEngineCount = p->copy_engines,
        .decoderCount = p->decoders,
        .encoderCount = p->encoders,
        .jpegCount = p->jpegs,
        .ofaCount = p->ofas,
        .memorySizeMB = p->memory >> 20,
    };
    return NVML_SUCCESS;
}

static void put_profile_v2(const struct profile *p, nvmlGpuInstanceProfileInfo_v2_t *to)
{
    nvmlGpuInstanceProfileInfo_v2_t info = {
        .version = nvmlGpuInstanceProfileInfo_v2,
        .id = p->id,
        .sliceCount = p->slices,
        .instanceCount = p->limit,
        .multiprocessorCount = p->sms,
        .copyEngineCount = p->copy_engines,
        .decoderCount = p->decoders,
        .encoderCount = p->encoders,
        .jpegCount = p->jpegs,
        .ofaCount = p->ofas,
        .memorySizeMB = p->memory >> 20,
    };
    snprintf(info.name, sizeof(info.name), "MIG %.*s", (int)sizeof(info.name) - 5, p->name);
    memcpy(to, &info, sizeof(info));
}

static void put_profile_v3(const struct profile *p, void *to)
{
    nvmlGpuInstanceProfileInfo_v3_t info = {
        .version = nvmlGpuInstanceProfileInfo_v3,
        .id = p->id,
        .sliceCount = p->slices,
        .instanceCount = p->limit,
        .multiprocessorCount = p->sms,
        .copyEngineCount = p->copy_engines,
        .decoderCount = p->decoders,
        .encoderCount = p->encoders,
        .jpegCount = p->jpegs,
        .ofaCount = p->ofas,
        .memorySizeMB = p->memory >> 20,
    };
    snprintf(info.name, sizeof(info.name), "MIG %.*s", (int)sizeof(info.name) - 5, p->name);
    memcpy(to, &info, sizeof(info));
}

// The version gives the size of the caller's structure. By the header, an unknown version is an invalid argument.
static nvmlReturn_t put_profile(const struct call *c, bool by_id, unsigned int which,
                                nvmlGpuInstanceProfileInfo_v2_t *info)
{
    const struct profile *p;
    REQUIRE(info != NULL);
    unsigned int version = info->version;
    REQUIRE(version == nvmlGpuInstanceProfileInfo_v2 || version == nvmlGpuInstanceProfileInfo_v3);
    TRY(find_profile(c, by_id, which, &p));
    if (version == nvmlGpuInstanceProfileInfo_v2)
        put_profile_v2(p, info);
    else
        put_profile_v3(p, info);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int profile,
                                                           nvmlGpuInstanceProfileInfo_v2_t *info)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_profile(&c, false, profile, info);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                                               nvmlGpuInstanceProfileInfo_v2_t *info)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_profile(&c, true, id, info);
}

static nvmlReturn_t put_placements(const struct call *c, unsigned int id, nvmlGpuInstancePlacement_t *placements,
                                   unsigned int *count)
{
    const struct profile *p;
    REQUIRE(count != NULL);
    TRY(find_profile(c, true, id, &p));
    for (unsigned int i = 0; placements != NULL && i < p->start_count; i++)
        placements[i] = (nvmlGpuInstancePlacement_t){p->starts[i], p->size};
    *count = p->start_count;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int id,
                                                                 nvmlGpuInstancePlacement_t *placements,
                                                                 unsigned int *count)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_placements(&c, id, placements, count);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
                                                                    nvmlGpuInstancePlacement_t *placements,
                                                                    unsigned int *count)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_placements(&c, id, placements, count);
}

// The first MIG device of each GPU instance represents the instance.
static bool is_first_of_instance(const struct call *c, const struct mig *m)
{
    return m->gpu == c->slot && world_mig(c->world, (struct target){m->gpu, m->gi, NO_INSTANCE}) == m;
}

static unsigned int bits(unsigned int start, unsigned int size)
{
    if (start >= 32 || size == 0)
        return 0;
    return (size >= 32 ? UINT32_MAX : (1U << size) - 1) << start;
}

// How many more instances of a profile fit beside the existing ones, placed from the left.
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id,
                                                                unsigned int *count)
{
    const struct profile *p;
    unsigned int taken = 0, slices = 0, same = 0, fit = 0;
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(count != NULL);
    TRY(find_profile(&c, true, id, &p));
    if (c.gpu->mig != MIG_ENABLED)
        return NVML_ERROR_NOT_SUPPORTED;
    for (size_t i = 0; i < c.world->mig_count; i++) {
        const struct mig *m = &c.world->migs[i];
        if (!is_first_of_instance(&c, m))
            continue;
        taken |= bits(m->start, m->size);
        slices += m->gi_slices;
        same += m->gi_profile == id;
    }
    for (unsigned int i = 0; i < p->start_count; i++) {
        unsigned int place = bits(p->starts[i], p->size);
        if ((taken & place) != 0 || slices + p->slices > c.gpu->max_mig || same + fit >= p->limit)
            continue;
        taken |= place;
        slices += p->slices;
        fit++;
    }
    *count = fit;
    return NVML_SUCCESS;
}

// An instance can be used only with its node in /dev/nvidia-caps.
static nvmlReturn_t give_instance(const struct mig *m, nvmlGpuInstance_t *instance)
{
    if (!mig_nodes_open(m))
        return NVML_ERROR_NO_PERMISSION;
    *instance = gpu_instance_handle((struct target){m->gpu, m->gi, NO_INSTANCE});
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instances,
                                                unsigned int *count)
{
    unsigned int found = 0;
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(instances != NULL && count != NULL);
    if (c.gpu->mig != MIG_ENABLED)
        return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(profile_by_id(&c, id) != NULL);
    for (size_t i = 0; i < c.world->mig_count; i++) {
        const struct mig *m = &c.world->migs[i];
        if (m->gi_profile == id && is_first_of_instance(&c, m) && give_instance(m, &instances[found]) == NVML_SUCCESS)
            found++;
    }
    *count = found;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(instance != NULL);
    if (c.gpu->mig != MIG_ENABLED)
        return NVML_ERROR_NOT_SUPPORTED;
    const struct mig *m = world_mig(c.world, (struct target){c.slot, id, NO_INSTANCE});
    if (m == NULL)
        return NVML_ERROR_NOT_FOUND;
    return give_instance(m, instance);
}

// Continues a call on a GPU instance. The call gets the first MIG device of the instance.
nvmlReturn_t call_gpu_instance(struct call *c, nvmlGpuInstance_t instance)
{
    struct target t;
    unsigned int index;
    REQUIRE(gpu_instance_target(instance, &t) && session_index(t.slot, &index));
    TRY(call_slot(c, t.slot));
    c->mig = world_mig(c->world, t);
    REQUIRE(c->mig != NULL);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    ENTER(c);
    TRY(call_gpu_instance(&c, instance));
    REQUIRE(info != NULL);
    *info = (nvmlGpuInstanceInfo_t){
        .device = device_handle((struct target){c.slot, NO_INSTANCE, NO_INSTANCE}),
        .id = c.mig->gi,
        .profileId = c.mig->gi_profile,
        .placement = {c.mig->start, c.mig->size},
    };
    return NVML_SUCCESS;
}
