// Declarations for the files of the simulated library: the world (a machine by the description and the state file), the
// steps of a call, handles, and small helpers. The library exports nothing of this.
#ifndef GPU_SIM_SIM_H
#define GPU_SIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// libtest also compiles every source with NVIDIA's header, which checks the prototypes.
#ifdef NVML_HEADER
#include NVML_HEADER
#else
#include "nvml.h"
#endif

#define NVML_API __attribute__((visibility("default")))

enum {
    MAX_GPUS = 128,
    MAX_MIGS = 512, // of all GPUs together
    MAX_GI = 64, // GPU instance ids of a GPU are below
    MAX_CI = 16, // compute instance ids of a GPU instance are below
    MAX_PROFILES = 512, // of all GPUs together
    MAX_STARTS = 16, // places that a GPU instance may take
    MAX_FAULTS = 256,
    MAX_EVENTS = 256,
    MAX_PROCESSES = 256, // on all GPUs together
    TEXT_MAX = 96, // of every string in a description, with the final NUL
};

// --- record.c: the format of descriptions and of the state file

struct record;
struct record *record_new(void);
void record_free(struct record *r);
bool record_next(struct record *r, const char **cursor, const char *end);
bool record_is(const struct record *r, const char *type);
const char *record_string(const struct record *r, const char *key);
bool record_number(const struct record *r, const char *key, uint64_t max, uint64_t *value);
bool record_text(const struct record *r, const char *key, char *to, size_t size);
void record_uint(const struct record *r, const char *key, unsigned int *to);

// --- world.c: the meaning of records

enum mig_mode { MIG_UNSUPPORTED, MIG_DISABLED, MIG_ENABLED };

struct machine {
    char name[TEXT_MAX];
    char driver[TEXT_MAX]; // version of the user-space driver, which the library belongs to
    char kernel[TEXT_MAX]; // version of the kernel module; differs after an upgrade without a reboot
    char nvml[TEXT_MAX];
    char libdir[TEXT_MAX];
    unsigned int cuda; // 1000 * major + 10 * minor
};

// An NVLink port; idle where type is the unknown one.
struct port {
    nvmlIntNvLinkDeviceType_t type;
    unsigned int version; // major version of NVLink
    unsigned int speed;   // MB/s
    unsigned int domain, bus, device, function;
};

// What the state file can change of a GPU.
enum value {
#define VALUE(constant, name, after_reset, max, meaning) constant,
#include "values.h"
#undef VALUE
    VALUE_COUNT,
};

struct gpu {
    bool present, lost, gone;
    char uuid[TEXT_MAX], name[TEXT_MAX], serial[TEXT_MAX], board[TEXT_MAX], vbios[TEXT_MAX], brand[TEXT_MAX];
    unsigned int minor;
    unsigned int domain, bus, device, function;
    unsigned int pci_id, pci_subsystem;
    uint64_t memory; // bytes
    unsigned int cc_major, cc_minor, arch;
    int numa; // -1: none
    unsigned int sms;
    unsigned int power; // limit in milliwatts; 0: unknown
    enum mig_mode mig;
    unsigned int max_mig;
    struct port ports[NVML_NVLINK_MAX_LINKS];
    uint64_t changed; // a bit for each value that the state file has
    uint64_t values[VALUE_COUNT];
};

struct mig {
    unsigned int gpu, index, gi, ci;
    char uuid[TEXT_MAX], profile[TEXT_MAX];
    uint64_t memory; // bytes
    unsigned int gi_slices, ci_slices, sms, gi_profile, ci_profile, start, size, ci_start;
    unsigned int gi_cap, ci_cap; // N of nvidia-capN
    unsigned int copy_engines, decoders, encoders, jpegs, ofas;
};

// A profile of GPU instances that a GPU offers.
struct profile {
    unsigned int gpu;
    char name[TEXT_MAX];
    unsigned int id, code; // the driver's id; NVML_GPU_INSTANCE_PROFILE_*
    unsigned int slices, size, limit, sms;
    unsigned int copy_engines, decoders, encoders, jpegs, ofas;
    uint64_t memory; // bytes
    unsigned int start_count, starts[MAX_STARTS];
};

struct fault {
    int gpu; // -1: any call, with or without a GPU
    bool hang;
    nvmlReturn_t result;
    char function[TEXT_MAX];
};

struct event {
    bool system; // of system event sets: a GPU was bound or unbound
    uint64_t sequence, type, data;
    unsigned int gpu, gi, ci;
};

enum process_type { PROCESS_COMPUTE, PROCESS_GRAPHICS, PROCESS_MPS };

struct process {
    enum process_type type;
    unsigned int gpu, gi, ci, pid;
    uint64_t start;  // when it was started, as field 22 of /proc/PID/stat; 0: unknown
    uint64_t memory; // bytes
};

// One consistent state of the machine. It is immutable, and shared by calls.
struct world {
    unsigned int references;
    uint64_t latency_ns;
    struct machine machine;
    struct gpu gpus[MAX_GPUS]; // by the description's index
    // Nearest common point of each pair on PCIe; 0 (the same board) on the diagonal.
    unsigned char topology[MAX_GPUS][MAX_GPUS];
    size_t mig_count, profile_count, fault_count, event_count, process_count, account_count;
    struct mig migs[MAX_MIGS]; // by GPU, then by index
    struct profile profiles[MAX_PROFILES];
    struct fault faults[MAX_FAULTS];
    struct event events[MAX_EVENTS];
    struct process processes[MAX_PROCESSES];
    struct process accounts[MAX_PROCESSES]; // the accounting buffers
};

void world_init(struct world *w); // which must be all zeros
struct world *world_new(const struct world *base);
void world_free(struct world *w);
void world_read(struct world *w, const char *text, size_t length);
bool world_parse_bus(const char *text, unsigned int *domain, unsigned int *bus, unsigned int *device,
                     unsigned int *function);

// --- desc.c, state.c, nodes.c: where the world comes from

bool description_present(void);
const struct world *description_world(void); // NULL: there is no description
struct world *world_acquire(void);     // NULL: no memory
void world_release(struct world *w);
// Full path of a file of the node: root + path. False: too long.
bool node_path(char *to, size_t size, const char *path);
nvmlReturn_t control_node_access(void);
int control_node_hold(void); // a descriptor for as long as the library is initialized
bool gpu_node_hold(const struct gpu *g, int *fd); // false: this process cannot open it
bool mig_nodes_open(const struct mig *m);

// --- call.c: the steps of every call

enum handle_kind {
    WHOLE,   // a MIG handle is an invalid argument
    FEATURE, // a MIG handle is valid, but the feature is the whole GPU's: not supported
    EITHER,
};

struct call {
    const char *function;
    struct world *world;
    const struct gpu *gpu;
    unsigned int slot; // the GPU's index in the description
    const struct mig *mig;
};

nvmlReturn_t call_start(struct call *c); // without the check that the library is initialized
nvmlReturn_t call_begin(struct call *c);
nvmlReturn_t call_slot(struct call *c, unsigned int slot);
nvmlReturn_t call_device(struct call *c, nvmlDevice_t device, enum handle_kind kind);
void call_end(struct call *c); // may be called twice

// ENTER starts a call in an API function, and returns from the function on an error.
#define TRY(expression)                       \
    do {                                      \
        nvmlReturn_t tried_ = (expression);   \
        if (tried_ != NVML_SUCCESS)           \
            return tried_;                    \
    } while (0)
#define REQUIRE(condition) TRY((condition) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT)
#define ENTER(c)                                                               \
    struct call c __attribute__((cleanup(call_end))) = {.function = __func__}; \
    TRY(call_begin(&c))
// START does so for a function that needs no initialized library.
#define START(c)                                                               \
    struct call c __attribute__((cleanup(call_end))) = {.function = __func__}; \
    TRY(call_start(&c))
#define ENTER_DEVICE(c, device, kind) \
    ENTER(c);                         \
    TRY(call_device(&c, device, kind))

// --- session.c: init and shutdown; which GPUs this process enumerates

bool session_active(void);
void session_open(const struct world *w);
bool session_close(bool *last);
unsigned int session_count(void);
bool session_slot(unsigned int index, unsigned int *slot);
bool session_index(unsigned int slot, unsigned int *index);

// --- handles.c: opaque pointers, which are checked and never dereferenced

#define NO_INSTANCE UINT32_MAX

// The object of a handle. A GPU: gi and ci are NO_INSTANCE. A GPU instance: ci is.
struct target {
    unsigned int slot, gi, ci;
};

nvmlDevice_t device_handle(struct target t);
bool device_target(nvmlDevice_t device, struct target *t);
nvmlGpuInstance_t gpu_instance_handle(struct target t);
bool gpu_instance_target(nvmlGpuInstance_t instance, struct target *t);
nvmlComputeInstance_t compute_instance_handle(struct target t);
bool compute_instance_target(nvmlComputeInstance_t instance, struct target *t);

// --- instances.c

const struct profile *profile_by_id(const struct call *c, unsigned int id);
nvmlReturn_t call_gpu_instance(struct call *c, nvmlGpuInstance_t instance);

// --- helpers that API files share

nvmlReturn_t put_string(char *to, unsigned int length, const char *from);
nvmlReturn_t put_uint(unsigned int *to, unsigned int value);
void format_bus(char *to, size_t size, const char *format, unsigned int domain, unsigned int bus, unsigned int device);
nvmlReturn_t check_version(unsigned int got, unsigned int want);
unsigned int gpu_active_ports(const struct gpu *g);
unsigned int gpu_port_count(const struct gpu *g);
unsigned int nvlink_version_code(unsigned int major);
bool gpu_on_fabric(const struct gpu *g);
bool gpu_is_data_center(const struct gpu *g);
bool gpu_link_up(const struct gpu *g, unsigned int port);
const struct mig *world_mig(const struct world *w, struct target t);
uint64_t monotonic_ns(void);
void sleep_ns(uint64_t ns);

unsigned int driver_branch(const struct world *w);

// --- edit.c, values.c: changes of the state

nvmlReturn_t state_edit(bool (*drop)(const struct record *, const void *), const void *argument,
                        const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void values_read(struct gpu *g, const struct record *r);
uint64_t gpu_value(const struct gpu *g, enum value v, uint64_t otherwise);
nvmlReturn_t value_set(unsigned int slot, enum value v, uint64_t number);
nvmlReturn_t value_unset(unsigned int slot, enum value v);
nvmlReturn_t accounts_clear(unsigned int slot);
bool removed_by_reset(const struct record *r, const void *slot);

// --- processes.c

uint64_t process_memory(const struct call *c);
bool gpu_has_process(const struct world *w, unsigned int slot);

// --- reset.c

bool reset_by_file(const struct world *w, unsigned int slot);
bool reset_by_file_if_due(const struct world *w, unsigned int slot);

// --- watch.c: waiting for a change of the state file

uint64_t watch_start(void);
uint64_t watch_wait(uint64_t seen, uint64_t deadline);
void watch_stop(void);
void watch_notify(void);

// --- events.c, system_events.c

void events_reset(void);
void system_events_reset(void);
uint64_t last_event(const struct world *w);
nvmlReturn_t wait_for_event(nvmlReturn_t (*poll)(void *), void *argument, unsigned int timeout_ms);

// --- board.c: values of an architecture's boards, and the readings of an idle one

struct board {
    unsigned int arch;
    unsigned int graphics_max, graphics_idle, memory_max, memory_idle; // MHz
    unsigned int pcie_generation;
    unsigned int power_idle, power_min; // milliwatts
    unsigned int cores_per_sm, bus_width;
};
const struct board *board_of(const struct gpu *g);
unsigned int gpu_power_limit(const struct gpu *g);
unsigned int gpu_default_power_limit(const struct gpu *g);
unsigned int gpu_power_draw(const struct gpu *g, unsigned int slot);
int gpu_temperature(const struct gpu *g, unsigned int slot);
uint64_t gpu_energy(const struct gpu *g, unsigned int slot);

#endif
