// Clocks and performance states of an idle GPU, and counts of its units.
#define _GNU_SOURCE
#include "sim.h"

enum { CLOCK_STEP = 15 }; // MHz between supported graphics clocks

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

// The clock of an idle GPU, within the limits of locked clocks.
static unsigned int current_clock(const struct gpu *g, nvmlClockType_t type)
{
    const struct board *b = board_of(g);
    bool memory = type == NVML_CLOCK_MEM;
    unsigned int clock = idle_clock(b, type);
    unsigned int min = (unsigned int)gpu_value(g, memory ? LOCKED_CLOCK_MEMORY_MIN : LOCKED_CLOCK_GRAPHICS_MIN, 0);
    unsigned int max =
        (unsigned int)gpu_value(g, memory ? LOCKED_CLOCK_MEMORY_MAX : LOCKED_CLOCK_GRAPHICS_MAX, UINT32_MAX);
    if (type == NVML_CLOCK_VIDEO)
        return clock;
    return clock < min ? min : clock > max ? max : clock;
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT);
    return put_uint(mhz, current_clock(c.gpu, type));
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT);
    return put_uint(mhz, max_clock(board_of(c.gpu), type));
}

static nvmlReturn_t require_application_clocks(const struct call *c)
{
    return gpu_is_data_center(c->gpu) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

// The default application clocks are the highest ones.
static nvmlReturn_t put_default_clock(const struct call *c, nvmlClockType_t type, unsigned int *mhz)
{
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT);
    TRY(require_application_clocks(c));
    if (type == NVML_CLOCK_VIDEO)
        return NVML_ERROR_NOT_SUPPORTED;
    return put_uint(mhz, max_clock(board_of(c->gpu), type));
}

static nvmlReturn_t put_applications_clock(const struct call *c, nvmlClockType_t type, unsigned int *mhz)
{
    TRY(put_default_clock(c, type, mhz));
    *mhz = (unsigned int)gpu_value(
        c->gpu, type == NVML_CLOCK_MEM ? APPLICATION_CLOCK_MEMORY : APPLICATION_CLOCK_GRAPHICS, *mhz);
    return NVML_SUCCESS;
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
    return put_default_clock(&c, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_default_clock(&c, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id,
                                         unsigned int *mhz)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)type < NVML_CLOCK_COUNT && (unsigned int)id < NVML_CLOCK_ID_COUNT);
    switch (id) {
    case NVML_CLOCK_ID_CURRENT:
        return put_uint(mhz, current_clock(c.gpu, type));
    case NVML_CLOCK_ID_APP_CLOCK_TARGET:
        return put_applications_clock(&c, type, mhz);
    default:
        return put_default_clock(&c, type, mhz);
    }
}

// Sets the application clocks, which must be among those that the GPU supports.
NVML_API nvmlReturn_t nvmlDeviceSetApplicationsClocks(nvmlDevice_t device, unsigned int memory, unsigned int graphics)
{
    ENTER_DEVICE(c, device, FEATURE);
    TRY(require_application_clocks(&c));
    const struct board *b = board_of(c.gpu);
    REQUIRE(memory == b->memory_max && graphics <= b->graphics_max && graphics >= b->graphics_idle &&
            (b->graphics_max - graphics) % CLOCK_STEP == 0);
    TRY(value_set(c.slot, APPLICATION_CLOCK_MEMORY, memory));
    return value_set(c.slot, APPLICATION_CLOCK_GRAPHICS, graphics);
}

NVML_API nvmlReturn_t nvmlDeviceResetApplicationsClocks(nvmlDevice_t device)
{
    ENTER_DEVICE(c, device, FEATURE);
    TRY(require_application_clocks(&c));
    TRY(value_unset(c.slot, APPLICATION_CLOCK_MEMORY));
    return value_unset(c.slot, APPLICATION_CLOCK_GRAPHICS);
}

static nvmlReturn_t lock_clocks(const struct call *c, enum value low, enum value high, unsigned int min,
                                unsigned int max)
{
    REQUIRE(min <= max && max > 0);
    TRY(value_set(c->slot, low, min));
    return value_set(c->slot, high, max);
}

NVML_API nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned int min, unsigned int max)
{
    ENTER_DEVICE(c, device, FEATURE);
    return lock_clocks(&c, LOCKED_CLOCK_GRAPHICS_MIN, LOCKED_CLOCK_GRAPHICS_MAX, min, max);
}

NVML_API nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device)
{
    ENTER_DEVICE(c, device, FEATURE);
    TRY(value_unset(c.slot, LOCKED_CLOCK_GRAPHICS_MIN));
    return value_unset(c.slot, LOCKED_CLOCK_GRAPHICS_MAX);
}

NVML_API nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t device, unsigned int min, unsigned int max)
{
    ENTER_DEVICE(c, device, FEATURE);
    return lock_clocks(&c, LOCKED_CLOCK_MEMORY_MIN, LOCKED_CLOCK_MEMORY_MAX, min, max);
}

NVML_API nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t device)
{
    ENTER_DEVICE(c, device, FEATURE);
    TRY(value_unset(c.slot, LOCKED_CLOCK_MEMORY_MIN));
    return value_unset(c.slot, LOCKED_CLOCK_MEMORY_MAX);
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
    return put_clocks(b->graphics_max, b->graphics_idle, CLOCK_STEP, count, mhz);
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
