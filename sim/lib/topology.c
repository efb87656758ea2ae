// PCIe paths between GPUs, and NUMA nodes of processors.
#define _GNU_SOURCE
#include "sim.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device1, nvmlDevice_t device2,
                                                          nvmlGpuTopologyLevel_t *level)
{
    ENTER_DEVICE(c, device1, WHOLE);
    unsigned int first = c.slot;
    TRY(call_device(&c, device2, WHOLE));
    REQUIRE(level != NULL && first != c.slot);
    *level = (nvmlGpuTopologyLevel_t)c.world->topology[first][c.slot];
    return NVML_SUCCESS;
}

// Returns handles to the GPUs for which wanted is true, or without room for them only their number.
static nvmlReturn_t put_gpus(const struct call *c, bool (*wanted)(const struct call *, unsigned int, unsigned int),
                             unsigned int what, unsigned int *count, nvmlDevice_t *devices)
{
    unsigned int slot, found = 0, room;
    REQUIRE(count != NULL);
    room = *count;
    REQUIRE(room == 0 || devices != NULL);
    for (unsigned int i = 0; session_slot(i, &slot); i++) {
        if (!wanted(c, slot, what))
            continue;
        if (found < room)
            devices[found] = device_handle((struct target){slot, NO_INSTANCE, NO_INSTANCE});
        found++;
    }
    *count = room == 0 || found < room ? found : room;
    return NVML_SUCCESS;
}

static bool is_within(const struct call *c, unsigned int slot, unsigned int level)
{
    return slot != c->slot && c->world->topology[c->slot][slot] <= level;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level,
                                                       unsigned int *count, nvmlDevice_t *devices)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_gpus(&c, is_within, (unsigned int)level, count, devices);
}

// The NUMA node of a processor in sysfs. The simulated machine has the processors of the real one.
// -1: no such processor.
static int node_of_cpu(unsigned int cpu)
{
    char path[96];
    for (int node = 0; node < 64; node++) {
        snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpu%u", node, cpu);
        char *real = realpath(path, NULL);
        free(real);
        if (real != NULL)
            return node;
    }
    return -1;
}

static bool is_on_node(const struct call *c, unsigned int slot, unsigned int node)
{
    return c->world->gpus[slot].numa == (int)node;
}

NVML_API nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *devices)
{
    ENTER(c);
    int node = node_of_cpu(cpu);
    REQUIRE(node >= 0);
    return put_gpus(&c, is_on_node, (unsigned int)node, count, devices);
}

// NVML numbers only NUMA nodes of GPU memory, which coherent machines have, and the simulated ones do not.
NVML_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(node != NULL);
    return NVML_ERROR_NOT_SUPPORTED;
}

static void set_bit(unsigned long *set, unsigned int words, unsigned int bit)
{
    unsigned int width = sizeof(unsigned long) * CHAR_BIT;
    if (bit / width < words)
        set[bit / width] |= 1UL << bit % width;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set,
                                                  nvmlAffinityScope_t scope)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(set != NULL && words > 0 && scope <= NVML_AFFINITY_SCOPE_SOCKET);
    memset(set, 0, words * sizeof(*set));
    if (c.gpu->numa < 0)
        return NVML_ERROR_NOT_SUPPORTED;
    set_bit(set, words, (unsigned int)c.gpu->numa);
    return NVML_SUCCESS;
}

// Processors of the simulated machine: a fixed number on each NUMA node, in order.
enum { CPUS_PER_NODE = 56 };

static nvmlReturn_t put_cpus(const struct call *c, unsigned int words, unsigned long *set)
{
    REQUIRE(set != NULL && words > 0);
    memset(set, 0, words * sizeof(*set));
    unsigned int first = c->gpu->numa > 0 ? (unsigned int)c->gpu->numa * CPUS_PER_NODE : 0;
    for (unsigned int i = 0; i < CPUS_PER_NODE; i++)
        set_bit(set, words, first + i);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set)
{
    ENTER_DEVICE(c, device, WHOLE);
    return put_cpus(&c, words, set);
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int words, unsigned long *set,
                                                          nvmlAffinityScope_t scope)
{
    ENTER_DEVICE(c, device, WHOLE);
    REQUIRE(scope <= NVML_AFFINITY_SCOPE_SOCKET);
    return put_cpus(&c, words, set);
}
