// Field values: many small readings by number, read in one call, each with its own result.
#define _GNU_SOURCE
#include "sim.h"

#include <time.h>

static long long wall_clock_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static nvmlReturn_t put_u32(nvmlFieldValue_t *f, unsigned int value)
{
    f->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    f->value.uiVal = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t put_u64(nvmlFieldValue_t *f, uint64_t value)
{
    f->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    f->value.ullVal = value;
    return NVML_SUCCESS;
}

static const struct port *active_port(const struct gpu *g, unsigned int link)
{
    if (link >= NVML_NVLINK_MAX_LINKS || g->ports[link].type == NVML_NVLINK_DEVICE_TYPE_UNKNOWN)
        return NULL;
    return &g->ports[link];
}

static nvmlReturn_t link_speed(const struct gpu *g, unsigned int link, nvmlFieldValue_t *f)
{
    const struct port *p = active_port(g, link);
    return p != NULL ? put_u32(f, p->speed) : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t common_speed(const struct gpu *g, nvmlFieldValue_t *f)
{
    for (unsigned int i = 0; i < NVML_NVLINK_MAX_LINKS; i++)
        if (active_port(g, i) != NULL)
            return link_speed(g, i, f);
    return NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t switched_links(const struct gpu *g, nvmlFieldValue_t *f)
{
    unsigned int n = 0;
    for (unsigned int i = 0; i < NVML_NVLINK_MAX_LINKS; i++)
        n += g->ports[i].type == NVML_NVLINK_DEVICE_TYPE_SWITCH;
    return gpu_port_count(g) > 0 ? put_u32(f, n) : NVML_ERROR_NOT_SUPPORTED;
}

// The port that the scope names, for fields of one port.
static nvmlReturn_t link_state(const struct gpu *g, nvmlFieldValue_t *f)
{
    if (f->scopeId >= gpu_port_count(g))
        return gpu_port_count(g) > 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    return put_u32(f, gpu_link_up(g, f->scopeId));
}

static nvmlReturn_t link_version(const struct gpu *g, nvmlFieldValue_t *f)
{
    const struct port *p = active_port(g, f->scopeId);
    return p != NULL ? put_u32(f, nvlink_version_code(p->version)) : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t nvlink_field(const struct gpu *g, nvmlFieldValue_t *f)
{
    unsigned int id = f->fieldId;
    if (id >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 && id <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L5)
        return link_speed(g, id - NVML_FI_DEV_NVLINK_SPEED_MBPS_L0, f);
    if (id >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 && id <= NVML_FI_DEV_NVLINK_SPEED_MBPS_L11)
        return link_speed(g, id - NVML_FI_DEV_NVLINK_SPEED_MBPS_L6 + 6, f);
    switch (id) {
    case NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON:
        return common_speed(g, f);
    case NVML_FI_DEV_NVLINK_LINK_COUNT:
        return put_u32(f, gpu_port_count(g));
    case NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT:
        return switched_links(g, f);
    case NVML_FI_DEV_NVLINK_GET_SPEED:
        return link_speed(g, f->scopeId, f);
    case NVML_FI_DEV_NVLINK_GET_STATE:
        return link_state(g, f);
    case NVML_FI_DEV_NVLINK_GET_VERSION:
        return link_version(g, f);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

// The counts of ECC errors: the totals, and all of them in the device memory.
static uint64_t ecc_count(const struct gpu *g, unsigned int id)
{
    switch (id) {
    case NVML_FI_DEV_ECC_SBE_VOL_TOTAL:
    case NVML_FI_DEV_ECC_SBE_VOL_DEV:
        return gpu_value(g, ECC_CORRECTED, 0);
    case NVML_FI_DEV_ECC_DBE_VOL_TOTAL:
    case NVML_FI_DEV_ECC_DBE_VOL_DEV:
        return gpu_value(g, ECC_UNCORRECTED, 0);
    case NVML_FI_DEV_ECC_SBE_AGG_TOTAL:
    case NVML_FI_DEV_ECC_SBE_AGG_DEV:
        return gpu_value(g, ECC_CORRECTED_AGGREGATE, 0);
    case NVML_FI_DEV_ECC_DBE_AGG_TOTAL:
    case NVML_FI_DEV_ECC_DBE_AGG_DEV:
        return gpu_value(g, ECC_UNCORRECTED_AGGREGATE, 0);
    default:
        return 0;
    }
}

// Ampere and later remap rows of memory; earlier data-center GPUs retire pages.
static nvmlReturn_t memory_field(const struct gpu *g, nvmlFieldValue_t *f)
{
    static const enum value retired[] = {RETIRED_SINGLE_BIT, RETIRED_DOUBLE_BIT, RETIREMENT_PENDING};
    static const enum value remapped[] = {REMAPPED_CORRECTABLE, REMAPPED_UNCORRECTABLE, REMAP_PENDING, REMAP_FAILED};
    bool ampere = g->arch >= NVML_DEVICE_ARCH_AMPERE;
    if (!gpu_is_data_center(g))
        return NVML_ERROR_NOT_SUPPORTED;
    if (f->fieldId <= NVML_FI_DEV_ECC_DBE_AGG_CBU)
        return put_u64(f, ecc_count(g, f->fieldId));
    if (f->fieldId <= NVML_FI_DEV_RETIRED_PENDING)
        return ampere ? NVML_ERROR_NOT_SUPPORTED
                      : put_u64(f, gpu_value(g, retired[f->fieldId - NVML_FI_DEV_RETIRED_SBE], 0));
    return ampere ? put_u32(f, (unsigned int)gpu_value(g, remapped[f->fieldId - NVML_FI_DEV_REMAPPED_COR], 0))
                  : NVML_ERROR_NOT_SUPPORTED;
}

// Counters of errors, if the GPU has the counted unit.
static nvmlReturn_t error_field(const struct gpu *g, nvmlFieldValue_t *f)
{
    unsigned int id = f->fieldId;
    if ((id >= NVML_FI_DEV_ECC_SBE_VOL_TOTAL && id <= NVML_FI_DEV_RETIRED_PENDING) ||
        (id >= NVML_FI_DEV_REMAPPED_COR && id <= NVML_FI_DEV_REMAPPED_FAILURE))
        return memory_field(g, f);
    if ((id >= NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0 && id <= NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL) ||
        (id >= NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY && id <= NVML_FI_DEV_NVLINK_ERROR_DL_CRC))
        return gpu_port_count(g) > 0 ? put_u64(f, 0) : NVML_ERROR_NOT_SUPPORTED;
    if (id >= NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS && id <= NVML_FI_DEV_PCIE_COUNT_LANE_ERROR)
        return put_u32(f, 0);
    return nvlink_field(g, f);
}

static nvmlReturn_t power_field(const struct call *c, nvmlFieldValue_t *f)
{
    switch (f->fieldId) {
    case NVML_FI_DEV_POWER_AVERAGE:
    case NVML_FI_DEV_POWER_INSTANT:
        return put_u32(f, gpu_power_draw(c->gpu, c->slot));
    case NVML_FI_DEV_POWER_MIN_LIMIT:
        return put_u32(f, board_of(c->gpu)->power_min);
    case NVML_FI_DEV_POWER_MAX_LIMIT:
    case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
        return put_u32(f, gpu_default_power_limit(c->gpu));
    case NVML_FI_DEV_POWER_CURRENT_LIMIT:
    case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
        return put_u32(f, gpu_power_limit(c->gpu));
    case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
    case NVML_FI_DEV_ENERGY:
        return put_u64(f, gpu_energy(c->gpu, c->slot));
    default:
        return error_field(c->gpu, f);
    }
}

// The recovery action, which driver 570 added, and two fields that say the same of two actions.
static nvmlReturn_t recovery_field(const struct call *c, nvmlFieldValue_t *f)
{
    unsigned int action = (unsigned int)gpu_value(c->gpu, RECOVERY_ACTION, 0);
    if (driver_branch(c->world) < 570)
        return NVML_ERROR_NOT_SUPPORTED;
    switch (f->fieldId) {
    case NVML_FI_DEV_RESET_STATUS:
        return put_u32(f, action == 1);
    case NVML_FI_DEV_DRAIN_AND_RESET_STATUS:
        return put_u32(f, action == 4);
    default:
        return put_u32(f, action);
    }
}

static nvmlReturn_t read_field(const struct call *c, nvmlFieldValue_t *f)
{
    switch (f->fieldId) {
    case NVML_FI_DEV_ECC_CURRENT:
    case NVML_FI_DEV_ECC_PENDING:
        return gpu_is_data_center(c->gpu) ? put_u32(f, 1) : NVML_ERROR_NOT_SUPPORTED;
    case NVML_FI_DEV_MEMORY_TEMP:
        return gpu_is_data_center(c->gpu) ? put_u32(f, (unsigned int)gpu_temperature(c->gpu, c->slot) + 6)
                                          : NVML_ERROR_NOT_SUPPORTED;
    case NVML_FI_DEV_PCIE_REPLAY_COUNTER:
    case NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER:
    case NVML_FI_DEV_C2C_LINK_COUNT:
        return put_u32(f, 0);
    case NVML_FI_DEV_RESET_STATUS:
    case NVML_FI_DEV_DRAIN_AND_RESET_STATUS:
    case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
        return recovery_field(c, f);
    default:
        return power_field(c, f);
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(values != NULL && count > 0);
    for (int i = 0; i < count; i++) {
        nvmlFieldValue_t *f = &values[i];
        uint64_t start = monotonic_ns();
        f->timestamp = wall_clock_us();
        f->value.ullVal = 0;
        f->nvmlReturn = f->fieldId > 0 && f->fieldId < NVML_FI_MAX ? read_field(&c, f) : NVML_ERROR_INVALID_ARGUMENT;
        f->latencyUsec = (long long)((monotonic_ns() - start) / 1000);
    }
    return NVML_SUCCESS;
}
