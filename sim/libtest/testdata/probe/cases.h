// The cases, by name. The Go test of each has the machine that it expects.
#define CASES(X)                                                                                                   \
    X(lifecycle) X(reload) X(strings) X(identity) X(lookup) X(numbers) X(arguments_checked) X(mig_devices) X(mig_instances) \
    X(mig_off) X(topology) X(nvlink) X(no_nvlink) X(telemetry) X(field_values) X(events) X(events_waiting)        \
    X(faults) X(lost) X(hang) X(init_answers) X(enumerates) X(visible_migs) X(stubs) \
    X(consumer_card) X(event_data) X(lost_in_a_set) X(system_events) \
    X(health_values) X(older_memory) X(processes) X(settings) X(reset) X(reset_file)

#define DECLARE(name) void case_##name(void);
CASES(DECLARE)

#define ENTRY(case_name) {#case_name, case_##case_name},
static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {CASES(ENTRY)};
