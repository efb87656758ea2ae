// The options of nvidia-smi that change GPUs: --gpu-reset and --persistence-mode. A part of smi.c.
#ifndef GPU_SIM_SMI_CHANGE_H
#define GPU_SIM_SMI_CHANGE_H

#include "smi_fields.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_SELECTED = 128 };

// The GPUs that an option is for, by index.
struct selection {
    unsigned int count;
    unsigned int indices[MAX_SELECTED];
};

// Whether a GPU has an index, a UUID or a PCI address.
static bool is_named(unsigned int index, nvmlDevice_t device, const char *name)
{
    char text[TEXT] = "";
    char *end;
    unsigned long number = strtoul(name, &end, 10);
    if (end != name && *end == '\0')
        return number == index;
    if (read_uuid(device, index, text) == NVML_SUCCESS && strcasecmp(text, name) == 0)
        return true;
    // The address has 8 digits of domain; 4 of them may be omitted.
    return read_bus(device, index, text) == NVML_SUCCESS &&
           (strcasecmp(text, name) == 0 || (strlen(text) > 4 && strcasecmp(text + 4, name) == 0));
}

// Finds the GPUs of a comma-separated list, or all without one. Returns the exit status.
static int select_gpus(char *list, struct selection *s)
{
    unsigned int count = 0;
    CALL(nvmlDeviceGetCount_v2, &count);
    if (count == 0)
        return no_devices();
    if (list == NULL) {
        for (unsigned int i = 0; i < count && i < MAX_SELECTED; i++)
            s->indices[s->count++] = i;
        return 0;
    }
    for (char *name; (name = strsep(&list, ",")) != NULL;) {
        bool found = false;
        for (unsigned int i = 0; i < count && !found && s->count < MAX_SELECTED; i++) {
            nvmlDevice_t device = {NULL};
            nvmlReturn_t result = CALL(nvmlDeviceGetHandleByIndex_v2, i, &device);
            found = is_named(i, device, name);
            if (found && result != NVML_SUCCESS)
                return exit_status(open_gpu(i, &device));
            if (found)
                s->indices[s->count++] = i;
        }
        if (!found) {
            puts("No devices were found");
            return NVML_ERROR_NOT_FOUND;
        }
    }
    return 0;
}

static const char *bus_of(unsigned int index, char *text)
{
    nvmlDevice_t device;
    if (CALL(nvmlDeviceGetHandleByIndex_v2, index, &device) != NVML_SUCCESS ||
        read_bus(device, index, text) != NVML_SUCCESS)
        snprintf(text, TEXT, "%u", index);
    return text;
}

static const char *reset_error(nvmlReturn_t result)
{
    switch (result) {
    case NVML_ERROR_IN_USE:
        return "In use by another client";
    case NVML_ERROR_RESET_TYPE_NOT_SUPPORTED:
        return "Cannot be reset without the GPUs that are connected to it by NVSwitch";
    default:
        return p_nvmlErrorString(result);
    }
}

static int reset_gpus(const struct selection *s)
{
    nvmlReturn_t results[MAX_SELECTED];
    char text[TEXT];
    unsigned int failed = 0, busy = 0;
    int status = 0;
    for (unsigned int i = 0; i < s->count; i++) {
        results[i] = CALL(gpuSimReset, s->indices[i]);
        if (results[i] == NVML_SUCCESS)
            printf("GPU %s was successfully reset.\n", bus_of(s->indices[i], text));
        fflush(stdout);
    }
    for (unsigned int i = 0; i < s->count; i++) {
        if (results[i] == NVML_SUCCESS)
            continue;
        if (failed++ == 0)
            puts("The following GPUs could not be reset:");
        printf("  GPU %s: %s\n", bus_of(s->indices[i], text), reset_error(results[i]));
        busy += results[i] == NVML_ERROR_IN_USE;
        status = results[i] == NVML_ERROR_NOT_SUPPORTED ? (int)results[i] : 255;
    }
    if (failed > 0)
        putchar('\n');
    if (busy > 0)
        printf("%u device%s currently being used by one or more other processes (e.g., Fabric Manager, CUDA "
               "application, graphics application such as an X server, or a monitoring application such as another "
               "instance of nvidia-smi). Please first kill all processes using %s and all compute applications "
               "running in the system.\n\n",
               busy, busy == 1 ? " is" : "s are", busy == 1 ? "this device" : "these devices");
    return status;
}

static int set_persistence(const struct selection *s, bool on)
{
    char text[TEXT];
    for (unsigned int i = 0; i < s->count; i++) {
        nvmlDevice_t device;
        nvmlEnableState_t now = NVML_FEATURE_DISABLED;
        nvmlReturn_t result = open_gpu(s->indices[i], &device);
        if (result != NVML_SUCCESS)
            return exit_status(result);
        CALL(nvmlDeviceGetPersistenceMode, device, &now);
        bool change = (now == NVML_FEATURE_ENABLED) != on;
        if (change)
            result = CALL(nvmlDeviceSetPersistenceMode, device, on ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED);
        if (result != NVML_SUCCESS) {
            printf("Unable to set persistence mode for GPU %s: %s\n", bus_of(s->indices[i], text),
                   p_nvmlErrorString(result));
            return exit_status(result);
        }
        if (change)
            printf("%s persistence mode for GPU %s.\n", on ? "Enabled" : "Disabled", bus_of(s->indices[i], text));
        else
            printf("Persistence mode is already %s for GPU %s.\n", on ? "Enabled" : "Disabled",
                   bus_of(s->indices[i], text));
    }
    puts("All done.");
    return 0;
}

#endif
