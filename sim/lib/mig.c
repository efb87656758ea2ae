// MIG mode and MIG devices.
#define _GNU_SOURCE
#include "sim.h"

#include <string.h>

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(current != NULL && pending != NULL);
    if (c.gpu->mig == MIG_UNSUPPORTED)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = c.gpu->mig == MIG_ENABLED ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    ENTER_DEVICE(c, device, EITHER);
    return put_uint(is_mig, c.mig != NULL);
}

// Zero unless MIG is on.
NVML_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_uint(count, c.gpu->mig == MIG_ENABLED ? c.gpu->max_mig : 0);
}

// The MIG device with an index among those whose nodes this process can open.
static const struct mig *visible_mig(const struct call *c, unsigned int index)
{
    for (size_t i = 0; i < c->world->mig_count; i++) {
        const struct mig *m = &c->world->migs[i];
        if (m->gpu == c->slot && mig_nodes_open(m) && index-- == 0)
            return m;
    }
    return NULL;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(mig != NULL);
    if (c.gpu->mig == MIG_UNSUPPORTED)
        return NVML_ERROR_NOT_SUPPORTED;
    if (c.gpu->mig != MIG_ENABLED)
        return NVML_ERROR_NOT_FOUND;
    REQUIRE(index < c.gpu->max_mig);
    const struct mig *m = visible_mig(&c, index);
    if (m == NULL)
        return NVML_ERROR_NOT_FOUND;
    *mig = device_handle((struct target){m->gpu, m->gi, m->ci});
    return NVML_SUCCESS;
}

// For a MIG device it is the index on its GPU.
NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    unsigned int i;
    ENTER_DEVICE(c, device, EITHER);
    if (c.mig == NULL) {
        REQUIRE(session_index(c.slot, &i));
        return put_uint(index, i);
    }
    const struct mig *m;
    for (i = 0; (m = visible_mig(&c, i)) != NULL; i++)
        if (m == c.mig)
            return put_uint(index, i);
    return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    ENTER_DEVICE(c, mig, EITHER);
    REQUIRE(c.mig != NULL && device != NULL);
    *device = device_handle((struct target){c.slot, NO_INSTANCE, NO_INSTANCE});
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(c, device, EITHER);
    if (c.mig == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    return put_uint(id, c.mig->gi);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_DEVICE(c, device, EITHER);
    if (c.mig == NULL)
        return NVML_ERROR_NOT_SUPPORTED;
    return put_uint(id, c.mig->ci);
}

static nvmlReturn_t put_attributes(const struct call *c, nvmlDeviceAttributes_t *to, size_t size)
{
    const struct mig *m = c->mig;
    REQUIRE(to != NULL);
    if (m == NULL)
        return NVML_ERROR_NOT_SUPPORTED; // the interface is for MIG devices only
    nvmlDeviceAttributes_t a = {
        .multiprocessorCount = m->sms,
        .sharedCopyEngineCount = m->copy_engines,
        .sharedDecoderCount = m->decoders,
        .sharedEncoderCount = m->encoders,
        .sharedJpegCount = m->jpegs,
        .sharedOfaCount = m->ofas,
        .gpuInstanceSliceCount = m->gi_slices,
        .computeInstanceSliceCount = m->ci_slices,
        .memorySizeMB = m->memory >> 20,
    };
    memcpy(to, &a, size);
    return NVML_SUCCESS;
}

// The first version's structure has the memory in place of the slice counts.
NVML_API nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    nvmlDeviceAttributes_t whole;
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(attributes != NULL);
    TRY(put_attributes(&c, &whole, sizeof(whole)));
    memcpy(attributes, &whole, offsetof(nvmlDeviceAttributes_t, gpuInstanceSliceCount));
    memcpy((char *)attributes + offsetof(nvmlDeviceAttributes_t, gpuInstanceSliceCount), &whole.memorySizeMB,
           sizeof(whole.memorySizeMB));
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    ENTER_DEVICE(c, device, EITHER);
    return put_attributes(&c, attributes, sizeof(*attributes));
}
