// The summary that nvidia-smi prints without options, in the layout of driver 580. A part of smi.c.
#ifndef GPU_SIM_SMI_TABLE_H
#define GPU_SIM_SMI_TABLE_H

#include "smi_fields.h"

#include <stdint.h>
#include <string.h>
#include <time.h>

#define LINE_GPU "+-----------------------------------------+------------------------+----------------------+"
#define LINE_ALL "+-----------------------------------------------------------------------------------------+"
#define LINE_MIG "+------------------+----------------------------------+-----------+-----------------------+"

static void print_heading(void)
{
    char driver[TEXT] = "N/A", when[64] = "", cuda_text[32];
    int cuda = 0;
    time_t now = time(NULL);
    struct tm local;
    if (localtime_r(&now, &local) != NULL)
        strftime(when, sizeof(when), "%a %b %e %H:%M:%S %Y", &local);
    CALL(nvmlSystemGetDriverVersion, driver, TEXT);
    CALL(nvmlSystemGetCudaDriverVersion_v2, &cuda);
    snprintf(cuda_text, sizeof(cuda_text), "%d.%d", cuda / 1000, cuda % 1000 / 10);
    printf("%-31s\n" LINE_ALL "\n", when);
    printf("| NVIDIA-SMI %-22.22s Driver Version: %-14.14s CUDA Version: %-8.8s |\n", driver, driver, cuda_text);
    puts(LINE_GPU);
    puts("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
         "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
         "|                                         |                        |               MIG M. |\n"
         "|=========================================+========================+======================|");
}

// A value for a cell, with its unit: "71W", or "N/A" alone.
static void cell(char *to, reader read, nvmlDevice_t device, unsigned int index, const char *unit)
{
    char text[TEXT] = "";
    nvmlReturn_t result = read(device, index, text);
    if (unit[0] == 'W')
        text[strcspn(text, ".")] = '\0';
    snprintf(to, 32, "%.20s%s", result == NVML_SUCCESS ? text : "N/A", result == NVML_SUCCESS ? unit : "");
}

static const char *compute_mode(nvmlDevice_t device)
{
    nvmlComputeMode_t mode = NVML_COMPUTEMODE_DEFAULT;
    CALL(nvmlDeviceGetComputeMode, device, &mode);
    switch (mode) {
    case NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        return "E. Process";
    case NVML_COMPUTEMODE_PROHIBITED:
        return "Prohibited";
    default:
        return "Default";
    }
}

static void print_gpu(nvmlDevice_t device, unsigned int index)
{
    char name[TEXT] = "", bus[32], ecc[32], temperature[32], draw[32], limit[32], used[32], total[32], busy[32];
    char mig[32], fan_text[32] = "N/A";
    unsigned int fan = 0;
    nvmlEnableState_t persistence = NVML_FEATURE_DISABLED, display = NVML_FEATURE_DISABLED;
    nvmlPstates_t state = NVML_PSTATE_UNKNOWN;
    CALL(nvmlDeviceGetName, device, name, TEXT);
    CALL(nvmlDeviceGetPersistenceMode, device, &persistence);
    CALL(nvmlDeviceGetDisplayActive, device, &display);
    CALL(nvmlDeviceGetPerformanceState, device, &state);
    if (CALL(nvmlDeviceGetFanSpeed, device, &fan) == NVML_SUCCESS)
        snprintf(fan_text, sizeof(fan_text), "%u%%", fan);
    cell(bus, read_bus, device, index, "");
    cell(ecc, read_ecc, device, index, "");
    cell(temperature, read_temperature, device, index, "C");
    cell(draw, read_draw, device, index, "W");
    cell(limit, read_limit, device, index, "W");
    cell(used, read_used, device, index, "MiB");
    cell(total, read_total, device, index, "MiB");
    cell(busy, read_utilization, device, index, "%");
    cell(mig, read_mig, device, index, "");
    printf("| %3u  %-27.27s%7s |   %16s %3s | %20s |\n", index, name, persistence ? "On " : "Off", bus,
           display ? "On" : "Off", ecc);
    printf("| %-4s %4s    P%-2u      %10s / %5s | %9s / %9s | %8s %11s |\n", fan_text, temperature,
           (unsigned int)state, draw, limit, used, total, busy, compute_mode(device));
    printf("|                                         |                        | %20s |\n" LINE_GPU "\n", mig);
}

static void print_mig(nvmlDevice_t mig, unsigned int gpu, unsigned int index)
{
    unsigned int gi = 0, ci = 0;
    unsigned long long ecc = 0;
    nvmlDeviceAttributes_t a = {0};
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    nvmlBAR1Memory_t bar1 = {0};
    CALL(nvmlDeviceGetGpuInstanceId, mig, &gi);
    CALL(nvmlDeviceGetComputeInstanceId, mig, &ci);
    CALL(nvmlDeviceGetAttributes_v2, mig, &a);
    CALL(nvmlDeviceGetMemoryInfo_v2, mig, &memory);
    CALL(nvmlDeviceGetBAR1MemoryInfo, mig, &bar1);
    CALL(nvmlDeviceGetTotalEccErrors, mig, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, &ecc);
    printf("| %2u  %3u  %2u  %2u  |      %8lluMiB / %6lluMiB     | %3u %5llu | %2u %3u  %3u  %3u  %3u |\n", gpu, gi,
           ci, index, memory.used >> 20, memory.total >> 20, a.multiprocessorCount, ecc, a.sharedCopyEngineCount,
           a.sharedEncoderCount, a.sharedDecoderCount, a.sharedOfaCount, a.sharedJpegCount);
    printf("|                  |      %8lluMiB / %6lluMiB     |           |                       |\n" LINE_MIG "\n",
           bar1.bar1Used >> 20, bar1.bar1Total >> 20);
}

static unsigned int mig_total;

static void count_mig(nvmlDevice_t mig, unsigned int gpu, unsigned int index)
{
    (void)mig, (void)gpu, (void)index;
    mig_total++;
}

static void print_migs(const nvmlDevice_t *devices, const bool *open, unsigned int count)
{
    for (unsigned int i = 0; i < count; i++)
        if (open[i])
            each_mig(devices[i], i, count_mig);
    if (mig_total == 0)
        return;
    puts("\n" LINE_ALL "\n"
         "| MIG devices:                                                                            |\n" LINE_MIG "\n"
         "| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         |\n"
         "|      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |\n"
         "|                  |                                  |        ECC|                       |\n"
         "|==================+==================================+===========+=======================|");
    for (unsigned int i = 0; i < count; i++)
        if (open[i])
            each_mig(devices[i], i, print_mig);
}

enum { MAX_SHOWN = 64 };

// The first argument of a process, or what else is known of its name.
static void process_name(unsigned int pid, char name[TEXT])
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
    FILE *f = fopen(path, "r");
    size_t size = f != NULL ? fread(name, 1, TEXT - 1, f) : 0;
    name[size] = '\0';
    if (f != NULL)
        fclose(f);
    if (name[0] == '\0')
        snprintf(name, TEXT, "[Not Found]");
}

static void instance_text(char to[16], unsigned int id)
{
    if (id == UINT32_MAX)
        snprintf(to, 16, "N/A");
    else
        snprintf(to, 16, "%u", id);
}

// Prints the processes of one list, and returns how many.
static unsigned int print_list(unsigned int gpu, const char *type, nvmlReturn_t result, unsigned int count,
                               const nvmlProcessInfo_t *list)
{
    if (result != NVML_SUCCESS)
        return 0;
    for (unsigned int i = 0; i < count; i++) {
        char name[TEXT], gi[16], ci[16], memory[32];
        process_name(list[i].pid, name);
        instance_text(gi, list[i].gpuInstanceId);
        instance_text(ci, list[i].computeInstanceId);
        snprintf(memory, sizeof(memory), "%lluMiB", list[i].usedGpuMemory >> 20);
        printf("|  %3u  %4s %4s  %15u  %5s   %-36.36s%10s |\n", gpu, gi, ci, list[i].pid, type, name, memory);
    }
    return count;
}

static unsigned int print_processes_of(nvmlDevice_t device, unsigned int gpu)
{
    nvmlProcessInfo_t list[MAX_SHOWN];
    unsigned int count = MAX_SHOWN, printed = 0;
    nvmlReturn_t result = CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, device, &count, list);
    printed += print_list(gpu, "G", result, count, list);
    count = MAX_SHOWN;
    result = CALL(nvmlDeviceGetComputeRunningProcesses_v3, device, &count, list);
    printed += print_list(gpu, "C", result, count, list);
    count = MAX_SHOWN;
    result = CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, device, &count, list);
    return printed + print_list(gpu, "M+C", result, count, list);
}

static void print_processes(const nvmlDevice_t *devices, const bool *open, unsigned int count)
{
    unsigned int printed = 0;
    puts("\n" LINE_ALL "\n"
         "| Processes:                                                                              |\n"
         "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n"
         "|        ID   ID                                                               Usage      |\n"
         "|=========================================================================================|");
    for (unsigned int i = 0; i < count; i++)
        if (open[i])
            printed += print_processes_of(devices[i], i);
    if (printed == 0)
        puts("|  No running processes found                                                             |");
    puts(LINE_ALL);
}

static int summary(void)
{
    nvmlDevice_t devices[MAX_SHOWN];
    bool open[MAX_SHOWN];
    unsigned int count = 0;
    int status = 0;
    CALL(nvmlDeviceGetCount_v2, &count);
    if (count == 0)
        return no_devices();
    count = count < MAX_SHOWN ? count : MAX_SHOWN;
    for (unsigned int i = 0; i < count; i++) {
        nvmlReturn_t result = open_gpu(i, &devices[i]);
        open[i] = result == NVML_SUCCESS;
        if (!open[i])
            status = exit_status(result);
    }
    print_heading();
    for (unsigned int i = 0; i < count; i++)
        if (open[i])
            print_gpu(devices[i], i);
    print_migs(devices, open, count);
    print_processes(devices, open, count);
    return status;
}

#endif
