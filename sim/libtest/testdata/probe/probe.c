// Runs one case: probe LIBRARY STATE-FILE CASE [ARGUMENT]...
#define _GNU_SOURCE
#include "probe.h"
#include "cases.h"

#include <dlfcn.h>
#include <time.h>

static const char *library_path, *state_path;
static void *library;
int argument_count;
char **arguments;

void *symbol(const char *name)
{
    void *f = dlsym(library, name);
    if (f == NULL) {
        fprintf(stderr, "no function %s: %s\n", name, dlerror());
        exit(1);
    }
    return f;
}

// With the flags of go-nvml.
static void load(void)
{
    library = dlopen(library_path, RTLD_LAZY | RTLD_GLOBAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
}

void reload(void)
{
    CHECK(dlclose(library) == 0);
    CHECK(dlopen(library_path, RTLD_LAZY | RTLD_NOLOAD) == NULL); // it is really gone
    load();
}

void init(void) { OK(NV(nvmlInit_v2)()); }

nvmlDevice_t gpu(unsigned int index)
{
    nvmlDevice_t device;
    OK(NV(nvmlDeviceGetHandleByIndex_v2)(index, &device));
    return device;
}

unsigned int gpu_count(void)
{
    unsigned int count;
    OK(NV(nvmlDeviceGetCount_v2)(&count));
    return count;
}

nvmlDevice_t mig(unsigned int gpu_index, unsigned int index)
{
    nvmlDevice_t device;
    OK(NV(nvmlDeviceGetMigDeviceHandleByIndex)(gpu(gpu_index), index, &device));
    return device;
}

void set_state(const char *text)
{
    char next[4096];
    if (text == NULL) {
        remove(state_path);
        return;
    }
    snprintf(next, sizeof(next), "%s.new", state_path);
    FILE *f = fopen(next, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
    CHECK(rename(next, state_path) == 0);
}

const char *state_text(void)
{
    static char text[1 << 16];
    FILE *f = fopen(state_path, "r");
    CHECK(f != NULL);
    text[fread(text, 1, sizeof(text) - 1, f)] = '\0';
    fclose(f);
    return text;
}

double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    library_path = argv[1];
    state_path = argv[2];
    load();
    argument_count = argc - 4;
    arguments = argv + 4;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (strcmp(cases[i].name, argv[3]) == 0) {
            cases[i].run();
            return 0;
        }
    fprintf(stderr, "no case %s\n", argv[3]);
    return 2;
}
