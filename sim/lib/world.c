// The meaning of the records of a description and of a state file. One reader serves both: the state file is read over
// a copy of the description.
#define _GNU_SOURCE
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Prepares a world of zeroed memory, before records are read into it.
void world_init(struct world *w) { memset(w->topology, NVML_TOPOLOGY_SYSTEM, sizeof(w->topology)); }

// Copies what is in use. Most of a world is not: it has room for the largest machine.
static void copy(struct world *to, const struct world *from)
{
    to->latency_ns = from->latency_ns;
    to->machine = from->machine;
    for (size_t i = 0; i < MAX_GPUS; i++)
        if (from->gpus[i].present) {
            to->gpus[i] = from->gpus[i];
            memcpy(to->topology[i], from->topology[i], sizeof(to->topology[i]));
        }
    to->mig_count = from->mig_count;
    to->profile_count = from->profile_count;
    to->fault_count = from->fault_count;
    to->event_count = from->event_count;
    memcpy(to->migs, from->migs, from->mig_count * sizeof(from->migs[0]));
    memcpy(to->profiles, from->profiles, from->profile_count * sizeof(from->profiles[0]));
    memcpy(to->faults, from->faults, from->fault_count * sizeof(from->faults[0]));
    memcpy(to->events, from->events, from->event_count * sizeof(from->events[0]));
    to->process_count = from->process_count;
    to->account_count = from->account_count;
    memcpy(to->processes, from->processes, from->process_count * sizeof(from->processes[0]));
    memcpy(to->accounts, from->accounts, from->account_count * sizeof(from->accounts[0]));
}

// A world with one reference: a copy of base, or an empty one. Its pages are its own: those that are not used take no
// memory, and all of them leave the process with the world. A heap would keep them, one heap for each thread.
struct world *world_new(const struct world *base)
{
    struct world *w = mmap(NULL, sizeof(*w), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (w == MAP_FAILED)
        return NULL;
    world_init(w);
    if (base != NULL)
        copy(w, base);
    w->references = 1;
    return w;
}

void world_free(struct world *w) { munmap(w, sizeof(*w)); }

// Reads domain:bus:device.function with 4 to 8 digits of domain. If the text is malformed, the targets are unchanged.
bool world_parse_bus(const char *text, unsigned int *domain, unsigned int *bus, unsigned int *device,
                     unsigned int *function)
{
    unsigned int d, b, v, f = 0;
    int used = 0;
    if (text == NULL || strlen(text) > 16 || strspn(text, "0123456789abcdefABCDEF:.") != strlen(text))
        return false;
    if (sscanf(text, "%8x:%2x:%2x.%1x%n", &d, &b, &v, &f, &used) != 4 || text[used] != '\0')
        return false;
    if (v > 31 || f > 7)
        return false;
    *domain = d;
    *bus = b;
    *device = v;
    *function = f;
    return true;
}

static bool read_slot(const struct record *r, const char *key, unsigned int *slot)
{
    uint64_t value;
    if (!record_number(r, key, MAX_GPUS - 1, &value))
        return false;
    *slot = (unsigned int)value;
    return true;
}

static void read_machine(struct world *w, const struct record *r)
{
    struct machine *m = &w->machine;
    record_text(r, "name", m->name, sizeof(m->name));
    record_text(r, "driver", m->driver, sizeof(m->driver));
    record_text(r, "kernel", m->kernel, sizeof(m->kernel));
    record_text(r, "nvml", m->nvml, sizeof(m->nvml));
    record_text(r, "libdir", m->libdir, sizeof(m->libdir));
    record_uint(r, "cuda", &m->cuda);
}

static void read_mig_mode(const struct record *r, enum mig_mode *mode)
{
    static const char *const names[] = {"unsupported", "disabled", "enabled"};
    const char *text = record_string(r, "mig");
    for (unsigned int i = 0; text != NULL && i < 3; i++)
        if (strcmp(text, names[i]) == 0)
            *mode = (enum mig_mode)i;
}

static void read_numa(const struct record *r, int *numa)
{
    uint64_t value;
    const char *text = record_string(r, "numa");
    if (text != NULL && strcmp(text, "-1") == 0)
        *numa = -1;
    else if (record_number(r, "numa", 1023, &value))
        *numa = (int)value;
}

// Watts or milliwatts: no board draws under 5 W, none has a limit of 5 kW.
static void read_power(const struct record *r, unsigned int *milliwatts)
{
    uint64_t value;
    if (record_number(r, "power", 10000000, &value))
        *milliwatts = (unsigned int)(value < 5000 ? value * 1000 : value);
}

static void new_gpu(struct gpu *g)
{
    *g = (struct gpu){.present = true, .numa = -1, .arch = NVML_DEVICE_ARCH_UNKNOWN};
    for (unsigned int i = 0; i < NVML_NVLINK_MAX_LINKS; i++)
        g->ports[i].type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
}

static void read_gpu(struct world *w, const struct record *r, bool is_state)
{
    unsigned int slot;
    if (!read_slot(r, "index", &slot))
        return;
    struct gpu *g = &w->gpus[slot];
    if (!g->present) {
        if (is_state)
            return; // the state file changes GPUs, it adds none
        new_gpu(g);
    }
    record_text(r, "uuid", g->uuid, sizeof(g->uuid));
    record_text(r, "name", g->name, sizeof(g->name));
    record_text(r, "serial", g->serial, NVML_DEVICE_SERIAL_BUFFER_SIZE);
    record_text(r, "board", g->board, NVML_DEVICE_PART_NUMBER_BUFFER_SIZE);
    record_text(r, "vbios", g->vbios, NVML_DEVICE_VBIOS_VERSION_BUFFER_SIZE);
    record_text(r, "brand", g->brand, sizeof(g->brand));
    record_uint(r, "minor", &g->minor);
    world_parse_bus(record_string(r, "bus"), &g->domain, &g->bus, &g->device, &g->function);
    record_uint(r, "device", &g->pci_id);
    record_uint(r, "subsystem", &g->pci_subsystem);
    record_number(r, "memory", UINT64_MAX, &g->memory);
    const char *cc = record_string(r, "cc");
    if (cc != NULL)
        sscanf(cc, "%4u.%4u", &g->cc_major, &g->cc_minor);
    record_uint(r, "arch", &g->arch);
    record_uint(r, "sms", &g->sms);
    record_uint(r, "maxmig", &g->max_mig);
    read_numa(r, &g->numa);
    read_power(r, &g->power);
    read_mig_mode(r, &g->mig);
}

struct number {
    const char *key;
    unsigned int *to;
};

static void read_numbers(const struct record *r, const struct number *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++)
        record_uint(r, numbers[i].key, numbers[i].to);
}

// Reads "0,2,4".
static void read_starts(const struct record *r, struct profile *p)
{
    const char *text = record_string(r, "starts");
    while (text != NULL && *text >= '0' && *text <= '9' && p->start_count < MAX_STARTS) {
        char *rest;
        p->starts[p->start_count++] = (unsigned int)(strtoul(text, &rest, 10) & 0xff);
        text = *rest == ',' ? rest + 1 : NULL;
    }
}

static void read_profile(struct world *w, const struct record *r)
{
    struct profile p = {0};
    if (!read_slot(r, "gpu", &p.gpu) || w->profile_count >= MAX_PROFILES)
        return;
    const struct number numbers[] = {
        {"id", &p.id}, {"enum", &p.code}, {"slices", &p.slices}, {"size", &p.size}, {"limit", &p.limit},
        {"sms", &p.sms}, {"copy", &p.copy_engines}, {"decoder", &p.decoders}, {"encoder", &p.encoders},
        {"jpeg", &p.jpegs}, {"ofa", &p.ofas},
    };
    read_numbers(r, numbers, sizeof(numbers) / sizeof(numbers[0]));
    record_text(r, "name", p.name, sizeof(p.name));
    record_number(r, "memory", UINT64_MAX, &p.memory);
    read_starts(r, &p);
    w->profiles[w->profile_count++] = p;
}

static int compare_migs(const void *a, const void *b)
{
    const struct mig *x = a, *y = b;
    if (x->gpu != y->gpu)
        return x->gpu < y->gpu ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static void read_mig(struct world *w, const struct record *r)
{
    struct mig m = {0};
    if (!read_slot(r, "gpu", &m.gpu) || !w->gpus[m.gpu].present)
        return;
    record_uint(r, "index", &m.index);
    if (!record_text(r, "uuid", m.uuid, sizeof(m.uuid)))
        return;
    record_text(r, "profile", m.profile, sizeof(m.profile));
    record_number(r, "memory", UINT64_MAX, &m.memory);
    const struct number numbers[] = {
        {"gi", &m.gi}, {"ci", &m.ci}, {"gislices", &m.gi_slices}, {"cislices", &m.ci_slices}, {"sms", &m.sms},
        {"giprofile", &m.gi_profile}, {"ciprofile", &m.ci_profile}, {"start", &m.start}, {"size", &m.size},
        {"cistart", &m.ci_start}, {"gicap", &m.gi_cap}, {"cicap", &m.ci_cap}, {"copy", &m.copy_engines},
        {"decoder", &m.decoders}, {"encoder", &m.encoders}, {"jpeg", &m.jpegs}, {"ofa", &m.ofas},
    };
    read_numbers(r, numbers, sizeof(numbers) / sizeof(numbers[0]));
    if (m.gi >= MAX_GI || m.ci >= MAX_CI)
        return;
    size_t i = 0;
    while (i < w->mig_count && (w->migs[i].gpu != m.gpu || w->migs[i].index != m.index))
        i++;
    if (i >= MAX_MIGS)
        return;
    w->migs[i] = m;
    w->mig_count += i == w->mig_count;
}

static void clear_migs(struct world *w, const struct record *r)
{
    unsigned int slot;
    if (!read_slot(r, "gpu", &slot))
        return;
    size_t kept = 0;
    for (size_t i = 0; i < w->mig_count; i++)
        if (w->migs[i].gpu != slot)
            w->migs[kept++] = w->migs[i];
    w->mig_count = kept;
}

static void read_link(struct world *w, const struct record *r)
{
    static const struct { const char *name; unsigned char level; } levels[] = {
        {"psb", NVML_TOPOLOGY_INTERNAL}, {"pix", NVML_TOPOLOGY_SINGLE}, {"pxb", NVML_TOPOLOGY_MULTIPLE},
        {"phb", NVML_TOPOLOGY_HOSTBRIDGE}, {"node", NVML_TOPOLOGY_NODE}, {"sys", NVML_TOPOLOGY_SYSTEM},
    };
    unsigned int a, b;
    const char *pcie = record_string(r, "pcie");
    if (pcie == NULL || !read_slot(r, "a", &a) || !read_slot(r, "b", &b))
        return;
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++)
        if (strcmp(pcie, levels[i].name) == 0)
            w->topology[a][b] = w->topology[b][a] = levels[i].level;
}

static void read_nvlink(struct world *w, const struct record *r)
{
    unsigned int slot;
    uint64_t port;
    if (!read_slot(r, "gpu", &slot) || !record_number(r, "port", NVML_NVLINK_MAX_LINKS - 1, &port))
        return;
    struct port p = {.type = NVML_NVLINK_DEVICE_TYPE_GPU};
    const char *type = record_string(r, "type");
    if (type != NULL && strcmp(type, "switch") == 0)
        p.type = NVML_NVLINK_DEVICE_TYPE_SWITCH;
    if (!world_parse_bus(record_string(r, "remote"), &p.domain, &p.bus, &p.device, &p.function))
        return;
    record_uint(r, "version", &p.version);
    record_uint(r, "speed", &p.speed);
    if (w->gpus[slot].present)
        w->gpus[slot].ports[port] = p;
}

static void read_fault(struct world *w, const struct record *r)
{
    struct fault f = {.gpu = -1};
    unsigned int slot = 0;
    uint64_t number;
    if (read_slot(r, "gpu", &slot))
        f.gpu = (int)slot;
    else if (record_string(r, "gpu") != NULL)
        return; // for one GPU, but malformed: must not apply to all
    const char *kind = record_string(r, "kind");
    if (kind != NULL && f.gpu >= 0) {
        w->gpus[slot].lost |= strcmp(kind, "lost") == 0;
        w->gpus[slot].gone |=
            strcmp(kind, "gone") == 0 || strcmp(kind, "unbound") == 0 || strcmp(kind, "unplugged") == 0;
    }
    if (!record_text(r, "function", f.function, sizeof(f.function)) || w->fault_count >= MAX_FAULTS)
        return;
    if (record_number(r, "return", 999, &number))
        f.result = (nvmlReturn_t)number;
    f.hang = record_number(r, "hang", 1, &number) && number == 1;
    w->faults[w->fault_count++] = f;
}

static void read_values(struct world *w, const struct record *r)
{
    unsigned int slot;
    if (read_slot(r, "gpu", &slot) && w->gpus[slot].present)
        values_read(&w->gpus[slot], r);
}

static void read_event(struct world *w, const struct record *r)
{
    struct event e = {.gi = UINT32_MAX, .ci = UINT32_MAX};
    if (!read_slot(r, "gpu", &e.gpu) || !record_number(r, "seq", UINT64_MAX, &e.sequence) ||
        !record_number(r, "type", UINT64_MAX, &e.type) || w->event_count >= MAX_EVENTS)
        return;
    record_number(r, "data", UINT64_MAX, &e.data);
    record_uint(r, "gi", &e.gi);
    record_uint(r, "ci", &e.ci);
    uint64_t system = 0;
    e.system = record_number(r, "system", 1, &system) && system == 1;
    w->events[w->event_count++] = e;
}

// Reads a process, as it is on a GPU or in an accounting buffer.
static void read_process(struct process *list, size_t *count, const struct record *r)
{
    static const char *const types[] = {"compute", "graphics", "mps"};
    struct process p = {.gi = UINT32_MAX, .ci = UINT32_MAX};
    uint64_t pid;
    const char *type = record_string(r, "type");
    if (!read_slot(r, "gpu", &p.gpu) || !record_number(r, "pid", INT32_MAX, &pid) || *count >= MAX_PROCESSES)
        return;
    p.pid = (unsigned int)pid;
    for (unsigned int i = 0; type != NULL && i < 3; i++)
        if (strcmp(type, types[i]) == 0)
            p.type = (enum process_type)i;
    record_number(r, "start", UINT64_MAX, &p.start);
    record_number(r, "memory", UINT64_MAX, &p.memory);
    record_uint(r, "gi", &p.gi);
    record_uint(r, "ci", &p.ci);
    list[(*count)++] = p;
}

static void read_state_record(struct world *w, const struct record *r)
{
    if (record_is(r, "fault"))
        read_fault(w, r);
    else if (record_is(r, "event"))
        read_event(w, r);
    else if (record_is(r, "set"))
        read_values(w, r);
    else if (record_is(r, "process"))
        read_process(w->processes, &w->process_count, r);
    else if (record_is(r, "account"))
        read_process(w->accounts, &w->account_count, r);
    else if (record_is(r, "latency"))
        record_number(r, "ns", 60000000000ULL, &w->latency_ns);
    else if (record_is(r, "clearmig"))
        clear_migs(w, r);
}

static void read_record(struct world *w, const struct record *r, bool is_state)
{
    if (record_is(r, "machine"))
        read_machine(w, r);
    else if (record_is(r, "gpu"))
        read_gpu(w, r, is_state);
    else if (record_is(r, "mig"))
        read_mig(w, r);
    else if (record_is(r, "migprofile"))
        read_profile(w, r);
    else if (record_is(r, "link"))
        read_link(w, r);
    else if (record_is(r, "nvlink"))
        read_nvlink(w, r);
    else
        read_state_record(w, r);
}

// Reads records into w. If w has a driver version already, the records are those of a state file.
void world_read(struct world *w, const char *text, size_t length)
{
    bool is_state = w->machine.driver[0] != '\0';
    struct record *r = record_new();
    const char *cursor = text;
    while (r != NULL && record_next(r, &cursor, text + length))
        read_record(w, r, is_state);
    record_free(r);
    qsort(w->migs, w->mig_count, sizeof(w->migs[0]), compare_migs);
}
