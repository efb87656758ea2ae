// Reads mutated descriptions and state files with the library's own reader: fuzz ROUNDS SEED TEXT-FILE. It is linked
// with the library's sources and compiled with sanitizers, so a bad access or overflow ends it. The same seed makes the
// same texts.
#include "../../lib/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_SIZE = 1 << 16 };

static uint64_t random_state;

static uint32_t next_random(void)
{
    random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
    return (uint32_t)(random_state >> 33);
}

static size_t below(size_t n) { return n == 0 ? 0 : next_random() % n; }

static const char *const pieces[] = {
    "gpu=", "index=", "uuid=", "%", "%0", "%00", "%zz", "=", " ", "\n", "\r\n", "-1", "18446744073709551616", "0x", "0xffffffffff",
    "99999999999999999999999999", "fault ", "mig gpu=3 ", "clearmig gpu=", "starts=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17",
    "bus=ffffffff:ff:1f.7", "bus=:::", "cc=99999.99999", "nvlink gpu=0 port=35 remote=0000:01:00.0\n", "gpu index=63\n",
    "gi=63 ci=15", "gi=64", " gi=99 ", " ci=16 ", " ci=99 ", "event seq=1 gpu=0 type=8\n", "latency ns=1\n", "\xff\xfe\x80", "machine driver=1\n", "kind=lost",
};

// Changes a text in place a few times; returns its new length.
static size_t mutate(char *text, size_t length)
{
    for (size_t n = 1 + below(8); n > 0; n--) {
        const char *piece = pieces[below(sizeof(pieces) / sizeof(pieces[0]))];
        size_t at = below(length + 1), size = strlen(piece);
        switch (below(5)) {
        case 0: // insert
            if (length + size < TEXT_SIZE) {
                memmove(text + at + size, text + at, length - at);
                memcpy(text + at, piece, size);
                length += size;
            }
            break;
        case 1: // overwrite
            if (at + size <= length)
                memcpy(text + at, piece, size);
            break;
        case 2: // delete
            size = below(length - at + 1) % 64;
            memmove(text + at, text + at + size, length - at - size);
            length -= size;
            break;
        case 3: // a random byte
            if (at < length)
                text[at] = (char)next_random();
            break;
        default: // the end is cut off
            if (below(20) == 0)
                length = at;
        }
    }
    return length;
}

static void require(bool condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "after a malformed text: %s\n", what);
        abort();
    }
}

static bool ends(const char text[TEXT_MAX]) { return memchr(text, '\0', TEXT_MAX) != NULL; }

// What the rest of the library assumes about every world.
static void check(const struct world *w)
{
    require(w->mig_count <= MAX_MIGS && w->profile_count <= MAX_PROFILES, "tables are not overrun");
    require(w->fault_count <= MAX_FAULTS && w->event_count <= MAX_EVENTS, "lists are not overrun");
    require(ends(w->machine.driver) && ends(w->machine.libdir), "the machine's texts end");
    for (size_t i = 0; i < MAX_GPUS; i++) {
        const struct gpu *g = &w->gpus[i];
        require(ends(g->uuid) && ends(g->name) && ends(g->serial) && ends(g->brand), "a GPU's texts end");
        require(g->numa >= -1 && g->numa < 1024 && g->device < 32 && g->function < 8, "a GPU's numbers are in range");
        require(strlen(g->serial) < NVML_DEVICE_SERIAL_BUFFER_SIZE, "a serial number fits its caller's buffer");
        require(strlen(g->vbios) < NVML_DEVICE_VBIOS_VERSION_BUFFER_SIZE, "a VBIOS version fits its caller's buffer");
    }
    for (size_t i = 0; i < w->mig_count; i++) {
        const struct mig *m = &w->migs[i];
        require(m->gpu < MAX_GPUS && m->gi < MAX_GI && m->ci < MAX_CI, "a MIG device has a handle");
        require(i == 0 || w->migs[i - 1].gpu <= m->gpu, "MIG devices are sorted");
    }
    for (size_t i = 0; i < w->profile_count; i++)
        require(w->profiles[i].gpu < MAX_GPUS && w->profiles[i].start_count <= MAX_STARTS, "a profile is in range");
    for (size_t i = 0; i < w->event_count; i++)
        require(w->events[i].gpu < MAX_GPUS, "an event's GPU is in range");
}

// Passes exactly the text's bytes to the reader, so that the sanitizer detects a read of one more.
static struct world *read_exactly(const struct world *base, const char *text, size_t length)
{
    char *copy = malloc(length > 0 ? length : 1);
    struct world *w = world_new(base);
    if (copy == NULL || w == NULL)
        abort();
    memcpy(copy, text, length);
    world_read(w, copy, length);
    free(copy);
    check(w);
    return w;
}

int main(int argc, char **argv)
{
    static char original[TEXT_SIZE], text[TEXT_SIZE];
    if (argc != 4)
        return 2;
    FILE *f = fopen(argv[3], "rb");
    if (f == NULL)
        return 2;
    size_t size = fread(original, 1, sizeof(original) / 2, f);
    fclose(f);
    random_state = strtoull(argv[2], NULL, 10);
    struct world *base = read_exactly(NULL, original, size);
    for (long rounds = strtol(argv[1], NULL, 10); rounds > 0; rounds--) {
        memcpy(text, original, size);
        size_t length = mutate(text, size);
        world_free(read_exactly(rounds % 2 != 0 ? base : NULL, text, length));
    }
    world_free(base);
    return 0;
}
