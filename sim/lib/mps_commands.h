// The commands of the front end. Errors in arguments are in the log only, as with the real program. A part of
// mps_control.c.
#ifndef GPU_SIM_MPS_COMMANDS_H
#define GPU_SIM_MPS_COMMANDS_H

#include "mps_state.h"

// A reply: a dot, and then the output of the front end.
struct answer {
    char text[MPS_ANSWER];
    size_t length;
};

__attribute__((format(printf, 2, 3))) static void add(struct answer *a, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(a->text + a->length, sizeof(a->text) - a->length, format, arguments);
    va_end(arguments);
    if (length > 0 && (size_t)length < sizeof(a->text) - a->length)
        a->length += (size_t)length;
}

// Replies with a line, and logs it.
__attribute__((format(printf, 2, 3))) static void reply(struct answer *a, const char *format, ...)
{
    char text[MPS_MESSAGE];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    say("%s", text);
    add(a, "%s\n", text);
}

// The server that a command names, or NULL after an error reply.
static struct server *named(struct answer *a, const char *argument)
{
    struct server *s = server_by_pid(atoi(argument));
    if (s == NULL)
        reply(a, "Server %d not found", atoi(argument));
    return s;
}

static void list_servers(struct answer *a, const char *argument)
{
    (void)argument;
    for (size_t i = 0; i < SERVERS; i++)
        if (d.servers[i].pid != 0 && d.servers[i].fd >= 0)
            add(a, "%d\n", d.servers[i].pid);
}

static void list_clients(struct answer *a, const char *argument)
{
    const struct server *s = named(a, argument);
    for (size_t i = 0; s != NULL && i < s->count; i++)
        add(a, "%d\n", s->clients[i]);
}

// Reads a percentage. False: it is malformed, which is logged.
static bool read_threads(const char *argument, double *threads)
{
    char *end;
    double percentage = strtod(argument, &end);
    bool valid = end != argument && *end == '\0' && percentage > 0 && percentage <= 100;
    if (valid)
        *threads = percentage;
    else
        say("Invalid percentage, expected between (0.0, 100.0]");
    return valid;
}

static void get_default_threads(struct answer *a, const char *argument)
{
    (void)argument;
    reply(a, "%.1f", d.threads);
}

static void set_default_threads(struct answer *a, const char *argument)
{
    read_threads(argument, &d.threads);
    get_default_threads(a, argument);
}

// The part of an argument after the server's process id.
static const char *behind_server(const char *argument)
{
    argument += strcspn(argument, " ");
    return argument + strspn(argument, " ");
}

// The limits of existing clients do not change.
static void set_threads(struct answer *a, const char *argument)
{
    struct server *s = named(a, argument);
    if (s != NULL && read_threads(behind_server(argument), &s->threads) && s->fd >= 0)
        mps_sendf(s->fd, "threads %.1f", s->threads);
    if (s != NULL)
        reply(a, "%.1f", s->threads);
}

// Rounds down to whole gigabytes, as the real program does.
static void get_default_limit(struct answer *a, const char *argument)
{
    if (strcmp(argument, "0") != 0 || d.limit == 0)
        say("No default pinned memory limit set for the device!");
    else
        reply(a, d.limit >= 1024 ? "%lldG" : "%lldM", d.limit >= 1024 ? d.limit / 1024 : d.limit);
}

// Sets the limit of device 0. Only an index counts: the real program accepts a UUID and ignores it.
static void read_limit(long long *limit, const char *argument)
{
    long long value;
    if (sscanf(argument, "0 %lldM", &value) == 1 && value > 0)
        *limit = value;
}

static void set_default_limit(struct answer *a, const char *argument)
{
    (void)a;
    read_limit(&d.limit, argument);
}

static void set_limit(struct answer *a, const char *argument)
{
    struct server *s = named(a, argument);
    if (s == NULL)
        return;
    read_limit(&s->limit, behind_server(argument));
    if (s->fd >= 0)
        mps_sendf(s->fd, "limit 0=%lldM", s->limit);
}

static const struct {
    const char *name;
    void (*run)(struct answer *, const char *);
} commands[] = {
    {"get_server_list", list_servers},
    {"get_client_list", list_clients},
    {"get_default_active_thread_percentage", get_default_threads},
    {"set_default_active_thread_percentage", set_default_threads},
    {"set_active_thread_percentage", set_threads},
    {"get_default_device_pinned_mem_limit", get_default_limit},
    {"set_default_device_pinned_mem_limit", set_default_limit},
    {"set_device_pinned_mem_limit", set_limit},
};

// Begins to shut down. The front end waits for the end.
static bool quit(struct peer *p, const char *argument)
{
    const char *timeout = mps_after(argument, "-t");
    if (p->who.uid != 0 && p->who.uid != getuid()) {
        say("Not enough privilege to execute quit command");
        return false;
    }
    p->kind = QUITTING;
    d.quitting = true;
    if (timeout != NULL) {
        say("quit command issued with timeout of %d", atoi(timeout));
        d.deadline = milliseconds() + atoi(timeout) * 1000LL;
    }
    for (size_t i = 0; i < SERVERS; i++)
        if (d.servers[i].pid != 0)
            shut_down(&d.servers[i]);
    for (size_t i = 0; i < PEERS; i++)
        if (d.peers[i].kind == WAITING)
            close_peer(&d.peers[i]);
    return true;
}

static void run_command(struct peer *p, const char *line)
{
    static struct answer a;
    a.length = 0;
    add(&a, ".");
    if (line == NULL) {
        close_peer(p);
        return;
    }
    say("Cmd:%s", line);
    const char *argument = mps_after(line, "quit");
    if (argument != NULL && quit(p, argument))
        return; // the reply follows after the shutdown
    bool known = argument != NULL;
    for (size_t i = 0; !known && i < sizeof(commands) / sizeof(commands[0]); i++)
        if ((argument = mps_after(line, commands[i].name)) != NULL) {
            commands[i].run(&a, argument);
            known = true;
        }
    if (!known)
        reply(&a, "Unknown command \"%.*s\"", (int)strcspn(line, " "), line);
    if (!mps_send(p->fd, a.text, a.length))
        close_peer(p);
}

#endif
