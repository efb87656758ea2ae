// The control daemon: it starts servers, passes clients to them and executes commands. A part of mps_control.c.
#ifndef GPU_SIM_MPS_DAEMON_H
#define GPU_SIM_MPS_DAEMON_H

#include "mps_state.h"
#include "mps_commands.h"

#include <poll.h>
#include <sys/signalfd.h>

// Passes a waiting client to its user's server, or starts that server.
static void place(struct peer *p)
{
    bool others = false;
    for (size_t i = 0; i < SERVERS; i++) {
        struct server *s = &d.servers[i];
        if (s->pid == 0)
            continue;
        if (s->uid == p->who.uid && !s->closing) {
            if (s->fd >= 0)
                hand_over(s, p);
            return;
        }
        others = true;
        shut_down(s); // after its clients have ended, this user's server starts
    }
    if (!others && !start_server(p->who.uid))
        close_peer(p);
}

static void place_all(void)
{
    for (size_t i = 0; i < PEERS; i++)
        if (d.peers[i].kind == WAITING)
            place(&d.peers[i]);
}

// The first message of a connection: the front end, a client or a server.
static void introduce(struct peer *p, const char *message)
{
    const char *shm = mps_after(message, "server");
    if (shm != NULL) {
        adopt(p, shm);
    } else if (mps_after(message, "ui") != NULL) {
        p->kind = UI;
        say("NEW UI");
    } else if (mps_after(message, "client") != NULL && !d.quitting) {
        struct server *s = server_of(p->who.uid);
        p->kind = WAITING;
        say(s != NULL && s->fd >= 0 ? "NEW CLIENT %d from user %u: Server already exists"
                                    : "NEW CLIENT %d from user %u: Server is not ready, push client to pending list",
            p->who.pid, p->who.uid);
    } else {
        if (d.quitting)
            say("The MPS control daemon is shutting down");
        close_peer(p);
    }
}

static void hear_peer(struct peer *p)
{
    char message[MPS_MESSAGE];
    if (mps_receive(p->fd, message, sizeof(message)) <= 0) {
        if (p->kind == UI)
            say("UI closed");
        close_peer(p);
    } else if (p->kind == UI) {
        run_command(p, mps_after(message, "cmd"));
    } else if (p->kind == NEW) {
        introduce(p, message);
    } else {
        close_peer(p); // a waiting client sends nothing
    }
}

// Receives a message of a server: a client connected or disconnected.
static void hear_server(struct server *s)
{
    char message[MPS_MESSAGE];
    if (mps_receive(s->fd, message, sizeof(message)) <= 0) {
        close(s->fd);
        s->fd = -1;
        s->closing = true;
        return;
    }
    const char *came = mps_after(message, "client"), *went = mps_after(message, "gone");
    if (came != NULL && s->count < MPS_CLIENTS)
        s->clients[s->count++] = atoi(came);
    for (size_t i = 0; went != NULL && i < s->count; i++)
        if (s->clients[i] == atoi(went)) {
            s->clients[i] = s->clients[--s->count];
            return;
        }
}

// Reaps servers that have ended.
static void reap(void)
{
    struct signalfd_siginfo info;
    int status;
    if (read(d.signals, &info, sizeof(info)) < 0)
        return;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (size_t i = 0; i < SERVERS; i++)
            if (d.servers[i].pid == pid)
                forget_server(&d.servers[i], WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

static void accept_peer(void)
{
    socklen_t size = sizeof(struct ucred);
    int fd = accept4(d.listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    say("Accepting connection...");
    for (size_t i = 0; i < PEERS; i++) {
        struct peer *p = &d.peers[i];
        if (p->kind != FREE)
            continue;
        *p = (struct peer){.kind = NEW, .fd = fd};
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &p->who, &size) != 0)
            close_peer(p);
        return;
    }
    close(fd);
}

// Kills the remaining servers when the time of "quit -t" is over. Returns the milliseconds until then.
static int enforce_deadline(void)
{
    if (!d.quitting || d.deadline == 0)
        return -1;
    long long left = d.deadline - milliseconds();
    if (left > 0)
        return left > INT_MAX ? INT_MAX : (int)left;
    for (size_t i = 0; i < SERVERS; i++)
        if (d.servers[i].pid != 0 && kill(d.servers[i].pid, SIGKILL) == 0)
            d.status = 1;
    d.deadline = 0;
    return -1;
}

// Servers before peers: a command must see the effect of a reply that a client received before.
static void turn(void)
{
    struct pollfd fds[2 + SERVERS + PEERS] = {{.fd = d.signals, .events = POLLIN}, {.fd = d.listener, .events = POLLIN}};
    for (size_t i = 0; i < SERVERS; i++)
        fds[2 + i] = (struct pollfd){.fd = d.servers[i].pid != 0 ? d.servers[i].fd : -1, .events = POLLIN};
    for (size_t i = 0; i < PEERS; i++)
        fds[2 + SERVERS + i] = (struct pollfd){.fd = d.peers[i].kind != FREE ? d.peers[i].fd : -1, .events = POLLIN};
    if (poll(fds, 2 + SERVERS + PEERS, enforce_deadline()) <= 0)
        return;
    for (size_t i = 0; i < SERVERS; i++)
        if (fds[2 + i].revents != 0)
            hear_server(&d.servers[i]);
    if (fds[0].revents != 0)
        reap();
    for (size_t i = 0; i < PEERS; i++)
        if (fds[2 + SERVERS + i].revents != 0 && d.peers[i].fd == fds[2 + SERVERS + i].fd)
            hear_peer(&d.peers[i]);
    if (fds[1].revents != 0)
        accept_peer();
    place_all();
}

// Runs until "quit" was received and the servers have ended. Returns the exit status.
static int run_daemon(void)
{
    int status = open_daemon();
    if (status != 0)
        return status;
    if (!begin())
        return 1;
    while (!d.quitting || servers() > 0)
        turn();
    say("Exit with status %d", d.status);
    end_daemon();
    return d.status;
}

#endif
