// Event sets. Events are in the state file: each has a sequence number that only grows, and a set returns those after
// the registration of the GPU with it, in their order. Waiting polls the state file, so it holds no lock, and a freed
// set or a shutdown ends it.
#define _GNU_SOURCE
#include "sim.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_SETS = 256, POLL_NS = 10000000 };

struct nvmlEventSet_st {
    uint64_t id; // 0: free
    struct {
        uint64_t mask;  // registered types of events; 0: not registered
        uint64_t after; // sequence number of the last event before the registration, or returned
    } gpus[MAX_GPUS];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nvmlEventSet_st sets[MAX_SETS];
static uint64_t last_id;

static const uint64_t SUPPORTED = nvmlEventTypeXidCriticalError | nvmlEventTypeSingleBitEccError |
                                  nvmlEventTypeDoubleBitEccError | nvmlEventTypePState | nvmlEventTypeClock |
                                  nvmlEventMigConfigChange;

// The set of a handle, or NULL if it is not a handle of a set. The lock must be held.
static struct nvmlEventSet_st *find_set(nvmlEventSet_t set)
{
    uintptr_t at = (uintptr_t)set.handle, start = (uintptr_t)sets;
    if (at < start || at - start >= sizeof(sets) || (at - start) % sizeof(sets[0]) != 0 || set.handle->id == 0)
        return NULL;
    return set.handle;
}

void events_reset(void)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < MAX_SETS; i++)
        if (sets[i].id != 0) // a write to unused ones would give them memory
            sets[i] = (struct nvmlEventSet_st){0};
    pthread_mutex_unlock(&lock);
}

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_RESOURCES;
    ENTER(c);
    REQUIRE(set != NULL);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < MAX_SETS && result != NVML_SUCCESS; i++)
        if (sets[i].id == 0) {
            sets[i].id = ++last_id;
            set->handle = &sets[i];
            result = NVML_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    ENTER(c);
    pthread_mutex_lock(&lock);
    struct nvmlEventSet_st *s = find_set(set);
    if (s != NULL)
        *s = (struct nvmlEventSet_st){0};
    pthread_mutex_unlock(&lock);
    return s != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static bool supports_ecc(const struct gpu *g) { return gpu_is_data_center(g); }

static uint64_t supported_types(const struct gpu *g)
{
    uint64_t mask = SUPPORTED;
    if (!supports_ecc(g))
        mask &= ~(uint64_t)(nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError);
    if (g->mig == MIG_UNSUPPORTED)
        mask &= ~(uint64_t)nvmlEventMigConfigChange;
    return mask;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(types != NULL);
    *types = supported_types(c.gpu);
    return NVML_SUCCESS;
}

static uint64_t last_sequence(const struct world *w)
{
    uint64_t last = 0;
    for (size_t i = 0; i < w->event_count; i++)
        if (w->events[i].sequence > last)
            last = w->events[i].sequence;
    return last;
}

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    ENTER_DEVICE(c, device, FEATURE);
    if ((types & ~supported_types(c.gpu)) != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    struct nvmlEventSet_st *s = find_set(set);
    if (s != NULL) {
        if (s->gpus[c.slot].mask == 0)
            s->gpus[c.slot].after = last_sequence(c.world);
        s->gpus[c.slot].mask |= types;
    }
    pthread_mutex_unlock(&lock);
    return s != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

// The oldest event of the world that the set is registered for.
static const struct event *next_event(const struct world *w, const struct nvmlEventSet_st *s)
{
    const struct event *next = NULL;
    for (size_t i = 0; i < w->event_count; i++) {
        const struct event *e = &w->events[i];
        if ((s->gpus[e->gpu].mask & e->type) != 0 && e->sequence > s->gpus[e->gpu].after &&
            (next == NULL || e->sequence < next->sequence))
            next = e;
    }
    return next;
}

static bool has_lost_gpu(const struct world *w, const struct nvmlEventSet_st *s)
{
    for (size_t i = 0; i < MAX_GPUS; i++)
        if (s->gpus[i].mask != 0 && (w->gpus[i].lost || w->gpus[i].gone))
            return true;
    return false;
}

static nvmlReturn_t take_event(const struct world *w, struct nvmlEventSet_st *s, nvmlEventData_t *data)
{
    const struct event *e = next_event(w, s);
    if (e == NULL)
        return has_lost_gpu(w, s) ? NVML_ERROR_GPU_IS_LOST : NVML_ERROR_TIMEOUT;
    s->gpus[e->gpu].after = e->sequence;
    *data = (nvmlEventData_t){
        .device = device_handle((struct target){e->gpu, NO_INSTANCE, NO_INSTANCE}),
        .eventType = e->type,
        .eventData = e->data,
        .gpuInstanceId = e->gi,
        .computeInstanceId = e->ci,
    };
    return NVML_SUCCESS;
}

// Checks once: an event, a lost GPU, or TIMEOUT if there is neither. The set must still be the one that the wait began
// with.
static nvmlReturn_t poll_set(nvmlEventSet_t set, uint64_t *id, nvmlEventData_t *data)
{
    struct world *w = world_acquire();
    nvmlReturn_t result = NVML_ERROR_INVALID_ARGUMENT;
    if (w == NULL)
        return NVML_ERROR_MEMORY;
    pthread_mutex_lock(&lock);
    struct nvmlEventSet_st *s = find_set(set);
    if (s != NULL && (*id == 0 || *id == s->id)) {
        *id = s->id;
        result = take_event(w, s, data);
    }
    pthread_mutex_unlock(&lock);
    world_release(w);
    return result;
}

static nvmlReturn_t wait_for_event(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    uint64_t id = 0, end = monotonic_ns() + (uint64_t)timeout_ms * 1000000;
    REQUIRE(data != NULL);
    for (;;) {
        nvmlReturn_t result = poll_set(set, &id, data);
        uint64_t now = monotonic_ns();
        if (result != NVML_ERROR_TIMEOUT || now >= end)
            return result;
        uint64_t pause = end - now < POLL_NS ? end - now : POLL_NS;
        struct timespec t = {0, (long)pause};
        nanosleep(&t, NULL);
        if (!session_active())
            return NVML_ERROR_UNINITIALIZED;
    }
}

NVML_API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    ENTER(c);
    return wait_for_event(set, data, timeout_ms);
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    ENTER(c);
    return wait_for_event(set, data, timeout_ms);
}
