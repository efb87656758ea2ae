// Readings of an idle board, by architecture: round figures of each generation's data-centre module, and for Ada of a
// workstation's card.
#define _GNU_SOURCE
#include "sim.h"

static const struct board boards[] = {
    {NVML_DEVICE_ARCH_VOLTA, 1530, 135, 877, 877, 3, 42000, 150000, 64, 4096},
    {NVML_DEVICE_ARCH_AMPERE, 1410, 210, 1215, 1215, 4, 61000, 100000, 64, 5120},
    {NVML_DEVICE_ARCH_ADA, 2520, 210, 10501, 405, 4, 18000, 100000, 128, 384},
    {NVML_DEVICE_ARCH_HOPPER, 1980, 345, 2619, 2619, 5, 71000, 200000, 128, 5120},
    {NVML_DEVICE_ARCH_BLACKWELL, 1965, 120, 3996, 3996, 5, 145000, 200000, 128, 8192},
};

const struct board *board_of(const struct gpu *g)
{
    for (size_t i = 0; i < sizeof(boards) / sizeof(boards[0]); i++)
        if (boards[i].arch == g->arch)
            return &boards[i];
    return &boards[1];
}

// Power limits are in milliwatts.
unsigned int gpu_default_power_limit(const struct gpu *g) { return g->power > 0 ? g->power : 300000; }

unsigned int gpu_power_limit(const struct gpu *g)
{
    return (unsigned int)gpu_value(g, POWER_LIMIT, gpu_default_power_limit(g));
}

// The power drawn in milliwatts; a little different on each GPU.
unsigned int gpu_power_draw(const struct gpu *g, unsigned int slot)
{
    return board_of(g)->power_idle + slot * 317 % 4000;
}

// The temperature in degrees Celsius.
int gpu_temperature(const struct gpu *g, unsigned int slot)
{
    return (int)gpu_value(g, TEMPERATURE, 29 + slot * 3 % 7);
}

// The energy drawn in millijoules, since the machine started.
uint64_t gpu_energy(const struct gpu *g, unsigned int slot)
{
    return monotonic_ns() / 1000000 * gpu_power_draw(g, slot) / 1000;
}
