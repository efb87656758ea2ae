package trust

import (
	"sync"

	"gpu-cdi-plugin/internal/proc"
)

// OverflowID is the user ID that files have if their owner is outside the user namespace, like
// /proc/sys/kernel/overflowuid.
const OverflowID = 65534

// WithoutRoot reports whether this process is in a user namespace that does not contain the host's root, like the
// programs of a rootless engine. Then it has only the rights of the user who made the namespace.
var WithoutRoot = sync.OnceValue(func() bool {
	self, err := proc.Self("/proc")
	if err != nil {
		return false
	}
	defer self.Close()
	users, err := self.UIDMap()
	return err == nil && len(users) > 0 && !users.HasRoot()
})
