// The current world: the description, changed by the state file. gpu-sim replaces the file with a rename;
// every call checks whether it is still the same file, and reads it again if not.
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STATE_MAX = 1 << 20, PATH_SIZE = 4096 };

// Identifies a version of the file; all zero if there is no file.
struct stamp {
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec modified, changed;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct world *current;
static struct stamp current_stamp;

static struct stamp stamp_of(const struct stat *st)
{
    return (struct stamp){st->st_dev, st->st_ino, st->st_size, st->st_mtim, st->st_ctim};
}

static bool same_time(struct timespec a, struct timespec b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }

static bool same_stamp(const struct stamp *a, const struct stamp *b)
{
    return a->device == b->device && a->inode == b->inode && a->size == b->size &&
           same_time(a->modified, b->modified) && same_time(a->changed, b->changed);
}

// Reads a regular file of at most STATE_MAX bytes; the stamp is that of the file read.
static char *read_state(const char *path, size_t *length, struct stamp *stamp)
{
    struct stat st;
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size <= STATE_MAX &&
        (text = malloc((size_t)st.st_size + 1)) != NULL) {
        *stamp = stamp_of(&st);
        *length = 0;
        ssize_t got;
        while (*length < (size_t)st.st_size && (got = read(fd, text + *length, (size_t)st.st_size - *length)) > 0)
            *length += (size_t)got;
    }
    close(fd);
    return text;
}

static struct world *read_world(const char *path, struct stamp *stamp)
{
    size_t length = 0;
    struct world *w = world_new(description_world());
    char *text = w != NULL ? read_state(path, &length, stamp) : NULL;
    if (text != NULL)
        world_read(w, text, length);
    free(text);
    return w;
}

static void release_locked(struct world *w)
{
    if (w != NULL && --w->references == 0)
        world_free(w);
}

// Returns the world as it is now, which the caller releases. NULL: no memory.
struct world *world_acquire(void)
{
    char path[PATH_SIZE];
    struct stat st;
    struct stamp now = {0};
    bool there = node_path(path, sizeof(path), "/run/gpu-sim/state") && stat(path, &st) == 0 && S_ISREG(st.st_mode);
    if (there)
        now = stamp_of(&st);
    pthread_mutex_lock(&lock);
    if (current == NULL || !same_stamp(&now, &current_stamp)) {
        struct stamp read = {0};
        struct world *fresh = there ? read_world(path, &read) : world_new(description_world());
        if (fresh != NULL) {
            release_locked(current);
            current = fresh;
            current_stamp = read;
        }
    }
    struct world *w = current;
    if (w != NULL)
        w->references++;
    pthread_mutex_unlock(&lock);
    return w;
}

void world_release(struct world *w)
{
    pthread_mutex_lock(&lock);
    release_locked(w);
    pthread_mutex_unlock(&lock);
}

// Runs when the library is closed. A call in progress at the end of a process retains its world.
__attribute__((destructor)) static void forget(void)
{
    pthread_mutex_lock(&lock);
    release_locked(current);
    current = NULL;
    pthread_mutex_unlock(&lock);
}
