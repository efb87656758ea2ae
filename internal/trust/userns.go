package trust

import (
	"fmt"
	"os"
	"strings"
	"sync"
)

// OverflowID is the user ID that files of users outside the namespace have inside it, as in
// /proc/sys/kernel/overflowuid.
const OverflowID = 65534

// WithoutRoot reports whether this process is in a user namespace in which no user is the host's root, as the programs
// of a rootless engine are. It has only the rights of the user who made the namespace then.
var WithoutRoot = sync.OnceValue(func() bool {
	data, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && withoutRoot(string(data))
})

// withoutRoot is WithoutRoot for a uid_map (user_namespaces(7)). One without lines is of a namespace that is not ready.
func withoutRoot(uidMap string) bool {
	for line := range strings.Lines(uidMap) {
		var inside, outside, size uint64
		if _, err := fmt.Sscan(line, &inside, &outside, &size); err != nil || outside == 0 {
			return false
		}
	}
	return uidMap != ""
}
