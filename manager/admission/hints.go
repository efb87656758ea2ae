package admission

import (
	"errors"
)

// maxNodes is the largest number of NUMA nodes with devices of one resource for which there are hints. Their number is
// 2^maxNodes.
const maxNodes = 16

// ErrTooManyNodes means that the devices of a resource are on more NUMA nodes than hints can be made for.
var ErrTooManyNodes = errors.New("devices on too many NUMA nodes")

// Hint is a set of NUMA nodes on which a request can be met.
type Hint struct {
	Nodes Nodes
	// Preferred means that no smaller set could meet the request even if no pod had any device.
	Preferred bool
}

// Hints returns the sets of the machine's NUMA nodes on which a request can be met, as the kubelet does. It is nil if
// any nodes will do, as no device of the resource has a NUMA node or nothing is requested. It is empty, and not nil, if
// there are no such nodes.
//
// A request for a container that has its devices gets hints of these devices alone. Errors: ErrTooManyNodes, and
// *dialect.CrashError.
func (p *Pool) Hints(machine Nodes, r Request) ([]Hint, error) {
	return nil, nil
}
