// The functions that are not simulated.
#define _GNU_SOURCE
#include "probe.h"
#include "cases.h"

typedef nvmlReturn_t (*any)(void *, void *, void *, void *, void *, void *);

// Splits "NAME" or "NAME@"; true for the second, whose first argument is a device.
static bool takes_device(const char *argument, char name[128])
{
    size_t length = strcspn(argument, "@");
    snprintf(name, 128, "%.*s", (int)length, argument);
    return argument[length] == '@';
}

// Arguments: stubs, as for takes_device.
void case_stubs(void)
{
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < argument_count; i++) {
            char name[128];
            bool of_a_device = takes_device(arguments[i], name);
            void *device = round == 0 ? NULL : (void *)gpu(0).handle;
            nvmlReturn_t want = round == 0 ? NVML_ERROR_UNINITIALIZED : NVML_ERROR_NOT_SUPPORTED;
            nvmlReturn_t got = ((any)symbol(name))(device, NULL, NULL, NULL, NULL, NULL);
            if (got != want)
                fprintf(stderr, "%s = %d, want %d\n", name, (int)got, (int)want);
            CHECK(got == want);
            if (round == 1 && of_a_device)
                WANT(NVML_ERROR_INVALID_ARGUMENT, ((any)symbol(name))(NULL, NULL, NULL, NULL, NULL, NULL));
        }
        if (round == 0)
            init();
    }
}
