// Declarations for the control daemon, the server and the client of the simulated Multi-Process Service. They
// communicate over sockets of type SEQPACKET; each message is a word, and after a space its argument.
#ifndef GPU_SIM_MPS_H
#define GPU_SIM_MPS_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum {
    MPS_MESSAGE = 4096,   // the longest message in bytes
    MPS_ANSWER = 65536,   // the longest reply to a command
    MPS_CLIENTS = 60,     // clients of one server, as for compute capability 7.0 and later
    MPS_TOKEN = 16,       // random bytes in the shared memory, written as twice as many digits
};

// CUDA's results for a client, by their number in cuda.h.
enum { MPS_CONNECTION_FAILED = 805, MPS_RPC_FAILURE = 806, MPS_SERVER_NOT_READY = 807, MPS_MAX_CLIENTS_REACHED = 808 };

static inline const char *mps_setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value != NULL && value[0] != '\0' ? value : otherwise;
}

static inline const char *mps_pipe_directory(void) { return mps_setting("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"); }

// The path of a file in a directory. False: it is too long.
static inline bool mps_path(char *to, size_t size, const char *directory, const char *name)
{
    int length = snprintf(to, size, "%s/%s", directory, name);
    return length > 0 && (size_t)length < size;
}

// The address of a socket in the pipe directory. False: its path is longer than an address can be.
static inline bool mps_address(struct sockaddr_un *address, const char *name)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    return mps_path(address->sun_path, sizeof(address->sun_path), mps_pipe_directory(), name);
}

// Connects to a socket in the pipe directory. Negative: errno is set.
static inline int mps_connect(const char *name)
{
    struct sockaddr_un address;
    if (!mps_address(&address, name)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

// Sends a message, unless it would have to wait for the other side.
static inline bool mps_send(int fd, const char *message, size_t length)
{
    ssize_t sent;
    do
        sent = send(fd, message, length, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)length;
}

__attribute__((format(printf, 2, 3))) static inline bool mps_sendf(int fd, const char *format, ...)
{
    char text[MPS_MESSAGE];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    return length > 0 && (size_t)length < sizeof(text) && mps_send(fd, text, (size_t)length);
}

// Receives a message and ends it with a NUL. Returns its length, or 0 or less if the other side has closed the socket.
static inline ssize_t mps_receive(int fd, char *to, size_t size)
{
    ssize_t length;
    do
        length = recv(fd, to, size - 1, 0);
    while (length < 0 && errno == EINTR);
    to[length > 0 ? length : 0] = '\0';
    return length;
}

// The argument of a message, or NULL if its first word is another.
static inline const char *mps_after(const char *message, const char *word)
{
    size_t length = strlen(word);
    if (strncmp(message, word, length) != 0 || (message[length] != ' ' && message[length] != '\0'))
        return NULL;
    return message + length + (message[length] == ' ');
}

// Prints a line of the log: the daemon and its servers run in the foreground.
static inline void mps_log(const char *part, const char *format, va_list arguments)
{
    char text[MPS_MESSAGE];
    vsnprintf(text, sizeof(text), format, arguments);
    dprintf(STDOUT_FILENO, "[%s %d] %s\n", part, getpid(), text);
}

#endif
