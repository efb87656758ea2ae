// Compute instances, which MIG devices are. Their profiles depend on the number of slices of the GPU instance: one for
// each size that NVML has a profile for, up to the whole instance.
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <string.h>

// Slices of each of NVML's compute instance profiles; 0: on none of the simulated models.
static const unsigned int profile_slices[NVML_COMPUTE_INSTANCE_PROFILE_COUNT] = {1, 2, 3, 4, 7};

// A compute instance profile of one GPU instance.
struct part {
    const struct profile *whole;
    unsigned int id, slices, sms;
    char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
};

// The multiprocessors of a profile: those of a MIG device with it, otherwise its share.
static unsigned int part_sms(const struct call *c, const struct part *p)
{
    for (size_t i = 0; i < c->world->mig_count; i++) {
        const struct mig *m = &c->world->migs[i];
        if (m->gpu == c->slot && m->gi_profile == p->whole->id && m->ci_slices == p->slices)
            return m->sms;
    }
    return p->whole->slices > 0 ? p->whole->sms * p->slices / p->whole->slices : 0;
}

static nvmlReturn_t find_part(const struct call *c, unsigned int id, struct part *p)
{
    REQUIRE(id < NVML_COMPUTE_INSTANCE_PROFILE_COUNT);
    p->whole = profile_by_id(c, c->mig->gi_profile);
    p->id = id;
    p->slices = profile_slices[id];
    if (p->whole == NULL || p->slices == 0 || p->slices > p->whole->slices)
        return NVML_ERROR_NOT_SUPPORTED;
    p->sms = part_sms(c, p);
    if (p->slices == p->whole->slices)
        snprintf(p->name, sizeof(p->name), "MIG %.70s", p->whole->name);
    else
        snprintf(p->name, sizeof(p->name), "MIG %uc.%.70s", p->slices, p->whole->name);
    return NVML_SUCCESS;
}

static nvmlReturn_t begin_profile(struct call *c, nvmlGpuInstance_t instance, unsigned int profile,
                                  unsigned int engines, struct part *p)
{
    TRY(call_gpu_instance(c, instance));
    REQUIRE(engines < NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT);
    return find_part(c, profile, p);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int profile,
                                                                   unsigned int engines,
                                                                   nvmlComputeInstanceProfileInfo_t *info)
{
    struct part p;
    ENTER(c);
    TRY(begin_profile(&c, instance, profile, engines, &p));
    REQUIRE(info != NULL);
    *info = (nvmlComputeInstanceProfileInfo_t){
        .id = p.id,
        .sliceCount = p.slices,
        .instanceCount = p.whole->slices / p.slices,
        .multiprocessorCount = p.sms,
        .sharedCopyEngineCount = p.whole->copy_engines,
        .sharedDecoderCount = p.whole->decoders,
        .sharedEncoderCount = p.whole->encoders,
        .sharedJpegCount = p.whole->jpegs,
        .sharedOfaCount = p.whole->ofas,
    };
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int profile,
                                                                    unsigned int engines,
                                                                    nvmlComputeInstanceProfileInfo_v2_t *info)
{
    struct part p;
    ENTER(c);
    TRY(begin_profile(&c, instance, profile, engines, &p));
    REQUIRE(info != NULL);
    unsigned int version = info->version;
    REQUIRE(version == nvmlComputeInstanceProfileInfo_v2 || version == nvmlComputeInstanceProfileInfo_v3);
    nvmlComputeInstanceProfileInfo_v3_t whole = {
        .version = version,
        .id = p.id,
        .sliceCount = p.slices,
        .instanceCount = p.whole->slices / p.slices,
        .multiprocessorCount = p.sms,
        .sharedCopyEngineCount = p.whole->copy_engines,
        .sharedDecoderCount = p.whole->decoders,
        .sharedEncoderCount = p.whole->encoders,
        .sharedJpegCount = p.whole->jpegs,
        .sharedOfaCount = p.whole->ofas,
    };
    memcpy(whole.name, p.name, sizeof(whole.name));
    // The second version is the third without its last fields.
    memcpy(info, &whole, version == nvmlComputeInstanceProfileInfo_v3 ? sizeof(whole) : sizeof(*info));
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t instance, unsigned int id,
                                                                          nvmlComputeInstancePlacement_t *placements,
                                                                          unsigned int *count)
{
    struct part p;
    ENTER(c);
    TRY(begin_profile(&c, instance, id, 0, &p));
    REQUIRE(count != NULL);
    *count = p.whole->slices / p.slices;
    for (unsigned int i = 0; placements != NULL && i < *count; i++)
        placements[i] = (nvmlComputeInstancePlacement_t){i * p.slices, p.slices};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned int id,
                                                                         unsigned int *count)
{
    struct part p;
    unsigned int used = 0;
    ENTER(c);
    TRY(begin_profile(&c, instance, id, 0, &p));
    for (size_t i = 0; i < c.world->mig_count; i++)
        if (c.world->migs[i].gpu == c.slot && c.world->migs[i].gi == c.mig->gi)
            used += c.world->migs[i].ci_slices;
    return put_uint(count, used < p.whole->slices ? (p.whole->slices - used) / p.slices : 0);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int id,
                                                         nvmlComputeInstance_t *instances, unsigned int *count)
{
    struct part p;
    unsigned int found = 0;
    ENTER(c);
    TRY(begin_profile(&c, instance, id, 0, &p));
    REQUIRE(instances != NULL && count != NULL);
    for (size_t i = 0; i < c.world->mig_count; i++) {
        const struct mig *m = &c.world->migs[i];
        if (m->gpu == c.slot && m->gi == c.mig->gi && m->ci_profile == id)
            instances[found++] = compute_instance_handle((struct target){m->gpu, m->gi, m->ci});
    }
    *count = found;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
                                                            nvmlComputeInstance_t *compute)
{
    ENTER(c);
    TRY(call_gpu_instance(&c, instance));
    REQUIRE(compute != NULL && id != NO_INSTANCE);
    struct target t = {c.slot, c.mig->gi, id};
    if (world_mig(c.world, t) == NULL)
        return NVML_ERROR_NOT_FOUND;
    *compute = compute_instance_handle(t);
    return NVML_SUCCESS;
}

static nvmlReturn_t put_info(struct call *c, nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *to, size_t size)
{
    struct target t;
    unsigned int index;
    REQUIRE(compute_instance_target(instance, &t) && session_index(t.slot, &index) && to != NULL);
    TRY(call_slot(c, t.slot));
    const struct mig *m = world_mig(c->world, t);
    REQUIRE(m != NULL);
    nvmlComputeInstanceInfo_t info = {
        .device = device_handle((struct target){t.slot, NO_INSTANCE, NO_INSTANCE}),
        .gpuInstance = gpu_instance_handle(t),
        .id = m->ci,
        .profileId = m->ci_profile,
        .placement = {m->ci_start, m->ci_slices},
    };
    memcpy(to, &info, size);
    return NVML_SUCCESS;
}

// The first version ends before the placement.
NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    ENTER(c);
    return put_info(&c, instance, info, offsetof(nvmlComputeInstanceInfo_t, placement));
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    ENTER(c);
    return put_info(&c, instance, info, sizeof(*info));
}
