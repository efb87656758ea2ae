// The steps of every call before its function: check that the library is initialized, wait for the driver's latency,
// apply injected failures and hangs, check the handle and that the GPU is not lost. A call holds no lock while it
// waits, so a call that hangs blocks no other.
#define _GNU_SOURCE
#include "sim.h"

#include <ctype.h>
#include <string.h>
#include <time.h>

enum { HANG_POLL_NS = 10000000, SPIN_NS = 150000 };

uint64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

// Sleeps without early return. The last part is spun, since a sleep overshoots by more than a driver's call takes.
void sleep_ns(uint64_t ns)
{
    uint64_t end = monotonic_ns() + ns;
    if (ns > SPIN_NS) {
        uint64_t wake = end - SPIN_NS / 2;
        struct timespec at = {(time_t)(wake / 1000000000ULL), (long)(wake % 1000000000ULL)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) != 0)
            ;
    }
    while (monotonic_ns() < end)
        ;
}

// The length of a function's name without its version: "nvmlInit" of "nvmlInit_v2".
static size_t base_length(const char *function)
{
    size_t length = strlen(function), end = length;
    while (end > 0 && isdigit((unsigned char)function[end - 1]))
        end--;
    if (end < length && end > 2 && function[end - 1] == 'v' && function[end - 2] == '_')
        return end - 2;
    return length;
}

// A fault names a function with its version, or without to mean every version, or "*".
static bool names_function(const char *pattern, const char *function)
{
    if (strcmp(pattern, "*") == 0 || strcmp(pattern, function) == 0)
        return true;
    size_t base = base_length(function);
    return strlen(pattern) == base && strncmp(pattern, function, base) == 0;
}

static const struct fault *find_fault(const struct call *c, int gpu)
{
    for (size_t i = 0; i < c->world->fault_count; i++) {
        const struct fault *f = &c->world->faults[i];
        if (f->gpu == gpu && names_function(f->function, c->function))
            return f;
    }
    return NULL;
}

// Waits while a fault hangs the call, and returns injected failures: those of one GPU, or with -1 those without a GPU.
static nvmlReturn_t admit(struct call *c, int gpu)
{
    for (;;) {
        const struct fault *f = find_fault(c, gpu);
        if (f == NULL)
            return NVML_SUCCESS;
        if (!f->hang)
            return f->result;
        world_release(c->world);
        c->world = NULL;
        struct timespec pause = {0, HANG_POLL_NS};
        nanosleep(&pause, NULL);
        if ((c->world = world_acquire()) == NULL)
            return NVML_ERROR_MEMORY;
    }
}

nvmlReturn_t call_start(struct call *c)
{
    if ((c->world = world_acquire()) == NULL)
        return NVML_ERROR_MEMORY;
    if (c->world->latency_ns > 0)
        sleep_ns(c->world->latency_ns);
    return admit(c, -1);
}

nvmlReturn_t call_begin(struct call *c)
{
    if (!session_active())
        return NVML_ERROR_UNINITIALIZED;
    return call_start(c);
}

// Continues a call that is for one GPU.
nvmlReturn_t call_slot(struct call *c, unsigned int slot)
{
    if (reset_by_file_if_due(c->world, slot)) {
        call_end(c);
        if ((c->world = world_acquire()) == NULL)
            return NVML_ERROR_MEMORY;
    }
    TRY(admit(c, (int)slot));
    c->slot = slot;
    c->gpu = &c->world->gpus[slot];
    if (c->gpu->lost || c->gpu->gone)
        return NVML_ERROR_GPU_IS_LOST;
    return NVML_SUCCESS;
}

nvmlReturn_t call_device(struct call *c, nvmlDevice_t device, enum handle_kind kind)
{
    struct target t;
    unsigned int index;
    REQUIRE(device_target(device, &t) && session_index(t.slot, &index));
    TRY(call_slot(c, t.slot));
    if (t.gi == NO_INSTANCE)
        return NVML_SUCCESS;
    c->mig = world_mig(c->world, t);
    REQUIRE(c->mig != NULL && kind != WHOLE);
    return kind == FEATURE ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

void call_end(struct call *c)
{
    if (c->world != NULL)
        world_release(c->world);
    c->world = NULL;
}
