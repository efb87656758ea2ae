package pluginsocket

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc/stats"

	"gpu-cdi-plugin/internal/wake"
)

// Connections counts the open connections of a gRPC server. Its methods may be called concurrently.
type Connections struct {
	// Closed is woken when the last one was closed; optional.
	Closed wake.Chan

	open atomic.Int32
	lost atomic.Bool // whether the last one was closed
}

var _ stats.Handler = (*Connections)(nil)

// Open reports whether there is a connection.
func (c *Connections) Open() bool { return c.open.Load() > 0 }

// Lost reports whether there is no connection, and was one since the last call of Forget.
func (c *Connections) Lost() bool { return c.lost.Load() && !c.Open() }

// Forget makes Lost return false until a connection is closed.
func (c *Connections) Forget() { c.lost.Store(false) }

// HandleConn implements stats.Handler.
func (c *Connections) HandleConn(_ context.Context, s stats.ConnStats) {
	switch s.(type) {
	case *stats.ConnBegin:
		c.open.Add(1)
	case *stats.ConnEnd:
		if c.open.Add(-1) == 0 {
			c.lost.Store(true)
			c.Closed.Wake()
		}
	}
}

// TagConn implements stats.Handler.
func (c *Connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// TagRPC implements stats.Handler.
func (c *Connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (c *Connections) HandleRPC(context.Context, stats.RPCStats) {}
