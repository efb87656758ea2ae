// All functions of NVML that are not simulated. They return what a driver returns whose device lacks the feature. They
// must exist, since callers bind functions at the first call, and a missing one ends the process.
//
// They use none of their arguments but a device handle that comes first. That is sound: in the C calling conventions of
// Linux on x86-64 and AArch64 a caller cleans up its own arguments.
#define _GNU_SOURCE
#include "sim.h"

static nvmlReturn_t answer(const char *function)
{
    struct call c __attribute__((cleanup(call_end))) = {.function = function};
    TRY(call_begin(&c));
    return NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t answer_device(const char *function, nvmlDevice_t device)
{
    struct call c __attribute__((cleanup(call_end))) = {.function = function};
    TRY(call_begin(&c));
    TRY(call_device(&c, device, EITHER));
    return NVML_ERROR_NOT_SUPPORTED;
}

#define STUB(name)                       \
    NVML_API nvmlReturn_t name(void);    \
    NVML_API nvmlReturn_t name(void) { return answer(#name); }
#define DEVICE_STUB(name)                            \
    NVML_API nvmlReturn_t name(nvmlDevice_t device); \
    NVML_API nvmlReturn_t name(nvmlDevice_t device) { return answer_device(#name, device); }

#include "stub_names.h"
