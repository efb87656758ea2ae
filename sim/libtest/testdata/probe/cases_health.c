// Health, processes and settings: what the state file changes, and what functions of the library change in it.
#define _GNU_SOURCE
#include "probe.h"
#include "cases.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static nvmlFieldValue_t field(nvmlDevice_t device, unsigned int id)
{
    nvmlFieldValue_t f = {.fieldId = id};
    OK(NV(nvmlDeviceGetFieldValues)(device, 1, &f));
    return f;
}

static unsigned long long field_number(nvmlDevice_t device, unsigned int id)
{
    nvmlFieldValue_t f = field(device, id);
    OK(f.nvmlReturn);
    return f.valueType == NVML_VALUE_TYPE_UNSIGNED_INT ? f.value.uiVal : f.value.ullVal;
}

static unsigned long long ecc(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter)
{
    unsigned long long total, dram, cache;
    OK(NV(nvmlDeviceGetTotalEccErrors)(device, type, counter, &total));
    OK(NV(nvmlDeviceGetMemoryErrorCounter)(device, type, counter, NVML_MEMORY_LOCATION_DRAM, &dram));
    OK(NV(nvmlDeviceGetMemoryErrorCounter)(device, type, counter, NVML_MEMORY_LOCATION_L2_CACHE, &cache));
    CHECK(dram == total && cache == 0);
    return total;
}

static void check_memory_health(nvmlDevice_t device)
{
    unsigned int correctable, uncorrectable, pending, failed;
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC) == 5);
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC) == 6);
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_AGGREGATE_ECC) == 70000000000);
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC) == 8);
    CHECK(field_number(device, NVML_FI_DEV_ECC_SBE_VOL_TOTAL) == 5);
    CHECK(field_number(device, NVML_FI_DEV_ECC_DBE_VOL_TOTAL) == 6);
    CHECK(field_number(device, NVML_FI_DEV_ECC_SBE_AGG_TOTAL) == 70000000000);
    CHECK(field_number(device, NVML_FI_DEV_ECC_DBE_AGG_TOTAL) == 8);
    OK(NV(nvmlDeviceGetRemappedRows)(device, &correctable, &uncorrectable, &pending, &failed));
    CHECK(correctable == 1 && uncorrectable == 2 && pending == 1 && failed == 1);
    CHECK(field_number(device, NVML_FI_DEV_REMAPPED_UNC) == 2 && field_number(device, NVML_FI_DEV_REMAPPED_PENDING) == 1);
    CHECK(field_number(device, NVML_FI_DEV_REMAPPED_FAILURE) == 1);
}

static void check_link_health(nvmlDevice_t device)
{
    nvmlEnableState_t state;
    nvmlFieldValue_t f = {.fieldId = NVML_FI_DEV_NVLINK_GET_STATE, .scopeId = 2};
    nvmlGpuFabricInfo_t fabric;
    nvmlGpuFabricInfoV_t info = {.version = nvmlGpuFabricInfo_v3};
    OK(NV(nvmlDeviceGetNvLinkState)(device, 0, &state));
    CHECK(state == NVML_FEATURE_ENABLED);
    OK(NV(nvmlDeviceGetNvLinkState)(device, 2, &state));
    CHECK(state == NVML_FEATURE_DISABLED);
    OK(NV(nvmlDeviceGetFieldValues)(device, 1, &f));
    CHECK(f.nvmlReturn == NVML_SUCCESS && f.value.uiVal == 0);
    OK(NV(nvmlDeviceGetGpuFabricInfo)(device, &fabric));
    CHECK(fabric.state == NVML_GPU_FABRIC_STATE_IN_PROGRESS && fabric.status == NVML_ERROR_NOT_READY);
    OK(NV(nvmlDeviceGetGpuFabricInfoV)(device, &info));
    CHECK(info.state == NVML_GPU_FABRIC_STATE_IN_PROGRESS && info.healthMask == 1);
    CHECK(info.healthSummary == NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY);
}

void case_health_values(void)
{
    unsigned int degrees, shutdown;
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    nvmlMemory_t simple;
    init();
    nvmlDevice_t device = gpu(0);
    set_state("set gpu=0 recovery-action=4242\nset gpu=0 ecc-corrected=5 ecc-uncorrected=6\n"
              "set gpu=0 ecc-corrected-aggregate=70000000000\nset gpu=0 ecc-uncorrected-aggregate=8\n"
              "set gpu=0 remapped-correctable=1\nset gpu=0 remapped-uncorrectable=2\nset gpu=0 remap-pending=1\n"
              "set gpu=0 remap-failed=1\nset gpu=0 links-down=4\nset gpu=0 fabric-state=2\n"
              "set gpu=0 fabric-status=27\nset gpu=0 fabric-health=2\nset gpu=0 fabric-health-mask=1\n"
              "set gpu=0 temperature=93\nset gpu=0 memory-used=1073741824\nset gpu=0 memory-reserved=1048576\n"
              "set gpu=9 temperature=99\nset gpu=1 temperature=201 remap-pending=2 nonsense=1\n");
    CHECK(field_number(device, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) == 4242);
    check_memory_health(device);
    check_link_health(device);
    OK(NV(nvmlDeviceGetTemperature)(device, NVML_TEMPERATURE_GPU, &degrees));
    OK(NV(nvmlDeviceGetTemperatureThreshold)(device, NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, &shutdown));
    CHECK(degrees == 93 && shutdown == 92);
    OK(NV(nvmlDeviceGetMemoryInfo_v2)(device, &memory));
    CHECK(memory.used == 1 << 30 && memory.reserved == 1 << 20);
    CHECK(memory.free == memory.total - memory.used - memory.reserved);
    OK(NV(nvmlDeviceGetMemoryInfo)(device, &simple));
    CHECK(simple.used == memory.used + memory.reserved && simple.free == memory.free);
    // Values out of range and those of GPUs that do not exist have no effect.
    OK(NV(nvmlDeviceGetTemperature)(gpu(1), NVML_TEMPERATURE_GPU, &degrees));
    CHECK(degrees < 60 && field_number(gpu(1), NVML_FI_DEV_REMAPPED_PENDING) == 0);
    CHECK(field_number(gpu(1), NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) == 0);
    set_state("set gpu=0 recovery-action=1\nset gpu=1 recovery-action=4\n");
    CHECK(field_number(device, NVML_FI_DEV_RESET_STATUS) == 1);
    CHECK(field_number(gpu(1), NVML_FI_DEV_DRAIN_AND_RESET_STATUS) == 1);
    set_state("machine driver=550.54.15\nset gpu=0 recovery-action=1\n");
    WANT(NVML_ERROR_NOT_SUPPORTED, field(device, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).nvmlReturn);
}

void case_older_memory(void)
{
    unsigned int count = 0, rows[4];
    unsigned long long addresses[8], times[8];
    nvmlEnableState_t pending;
    init();
    set_state("set gpu=0 retired-single-bit=1\nset gpu=0 retired-double-bit=3\nset gpu=0 retirement-pending=1\n");
    nvmlDevice_t device = gpu(0);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetRemappedRows)(device, &rows[0], &rows[1], &rows[2], &rows[3]));
    WANT(NVML_ERROR_INSUFFICIENT_SIZE, NV(nvmlDeviceGetRetiredPages)(
         device, NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR, &count, NULL));
    CHECK(count == 3);
    OK(NV(nvmlDeviceGetRetiredPages_v2)(device, NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR, &count, addresses, times));
    CHECK(count == 3 && addresses[0] != addresses[1] && times[2] > 0);
    OK(NV(nvmlDeviceGetRetiredPages)(
       device, NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, &count, addresses));
    CHECK(count == 1);
    OK(NV(nvmlDeviceGetRetiredPagesPendingStatus)(device, &pending));
    CHECK(pending == NVML_FEATURE_ENABLED);
    CHECK(field_number(device, NVML_FI_DEV_RETIRED_DBE) == 3 && field_number(device, NVML_FI_DEV_RETIRED_PENDING) == 1);
}

static pid_t sleeper(void)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        pause();
        _exit(0);
    }
    return pid;
}

// Processes on the GPU 3, which has MIG devices, and one on GPU 0.
void case_processes(void)
{
    char state[1024];
    unsigned int count = 0;
    nvmlProcessInfo_t list[4];
    nvmlProcessInfo_v1_t old[4];
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    init();
    nvmlDevice_t whole = gpu(3), part = mig(3, 0), other = mig(3, 1);
    pid_t first = sleeper(), second = sleeper();
    snprintf(state, sizeof(state),
             "process gpu=0 pid=%d type=compute memory=1048576\nprocess gpu=3 pid=%d type=compute memory=2097152 gi=7 ci=0\n"
             "process gpu=3 pid=%d type=compute memory=4194304 gi=2\nprocess gpu=3 pid=%d type=graphics memory=1\n"
             "process gpu=3 pid=%d type=mps memory=2 gi=7 ci=0\nprocess gpu=0 pid=%d start=1 type=compute memory=99\n",
             first, first, second, first, second, second);
    set_state(state);
    WANT(NVML_ERROR_INSUFFICIENT_SIZE, NV(nvmlDeviceGetComputeRunningProcesses_v3)(gpu(0), &count, NULL));
    CHECK(count == 1); // the other one was started at another time
    OK(NV(nvmlDeviceGetComputeRunningProcesses_v3)(gpu(0), &count, list));
    CHECK(count == 1 && list[0].pid == (unsigned int)first && list[0].usedGpuMemory == 1 << 20);
    CHECK(list[0].gpuInstanceId == 0xffffffff && list[0].computeInstanceId == 0xffffffff);
    count = 4;
    OK(NV(nvmlDeviceGetComputeRunningProcesses_v3)(whole, &count, list));
    CHECK(count == 2 && list[0].gpuInstanceId == 7 && list[1].gpuInstanceId == 2);
    count = 4;
    OK(((__typeof__(&nvmlDeviceGetComputeRunningProcesses_v3))symbol("nvmlDeviceGetComputeRunningProcesses"))(
       whole, &count, (nvmlProcessInfo_t *)old));
    CHECK(count == 2 && old[1].pid == (unsigned int)second && old[1].usedGpuMemory == 4 << 20);
    count = 4;
    OK(NV(nvmlDeviceGetComputeRunningProcesses_v3)(part, &count, list));
    CHECK(count == 1 && list[0].pid == (unsigned int)first && list[0].computeInstanceId == 0);
    count = 4;
    OK(NV(nvmlDeviceGetComputeRunningProcesses_v3)(other, &count, list));
    CHECK(count == 1 && list[0].pid == (unsigned int)second);
    count = 4;
    OK(NV(nvmlDeviceGetGraphicsRunningProcesses_v3)(whole, &count, list));
    CHECK(count == 1 && list[0].pid == (unsigned int)first);
    count = 4;
    OK(NV(nvmlDeviceGetMPSComputeRunningProcesses_v3)(part, &count, list));
    CHECK(count == 1 && list[0].pid == (unsigned int)second && list[0].usedGpuMemory == 2);
    OK(NV(nvmlDeviceGetMemoryInfo_v2)(part, &memory));
    CHECK(memory.used == (2 << 20) + 2);
    OK(NV(nvmlDeviceGetMemoryInfo_v2)(whole, &memory));
    CHECK(memory.used == (6 << 20) + 3);
    CHECK(kill(first, SIGKILL) == 0 && waitid(P_PID, (id_t)first, &(siginfo_t){0}, WEXITED | WNOWAIT) == 0);
    count = 4; // a zombie has no memory on the GPU
    OK(NV(nvmlDeviceGetComputeRunningProcesses_v3)(whole, &count, list));
    CHECK(count == 1 && list[0].pid == (unsigned int)second);
    kill(second, SIGKILL);
    CHECK(waitpid(first, NULL, 0) == first && waitpid(second, NULL, 0) == second);
    count = 0;
    OK(NV(nvmlDeviceGetComputeRunningProcesses_v3)(whole, &count, NULL));
    OK(NV(nvmlDeviceGetMemoryInfo_v2)(whole, &memory));
    CHECK(memory.used == 0);
}

static void check_clocks(nvmlDevice_t device)
{
    unsigned int clock, standard;
    OK(NV(nvmlDeviceSetApplicationsClocks)(device, 2619, 1905));
    OK(NV(nvmlDeviceGetApplicationsClock)(device, NVML_CLOCK_GRAPHICS, &clock));
    OK(NV(nvmlDeviceGetDefaultApplicationsClock)(device, NVML_CLOCK_GRAPHICS, &standard));
    CHECK(clock == 1905 && standard == 1980);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceSetApplicationsClocks)(device, 2619, 1906));
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceSetApplicationsClocks)(device, 1, 1905));
    OK(NV(nvmlDeviceResetApplicationsClocks)(device));
    OK(NV(nvmlDeviceGetApplicationsClock)(device, NVML_CLOCK_GRAPHICS, &clock));
    CHECK(clock == 1980);
    OK(NV(nvmlDeviceSetGpuLockedClocks)(device, 1000, 1500));
    OK(NV(nvmlDeviceGetClockInfo)(device, NVML_CLOCK_SM, &clock));
    CHECK(clock == 1000);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceSetGpuLockedClocks)(device, 1500, 1000));
    OK(NV(nvmlDeviceResetGpuLockedClocks)(device));
    OK(NV(nvmlDeviceGetClockInfo)(device, NVML_CLOCK_SM, &clock));
    CHECK(clock == 345);
    OK(NV(nvmlDeviceSetMemoryLockedClocks)(device, 0, 1000));
    OK(NV(nvmlDeviceGetClockInfo)(device, NVML_CLOCK_MEM, &clock));
    CHECK(clock == 1000);
    OK(NV(nvmlDeviceResetMemoryLockedClocks)(device));
    OK(NV(nvmlDeviceGetClockInfo)(device, NVML_CLOCK_MEM, &clock));
    CHECK(clock == 2619);
}

static void check_power(nvmlDevice_t device)
{
    unsigned int limit, standard;
    OK(NV(nvmlDeviceSetPowerManagementLimit)(device, 400000));
    OK(NV(nvmlDeviceGetPowerManagementLimit)(device, &limit));
    OK(NV(nvmlDeviceGetPowerManagementDefaultLimit)(device, &standard));
    CHECK(limit == 400000 && standard == 700000 && field_number(device, NVML_FI_DEV_POWER_CURRENT_LIMIT) == 400000);
    WANT(NVML_ERROR_INVALID_ARGUMENT, NV(nvmlDeviceSetPowerManagementLimit)(device, 1));
    nvmlPowerValue_v2_t power = {.version = nvmlPowerValue_v2, .powerValueMw = 500000};
    OK(NV(nvmlDeviceSetPowerManagementLimit_v2)(device, &power));
    OK(NV(nvmlDeviceGetEnforcedPowerLimit)(device, &limit));
    CHECK(limit == 500000);
    OK(NV(nvmlDeviceSetPowerManagementLimit)(device, 700000));
}

static void check_modes(nvmlDevice_t device)
{
    nvmlComputeMode_t mode;
    nvmlEnableState_t state;
    OK(NV(nvmlDeviceSetComputeMode)(device, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS));
    OK(NV(nvmlDeviceGetComputeMode)(device, &mode));
    CHECK(mode == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS);
    OK(NV(nvmlDeviceGetComputeMode)(gpu(1), &mode));
    CHECK(mode == NVML_COMPUTEMODE_DEFAULT);
    OK(NV(nvmlDeviceSetComputeMode)(device, NVML_COMPUTEMODE_DEFAULT));
    OK(NV(nvmlDeviceSetPersistenceMode)(device, NVML_FEATURE_DISABLED));
    OK(NV(nvmlDeviceGetPersistenceMode)(device, &state));
    CHECK(state == NVML_FEATURE_DISABLED);
    OK(NV(nvmlDeviceSetPersistenceMode)(device, NVML_FEATURE_ENABLED));
    OK(NV(nvmlDeviceGetPersistenceMode)(device, &state));
    CHECK(state == NVML_FEATURE_ENABLED);
}

static void check_accounting(nvmlDevice_t device)
{
    char line[128];
    unsigned int count = 0, pids[2];
    nvmlAccountingStats_t stats;
    nvmlEnableState_t state;
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceGetAccountingStats)(device, 1, &stats));
    OK(NV(nvmlDeviceSetAccountingMode)(device, NVML_FEATURE_ENABLED));
    OK(NV(nvmlDeviceGetAccountingMode)(device, &state));
    CHECK(state == NVML_FEATURE_ENABLED);
    snprintf(line, sizeof(line), "set gpu=0 accounting-mode=1\naccount gpu=0 pid=%d memory=77\n", getpid());
    set_state(line);
    WANT(NVML_ERROR_INSUFFICIENT_SIZE, NV(nvmlDeviceGetAccountingPids)(device, &count, NULL));
    OK(NV(nvmlDeviceGetAccountingPids)(device, &count, pids));
    CHECK(count == 1 && pids[0] == (unsigned int)getpid());
    OK(NV(nvmlDeviceGetAccountingStats)(device, pids[0], &stats));
    CHECK(stats.maxMemoryUsage == 77 && stats.isRunning == 1);
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetAccountingStats)(device, 1, &stats));
    OK(NV(nvmlDeviceClearAccountingPids)(device));
    OK(NV(nvmlDeviceGetAccountingPids)(device, &count, pids));
    CHECK(count == 0);
    OK(NV(nvmlDeviceSetAccountingMode)(device, NVML_FEATURE_DISABLED));
}

// Setters change the state file, retain what else it has, and leave nothing when all is as it was.
void case_settings(void)
{
    init();
    nvmlDevice_t device = gpu(0);
    set_state("latency ns=1\n  fault   gpu=2 kind=lost \nset gpu=0 ecc-corrected=1\nset gpu=0 ecc-uncorrected=2\n"
              "set gpu=0 ecc-uncorrected-aggregate=3\nset gpu=1 ecc-corrected=4\n");
    OK(NV(nvmlDeviceClearEccErrorCounts)(device, NVML_VOLATILE_ECC));
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC) == 0);
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC) == 0);
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC) == 3);
    OK(NV(nvmlDeviceClearEccErrorCounts)(device, NVML_AGGREGATE_ECC));
    CHECK(ecc(device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC) == 0);
    CHECK(ecc(gpu(1), NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC) == 4);
    check_clocks(device);
    check_power(device);
    check_modes(device);
    WANT(NVML_ERROR_NOT_SUPPORTED, NV(nvmlDeviceSetPersistenceMode)(mig(3, 0), NVML_FEATURE_DISABLED));
    SAME("latency ns=1\n  fault   gpu=2 kind=lost \nset gpu=1 ecc-corrected=4\n", state_text());
    check_accounting(device);
    SAME("", state_text());
}

static nvmlReturn_t reset(unsigned int index)
{
    return ((nvmlReturn_t(*)(unsigned int))symbol("gpuSimReset"))(index);
}

static void check_refusals(void)
{
    char state[256];
    set_state("set gpu=0 recovery-action=1\n");
    WANT(NVML_ERROR_IN_USE, reset(0)); // persistence mode is on
    OK(NV(nvmlDeviceSetPersistenceMode)(gpu(0), NVML_FEATURE_DISABLED));
    pid_t user = fork();
    if (user == 0) {
        OK(NV(nvmlShutdown)()); // the descriptors that it has inherited are closed
        init();
        pause();
    }
    usleep(300000);
    WANT(NVML_ERROR_IN_USE, reset(0)); // another process has its node open
    CHECK(kill(user, SIGKILL) == 0 && waitpid(user, NULL, 0) == user);
    pid_t worker = sleeper();
    snprintf(state, sizeof(state), "set gpu=0 persistence-mode=0\nprocess gpu=0 pid=%d memory=1\n", worker);
    set_state(state);
    WANT(NVML_ERROR_IN_USE, reset(0)); // a process uses it
    CHECK(kill(worker, SIGKILL) == 0 && waitpid(worker, NULL, 0) == worker);
    OK(reset(0));
    set_state("set gpu=0 persistence-mode=0\nset gpu=0 reset-result=2\n");
    WANT(NVML_ERROR_NOT_SUPPORTED, reset(0));
    set_state("set gpu=0 persistence-mode=0\nset gpu=0 reset-result=3\n");
    WANT(NVML_ERROR_RESET_TYPE_NOT_SUPPORTED, reset(0));
    set_state("set gpu=0 persistence-mode=0\nset gpu=0 reset-result=1\nset gpu=0 reset-tries=2\n");
    WANT(NVML_ERROR_IN_USE, reset(0));
    WANT(NVML_ERROR_IN_USE, reset(0));
    OK(reset(0));
    SAME("set gpu=0 persistence-mode=0\n", state_text());
    set_state("set gpu=0 persistence-mode=0\nset gpu=0 reset-delay=300\n");
    double start = seconds();
    OK(reset(0));
    CHECK(seconds() - start >= 0.3);
    set_state("fault gpu=0 kind=lost\n");
    WANT(NVML_ERROR_GPU_IS_LOST, reset(0));
    WANT(NVML_ERROR_INVALID_ARGUMENT, reset(9));
}

// What a reset clears, what it leaves, and why it is refused.
void case_reset(void)
{
    char uuid[96];
    unsigned int count;
    nvmlDevice_t part;
    init();
    check_refusals();
    set_state("set gpu=0 persistence-mode=0\nset gpu=0 recovery-action=4\nset gpu=0 ecc-uncorrected=1\n"
              "set gpu=0 ecc-uncorrected-aggregate=2\nset gpu=0 remap-pending=1\nset gpu=0 remap-failed=1\n"
              "set gpu=0 links-down=1\nset gpu=0 compute-mode=3\nset gpu=0 power-limit=400000\n"
              "set gpu=0 temperature=93\nset gpu=1 remap-pending=1\nprocess gpu=0 pid=1 start=1\nlatency ns=1\n");
    OK(reset(0));
    SAME("set gpu=0 persistence-mode=0\nset gpu=0 ecc-uncorrected-aggregate=2\nset gpu=0 remap-failed=1\n"
         "set gpu=0 temperature=93\nset gpu=1 remap-pending=1\nlatency ns=1\n", state_text());
    OK(NV(nvmlDeviceGetUUID)(gpu(0), uuid, sizeof(uuid)));
    SAME("GPU-00000000-0000-4000-8000-000000000000", uuid);
    set_state("set gpu=0 persistence-mode=0\nset gpu=0 recovery-action=2\n"); // needs a reboot
    OK(reset(0));
    CHECK(field_number(gpu(0), NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) == 2);
    // MIG mode stays, the MIG devices go.
    set_state("set gpu=3 persistence-mode=0\n");
    OK(NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(3), 0, &part));
    OK(reset(3));
    OK(NV(nvmlDeviceGetMaxMigDeviceCount)(gpu(3), &count));
    CHECK(count == 7);
    WANT(NVML_ERROR_NOT_FOUND, NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(3), 0, &part));
}

// Arguments: the reset file of GPU 0.
void case_reset_file(void)
{
    init();
    nvmlDevice_t device = gpu(0);
    for (int i = 0; i < 2; i++) {
        set_state("set gpu=0 recovery-action=1\nset gpu=1 recovery-action=1\n");
        CHECK(field_number(device, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) == 1);
        FILE *f = fopen(arguments[0], "w");
        CHECK(f != NULL && fputs("1\n", f) >= 0 && fclose(f) == 0);
        if (i == 0)
            usleep(2000); // calls look for it once a millisecond
        else
            OK(NV(nvmlShutdown)());
        if (i == 1)
            init(); // which always looks for it
        CHECK(field_number(device, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) == 0);
        CHECK(field_number(gpu(1), NVML_FI_DEV_GET_GPU_RECOVERY_ACTION) == 1);
        f = fopen(arguments[0], "r");
        CHECK(f != NULL && fgetc(f) == EOF && fclose(f) == 0);
    }
}
