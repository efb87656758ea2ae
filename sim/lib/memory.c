// Memory sizes, and memory errors.
#define _GNU_SOURCE
#include "sim.h"

#include <stdlib.h>
#include <string.h>

// The memory that the driver reserves: a 128th, in whole MiB.
static uint64_t reserved_memory(uint64_t total) { return total / 128 >> 20 << 20; }

static uint64_t total_memory(const struct call *c) { return c->mig != NULL ? c->mig->memory : c->gpu->memory; }

static nvmlMemory_v2_t memory_of(const struct call *c)
{
    nvmlMemory_v2_t m = {.version = nvmlMemory_v2, .total = total_memory(c)};
    uint64_t used = process_memory(c) + (c->mig == NULL ? gpu_value(c->gpu, MEMORY_USED, 0) : 0);
    uint64_t reserved = c->mig == NULL ? gpu_value(c->gpu, MEMORY_RESERVED, reserved_memory(m.total))
                                       : reserved_memory(m.total);
    m.reserved = reserved < m.total ? reserved : m.total;
    m.used = used < m.total - m.reserved ? used : m.total - m.reserved;
    m.free = m.total - m.reserved - m.used;
    return m;
}

// The first version counts reserved memory as used from driver 510 on, the first with a second version.
NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(memory != NULL);
    nvmlMemory_v2_t m = memory_of(&c);
    uint64_t reserved = atoi(c.world->machine.driver) >= 510 ? m.reserved : 0;
    *memory = (nvmlMemory_t){.total = m.total, .free = m.free, .used = reserved + m.used};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(memory != NULL);
    TRY(check_version(memory->version, nvmlMemory_v2));
    *memory = memory_of(&c);
    return NVML_SUCCESS;
}

// A data-centre GPU maps all its memory, in a window of the next power of two; others map 256 MiB.
NVML_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1)
{
    uint64_t total = 256 << 20;
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(bar1 != NULL);
    while (gpu_is_data_center(c.gpu) && total < total_memory(&c) && total < 1ULL << 62)
        total *= 2;
    *bar1 = (nvmlBAR1Memory_t){.bar1Total = total, .bar1Free = total - (1 << 20), .bar1Used = 1 << 20};
    return NVML_SUCCESS;
}

static nvmlReturn_t require_ecc(const struct call *c)
{
    return gpu_is_data_center(c->gpu) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(current != NULL && pending != NULL);
    TRY(require_ecc(&c));
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE(mode != NULL);
    TRY(require_ecc(&c));
    *mode = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

static nvmlReturn_t put_ecc_count(const struct call *c, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                  unsigned long long *count)
{
    REQUIRE(count != NULL && (unsigned int)type < NVML_MEMORY_ERROR_TYPE_COUNT &&
            (unsigned int)counter < NVML_ECC_COUNTER_TYPE_COUNT);
    static const enum value values[2][2] = {
        {ECC_CORRECTED, ECC_CORRECTED_AGGREGATE},
        {ECC_UNCORRECTED, ECC_UNCORRECTED_AGGREGATE},
    };
    TRY(require_ecc(c));
    *count = gpu_value(c->gpu, values[type][counter], 0);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, nvmlEccCounterType_t counter)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)counter < NVML_ECC_COUNTER_TYPE_COUNT);
    TRY(require_ecc(&c));
    TRY(value_unset(c.slot, counter == NVML_VOLATILE_ECC ? ECC_CORRECTED : ECC_CORRECTED_AGGREGATE));
    return value_unset(c.slot, counter == NVML_VOLATILE_ECC ? ECC_UNCORRECTED : ECC_UNCORRECTED_AGGREGATE);
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                                  nvmlEccCounterType_t counter, unsigned long long *count)
{
    ENTER_DEVICE(c, device, EITHER);
    return put_ecc_count(&c, type, counter, count);
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                                      nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                                      unsigned long long *count)
{
    ENTER_DEVICE(c, device, EITHER);
    REQUIRE((unsigned int)location < NVML_MEMORY_LOCATION_COUNT);
    TRY(put_ecc_count(&c, type, counter, count));
    if (location != NVML_MEMORY_LOCATION_DRAM)
        *count = 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                                     nvmlEccCounterType_t counter, nvmlEccErrorCounts_t *counts)
{
    unsigned long long total;
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(counts != NULL);
    TRY(put_ecc_count(&c, type, counter, &total));
    memset(counts, 0, sizeof(*counts));
    counts->deviceMemory = total;
    return NVML_SUCCESS;
}

// Ampere and later remap rows of memory; earlier data-centre GPUs retire pages.
static nvmlReturn_t require_remapping(const struct call *c, bool wanted)
{
    TRY(require_ecc(c));
    return (c->gpu->arch >= NVML_DEVICE_ARCH_AMPERE) == wanted ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable,
                                                unsigned int *uncorrectable, unsigned int *pending,
                                                unsigned int *failed)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(correctable != NULL && uncorrectable != NULL && pending != NULL && failed != NULL);
    TRY(require_remapping(&c, true));
    *correctable = (unsigned int)gpu_value(c.gpu, REMAPPED_CORRECTABLE, 0);
    *uncorrectable = (unsigned int)gpu_value(c.gpu, REMAPPED_UNCORRECTABLE, 0);
    *pending = (unsigned int)gpu_value(c.gpu, REMAP_PENDING, 0);
    *failed = (unsigned int)gpu_value(c.gpu, REMAP_FAILED, 0);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, nvmlRemappedRowsInfo_v2_t *info)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(info != NULL);
    TRY(require_remapping(&c, true));
    memset(info, 0, sizeof(*info));
    info->corrActiveRemaps = (unsigned int)gpu_value(c.gpu, REMAPPED_CORRECTABLE, 0);
    info->uncActiveRemaps = (unsigned int)gpu_value(c.gpu, REMAPPED_UNCORRECTABLE, 0);
    info->bPending = (unsigned int)gpu_value(c.gpu, REMAP_PENDING, 0);
    info->bFailureOccurred = (unsigned int)gpu_value(c.gpu, REMAP_FAILED, 0);
    return NVML_SUCCESS;
}

// All banks have all their spare rows; their number is that of five HBM stacks.
NVML_API nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(values != NULL);
    TRY(require_remapping(&c, true));
    *values = (nvmlRowRemapperHistogramValues_t){.max = board_of(c.gpu)->bus_width / 8};
    return NVML_SUCCESS;
}

// The pages that were retired for a cause: the first ones of a MiB of memory of its own.
static nvmlReturn_t put_retired_pages(const struct call *c, nvmlPageRetirementCause_t cause, unsigned int *count,
                                      unsigned long long *addresses, unsigned long long *timestamps)
{
    enum { PAGE = 64 << 10, RETIRED_AT = 1700000000 };
    REQUIRE(count != NULL && (unsigned int)cause < NVML_PAGE_RETIREMENT_CAUSE_COUNT);
    TRY(require_remapping(c, false));
    bool double_bit = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
    unsigned int room = *count;
    *count = (unsigned int)gpu_value(c->gpu, double_bit ? RETIRED_DOUBLE_BIT : RETIRED_SINGLE_BIT, 0);
    if (*count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < *count && addresses != NULL; i++) {
        addresses[i] = (unsigned long long)cause << 20 | (unsigned long long)i * PAGE;
        if (timestamps != NULL)
            timestamps[i] = RETIRED_AT;
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
                                                unsigned int *count, unsigned long long *addresses)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_retired_pages(&c, cause, count, addresses, NULL);
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
                                                   unsigned int *count, unsigned long long *addresses,
                                                   unsigned long long *timestamps)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_retired_pages(&c, cause, count, addresses, timestamps);
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(pending != NULL);
    TRY(require_remapping(&c, false));
    *pending = gpu_value(c.gpu, RETIREMENT_PENDING, 0) != 0 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}
