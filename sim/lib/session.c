// A process's view between nvmlInit and nvmlShutdown: which GPUs it enumerates. As with the real library that is
// settled at the first init, by the device nodes that can be opened then, and indices count the visible GPUs only. The
// nodes stay open, so other processes see in /proc who uses a GPU.
#define _GNU_SOURCE
#include "sim.h"

#include <pthread.h>
#include <unistd.h>

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static unsigned int references;
static unsigned int count;
static unsigned int slots[MAX_GPUS];
static int control = -1, nodes[MAX_GPUS]; // descriptors of the device nodes

static void enumerate(const struct world *w)
{
    count = 0;
    control = control_node_hold();
    for (unsigned int slot = 0; slot < MAX_GPUS; slot++) {
        const struct gpu *g = &w->gpus[slot];
        int fd = -1;
        if (!g->present || g->gone || !gpu_node_hold(g, &fd))
            continue;
        nodes[count] = fd;
        slots[count++] = slot;
    }
}

static void close_nodes(void)
{
    for (unsigned int i = 0; i < count; i++)
        if (nodes[i] >= 0)
            close(nodes[i]);
    if (control >= 0)
        close(control);
    control = -1;
    count = 0;
}

// Runs when the library is closed.
__attribute__((destructor)) static void end(void)
{
    if (references > 0)
        close_nodes();
}

bool session_active(void)
{
    pthread_rwlock_rdlock(&lock);
    bool active = references > 0;
    pthread_rwlock_unlock(&lock);
    return active;
}

void session_open(const struct world *w)
{
    pthread_rwlock_wrlock(&lock);
    if (references++ == 0)
        enumerate(w);
    pthread_rwlock_unlock(&lock);
}

// False: the library was not initialized.
bool session_close(bool *last)
{
    pthread_rwlock_wrlock(&lock);
    bool open = references > 0;
    *last = open && --references == 0;
    if (*last)
        close_nodes();
    pthread_rwlock_unlock(&lock);
    return open;
}

unsigned int session_count(void)
{
    pthread_rwlock_rdlock(&lock);
    unsigned int n = count;
    pthread_rwlock_unlock(&lock);
    return n;
}

// The description's index of the GPU with an enumeration index.
bool session_slot(unsigned int index, unsigned int *slot)
{
    pthread_rwlock_rdlock(&lock);
    bool found = index < count;
    if (found)
        *slot = slots[index];
    pthread_rwlock_unlock(&lock);
    return found;
}

// The enumeration index of the GPU with the description's index. False: this process does not see it.
bool session_index(unsigned int slot, unsigned int *index)
{
    bool found = false;
    pthread_rwlock_rdlock(&lock);
    for (unsigned int i = 0; i < count && !found; i++)
        if (slots[i] == slot) {
            *index = i;
            found = true;
        }
    pthread_rwlock_unlock(&lock);
    return found;
}
