// A program that uses MPS as a CUDA program would: it connects through the pipe directory, prints the server's reply,
// and stays connected for some seconds. It belongs to the simulation and not to the driver.
#define _GNU_SOURCE
#include "mps.h"
#include "mps_devices.h"

#include <poll.h>
#include <signal.h>

enum { WITHOUT_MPS = 3 };

static int failed(int result, const char *why)
{
    fprintf(stderr, "MPS error %d: %s\n", result, why);
    return 1;
}

// Reads the token from the server's shared memory: a file in /dev/shm, which must be the server's.
static bool read_token(const char *name, char *token, size_t size)
{
    char path[PATH_MAX];
    if (strchr(name, '/') != NULL || !mps_path(path, sizeof(path), "/dev/shm", name))
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, token, size - 1);
    close(fd);
    token[length > 0 ? length : 0] = '\0';
    return length > 0;
}

// This process must be able to open every device of the server: a client submits work to the GPU itself.
static bool sees_devices(const char *welcome)
{
    char uuid[MPS_UUID];
    for (const char *at = welcome; (at = strstr(at, " uuid=")) != NULL; at++)
        if (sscanf(at, " uuid=%95[^ \n]", uuid) != 1 || !mps_device_exists(uuid))
            return false;
    return true;
}

// Stays connected until the time is over. False: the server closed the connection before.
static bool stay(int fd, long seconds)
{
    struct timespec now, end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += seconds;
    for (;;) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        long long left = (end.tv_sec - now.tv_sec) * 1000LL + (end.tv_nsec - now.tv_nsec) / 1000000;
        if (left <= 0)
            return true;
        struct pollfd server = {.fd = fd, .events = POLLIN};
        if (poll(&server, 1, left > INT_MAX ? INT_MAX : (int)left) > 0)
            return false;
    }
}

static int use(int fd, long seconds)
{
    char message[MPS_MESSAGE], token[2 * MPS_TOKEN + 1], why[MPS_MESSAGE + 64];
    if (!mps_sendf(fd, "client") || mps_receive(fd, message, sizeof(message)) <= 0)
        return failed(MPS_SERVER_NOT_READY, "the MPS server did not start or is shutting down");
    const char *name = mps_after(message, "shm");
    if (name == NULL)
        return failed(MPS_MAX_CLIENTS_REACHED, message);
    if (!read_token(name, token, sizeof(token))) {
        snprintf(why, sizeof(why), "the server's shared memory /dev/shm/%s is not here: %s", name, strerror(errno));
        return failed(MPS_CONNECTION_FAILED, why);
    }
    if (!mps_sendf(fd, "token %s", token) || mps_receive(fd, message, sizeof(message)) <= 0)
        return failed(MPS_CONNECTION_FAILED, "the server does not know what is in the shared memory");
    const char *welcome = mps_after(message, "welcome");
    if (welcome == NULL || !sees_devices(welcome))
        return failed(MPS_CONNECTION_FAILED, "the server has a device that is not here");
    printf("%s", welcome);
    fflush(stdout);
    return stay(fd, seconds) ? 0 : failed(MPS_RPC_FAILURE, "the MPS server is gone");
}

// The first process of a container ends at a signal only if it has a handler for it.
static void terminated(int sig)
{
    (void)sig;
    _exit(0);
}

static int usage(void)
{
    puts("cuda-mps-client [SECONDS]\n\n"
         "Connects to the MPS control daemon of $CUDA_MPS_PIPE_DIRECTORY as a CUDA program does, prints the server's\n"
         "process id, its limits and its devices, and stays connected for that time.\n\n"
         "Exit status: 0 connected until the end, 1 an error of MPS, 2 a usage error, 3 no daemon, so a CUDA\n"
         "program would run without MPS.");
    return 2;
}

int main(int argc, char **argv)
{
    char *end = NULL;
    long seconds = argc > 1 ? strtol(argv[1], &end, 10) : 0;
    if (argc > 2 || seconds < 0 || seconds > 86400 || (end != NULL && (end == argv[1] || *end != '\0')))
        return usage();
    signal(SIGTERM, terminated);
    int fd = mps_connect("control");
    if (fd < 0) {
        fprintf(stderr, "without MPS: %s/control: %s\n", mps_pipe_directory(), strerror(errno));
        return WITHOUT_MPS;
    }
    int status = use(fd, seconds);
    close(fd);
    return status;
}
