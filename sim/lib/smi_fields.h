// Values of a GPU as text, by the names of --query-gpu. A part of smi.c.
#ifndef GPU_SIM_SMI_FIELDS_H
#define GPU_SIM_SMI_FIELDS_H

#include "smi_library.h"

#include <strings.h>

// Writes a value. Returns whether there is one.
typedef nvmlReturn_t (*reader)(nvmlDevice_t device, unsigned int index, char *text);

static nvmlReturn_t number(nvmlReturn_t result, char *text, unsigned long long value)
{
    snprintf(text, TEXT, "%llu", value);
    return result;
}

static nvmlReturn_t read_index(nvmlDevice_t device, unsigned int index, char *text)
{
    (void)device;
    return number(NVML_SUCCESS, text, index);
}

static nvmlReturn_t read_count(nvmlDevice_t device, unsigned int index, char *text)
{
    unsigned int n = 0;
    (void)device, (void)index;
    nvmlReturn_t result = CALL(nvmlDeviceGetCount_v2, &n);
    return number(result, text, n);
}

static nvmlReturn_t read_driver(nvmlDevice_t device, unsigned int index, char *text)
{
    (void)device, (void)index;
    return CALL(nvmlSystemGetDriverVersion, text, TEXT);
}

#define STRING_READER(reader_name, function)                                             \
    static nvmlReturn_t reader_name(nvmlDevice_t device, unsigned int index, char *text) \
    {                                                                                    \
        (void)index;                                                                     \
        return CALL(function, device, text, TEXT);                                       \
    }
STRING_READER(read_name, nvmlDeviceGetName)
STRING_READER(read_uuid, nvmlDeviceGetUUID)
STRING_READER(read_serial, nvmlDeviceGetSerial)
STRING_READER(read_vbios, nvmlDeviceGetVbiosVersion)

static nvmlReturn_t read_bus(nvmlDevice_t device, unsigned int index, char *text)
{
    nvmlPciInfo_t pci = {0};
    (void)index;
    nvmlReturn_t result = CALL(nvmlDeviceGetPciInfo_v3, device, &pci);
    snprintf(text, TEXT, "%s", pci.busId);
    return result;
}

#define MEMORY_READER(reader_name, field)                                                \
    static nvmlReturn_t reader_name(nvmlDevice_t device, unsigned int index, char *text) \
    {                                                                                    \
        nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};                             \
        (void)index;                                                                     \
        nvmlReturn_t result = CALL(nvmlDeviceGetMemoryInfo_v2, device, &memory);         \
        return number(result, text, memory.field >> 20);                                 \
    }
MEMORY_READER(read_total, total)
MEMORY_READER(read_free, free)
MEMORY_READER(read_used, used)

static nvmlReturn_t read_mig(nvmlDevice_t device, unsigned int index, char *text)
{
    unsigned int current = 0, pending;
    (void)index;
    nvmlReturn_t result = CALL(nvmlDeviceGetMigMode, device, &current, &pending);
    snprintf(text, TEXT, "%s", current ? "Enabled" : "Disabled");
    return result;
}

static nvmlReturn_t read_cc(nvmlDevice_t device, unsigned int index, char *text)
{
    int major = 0, minor = 0;
    (void)index;
    nvmlReturn_t result = CALL(nvmlDeviceGetCudaComputeCapability, device, &major, &minor);
    snprintf(text, TEXT, "%d.%d", major, minor);
    return result;
}

static nvmlReturn_t read_temperature(nvmlDevice_t device, unsigned int index, char *text)
{
    unsigned int degrees = 0;
    (void)index;
    nvmlReturn_t result = CALL(nvmlDeviceGetTemperature, device, NVML_TEMPERATURE_GPU, &degrees);
    return number(result, text, degrees);
}

static nvmlReturn_t read_ecc(nvmlDevice_t device, unsigned int index, char *text)
{
    unsigned long long n = 0;
    (void)index;
    nvmlReturn_t result =
        CALL(nvmlDeviceGetTotalEccErrors, device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, &n);
    return number(result, text, n);
}

static nvmlReturn_t read_utilization(nvmlDevice_t device, unsigned int index, char *text)
{
    nvmlUtilization_t u = {0};
    (void)index;
    nvmlReturn_t result = CALL(nvmlDeviceGetUtilizationRates, device, &u);
    return number(result, text, u.gpu);
}

#define WATT_READER(reader_name, function)                                               \
    static nvmlReturn_t reader_name(nvmlDevice_t device, unsigned int index, char *text) \
    {                                                                                    \
        unsigned int milliwatts = 0;                                                     \
        (void)index;                                                                     \
        nvmlReturn_t result = CALL(function, device, &milliwatts);                       \
        snprintf(text, TEXT, "%u.%02u", milliwatts / 1000, milliwatts % 1000 / 10);      \
        return result;                                                                   \
    }
WATT_READER(read_draw, nvmlDeviceGetPowerUsage)
WATT_READER(read_limit, nvmlDeviceGetEnforcedPowerLimit)

// The fields of --query-gpu, with another name that some have, and the unit.
static const struct field {
    const char *name, *alias, *unit;
    reader read;
} fields[] = {
    {"index", "", "", read_index},
    {"uuid", "gpu_uuid", "", read_uuid},
    {"name", "gpu_name", "", read_name},
    {"count", "", "", read_count},
    {"serial", "gpu_serial", "", read_serial},
    {"vbios_version", "", "", read_vbios},
    {"pci.bus_id", "gpu_bus_id", "", read_bus},
    {"memory.total", "", "MiB", read_total},
    {"memory.free", "", "MiB", read_free},
    {"memory.used", "", "MiB", read_used},
    {"driver_version", "", "", read_driver},
    {"mig.mode.current", "", "", read_mig},
    {"mig.mode.pending", "", "", read_mig},
    {"compute_cap", "", "", read_cc},
    {"temperature.gpu", "", "", read_temperature},
    {"utilization.gpu", "", "%", read_utilization},
    {"power.draw", "", "W", read_draw},
    {"power.limit", "", "W", read_limit},
    {"ecc.errors.uncorrected.volatile.total", "", "", read_ecc},
};

static const struct field *find_field(const char *name)
{
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (strcasecmp(name, fields[i].name) == 0 || (fields[i].alias[0] && strcasecmp(name, fields[i].alias) == 0))
            return &fields[i];
    return NULL;
}

// The text of a value, or of the error in reading it.
static nvmlReturn_t field_text(const struct field *f, nvmlDevice_t device, unsigned int index, char *text)
{
    nvmlReturn_t result = f->read(device, index, text);
    if (result == NVML_ERROR_NOT_SUPPORTED)
        snprintf(text, TEXT, "N/A");
    else if (result != NVML_SUCCESS)
        snprintf(text, TEXT, "%s", p_nvmlErrorString(result));
    return result;
}

#endif
