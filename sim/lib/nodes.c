// The node's root, and which device nodes this process can open. No path is stored: the root is the path of the
// library's own file without the library directory.
#define _GNU_SOURCE
#include "sim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char library[PATH_MAX]; // where the file of this library is
static char root[PATH_MAX];    // "" is the machine's own root

// At load time, since the path may be relative and the process may change its directory later.
__attribute__((constructor)) static void find_root(void)
{
    Dl_info info;
    if (dladdr((const void *)&library, &info) == 0 || info.dli_fname == NULL)
        return;
    if (realpath(info.dli_fname, library) == NULL) {
        library[0] = '\0';
        return;
    }
    char *slash = strrchr(library, '/');
    const struct world *w = description_world();
    if (slash == NULL || w == NULL)
        return;
    size_t directory = (size_t)(slash - library), suffix = strlen(w->machine.libdir);
    if (suffix == 0 || directory <= suffix || library[directory - suffix - 1] != '/' ||
        memcmp(library + directory - suffix, w->machine.libdir, suffix) != 0)
        return;
    memcpy(root, library, directory - suffix - 1);
}

bool node_path(char *to, size_t size, const char *path)
{
    int length = snprintf(to, size, "%s%s", root, path);
    return length >= 0 && (size_t)length < size;
}

// 0 if the node can be opened, otherwise the error. A node without a driver (ENXIO, ENODEV) counts as open, since the
// kernel checks the permission first; its descriptor has O_PATH, which /proc shows like any other.
static int hold_node(const char *path, int access, int *fd)
{
    char full[PATH_MAX];
    if (!node_path(full, sizeof(full), path))
        return ENAMETOOLONG;
    *fd = open(full, access | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd >= 0)
        return 0;
    if (errno != ENXIO && errno != ENODEV)
        return errno;
    *fd = open(full, O_PATH | O_CLOEXEC);
    return 0;
}

static int open_node(const char *path, int access)
{
    int fd = -1, error = hold_node(path, access, &fd);
    if (fd >= 0)
        close(fd);
    return error;
}

int control_node_hold(void)
{
    int fd = -1;
    hold_node("/dev/nvidiactl", O_RDWR, &fd);
    return fd;
}

nvmlReturn_t control_node_access(void)
{
    switch (open_node("/dev/nvidiactl", O_RDWR)) {
    case 0:
        return NVML_SUCCESS;
    case EPERM:
    case EACCES:
        return NVML_ERROR_NO_PERMISSION;
    default:
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
}

bool gpu_node_hold(const struct gpu *g, int *fd)
{
    char path[64];
    snprintf(path, sizeof(path), "/dev/nvidia%u", g->minor);
    return hold_node(path, O_RDWR, fd) == 0;
}

bool mig_nodes_open(const struct mig *m)
{
    char gi[64], ci[64];
    snprintf(gi, sizeof(gi), "/dev/nvidia-caps/nvidia-cap%u", m->gi_cap);
    snprintf(ci, sizeof(ci), "/dev/nvidia-caps/nvidia-cap%u", m->ci_cap);
    // The driver makes these nodes read-only; permission to read gives access.
    return open_node(gi, O_RDONLY) == 0 && open_node(ci, O_RDONLY) == 0;
}
