// Initialization, shutdown and the texts of errors.
#define _GNU_SOURCE
#include "sim.h"

#include <string.h>

static nvmlReturn_t open_driver(struct call *c)
{
    if (!description_present())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    TRY(call_start(c));
    TRY(control_node_access());
    const struct machine *m = &c->world->machine;
    if (m->kernel[0] != '\0' && strcmp(m->kernel, m->driver) != 0)
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    for (unsigned int slot = 0; slot < MAX_GPUS; slot++)
        if (c->world->gpus[slot].present)
            reset_by_file(c->world, slot);
    session_open(c->world);
    return NVML_SUCCESS;
}

static nvmlReturn_t initialize(const char *function)
{
    struct call c = {.function = function};
    nvmlReturn_t result = open_driver(&c);
    call_end(&c);
    return result;
}

NVML_API nvmlReturn_t nvmlInit(void) { return initialize(__func__); }
NVML_API nvmlReturn_t nvmlInit_v2(void) { return initialize(__func__); }

// The flags decide whether a node without GPUs is an error and whether to attach; the simulation does neither.
NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialize(__func__);
}

NVML_API nvmlReturn_t nvmlShutdown(void)
{
    bool last;
    ENTER(c);
    if (!session_close(&last))
        return NVML_ERROR_UNINITIALIZED;
    if (last) {
        events_reset();
        system_events_reset();
    }
    return NVML_SUCCESS;
}

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        [NVML_SUCCESS] = "Success",
        [NVML_ERROR_UNINITIALIZED] = "Uninitialized",
        [NVML_ERROR_INVALID_ARGUMENT] = "Invalid Argument",
        [NVML_ERROR_NOT_SUPPORTED] = "Not Supported",
        [NVML_ERROR_NO_PERMISSION] = "Insufficient Permissions",
        [NVML_ERROR_ALREADY_INITIALIZED] = "Already Initialized",
        [NVML_ERROR_NOT_FOUND] = "Not Found",
        [NVML_ERROR_INSUFFICIENT_SIZE] = "Insufficient Size",
        [NVML_ERROR_INSUFFICIENT_POWER] = "Insufficient External Power",
        [NVML_ERROR_DRIVER_NOT_LOADED] = "Driver Not Loaded",
        [NVML_ERROR_TIMEOUT] = "Timeout",
        [NVML_ERROR_IRQ_ISSUE] = "Interrupt Request Issue",
        [NVML_ERROR_LIBRARY_NOT_FOUND] = "NVML Shared Library Not Found",
        [NVML_ERROR_FUNCTION_NOT_FOUND] = "Function Not Found",
        [NVML_ERROR_CORRUPTED_INFOROM] = "Corrupted infoROM",
        [NVML_ERROR_GPU_IS_LOST] = "GPU is lost",
        [NVML_ERROR_RESET_REQUIRED] = "GPU requires reset",
        [NVML_ERROR_OPERATING_SYSTEM] = "GPU access blocked by the operating system",
        [NVML_ERROR_LIB_RM_VERSION_MISMATCH] = "Driver/library version mismatch",
        [NVML_ERROR_IN_USE] = "In use by another client",
        [NVML_ERROR_MEMORY] = "Insufficient Memory",
        [NVML_ERROR_NO_DATA] = "No data",
        [NVML_ERROR_VGPU_ECC_NOT_SUPPORTED] = "vGPU operation not available while ECC is enabled",
        [NVML_ERROR_INSUFFICIENT_RESOURCES] = "Insufficient Resources",
        [NVML_ERROR_FREQ_NOT_SUPPORTED] = "Frequency Not Supported",
        [NVML_ERROR_ARGUMENT_VERSION_MISMATCH] = "Argument version mismatch",
        [NVML_ERROR_DEPRECATED] = "Deprecated",
        [NVML_ERROR_NOT_READY] = "System Not Ready",
        [NVML_ERROR_GPU_NOT_FOUND] = "GPU Not Found",
        [NVML_ERROR_INVALID_STATE] = "Invalid State",
        [NVML_ERROR_RESET_TYPE_NOT_SUPPORTED] = "Reset Type Not Supported",
    };
    size_t code = (size_t)result;
    if (code < sizeof(texts) / sizeof(texts[0]) && texts[code] != NULL)
        return texts[code];
    return "Unknown Error";
}
