// Helpers for the files of API functions.
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Copies a string to a caller's buffer of a given length, whole or not at all.
nvmlReturn_t put_string(char *to, unsigned int length, const char *from)
{
    REQUIRE(to != NULL);
    size_t size = strlen(from) + 1;
    if (length < size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(to, from, size);
    return NVML_SUCCESS;
}

nvmlReturn_t put_uint(unsigned int *to, unsigned int value)
{
    REQUIRE(to != NULL);
    *to = value;
    return NVML_SUCCESS;
}

nvmlReturn_t check_version(unsigned int got, unsigned int want)
{
    return got == want ? NVML_SUCCESS : NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}

const struct mig *world_mig(const struct world *w, struct target t)
{
    for (size_t i = 0; i < w->mig_count; i++) {
        const struct mig *m = &w->migs[i];
        if (m->gpu == t.slot && m->gi == t.gi && (t.ci == NO_INSTANCE || m->ci == t.ci))
            return w->gpus[t.slot].mig == MIG_ENABLED ? m : NULL;
    }
    return NULL;
}

// The number of ports of a GPU. NVML numbers more ports than a GPU has; those of the GPU come first.
unsigned int gpu_port_count(const struct gpu *g)
{
    unsigned int n = 0;
    for (unsigned int i = 0; i < NVML_NVLINK_MAX_LINKS; i++)
        if (g->ports[i].type != NVML_NVLINK_DEVICE_TYPE_UNKNOWN)
            n = i + 1;
    return n;
}

unsigned int gpu_active_ports(const struct gpu *g)
{
    unsigned int n = 0;
    for (unsigned int i = 0; i < NVML_NVLINK_MAX_LINKS; i++)
        n += g->ports[i].type != NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    return n;
}

// Whether an NVLink of the GPU is up.
bool gpu_link_up(const struct gpu *g, unsigned int port)
{
    return g->ports[port].type != NVML_NVLINK_DEVICE_TYPE_UNKNOWN &&
           (gpu_value(g, LINKS_DOWN, 0) & 1ULL << port) == 0;
}

// Whether the GPU registers with a fabric manager, which Hopper and later do behind NVSwitches.
bool gpu_on_fabric(const struct gpu *g)
{
    if (g->arch < NVML_DEVICE_ARCH_HOPPER || g->arch == NVML_DEVICE_ARCH_UNKNOWN)
        return false;
    for (unsigned int i = 0; i < NVML_NVLINK_MAX_LINKS; i++)
        if (g->ports[i].type == NVML_NVLINK_DEVICE_TYPE_SWITCH)
            return true;
    return false;
}

// Whether it is a card for servers: passive, no display, with ECC.
bool gpu_is_data_center(const struct gpu *g)
{
    return strstr(g->name, "GeForce") == NULL && strstr(g->name, "RTX") == NULL && strstr(g->name, "Quadro") == NULL;
}

// The driver's major version, such as 580.
unsigned int driver_branch(const struct world *w) { return (unsigned int)strtoul(w->machine.driver, NULL, 10); }
