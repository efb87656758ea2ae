// System event sets: which GPUs the driver was bound to and unbound from. Their events are in the state file among the
// others.
#define _GNU_SOURCE
#include "sim.h"

#include <pthread.h>

enum { MAX_SETS = 32 };

struct nvmlSystemEventSet_st {
    uint64_t id;    // 0: free
    uint64_t mask;  // registered types of events
    uint64_t after; // sequence number of the last event before the registration, or returned
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nvmlSystemEventSet_st sets[MAX_SETS];
static uint64_t last_id;

// The set of a handle, or NULL if it is not a handle of a set. The lock must be held.
static struct nvmlSystemEventSet_st *find_set(nvmlSystemEventSet_t set)
{
    uintptr_t at = (uintptr_t)set.handle, start = (uintptr_t)sets;
    if (at < start || at - start >= sizeof(sets) || (at - start) % sizeof(sets[0]) != 0 || set.handle->id == 0)
        return NULL;
    return set.handle;
}

void system_events_reset(void)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < MAX_SETS; i++)
        sets[i].id = 0;
    pthread_mutex_unlock(&lock);
}

NVML_API nvmlReturn_t nvmlSystemEventSetCreate(nvmlSystemEventSetCreateRequest_t *request)
{
    nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_RESOURCES;
    ENTER(c);
    REQUIRE(request != NULL);
    TRY(check_version(request->version, nvmlSystemEventSetCreateRequest_v1));
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < MAX_SETS && result != NVML_SUCCESS; i++)
        if (sets[i].id == 0) {
            sets[i] = (struct nvmlSystemEventSet_st){.id = ++last_id};
            request->set.handle = &sets[i];
            result = NVML_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

NVML_API nvmlReturn_t nvmlSystemEventSetFree(nvmlSystemEventSetFreeRequest_t *request)
{
    ENTER(c);
    REQUIRE(request != NULL);
    TRY(check_version(request->version, nvmlSystemEventSetFreeRequest_v1));
    pthread_mutex_lock(&lock);
    struct nvmlSystemEventSet_st *s = find_set(request->set);
    if (s != NULL)
        s->id = 0;
    pthread_mutex_unlock(&lock);
    watch_notify();
    return s != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlSystemRegisterEvents(nvmlSystemRegisterEventRequest_t *request)
{
    ENTER(c);
    REQUIRE(request != NULL);
    TRY(check_version(request->version, nvmlSystemRegisterEventRequest_v1));
    if ((request->eventTypes & ~(uint64_t)(nvmlSystemEventTypeGpuDriverUnbind | nvmlSystemEventTypeGpuDriverBind)) != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    struct nvmlSystemEventSet_st *s = find_set(request->set);
    if (s != NULL) {
        if (s->mask == 0)
            s->after = last_event(c.world);
        s->mask |= request->eventTypes;
    }
    pthread_mutex_unlock(&lock);
    return s != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

// The oldest event that the set is registered for.
static const struct event *next_event(const struct world *w, const struct nvmlSystemEventSet_st *s)
{
    const struct event *next = NULL;
    for (size_t i = 0; i < w->event_count; i++) {
        const struct event *e = &w->events[i];
        if (e->system && (s->mask & e->type) != 0 && e->sequence > s->after &&
            (next == NULL || e->sequence < next->sequence))
            next = e;
    }
    return next;
}

// A GPU's id as the kernel module has it.
static unsigned int gpu_id(const struct gpu *g) { return g->domain << 16 | g->bus << 8 | g->device; }

struct wait {
    nvmlSystemEventSetWaitRequest_t *request;
    uint64_t id; // of the set that the wait began with; 0: it begins
};

static nvmlReturn_t take_events(const struct world *w, struct nvmlSystemEventSet_st *s,
                                nvmlSystemEventSetWaitRequest_t *request)
{
    const struct event *e;
    request->numEvent = 0;
    while (request->numEvent < request->dataSize && (e = next_event(w, s)) != NULL) {
        s->after = e->sequence;
        request->data[request->numEvent++] =
            (nvmlSystemEventData_v1_t){.eventType = e->type, .gpuId = gpu_id(&w->gpus[e->gpu])};
    }
    return request->numEvent > 0 ? NVML_SUCCESS : NVML_ERROR_TIMEOUT;
}

static nvmlReturn_t poll_set(void *argument)
{
    struct wait *wait = argument;
    struct world *w = world_acquire();
    nvmlReturn_t result = NVML_ERROR_INVALID_ARGUMENT;
    if (w == NULL)
        return NVML_ERROR_MEMORY;
    pthread_mutex_lock(&lock);
    struct nvmlSystemEventSet_st *s = find_set(wait->request->set);
    if (s != NULL && (wait->id == 0 || wait->id == s->id)) {
        wait->id = s->id;
        result = take_events(w, s, wait->request);
    }
    pthread_mutex_unlock(&lock);
    world_release(w);
    return result;
}

NVML_API nvmlReturn_t nvmlSystemEventSetWait(nvmlSystemEventSetWaitRequest_t *request)
{
    ENTER(c);
    REQUIRE(request != NULL);
    TRY(check_version(request->version, nvmlSystemEventSetWaitRequest_v1));
    REQUIRE(request->data != NULL && request->dataSize > 0);
    call_end(&c); // a wait holds no world
    return wait_for_event(poll_set, &(struct wait){.request = request}, request->timeoutms);
}
