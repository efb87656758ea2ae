package devcgroup

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// allowsAll reports whether a devices.list file belongs to a cgroup that allows all devices. The kernel does not list
// the devices that such a cgroup denies.
func allowsAll(list string) bool { return strings.TrimSpace(list) == "a *:* rwm" }

// allowByList adds the rules to the list of cgroup v1.
func (c *cgroup) allowByList(rules []Rule) error {
	allow, err := c.dir.OpenFile("devices.allow", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer allow.Close()
	for _, r := range rules {
		_, err := allow.WriteString(r.String())
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("allow %q: the cgroup above does not allow it: %w", r, err)
		}
		if err != nil {
			return fmt.Errorf("allow %q: %w", r, err)
		}
	}
	return nil
}
