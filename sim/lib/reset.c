// The reset of a GPU: by nvidia-smi, which calls gpuSimReset, and by a write to the PCI device's reset file in sysfs,
// which the library finds with its next call.
#define _GNU_SOURCE
#include "sim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PATH_SIZE = 512, POLL_NS = 10000000, FILE_POLL_NS = 1000000 };

// How resets end: the value reset-result.
enum { WORKS, BUSY, NOT_SUPPORTED, NEEDS_PEERS, NEVER_RETURNS };

static void unlink_node_file(const char *path)
{
    char full[PATH_MAX];
    if (node_path(full, sizeof(full), path))
        remove(full);
}

// Removes the device nodes of a GPU's MIG devices and their files in /proc. A directory goes with its last file.
static void remove_mig_files(const struct world *w, unsigned int slot)
{
    char gi[PATH_SIZE], ci[2 * PATH_SIZE], access[3 * PATH_SIZE];
    for (size_t i = 0; i < w->mig_count; i++) {
        const struct mig *m = &w->migs[i];
        if (m->gpu != slot)
            continue;
        snprintf(access, sizeof(access), "/dev/nvidia-caps/nvidia-cap%u", m->gi_cap);
        unlink_node_file(access);
        snprintf(access, sizeof(access), "/dev/nvidia-caps/nvidia-cap%u", m->ci_cap);
        unlink_node_file(access);
        snprintf(gi, sizeof(gi), "/proc/driver/nvidia/capabilities/gpu%u/mig/gi%u", w->gpus[slot].minor, m->gi);
        snprintf(ci, sizeof(ci), "%s/ci%u", gi, m->ci);
        snprintf(access, sizeof(access), "%s/access", ci);
        unlink_node_file(access);
        unlink_node_file(ci);
        snprintf(access, sizeof(access), "%s/access", gi);
        unlink_node_file(access);
        unlink_node_file(gi);
    }
}

static bool has_mig_devices(const struct world *w, unsigned int slot)
{
    for (size_t i = 0; i < w->mig_count; i++)
        if (w->migs[i].gpu == slot)
            return true;
    return false;
}

// Does what a reset does to the state: see values.h. A GPU in MIG mode loses its MIG devices and keeps the mode.
static nvmlReturn_t apply_reset(const struct world *w, unsigned int slot)
{
    if (!has_mig_devices(w, slot))
        return state_edit(removed_by_reset, &slot, NULL);
    TRY(state_edit(removed_by_reset, &slot, "clearmig gpu=%u\n", slot));
    remove_mig_files(w, slot);
    return NVML_SUCCESS;
}

static bool holds(const char *pid, const struct stat *node)
{
    char path[PATH_SIZE];
    struct stat st;
    struct dirent *e;
    bool found = false;
    snprintf(path, sizeof(path), "/proc/%.20s/fd", pid);
    DIR *dir = opendir(path);
    while (dir != NULL && !found && (e = readdir(dir)) != NULL) {
        snprintf(path, sizeof(path), "/proc/%.20s/fd/%.20s", pid, e->d_name);
        found = stat(path, &st) == 0 && st.st_dev == node->st_dev && st.st_ino == node->st_ino;
    }
    if (dir != NULL)
        closedir(dir);
    return found;
}

// Whether another process has the GPU's device node open, as every process does that has initialized this library.
static bool held_by_another(const struct gpu *g)
{
    char name[64], path[PATH_MAX];
    struct stat node;
    struct dirent *e;
    bool found = false;
    snprintf(name, sizeof(name), "/dev/nvidia%u", g->minor);
    if (!node_path(path, sizeof(path), name) || stat(path, &node) != 0)
        return false;
    DIR *dir = opendir("/proc");
    while (dir != NULL && !found && (e = readdir(dir)) != NULL)
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && strtol(e->d_name, NULL, 10) != getpid())
            found = holds(e->d_name, &node);
    if (dir != NULL)
        closedir(dir);
    return found;
}

// How the reset ends by its fault, which counts if it is for some tries only.
static nvmlReturn_t take_result(const struct call *c, uint64_t *result)
{
    *result = gpu_value(c->gpu, RESET_RESULT, WORKS);
    uint64_t tries = gpu_value(c->gpu, RESET_TRIES, UINT32_MAX);
    if (*result == WORKS || tries == UINT32_MAX)
        return NVML_SUCCESS;
    if (tries > 1)
        return value_set(c->slot, RESET_TRIES, tries - 1);
    TRY(value_unset(c->slot, RESET_TRIES));
    return value_unset(c->slot, RESET_RESULT);
}

// Resets the GPU with an index, as nvidia-smi does: IN_USE while others use it or its persistence mode is on, and
// RESET_TYPE_NOT_SUPPORTED if it can be reset only together with others.
NVML_API nvmlReturn_t gpuSimReset(unsigned int index)
{
    unsigned int slot;
    uint64_t result;
    ENTER(c);
    REQUIRE(session_slot(index, &slot));
    TRY(call_slot(&c, slot));
    uint64_t delay = gpu_value(c.gpu, RESET_DELAY, 0), planned = gpu_value(c.gpu, RESET_RESULT, WORKS);
    if (planned != NOT_SUPPORTED && planned != NEEDS_PEERS &&
        (gpu_value(c.gpu, PERSISTENCE_MODE, 1) != 0 || gpu_has_process(c.world, slot) || held_by_another(c.gpu)))
        return NVML_ERROR_IN_USE;
    TRY(take_result(&c, &result));
    struct timespec pause = {0, POLL_NS};
    switch (result) {
    case BUSY:
        return NVML_ERROR_IN_USE;
    case NOT_SUPPORTED:
        return NVML_ERROR_NOT_SUPPORTED;
    case NEEDS_PEERS:
        return NVML_ERROR_RESET_TYPE_NOT_SUPPORTED;
    case NEVER_RETURNS:
        for (;;)
            nanosleep(&pause, NULL);
    default:
        sleep_ns(delay * 1000000);
        return apply_reset(c.world, slot);
    }
}

// Resets the GPU if something was written to its reset file, and empties the file. True: it was reset.
bool reset_by_file(const struct world *w, unsigned int slot)
{
    char name[PATH_SIZE], path[PATH_MAX];
    struct stat st;
    const struct gpu *g = &w->gpus[slot];
    snprintf(name, sizeof(name), "/sys/bus/pci/devices/%04x:%02x:%02x.%x/reset", g->domain, g->bus, g->device,
             g->function);
    if (!node_path(path, sizeof(path), name) || stat(path, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size == 0)
        return false;
    return truncate(path, 0) == 0 && apply_reset(w, slot) == NVML_SUCCESS;
}

// The same, but at most once a millisecond for each GPU, so that calls stay fast.
bool reset_by_file_if_due(const struct world *w, unsigned int slot)
{
    static _Atomic uint64_t checked[MAX_GPUS];
    uint64_t now = monotonic_ns();
    if (now - atomic_load_explicit(&checked[slot], memory_order_relaxed) < FILE_POLL_NS)
        return false;
    atomic_store_explicit(&checked[slot], now, memory_order_relaxed);
    return reset_by_file(w, slot);
}
