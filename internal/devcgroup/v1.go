package devcgroup

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// allowsAll reports whether a devices.list file is that of a cgroup that allows all devices. The kernel does not list
// the devices that such a cgroup denies.
func allowsAll(list string) bool { return strings.TrimSpace(list) == "a *:* rwm" }

// allowByList adds the rules to the list of cgroup v1.
//
// The kernel keeps one entry for each device as it is written: "c 195:0" and "c 195:*" are two entries, and writing one
// does not change the other. So the rule adds, and undo denies again, only the access that the device's own entry does
// not have.
func (c *cgroup) allowByList(change *Change, rules []Rule) error {
	allow, err := c.dir.OpenFile("devices.allow", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer allow.Close()
	deny, err := c.dir.OpenFile("devices.deny", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	var added []Rule
	change.undo = append(change.undo, func() error {
		defer deny.Close()
		var errs []error
		for _, r := range added {
			if _, err := deny.WriteString(r.String()); err != nil {
				errs = append(errs, fmt.Errorf("deny %q again: %w", r, err))
			}
		}
		return errors.Join(errs...)
	})
	for _, r := range rules {
		if r.Access = lacking(c.list, r); r.Access == "" {
			continue
		}
		if _, err := allow.WriteString(r.String()); errors.Is(err, unix.EPERM) {
			return fmt.Errorf("allow %q: the cgroup above does not allow it: %w", r, err)
		} else if err != nil {
			return fmt.Errorf("allow %q: %w", r, err)
		}
		added = append(added, r)
	}
	return nil
}

// lacking returns the access that a devices.list file does not have for the device of a rule by the device's own entry.
func lacking(list string, r Rule) string {
	access := r.Access
	for line := range strings.Lines(list) {
		if own, ok := strings.CutPrefix(line, r.device()+" "); ok {
			access = without(access, own)
		}
	}
	return access
}

// without returns the letters of access that are not in other.
func without(access, other string) string {
	return strings.Map(func(letter rune) rune {
		if strings.ContainsRune(other, letter) {
			return -1
		}
		return letter
	}, access)
}
