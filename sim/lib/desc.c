// The description of the machine in the library file: gpu-sim writes it into the ELF section .gpusim of a copy of the
// compiled library.
#define _GNU_SOURCE
#include "sim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SECTION_SIZE = 256 * 1024 };

// Volatile, since the file is changed after it was linked: the compiler must not use the initializer.
__attribute__((section(".gpusim"), used, aligned(16))) static const volatile char description[SECTION_SIZE] = {0};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct world described; // not allocated, so that a library that is closed leaves nothing behind
static bool present;

static void read_description(void)
{
    static const char magic[] = "gpusim 1\n";
    size_t length = 0;
    while (length < SECTION_SIZE && description[length] != '\0')
        length++;
    char *text = malloc(length + 1);
    if (text == NULL)
        return;
    for (size_t i = 0; i < length; i++)
        text[i] = description[i];
    world_init(&described);
    if (length >= sizeof(magic) - 1 && memcmp(text, magic, sizeof(magic) - 1) == 0)
        world_read(&described, text, length);
    free(text);
    present = described.machine.driver[0] != '\0'; // a description without a driver describes nothing
}

// The world of the description alone. It exists as long as the library and must not be released.
const struct world *description_world(void)
{
    pthread_once(&once, read_description);
    return present ? &described : NULL;
}

bool description_present(void) { return description_world() != NULL; }
