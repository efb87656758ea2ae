package unixsocket

import (
	"math"
	"net"
	"sync"

	"golang.org/x/sys/unix"
)

// userPart is the part of a socket's connections that one user can have, as a divisor: with 4 a quarter.
const userPart = 4

// limited is a listener that closes connections above the limits. Root and this process's user can have max
// connections each, whatever the others have: otherwise any user who may connect could lock out the administrator.
// Each other user can have a part of max, and all of them together max. A user with subordinate UIDs, as rootless
// containers need them, counts as several: he can lock out other users, but not root.
type limited struct {
	net.Listener

	max int

	mu     sync.Mutex
	of     map[uint32]int // open connections by UID; without an entry for none
	others int            // those of all users but root and this process's user
}

// peerConn is a connection that counts until it is closed, also after a server has given it away (http.Hijacker).
type peerConn struct {
	*net.UnixConn

	peer  *unix.Ucred
	leave func()
}

// Close closes the connection. It no longer counts then.
func (c *peerConn) Close() error {
	defer c.leave()
	return c.UnixConn.Close()
}

// Accept returns the next connection within the limits, and closes those above them.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer := peerOf(c)
		if l.enter(peer) {
			return &peerConn{c.(*net.UnixConn), peer, sync.OnceFunc(func() { l.leave(peer) })}, nil
		}
		_ = c.Close()
	}
}

// enter counts a connection. It reports false if the limits do not allow it.
func (l *limited) enter(peer *unix.Ucred) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	uid := userOf(peer)
	switch {
	case IsOwn(peer):
		if l.of[uid] >= l.max {
			return false
		}
	case l.of[uid] >= max(1, l.max/userPart), l.others >= l.max:
		return false
	default:
		l.others++
	}
	l.of[uid]++
	return true
}

func (l *limited) leave(peer *unix.Ucred) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !IsOwn(peer) {
		l.others--
	}
	uid := userOf(peer)
	if l.of[uid]--; l.of[uid] == 0 {
		delete(l.of, uid)
	}
}

// userOf returns a peer's UID, or one that no user has if the peer is not known.
func userOf(peer *unix.Ucred) uint32 {
	if peer == nil {
		return math.MaxUint32
	}
	return peer.Uid
}
