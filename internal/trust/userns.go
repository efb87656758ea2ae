package trust

import (
	"fmt"
	"os"
	"strings"
	"sync"
)

// OverflowID is the user ID of files whose owners are outside the user namespace, like /proc/sys/kernel/overflowuid.
const OverflowID = 65534

// WithoutRoot reports whether this process is in a user namespace that does not contain the host's root, like the
// programs of a rootless engine. Then it only has the rights of the user who made the namespace.
var WithoutRoot = sync.OnceValue(func() bool {
	data, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && withoutRoot(string(data))
})

// withoutRoot is WithoutRoot for a uid_map (user_namespaces(7)). An empty map belongs to a namespace that is not ready.
func withoutRoot(uidMap string) bool {
	for line := range strings.Lines(uidMap) {
		var inside, outside, size uint64
		if _, err := fmt.Sscan(line, &inside, &outside, &size); err != nil || outside == 0 {
			return false
		}
	}
	return uidMap != ""
}
