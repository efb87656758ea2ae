// Event sets. Events are in the state file: each has a sequence number that only grows, and a set returns those after
// the registration of the GPU with it, in their order. A wait holds no lock; a change of the state file, a freed set
// and a shutdown end it.
#define _GNU_SOURCE
#include "sim.h"

#include <pthread.h>
#include <stdlib.h>

enum { MAX_SETS = 256 };

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

static const uint64_t ALL_GPUS = nvmlEventTypeXidCriticalError | nvmlEventTypePState | nvmlEventTypeClock;
static const uint64_t ECC = nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
// The types that driver 575 added.
static const uint64_t NEWER = nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction;
static const uint64_t NEWER_ECC = nvmlEventTypeSingleBitEccErrorStorm | nvmlEventTypeDramRetirementEvent |
                                  nvmlEventTypeDramRetirementFailure | nvmlEventTypeNonFatalPoisonError |
                                  nvmlEventTypeFatalPoisonError;

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
    watch_notify();
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
    watch_notify();
    return s != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static uint64_t supported_types(const struct call *c)
{
    bool newer = driver_branch(c->world) >= 575, ecc = gpu_is_data_center(c->gpu);
    uint64_t mask = ALL_GPUS;
    mask |= newer ? NEWER : 0;
    mask |= ecc ? ECC : 0;
    mask |= newer && ecc ? NEWER_ECC : 0;
    mask |= c->gpu->mig != MIG_UNSUPPORTED ? (uint64_t)nvmlEventMigConfigChange : 0;
    return mask;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    ENTER_DEVICE(c, device, FEATURE);
    REQUIRE(types != NULL);
    *types = supported_types(&c);
    return NVML_SUCCESS;
}

uint64_t last_event(const struct world *w)
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
    if ((types & ~supported_types(&c)) != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    struct nvmlEventSet_st *s = find_set(set);
    if (s != NULL) {
        if (s->gpus[c.slot].mask == 0)
            s->gpus[c.slot].after = last_event(c.world);
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
        if (!e->system && (s->gpus[e->gpu].mask & e->type) != 0 && e->sequence > s->gpus[e->gpu].after &&
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

// A lost GPU hides the events of the other GPUs in its set, as with the real driver.
static nvmlReturn_t take_event(const struct world *w, struct nvmlEventSet_st *s, nvmlEventData_t *data)
{
    if (has_lost_gpu(w, s))
        return NVML_ERROR_GPU_IS_LOST;
    const struct event *e = next_event(w, s);
    if (e == NULL)
        return NVML_ERROR_TIMEOUT;
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

struct wait {
    nvmlEventSet_t set;
    uint64_t id; // of the set that the wait began with; 0: it begins
    nvmlEventData_t *data;
};

static nvmlReturn_t poll_set(void *argument)
{
    struct wait *wait = argument;
    struct world *w = world_acquire();
    nvmlReturn_t result = NVML_ERROR_INVALID_ARGUMENT;
    if (w == NULL)
        return NVML_ERROR_MEMORY;
    pthread_mutex_lock(&lock);
    struct nvmlEventSet_st *s = find_set(wait->set);
    if (s != NULL && (wait->id == 0 || wait->id == s->id)) {
        wait->id = s->id;
        result = take_event(w, s, wait->data);
    }
    pthread_mutex_unlock(&lock);
    world_release(w);
    return result;
}

// Calls poll until its result is not TIMEOUT, the time is over, or the library is shut down.
nvmlReturn_t wait_for_event(nvmlReturn_t (*poll)(void *), void *argument, unsigned int timeout_ms)
{
    uint64_t end = monotonic_ns() + (uint64_t)timeout_ms * 1000000;
    nvmlReturn_t result = poll(argument);
    if (result != NVML_ERROR_TIMEOUT || timeout_ms == 0)
        return result;
    uint64_t seen = watch_start();
    while ((result = poll(argument)) == NVML_ERROR_TIMEOUT && monotonic_ns() < end) {
        seen = watch_wait(seen, end);
        if (!session_active()) {
            result = NVML_ERROR_UNINITIALIZED;
            break;
        }
    }
    watch_stop();
    return result;
}

NVML_API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    ENTER(c);
    REQUIRE(data != NULL);
    call_end(&c); // a wait holds no world
    return wait_for_event(poll_set, &(struct wait){.set = set, .data = data}, timeout_ms);
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    ENTER(c);
    REQUIRE(data != NULL);
    call_end(&c); // a wait holds no world
    return wait_for_event(poll_set, &(struct wait){.set = set, .data = data}, timeout_ms);
}
