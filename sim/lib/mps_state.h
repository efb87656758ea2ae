// The state of the control daemon: its servers and connections. A part of mps_control.c.
#ifndef GPU_SIM_MPS_STATE_H
#define GPU_SIM_MPS_STATE_H

#include "mps.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { SERVERS = 16, PEERS = 256 };

struct server {
    pid_t pid; // 0: the place is free
    uid_t uid;
    int fd;       // -1: it is not ready yet, or its connection ended
    bool closing; // takes no more clients
    char shm[64];
    double threads;
    long long limit; // of memory of device 0, in MiB; 0 is none
    pid_t clients[MPS_CLIENTS];
    size_t count;
};

struct peer {
    enum { FREE, NEW, UI, WAITING, QUITTING } kind; // WAITING: a client without a server yet
    int fd;
    struct ucred who;
};

static struct {
    int listener, lock, signals;
    struct server servers[SERVERS];
    struct peer peers[PEERS];
    double threads;
    long long limit; // of memory of device 0, in MiB; 0 is none
    bool quitting;
    long long deadline; // when to kill the servers, in milliseconds; 0 is never
    int status;
} d = {.listener = -1, .lock = -1, .signals = -1};

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    mps_log("Control", format, arguments);
    va_end(arguments);
}

static long long milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static void close_peer(struct peer *p)
{
    close(p->fd);
    *p = (struct peer){.kind = FREE, .fd = -1};
}

static size_t servers(void)
{
    size_t count = 0;
    for (size_t i = 0; i < SERVERS; i++)
        count += d.servers[i].pid != 0;
    return count;
}

static struct server *server_by_pid(pid_t pid)
{
    for (size_t i = 0; pid > 0 && i < SERVERS; i++)
        if (d.servers[i].pid == pid)
            return &d.servers[i];
    return NULL;
}

// The server for a user's clients, or NULL.
static struct server *server_of(uid_t uid)
{
    for (size_t i = 0; i < SERVERS; i++)
        if (d.servers[i].pid != 0 && d.servers[i].uid == uid && !d.servers[i].closing)
            return &d.servers[i];
    return NULL;
}

// Executes the server with the current default limits. Does not return.
_Noreturn static void exec_server(uid_t uid)
{
    char threads[32], limit[32] = "";
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    snprintf(threads, sizeof(threads), "%.1f", d.threads);
    if (d.limit > 0)
        snprintf(limit, sizeof(limit), "0=%lldM", d.limit);
    setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", threads, 1);
    setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit, 1);
    if (uid == getuid() || setuid(uid) == 0)
        execlp("nvidia-cuda-mps-server", "nvidia-cuda-mps-server", (char *)NULL);
    say("Cannot run nvidia-cuda-mps-server for user %u: %s", uid, strerror(errno));
    _exit(1);
}

static bool start_server(uid_t uid)
{
    for (size_t i = 0; i < SERVERS; i++) {
        struct server *s = &d.servers[i];
        if (s->pid != 0)
            continue;
        pid_t pid = fork();
        if (pid == 0)
            exec_server(uid);
        if (pid < 0)
            return false;
        *s = (struct server){.pid = pid, .uid = uid, .fd = -1, .threads = d.threads, .limit = d.limit};
        say("Starting new server %d for user %u", pid, uid);
        return true;
    }
    return false;
}

// Makes a server end after its clients.
static void shut_down(struct server *s)
{
    if (!s->closing && s->fd >= 0)
        s->closing = mps_sendf(s->fd, "shutdown");
}

// Makes a peer the connection of its server.
static void adopt(struct peer *p, const char *message)
{
    struct server *s = server_by_pid(p->who.pid);
    if (s == NULL || s->fd >= 0) {
        say("NEW SERVER %d: Ignoring connection from user", p->who.pid);
        close_peer(p);
        return;
    }
    snprintf(s->shm, sizeof(s->shm), "%s", message);
    s->fd = p->fd;
    p->kind = FREE;
    p->fd = -1;
    say("NEW SERVER %d: Ready", s->pid);
    if (d.quitting)
        shut_down(s);
}

// Passes a client's connection to the server, which serves it from then on.
static void hand_over(struct server *s, struct peer *p)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
    char text[] = "take";
    struct iovec data = {text, sizeof(text) - 1};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    memcpy(CMSG_DATA(&control.header), &p->fd, sizeof(p->fd));
    if (sendmsg(s->fd, &m, MSG_NOSIGNAL) < 0)
        say("Cannot pass client %d to server %d", p->who.pid, s->pid);
    close_peer(p);
}

// Removes a server that ended, and rejects the clients that wait for one that could not start.
static void forget_server(struct server *s, int status)
{
    char path[PATH_MAX];
    say("Server %d exited with status %d", s->pid, status);
    if (status != 0 && s->shm[0] != '\0' && mps_path(path, sizeof(path), "/dev/shm", s->shm) && unlink(path) == 0)
        say("Removed Shm file at %s", path);
    for (size_t i = 0; s->shm[0] == '\0' && i < PEERS; i++)
        if (d.peers[i].kind == WAITING && d.peers[i].who.uid == s->uid)
            close_peer(&d.peers[i]);
    if (s->fd >= 0)
        close(s->fd);
    *s = (struct server){.fd = -1};
}

// A socket in the pipe directory; a daemon that was killed may have left one.
static int listen_at(const char *name, mode_t mode)
{
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (!mps_address(&address, name) || fd < 0)
        return -1;
    unlink(address.sun_path);
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 || chmod(address.sun_path, mode) != 0 ||
        listen(fd, 64) != 0)
        return -1;
    return fd;
}

static int open_in(const char *directory, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    if (!mps_path(path, sizeof(path), directory, name))
        return -1;
    int fd = open(path, flags | O_CLOEXEC, mode);
    if (fd >= 0 && (flags & O_CREAT) != 0 && fchmod(fd, mode) != 0)
        return -1;
    return fd;
}

// Locks the pipe directory and begins to listen, so that clients can connect afterwards. Returns 0, or the exit status.
static int open_daemon(void)
{
    if (access(mps_pipe_directory(), W_OK | X_OK) != 0) {
        printf("Cannot access CUDA_MPS_PIPE_DIRECTORY=%s\n", mps_pipe_directory());
        return 1;
    }
    d.lock = open_in(mps_pipe_directory(), "control_lock", O_RDWR | O_CREAT, 0666);
    if (d.lock < 0 || flock(d.lock, LOCK_EX | LOCK_NB) != 0) {
        puts("An instance of this daemon is already running");
        return 1;
    }
    d.listener = listen_at("control", 0666);
    return d.listener < 0;
}

// Prepares what the daemon needs to run.
static bool begin(void)
{
    signal(SIGPIPE, SIG_IGN); // the reader of the log may end first
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    d.signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    int pid = open_in(mps_pipe_directory(), "nvidia-cuda-mps-control.pid", O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (d.signals < 0 || pid < 0 || dprintf(pid, "%d\n", getpid()) < 0)
        return false;
    close(pid);
    for (size_t i = 0; i < SERVERS; i++)
        d.servers[i].fd = -1;
    d.threads = 100;
    say("Starting control daemon using socket %s/control", mps_pipe_directory());
    return true;
}

// Replies to "quit".
static void end_daemon(void)
{
    char path[PATH_MAX];
    if (mps_path(path, sizeof(path), mps_pipe_directory(), "nvidia-cuda-mps-control.pid"))
        unlink(path);
    close(d.lock);
    for (size_t i = 0; i < PEERS; i++)
        if (d.peers[i].kind == QUITTING)
            mps_sendf(d.peers[i].fd, "%d", d.status);
}

#endif
