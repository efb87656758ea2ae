// nvidia-cuda-mps-control for the simulated driver: the control daemon and its front end. Replies are those of
// driver 535, as observed. It has the commands that this project uses.
#define _GNU_SOURCE
#include "mps.h"
#include "mps_daemon.h"

static int no_daemon(void)
{
    fputs("Cannot find MPS control daemon process\n", stderr);
    return 1;
}

// Sends the daemon a command and prints the answer. Negative: continue; otherwise the exit status.
static int command(int fd, const char *line, size_t length)
{
    static char answer[MPS_ANSWER];
    if (!mps_sendf(fd, "cmd %.*s", (int)length, line) || mps_receive(fd, answer, sizeof(answer)) <= 0) {
        fputs("Cannot send command to MPS control daemon process\n", stderr);
        return 1;
    }
    fputs(answer + 1, stdout);
    fflush(stdout);
    return answer[0] == '.' ? -1 : answer[0] - '0';
}

// The front end: commands from standard input, a line each, until its end or the daemon's.
static int front_end(void)
{
    int fd = mps_connect("control");
    if (fd < 0 || !mps_sendf(fd, "ui"))
        return no_daemon();
    char *line = NULL;
    size_t size = 0;
    int status = -1;
    for (ssize_t length; status < 0 && (length = getline(&line, &size, stdin)) >= 0;)
        status = command(fd, line, strcspn(line, "\n"));
    free(line);
    close(fd);
    return status < 0 ? 0 : status;
}

int main(int argc, char **argv)
{
    return argc > 1 && strcmp(argv[1], "-f") == 0 ? run_daemon() : front_end();
}
