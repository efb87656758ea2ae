// nvidia-smi for the simulated driver, with the most used options. It loads libnvidia-ml.so.1 as the loader finds it,
// so it lists what every other program would see. Its texts and exit statuses are those of the real program.
#define _GNU_SOURCE
#include "smi_fields.h"
#include "smi_library.h"

#include <stdlib.h>
#include <string.h>

enum { EXIT_INVALID = 2 };

static int no_devices(void)
{
    puts("No devices were found");
    return NVML_ERROR_NOT_FOUND;
}

// Gets a GPU's handle, or prints the error of the real nvidia-smi.
static nvmlReturn_t open_gpu(unsigned int index, nvmlDevice_t *device)
{
    char bus[TEXT];
    nvmlReturn_t result = CALL(nvmlDeviceGetHandleByIndex_v2, index, device);
    if (result == NVML_SUCCESS)
        return result;
    if (CALL(gpuSimGetBusId, index, bus, TEXT) != NVML_SUCCESS)
        snprintf(bus, sizeof(bus), " %u", index);
    printf("Unable to determine the device handle for GPU%s: %s%s\n", bus, p_nvmlErrorString(result),
           result == NVML_ERROR_GPU_IS_LOST ? ".  Reboot the system to recover this GPU" : "");
    return result;
}

// Calls visit for every MIG device of a GPU.
static void each_mig(nvmlDevice_t device, unsigned int gpu, void (*visit)(nvmlDevice_t, unsigned int, unsigned int))
{
    unsigned int count = 0;
    nvmlDevice_t mig;
    if (CALL(nvmlDeviceGetMaxMigDeviceCount, device, &count) != NVML_SUCCESS)
        return;
    for (unsigned int i = 0; i < count; i++)
        if (CALL(nvmlDeviceGetMigDeviceHandleByIndex, device, i, &mig) == NVML_SUCCESS)
            visit(mig, gpu, i);
}

static void list_mig(nvmlDevice_t mig, unsigned int gpu, unsigned int index)
{
    char name[TEXT] = "", uuid[TEXT] = "";
    (void)gpu;
    CALL(nvmlDeviceGetName, mig, name, TEXT);
    CALL(nvmlDeviceGetUUID, mig, uuid, TEXT);
    const char *profile = strstr(name, " MIG ");
    printf("  MIG %-12sDevice %2u: (UUID: %s)\n", profile != NULL ? profile + 5 : name, index, uuid);
}

static int list_gpus(void)
{
    unsigned int count = 0;
    int status = 0;
    CALL(nvmlDeviceGetCount_v2, &count);
    if (count == 0)
        return no_devices();
    for (unsigned int i = 0; i < count; i++) {
        char name[TEXT] = "Unknown", uuid[TEXT] = "Unknown";
        nvmlDevice_t device;
        nvmlReturn_t result = open_gpu(i, &device);
        if (result != NVML_SUCCESS) {
            status = exit_status(result);
            continue;
        }
        CALL(nvmlDeviceGetName, device, name, TEXT);
        CALL(nvmlDeviceGetUUID, device, uuid, TEXT);
        printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
        each_mig(device, i, list_mig);
    }
    return status;
}

#include "smi_table.h"

enum { MAX_QUERY = 64 };

struct query {
    const struct field *fields[MAX_QUERY];
    size_t count;
    bool header, units;
};

static void print_header(const struct query *q)
{
    for (size_t i = 0; i < q->count; i++) {
        const struct field *f = q->fields[i];
        printf("%s%s", i > 0 ? ", " : "", f->name);
        if (f->unit[0] != '\0')
            printf(" [%s]", f->unit);
    }
    putchar('\n');
}

static void print_row(const struct query *q, nvmlDevice_t device, unsigned int index)
{
    for (size_t i = 0; i < q->count; i++) {
        const struct field *f = q->fields[i];
        char text[TEXT] = "";
        bool ok = field_text(f, device, index, text) == NVML_SUCCESS, unit = ok && q->units && f->unit[0] != '\0';
        printf(ok ? "%s%s%s%s" : "%s[%s%s%s]", i > 0 ? ", " : "", text, unit ? " " : "", unit ? f->unit : "");
    }
    putchar('\n');
}

static int run_query(const struct query *q)
{
    unsigned int count = 0;
    int status = 0;
    CALL(nvmlDeviceGetCount_v2, &count);
    if (count == 0)
        return no_devices();
    if (q->header)
        print_header(q);
    for (unsigned int i = 0; i < count; i++) {
        nvmlDevice_t device;
        nvmlReturn_t result = open_gpu(i, &device);
        if (result == NVML_SUCCESS)
            print_row(q, device, i);
        else
            status = exit_status(result);
    }
    return status;
}

// Reads the names of --query-gpu. False: one is unknown, and an error was printed.
static bool parse_fields(char *list, struct query *q)
{
    for (char *name; (name = strsep(&list, ",")) != NULL;) {
        const struct field *f = find_field(name + strspn(name, " "));
        if (f == NULL || q->count == MAX_QUERY) {
            printf("Field \"%s\" is not a valid field to query.\n\n", name);
            return false;
        }
        q->fields[q->count++] = f;
    }
    return true;
}

static bool parse_format(char *list, struct query *q)
{
    bool csv = false;
    q->header = q->units = true;
    for (char *word; (word = strsep(&list, ",")) != NULL;) {
        word += strspn(word, " ");
        csv |= strcmp(word, "csv") == 0;
        q->header &= strcmp(word, "noheader") != 0;
        q->units &= strcmp(word, "nounits") != 0;
    }
    if (!csv)
        puts("\"--format\" must name csv, as in --format=csv,noheader,nounits\n");
    return csv;
}

static void usage(void)
{
    puts("NVIDIA System Management Interface of a simulated driver\n\n"
         "nvidia-smi [OPTION]...\n\n"
         "    -h,   --help                Print usage information and exit.\n"
         "    -L,   --list-gpus           Display a list of GPUs connected to the system.\n"
         "          --query-gpu=FIELD,... Print the fields of each GPU.\n"
         "          --format=csv[,noheader][,nounits]\n"
         "                                How to print them.\n"
         "    no option                   Show a summary of the GPUs.\n\n"
         "Fields:");
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        printf("    %s\n", fields[i].name);
    puts("\nExit status: 0 success, 2 invalid argument, 6 no GPU, 9 driver not loaded, 12 library not found, 15 a GPU "
         "is lost;\nother errors of the library by their number, 255 for unknown ones.");
}

// The value of "--name=value", or NULL if the argument is not of that name.
static char *option_value(char *argument, const char *name)
{
    size_t length = strlen(name);
    if (strncmp(argument, name, length) != 0 || argument[length] != '=')
        return NULL;
    return argument + length + 1;
}

enum command { SUMMARY, LIST, QUERY };

static int run(enum command command, const struct query *q)
{
    int status = initialize();
    if (status != 0)
        return status;
    status = command == LIST ? list_gpus() : command == QUERY ? run_query(q) : summary();
    CALL(nvmlShutdown);
    return status;
}

int main(int argc, char **argv)
{
    enum command command = SUMMARY;
    struct query q = {0};
    bool formatted = false;
    for (int i = 1; i < argc; i++) {
        char *value;
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) {
            usage();
            return 0;
        }
        if (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0) {
            command = LIST;
        } else if ((value = option_value(argv[i], "--query-gpu")) != NULL) {
            command = QUERY;
            if (!parse_fields(value, &q))
                return EXIT_INVALID;
        } else if ((value = option_value(argv[i], "--format")) != NULL) {
            formatted = true;
            if (!parse_format(value, &q))
                return EXIT_INVALID;
        } else {
            printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n");
            return EXIT_INVALID;
        }
    }
    if ((command == QUERY) != formatted) {
        puts("\"--query-gpu\" and \"--format\" go together. Please run 'nvidia-smi -h' for help.\n");
        return EXIT_INVALID;
    }
    return run(command, &q);
}
