package unixsocket

import (
	"math"
	"net"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fair"
)

// userPart is the part of a socket's connections that one user can have, as a divisor: with 4 a quarter.
const userPart = 4

// limited is a listener that closes connections above the limits. Root and this process's user can have max
// connections each, whatever the others have: otherwise any user who may connect could lock out the administrator.
// Each other user can have a part of max, and all of them together max. If they have that, the one who has most loses
// a connection to one who has fewer.
type limited struct {
	net.Listener

	max     int
	account func(uid uint32) uint32 // the user whose connections those of a UID are

	mu     sync.Mutex
	own    map[uint32]int // open connections of root and this process's user, by UID
	others []*peerConn    // those of all other users, in the order of arrival
	counts map[uint32]int // how many of others an account has
}

// peerConn is a connection that counts until it is closed, also after a server has given it away (http.Hijacker).
type peerConn struct {
	*net.UnixConn

	peer    *unix.Ucred
	account uint32
	leave   func()
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
		one := &peerConn{UnixConn: c.(*net.UnixConn), peer: peer, account: l.account(userOf(peer))}
		one.leave = sync.OnceFunc(func() { l.leave(one) })
		out, entered := l.enter(one)
		if out != nil {
			_ = out.Close()
		}
		if entered {
			return one, nil
		}
		_ = c.Close()
	}
}

// enter counts a connection, and reports false if the limits do not allow it. It returns a connection that is to be
// closed for it.
func (l *limited) enter(c *peerConn) (out *peerConn, entered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if IsOwn(c.peer) {
		if l.own[c.peer.Uid] >= l.max {
			return nil, false
		}
		l.own[c.peer.Uid]++
		return nil, true
	}
	if l.counts[c.account] >= max(1, l.max/userPart) {
		return nil, false
	}
	if len(l.others) >= l.max {
		var accounts []uint32
		for _, other := range l.others {
			accounts = append(accounts, other.account)
		}
		i := fair.GivesWay(accounts, c.account)
		if i < 0 {
			return nil, false
		}
		out = l.others[i]
		l.remove(i)
	}
	l.others = append(l.others, c)
	l.counts[c.account]++
	return out, true
}

func (l *limited) leave(c *peerConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if IsOwn(c.peer) {
		l.own[c.peer.Uid]--
		return
	}
	if i := slices.Index(l.others, c); i >= 0 { // otherwise it was given to another user
		l.remove(i)
	}
}

// remove removes one of others. The caller holds l.mu.
func (l *limited) remove(i int) {
	account := l.others[i].account
	if l.counts[account]--; l.counts[account] == 0 {
		delete(l.counts, account)
	}
	l.others = slices.Delete(l.others, i, i+1)
}

// userOf returns a peer's UID, or one that no user has if the peer is not known.
func userOf(peer *unix.Ucred) uint32 {
	if peer == nil {
		return math.MaxUint32
	}
	return peer.Uid
}
