// Temperature, power, utilization, fans and PCIe of an idle GPU.
#define _GNU_SOURCE
#include "sim.h"

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                               unsigned int *degrees)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(sensor == NVML_TEMPERATURE_GPU);
    return put_uint(degrees, (unsigned int)gpu_temperature(c.gpu, c.slot));
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(temperature != NULL);
    TRY(check_version(temperature->version, nvmlTemperature_v1));
    REQUIRE(temperature->sensorType == NVML_TEMPERATURE_GPU);
    temperature->temperature = gpu_temperature(c.gpu, c.slot);
    return NVML_SUCCESS;
}

static const unsigned int thresholds[] = {
    [NVML_TEMPERATURE_THRESHOLD_SHUTDOWN] = 92,
    [NVML_TEMPERATURE_THRESHOLD_SLOWDOWN] = 89,
    [NVML_TEMPERATURE_THRESHOLD_MEM_MAX] = 95,
    [NVML_TEMPERATURE_THRESHOLD_GPU_MAX] = 87,
};

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t threshold,
                                                        unsigned int *degrees)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)threshold < NVML_TEMPERATURE_THRESHOLD_COUNT);
    if ((size_t)threshold >= sizeof(thresholds) / sizeof(thresholds[0]))
        return NVML_ERROR_NOT_SUPPORTED;
    return put_uint(degrees, thresholds[threshold]);
}

NVML_API nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *margin)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(margin != NULL);
    TRY(check_version(margin->version, nvmlMarginTemperature_v1));
    margin->marginTemperature =
        (int)thresholds[NVML_TEMPERATURE_THRESHOLD_GPU_MAX] - gpu_temperature(c.gpu, c.slot);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(milliwatts, gpu_power_draw(c.gpu, c.slot));
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(mode != NULL);
    *mode = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(milliwatts, gpu_power_limit(c.gpu));
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(milliwatts, gpu_default_power_limit(c.gpu));
}

NVML_API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(milliwatts, gpu_power_limit(c.gpu));
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *min,
                                                                   unsigned int *max)
{
    ENTER_DEVICE(c, device, FEATURE);
    TRY(put_uint(min, board_of(c.gpu)->power_min));
    return put_uint(max, gpu_default_power_limit(c.gpu));
}

static nvmlReturn_t set_power_limit(const struct call *c, unsigned int milliwatts)
{
    REQUIRE(milliwatts >= board_of(c->gpu)->power_min && milliwatts <= gpu_default_power_limit(c->gpu));
    if (milliwatts == gpu_default_power_limit(c->gpu))
        return value_unset(c->slot, POWER_LIMIT);
    return value_set(c->slot, POWER_LIMIT, milliwatts);
}

NVML_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int milliwatts)
{
    ENTER_DEVICE(c, device, FEATURE);
    return set_power_limit(&c, milliwatts);
}

NVML_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, nvmlPowerValue_v2_t *power)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(power != NULL);
    TRY(check_version(power->version, nvmlPowerValue_v2));
    REQUIRE(power->powerScope == NVML_POWER_SCOPE_GPU);
    return set_power_limit(&c, power->powerValueMw);
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(millijoules != NULL);
    *millijoules = gpu_energy(c.gpu, c.slot);
    return NVML_SUCCESS;
}

// NVML does not report the utilization of a whole GPU in MIG mode.
static nvmlReturn_t require_whole(const struct call *c)
{
    return c->gpu->mig == MIG_ENABLED ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(utilization != NULL);
    TRY(require_whole(&c));
    *utilization = (nvmlUtilization_t){0, 0};
    return NVML_SUCCESS;
}

enum { SAMPLING_US = 167000 };

static nvmlReturn_t put_idle_engine(const struct call *c, unsigned int *utilization, unsigned int *period)
{
    REQUIRE(utilization != NULL && period != NULL);
    TRY(require_whole(c));
    *utilization = 0;
    *period = SAMPLING_US;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *utilization,
                                                      unsigned int *period)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_idle_engine(&c, utilization, period);
}

NVML_API nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *utilization,
                                                      unsigned int *period)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_idle_engine(&c, utilization, period);
}

NVML_API nvmlReturn_t nvmlDeviceGetJpgUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *period)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_idle_engine(&c, utilization, period);
}

NVML_API nvmlReturn_t nvmlDeviceGetOfaUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *period)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_idle_engine(&c, utilization, period);
}

// A server's module has no fan of its own.
static unsigned int fan_count(const struct gpu *g) { return gpu_is_data_center(g) ? 0 : 2; }

NVML_API nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned int *count)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(count, fan_count(c.gpu));
}

static nvmlReturn_t put_fan_speed(const struct call *c, unsigned int fan, unsigned int *percent)
{
    if (fan_count(c->gpu) == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    REQUIRE(fan < fan_count(c->gpu));
    return put_uint(percent, 30);
}

NVML_API nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *percent)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_fan_speed(&c, 0, percent);
}

NVML_API nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned int fan, unsigned int *percent)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_fan_speed(&c, fan, percent);
}

static nvmlReturn_t put_generation(nvmlDevice_t device, const char *function, unsigned int *generation)
{
    struct call c __attribute__((cleanup(call_end))) = {.function = function};
    TRY(call_begin(&c));
    TRY(call_device(&c, device, FEATURE));
    return put_uint(generation, board_of(c.gpu)->pcie_generation);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation)
{
    return put_generation(device, __func__, generation);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation)
{
    return put_generation(device, __func__, generation);
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation)
{
    return put_generation(device, __func__, generation);
}

// The code of a link speed is the PCIe generation.
NVML_API nvmlReturn_t nvmlDeviceGetPcieLinkMaxSpeed(nvmlDevice_t device, unsigned int *code)
{
    return put_generation(device, __func__, code);
}

NVML_API nvmlReturn_t nvmlDeviceGetPcieSpeed(nvmlDevice_t device, unsigned int *megabytes)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(megabytes, 1000U << board_of(c.gpu)->pcie_generation);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned int *lanes)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(lanes, 16);
}

NVML_API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *lanes)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(lanes, 16);
}

NVML_API nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned int *count)
{
    ENTER_DEVICE(c, device, FEATURE);
    return put_uint(count, 0);
}

NVML_API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter,
                                                  unsigned int *kilobytes)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE((unsigned int)counter < NVML_PCIE_UTIL_COUNT);
    return put_uint(kilobytes, 0);
}
