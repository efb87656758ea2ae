// The MPS server of the simulated driver. The control daemon starts it for a user, with the limits in its environment;
// it serves the clients that the daemon passes to it.
#define _GNU_SOURCE
#include "mps.h"
#include "mps_devices.h"

#include <poll.h>
#include <signal.h>
#include <sys/random.h>

struct client {
    int fd; // -1: the place is free
    pid_t pid;
    bool connected;
};

static struct {
    int daemon;
    char uuid[MPS_UUID];
    long long limit; // of memory, in bytes; 0 is none
    double threads;
    char shm[64], token[2 * MPS_TOKEN + 1];
    struct client clients[MPS_CLIENTS];
    bool closing;
} self = {.daemon = -1};

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    mps_log("Server", format, arguments);
    va_end(arguments);
}

// Finds the device of CUDA_VISIBLE_DEVICES, a UUID. False: it does not exist.
static bool find_device(void)
{
    nvmlDevice_t handle;
    const struct mps_nvml *nvml = mps_library();
    const char *uuid = mps_setting("CUDA_VISIBLE_DEVICES", "");
    if (nvml == NULL || nvml->by_uuid(uuid, &handle) != NVML_SUCCESS ||
        nvml->uuid(handle, self.uuid, MPS_UUID) != NVML_SUCCESS) {
        say("Failed to create server context: device %s of CUDA_VISIBLE_DEVICES does not exist", uuid);
        return false;
    }
    return true;
}

static void set_threads(const char *text)
{
    self.threads = atof(text);
    say("Active Threads Percentage set to %.1f", self.threads);
}

// Sets the limit of memory of device 0, such as "0=1000M".
static void set_limit(const char *text)
{
    long long value;
    if (sscanf(text, "0=%lldM", &value) == 1)
        self.limit = value << 20;
}

// Makes the shared memory: a file in /dev/shm with a token, which only clients with the same /dev/shm can read.
static bool make_shm(void)
{
    unsigned char random[MPS_TOKEN];
    char path[PATH_MAX];
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return false;
    for (size_t i = 0; i < sizeof(random); i++)
        snprintf(self.token + 2 * i, 3, "%02x", random[i]);
    snprintf(self.shm, sizeof(self.shm), "cuda.shm.%x.%x.1", getuid(), (unsigned int)getpid());
    mps_path(path, sizeof(path), "/dev/shm", self.shm);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool made = fd >= 0 && write(fd, self.token, sizeof(self.token) - 1) == (ssize_t)sizeof(self.token) - 1;
    say(made ? "Created shared memory region /%s" : "Failed to create shared memory region /%s", self.shm);
    if (fd >= 0)
        close(fd);
    return made;
}

static void remove_shm(void)
{
    char path[PATH_MAX];
    if (self.shm[0] != '\0' && mps_path(path, sizeof(path), "/dev/shm", self.shm))
        unlink(path);
}

static void drop(struct client *c)
{
    if (c->connected) {
        say("Client {PID: %d, Context ID: 0} disconnected", c->pid);
        mps_sendf(self.daemon, "gone %d", c->pid);
    }
    close(c->fd);
    *c = (struct client){.fd = -1};
}

// Accepts a client that the daemon passed on, and requests the token.
static void take(int fd)
{
    struct ucred who;
    socklen_t size = sizeof(who);
    for (size_t i = 0; i < MPS_CLIENTS; i++) {
        struct client *c = &self.clients[i];
        if (c->fd >= 0)
            continue;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0)
            break;
        *c = (struct client){.fd = fd, .pid = who.pid};
        say("Received new client request for {PID: %d, Context ID: 0}", who.pid);
        if (!mps_sendf(fd, "shm %s", self.shm))
            drop(c);
        return;
    }
    mps_sendf(fd, "the server has as many clients as it can have: %d", MPS_CLIENTS);
    close(fd);
}

// The reply to a client: the server, its limits, its device.
static bool welcome(int fd)
{
    return mps_sendf(fd, "welcome server=%d active_thread_percentage=%.1f\ndevice=0 uuid=%s pinned_mem_limit=%lld\n",
                     getpid(), self.threads, self.uuid, self.limit);
}

static void hear_client(struct client *c)
{
    char message[MPS_MESSAGE];
    const char *token = mps_receive(c->fd, message, sizeof(message)) > 0 ? mps_after(message, "token") : NULL;
    if (token == NULL || c->connected || strcmp(token, self.token) != 0) {
        if (!c->connected)
            say("Client {PID: %d, Context ID: 0} does not share memory with the server", c->pid);
        drop(c);
        return;
    }
    // The daemon first: it must have the client before the client continues.
    c->connected = mps_sendf(self.daemon, "client %d", c->pid);
    say("Client {PID: %d, Context ID: 0} connected", c->pid);
    if (!c->connected || !welcome(c->fd))
        drop(c);
}

// Receives a message of the daemon: "take" with a client's socket, limits for later clients, or "shutdown". False: the
// daemon has ended.
static bool hear_daemon(void)
{
    char message[MPS_MESSAGE] = "";
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec data = {message, sizeof(message) - 1};
    struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    if (recvmsg(self.daemon, &m, MSG_CMSG_CLOEXEC) <= 0)
        return false;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&m);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS) {
        int fd;
        memcpy(&fd, CMSG_DATA(header), sizeof(fd));
        take(fd);
    }
    if (mps_after(message, "threads") != NULL)
        set_threads(mps_after(message, "threads"));
    if (mps_after(message, "limit") != NULL)
        set_limit(mps_after(message, "limit"));
    self.closing |= mps_after(message, "shutdown") != NULL;
    return true;
}

// Serves the daemon and the clients until the end. Returns the exit status.
static int serve(void)
{
    struct pollfd fds[MPS_CLIENTS + 1];
    for (;;) {
        bool idle = true;
        fds[0] = (struct pollfd){.fd = self.daemon, .events = POLLIN};
        for (size_t i = 0; i < MPS_CLIENTS; i++) {
            fds[i + 1] = (struct pollfd){.fd = self.clients[i].fd, .events = POLLIN};
            idle &= self.clients[i].fd < 0;
        }
        if (self.closing && idle)
            return 0;
        if (poll(fds, MPS_CLIENTS + 1, -1) < 0 && errno != EINTR)
            return 1;
        for (size_t i = 0; i < MPS_CLIENTS; i++)
            if (fds[i + 1].revents != 0)
                hear_client(&self.clients[i]);
        if (fds[0].revents != 0 && !hear_daemon())
            return 1;
    }
}

static bool start(void)
{
    for (size_t i = 0; i < MPS_CLIENTS; i++)
        self.clients[i].fd = -1;
    say("Connecting to control daemon on socket: %s/control", mps_pipe_directory());
    self.daemon = mps_connect("control");
    if (self.daemon < 0 || !find_device() || !make_shm())
        return false;
    set_threads(mps_setting("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"));
    set_limit(mps_setting("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""));
    say("Server has started");
    return mps_sendf(self.daemon, "server %s", self.shm);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN); // the daemon may end while it is written to
    int status = start() ? serve() : 1;
    remove_shm();
    say("Server exits with status %d", status);
    return status;
}
