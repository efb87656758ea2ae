// The values of GPUs that the state file changes, and their changes by functions of the library.
#define _GNU_SOURCE
#include "sim.h"

#include <string.h>

enum after_reset {
    CLEARED,
    KEPT,
    BY_VALUE, // cleared if it is a recovery action that a reset satisfies
};

static const struct {
    const char *name;
    enum after_reset after_reset;
    uint64_t max;
} table[] = {
#define VALUE(constant, name, after_reset, max, meaning) {name, after_reset, max},
#include "values.h"
#undef VALUE
};

// Reads the values in a record.
void values_read(struct gpu *g, const struct record *r)
{
    for (unsigned int v = 0; v < VALUE_COUNT; v++)
        if (record_number(r, table[v].name, table[v].max, &g->values[v]))
            g->changed |= 1ULL << v;
}

// A value, or what it is without a change.
uint64_t gpu_value(const struct gpu *g, enum value v, uint64_t otherwise)
{
    return (g->changed & 1ULL << v) != 0 ? g->values[v] : otherwise;
}

struct selection {
    unsigned int slot;
    const char *name;
};

static bool of_gpu(const struct record *r, unsigned int slot)
{
    uint64_t gpu;
    return record_number(r, "gpu", MAX_GPUS - 1, &gpu) && gpu == slot;
}

static bool is_value(const struct record *r, const void *argument)
{
    const struct selection *s = argument;
    return record_is(r, "set") && of_gpu(r, s->slot) && record_string(r, s->name) != NULL;
}

nvmlReturn_t value_set(unsigned int slot, enum value v, uint64_t number)
{
    return state_edit(is_value, &(struct selection){slot, table[v].name}, "set gpu=%u %s=%llu\n", slot, table[v].name,
                      (unsigned long long)number);
}

nvmlReturn_t value_unset(unsigned int slot, enum value v)
{
    return state_edit(is_value, &(struct selection){slot, table[v].name}, NULL);
}

static bool reset_satisfies(uint64_t action)
{
    switch (action) {
    case 1: // reset
    case 3: // drain P2P
    case 4: // drain and reset
    case 6: // bus reset
        return true;
    default:
        return false;
    }
}

// Whether a reset of the GPU removes a record: a value that it clears, a process, its MIG devices, and a failure with
// RESET_REQUIRED.
bool removed_by_reset(const struct record *r, const void *slot)
{
    uint64_t action;
    if (!of_gpu(r, *(const unsigned int *)slot))
        return false;
    if (record_is(r, "fault"))
        return record_number(r, "return", 999, &action) && action == NVML_ERROR_RESET_REQUIRED;
    if (!record_is(r, "set"))
        return record_is(r, "process") || record_is(r, "account") || record_is(r, "mig") || record_is(r, "clearmig");
    for (unsigned int v = 0; v < VALUE_COUNT; v++) {
        if (record_string(r, table[v].name) == NULL)
            continue;
        if (table[v].after_reset != BY_VALUE)
            return table[v].after_reset == CLEARED;
        return record_number(r, table[v].name, table[v].max, &action) && reset_satisfies(action);
    }
    return false;
}

static bool is_accounted(const struct record *r, const void *slot)
{
    return record_is(r, "account") && of_gpu(r, *(const unsigned int *)slot);
}

nvmlReturn_t accounts_clear(unsigned int slot) { return state_edit(is_accounted, &slot, NULL); }
