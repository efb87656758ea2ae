// A test program for the simulated library. It is compiled with NVIDIA's header and finds every function with dlsym.
// Each case is a function; the Go tests run one case a process.
#ifndef PROBE_H
#define PROBE_H

#include <nvml.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *symbol(const char *name);
void reload(void); // closes the library and opens it again

// The library's function of a name, with the type that the header gives it.
#define NV(function) ((__typeof__(&function))symbol(#function))

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);           \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)
// Checks the result of an NVML function.
#define WANT(want, call)                                                                              \
    do {                                                                                              \
        int want_ = (int)(want), got_ = (int)(call);                                                  \
        if (got_ != want_) {                                                                          \
            fprintf(stderr, "%s:%d: %s = %d, want %d\n", __FILE__, __LINE__, #call, got_, want_);     \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)
#define OK(call) WANT(NVML_SUCCESS, call)
#define SAME(want, got)                                                                                     \
    do {                                                                                                    \
        const char *w_ = (want), *g_ = (got);                                                               \
        if (strcmp(w_, g_) != 0) {                                                                          \
            fprintf(stderr, "%s:%d: %s is \"%s\", want \"%s\"\n", __FILE__, __LINE__, #got, g_, w_);        \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)

void init(void);
nvmlDevice_t gpu(unsigned int index);
unsigned int gpu_count(void);
nvmlDevice_t mig(unsigned int gpu_index, unsigned int index);

// Replaces the node's state file as gpu-sim does; NULL removes it. The path comes from the command line.
void set_state(const char *text);
const char *state_text(void);
double seconds(void);

extern int argument_count;
extern char **arguments; // of the case

#endif
