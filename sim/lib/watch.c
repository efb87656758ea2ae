// Waiting for a change of the state file, with inotify while threads wait. One waiting thread reads the events for all;
// when it leaves, another takes over. So a process has one inotify instance, however many sets wait: a user has few of
// them (128 by default). Without inotify the file is polled.
#define _GNU_SOURCE
#include "sim.h"

#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

// An upper limit of a sleep, since no event reports that a directory above the file was replaced.
enum { SLEEP_NS = 500000000, POLL_NS = 10000000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static unsigned int waiters;
static bool reading; // a thread reads the events
static uint64_t generation;
static int inotify = -1, wake = -1;

static void set_up(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void open_watch(void)
{
    char path[PATH_MAX];
    wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (inotify >= 0 && node_path(path, sizeof(path), "/run/gpu-sim") &&
        inotify_add_watch(inotify, path, IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_CLOSE_WRITE) >= 0)
        return;
    if (inotify >= 0)
        close(inotify);
    inotify = -1;
}

static void close_watch(void)
{
    if (inotify >= 0)
        close(inotify);
    if (wake >= 0)
        close(wake);
    inotify = wake = -1;
}

// Begins a wait. What changes after it ends the next watch_wait with the returned generation.
uint64_t watch_start(void)
{
    pthread_once(&once, set_up);
    pthread_mutex_lock(&lock);
    if (waiters++ == 0)
        open_watch();
    uint64_t now = generation;
    pthread_mutex_unlock(&lock);
    return now;
}

void watch_stop(void)
{
    pthread_mutex_lock(&lock);
    if (--waiters == 0)
        close_watch();
    pthread_mutex_unlock(&lock);
}

// Ends all waits, which check their condition again.
void watch_notify(void)
{
    pthread_mutex_lock(&lock);
    generation++;
    if (wake >= 0)
        eventfd_write(wake, 1);
    pthread_mutex_unlock(&lock);
}

// Reads all events. True: one is of the state file.
static bool state_changed(int fd)
{
    _Alignas(struct inotify_event) char buffer[4096];
    bool found = false;
    for (ssize_t size; (size = read(fd, buffer, sizeof(buffer))) > 0;)
        for (char *at = buffer; at < buffer + size;) {
            const struct inotify_event *e = (const void *)at;
            found |= e->len == 0 || strcmp(e->name, "state") == 0;
            at += sizeof(*e) + e->len;
        }
    return found;
}

// Sleeps until the state file changes, watch_notify is called, or the time is over. False: nothing changed.
static bool read_events(int watch_fd, int wake_fd, uint64_t ns)
{
    eventfd_t count;
    uint64_t limit = watch_fd >= 0 ? SLEEP_NS : POLL_NS;
    struct pollfd fds[] = {{.fd = watch_fd, .events = POLLIN}, {.fd = wake_fd, .events = POLLIN}};
    bool over = ns < limit;
    struct timespec timeout = {0, (long)(over ? ns : limit)};
    int ready = ppoll(fds, 2, &timeout, NULL);
    if (ready <= 0)
        return !over;
    bool woken = fds[1].revents != 0 && eventfd_read(wake_fd, &count) == 0;
    return (fds[0].revents != 0 && state_changed(watch_fd)) || woken;
}

// Waits until the generation differs from the given one, or the monotonic time. Returns the generation.
uint64_t watch_wait(uint64_t seen, uint64_t deadline)
{
    struct timespec until = {(time_t)(deadline / 1000000000ULL), (long)(deadline % 1000000000ULL)};
    pthread_mutex_lock(&lock);
    for (uint64_t now = monotonic_ns(); generation == seen && now < deadline; now = monotonic_ns()) {
        if (reading) {
            pthread_cond_timedwait(&changed, &lock, &until);
            continue;
        }
        int watch_fd = inotify, wake_fd = wake; // this thread is a waiter, so they stay open
        reading = true;
        pthread_mutex_unlock(&lock);
        bool news = read_events(watch_fd, wake_fd, deadline - now);
        pthread_mutex_lock(&lock);
        reading = false;
        generation += news;
        pthread_cond_broadcast(&changed);
    }
    uint64_t now = generation;
    pthread_mutex_unlock(&lock);
    return now;
}
