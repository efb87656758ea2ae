// Changes of the state file by functions of the library, as gpu-sim makes them: under the lock, by a rename.
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

// The most that the file may have after a change; the reader ignores what is beyond.
enum { STATE_MAX = 1 << 20 };

static nvmlReturn_t from_errno(void)
{
    return errno == EACCES || errno == EPERM || errno == EROFS || errno == ENOENT ? NVML_ERROR_NO_PERMISSION
                                                                                   : NVML_ERROR_UNKNOWN;
}

struct edit {
    bool (*drop)(const struct record *, const void *);
    const void *argument;
    bool changed;
};

// Writes the records of a file that are not dropped.
static bool copy_records(const char *path, FILE *to, struct edit *e)
{
    struct record *r = record_new();
    char *text = malloc(STATE_MAX);
    FILE *from = fopen(path, "re");
    bool done = r != NULL && text != NULL && (from != NULL || errno == ENOENT);
    size_t length = done && from != NULL ? fread(text, 1, STATE_MAX, from) : 0;
    const char *cursor = text, *start = text;
    for (; done && record_next(r, &cursor, text + length); start = cursor) {
        size_t size = (size_t)(cursor - start);
        if (e->drop(r, e->argument))
            e->changed = true;
        else
            done = fwrite(start, 1, size, to) == size;
    }
    if (from != NULL)
        fclose(from);
    free(text);
    record_free(r);
    return done;
}

static nvmlReturn_t replace(const char *path, const char *next, struct edit *e, const char *format, va_list values)
{
    FILE *to = fopen(next, "wxe");
    if (to == NULL)
        return from_errno();
    bool written = fchmod(fileno(to), 0644) == 0 && copy_records(path, to, e) &&
                   (format == NULL || vfprintf(to, format, values) >= 0);
    written = fclose(to) == 0 && written;
    if (written && (e->changed || format != NULL) && rename(next, path) == 0)
        return NVML_SUCCESS;
    nvmlReturn_t result = written && !e->changed && format == NULL ? NVML_SUCCESS : from_errno();
    unlink(next);
    return result;
}

// Removes the records for which drop is true, and appends formatted lines, if there is a format. NO_PERMISSION: the
// caller may not change the node's state.
nvmlReturn_t state_edit(bool (*drop)(const struct record *, const void *), const void *argument,
                        const char *format, ...)
{
    char path[PATH_MAX], lock_path[PATH_MAX], next[PATH_MAX];
    if (!node_path(path, sizeof(path), "/run/gpu-sim/state") ||
        !node_path(lock_path, sizeof(lock_path), "/run/gpu-sim/lock") ||
        !node_path(next, sizeof(next), "/run/gpu-sim/.state"))
        return NVML_ERROR_UNKNOWN;
    int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (lock < 0)
        return from_errno();
    while (flock(lock, LOCK_EX) != 0 && errno == EINTR)
        ;
    unlink(next); // of a process that was killed; this one has the lock
    va_list values;
    va_start(values, format);
    nvmlReturn_t result = replace(path, next, &(struct edit){.drop = drop, .argument = argument}, format, values);
    va_end(values);
    close(lock);
    return result;
}
