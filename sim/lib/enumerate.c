// How many GPUs there are, and handles of GPUs and MIG devices by index, UUID, PCI address and serial number.
#define _GNU_SOURCE
#include "sim.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

NVML_API nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    ENTER(c);
    return put_uint(count, session_count());
}

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER(c);
    return put_uint(count, session_count());
}

static nvmlReturn_t give_gpu(struct call *c, unsigned int slot, nvmlDevice_t *device)
{
    TRY(call_slot(c, slot));
    *device = device_handle((struct target){slot, NO_INSTANCE, NO_INSTANCE});
    return NVML_SUCCESS;
}

static nvmlReturn_t by_index(struct call *c, unsigned int index, nvmlDevice_t *device)
{
    unsigned int slot;
    REQUIRE(device != NULL && session_slot(index, &slot));
    return give_gpu(c, slot, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    ENTER(c);
    return by_index(&c, index, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    ENTER(c);
    return by_index(&c, index, device);
}

// Returns the first visible GPU that matches, lost or not.
static nvmlReturn_t by_match(struct call *c, bool (*matches)(const struct gpu *, const void *), const void *what,
                             nvmlDevice_t *device)
{
    unsigned int slot;
    for (unsigned int i = 0; session_slot(i, &slot); i++)
        if (matches(&c->world->gpus[slot], what))
            return give_gpu(c, slot, device);
    return NVML_ERROR_NOT_FOUND;
}

static bool has_uuid(const struct gpu *g, const void *uuid) { return strcmp(g->uuid, uuid) == 0; }

static nvmlReturn_t mig_by_uuid(struct call *c, const char *uuid, nvmlDevice_t *device)
{
    unsigned int index;
    for (size_t i = 0; i < c->world->mig_count; i++) {
        const struct mig *m = &c->world->migs[i];
        struct target t = {m->gpu, m->gi, m->ci};
        if (strcmp(m->uuid, uuid) != 0 || !session_index(m->gpu, &index))
            continue;
        TRY(call_slot(c, t.slot));
        m = world_mig(c->world, t);
        if (m == NULL || !mig_nodes_open(m))
            break;
        *device = device_handle(t);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t by_uuid(struct call *c, const char *uuid, nvmlDevice_t *device)
{
    REQUIRE(uuid != NULL && device != NULL);
    if (strncmp(uuid, "MIG-", 4) == 0)
        return mig_by_uuid(c, uuid, device);
    return by_match(c, has_uuid, uuid, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    ENTER(c);
    return by_uuid(&c, uuid, device);
}

// Writes the 16 bytes as the text after "GPU-" or "MIG-".
static void format_uuid(char *to, size_t size, const char *prefix, const unsigned char b[NVML_DEVICE_UUID_BINARY_LEN])
{
    snprintf(to, size, "%s%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    char text[NVML_DEVICE_UUID_ASCII_LEN + 1];
    ENTER(c);
    REQUIRE(uuid != NULL && device != NULL);
    TRY(check_version(uuid->version, nvmlUUID_v1));
    if (uuid->type == NVML_UUID_TYPE_ASCII) {
        snprintf(text, sizeof(text), "%.*s", NVML_DEVICE_UUID_ASCII_LEN, uuid->value.str);
        return by_uuid(&c, text, device);
    }
    REQUIRE(uuid->type == NVML_UUID_TYPE_BINARY);
    format_uuid(text, sizeof(text), "GPU-", uuid->value.bytes);
    nvmlReturn_t result = by_uuid(&c, text, device);
    if (result != NVML_ERROR_NOT_FOUND)
        return result;
    format_uuid(text, sizeof(text), "MIG-", uuid->value.bytes);
    return by_uuid(&c, text, device);
}

struct address {
    unsigned int domain, bus, device, function;
};

static bool has_address(const struct gpu *g, const void *what)
{
    const struct address *a = what;
    return g->domain == a->domain && g->bus == a->bus && g->device == a->device && g->function == a->function;
}

// The domain may be left out, as may the function.
static bool parse_address(const char *text, struct address *a)
{
    char full[48];
    bool domain = strchr(text, ':') != strrchr(text, ':');
    bool function = strchr(text, '.') != NULL;
    if (strlen(text) >= 32)
        return false;
    snprintf(full, sizeof(full), "%s%s%s", domain ? "" : "0000:", text, function ? "" : ".0");
    return world_parse_bus(full, &a->domain, &a->bus, &a->device, &a->function);
}

static nvmlReturn_t by_address(struct call *c, const char *bus_id, nvmlDevice_t *device)
{
    struct address a;
    REQUIRE(bus_id != NULL && device != NULL && parse_address(bus_id, &a));
    return by_match(c, has_address, &a, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    ENTER(c);
    return by_address(&c, bus_id, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    ENTER(c);
    return by_address(&c, bus_id, device);
}

static bool has_serial(const struct gpu *g, const void *serial)
{
    return g->serial[0] != '\0' && strcmp(g->serial, serial) == 0;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    ENTER(c);
    REQUIRE(serial != NULL && device != NULL);
    return by_match(&c, has_serial, serial, device);
}

// The PCI address of a GPU by its index, also of one that is lost. This is not a function of NVML: for a GPU without a
// handle the real nvidia-smi uses a private interface, and the simulated one this.
NVML_API nvmlReturn_t gpuSimGetBusId(unsigned int index, char *to, unsigned int length)
{
    char text[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
    unsigned int slot;
    ENTER(c);
    REQUIRE(session_slot(index, &slot));
    const struct gpu *g = &c.world->gpus[slot];
    snprintf(text, sizeof(text), "%04X:%02X:%02X.%u", g->domain, g->bus, g->device, g->function);
    return put_string(to, length, text);
}
