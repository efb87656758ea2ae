// Clocks and performance states of an idle GPU, and counts of its units.
#define _GNU_SOURCE
#include "sim.h"

// Clocks of video engines run somewhat below the graphics clock.
static unsigned int max_clock(const struct board *b, nvmlClockType_t type)
{
    switch (type) {
    case NVML_CLOCK_MEM:
        return b->memory_max;
    case NVML_CLOCK_VIDEO:
        return b->graphics_max * 9 / 10;
    default:
        return b->graphics_max;
    }
}

static unsigned int idle_clock(const struct board *b, nvmlClockType_t type)
{
    switch (type) {
    case NVML_CLOCK_MEM:
        return b->memory_idle;
    case NVML_CLOCK_VIDEO:
        return b->graphics_max / 2;
    default:
        return b->graphics_idle;
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT);
    return put_uint(mhz, idle_clock(board_of(c.gpu), type));
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT);
    return put_uint(mhz, max_clock(board_of(c.gpu), type));
}

static nvmlReturn_t put_applications_clock(const struct call *c, nvmlClockType_t type, unsigned int *mhz)
{
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT);
    if (!gpu_is_data_center(c->gpu) || type == NVML_CLOCK_VIDEO)
        return NVML_ERROR_NOT_SUPPORTED;
    return put_uint(mhz, max_clock(board_of(c->gpu), type));
}

NVML_API nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_applications_clock(&c, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, nvmlClockType_t type,
                                                            unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_applications_clock(&c, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_applications_clock(&c, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id,
                                         unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT && (unsigned int)id < NVML_CLOCK_ID_COUNT);
    if (id == NVML_CLOCK_ID_CURRENT)
        return put_uint(mhz, idle_clock(board_of(c.gpu), type));
    return put_applications_clock(&c, type, mhz);
}

// Copies a descending list of clocks to the caller's array. If it is too small, sets the number of clocks.
static nvmlReturn_t put_clocks(unsigned int from, unsigned int to, unsigned int step, unsigned int *count,
                               unsigned int *clocks)
{
    REQUIRE(count != NULL);
    unsigned int room = *count;
    *count = (from - to) / step + 1;
    if (room < *count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    REQUIRE(clocks != NULL);
    for (unsigned int i = 0; i < *count; i++)
        clocks[i] = from - i * step;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    unsigned int clock = board_of(c.gpu)->memory_max;
    return put_clocks(clock, clock, 1, count, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory_mhz,
                                                           unsigned int *count, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    const struct board *b = board_of(c.gpu);
    if (memory_mhz != b->memory_max)
        return NVML_ERROR_NOT_FOUND;
    return put_clocks(b->graphics_max, b->graphics_idle, 15, count, mhz);
}

static nvmlReturn_t put_reasons(const struct call *c, bool supported, unsigned long long *reasons)
{
    (void)c;
    REQUIRE(reasons != NULL);
    *reasons = supported ? 0x1ff : (unsigned long long)nvmlClocksEventReasonGpuIdle;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_reasons(&c, false, reasons);
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_reasons(&c, false, reasons);
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_reasons(&c, true, reasons);
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_reasons(&c, true, reasons);
}

// GPUs of servers are always in the highest state; others are in a low one when idle.
static nvmlReturn_t put_pstate(const struct call *c, nvmlPstates_t *state)
{
    REQUIRE(state != NULL);
    *state = gpu_is_data_center(c->gpu) ? NVML_PSTATE_0 : NVML_PSTATE_8;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_pstate(&c, state);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerState(nvmlDevice_t device, nvmlPstates_t *state)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_pstate(&c, state);
}

NVML_API nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned int *cores)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(cores, c.gpu->sms * board_of(c.gpu)->cores_per_sm);
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned int *width)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(width, board_of(c.gpu)->bus_width);
}
