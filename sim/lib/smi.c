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
#include "smi_change.h"

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
         "    -r,   --gpu-reset           Reset the GPUs that -i names, or all.\n"
         "    -pm,  --persistence-mode=   Set persistence mode: 0 (off) or 1 (on).\n"
         "    -i,   --id=                 The GPUs, by index, UUID or PCI address, separated by commas.\n"
         "    no option                   Show a summary of the GPUs.\n\n"
         "Fields:");
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        printf("    %s\n", fields[i].name);
    puts("\nExit status: 0 success, 2 invalid argument, 6 no GPU, 9 driver not loaded, 12 library not found, 15 a GPU "
         "is lost;\nother errors of the library by their number, 255 for unknown ones and a reset that failed.");
}

// The value of "--name=value", or NULL if the argument is not of that name.
static char *option_value(char *argument, const char *name)
{
    size_t length = strlen(name);
    if (strncmp(argument, name, length) != 0 || argument[length] != '=')
        return NULL;
    return argument + length + 1;
}

enum command { SUMMARY, LIST, QUERY, RESET, PERSISTENCE };

struct options {
    enum command command;
    struct query query;
    bool formatted, persistence;
    char *ids; // of -i, or NULL
};

static int change(const struct options *o)
{
    struct selection s = {0};
    int status = select_gpus(o->ids, &s);
    if (status != 0)
        return status;
    return o->command == RESET ? reset_gpus(&s) : set_persistence(&s, o->persistence);
}

static int run(const struct options *o)
{
    int status = initialize();
    if (status != 0)
        return status;
    switch (o->command) {
    case LIST:
        status = list_gpus();
        break;
    case QUERY:
        status = run_query(&o->query);
        break;
    case RESET:
    case PERSISTENCE:
        status = change(o);
        break;
    default:
        status = summary();
    }
    CALL(nvmlShutdown);
    return status;
}

static bool is_option(const char *argument, const char *brief, const char *full)
{
    return strcmp(argument, brief) == 0 || strcmp(argument, full) == 0;
}

// The value of an option: "--name=VALUE", or the argument after "-n". NULL: it is another option.
static char *value_of(char **argv, int *i, const char *brief, const char *full)
{
    char *value = option_value(argv[*i], full);
    if (value == NULL && strcmp(argv[*i], brief) == 0 && argv[*i + 1] != NULL)
        value = argv[++*i];
    return value;
}

static bool parse_state(const char *text, bool *on)
{
    *on = strcmp(text, "1") == 0 || strcasecmp(text, "ENABLED") == 0;
    if (*on || strcmp(text, "0") == 0 || strcasecmp(text, "DISABLED") == 0)
        return true;
    printf("\"%s\" is not a valid persistence mode: want 0 or 1.\n\n", text);
    return false;
}

// Reads one option. False: it is malformed, and an error was printed.
static bool parse_option(char **argv, int *i, struct options *o)
{
    char *value;
    if (is_option(argv[*i], "-L", "--list-gpus")) {
        o->command = LIST;
    } else if (is_option(argv[*i], "-r", "--gpu-reset")) {
        o->command = RESET;
    } else if ((value = value_of(argv, i, "-i", "--id")) != NULL) {
        o->ids = value;
    } else if ((value = value_of(argv, i, "-pm", "--persistence-mode")) != NULL) {
        o->command = PERSISTENCE;
        return parse_state(value, &o->persistence);
    } else if ((value = option_value(argv[*i], "--query-gpu")) != NULL) {
        o->command = QUERY;
        return parse_fields(value, &o->query);
    } else if ((value = option_value(argv[*i], "--format")) != NULL) {
        o->formatted = true;
        return parse_format(value, &o->query);
    } else {
        printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n");
        return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    struct options o = {.command = SUMMARY};
    for (int i = 1; i < argc; i++) {
        if (is_option(argv[i], "-h", "--help")) {
            usage();
            return 0;
        }
        if (!parse_option(argv, &i, &o))
            return EXIT_INVALID;
    }
    if ((o.command == QUERY) != o.formatted) {
        puts("\"--query-gpu\" and \"--format\" go together. Please run 'nvidia-smi -h' for help.\n");
        return EXIT_INVALID;
    }
    if (o.ids != NULL && o.command != RESET && o.command != PERSISTENCE) {
        puts("\"--id\" is for --gpu-reset and --persistence-mode here. Please run 'nvidia-smi -h' for help.\n");
        return EXIT_INVALID;
    }
    return run(&o);
}
